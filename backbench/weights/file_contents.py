"""Finds the trunks in an opened weight file and the format that accounts for all of them. A trunk is
taken completely or not at all: every tensor must be there, of the right shape, under one known
format's names, and nothing inside it may be left over."""

import contextlib
import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from backbench.errors import BadInput, nearest
from backbench.images.preprocess import Pixels
from backbench.untrusted.printable import shown
from backbench.weights import archs, formats
from backbench.weights.checkpoint import (
    PIXELS_FROM,
    Checkpoint,
    assumed_pixels,
    from_about,
    unusable,
)
from backbench.weights.family import (
    Tables,
    Tree,
    TrunkInFile,
    TrunkMetadata,
    identical,
    in_file,
)
from backbench.weights.tensor_names import (
    first_names,
    is_counter,
    is_statistic,
    unwrapped,
)
from backbench.weights.weight_file import Opened

PIXEL_CHOICES = ("imagenet", "half", "clip")  # of --pixels
DEEPEST = 20  # levels of nesting that are looked at
# Only this verb has options for what a file does not tell; the others take what it writes
_IN_IMPORT = "in `backbench import FILE --out X.safetensors`"
# Detectron2's own weights: BGR pixels and the stride in the 1x1 convolution, neither of which shows
# in the tensors
_FOREIGN_AUTHORS = ("Detectron2 Model Zoo", "Caffe2", "MSRA")


class FileContents:
    """An opened file's tables of tensors, its trunks, and the format that accounts for them."""

    def __init__(
        self,
        opened: Opened,
        metadata: TrunkMetadata = TrunkMetadata(),  # noqa: B008 - frozen
    ) -> None:
        self.opened, self.path, self.tree = opened, opened.path, opened.tree
        self.tables = tables_of(opened.tree)
        self.form: formats.Format | None = None
        self.encoders: dict[str, list[TrunkInFile]] = {}
        self.trunks: list[TrunkInFile] = []
        self.unknown = ""  # why a trunk is none that can be built
        self._problems: dict[str, dict[str, list[str]]] = {}
        with _naming(self.path):
            for family in (
                [archs.family_of(metadata.arch)] if metadata.arch else archs.FAMILIES
            ):
                trunks = family.find(self.tables, self.tree, self.path, metadata)
                if trunks:
                    self._recognise(trunks)
                    break

    def _recognise(self, trunks: list[TrunkInFile]) -> None:
        """The format, the name of each trunk in it, and the model that each is."""
        # 1. The format and its encoders; in no known format each trunk is called by its prefix
        form = trunks[0].form or formats.recognise(trunks, self.tables, self.tree)
        encoders = formats.encoders_in(form, trunks) if form is not None else None
        if encoders is not None:
            self.form = form
        else:
            encoders = {}
            for trunk in trunks:
                name = unwrapped(trunk.prefix).rstrip(".") or trunk.table or "trunk"
                if name in encoders:
                    name = f"{trunk.table}.{name}"
                encoders.setdefault(name, []).append(trunk)
        # 2. Each trunk's model
        try:
            for name, alike in encoders.items():
                self.encoders[name] = []
                for trunk in alike:
                    placed = dataclasses.replace(trunk, form=self.form)
                    self.encoders[name].append(
                        placed.identified(self.tables[trunk.table])
                    )
        except BadInput as error:
            self.unknown, self.encoders = str(error), {}
        for alike in self.encoders.values():
            self.trunks += alike

    # --- which trunk ---

    def default_encoder(self) -> str | None:
        """The encoder that is taken where none is named; None where that would be a guess."""
        if self.form is not None:
            return self.form.default if self.form.default in self.encoders else None
        return next(iter(self.encoders)) if len(self.trunks) == 1 else None

    def choose(self, encoder: str | None = None) -> TrunkInFile:
        """The trunk to import, or BadInput that says why there is not exactly one."""
        with _naming(self.path):
            if self.unknown:
                raise BadInput(self.unknown)
            if not self.trunks:
                keys = [key for tensors in self.tables.values() for key in tensors]
                content = (
                    f"{len(keys)} tensors: {first_names(keys)}"
                    if keys
                    else "no tensors"
                )
                raise BadInput(f"no trunk in it; it holds {content}{self._hint()}")
            author = self._at_top("__author__")
            if author in _FOREIGN_AUTHORS:
                raise BadInput(
                    f"weights of '{author}' take BGR pixels and have their stride in the 1x1"
                    " convolution; such a network is not one of backbench's trunks"
                )
            encoder = encoder or self.default_encoder()
            if encoder is None:
                labels = " and ".join(f"'{trunk.label}'" for trunk in self.trunks)
                form, choices = self.form, " or ".join(map(shown, self.encoders))
                what = f"format {form.name} without its {form.default}" if form else ""
                raise BadInput(
                    f"holds a trunk under {labels}, {what or 'in no known format'}{self._hint()};"
                    f" choose with --encoder {choices} {_IN_IMPORT}"
                )
            if encoder not in self.encoders:
                raise BadInput(
                    f"no encoder '{encoder}' in it; {nearest(encoder, self.encoders)}"
                )
            first, *again = self.encoders[encoder]
            for other in again:  # the same weights written twice: they must be
                table, copy = self.tables[first.table], self.tables[other.table]
                for name, key in first.keys.items():
                    twin = other.keys.get(name)
                    if twin is None or not identical(table[key], copy[twin]):
                        raise BadInput(
                            f"'{first.label}' and '{other.label}' should be the same trunk"
                            f" but differ in {shown(key)}"
                        )
            return first

    # --- the whole trunk, or why not ---

    def checkpoint(
        self,
        trunk: TrunkInFile,
        stem: str | None = None,
        allow_missing_statistics: bool = False,
        *,
        copy: bool = True,
    ) -> Checkpoint:
        """Return the whole trunk as a Checkpoint. BadInput names the first tensors that do not fit.
        With `copy` False the tensors may still be the file's own memory."""
        # 1. Is it whole, and is all known that its tensors do not tell?
        with _naming(self.path):
            self._refuse_unless_whole(trunk, allow_missing_statistics)
            stem, pixels = _known_of(trunk, stem)
        # 2. What is beside the trunk, and where it comes from
        epochs, heads = self.epochs(), self._heads(trunk) if copy else {}
        provenance = {
            "name": self.path.name.split(".")[0],
            "source": self.path.name,
            "sha256": self.opened.sha256,
            "format": self.form.name if self.form else "unrecognised",
            "encoder": next(
                name for name, trunks in self.encoders.items() if trunk in trunks
            ),
            "prefix": f"{trunk.table}:{trunk.prefix}" if trunk.table else trunk.prefix,
        }
        format_is_known = self.form is not None and self.form.method != "unknown"
        if trunk.metadata.pixels is None and not format_is_known:
            provenance[PIXELS_FROM] = assumed_pixels(trunk.arch, pixels, "the file")
        # 3. The trunk
        tensors = trunk.assembled(self.tables[trunk.table])
        if (
            copy and self.opened.container == "torch zip"
        ):  # the others are not mapped from the file
            tensors = {ours: tensor.clone() for ours, tensor in tensors.items()}
        if self.missing_statistics(trunk) == "all":
            provenance["statistics"] = "missing in the file: mean 0 and variance 1"
            # As before the first batch
            for key, shape in trunk.shapes().items():
                if is_statistic(key):
                    tensors[key] = torch.full(
                        shape, 1.0 if key.endswith("var") else 0.0
                    )
        own = self._at_top("backbench")
        if (
            isinstance(own, Mapping)
            and self.form is not None
            and self.form.name == "detectron2"
        ):
            # `exporting.write_detectron2` wrote it, with all that is known about it
            if "name" not in own:
                raise BadInput(
                    f"{self.path}: its header is incomplete (KeyError('name'))"
                )
            checkpoint = from_about(
                self.path, {**own, "arch": trunk.arch}, state_dict=tensors
            )
            named = {**checkpoint.provenance, "name": own["name"]}
            return checkpoint.replace(provenance=named)
        return Checkpoint(
            arch=trunk.arch,
            stem=stem,
            method=self.form.method if self.form else "unknown",
            epochs=epochs,
            reading=trunk.reading(),
            state_dict=tensors,
            heads=heads,
            pixels=pixels,
            provenance=provenance | trunk.provenance(),
        )

    def _heads(self, trunk: TrunkInFile) -> dict[str, Tensor]:
        """The trunk's projector and predictor, whose tensors are all in the file."""
        table = self.tables[trunk.table]
        others = [other for other in self.trunks if other is not trunk and other.prefix]
        prefixes = tuple(other.prefix for other in others if other.table == trunk.table)
        heads = {}
        for key in trunk.head_keys(table, prefixes):
            if in_file(table[key]):
                heads[unwrapped(key)] = table[key].detach().clone()
        return heads

    def _refuse_unless_whole(
        self, trunk: TrunkInFile, allow_missing_statistics: bool
    ) -> None:
        problems = self.problems(trunk)
        if self.missing_statistics(trunk) == "all" and not allow_missing_statistics:
            raise BadInput(
                f"'{trunk.label}' has no batch-norm statistics (running_mean, running_var), so its"
                " frozen features would be noise; --allow-missing-statistics"
                f" {_IN_IMPORT} takes it for finetuning"
            )
        wrong = []
        for what, keys in problems.items():
            if keys:
                wrong.append(f"{len(keys)} {what}: {first_names(keys)}")
        if not wrong:
            return
        near = ""
        if problems["missing"]:
            # The file's own key that looks most like the first missing one. A key that a trunk of
            # another table has taken is not meant either
            taken = {key for trunk in self.trunks for key in trunk.keys.values()}
            free = [key for _, key in self._free() if key not in taken]
            close = difflib.get_close_matches(
                problems["missing"][0], free[:5000], 1, cutoff=0.8
            )
            near = f" (is '{shown(close[0])}' meant?)" if close else ""
        form = (
            f"format {self.form.name}"
            if self.form
            else f"no known format{self._hint()}"
        )
        advice = trunk.if_misshaped if problems["of the wrong shape"] else ""
        raise BadInput(
            f"'{trunk.label}' is not a whole {trunk.arch} ({form}): {'; '.join(wrong)}{near}{advice}"
        )

    def problems(self, trunk: TrunkInFile) -> dict[str, list[str]]:
        """Keys of the file (or `missing` ones) that keep the trunk from being whole."""
        if trunk.label in self._problems:
            return self._problems[trunk.label]
        shapes, tensors = trunk.shapes(), self.tables[trunk.table]
        misshaped, unusable = [], []
        for ours, key in trunk.keys.items():
            tensor = tensors[key]
            if tuple(tensor.shape) != shapes[ours]:
                misshaped.append(
                    f"{key} {tuple(tensor.shape)} instead of {shapes[ours]}"
                )
            elif reason := _unusable(ours, tensor):
                unusable.append(f"{key} ({reason})")
        missing = trunk.missing
        if (
            self.missing_statistics(trunk) == "all"
        ):  # refused or allowed as a whole, elsewhere
            missing = [k for k in missing if not is_statistic(k)]
        self._problems[trunk.label] = {
            "missing": [trunk.prefix + trunk.name_in_file(k) for k in missing],
            "extra inside the trunk": list(trunk.extra),
            "of the wrong shape": misshaped,
            "not usable": unusable + trunk.contradictions(tensors),
        }
        return self._problems[trunk.label]

    def missing_statistics(self, trunk: TrunkInFile) -> str:
        """'all' where the file keeps no running mean and variance at all, 'none' or 'some'."""
        wanted = [k for k in trunk.shapes() if is_statistic(k)]
        absent = sum(k not in trunk.keys for k in wanted)
        if not absent:
            return "none"
        return "all" if absent == len(wanted) else "some"

    def epochs(self) -> int | None:
        """Finished epochs, where the format counts them."""
        if self.form is None:
            return None
        key, add = self.form.epoch
        value = self.tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and 0 < value + add < 100_000
        ):
            return value + add
        return None

    # --- the rest of the file ---

    def leftovers(self) -> list[dict[str, str | int]]:
        """Tensors outside the trunks, by what they are for, with the first of each group."""
        groups: dict[str, list[tuple[str, int]]] = {}
        for table, key in self._free():
            name = f"{table}: {key}" if table else key
            elements = self.tables[table][key].numel()
            groups.setdefault(_group(table, key), []).append((name, elements))
        out: list[dict[str, str | int]] = []
        for group, some in sorted(groups.items()):
            about = {"tensors": len(some), "elements": sum(count for _, count in some)}
            out.append({"group": group, **about, "example": some[0][0]})
        return out

    def _free(self) -> list[tuple[str, str]]:
        """(table, key) of every tensor that belongs to no trunk."""
        taken = {
            (trunk.table, key) for trunk in self.trunks for key in trunk.keys.values()
        }
        every = [
            (table, key) for table, tensors in self.tables.items() for key in tensors
        ]
        return [place for place in every if place not in taken]

    def _at_top(self, key: str) -> object:
        """A value at the top of the file; None where it is not there."""
        return self.tree.get(key) if isinstance(self.tree, Mapping) else None

    def _hint(self) -> str:
        """The known format that a file in no known format is most like, for messages."""
        form = formats.nearest_format(self.tables) if self.form is None else None
        if form is None:
            return ""
        places = []
        for specs in form.encoders.values():
            prefixes = [spec.split(":")[-1] for spec in specs]
            places += [f"{prefix}*" for prefix in prefixes if prefix][:2]
        return f" (nearest format: {form.name}, with {', '.join(places)})"


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Puts the file's path before what is wrong with it."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def _known_of(trunk: TrunkInFile, stem: str | None) -> tuple[str, Pixels]:
    """The trunk's stem and pixels. BadInput with the option that says them where nothing else does."""
    stem, pixels = trunk.stem(stem), trunk.metadata.pixels or trunk.pixels()
    if stem is None:
        raise BadInput(
            "the first convolution is 3x3 and the file does not tell its padding; choose --stem conv3"
            " (padding 1: SimCLR, CLLR), conv3_p0 (MIO) or conv3_p2 (ARB, solo-learn)"
            f" {_IN_IMPORT}"
        )
    if pixels is None:
        raise BadInput(
            "neither the file nor one beside it tells the statistics of its pixels; choose"
            f" --pixels {' or '.join(PIXEL_CHOICES)} {_IN_IMPORT}"
        )
    return stem, pixels


def _unusable(name: str, tensor: Tensor) -> str:
    """Why a tensor cannot be `name` of a trunk; empty where it can."""
    if not in_file(tensor):
        return "its elements are not all in the file"
    if is_counter(name):
        return ""
    if not tensor.is_floating_point():
        return str(tensor.dtype).removeprefix("torch.")
    return unusable(name, tensor)


_GROUPS = (
    ("queue", ("queue", "memory_bank", "feature_bank")),
    ("predictor", ("predict",)),
    ("prototypes", ("prototype", "center", "last_layer")),
    ("classifier", ("classifier", "linear_", "cls_head")),
    ("projector", ("proj", "fc.", "head", "neck", "mlp", "g.", "bn.")),
)


def _group(table: str, key: str) -> str:
    """The purpose of a tensor outside the trunk, judged by its name."""
    if any(part in table.lower() for part in ("optim", "scheduler", "scaler", "amp")):
        return "optimiser"
    name = unwrapped(key).lower()
    for group, words in _GROUPS:
        if any(word in name for word in words):
            return group
    return "other"


def tables_of(tree: Tree) -> Tables:
    """Every dict of tensors under text keys in the file, by its dotted path ('': the file)."""
    out: Tables = {}
    seen: set[int] = set()  # a file may refer to one object many times, or to itself

    def walk(value: Tree, path: str, depth: int) -> None:
        if id(value) in seen or depth > DEEPEST:
            return
        if isinstance(value, Mapping):
            seen.add(id(value))
            tensors = {
                k: v
                for k, v in value.items()
                if isinstance(k, str) and isinstance(v, Tensor)
            }
            if tensors:
                out[path] = tensors
            children: Iterable[tuple[object, object]] = value.items()
        elif isinstance(value, list | tuple):
            seen.add(id(value))
            children = enumerate(value)
        else:
            return
        for key, child in children:
            if isinstance(child, Mapping | list | tuple):
                walk(child, f"{path}.{key}" if path else str(key), depth + 1)

    walk(tree, "", 0)
    return out
