"""What a weight file holds, whole or not: the report behind `backbench inspect`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from backbench.errors import BadInput
from backbench.weights import archs, timm_weights
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.checkpoint_contents import Found, stored
from backbench.weights.exporting import about
from backbench.weights.header import FORMAT
from backbench.weights.names import FoundTrunk, is_counter
from backbench.weights.sidecar_metadata import Told
from backbench.weights.weight_file import open_file


class EncoderReport(TypedDict):
    """One trunk of the file."""

    encoder: str
    default: bool
    table: str
    prefix: str
    names: str
    arch: str
    stem: str
    matched: int
    expected: int
    absent_counters: int
    missing_statistics: str
    problems: dict[str, list[str]]
    untrained: list[str]


class Allows(TypedDict):
    """What can be done with the trunk."""

    reading: str
    feature_dim: int
    size: int | None  # the only side of an image that it takes
    divisor: int
    strides: list[int]  # of its maps; none: no detection
    positions: str  # the rule by which its authors resize position embeddings, if it is known


class Report(TypedDict, total=False):
    """JSON-able. With `importable` come the Checkpoint's own fields (exporting.about), without it
    `why_not`."""

    file: str
    bytes: int
    sha256: str
    container: str
    format: str | None
    source: str | None
    also: str | None
    encoders: list[EncoderReport]
    leftovers: list[dict[str, Any]]
    importable: bool
    why_not: str
    digest: str
    method: str
    epochs: int | None
    pixels: dict[str, Any]
    allows: Allows


def inspect(path: str | Path) -> Report:
    """What a file holds. BadInput only where it cannot be opened as weights at all."""
    told = Told()
    if timm_weights.is_name(path):
        drawn = timm_weights.random(path, told)
        if drawn is not None:
            return _of_random(str(path), drawn)
        path, told = timm_weights.cached(path, told)
    opened = open_file(path)
    own = Checkpoint.load(path) if opened.metadata.get("format") == FORMAT else None
    if own is not None:
        opened = dataclasses.replace(opened, tree=dict(own.state_dict))
        if not archs.is_resnet(own.arch):
            told = Told(arch=own.arch, pixels=own.pixels, names=True)
    found = Found(opened, told)
    form = found.form if own is None else None
    report: Report = {
        "file": str(opened.path),
        "bytes": opened.size,
        "sha256": opened.sha256,
        "container": opened.container,
        "format": "backbench" if own is not None else None,
        "source": None,
        "also": None,
        "encoders": _encoders(found),
        "leftovers": [dataclasses.asdict(row) for row in found.leftovers()],
    }
    if form is not None:
        report |= {"format": form.name, "source": form.source, "also": form.also or None}
    try:
        checkpoint = own or found.checkpoint(found.choose(None), None, False, copy=False)
    except BadInput as error:
        return {**report, "importable": False, "why_not": str(error)}
    return {**report, "importable": True, **_about(checkpoint)}  # type: ignore[typeddict-item]


def _of_random(name: str, drawn: Checkpoint) -> Report:
    """Of a trunk that no file holds."""
    report: Report = {
        "file": name,
        "bytes": sum(t.numel() * t.element_size() for t in drawn.state_dict.values()),
        "container": "no file: drawn anew",
        "format": "timm" if not archs.is_resnet(drawn.arch) else "backbench",
        "source": None,
        "also": None,
        "encoders": [],
        "leftovers": [],
    }
    return {**report, "importable": True, **_about(drawn)}  # type: ignore[typeddict-item]


def _about(checkpoint: Checkpoint) -> dict[str, object]:
    return {**about(checkpoint), "allows": allows(checkpoint)}


def allows(checkpoint: Checkpoint) -> Allows:
    trunk = archs.build_trunk(checkpoint.arch, checkpoint.stem, checkpoint.reading)
    return {
        "reading": checkpoint.reading,
        "feature_dim": trunk.feature_dim,
        "size": trunk.size,
        "divisor": trunk.divisor,
        "strides": list(trunk.strides),
        "positions": str(checkpoint.provenance.get("positions", "")),
    }


def _encoders(found: Found) -> list[EncoderReport]:
    default = found.default_encoder()
    out = []
    for name, trunks in found.encoders.items():
        out += [_encoder(found, name, trunk, default=name == default) for trunk in trunks]
    return out


def _encoder(found: Found, name: str, trunk: FoundTrunk, *, default: bool) -> EncoderReport:
    tensors = found.tables[trunk.table]
    here = {ours: tensors[key] for ours, key in trunk.keys.items() if stored(tensors[key])}
    shapes = trunk.shapes()
    return {
        "encoder": name,
        "default": default,
        "table": trunk.table,
        "prefix": trunk.prefix,
        "names": trunk.dialect.name,
        "arch": trunk.arch,
        "stem": found.stem(trunk) or "3x3, padding unknown",
        "matched": len(trunk.keys),
        "expected": len(shapes),
        "absent_counters": sum(is_counter(k) and k not in trunk.keys for k in shapes),
        "missing_statistics": found.missing_statistics(trunk),
        "problems": {what: keys for what, keys in found.problems(trunk).items() if keys},
        "untrained": untrained_signs(here),
    }


def untrained_signs(state_dict: Mapping[str, Tensor]) -> list[str]:
    """What betrays a trunk that was never trained; empty for a trained one."""
    signs = []
    # A network that saw one batch has running variances other than 1.
    variances = [v for k, v in state_dict.items() if k.endswith("running_var")]
    if variances and all(bool((v == 1).all()) for v in variances):
        signs.append("every running variance is 1: no batch was ever seen in training mode")
    # torchvision draws every convolution from N(0, 2 / fan_out). Training moves the standard
    # deviations, so all of them within 2% of it is no accident.
    ratios = []
    for weight in state_dict.values():
        if weight.dim() == 4:
            fan_out = weight.shape[0] * weight.shape[2] * weight.shape[3]
            ratios.append(float(weight.float().std()) / math.sqrt(2 / fan_out))
    if ratios and all(abs(ratio - 1) < 0.02 for ratio in ratios):
        signs.append("every convolution has the scale of its initialisation")
    # Norms start at 1 (or at 0, the last of a block with zero_init_residual).
    scales = [v for k, v in state_dict.items() if k.endswith("weight") and v.dim() == 1]
    if scales and all(bool(((v == 1) | (v == 0)).all()) for v in scales):
        signs.append("every norm's weight is 1 or 0")
    return signs
