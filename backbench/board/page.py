"""leaderboard.html: one self-contained file with the table, the charts and every number's origin.

page.html is filled with page.css, the scripts page_*.js and two blocks of JSON; the page asks the
network for nothing. `data` is drawn at once; `origins`, most of the page, is read when the first
number is opened. A table is one list per field, so each field's name is written once.
"""

import importlib.metadata
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from backbench.board.board import (
    MEASURED,
    Board,
    Cell,
    Column,
    Measurement,
    PairedDifference,
    many_objects,
    noise_of,
    noise_words,
    standing,
)
from backbench.board.export import command_again
from backbench.board.overall import Overall
from backbench.board.page_figures import Record
from backbench.runs import atomic
from backbench.tasks import TASKS
from backbench.verify import verification

HERE = Path(__file__).parent
# page_*.js in the order in which they stand in the page; the last one draws it
SCRIPTS = ("data", "table", "number", "charts", "ranks", "pairs", "curves", "sections")
# Provenance takes at most so many bytes; with many results each long value is cut to its share.
TEXT_BYTES = 20_000_000
SHORTEST_TEXT = 150

_IN_ORDER = json.JSONEncoder(
    sort_keys=True
).encode  # json.dumps would make an encoder each time

Table = dict[str, list[object]]  # field -> its value in every record
# The fields of the tables
Fields = tuple[str, ...]
ROWS: Fields = ("checkpoint", "name", "method", "arch", "epochs", "published", "label")
ROWS += (
    "labs",
    "cost",
    "hardware",
)  # of merged boards; where trunks of several sizes are compared
COLUMNS: Fields = ("name", "task", "dataset", "metric", "protocol", "engine", "split")
# Rows with a value, the first metric of its setting, how far a second training moves its numbers
COLUMNS += ("measured", "main", "noise")
# `row` is an index, `mark` that of board.standing, `parts` are indices of the measurements
CELLS = ("row", "value", "low", "high", "mark", "note", "parts")
# Row a minus row b, where a stands before b; `known` is whether trainings were tested, too
PAIRS = (
    "column",
    "a",
    "b",
    "value",
    "low",
    "high",
    "p",
    "real",
    "known",
    "paired",
    "n",
)
# One measurement: its split and its texts are indices into all texts, `keys` one into all key lists
PARTS = ("split", "seed", "value", "low", "high", "keys", "texts")
RANKS = ("row", "rank", "low", "high", "average", "win_rate", "columns", "group")


# ---- the page


def write_page(
    board: Board,
    path: Path,
    *,
    pairs: Iterable[PairedDifference],
    figures: Mapping[str, Sequence[Record]],
    answer: str,
    sets: Sequence[Overall],
    judged: Sequence[Record] = (),
    claims: Sequence[str] = (),
) -> None:
    """Write the page for `board`. Whatever takes tests or reading of run folders is made before:
    `pairs` by board.compare_rows, `figures` by page_figures.collect_figures, `sets` and `answer` by
    overall.py, `judged` and `claims` by papers/."""
    with many_objects():
        numbers = sum(len(cell.parts) for cell in board.cells.values())
        origins = _Origins(longest=max(SHORTEST_TEXT, TEXT_BYTES // max(1, numbers)))
        notes = {"": 0}
        columns, cells = _columns_and_cells(board, origins, notes)
        # Of the newest measurement: the same records make the same page on any day
        times = [part.recorded for cell in board.cells.values() for part in cell.parts]
        newest = max(times, default=0.0)
        day = (
            time.strftime("%Y-%m-%d", time.gmtime(newest)) if 0 < newest < 1e11 else ""
        )
        data: Record = {
            "answer": answer,
            "sets": [_set(one, board) for one in sets],
            "rows": _by_field(ROWS, _rows(board)),
            "columns": _by_field(COLUMNS, columns),
            "cells": cells,
            "notes": list(notes),
            "pairs": _by_field(PAIRS, list(map(_pair, pairs))),
            "numbers": numbers,
            **figures,
            "judged": judged,
            "claims": claims,
            "problems": board.problems,
            "tasks": {name: task.title for name, task in TASKS.items()},
            "newest": day,
            "version": importlib.metadata.version("backbench"),
        }
        filled = {
            "STYLE": (HERE / "page.css").read_text(),
            "SCRIPT": "\n".join(
                (HERE / f"page_{name}.js").read_text() for name in SCRIPTS
            ),
            "DATA": _json(data),
            "ORIGINS": _json(origins.written()),
        }
        # In one pass, so that a name that looks like a slot stays a name.
        template = (HERE / "page.html").read_text()
        page = re.sub(r"/\*([A-Z]+)\*/\n?", lambda slot: filled[slot[1]], template)
    atomic.write_text(path, page)


def _json(value: object) -> str:
    """Compact JSON without a < that could end the script block it stands in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace(
        "<", "\\u003c"
    )


def _by_field(fields: Sequence[str], records: Sequence[Sequence[object]]) -> Table:
    """Records as one list per field."""
    return {name: [record[i] for record in records] for i, name in enumerate(fields)}


def _round(value: float | None) -> float | None:
    """Four decimals; a number that is not finite is undefined."""
    return None if value is None or not math.isfinite(value) else round(value, 4)


def _ends(interval: tuple[float, float] | None) -> tuple[float | None, float | None]:
    low, high = interval or (None, None)
    return _round(low), _round(high)


def _set(overall: Overall, board: Board) -> Record:
    """The ranks over a named set of columns, best first."""
    index, ranks = board.row_index(), []
    for row, p in zip(overall.rows, overall.standing.places, strict=True):
        known = (index[row.checkpoint], p.rank, *p.interval, _round(p.average))
        ranks.append((*known, round(p.win_rate, 2), p.columns, p.group))
    columns, ranked = (
        list(map(board.columns.index, overall.columns)),
        _by_field(RANKS, ranks),
    )
    return {
        "title": overall.title,
        "basis": overall.basis,
        "columns": columns,
        "ranks": ranked,
    }


# ---- the table


def _rows(board: Board) -> list[Sequence[object]]:
    labels = board.labels()
    # Costs are worth a line only where trunks of several sizes are compared.
    compared = len({cost.parameters for cost in board.costs.values()}) > 1
    rows: list[Sequence[object]] = []
    for row in board.rows:
        cost = board.costs.get(row.checkpoint) if compared else None
        names = (row.checkpoint, row.name, row.method, row.arch, row.epochs)
        also = (row.source != MEASURED, labels[row.checkpoint])
        costs = (cost.text, cost.hardware or "") if cost else ("", "")
        rows.append((*names, *also, list(board.labs.get(row.checkpoint, ())), *costs))
    return rows


def _columns_and_cells(
    board: Board, origins: "_Origins", notes: dict[str, int]
) -> tuple[list[Sequence[object]], list[Table]]:
    """Every column, and the table of its cells. Each note of a cell goes into `notes` once."""
    # In one pass over the cells: a lookup for each field of the table takes longer.
    by_column: dict[Column, list[tuple[str, Cell]]] = {
        column: [] for column in board.columns
    }
    for (checkpoint, column), cell in board.cells.items():
        by_column[column].append((checkpoint, cell))
    index, measured = board.row_index(), {row.checkpoint for row in board.measured_rows}
    columns: list[Sequence[object]] = []
    tables = []
    settings: set[tuple[str, ...]] = (
        set()
    )  # settings seen so far: the first column is the main one
    for c, members in by_column.items():
        marks, cells, count = standing(board, c), [], 0
        for checkpoint, cell in members:
            count += cell.value is not None and checkpoint in measured
            low, high = _ends(cell.ci95)
            row, note = index[checkpoint], notes.setdefault(cell.note, len(notes))
            mark, parts = marks.get(checkpoint, ""), list(map(origins.add, cell.parts))
            cells.append((row, _round(cell.value), low, high, mark, note, parts))
        tables.append(_by_field(CELLS, cells))
        main = c.setting not in settings or not TASKS[c.task].ranked
        settings.add(c.setting)
        what = (c.name, c.task, c.dataset, c.metric, c.protocol, c.engine, c.split)
        columns.append((*what, count, main, noise_words(noise_of(board, c))))
    return columns, tables


def _pair(pair: PairedDifference) -> Sequence[object]:
    *where, d = pair
    numbers = (_round(d.value), *_ends(d.ci95), float(f"{d.p:.3g}"))
    return *where, *numbers, d.real, d.trainings_known, d.paired, d.n


# ---- where the numbers come from


class _Origins:
    """The provenance of all numbers, each distinct text once, cut after `longest` characters."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._parts: list[Sequence[object]] = []
        self._texts: dict[str, int] = {}  # text -> its index
        self._keys: dict[
            tuple[int, ...], int
        ] = {}  # texts of some keys -> the list's index

    def add(self, measurement: Measurement) -> int:
        """Add a measurement; returns its index among the parts."""
        result, run = measurement
        about: dict[str, object] = {
            **result.provenance,
            **result.origin,
            "verified": verification.LEVELS.get(result.origin.get("verified", 0)),
            "chosen": result.chosen,
            "run": str(run),
            "command": command_again(result),
        }
        keys, texts = [], []
        for key, value in about.items():
            if value is None:
                continue
            text = value if isinstance(value, str) else _IN_ORDER(value)
            # A command that is cut would not run
            if key != "command" and len(text) > self._longest:
                text = text[: self._longest] + " ... (the whole is in the run folder)"
            keys.append(self._index_of(key))
            texts.append(self._index_of(text))
        # Nearly all measurements have the same keys, so a part names the list, not each key.
        key_list = self._keys.setdefault(tuple(keys), len(self._keys))
        low, high = _ends(result.ci95)
        split = self._index_of(result.split)
        self._parts.append(
            (split, result.seed, _round(result.value), low, high, key_list, texts)
        )
        return len(self._parts) - 1

    def _index_of(self, text: str) -> int:
        # setdefault counts: a text seen before keeps its index, a new one gets the next.
        return self._texts.setdefault(text, len(self._texts))

    def written(self) -> Record:
        return {
            "parts": _by_field(PARTS, self._parts),
            "keys": [list(keys) for keys in self._keys],
            "texts": list(self._texts),
        }
