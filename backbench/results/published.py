"""The papers' own numbers, as package data: what a recipe must reach, and rows to compare with.

published.csv holds every vision number of the five papers' tables, one line per number. Its `key`
names one row of one printed table, so that (key, task, dataset, metric) names one number:

    paper:table:model:arch:epochs[:variant][:set]
    lorac:1:lorac:resnet50:200    arb:2:arb:resnet50:100:projector-dim-256
    mio:4:mio-a:resnet50:250:stl10

Each part is in lower case, with runs of anything but letters, digits and . + = written as one dash;
a part that the table does not give is a single dash. `variant` stands only where a table prints
several rows under one name; it is the first statement of the note that is neither a spread ("std
...") nor a place ("in text"). `set` is what the model was pretrained on, where a printed row has
models of several: who trained on CIFAR-10 does not answer for the number of STL-10. Keys are
stored, not computed: `key_of` says how the parts before the set are made and a test compares the
two, so a key never changes when rows are added.

Which of the numbers are judged, and by what, says `scored`.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from backbench.errors import BadInput, nearest

FILE = Path(__file__).parent / "published.csv"
_OTHER = re.compile(r"[^a-z0-9.+=]+")  # what a key writes as a dash


@dataclass(frozen=True, kw_only=True)
class Published:
    """One printed number, in percent. `epochs` None: the table does not say."""

    key: str
    paper: str
    table: str
    model: str
    arch: str
    epochs: int | None
    trained_on: str | None  # the pretraining set; None: untrained
    task: str
    dataset: str
    metric: str
    value: float
    quoted: bool  # by the table's authors, from others
    note: str

    @property
    def printed_row(self) -> str:
        """The key without the pretraining set: one line of the printed table."""
        return self.key.removesuffix(f":{self.trained_on}")


@functools.cache
def rows() -> tuple[Published, ...]:
    """Every published vision number, in the order of the papers' tables."""
    with FILE.open(newline="") as file:
        return tuple(map(_from_line, csv.DictReader(file)))


def _from_line(line: Mapping[str, str]) -> Published:
    return Published(
        key=line["key"],
        paper=line["paper"],
        table=line["table"],
        model=line["model"],
        arch=line["arch"],
        epochs=int(line["pretrain_epochs"]) if line["pretrain_epochs"] else None,
        trained_on=line["trained_on"] or None,
        task=line["task"],
        dataset=line["dataset"],
        metric=line["metric"],
        value=float(line["value"]),
        quoted=line["quoted"] == "yes",
        note=line["note"],
    )


@functools.cache
def _by_key() -> dict[str, tuple[Published, ...]]:
    out: dict[str, list[Published]] = {}
    for row in rows():
        out.setdefault(row.key, []).append(row)
    return {key: tuple(numbers) for key, numbers in out.items()}


def lookup(key: str) -> tuple[Published, ...]:
    """The numbers of one printed row. Raises BadInput with the nearest key."""
    found = _by_key().get(key)
    if not found:
        raise BadInput(f"no published row '{key}'; {_nearest_key(key)}")
    return found


def _nearest_key(key: str) -> str:
    text = nearest(key, _by_key())
    if text.startswith("did you"):
        return text
    # none is near: 692 keys in one line would help nobody
    return f"keys look like lorac:1:lorac:resnet50:200 and are in {FILE.name}"


def keys_in(provenance: Mapping[str, object]) -> list[str]:
    """The keys that a checkpoint's (or a result's) provenance names: a recipe's `expected`,
    `import --published`, as one key or a list."""
    found: list[str] = []
    holders = (provenance, provenance.get("recipe"), provenance.get("checkpoint"))
    for holder in holders:
        if not isinstance(holder, Mapping):
            continue
        for name in ("expected", "published"):
            value = holder.get(name)
            if isinstance(value, str):
                found.append(value)
            elif isinstance(value, list | tuple):
                found += map(str, value)
    return [_with_set(key, provenance) for key in found]


def _with_set(key: str, provenance: Mapping[str, object]) -> str:
    """A key from before keys held the pretraining set, with the set that the provenance's own
    recipe trained on; others as they are."""
    recipe = provenance.get("recipe")
    data = recipe.get("data") if isinstance(recipe, Mapping) else None
    trained_on = data.get("dataset") if isinstance(data, Mapping) else None
    longer = f"{key}:{trained_on}"
    return longer if key not in _by_key() and longer in _by_key() else key


def arch_in_tables(arch: str) -> str:
    """The name that papers print for a trunk; a row's own name where no family knows it."""
    from backbench.weights import archs

    try:
        return archs.family_of(arch).name_in_papers(arch)
    except BadInput:
        return arch


def slug(text: str) -> str:
    """`text` as one part of a key or of a file's name; a dash where nothing is left of it."""
    return _OTHER.sub("-", text.lower()).strip("-") or "-"


def key_of(line: Mapping[str, str], ambiguous: Collection[str] = ()) -> str:
    """The key of one line of the file, before the pretraining set; `ambiguous` holds the keys
    without variant that several printed rows share."""
    parts = [slug(line[name]) for name in ("paper", "table", "model", "arch", "pretrain_epochs")]
    key = ":".join(parts)
    if key not in ambiguous:
        return key
    found = variant(line["note"])
    return f"{key}:{slug(found)}" if found else key


def variant(note: str) -> str | None:
    """What tells rows of one name apart: the note's first statement that is neither a spread nor a
    place."""
    for statement in note.split(";"):
        found = re.split(r"[(:]", statement)[0].strip()
        if found and not found.startswith(("std ", "in text")):
            return found
    return None
