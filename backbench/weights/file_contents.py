"""Finds the trunks in an opened weight file, and the published format that accounts for all of them.

A trunk is taken completely or not at all: every tensor must be there, have the right shape, and be
named as one known format names it; nothing inside the trunk may be left over.
"""

import contextlib
import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from backbench.errors import BadInput, nearest
from backbench.images.preprocess import Pixels
from backbench.untrusted.printable import shown
from backbench.weights import archs, formats, shards
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
    TrunkFamily,
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
    without_wrapped_parts,
)
from backbench.weights.weight_file import Opened

PIXEL_CHOICES = ("imagenet", "half", "clip")  # what --pixels takes
DEEPEST = 20  # deeper levels of nesting in a file are not looked at
# Only `import` has options for what a file does not tell; the other verbs read the file it writes.
_IN_IMPORT = "in `backbench import FILE --out X.safetensors`"
# Networks of these authors take BGR pixels and have the stride in the 1x1 convolution. Neither shows
# in the tensors.
_FOREIGN_AUTHORS = ("Detectron2 Model Zoo", "Caffe2", "MSRA")


# A classifier, or a projector of a few layers
_OF_A_HEAD = 20  # tensors
_OF_HEADS = re.compile(
    r"(^|\.|_)(fc|head|heads|classifier|linear|projector|predictor)\b"
)
# The end of a refusal of tensors that are no trunk's
_SAY_WHAT_IT_IS = (
    "say what it is with --arch timm:NAME (and --rename, where its names are others)"
    f" {_IN_IMPORT}, or measure the module itself in Python (docs/python.md)"
)


class FileContents:
    """An opened file's tables of tensors, its trunks, and the format that accounts for them."""

    def __init__(
        self,
        opened: Opened,
        metadata: TrunkMetadata = TrunkMetadata(),  # noqa: B008 - frozen
        rename: str = "",
    ) -> None:
        self.opened = opened
        self.path = opened.path
        self.tree = opened.tree
        self.tables = tables_of(opened.tree)
        self.form: formats.Format | None = None
        self.encoders: dict[str, list[TrunkInFile]] = {}
        self.trunks: list[TrunkInFile] = []
        # The refusal of a trunk that no known model fits; `choose` raises it.
        self.unknown = ""
        self._problems: dict[str, dict[str, list[str]]] = {}
        # The names that `--rename` has changed: the file's -> the trunk's
        self.renamed: Mapping[str, str] = {}
        # The tables in which nothing was renamed; no trunk is looked for in them
        self.dropped: Tables = {}
        with _naming(self.path):
            if rename:
                family = archs.family_of(metadata.arch)
                whole = self.tables
                self.tables, self.renamed = family.renamed(whole, metadata.arch, rename)
                self.dropped = {
                    table: tensors
                    for table, tensors in whole.items()
                    if table not in self.tables
                }
            families: Iterable[TrunkFamily] = archs.FAMILIES
            if metadata.arch:
                families = [archs.family_of(metadata.arch)]
            for family in families:
                trunks = family.find(self.tables, self.tree, self.path, metadata)
                if trunks:
                    self._recognise(trunks)
                    break

    def _recognise(self, trunks: list[TrunkInFile]) -> None:
        """Find the file's format, then give each trunk its name as an encoder, and its model."""
        # 1. The format and its encoders
        form = trunks[0].form or formats.recognise(trunks, self.tables, self.tree)
        encoders = formats.encoders_in(form, trunks) if form is not None else None
        if encoders is not None:
            self.form = form
        else:
            # In no known format each trunk is called by its prefix, or else by its table.
            encoders = {}
            for trunk in trunks:
                name = unwrapped(trunk.prefix).rstrip(".") or trunk.table or "trunk"
                if name in encoders:
                    name = f"{trunk.table}.{name}"
                encoders.setdefault(name, []).append(trunk)
        # 2. The model that each trunk is
        try:
            for name, alike in encoders.items():
                self.encoders[name] = []
                for trunk in alike:
                    placed = dataclasses.replace(trunk, form=self.form)
                    model = placed.identified(self.tables[trunk.table])
                    self.encoders[name].append(model)
        except BadInput as error:
            self.unknown = str(error)
            self.encoders = {}
        for alike in self.encoders.values():
            self.trunks += alike

    # --- which trunk ---

    def default_encoder(self) -> str | None:
        """Return the encoder to take where none is named; None where that would be a guess."""
        if self.form is not None:
            return self.form.default if self.form.default in self.encoders else None
        return next(iter(self.encoders)) if len(self.trunks) == 1 else None

    def choose(self, encoder: str | None = None) -> TrunkInFile:
        """Return the trunk to import, or raise BadInput that says why there is not exactly one."""
        with _naming(self.path), self._naming_the_whole():
            return self._chosen(encoder)

    @contextlib.contextmanager
    def _naming_the_whole(self) -> Iterator[None]:
        """Let a refusal of a file that is a piece of a model say how to join the pieces."""
        try:
            yield
        except BadInput:
            piece = shards.of_file(self.path, self._keys())
            if not piece:
                raise
            raise BadInput(piece) from None

    def _keys(self) -> list[str]:
        """List the keys of all tensors."""
        return [key for tensors in self.tables.values() for key in tensors]

    def _chosen(self, encoder: str | None) -> TrunkInFile:
        # 1. There is a trunk, and it is one that backbench can build
        if self.unknown:
            told = archs.advice(self.tables)
            raise BadInput(f"{self.unknown}; {told}" if told else self.unknown)
        if not self.trunks:
            keys = self._keys()
            if not keys:
                raise BadInput(
                    "no trunk in it; it holds no tensors: save model.state_dict() where it was trained"
                )
            content = f"{len(keys)} tensors: {first_names(keys)}"
            if len(keys) <= _OF_A_HEAD and all(map(_OF_HEADS.search, keys)):
                raise BadInput(
                    f"no trunk in it; it holds a head alone, {content}; give the file of the whole"
                    " model"
                )
            told = archs.advice(self.tables)
            if told:
                raise BadInput(f"in no known format: {told}")
            raise BadInput(
                f"no trunk in it; it holds {content}{self._hint()}; {_SAY_WHAT_IT_IS}"
            )
        author = self._at_top("__author__")
        if author in _FOREIGN_AUTHORS:
            raise BadInput(
                f"weights of '{author}' take BGR pixels and have their stride in the 1x1"
                " convolution; such a network is not one of backbench's trunks"
            )
        # 2. The encoder that was asked for, or the only sensible one
        encoder = encoder or self.default_encoder()
        if encoder is None:
            labels = " and ".join(f"'{trunk.label}'" for trunk in self.trunks)
            choices = " or ".join(map(shown, self.encoders))
            form = "in no known format"
            if self.form is not None:
                form = f"format {self.form.name} without its {self.form.default}"
            raise BadInput(
                f"holds a trunk under {labels}, {form}{self._hint()};"
                f" choose with --encoder {choices} {_IN_IMPORT}"
            )
        if encoder not in self.encoders:
            raise BadInput(
                f"no encoder '{encoder}' in it; {nearest(encoder, self.encoders)}"
            )
        # 3. A format may write an encoder more than once; all copies must have the same weights
        first, *copies = self.encoders[encoder]
        for copy in copies:
            for name, key in first.keys.items():
                twin = copy.keys.get(name)
                if twin is None or not identical(
                    self.tables[first.table][key], self.tables[copy.table][twin]
                ):
                    raise BadInput(
                        f"'{first.label}' and '{copy.label}' should be the same trunk"
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

        With `copy` False the heads are left out, and the tensors may still be the file's own memory.
        """
        # 1. The trunk is whole, and everything is known that its tensors do not tell
        with _naming(self.path), self._naming_the_whole():
            self._refuse_unless_whole(trunk, allow_missing_statistics)
            stem = _known_stem(trunk, stem)
            pixels = _known_pixels(trunk)
        # 2. Where it comes from
        encoder = next(
            name for name, trunks in self.encoders.items() if trunk in trunks
        )
        provenance = {
            "name": self.path.name.split(".")[0],
            "source": self.path.name,
            "sha256": self.opened.sha256,
            "format": self.form.name if self.form else "unrecognised",
            "encoder": encoder,
            "prefix": f"{trunk.table}:{trunk.prefix}" if trunk.table else trunk.prefix,
        }
        format_is_known = self.form is not None and self.form.method != "unknown"
        if trunk.metadata.pixels is None and not format_is_known:
            provenance[PIXELS_FROM] = assumed_pixels(trunk.arch, pixels, "the file")
        # 3. Its tensors
        tensors = trunk.assembled(self.tables[trunk.table])
        if copy and self.opened.container == "torch zip":
            # Only a torch zip is mapped: its tensors would change with the file.
            tensors = {ours: tensor.clone() for ours, tensor in tensors.items()}
        if self.missing_statistics(trunk) == "all":
            # These are the values of a batch norm before its first batch.
            provenance["statistics"] = "missing in the file: mean 0 and variance 1"
            for key, shape in trunk.shapes().items():
                if is_statistic(key):
                    value = 1.0 if key.endswith("var") else 0.0
                    tensors[key] = torch.full(shape, value)
        # 4. A file that `exporting.write_detectron2` wrote holds everything about its checkpoint
        own = self._at_top("backbench")
        is_detectron2 = self.form is not None and self.form.name == "detectron2"
        if isinstance(own, Mapping) and is_detectron2:
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
            epochs=self.epochs(),
            reading=trunk.reading(),
            state_dict=tensors,
            heads=self._heads(trunk) if copy else {},
            pixels=pixels,
            provenance=provenance | trunk.provenance(),
        )

    def _heads(self, trunk: TrunkInFile) -> dict[str, Tensor]:
        """Copy the trunk's classifier, projector and predictor, as far as their elements are in the
        file."""
        table = self.tables[trunk.table]
        heads = {}
        for key, name in self._names_of_heads(trunk).items():
            heads[name] = table[key].detach().clone()
        return heads

    def _names_of_heads(self, trunk: TrunkInFile) -> dict[str, str]:
        """Return key in the file -> name, for what is kept beside the trunk. A classifier has the
        names of the trunk's own library."""
        table = self.tables[trunk.table]
        prefixes = []
        for other in self.trunks:
            if other is not trunk and other.prefix and other.table == trunk.table:
                prefixes.append(other.prefix)
        names = {}
        for key in trunk.head_keys(table, tuple(prefixes)):
            names[key] = unwrapped(key)
        names |= trunk.classifier(table)
        return {key: name for key, name in names.items() if in_file(table[key])}

    def left_behind(self, trunk: TrunkInFile) -> list[str]:
        """Say what the file holds that goes in neither as the trunk nor as its head."""
        out = []
        for name, alike in self.encoders.items():
            if trunk not in alike:
                out.append(f"the encoder {shown(name)}")
        kept = {(trunk.table, key) for key in self._names_of_heads(trunk)}
        for group in self._grouped(kept):
            example = shown(str(group["example"]), 150)
            out.append(f"{group['group']}: {group['tensors']} ({example})")
        return out

    def _refuse_unless_whole(
        self, trunk: TrunkInFile, allow_missing_statistics: bool
    ) -> None:
        """BadInput names everything that keeps the trunk from being whole, and what may be meant."""
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
        meant = ""
        if problems["missing"]:
            # Suggest the file's own key that looks most like the first missing one. A key that a
            # trunk of another table has taken is not meant.
            taken = {key for trunk in self.trunks for key in trunk.keys.values()}
            free = [key for _, key in self._free() if key not in taken]
            close = difflib.get_close_matches(
                problems["missing"][0], free[:5000], 1, cutoff=0.8
            )
            if close:
                meant = f" (is '{shown(close[0])}' meant?)"
        form = f"no known format{self._hint()}"
        if self.form is not None:
            form = f"format {self.form.name}"
        advice = ""
        if problems["of the wrong shape"]:
            told = archs.advice(self.tables)
            advice = f"; {told}" if told else trunk.if_misshaped
        if not advice:
            advice = f"; {_next_step(problems)}"
        raise BadInput(
            f"'{trunk.label}' is not a whole {trunk.arch} ({form}):"
            f" {'; '.join(wrong)}{meant}{advice}"
        )

    def problems(self, trunk: TrunkInFile) -> dict[str, list[str]]:
        """Return the keys that keep the trunk from being whole, by what is wrong with them.

        All are the file's own keys, but for the `missing` ones.
        """
        if trunk.label in self._problems:
            return self._problems[trunk.label]
        shapes = trunk.shapes()
        tensors = self.tables[trunk.table]
        # 1. Tensors that are there, but have another shape or cannot be computed with
        misshaped = []
        not_usable = []
        for ours, key in trunk.keys.items():
            tensor = tensors[key]
            if tuple(tensor.shape) != shapes[ours]:
                misshaped.append(
                    f"{key} {tuple(tensor.shape)} instead of {shapes[ours]}"
                )
            elif reason := _why_unusable(ours, tensor):
                not_usable.append(f"{key} ({reason})")
        # 2. Tensors that are not there
        missing = trunk.missing
        if self.missing_statistics(trunk) == "all":
            # `checkpoint` refuses or allows the lack of all statistics as a whole.
            missing = [key for key in missing if not is_statistic(key)]
        self._problems[trunk.label] = {
            "missing": [trunk.prefix + trunk.name_in_file(key) for key in missing],
            "extra inside the trunk": list(trunk.extra),
            "of the wrong shape": misshaped,
            "not usable": not_usable + trunk.contradictions(tensors),
        }
        return self._problems[trunk.label]

    def missing_statistics(self, trunk: TrunkInFile) -> str:
        """Return how many running means and variances the file lacks: 'all', 'some' or 'none'."""
        wanted = [key for key in trunk.shapes() if is_statistic(key)]
        absent = [key for key in wanted if key not in trunk.keys]
        if not absent:
            return "none"
        return "all" if len(absent) == len(wanted) else "some"

    def epochs(self) -> int | None:
        """Return how many epochs were finished; None where the file does not tell."""
        if self.form is None:
            return None
        key, add = self.form.epoch
        value = self.tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        # True is an int in Python, but no count.
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        finished = value + add
        return finished if 0 < finished < 100_000 else None

    # --- the rest of the file ---

    def leftovers(self) -> list[dict[str, str | int]]:
        """Count the tensors outside the trunks, grouped by purpose, with an example of each group."""
        return self._grouped(set())

    def _grouped(self, kept: set[tuple[str, str]]) -> list[dict[str, str | int]]:
        """Group the tensors outside the trunks, without those that are `kept`."""
        groups: dict[str, list[tuple[str, int]]] = {}
        for table, key in self._free():
            if (table, key) in kept:
                continue
            name = f"{table}: {key}" if table else key
            elements = (self.tables | self.dropped)[table][key].numel()
            groups.setdefault(_purpose(table, key), []).append((name, elements))
        out: list[dict[str, str | int]] = []
        for purpose, tensors in sorted(groups.items()):
            row: dict[str, str | int] = {
                "group": purpose,
                "tensors": len(tensors),
                "elements": sum(elements for _, elements in tensors),
                "example": tensors[0][0],
            }
            out.append(row)
        return out

    def _free(self) -> list[tuple[str, str]]:
        """List (table, key) of every tensor that belongs to no trunk."""
        taken = {
            (trunk.table, key) for trunk in self.trunks for key in trunk.keys.values()
        }
        free = []
        for table, tensors in (self.tables | self.dropped).items():
            free += [(table, key) for key in tensors if (table, key) not in taken]
        return free

    def _at_top(self, key: str) -> object:
        """Return a value at the top of the file; None where it is not there."""
        return self.tree.get(key) if isinstance(self.tree, Mapping) else None

    def _hint(self) -> str:
        """Name the format that a file in no known format is most like, for the end of a message."""
        if self.form is not None:
            return ""
        form = formats.nearest_format(self.tables)
        if form is None:
            return ""
        examples = []
        for places in form.encoders.values():
            prefixes = [place.split(":")[-1] for place in places]
            examples += [f"{prefix}*" for prefix in prefixes if prefix][:2]
        return f" (nearest format: {form.name}, with {', '.join(examples)})"


def _next_step(problems: Mapping[str, Sequence[str]]) -> str:
    """Say what to do about a trunk that is not whole."""
    if problems["missing"]:
        return "give the whole file, as its training wrote it"
    if problems["extra inside the trunk"] or problems["of the wrong shape"]:
        return f"it is another network: {_SAY_WHAT_IT_IS}"
    if any("not finite" in problem for problem in problems["not usable"]):
        return "the training has diverged: give an earlier checkpoint of it"
    return "give the file as its training wrote it, in floating point"


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's path before the message of a BadInput."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def _known_stem(trunk: TrunkInFile, wanted: str | None) -> str:
    """Return the trunk's stem. BadInput names the option that tells it where nothing else does."""
    stem = trunk.stem(wanted)
    if stem is None:
        raise BadInput(
            "the first convolution is 3x3 and the file does not tell its padding; choose --stem conv3"
            " (padding 1: SimCLR, CLLR), conv3_p0 (MIO) or conv3_p2 (ARB, solo-learn)"
            f" {_IN_IMPORT}"
        )
    return stem


def _known_pixels(trunk: TrunkInFile) -> Pixels:
    """Return the trunk's pixels. BadInput names the option that tells them where nothing else does."""
    pixels = trunk.metadata.pixels or trunk.pixels()
    if pixels is None:
        raise BadInput(
            "neither the file nor one beside it tells the statistics of its pixels; choose"
            f" --pixels {' or '.join(PIXEL_CHOICES)} {_IN_IMPORT}"
        )
    return pixels


def _why_unusable(name: str, tensor: Tensor) -> str:
    """Say why a tensor cannot be the trunk's `name`; empty where it can."""
    if not in_file(tensor):
        return "its elements are not all in the file"
    if is_counter(name):
        return ""
    if not tensor.is_floating_point():
        return str(tensor.dtype).removeprefix("torch.")
    return unusable(name, tensor)


# Purpose -> parts of a name that tell it; the first that fits counts.
_PURPOSES = (
    ("queue", ("queue", "memory_bank", "feature_bank")),
    ("predictor", ("predict",)),
    ("prototypes", ("prototype", "center", "last_layer")),
    ("classifier", ("classifier", "linear_", "cls_head")),
    ("projector", ("proj", "fc.", "head", "neck", "mlp", "g.", "bn.")),
)


def _purpose(table: str, key: str) -> str:
    """Guess the purpose of a tensor outside the trunk by its name."""
    if any(part in table.lower() for part in ("optim", "scheduler", "scaler", "amp")):
        return "optimiser"
    name = unwrapped(key).lower()
    for purpose, parts in _PURPOSES:
        if any(part in name for part in parts):
            return purpose
    return "other"


def _without_wrapped_parts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name a table's tensors as if no part of the model had been wrapped. A table in which two
    tensors would then have one name stays as it is."""
    renamed = {without_wrapped_parts(key): value for key, value in tensors.items()}
    return renamed if len(renamed) == len(tensors) else tensors


def tables_of(tree: Tree) -> Tables:
    """Find every dict of tensors in the file, by its dotted path (the file's top has path '').

    Tensors are named without the wrappers of the model's parts.
    """
    out: Tables = {}
    # A file may refer to one object many times, or to itself; each is walked once.
    seen: set[int] = set()

    def walk(value: Tree, path: str, depth: int) -> None:
        if id(value) in seen or depth > DEEPEST:
            return
        if isinstance(value, Mapping):
            seen.add(id(value))
            tensors = {}
            for key, child in value.items():
                if isinstance(key, str) and isinstance(child, Tensor):
                    tensors[key] = child
            if tensors:
                out[path] = _without_wrapped_parts(tensors)
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
