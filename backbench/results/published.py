"""The papers' own numbers, as package data: what a recipe must reach, and rows to compare with.

published.csv holds every vision number of the five papers' tables, one line per number. Its `key`
names one row of one printed table, so that (key, task, dataset, metric) names one number:

    paper:table:model:arch:epochs[:variant]
    lorac:1:lorac:resnet50:200    arb:2:arb:resnet50:100:projector-dim-256

Each part is in lower case, with runs of anything but letters, digits and . + = written as one dash;
a part that the table does not give is a single dash. `variant` stands only where a table prints
several rows under one name; it is the first statement of the note that is neither a spread ("std
...") nor a place ("in text"). Keys are stored, not computed: `key_of` says how they are made and a
test compares the two, so a key never changes when rows are added.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from backbench.errors import BadInput, nearest
from backbench.tasks import TASKS

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
    task: str
    dataset: str
    metric: str
    value: float
    note: str


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
        task=line["task"],
        dataset=line["dataset"],
        metric=line["metric"],
        value=float(line["value"]),
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


@dataclass(frozen=True, kw_only=True)
class OwnProtocol:
    """Which rows of a printed table its authors scored by a protocol that this suite has."""

    protocol: str
    models: tuple[str, ...] = ("",)  # how the models' names begin; "" is any
    dataset: str = ""  # "" is any


# (paper, table) -> protocols of its own rows; the first that fits counts. From configs/transfer.
_OWN: dict[tuple[str, str], tuple[OwnProtocol, ...]] = {
    ("LORAC", "1"): (
        OwnProtocol(
            protocol="linear-lorac-imagenet-v1", models=("LORAC", "MoCo-M"), dataset="imagenet"
        ),
        OwnProtocol(
            protocol="linear-moco-v1", models=("MoCo-v1", "MoCo-v2", "JCL"), dataset="imagenet"
        ),
    ),
    ("LORAC", "2"): (OwnProtocol(protocol="linear-lorac-v1"),),
    ("LORAC", "3"): (OwnProtocol(protocol="semisup-v1", dataset="imagenet"),),
    ("LORAC", "4"): (OwnProtocol(protocol="detection-1x-v1", dataset="coco2017"),),
    ("LORAC", "5"): (
        OwnProtocol(
            protocol="linear-moco-imagenet100-v1", models=("MoCo-v2",), dataset="imagenet100"
        ),
        OwnProtocol(protocol="linear-lorac-imagenet100-v1", dataset="imagenet100"),
    ),
    ("JCL", "1"): (
        OwnProtocol(
            protocol="linear-moco-v1", models=("JCL", "MoCo-v1", "MoCo-v2"), dataset="imagenet"
        ),
    ),
    ("JCL", "2"): (OwnProtocol(protocol="detection-1x-v1", dataset="coco2017"),),
    ("MIO", "4"): (
        OwnProtocol(protocol="linear-mio-stl10-v1", models=("MIO",), dataset="stl10"),
        OwnProtocol(protocol="linear-mio-v1", models=("MIO",)),
    ),
    ("ARB", "2"): (
        OwnProtocol(protocol="linear-arb-v1", models=("ARB", "Barlow Twins"), dataset="imagenet"),
    ),
}


def protocol(row: Published) -> tuple[str, str | None]:
    """(protocol, engine) of the leaderboard column that this number stands in.

    Where the authors scored a row themselves by a protocol that this suite has, it is that one.
    Rows that a table only quotes were scored by others in their own ways: each such table is a
    protocol of its own.
    """
    engine = "detectron2" if TASKS[row.task].detects else None
    for own in _OWN.get((row.paper, row.table), ()):
        if row.model.startswith(own.models) and own.dataset in ("", row.dataset):
            return own.protocol, engine
    return f"{slug(row.paper)}-table-{slug(row.table)}", engine


def tolerance(row: Published) -> float | None:
    """How far, in points, a measured value may be from this number; None where it is not judged."""
    if row.metric.endswith("_std"):  # a spread
        return None
    return TASKS[row.task].tolerance_on(row.dataset)


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
    return found


def slug(text: str) -> str:
    """`text` as one part of a key or of a file's name; a dash where nothing is left of it."""
    return _OTHER.sub("-", text.lower()).strip("-") or "-"


def key_of(line: Mapping[str, str], ambiguous: Collection[str] = ()) -> str:
    """The key of one line of the file; `ambiguous` holds the keys without variant that several
    printed rows share."""
    parts = [slug(line[name]) for name in ("paper", "table", "model", "arch", "pretrain_epochs")]
    key = ":".join(parts)
    if key not in ambiguous:
        return key
    for statement in line["note"].split(";"):
        variant = re.split(r"[(:]", statement)[0].strip()
        if variant and not variant.startswith(("std ", "in text")):
            return f"{key}:{slug(variant)}"
    return key
