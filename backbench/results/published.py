"""The papers' own numbers, as package data: what a recipe must reach, and the rows beside the measured ones.

published.csv holds every vision number of the five papers' tables, one line per number. Its `key` names
one row of one printed table, so that (key, task, dataset, metric) names one number:

    paper:table:model:arch:epochs[:variant]
    lorac:1:lorac:resnet50:200    arb:2:arb:resnet50:100:projector-dim-256

Each part is in lower case, with runs of anything but letters, digits and . + = written as one dash; a part that the
table does not give is a single dash. `variant` stands only where a table prints several rows under one name; it is the
first statement of the note that is neither a spread ("std ...") nor a place ("in text"). Keys are stored, not computed:
`key_of` says how they are made and a test compares the two, so a key never changes when rows are added.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backbench.errors import BadInput, nearest
from backbench.tasks import TASKS

FILE = Path(__file__).parent / "published.csv"


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
        return tuple(
            Published(
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
            for line in csv.DictReader(file)
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
    return (
        text
        if text.startswith("did you")
        else f"keys look like lorac:1:lorac:resnet50:200 and are in {FILE.name}"
    )


def protocol(row: Published) -> tuple[str, str | None]:
    """(protocol, engine) of the leaderboard column that this number stands in.

    Where the authors scored a row themselves by a protocol that this suite has, it is that one. Rows that a table only
    quotes were scored by others in their own ways: each such table is a protocol of its own.
    """
    own = _PROTOCOLS.get((row.paper, row.table), ())
    for models, dataset, name in own:
        if row.model.startswith(models) and dataset in ("", row.dataset):
            return name, "detectron2" if TASKS[row.task].detects else None
    return f"{slug(row.paper)}-table-{slug(row.table)}", "detectron2" if TASKS[
        row.task
    ].detects else None


# (paper, table) -> (models that begin with, dataset or any, protocol); sources in protocols' recipes, configs/transfer.
_ANY = ("",)
_PROTOCOLS: dict[tuple[str, str], tuple[tuple[tuple[str, ...], str, str], ...]] = {
    ("LORAC", "1"): (
        (("LORAC", "MoCo-M"), "imagenet", "linear-lorac-imagenet-v1"),
        (("MoCo-v1", "MoCo-v2", "JCL"), "imagenet", "linear-moco-v1"),
    ),
    ("LORAC", "2"): ((_ANY, "", "linear-lorac-v1"),),
    ("LORAC", "3"): ((_ANY, "imagenet", "semisup-v1"),),
    ("LORAC", "4"): ((_ANY, "coco2017", "detection-1x-v1"),),
    ("LORAC", "5"): (
        (("MoCo-v2",), "imagenet100", "linear-moco-imagenet100-v1"),
        (_ANY, "imagenet100", "linear-lorac-imagenet100-v1"),
    ),
    ("JCL", "1"): ((("JCL", "MoCo-v1", "MoCo-v2"), "imagenet", "linear-moco-v1"),),
    ("JCL", "2"): ((_ANY, "coco2017", "detection-1x-v1"),),
    ("MIO", "4"): ((("MIO",), "stl10", "linear-mio-stl10-v1"), (("MIO",), "", "linear-mio-v1")),
    ("ARB", "2"): ((("ARB", "Barlow Twins"), "imagenet", "linear-arb-v1"),),
}


def tolerance(row: Published) -> float | None:
    """How far, in points, a measured value may be from this number; None where it is not judged (a spread)."""
    if row.metric.endswith("_std"):
        return None
    return TASKS[row.task].tolerance_on(row.dataset)


def keys_in(provenance: Mapping[str, Any]) -> list[str]:
    """The keys that a checkpoint's (or a result's) provenance names: a recipe's `expected`, `import --published`."""
    found: list[str] = []
    recipe = provenance.get("recipe")
    for holder in (
        provenance,
        recipe if isinstance(recipe, Mapping) else {},
        provenance.get("checkpoint"),
    ):
        if isinstance(holder, Mapping):
            for name in ("expected", "published"):
                value = holder.get(name)
                found += (
                    [value] if isinstance(value, str) else [str(v) for v in value] if value else []
                )
    return found


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.+=]+", "-", text.lower()).strip("-") or "-"


def key_of(line: Mapping[str, str], ambiguous: Collection[str] = ()) -> str:
    """The key of one line of the file; `ambiguous` holds the keys without variant that several printed rows share."""
    key = ":".join(
        slug(line[name]) for name in ("paper", "table", "model", "arch", "pretrain_epochs")
    )
    statements = (re.split(r"[(:]", part)[0].strip() for part in line["note"].split(";"))
    variant = next((s for s in statements if s and not s.startswith(("std ", "in text"))), "")
    return f"{key}:{slug(variant)}" if key in ambiguous and variant else key
