"""Finds the trunks in an opened weight file, and the published format that accounts for all of them.

A trunk is taken completely or not at all: every tensor must be there, have the right shape, and be
named as one known format names it; nothing inside the trunk may be left over.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from backbench.errors import BadInput
from backbench.weights import archs, formats, shards
from backbench.weights.family import Tables, TrunkFamily, TrunkInFile, TrunkMetadata
from backbench.weights.tensor_names import unwrapped
from backbench.weights.tensor_tables import tables_of
from backbench.weights.weight_file import Opened

# Only `import` has options for what a file does not tell; the other verbs read the file it writes.
IN_IMPORT = "in `backbench import FILE --out X.safetensors`"
# The end of a refusal of tensors that are no trunk's
SAY_WHAT_IT_IS = (
    "say what it is with --arch timm:NAME (and --rename, where its names are others)"
    f" {IN_IMPORT}, or measure the module itself in Python (docs/python.md)"
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
        # The refusal of a trunk that no known model fits; `choosing.choose` raises it.
        self.unknown = ""
        # A trunk's label -> what `wholeness.problems` has found, which looks at every element
        self.problems: dict[str, dict[str, list[str]]] = {}
        # The names that `--rename` has changed: the file's -> the trunk's
        self.renamed: Mapping[str, str] = {}
        # The tables in which nothing was renamed; no trunk is looked for in them
        self.dropped: Tables = {}
        with self.refusals():
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

    def default_encoder(self) -> str | None:
        """Return the encoder to take where none is named; None where that would be a guess."""
        if self.form is not None:
            return self.form.default if self.form.default in self.encoders else None
        return next(iter(self.encoders)) if len(self.trunks) == 1 else None

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Name the file in a refusal of what is in it. Where the file is a piece of a model, say how
        to join the pieces instead."""
        try:
            yield
        except BadInput as error:
            piece = shards.of_file(self.path, self.keys())
            raise BadInput(f"{self.path}: {piece or error}") from None

    def keys(self) -> list[str]:
        """List the keys of all tensors."""
        return [key for tensors in self.tables.values() for key in tensors]

    def free(self) -> list[tuple[str, str]]:
        """List (table, key) of every tensor that belongs to no trunk."""
        taken = {
            (trunk.table, key) for trunk in self.trunks for key in trunk.keys.values()
        }
        free = []
        for table, tensors in (self.tables | self.dropped).items():
            free += [(table, key) for key in tensors if (table, key) not in taken]
        return free

    def at_top(self, key: str) -> object:
        """Return a value at the top of the file; None where it is not there."""
        return self.tree.get(key) if isinstance(self.tree, Mapping) else None

    def hint(self) -> str:
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
