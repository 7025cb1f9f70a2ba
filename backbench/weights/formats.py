"""Recognises a file's published format, which must account for every trunk in it.

If two formats fit, one must be a special case of the other (`refines`), or the file is refused.
"""

import difflib
import fnmatch
from collections.abc import Mapping

from backbench import plugins
from backbench.errors import BadInput
from backbench.runs.terminal import log
from backbench.weights.archs import FAMILIES
from backbench.weights.family import Format, Tables, Tree, TrunkInFile
from backbench.weights.tensor_names import unwrapped

__all__ = ["Format", "all_formats", "encoders_in", "nearest_format", "recognise"]

# A place without a table may be in any of these.
USUAL_TABLES = ("", "state_dict", "model", "model_state_dict", "net")


def all_formats() -> dict[str, Format]:
    """Return shipped and installed formats by name, and warn of a package that does not load."""
    rows = {row.name: row for family in FAMILIES for row in family.formats}
    for name in plugins.names(plugins.FORMATS, rows):
        try:
            rows[name] = plugins.load(plugins.FORMATS, name, Format)
        except BadInput as error:
            log.warning(str(error))
    return rows


def recognise(trunks: list[TrunkInFile], tables: Tables, tree: Tree) -> Format | None:
    """Return the format of all trunks, or None. BadInput if several fit and none refines others."""
    # 1. The file's other marks: the names of all tensors, and '@key' for each entry at its top
    marks = {unwrapped(key) for tensors in tables.values() for key in tensors}
    if isinstance(tree, Mapping):
        marks |= {f"@{key}" for key in tree}
    # 2. All formats that have a place for every trunk, and whose other marks are there
    fitting: list[Format] = []
    for form in all_formats().values():
        if encoders_in(form, trunks) is None:
            continue
        if not all(fnmatch.filter(marks, need) for need in form.needs):
            continue
        if form.test is None or form.test(tables, trunks):
            fitting.append(form)
    # 3. A format gives way to those that refine it; if two are left, nothing here can choose
    general = {name for form in fitting for name in form.refines}
    special = [form for form in fitting if form.name not in general]
    if len(special) > 1:
        names = " and ".join(f"'{form.name}'" for form in special)
        raise BadInput(
            f"it fits the formats {names} alike; convert it with a tool of one of them"
        )
    return special[0] if special else None


def encoders_in(
    form: Format, trunks: list[TrunkInFile]
) -> dict[str, list[TrunkInFile]] | None:
    """Return encoder -> the trunks in its places; None where a trunk of the file has no place."""
    encoder_at: dict[str, str] = {}
    for name, places in form.encoders.items():
        for place in places:
            if ":" in place:
                encoder_at.setdefault(place, name)
            else:
                for table in USUAL_TABLES:
                    encoder_at.setdefault(f"{table}:{place}", name)
    out: dict[str, list[TrunkInFile]] = {}
    for trunk in trunks:
        if trunk.dialect not in form.dialects or trunk.place not in encoder_at:
            return None
        out.setdefault(encoder_at[trunk.place], []).append(trunk)
    return out


def nearest_format(tables: Tables) -> Format | None:
    """Return the format whose places look most like the prefixes in this file, for messages."""
    # 1. The first words of the file's keys, in order, each once
    first_words: dict[str, None] = {}
    for tensors in tables.values():
        for key in tensors:
            first_words[unwrapped(key[:200]).split(".")[0]] = None
    # 2. The format with the most similar first word. Two words that are less alike than 0.6 have
    # nothing to do with one another
    best = None
    best_ratio = 0.6
    for family in FAMILIES:
        for form in family.formats:
            for places in form.encoders.values():
                for place in places:
                    expected = place.split(":")[-1].split(".")[0]
                    if not expected:
                        continue
                    for word in list(first_words)[:100]:
                        matcher = difflib.SequenceMatcher(None, expected, word)
                        if matcher.ratio() > best_ratio:
                            best = form
                            best_ratio = matcher.ratio()
    return best
