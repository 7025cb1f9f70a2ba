"""Published checkpoint formats <-> Checkpoint, and the verbs inspect, import and export.

A file is imported completely or not at all: every tensor of the trunk must be there, of the right shape, under the
names of one known format, and nothing inside the trunk may be left over.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backbench.errors import BadInput, nearest
from backbench.images.preprocess import Pixels
from backbench.runs import atomic
from backbench.runs.folder import log
from backbench.weights import formats
from backbench.weights.checkpoint import FORMAT, Checkpoint
from backbench.weights.files import Opened, open_file
from backbench.weights.formats import Format, FoundTrunk
from backbench.weights.resnet import STEMS, trunk_shapes

AUTHOR = "backbench"
# Detectron2's own weights: BGR pixels and the stride in the 1x1 convolution, neither of which shows in the tensors
_FOREIGN_AUTHORS = ("Detectron2 Model Zoo", "Caffe2", "MSRA")


def read(
    path: str | Path,
    *,
    encoder: str | None = None,
    method: str | None = None,
    epochs: int | None = None,
    name: str | None = None,
    published: str | None = None,
    stem: str | None = None,
    allow_missing_statistics: bool = False,
) -> Checkpoint:
    """Open a Checkpoint file or any published format (docs/checkpoints.md). Nothing in the file is executed.

    `encoder` chooses among several trunks and `stem` among the paddings of a 3x3 first convolution; `method`,
    `epochs`, `name` and `published` override or add what the file tells. Raises BadInput that names the tensor, key or
    prefix for anything that is not exactly one whole trunk.
    """
    opened = open_file(path)
    if opened.metadata.get("format") == FORMAT:
        if encoder is not None or stem is not None:
            raise BadInput(
                f"{path}: a backbench checkpoint holds one trunk; leave out the choice of encoder and stem"
            )
        checkpoint = Checkpoint.load(path)
    else:
        found = Found(opened)
        checkpoint = found.checkpoint(found.choose(encoder), stem, allow_missing_statistics)
    changes: dict[str, Any] = {
        k: v for k, v in (("method", method), ("epochs", epochs)) if v is not None
    }
    extra = {k: v for k, v in (("name", name), ("published", published)) if v is not None}
    if extra:
        changes["provenance"] = {**checkpoint.provenance, **extra}
    return checkpoint.replace(**changes) if changes else checkpoint


class Found:
    """What is in an opened file: its tables of tensors, its trunks, and the format that accounts for them."""

    def __init__(self, opened: Opened) -> None:
        self.opened, self.path, self.tree = opened, opened.path, opened.tree
        self._problems: dict[str, dict[str, list[str]]] = {}
        self.tables = formats.tables(opened.tree)
        self.trunks = formats.find_trunks(self.tables)
        recognised = formats.recognise(self.trunks, self.tables, opened.tree)
        self.form: Format | None = recognised[0] if recognised else None
        self.encoders: dict[str, list[FoundTrunk]] = recognised[1] if recognised else {}
        for trunk in () if recognised else self.trunks:
            name = formats.unwrapped(trunk.prefix).rstrip(".") or trunk.table or "trunk"
            self.encoders.setdefault(
                f"{trunk.table}.{name}" if name in self.encoders else name, []
            ).append(trunk)

    def default_encoder(self) -> str | None:
        """The encoder that is taken without being asked for; None where that would be a guess."""
        if self.form is not None:
            return self.form.default if self.form.default in self.encoders else None
        return next(iter(self.encoders)) if len(self.trunks) == 1 else None

    def choose(self, encoder: str | None) -> FoundTrunk:
        """The trunk to import, or BadInput that says why there is not exactly one."""
        if not self.trunks:
            raise BadInput(f"{self.path}: no ResNet trunk in it; {self._content()}{self._hint()}")
        author = self.tree.get("__author__") if isinstance(self.tree, Mapping) else None
        if author in _FOREIGN_AUTHORS:
            raise BadInput(
                f"{self.path}: weights of '{author}' take BGR pixels and have their stride in the 1x1 convolution; "
                "such a network is not one of backbench's trunks"
            )
        encoder = encoder or self.default_encoder()
        if encoder is None:
            there = " and ".join(
                f"'{trunk.label}'" for trunks in self.encoders.values() for trunk in trunks
            )
            what = (
                f"format {self.form.name} without its {self.form.default}"
                if self.form
                else "in no known format"
            )
            raise BadInput(
                f"{self.path}: holds a trunk under {there}, {what}{self._hint()}; "
                f"choose with --encoder {' or '.join(map(formats.shown, self.encoders))}"
            )
        if encoder not in self.encoders:
            raise BadInput(
                f"{self.path}: no encoder '{encoder}' in it; {nearest(encoder, self.encoders)}"
            )
        first, *again = self.encoders[encoder]
        for other in again:
            table, copy = self.tables[first.table], self.tables[other.table]
            for name, key in first.keys.items():
                if name not in other.keys or not torch.equal(table[key], copy[other.keys[name]]):
                    where = f"'{first.label}' and '{other.label}'"
                    raise BadInput(
                        f"{self.path}: {where} should be the same trunk but differ in {formats.shown(key)}"
                    )
        return first

    def checkpoint(
        self,
        trunk: FoundTrunk,
        stem: str | None,
        allow_missing_statistics: bool,
        *,
        copy: bool = True,
    ) -> Checkpoint:
        """The whole trunk as a Checkpoint, or BadInput that names the first tensors that do not fit.

        With `copy` False the tensors may still be the file's own memory.
        """
        problems, statistics = self.problems(trunk), self.missing_statistics(trunk)
        if statistics == "all" and not allow_missing_statistics:
            raise BadInput(
                f"{self.path}: '{trunk.label}' has no batch-norm statistics (running_mean, running_var), so its "
                "frozen features would be noise; --allow-missing-statistics imports it for finetuning"
            )
        wrong = [
            f"{len(keys)} {what}: {formats.first_names(keys)}"
            for what, keys in problems.items()
            if keys
        ]
        if wrong:
            form = f"format {self.form.name}" if self.form else f"no known format{self._hint()}"
            near = self._near(problems["missing"])
            raise BadInput(
                f"{self.path}: '{trunk.label}' is not a whole {trunk.arch} ({form}): {'; '.join(wrong)}{near}"
            )
        stem = self._stem(trunk, stem)
        shapes = trunk_shapes(trunk.arch, stem)
        source = self.tables[trunk.table]
        tensors = {ours: source[key].detach() for ours, key in trunk.keys.items()}
        if copy and self.opened.container == "torch zip":  # the others are not mapped from the file
            tensors = {ours: tensor.clone() for ours, tensor in tensors.items()}
        if statistics == "all":
            absent = [k for k in shapes if formats.is_statistic(k)]
            tensors |= {
                k: (torch.ones if k.endswith("var") else torch.zeros)(shapes[k]) for k in absent
            }
        own = self.tree.get("backbench") if isinstance(self.tree, Mapping) else None
        if isinstance(own, Mapping) and self.form is not None and self.form.name == "detectron2":
            return _own_detectron2(self.path, own, trunk.arch, tensors)
        return Checkpoint(
            arch=trunk.arch,
            stem=stem,
            method=self.form.method if self.form else "unknown",
            epochs=self.epochs(),
            state_dict=tensors,
            heads=self._heads(trunk) if copy else {},
            pixels=self.pixels(trunk),
            provenance={
                "name": self.path.name.split(".")[0],
                "source": self.path.name,
                "sha256": self.opened.sha256,
                "format": self.form.name if self.form else "unrecognised",
                "encoder": next(name for name, trunks in self.encoders.items() if trunk in trunks),
                "prefix": f"{trunk.table}:{trunk.prefix}" if trunk.table else trunk.prefix,
                **(
                    {"statistics": "missing in the file: mean 0 and variance 1"}
                    if statistics == "all"
                    else {}
                ),
            },
        )

    def small(self, trunk: FoundTrunk) -> bool:
        return formats.stem_shape(self.tables, trunk) == (64, 3, 3, 3)

    def stem(self, trunk: FoundTrunk) -> str | None:
        """From the shape of conv1; None for a 3x3 one whose padding neither file nor format tells."""
        if not self.small(trunk):
            return "imagenet"
        return self.form.conv3 if self.form else None

    def _stem(self, trunk: FoundTrunk, wanted: str | None) -> str:
        if wanted is not None and wanted not in STEMS:
            raise BadInput(f"unknown stem '{wanted}'; {nearest(wanted, STEMS)}")
        if wanted is not None and (wanted == "imagenet") == self.small(trunk):
            raise BadInput(
                f"{self.path}: its conv1 has shape {formats.stem_shape(self.tables, trunk)}, not '{wanted}'"
            )
        stem = wanted or self.stem(trunk)
        if stem is None:
            raise BadInput(
                f"{self.path}: the first convolution is 3x3 and the file does not tell its padding; choose --stem "
                "conv3 (padding 1: SimCLR, CLLR), conv3_p0 (MIO) or conv3_p2 (ARB, solo-learn)"
            )
        return stem

    def pixels(self, trunk: FoundTrunk) -> Pixels:
        if self.form is None:
            return Pixels()
        return (self.form.small_pixels if self.small(trunk) else None) or self.form.pixels

    def missing_statistics(self, trunk: FoundTrunk) -> str:
        """'all' where the file keeps no running mean and variance at all, 'none' or 'some'."""
        wanted = [k for k in trunk_shapes(trunk.arch) if formats.is_statistic(k)]
        absent = sum(k not in trunk.keys for k in wanted)
        return "none" if not absent else "all" if absent == len(wanted) else "some"

    def problems(self, trunk: FoundTrunk) -> dict[str, list[str]]:
        """Keys of the file (for `missing`: as they would be called) that keep the trunk from being whole."""
        if trunk.label in self._problems:
            return self._problems[trunk.label]
        shapes = trunk_shapes(trunk.arch, "conv3" if self.small(trunk) else "imagenet")
        tensors = self.tables[trunk.table]
        misshaped, unusable = [], []
        for ours, key in trunk.keys.items():
            tensor = tensors[key]
            if tuple(tensor.shape) != shapes[ours]:
                misshaped.append(f"{key} {tuple(tensor.shape)} instead of {shapes[ours]}")
            elif not _stored(tensor):
                unusable.append(f"{key} (its elements are not all in the file)")
            elif not formats.is_counter(ours) and not tensor.is_floating_point():
                unusable.append(f"{key} ({str(tensor.dtype).removeprefix('torch.')})")
            elif not formats.is_counter(ours) and not _finite(tensor):
                unusable.append(f"{key} (not finite)")
            elif ours.endswith("running_var") and (tensor < 0).any():
                unusable.append(f"{key} (negative)")
        missing = trunk.missing
        if self.missing_statistics(trunk) == "all":
            missing = [k for k in missing if not formats.is_statistic(k)]
        self._problems[trunk.label] = {
            "missing": [trunk.prefix + trunk.dialect.rename(k) for k in missing],
            "extra inside the trunk": list(trunk.extra),
            "of the wrong shape": misshaped,
            "not usable": unusable,
        }
        return self._problems[trunk.label]

    def _heads(self, trunk: FoundTrunk) -> dict[str, Tensor]:
        """What stands in the trunk's table beside the trunks and their own heads: projector, predictor; no queues."""
        others = [
            t.prefix for t in self.trunks if t.table == trunk.table and t is not trunk and t.prefix
        ]
        inside = set(trunk.keys.values())
        out = {}
        for key, tensor in self.tables[trunk.table].items():
            foreign = (
                key in inside or "queue" in key or any(key.startswith(prefix) for prefix in others)
            )
            if not foreign and _stored(tensor):
                out[formats.unwrapped(key)] = tensor.detach().clone()
        return out

    def epochs(self) -> int | None:
        """Finished epochs, where the format counts them."""
        key, add = self.form.epoch if self.form else ("", 0)
        value: Any = self.tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value + add < 100_000:
            return value + add
        return None

    def leftovers(self) -> list[dict[str, Any]]:
        """Tensors outside the trunks, by what they are for."""
        taken = {(trunk.table, key) for trunk in self.trunks for key in trunk.keys.values()}
        groups: dict[str, dict[str, Any]] = {}
        for table, tensors in self.tables.items():
            for key, tensor in tensors.items():
                if (table, key) not in taken:
                    row = groups.setdefault(
                        _group(table, key), {"tensors": 0, "elements": 0, "example": ""}
                    )
                    row["tensors"] += 1
                    row["elements"] += tensor.numel()
                    row["example"] = row["example"] or (f"{table}: {key}" if table else key)
        return [{"group": group, **row} for group, row in sorted(groups.items())]

    def _content(self) -> str:
        keys = [key for tensors in self.tables.values() for key in tensors]
        return (
            f"it holds {len(keys)} tensors: {formats.first_names(keys)}"
            if keys
            else "it holds no tensors"
        )

    def _hint(self) -> str:
        form = formats.nearest_format(self.tables) if self.form is None else None
        places = form and ", ".join(
            p.split(":")[-1] + "*" for specs in form.encoders.values() for p in specs[:2]
        )
        return f" (nearest format: {form.name}, with {places})" if form else ""

    def _near(self, missing: list[str]) -> str:
        taken = {key for trunk in self.trunks for key in trunk.keys.values()}
        free = [key for tensors in self.tables.values() for key in tensors if key not in taken]
        close = (
            difflib.get_close_matches(missing[0], free[:5000], n=1, cutoff=0.8) if missing else []
        )
        return f" (is '{formats.shown(close[0])}' meant?)" if close else ""


def _stored(tensor: Tensor) -> bool:
    """A plain CPU tensor whose elements are all in the file (strides cannot pretend to more)."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _finite(tensor: Tensor) -> bool:
    # a sum carries every nan and inf at a fraction of isfinite's cost; a finite tensor may still overflow it
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


_GROUPS = (
    ("queue", ("queue", "memory_bank", "feature_bank")),
    ("predictor", ("predict",)),
    ("prototypes", ("prototype", "center", "last_layer")),
    ("classifier", ("classifier", "linear_", "cls_head")),
    ("projector", ("proj", "fc.", "head", "neck", "mlp", "g.", "bn.")),
)


def _group(table: str, key: str) -> str:
    """What a tensor outside the trunk belongs to, judged by its name."""
    if any(part in table.lower() for part in ("optim", "scheduler", "scaler", "amp")):
        return "optimiser"
    name = formats.unwrapped(key).lower()
    return next((group for group, words in _GROUPS if any(word in name for word in words)), "other")


def untrained_signs(state_dict: Mapping[str, Tensor]) -> list[str]:
    """What betrays a trunk that was never trained; empty for a trained one.

    Statistics: a network that saw one batch has running variances other than 1. Weights: torchvision draws every
    convolution from N(0, 2 / fan_out); training moves the standard deviations, so all within 2% of it is no accident.
    """
    signs = []
    variances = [v for k, v in state_dict.items() if k.endswith("running_var")]
    if variances and all(bool((v == 1).all()) for v in variances):
        signs.append("every running variance is 1: no batch was ever seen in training mode")
    ratios = []
    for weight in (v for v in state_dict.values() if v.dim() == 4):
        fan_out = weight.shape[0] * weight.shape[2] * weight.shape[3]
        ratios.append(float(weight.float().std()) / math.sqrt(2 / fan_out))
    if ratios and all(abs(ratio - 1) < 0.02 for ratio in ratios):
        signs.append("every convolution has the scale of its initialisation")
    scales = [v for k, v in state_dict.items() if k.endswith("weight") and v.dim() == 1]
    if scales and all(bool(((v == 1) | (v == 0)).all()) for v in scales):
        signs.append("every batch-norm weight is 1 or 0")
    return signs


# --- Detectron2 ---


def to_detectron2(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names -> Detectron2's (stem.conv1.weight, res2.0.conv1.norm.weight, ...); every tensor of the trunk."""
    return {formats.detectron2_name(key): tensor for key, tensor in state_dict.items()}


def from_detectron2(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detectron2's names, bare or under a prefix such as `backbone.bottom_up.` -> ours. BadInput unless whole."""
    tensors = dict(model)
    trunks = [t for t in formats.find_trunks({"": tensors}) if t.dialect.name == "detectron2"]
    if len(trunks) != 1:
        raise BadInput(
            f"{len(trunks)} Detectron2 trunks among {len(tensors)} tensors; expected one"
        )
    trunk = trunks[0]
    if trunk.missing or trunk.extra:
        wrong = [f"missing {k}" for k in trunk.missing] + [f"extra {k}" for k in trunk.extra]
        raise BadInput(f"not a whole {trunk.arch}: {formats.first_names(wrong)}")
    return {ours: tensors[key] for ours, key in trunk.keys.items()}


def detectron2_pixels(pixels: Pixels) -> dict[str, Any]:
    """Pixel statistics in Detectron2's units (0..255, in the order of INPUT.FORMAT)."""
    return {
        "input_format": pixels.order,
        "pixel_mean": [255 * v for v in pixels.mean],
        "pixel_std": [255 * v for v in pixels.std],
    }


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything but the tensors, as plain values: what an exported file carries, or has beside it."""
    about = {
        "digest": checkpoint.digest,
        "name": checkpoint.name,
        "method": checkpoint.method,
        "arch": checkpoint.arch,
        "stem": checkpoint.stem,
        "epochs": checkpoint.epochs,
        "pixels": dataclasses.asdict(checkpoint.pixels),
        "provenance": dict(checkpoint.provenance),
    }
    return json.loads(json.dumps(about))


def write_detectron2(checkpoint: Checkpoint, out: Path) -> None:
    """A model file for MODEL.WEIGHTS. Detectron2 reads `model`; `backbench` is what `read` restores the rest from."""
    if checkpoint.stem != "imagenet":
        raise BadInput(
            f"Detectron2's ResNet has the imagenet stem; '{checkpoint.name}' has '{checkpoint.stem}'"
        )
    about = _about(checkpoint)
    about["pixels"] |= detectron2_pixels(checkpoint.pixels)
    content = {
        "model": {
            k: np.asarray(v.numpy()) for k, v in to_detectron2(checkpoint.state_dict).items()
        },
        "__author__": AUTHOR,  # with `model`, what makes detectron2/checkpoint/detection_checkpoint.py read it as is
        "matching_heuristics": True,  # it then finds backbone.bottom_up.* by the ends of the names
        "backbench": about,
    }
    with atomic.atomic_path(out) as temporary, temporary.open("wb") as file:
        pickle.dump(content, file, protocol=4)


def _own_detectron2(
    path: Path, header: Mapping[str, Any], arch: str, state_dict: Mapping[str, Tensor]
) -> Checkpoint:
    """The Checkpoint that `export --format detectron2` wrote, its digest verified."""
    try:
        pixels = header["pixels"]
        checkpoint = Checkpoint(
            arch=arch,
            stem=header["stem"],
            method=header["method"],
            epochs=header["epochs"],
            state_dict=state_dict,
            pixels=Pixels(tuple(pixels["mean"]), tuple(pixels["std"]), pixels["order"]),
            provenance={**header["provenance"], "name": header["name"]},
        )
        recorded = header["digest"]
    except (KeyError, TypeError) as error:
        raise BadInput(f"{path}: its `backbench` header is incomplete ({error!r})") from None
    if checkpoint.digest != recorded:
        raise BadInput(
            f"{path}: the weights do not match the digest in its header; it was changed after the export"
        )
    return checkpoint


# --- the verbs ---


def inspect(path: str | Path) -> dict[str, Any]:
    """What a file holds, as plain JSON-able values. BadInput only where it cannot be opened as weights at all."""
    opened = open_file(path)
    own = opened.metadata.get("format") == FORMAT
    if own:
        checkpoint = Checkpoint.load(path)
        opened = dataclasses.replace(opened, tree=dict(checkpoint.state_dict))
    found = Found(opened)
    default = found.default_encoder()
    encoders = []
    for name, trunks in found.encoders.items():
        for trunk in trunks:
            tensors = found.tables[trunk.table]
            here = {ours: tensors[key] for ours, key in trunk.keys.items() if _stored(tensors[key])}
            encoders.append(
                {
                    "encoder": name,
                    "default": name == default,
                    "table": trunk.table,
                    "prefix": trunk.prefix,
                    "names": trunk.dialect.name,
                    "arch": trunk.arch,
                    "stem": found.stem(trunk) or "3x3, padding unknown",
                    "matched": len(trunk.keys),
                    "expected": len(trunk_shapes(trunk.arch)),
                    "absent_counters": sum(
                        formats.is_counter(k) and k not in trunk.keys
                        for k in trunk_shapes(trunk.arch)
                    ),
                    "missing_statistics": found.missing_statistics(trunk),
                    "problems": {
                        what: keys for what, keys in found.problems(trunk).items() if keys
                    },
                    "untrained": untrained_signs(here),
                }
            )
    report: dict[str, Any] = {
        "file": str(opened.path),
        "bytes": opened.size,
        "sha256": opened.sha256,
        "container": opened.container,
        "format": "backbench" if own else found.form.name if found.form else None,
        "source": None if own or not found.form else found.form.source,
        "also": None if own or not found.form else found.form.also or None,
        "encoders": encoders,
        "leftovers": found.leftovers(),
    }
    try:
        if not own:
            trunk = found.choose(None)
            checkpoint = found.checkpoint(trunk, None, False, copy=False)
    except BadInput as error:
        return {**report, "importable": False, "why_not": str(error)}
    return {**report, "importable": True, **_about(checkpoint)}


def run_inspect(args: argparse.Namespace) -> int:
    report = inspect(args.file)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        _print_report(report)
    return 0


def _print_report(report: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"{report['file']}  {report['bytes'] / 1e6:.1f} MB, {report['container']}")
    also = f" (files that look the same: {report['also']})" if report["also"] else ""
    console.print(f"format    {report['format'] or 'not recognised'}{also}")
    table = Table("encoder", "prefix", "arch", "stem", "trunk", "", box=box.SIMPLE, pad_edge=False)
    remarks = []
    for row in report["encoders"]:
        prefix = formats.shown(
            f"{row['table']}: {row['prefix']}" if row["table"] else row["prefix"]
        )
        trunk = f"{row['matched']}/{row['expected']}"
        taken = "taken by default" if row["default"] else ""
        table.add_row(
            *map(escape, (row["encoder"], prefix, row["arch"], row["stem"], trunk, taken))
        )
        notes = [
            f"{len(keys)} {what}: {formats.first_names(keys)}"
            for what, keys in row["problems"].items()
        ]
        if row["missing_statistics"] == "all":
            notes.append("no batch-norm statistics")
        if row["absent_counters"]:
            notes.append(
                f"{row['absent_counters']} batch counters are not in the file and become 0"
            )
        notes += [f"untrained? {sign}" for sign in row["untrained"]]
        remarks += [f"{row['encoder']}: {note}" for note in notes]
    console.print(table, soft_wrap=False)
    for remark in remarks:
        console.print(remark)
    for row in report["leftovers"]:
        size = f"{row['tensors']} tensors, {row['elements']} elements"
        console.print(f"beside    {row['group']}: {size} ({formats.shown(row['example'])})")
    if report["importable"]:
        pixels = report["pixels"]
        console.print(f"pixels    {pixels['order']}, mean {pixels['mean']}, std {pixels['std']}")
        console.print(
            f"method    {report['method']}, epochs {report['epochs'] or 'not in the file'}"
        )
        console.print(f"digest    {report['digest']}")
    else:
        console.print(f"cannot be imported as it is: {report['why_not']}")


def run_import(args: argparse.Namespace) -> int:
    checkpoint = read(
        args.file,
        encoder=args.encoder,
        method=args.method,
        epochs=args.epochs,
        name=args.name,
        published=args.published,
        stem=args.stem,
        allow_missing_statistics=args.allow_missing_statistics,
    )
    for sign in untrained_signs(checkpoint.state_dict):
        log.warning("warning: %s looks untrained: %s", args.file, sign)
    checkpoint.save(args.out)
    about = checkpoint.provenance
    print(
        f"{args.out}: '{checkpoint.name}', method {checkpoint.method}, {checkpoint.arch}, {checkpoint.stem} stem, "
        f"{len(checkpoint.state_dict)} tensors; format {about.get('format', 'backbench')}, encoder "
        f"{about.get('encoder', 'trunk')} from '{about.get('prefix', '')}'; epochs {checkpoint.epochs or 'unknown'}; "
        f"digest {checkpoint.digest[:12]}"
    )
    return 0


def run_export(args: argparse.Namespace) -> int:
    checkpoint = read(args.checkpoint)
    out: Path = args.out
    pixels = checkpoint.pixels
    if args.format == "detectron2":
        write_detectron2(checkpoint, out)
        units = detectron2_pixels(pixels)
        print(
            f"MODEL.WEIGHTS {out} MODEL.PIXEL_MEAN {_numbers(units['pixel_mean'])} "
            f"MODEL.PIXEL_STD {_numbers(units['pixel_std'])} INPUT.FORMAT {pixels.order} "
            f"MODEL.RESNETS.DEPTH {checkpoint.arch.removeprefix('resnet')} MODEL.RESNETS.STRIDE_IN_1X1 False"
        )
        return 0
    # torchvision and timm share names; neither has a place for pixel statistics, so those lie beside the weights
    atomic.write_json(out.with_name(out.name + ".json"), _about(checkpoint))
    with atomic.atomic_path(out) as temporary:
        if out.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file(dict(checkpoint.state_dict), temporary, metadata={"format": "pt"})
        else:
            torch.save(dict(checkpoint.state_dict), temporary)
    load = (
        f"timm.create_model('{checkpoint.arch}', num_classes=0)"
        if args.format == "timm"
        else "fc = Identity()"
    )
    print(
        f"{out}: {len(checkpoint.state_dict)} tensors for {load}; pixel statistics in {out.name}.json"
    )
    return 0


def _numbers(values: list[float]) -> str:
    return "[" + ",".join(f"{v:.3f}" for v in values) + "]"
