"""Published checkpoint formats <-> Checkpoint, and the verbs inspect, import and export.

A file is imported completely or not at all: every tensor of the trunk must be there, of the right shape, under the
names of one known format, and nothing inside the trunk may be left over.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backbench import foreign_formats as formats
from backbench import resume
from backbench.checkpoint import Checkpoint
from backbench.errors import BadInput, nearest
from backbench.foreign_files import Opened, open_file
from backbench.foreign_formats import Format, FoundTrunk
from backbench.preprocess import Pixels

AUTHOR = "backbench"


def read(
    path: str | Path,
    *,
    encoder: str | None = None,
    method: str | None = None,
    epochs: int | None = None,
    name: str | None = None,
    published: str | None = None,
    allow_missing_statistics: bool = False,
) -> Checkpoint:
    """Open a Checkpoint file or any published format (docs/checkpoints.md). Nothing in the file is executed.

    `encoder` chooses among several trunks; `method`, `epochs`, `name` and `published` override or add what the file
    tells. Raises BadInput that names the tensor, key or prefix for anything that is not exactly one whole trunk.
    """
    path = Path(path)
    opened = open_file(path)
    checkpoint = _checkpoint(opened, encoder, allow_missing_statistics)
    changes: dict[str, Any] = {}
    if method is not None:
        changes["method"] = method
    if epochs is not None:
        changes["epochs"] = epochs
    extra = {k: v for k, v in (("name", name), ("published", published)) if v is not None}
    if extra:
        changes["provenance"] = {**checkpoint.provenance, **extra}
    return checkpoint.replace(**changes) if changes else checkpoint


def _checkpoint(opened: Opened, encoder: str | None, allow_missing_statistics: bool) -> Checkpoint:
    path = opened.path
    if opened.metadata.get("format") == "backbench-checkpoint":
        if encoder is not None:
            raise BadInput(f"{path}: a backbench checkpoint holds one trunk; leave out --encoder {encoder}")
        return Checkpoint.load(path)
    found = Found(opened)
    trunk = found.choose(encoder)
    state_dict = found.state_dict(trunk, allow_missing_statistics)
    own = found.own_header()
    if own is not None:
        return _own_detectron2(path, own, trunk.arch, state_dict)
    form = found.form
    heads = {} if form is None else found.heads(trunk)
    try:
        return Checkpoint(
            arch=trunk.arch,
            stem=found.stem(trunk),
            method=(form.method if form else None) or (form.name if form else "unknown"),
            epochs=found.epochs(),
            state_dict=state_dict,
            heads=heads,
            pixels=form.pixels if form else Pixels(),
            provenance={
                "name": path.name.split(".")[0],
                "source": path.name,
                "sha256": opened.sha256,
                "format": form.name if form else "unrecognised",
                "encoder": found.encoder_name(trunk),
                "prefix": trunk.prefix,
            },
        )
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


class Found:
    """What is in an opened file: its tables of tensors, its trunks, and the format that accounts for them."""

    def __init__(self, opened: Opened) -> None:
        self.path, self.tree = opened.path, opened.tree
        self.tables = formats.tables(opened.tree)
        self.trunks = formats.find_trunks(self.tables)
        recognised = formats.recognise(self.trunks, self.tables, opened.tree)
        self.form: Format | None = recognised[0] if recognised else None
        self.encoders = recognised[1] if recognised else self._unrecognised()

    def _unrecognised(self) -> dict[str, list[FoundTrunk]]:
        return {formats.unwrapped(trunk.prefix).rstrip(".") or "trunk": [trunk] for trunk in self.trunks}

    def encoder_name(self, trunk: FoundTrunk) -> str:
        return next(name for name, trunks in self.encoders.items() if trunk in trunks)

    def choose(self, encoder: str | None) -> FoundTrunk:
        """The trunk to import, or BadInput that says why there is not exactly one."""
        if not self.trunks:
            raise BadInput(f"{self.path}: no ResNet trunk in it; {self._content()}{self._hint()}")
        if encoder is None and self.form is not None:
            encoder = self.form.default if self.form.default in self.encoders else None
        if encoder is None and len(self.encoders) == 1 and self.form is None:
            encoder = next(iter(self.encoders))
        if encoder is None:
            there = " and ".join(f"'{trunk.label}'" for trunks in self.encoders.values() for trunk in trunks)
            what = f"format {self.form.name} without its {self.form.default}" if self.form else "in no known format"
            raise BadInput(
                f"{self.path}: holds a trunk under {there}, {what}{self._hint()}; "
                f"choose with --encoder {' or '.join(self.encoders)}"
            )
        if encoder not in self.encoders:
            raise BadInput(f"{self.path}: no encoder '{encoder}' in it; {nearest(encoder, self.encoders)}")
        first, *again = self.encoders[encoder]
        for other in again:
            table, otable = self.tables[first.table], self.tables[other.table]
            for key, name in first.keys.items():
                if key not in other.keys or not torch.equal(table[name], otable[other.keys[key]]):
                    raise BadInput(
                        f"{self.path}: '{first.label}' and '{other.label}' should be the same trunk but differ in {key}"
                    )
        return first

    def _content(self) -> str:
        keys = [key for tensors in self.tables.values() for key in tensors]
        return f"it holds {len(keys)} tensors: {formats.first_names(keys)}" if keys else "it holds no tensors"

    def _hint(self) -> str:
        form = formats.nearest_format(self.tables)
        places = form and ", ".join(p.split(":")[-1] + "*" for specs in form.encoders.values() for p in specs)
        return f" (nearest format: {form.name}, with {places})" if form else ""

    def stem(self, trunk: FoundTrunk) -> str:
        tensor = self.tables[trunk.table].get(trunk.keys.get("conv1.weight", ""))
        three = tensor is not None and tuple(tensor.shape) == (64, 3, 3, 3)
        return (self.form.conv3 if self.form else "conv3") if three else "imagenet"

    def problems(self, trunk: FoundTrunk) -> dict[str, list[str]]:
        """Keys of the file (for `missing`: as they would be called) that keep the trunk from being whole."""
        shapes = formats.trunk_shapes(trunk.arch, self.stem(trunk))
        tensors = self.tables[trunk.table]
        names = {ours: theirs for theirs, ours in formats.names(trunk.dialect, trunk.arch).items()}
        misshaped, unreadable = [], []
        for ours, key in trunk.keys.items():
            tensor = tensors[key]
            if tuple(tensor.shape) != shapes[ours]:
                misshaped.append(f"{key} {tuple(tensor.shape)} instead of {shapes[ours]}")
            elif not _readable(tensor):
                unreadable.append(key)
            elif not formats.is_counter(ours):
                if not tensor.is_floating_point():
                    unreadable.append(f"{key} ({str(tensor.dtype).removeprefix('torch.')})")
                elif not torch.isfinite(tensor).all():
                    unreadable.append(f"{key} (not finite)")
        return {
            "missing": [trunk.prefix + names[k] for k in trunk.missing],
            "extra inside the trunk": list(trunk.extra),
            "of the wrong shape": misshaped,
            "not usable": unreadable,
        }

    def state_dict(self, trunk: FoundTrunk, allow_missing_statistics: bool) -> dict[str, Tensor]:
        """The whole trunk under our names, or BadInput that names the first tensors that do not fit."""
        problems = self.problems(trunk)
        shapes = formats.trunk_shapes(trunk.arch, self.stem(trunk))
        statistics = [k for k in shapes if formats.is_statistic(k)]
        filled: dict[str, Tensor] = {}
        if not any(k in trunk.keys for k in statistics):
            if not allow_missing_statistics:
                raise BadInput(
                    f"{self.path}: '{trunk.label}' has no batch-norm statistics (running_mean, running_var), so its "
                    "frozen features would be noise; --allow-missing-statistics imports it for finetuning"
                )
            filled = {k: (torch.ones if k.endswith("var") else torch.zeros)(shapes[k]) for k in statistics}
            absent = {trunk.prefix + trunk.dialect.rename(k) for k in statistics}
            problems["missing"] = [k for k in problems["missing"] if k not in absent]
        wrong = [f"{len(keys)} {what}: {formats.first_names(keys)}" for what, keys in problems.items() if keys]
        if wrong:
            form = f"format {self.form.name}" if self.form else f"no known format{self._hint()}"
            raise BadInput(f"{self.path}: '{trunk.label}' is not a whole {trunk.arch} ({form}): {'; '.join(wrong)}")
        tensors = self.tables[trunk.table]
        return filled | {ours: tensors[key].detach().clone() for ours, key in trunk.keys.items()}

    def heads(self, trunk: FoundTrunk) -> dict[str, Tensor]:
        """The chosen encoder's own heads and what stands beside the encoders (projector, predictor), without queues."""
        others = [t.prefix for t in self.trunks if t.table == trunk.table and t is not trunk and t.prefix]
        out = {}
        for key, tensor in self.tables[trunk.table].items():
            inside = key in trunk.keys.values() or any(key.startswith(prefix) for prefix in others)
            if not inside and "queue" not in key and _readable(tensor):
                out[formats.unwrapped(key)] = tensor.detach().clone()
        return out

    def epochs(self) -> int | None:
        for key in self.form.epoch if self.form else ():
            value: Any = self.tree
            for part in key.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 100_000:
                return value
        return None

    def own_header(self) -> dict[str, Any] | None:
        header = self.tree.get("backbench") if isinstance(self.tree, Mapping) else None
        return header if isinstance(header, dict) and self.form and self.form.name == "detectron2" else None


def _readable(tensor: Tensor) -> bool:
    """A plain CPU tensor whose elements are all in the file (strides cannot pretend to more)."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


# --- Detectron2 ---


def to_detectron2(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names -> Detectron2's (stem.conv1.weight, res2.0.conv1.norm.weight, ...); every tensor of the trunk."""
    return {formats.detectron2_name(key): tensor for key, tensor in state_dict.items()}


def from_detectron2(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detectron2's names, bare or under a prefix such as `backbone.bottom_up.` -> ours. BadInput unless whole."""
    tensors = dict(model)
    trunks = [t for t in formats.find_trunks({"": tensors}) if t.dialect.name == "detectron2"]
    if len(trunks) != 1:
        raise BadInput(f"{len(trunks)} Detectron2 trunks among {len(tensors)} tensors; expected one")
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


def _write_detectron2(checkpoint: Checkpoint, out: Path) -> None:
    if checkpoint.stem != "imagenet":
        raise BadInput(f"Detectron2's ResNet has the imagenet stem; this checkpoint has '{checkpoint.stem}'")
    content = {
        "model": {k: np.asarray(v.numpy()) for k, v in to_detectron2(checkpoint.state_dict).items()},
        "__author__": AUTHOR,  # with `model`, what makes detectron2/checkpoint/detection_checkpoint.py read it as is
        "matching_heuristics": True,  # it then finds backbone.bottom_up.* by the ends of the names
        "backbench": {
            "digest": checkpoint.digest,
            "name": checkpoint.name,
            "method": checkpoint.method,
            "arch": checkpoint.arch,
            "stem": checkpoint.stem,
            "epochs": checkpoint.epochs,
            "pixels": {**_plain(dataclasses.asdict(checkpoint.pixels)), **detectron2_pixels(checkpoint.pixels)},
            "provenance": _plain(dict(checkpoint.provenance)),
        },
    }
    with resume.atomic_path(out) as temporary, temporary.open("wb") as file:
        pickle.dump(content, file, protocol=4)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _own_detectron2(path: Path, header: Mapping[str, Any], arch: str, state_dict: Mapping[str, Tensor]) -> Checkpoint:
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
        raise BadInput(f"{path}: the weights do not match the digest in its header; it was changed after the export")
    return checkpoint


# --- the verbs ---


def inspect(path: str | Path) -> dict[str, Any]:
    """What a file holds, as plain values; see run_inspect."""
    opened = open_file(Path(path))
    found = Found(opened)
    encoders = []
    for name, trunks in found.encoders.items():
        for trunk in trunks:
            problems = found.problems(trunk)
            shapes = formats.trunk_shapes(trunk.arch)
            encoders.append(
                {
                    "encoder": name,
                    "table": trunk.table,
                    "prefix": trunk.prefix,
                    "dialect": trunk.dialect.name,
                    "arch": trunk.arch,
                    "stem": found.stem(trunk),
                    "matched": len(trunk.keys),
                    "expected": len(shapes),
                    **problems,
                }
            )
    return {
        "file": str(opened.path),
        "bytes": opened.size,
        "sha256": opened.sha256,
        "container": opened.container,
        "format": found.form.name if found.form else None,
        "encoders": encoders,
        "epochs": found.epochs(),
    }


def run_inspect(args: argparse.Namespace) -> int:
    report = inspect(args.file)
    if args.json:
        print(json.dumps(report, indent=1))
        return 0
    for key, value in report.items():
        print(f"{key}: {value}")
    return 0


def run_import(args: argparse.Namespace) -> int:
    checkpoint = read(
        args.file,
        encoder=args.encoder,
        method=args.method,
        epochs=args.epochs,
        name=args.name,
        published=args.published,
        allow_missing_statistics=args.allow_missing_statistics,
    )
    checkpoint.save(args.out)
    about = checkpoint.provenance
    print(
        f"{args.out}: {checkpoint.name}, {checkpoint.arch}, {checkpoint.stem} stem, {len(checkpoint.state_dict)} "
        f"tensors, format {about.get('format', 'backbench')}, encoder {about.get('encoder', 'trunk')}, "
        f"digest {checkpoint.digest[:12]}"
    )
    return 0


def run_export(args: argparse.Namespace) -> int:
    checkpoint = read(args.checkpoint)
    out: Path = args.out
    if args.format == "detectron2":
        _write_detectron2(checkpoint, out)
    elif out.suffix == ".safetensors":
        from safetensors.torch import save_file

        with resume.atomic_path(out) as temporary:
            save_file(dict(checkpoint.state_dict), temporary, metadata={"format": "pt"})
    else:
        with resume.atomic_path(out) as temporary:
            torch.save(dict(checkpoint.state_dict), temporary)
    print(f"{out}: {checkpoint.name}, {checkpoint.arch}, {len(checkpoint.state_dict)} tensors, {args.format} names")
    return 0
