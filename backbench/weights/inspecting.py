"""Writes the report of `backbench inspect` on a weight file, whether its trunks are whole or not."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from backbench.errors import BadInput
from backbench.weights import archs, assembling, hub_files, importing, wholeness
from backbench.weights.checkpoint import Checkpoint, from_safetensors
from backbench.weights.choosing import choose
from backbench.weights.family import TrunkMetadata, in_file
from backbench.weights.file_contents import FileContents
from backbench.weights.leftovers import leftovers
from backbench.weights.tensor_names import is_counter
from backbench.weights.weight_file import open_file


class EncoderReport(TypedDict):
    """Describes one trunk of the file."""

    encoder: str
    default: bool
    table: str
    prefix: str
    names: str  # the dialect
    arch: str
    stem: str
    matched: int  # tensors that are there
    expected: int  # tensors of a whole trunk
    absent_counters: int
    missing_statistics: str  # 'all', 'some' or 'none'
    problems: dict[str, list[str]]
    untrained: list[str]


class Allows(TypedDict):
    """How the trunk can be used."""

    reading: str
    feature_dim: int
    size: int | None  # the only side of an image that it takes, in pixels; None: any
    divisor: int  # both sides of an image must be multiples of it
    # The strides of its maps; empty: it cannot be used for detection
    strides: list[int]
    # The rule by which its authors resize position embeddings; empty: unknown
    positions: str


class Report(TypedDict, total=False):
    """A report that JSON can hold. If `importable`, it has the Checkpoint's own fields, else
    `why_not`."""

    file: str
    bytes: int
    sha256: str
    container: str
    format: str | None
    source: str | None
    also: str | None
    encoders: list[EncoderReport]
    leftovers: list[dict[str, str | int]]
    importable: bool
    why_not: str
    digest: str
    method: str
    epochs: int | None
    pixels: dict[str, Any]
    allows: Allows


def inspect(path: str | Path) -> Report:
    """Report on a file. It raises BadInput only for what cannot be opened as weights at all."""
    report: Report = {
        "format": None,
        "source": None,
        "also": None,
        "encoders": [],
        "leftovers": [],
    }
    metadata = TrunkMetadata()
    if hub_files.is_name(path):
        path = hub_files.held(path).path
    named = archs.named_weights(path, metadata)
    # 1. A name may stand for random weights
    if named is not None and named.file is None:
        drawn = importing.drawn(named.name, named.metadata)
        report["file"] = str(path)
        report["container"] = "no file: drawn anew"
        report["bytes"] = sum(t.nbytes for t in drawn.state_dict.values())
        if drawn.family.tensors_say_all:
            report["format"] = "backbench"
        else:
            report["format"] = "timm"
        return _importable(report, drawn)
    # 2. ... or for a file
    if named is not None and named.file is not None:
        path = named.file
        metadata = named.metadata
    opened = open_file(path)
    report["file"] = str(opened.path)
    report["container"] = opened.container
    report["bytes"] = opened.size
    report["sha256"] = opened.sha256
    # 3. One of our own files
    if opened.own_tensors is not None:
        own = from_safetensors(opened.path, opened.own_tensors, opened.metadata)
        whole = _encoder("trunk", True, own.arch, own.stem, own.state_dict)
        report["format"] = "backbench"
        report["encoders"] = [{**whole, "names": own.family.dialect(own.arch)}]
        return _importable(report, own)
    # 4. A file of somebody else's
    contents = FileContents(opened, metadata)
    report["encoders"] = _encoders(contents)
    report["leftovers"] = leftovers(contents)
    if contents.form is not None:
        report["format"] = contents.form.name
        report["source"] = contents.form.source
        report["also"] = contents.form.also or None
    try:
        chosen = choose(contents)
        checkpoint = assembling.checkpoint(contents, chosen, copy=False)
    except BadInput as error:
        return {**report, "importable": False, "why_not": str(error)}
    return _importable(report, checkpoint)


def _importable(report: Report, checkpoint: Checkpoint) -> Report:
    """Complete the report with the checkpoint's own fields, and the uses that its trunk allows."""
    trunk = checkpoint.blank()
    allows: Allows = {
        "reading": checkpoint.reading,
        "feature_dim": trunk.feature_dim,
        "size": trunk.size,
        "divisor": trunk.divisor,
        "strides": list(trunk.strides),
        "positions": str(checkpoint.provenance.get("positions", "")),
    }
    whole = {"importable": True, **checkpoint.about(), "allows": allows}
    return {**report, **whole}  # type: ignore[typeddict-item]


def _encoders(contents: FileContents) -> list[EncoderReport]:
    """Report on every trunk of the file, whole or not."""
    out = []
    for name, trunks in contents.encoders.items():
        is_default = name == contents.default_encoder()
        for trunk in trunks:
            tensors = contents.tables[trunk.table]
            shapes = trunk.shapes()
            state_dict = {}
            for ours, key in trunk.keys.items():
                if in_file(tensors[key]):
                    state_dict[ours] = tensors[key]
            stem = trunk.stem() or "3x3, padding unknown"
            row = _encoder(name, is_default, trunk.arch, stem, state_dict)
            row["table"] = trunk.table
            row["prefix"] = trunk.prefix
            row["names"] = trunk.dialect
            row["matched"] = len(trunk.keys)
            row["expected"] = len(shapes)
            absent = [key for key in shapes if key not in trunk.keys]
            row["absent_counters"] = len([key for key in absent if is_counter(key)])
            row["missing_statistics"] = wholeness.missing_statistics(trunk)
            problems = wholeness.problems(contents, trunk)
            row["problems"] = {kind: keys for kind, keys in problems.items() if keys}
            out.append(row)
    return out


def _encoder(
    name: str, default: bool, arch: str, stem: str, state_dict: Mapping[str, Tensor]
) -> EncoderReport:
    """Report on a trunk as if it were whole and at the top of its file."""
    return {
        "encoder": name,
        "default": default,
        "table": "",
        "prefix": "",
        "names": "",
        "arch": arch,
        "stem": stem,
        "matched": len(state_dict),
        "expected": len(state_dict),
        "absent_counters": 0,
        "missing_statistics": "none",
        "problems": {},
        "untrained": untrained_signs(state_dict),
    }


def untrained_signs(state_dict: Mapping[str, Tensor]) -> list[str]:
    """Return signs that a trunk was never trained; empty for a trained one."""
    signs = []
    # One batch in training mode moves the running variances away from 1.
    variances = [v for k, v in state_dict.items() if k.endswith("running_var")]
    if variances and all(bool((v == 1).all()) for v in variances):
        signs.append(
            "every running variance is 1: no batch was ever seen in training mode"
        )
    # torchvision draws every convolution from N(0, 2 / fan_out). Training moves the standard
    # deviations; if all of them are still within 2%, there was none.
    ratios = []
    for weight in state_dict.values():
        if weight.dim() == 4:
            fan_out = weight.shape[0] * weight.shape[2] * weight.shape[3]
            ratios.append(float(weight.float().std()) / math.sqrt(2 / fan_out))
    if ratios and all(abs(ratio - 1) < 0.02 for ratio in ratios):
        signs.append("every convolution has the scale of its initialisation")
    # The weights of norms start at 1; with zero_init_residual, the last of each block starts at 0.
    scales = [v for k, v in state_dict.items() if k.endswith("weight") and v.dim() == 1]
    if scales and all(bool(((v == 1) | (v == 0)).all()) for v in scales):
        signs.append("every norm's weight is 1 or 0")
    return signs
