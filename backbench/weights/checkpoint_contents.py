"""What an opened file holds: its trunks, the format that accounts for them, and why one of them is
not whole.

A file is imported completely or not at all: every tensor of the trunk must be there, of the right
shape, under the names of one known format, and nothing inside the trunk may be left over.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backbench.errors import BadInput, nearest
from backbench.images.preprocess import Pixels
from backbench.weights import archs, formats, timm_files
from backbench.weights.checkpoint import Checkpoint, finite
from backbench.weights.exporting import own_detectron2
from backbench.weights.format_row import Format
from backbench.weights.layouts import FoundTimm
from backbench.weights.names import (
    FoundTrunk,
    find_trunks,
    first_names,
    is_counter,
    is_statistic,
    shown,
    tables,
    unwrapped,
)
from backbench.weights.resnet import STEMS
from backbench.weights.sidecar_metadata import PIXELS, Told, beside
from backbench.weights.timm_formats import TIMM
from backbench.weights.weight_file import Opened

# Only this verb has options for what a file does not tell; the others take what it writes
_IN_IMPORT = "in `backbench import FILE --out X.safetensors`"
# Detectron2's own weights: BGR pixels and the stride in the 1x1 convolution, neither of which shows
# in the tensors
_FOREIGN_AUTHORS = ("Detectron2 Model Zoo", "Caffe2", "MSRA")


@dataclass
class Leftover:
    """Tensors outside the trunks that belong together."""

    group: str
    tensors: int = 0
    elements: int = 0
    example: str = ""


class Found:
    """What is in an opened file: its tables of tensors, its trunks, and the format that accounts
    for them."""

    def __init__(self, opened: Opened, told: Told = Told()) -> None:  # noqa: B008 - frozen
        self.opened, self.path, self.tree = opened, opened.path, opened.tree
        self._problems: dict[str, dict[str, list[str]]] = {}
        self.tables = tables(opened.tree)
        self.form: Format | None = None
        self.encoders: dict[str, list[FoundTrunk]] = {}
        self.told = told
        self.unknown = ""  # why a trunk is none that can be built
        self.trunks: list[FoundTrunk] = []
        if not told.arch:
            self.trunks = list(find_trunks(self.tables))
        if not self.trunks:
            self._find_others()
        try:
            self._recognise()
        except BadInput as error:
            raise BadInput(f"{self.path}: {error}") from None

    def _find_others(self) -> None:
        """Vision transformers and ConvNeXts, and whatever the command or a file beside names."""
        try:
            self.told = self.told.over(beside(self.path))
            if not self.told.arch:
                self.told = replace(self.told, arch=timm_files.training_arch(self.tree))
            self.trunks = list(timm_files.find(self.tables, self.told))
        except BadInput as error:
            raise BadInput(f"{self.path}: {error}") from None

    def _recognise(self) -> None:
        """The format, and what each trunk is called in it."""
        told = self.told
        others = bool(self.trunks) and isinstance(self.trunks[0], FoundTimm)
        if others and (told.names or timm_files.training_arch(self.tree)):
            recognised = formats.placed(TIMM, self.trunks)
        else:
            recognised = formats.recognise(self.trunks, self.tables, self.tree)
        if recognised is not None:
            self.form, self.encoders = recognised
        for trunk in self.trunks if recognised is None else ():  # each is called by its prefix
            name = unwrapped(trunk.prefix).rstrip(".") or trunk.table or "trunk"
            if name in self.encoders:
                name = f"{trunk.table}.{name}"
            self.encoders.setdefault(name, []).append(trunk)
        try:
            self._resolve()
        except BadInput as error:
            self.unknown, self.encoders, self.trunks = str(error), {}, []

    def _resolve(self) -> None:
        """Which model each trunk that is no ResNet is."""
        known: dict[int, FoundTrunk] = {}
        for trunk in self.trunks:
            known[id(trunk)] = trunk
            if isinstance(trunk, FoundTimm):
                tensors = self.tables[trunk.table]
                known[id(trunk)] = timm_files.of_format(trunk, tensors, self.form, self.told)
        self.encoders = {
            name: [known[id(trunk)] for trunk in trunks] for name, trunks in self.encoders.items()
        }
        self.trunks = list(known.values())

    # --- which trunk ---

    def default_encoder(self) -> str | None:
        """The encoder that is taken without being asked for; None where that would be a guess."""
        if self.form is not None:
            return self.form.default if self.form.default in self.encoders else None
        return next(iter(self.encoders)) if len(self.trunks) == 1 else None

    def choose(self, encoder: str | None) -> FoundTrunk:
        """The trunk to import, or BadInput that says why there is not exactly one."""
        if self.unknown:
            raise BadInput(f"{self.path}: {self.unknown}")
        if not self.trunks:
            raise BadInput(f"{self.path}: no trunk in it; {self._content()}{self._hint()}")
        author = self._at_top("__author__")
        if author in _FOREIGN_AUTHORS:
            raise BadInput(
                f"{self.path}: weights of '{author}' take BGR pixels and have their stride in the 1x1 convolution; "
                "such a network is not one of backbench's trunks"
            )
        encoder = encoder or self.default_encoder()
        if encoder is None:
            raise BadInput(f"{self.path}: {self._undecided()}")
        if encoder not in self.encoders:
            raise BadInput(
                f"{self.path}: no encoder '{encoder}' in it; {nearest(encoder, self.encoders)}"
            )
        first, *again = self.encoders[encoder]
        for other in again:  # the same weights written twice: they must be
            self._refuse_difference(first, other)
        return first

    def _undecided(self) -> str:
        """Why no encoder is taken without being asked for."""
        labels = []
        for trunks in self.encoders.values():
            labels += [f"'{trunk.label}'" for trunk in trunks]
        what = "in no known format"
        if self.form is not None:
            what = f"format {self.form.name} without its {self.form.default}"
        choices = " or ".join(map(shown, self.encoders))
        return (
            f"holds a trunk under {' and '.join(labels)}, {what}{self._hint()}; "
            f"choose with --encoder {choices} {_IN_IMPORT}"
        )

    def _refuse_difference(self, first: FoundTrunk, other: FoundTrunk) -> None:
        table, copy = self.tables[first.table], self.tables[other.table]
        for name, key in first.keys.items():
            if name not in other.keys or not torch.equal(table[key], copy[other.keys[name]]):
                where = f"'{first.label}' and '{other.label}'"
                raise BadInput(
                    f"{self.path}: {where} should be the same trunk but differ in {shown(key)}"
                )

    # --- the whole trunk, or why not ---

    def checkpoint(
        self,
        trunk: FoundTrunk,
        stem: str | None,
        allow_missing_statistics: bool,
        *,
        copy: bool = True,
    ) -> Checkpoint:
        """The whole trunk as a Checkpoint, or BadInput that names the first tensors that do not
        fit.

        With `copy` False the tensors may still be the file's own memory.
        """
        self._refuse_unless_whole(trunk, allow_missing_statistics)
        stem = self._stem(trunk, stem)
        pixels = self.pixels(trunk)
        if pixels is None:
            raise BadInput(
                f"{self.path}: neither the file nor one beside it tells the statistics of its"
                f" pixels; choose --pixels {' or '.join(PIXELS)} {_IN_IMPORT}"
            )
        tensors = trunk.assembled(self.tables[trunk.table])
        if copy and self.opened.container == "torch zip":  # the others are not mapped from the file
            tensors = {ours: tensor.clone() for ours, tensor in tensors.items()}
        no_statistics = self.missing_statistics(trunk) == "all"
        if no_statistics:
            tensors |= _fresh_statistics(trunk.shapes(self.small(trunk)))
        own = self._at_top("backbench")
        if isinstance(own, Mapping) and self.form is not None and self.form.name == "detectron2":
            return own_detectron2(self.path, own, trunk.arch, tensors)
        return Checkpoint(
            arch=trunk.arch,
            stem=stem,
            method=self.form.method if self.form else "unknown",
            epochs=self.epochs(),
            reading=self.reading(trunk),
            state_dict=tensors,
            heads=self._heads(trunk) if copy else {},
            pixels=pixels,
            provenance=self._provenance(trunk, no_statistics),
        )

    def _refuse_unless_whole(self, trunk: FoundTrunk, allow_missing_statistics: bool) -> None:
        problems = self.problems(trunk)
        if self.missing_statistics(trunk) == "all" and not allow_missing_statistics:
            raise BadInput(
                f"{self.path}: '{trunk.label}' has no batch-norm statistics (running_mean, running_var), so its "
                f"frozen features would be noise; --allow-missing-statistics {_IN_IMPORT} takes it for finetuning"
            )
        wrong = []
        for what, keys in problems.items():
            if keys:
                wrong.append(f"{len(keys)} {what}: {first_names(keys)}")
        if wrong:
            form = f"format {self.form.name}" if self.form else f"no known format{self._hint()}"
            near = self._near(problems["missing"])
            raise BadInput(
                f"{self.path}: '{trunk.label}' is not a whole {trunk.arch} ({form}): {'; '.join(wrong)}{near}"
            )

    def _provenance(self, trunk: FoundTrunk, no_statistics: bool) -> dict[str, str]:
        about = {
            "name": self.path.name.split(".")[0],
            "source": self.path.name,
            "sha256": self.opened.sha256,
            "format": self.form.name if self.form else "unrecognised",
            "encoder": next(name for name, trunks in self.encoders.items() if trunk in trunks),
            "prefix": f"{trunk.table}:{trunk.prefix}" if trunk.table else trunk.prefix,
        }
        if no_statistics:
            about["statistics"] = "missing in the file: mean 0 and variance 1"
        if isinstance(trunk, FoundTimm):
            about |= self._said_of(trunk)
        return about

    def _said_of(self, trunk: FoundTimm) -> dict[str, str]:
        """What was decided that is not in the file."""
        about = {
            "licence": self.told.licence or (self.form.licence if self.form else ""),
            "positions": timm_files.rule(self.form, trunk),
            "told by": self.told.by,
        }
        if trunk.folds:
            about["changed"] = "the class token's position is added to it, as timm's model has it"
        return {key: value for key, value in about.items() if value}

    def problems(self, trunk: FoundTrunk) -> dict[str, list[str]]:
        """Keys of the file (for `missing`: as they would be called) that keep the trunk from being
        whole."""
        if trunk.label in self._problems:
            return self._problems[trunk.label]
        shapes = trunk.shapes(self.small(trunk))
        tensors = self.tables[trunk.table]
        misshaped, unusable = [], []
        for ours, key in trunk.keys.items():
            tensor = tensors[key]
            if tuple(tensor.shape) != shapes[ours]:
                misshaped.append(f"{key} {tuple(tensor.shape)} instead of {shapes[ours]}")
            elif reason := _unusable(ours, tensor):
                unusable.append(f"{key} ({reason})")
        if isinstance(trunk, FoundTimm):
            unusable += timm_files.contradictions(trunk, tensors)
        missing = trunk.missing
        if self.missing_statistics(trunk) == "all":  # refused or allowed as a whole, elsewhere
            missing = [k for k in missing if not is_statistic(k)]
        self._problems[trunk.label] = {
            "missing": [trunk.prefix + trunk.named(k) for k in missing],
            "extra inside the trunk": list(trunk.extra),
            "of the wrong shape": misshaped,
            "not usable": unusable,
        }
        return self._problems[trunk.label]

    def missing_statistics(self, trunk: FoundTrunk) -> str:
        """'all' where the file keeps no running mean and variance at all, 'none' or 'some'."""
        wanted = [k for k in trunk.shapes() if is_statistic(k)]
        absent = sum(k not in trunk.keys for k in wanted)
        if not absent:
            return "none"
        return "all" if absent == len(wanted) else "some"

    # --- what the tensors do not say ---

    def small(self, trunk: FoundTrunk) -> bool:
        if not archs.is_resnet(trunk.arch):
            return False
        return formats.stem_shape(self.tables, trunk) == (64, 3, 3, 3)

    def stem(self, trunk: FoundTrunk) -> str | None:
        """From the shape of conv1; None for a 3x3 one whose padding neither file nor format
        tells."""
        if not archs.is_resnet(trunk.arch):
            return archs.NATIVE
        if not self.small(trunk):
            return "imagenet"
        return self.form.conv3 if self.form else None

    def _stem(self, trunk: FoundTrunk, wanted: str | None) -> str:
        if wanted is not None and not archs.is_resnet(trunk.arch):
            raise BadInput(f"{self.path}: {trunk.arch} has no choice of stem; leave out --stem")
        if wanted is not None and wanted not in STEMS:
            raise BadInput(f"unknown stem '{wanted}'; {nearest(wanted, STEMS)}")
        if wanted is not None and (wanted == "imagenet") == self.small(trunk):
            shape = formats.stem_shape(self.tables, trunk)
            raise BadInput(f"{self.path}: its conv1 has shape {shape}, not '{wanted}'")
        stem = wanted or self.stem(trunk)
        if stem is None:
            raise BadInput(
                f"{self.path}: the first convolution is 3x3 and the file does not tell its padding; choose --stem "
                f"conv3 (padding 1: SimCLR, CLLR), conv3_p0 (MIO) or conv3_p2 (ARB, solo-learn) {_IN_IMPORT}"
            )
        return stem

    def pixels(self, trunk: FoundTrunk) -> Pixels | None:
        """None where nothing tells them."""
        if isinstance(trunk, FoundTimm):
            asked = self.form is None or "pixels" in self.form.asks
            default = None if asked or self.form is None else self.form.pixels
            return self.told.pixels or default
        if self.form is None or self.told.pixels is not None:
            return self.told.pixels or Pixels()
        if self.small(trunk) and self.form.small_pixels is not None:
            return self.form.small_pixels
        return self.form.pixels

    def reading(self, trunk: FoundTrunk) -> str:
        """What of its output is the feature: as told, or as its authors read it."""
        if not isinstance(trunk, FoundTimm):
            return ""
        said = self.told.reading
        if self.form is None or said:
            return said
        (width, *_) = timm_files.widths(trunk)
        return self.form.readings.get(width, self.form.reading)

    def epochs(self) -> int | None:
        """Finished epochs, where the format counts them."""
        if self.form is None:
            return None
        key, add = self.form.epoch
        value = self.tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value + add < 100_000:
            return value + add
        return None

    # --- what stands beside the trunk ---

    def _heads(self, trunk: FoundTrunk) -> dict[str, Tensor]:
        """What stands in the trunk's table beside the trunks and their own heads: projector,
        predictor; no queues."""
        if isinstance(trunk, FoundTimm):  # text towers and decoders are not kept
            table = self.tables[trunk.table]
            kept = [key for key in trunk.heads if stored(table[key])]
            return {unwrapped(key): table[key].detach().clone() for key in kept}
        others = []
        for other in self.trunks:
            if other is not trunk and other.table == trunk.table and other.prefix:
                others.append(other.prefix)
        inside = set(trunk.keys.values())
        out = {}
        for key, tensor in self.tables[trunk.table].items():
            foreign = key in inside or "queue" in key or key.startswith(tuple(others))
            if not foreign and stored(tensor):
                out[unwrapped(key)] = tensor.detach().clone()
        return out

    def leftovers(self) -> list[Leftover]:
        """Tensors outside the trunks, by what they are for."""
        groups: dict[str, Leftover] = {}
        for table, key in self._free():
            name = _group(table, key)
            row = groups.setdefault(name, Leftover(name))
            row.tensors += 1
            row.elements += self.tables[table][key].numel()
            row.example = row.example or (f"{table}: {key}" if table else key)
        return sorted(groups.values(), key=lambda row: row.group)

    def _free(self) -> list[tuple[str, str]]:
        """(table, key) of every tensor that belongs to no trunk."""
        taken = set()
        for trunk in self.trunks:
            taken |= {(trunk.table, key) for key in trunk.keys.values()}
        out = []
        for table, tensors in self.tables.items():
            out += [(table, key) for key in tensors if (table, key) not in taken]
        return out

    def _at_top(self, key: str) -> object:
        """A value at the top of the file; None where it is not there."""
        return self.tree.get(key) if isinstance(self.tree, Mapping) else None

    # --- for messages ---

    def _content(self) -> str:
        keys = [key for tensors in self.tables.values() for key in tensors]
        return (
            f"it holds {len(keys)} tensors: {first_names(keys)}" if keys else "it holds no tensors"
        )

    def _hint(self) -> str:
        form = formats.nearest_format(self.tables) if self.form is None else None
        if form is None:
            return ""
        places = []
        for specs in form.encoders.values():
            places += [f"{spec.split(':')[-1]}*" for spec in specs[:2]]
        return f" (nearest format: {form.name}, with {', '.join(places)})"

    def _near(self, missing: list[str]) -> str:
        """The file's own key that looks most like the first missing one."""
        if not missing:
            return ""
        # What a trunk of another table has taken is not meant either
        taken = {key for trunk in self.trunks for key in trunk.keys.values()}
        free = [key for _, key in self._free() if key not in taken]
        close = difflib.get_close_matches(missing[0], free[:5000], n=1, cutoff=0.8)
        return f" (is '{shown(close[0])}' meant?)" if close else ""


def _unusable(name: str, tensor: Tensor) -> str:
    """Why a tensor cannot be `name` of a trunk; empty where it can."""
    if not stored(tensor):
        return "its elements are not all in the file"
    if is_counter(name):
        return ""
    if not tensor.is_floating_point():
        return str(tensor.dtype).removeprefix("torch.")
    if not finite(tensor):
        return "not finite"
    if not finite(tensor.to(torch.float32)):
        return "beyond float32"
    if name.endswith("running_var") and bool((tensor < 0).any()):
        return "negative"
    return ""


def stored(tensor: Tensor) -> bool:
    """A plain CPU tensor whose elements are all in the file (strides cannot pretend to more)."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _fresh_statistics(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Mean 0 and variance 1 for every batch norm: as before the first batch."""
    out = {}
    for key, shape in shapes.items():
        if is_statistic(key):
            out[key] = torch.ones(shape) if key.endswith("var") else torch.zeros(shape)
    return out


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
    name = unwrapped(key).lower()
    for group, words in _GROUPS:
        if any(word in name for word in words):
            return group
    return "other"
