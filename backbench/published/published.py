"""The numbers that the five papers print: what a recipe must reach, and rows to compare with.

published.csv has one line per number of the papers' tables. Numbers on text and control, times and
spreads are among them, and are never judged (judging_rules.py). A `key` names one row of one
printed table, so that (key, task, dataset, metric) names one number:

    paper:table:model:arch:epochs[:variant][:set]
    lorac:1:lorac:resnet50:200    arb:2:arb:resnet50:100:projector-dim-256
    mio:4:mio-a:resnet50:250:stl10

Parts are in lower case. Every run of characters other than letters, digits and . + = becomes one
dash, and a part that the table does not print is a dash, too. Two parts are written only where
they are needed:

    variant   if a table prints several rows under one name: the first statement of the note that
              is neither a spread ("std ...") nor a location ("in text")
    set       if one printed row has models of several pretraining sets: the set, because a
              CIFAR-10 model does not answer for STL-10

Keys are stored in published.csv and not computed, so that new rows never change old keys.
"""

import csv
import functools
import re
from pathlib import Path

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from backbench.errors import BadInput, nearest
from backbench.weights import archs

FILE = Path(__file__).parent / "published.csv"
_NOT_IN_KEYS = re.compile(r"[^a-z0-9.+=]+")  # a key has a dash instead


@dataclass(frozen=True, kw_only=True, config=ConfigDict(populate_by_name=True))
class Published:
    """One printed number, in percent; CLLR's scores on control and its hours are as printed."""

    key: str
    paper: str
    table: str
    model: str
    arch: str = ""
    # None if the table does not say
    epochs: int | None = Field(default=None, validation_alias="pretrain_epochs")
    trained_on: str | None = None  # the pretraining set; None if untrained
    task: str
    dataset: str
    metric: str
    value: float
    quoted: bool = False  # the table's authors took it from others (judging_rules.py)
    note: str = ""

    @property
    def printed_row(self) -> str:
        """The key without the pretraining set: it names one line of the printed table."""
        return self.key.removesuffix(f":{self.trained_on}")


@functools.cache
def rows() -> tuple[Published, ...]:
    """Return every published number, in the order of the papers' tables."""
    with FILE.open(newline="") as file:
        lines = []
        for line in csv.DictReader(file):
            # Fields without text are left out, so that they get their defaults.
            lines.append({name: text for name, text in line.items() if text})
    return tuple(TypeAdapter(list[Published]).validate_python(lines))


@functools.cache
def _by_key() -> dict[str, list[Published]]:
    out: dict[str, list[Published]] = {}
    for row in rows():
        out.setdefault(row.key, []).append(row)
    return out


def lookup(key: str) -> list[Published]:
    """Return the numbers of one printed row. Raises BadInput, with the nearest key, if none has
    this key."""
    numbers = _by_key().get(key)
    if numbers:
        return numbers
    hint = nearest(key, _by_key())
    if not hint.startswith("did you"):
        # No key is near, and a line with all of them would help nobody.
        hint = f"keys look like lorac:1:lorac:resnet50:200 and are in {FILE.name}"
    raise BadInput(f"no published row '{key}'; {hint}")


def arch_in_tables(arch: str) -> str:
    """Return the name that papers print for a trunk, or `arch` itself if no family knows it."""
    try:
        return archs.family_of(arch).name_in_papers(arch)
    except BadInput:
        return arch


def slug(text: str) -> str:
    """Return `text` as one part of a key or of a file's name; a dash if nothing is left of it."""
    return _NOT_IN_KEYS.sub("-", text.lower()).strip("-") or "-"


def place_in_paper(table: str) -> str:
    """Return where a paper prints a table's numbers: Table 1, Fig. 7, Section 4.1.

    Section 4.1 is MIO's: its numbers stand in the text.
    """
    if table.lower().startswith("fig."):
        return f"Fig. {table[4:]}"
    return f"Section {table}" if table == "4.1" else f"Table {table}"


def grid_name(paper: str, table: str) -> str:
    """Return the grid of configs/grids that measures a table: lorac_table1, arb_fig7, mio_sec41."""
    place = place_in_paper(table).lower().replace(".", "")
    kind, _, number = place.partition(" ")
    short = kind.removesuffix("tion")  # section -> sec
    return f"{paper.lower()}_{short}{number}"


def variant(note: str) -> str | None:
    """Return the note's first statement that is neither a spread nor a location; None if it has
    none. What stands in brackets or behind a colon is no part of it."""
    for statement in note.split(";"):
        text = re.split(r"[(:]", statement)[0].strip()
        if text and not text.startswith(("std ", "in text")):
            return text
    return None
