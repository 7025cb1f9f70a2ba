"""How far a printed table is in some run folders: which of its numbers are measured, on the way, or
missing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from backbench.board.board import collect
from backbench.board.judge import Judged, expected_keys, judge
from backbench.errors import BadInput
from backbench.papers.catalogue import PrintedItem, sweeps
from backbench.recipes import config
from backbench.results.judging_rules import as_measured
from backbench.results.published import Published, keys_in
from backbench.runs.folder import RECIPE_FILE
from backbench.runs.step_metrics import read_metrics

MEASURED, RUNNING, MISSING = "measured", "running", "missing"


@dataclass(frozen=True)
class NumberState:
    """One printed number: how it stands, and the measurements of it (one per checkpoint)."""

    number: Published
    state: str  # one of the three, or why it is not judged
    judged: tuple[Judged, ...] = ()


def states(item: PrintedItem, runs: Sequence[Path]) -> list[NumberState]:
    """Every number of a table or figure, in its order."""
    board = collect(runs)
    by_number: dict[tuple[str, str, str, str], list[Judged]] = {}
    for one in judge(board, expected_keys(board, runs)):
        what = (one.key, one.column.task, one.column.dataset, one.column.metric)
        by_number.setdefault(what, []).append(one)
    begun = _begun(runs)
    found = []
    for n in item.numbers:
        judged = by_number.get((n.key, n.task, n.dataset, as_measured(n).metric), [])
        state = item.why_not(n) or (RUNNING if n.key in begun else MISSING)
        found.append(NumberState(n, MEASURED if judged else state, tuple(judged)))
    return found


class Speed(NamedTuple):
    """What a pretraining took: medians and peaks of its metrics.jsonl."""

    name: str
    batch_size: int
    images_per_s: float
    memory_gib: float


def speeds(item: PrintedItem, runs: Sequence[Path]) -> list[Speed]:
    """Of the pretrainings of a grid that measures nothing else, by name."""
    names = [text for sweep in sweeps(item.grid) for text in sweep.overrides]
    stems = {f"{text.removeprefix('name=')} " for text in names if text.startswith("name=")}
    found = []
    for run in runs:
        for file in run.rglob(RECIPE_FILE):
            recipe = _recipe(file)
            name, batch = str(recipe.get("name")), recipe.get("batch_size")
            if not isinstance(batch, int) or not name.startswith(tuple(stems)):
                continue
            rows = [row for row in read_metrics(file.parent) if "images_per_s" in row]
            if rows:
                speed = statistics.median(row["images_per_s"] for row in rows)
                peak = max(row.get("memory_gib", 0.0) for row in rows)
                found.append(Speed(name, batch, speed, peak))
    return sorted(found)


def _recipe(file: Path) -> dict[str, Any]:
    """A run's own recipe; nothing where it was torn while it began, which launch names."""
    try:
        return config.read_yaml(file)
    except BadInput:
        return {}


def _begun(runs: Sequence[Path]) -> set[str]:
    """The keys that the pretrainings below `runs` must reach, finished or not."""
    keys: set[str] = set()
    for run in runs:
        for file in run.rglob(RECIPE_FILE):
            keys.update(keys_in({"recipe": (recipe := _recipe(file)), **recipe}))
    return keys
