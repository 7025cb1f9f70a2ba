"""Which published format a file has.

`recognise` says which format accounts for every trunk in a file. Where two fit, one of them must say
that it is a special case of the other (`refines`), or the file is refused.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping

from backbench import plugins
from backbench.errors import BadInput
from backbench.runs.terminal import log
from backbench.weights.archs import FAMILIES
from backbench.weights.family import Format, Tables, Tree, TrunkInFile
from backbench.weights.tensor_names import unwrapped

__all__ = ["Format", "all_formats", "nearest_format", "placed", "recognise"]

# Where a place without a table is looked for
USUAL_TABLES = ("", "state_dict", "model", "model_state_dict", "net")


def all_formats() -> dict[str, Format]:
    """The shipped rows and those of installed packages (plugins.py), by name.

    A package that cannot be loaded is named and left out: the shipped formats do not need it.
    """
    rows = {row.name: row for family in FAMILIES for row in family.formats}
    for name in plugins.names(plugins.FORMATS, rows):
        try:
            rows[name] = plugins.load(plugins.FORMATS, name, Format)
        except BadInput as error:
            log.warning(str(error))
    return rows


# A format and its encoders: name -> trunks
Recognised = tuple[Format, dict[str, list[TrunkInFile]]]


def recognise(trunks: list[TrunkInFile], tables: Tables, tree: Tree) -> Recognised | None:
    """The format that accounts for every trunk in the file, with its encoders; None where there is
    none.

    Raises BadInput where several do and none of them is a special case of the others.
    """
    if not trunks:
        return None
    # 1. The file's other marks: the names of all tensors, and `@` of all entries.
    marks = {unwrapped(key) for tensors in tables.values() for key in tensors}
    if isinstance(tree, Mapping):
        marks |= {f"@{key}" for key in tree}
    # 2. All formats that have a place for every trunk, and whose other marks are there.
    fitting: dict[str, Recognised] = {}
    for form in all_formats().values():
        encoders = _encoders(form, trunks)
        if encoders is not None and _has_marks(form, marks, tables, trunks):
            fitting[form.name] = form, encoders
    # 3. A format gives way to those that refine it; if two are left, nothing here can choose.
    general = {name for form, _ in fitting.values() for name in form.refines}
    special = [each for name, each in fitting.items() if name not in general]
    if len(special) > 1:
        names = " and ".join(f"'{form.name}'" for form, _ in special)
        raise BadInput(
            f"it fits the formats {names} alike; convert it with the tool of one of them"
        )
    return special[0] if special else None


def placed(form: Format, trunks: list[TrunkInFile]) -> Recognised | None:
    """This format's encoders, where every trunk has a place in it."""
    encoders = _encoders(form, trunks)
    return None if encoders is None else (form, encoders)


def _encoders(form: Format, trunks: list[TrunkInFile]) -> dict[str, list[TrunkInFile]] | None:
    """Encoder -> the trunks that stand in its places; None where a trunk of the file has no place
    in this format."""
    out: dict[str, list[TrunkInFile]] = {}
    for trunk in trunks:
        if trunk.dialect not in form.dialects:
            return None
        encoder = _encoder_at(trunk.place, form)
        if encoder is None:
            return None
        out.setdefault(encoder, []).append(trunk)
    return out


def _encoder_at(place: str, form: Format) -> str | None:
    """The encoder that a format keeps in this place."""
    for name, places in form.encoders.items():
        for each in places:
            usual = [each] if ":" in each else [f"{table}:{each}" for table in USUAL_TABLES]
            if place in usual:
                return name
    return None


def _has_marks(form: Format, marks: set[str], tables: Tables, trunks: list[TrunkInFile]) -> bool:
    """True where everything else is there that tells this format from others."""
    for need in form.needs:
        if not fnmatch.filter(marks, need):
            return False
    return form.test is None or form.test(tables, trunks)


def nearest_format(tables: Tables) -> Format | None:
    """The format whose places look most like the prefixes in this file, for error messages."""
    prefixes: dict[str, None] = {}  # in order, each once
    for tensors in tables.values():
        for key in tensors:
            prefixes[unwrapped(key[:200]).split(".")[0]] = None
    best, score = None, 0.6  # a likeness below that is none
    for form in (form for family in FAMILIES for form in family.formats):
        for start in _starts(form):
            for prefix in list(prefixes)[:100]:
                ratio = difflib.SequenceMatcher(None, start, prefix).ratio()
                if ratio > score:
                    best, score = form, ratio
    return best


def _starts(form: Format) -> list[str]:
    """The first parts of the prefixes under which a format keeps its trunks."""
    out = []
    for specs in form.encoders.values():
        for spec in specs:
            prefix = spec.split(":")[-1]
            if prefix:
                out.append(prefix.split(".")[0])
    return out
