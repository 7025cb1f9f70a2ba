"""leaderboard.html: one self-contained file of the table, the charts and every number's origin.

The page is page.html beside this file with page.css, the scripts page_*.js and its data filled in.
It asks the network for nothing. Its data are two blocks of JSON: what is drawn at once, and where the numbers
come from, which is most of the page and is read when the first of them is opened. A table is
written as one list per field of the tuples below, and page_data.js reads it by those names.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

from backbench.board import figures, page_beside
from backbench.board.board import (
    MEASURED,
    Board,
    Cell,
    Column,
    Measurement,
    Row,
    difference,
    many_objects,
    predictions,
    standing,
)
from backbench.board.export import again
from backbench.board.judge import Judged
from backbench.board.overall import Overall, answer, overall
from backbench.runs import atomic
from backbench.stats.paired_differences import Difference
from backbench.tasks import TASKS

HERE = Path(__file__).parent
# page_*.js as they stand one after the other in the page; the last one draws it
SCRIPTS = ("data", "table", "number", "charts", "ranks", "pairs", "curves", "sections")
PAIRS = 6000  # tests computed in advance: about ten seconds
# Of provenance in the page; with many results each long value is cut to its share.
TEXT_BYTES = 20_000_000
SHORTEST_TEXT = 150

_IN_ORDER = json.JSONEncoder(sort_keys=True).encode  # json.dumps would make an encoder each time

Table = dict[str, list[object]]  # field -> its value in every record


# ---- what the scripts read


class PageRow(NamedTuple):
    checkpoint: str
    name: str
    method: str
    arch: str
    epochs: int | None
    published: bool
    label: str
    labs: list[str]  # whose numbers these are, where they were merged
    cost: str  # of its trunk, where trunks of several kinds are compared
    hardware: str  # that its images a second were measured on


class PageColumn(NamedTuple):
    name: str
    task: str
    dataset: str
    metric: str
    protocol: str
    engine: str | None
    split: str | None
    measured: int  # rows that have a value here
    main: bool  # the first metric of its setting


class PageCell(NamedTuple):
    row: int  # its place among the rows
    value: float | None
    low: float | None
    high: float | None
    mark: str  # how it stands in its column; empty for those behind
    note: str
    parts: list[int]  # places of its measurements among the parts


class PagePair(NamedTuple):
    """A paired difference in a column: row a minus row b, where a stands before b."""

    column: int
    a: int
    b: int
    value: float | None
    low: float | None
    high: float | None
    p: float
    real: bool
    paired: str
    n: int


class PagePart(NamedTuple):
    """One measurement. Texts are places in the list of all texts."""

    split: int  # text
    seed: int
    value: float | None
    low: float | None
    high: float | None
    keys: int  # place of its list of keys among all such lists
    texts: list[int]  # what it says under each of those keys


class PageOrigins(TypedDict):
    parts: Table  # PagePart
    keys: list[list[int]]
    texts: list[str]


class PageVerdict(TypedDict):
    name: str
    column: str
    key: str
    measured: float | None
    published: float
    low: float | None
    high: float | None
    tolerance: float
    verdict: str
    said: str  # the same with what stands beside it
    others: tuple[str, ...]  # in what the trunk is not the printed one
    hardware: str


class PageRank(NamedTuple):
    row: int
    rank: int
    low: int
    high: int
    average: float | None
    win_rate: float
    columns: int
    group: int


class PageSet(TypedDict):
    """Ranks over a named set of columns, the best first."""

    title: str
    basis: str
    columns: list[int]
    ranks: Table  # PageRank


class PageData(TypedDict):
    answer: str
    sets: list[PageSet]
    rows: Table  # PageRow
    columns: Table  # PageColumn
    cells: list[Table]  # PageCell, of each column
    pairs: Table  # PagePair
    numbers: int
    curves: list[page_beside.PageCurve]
    pictures: list[page_beside.PagePicture]
    figures: list[figures.PageFigure]
    judged: list[PageVerdict]
    problems: list[str]
    tasks: dict[str, str]  # name -> title
    newest: str  # the day of the newest measurement, UTC
    version: str


# ---- the page


def write_page(
    board: Board,
    path: Path,
    *,
    runs: Iterable[str | Path],
    judged: Sequence[Judged] = (),
    sets: Sequence[Overall] | None = None,
) -> None:
    """Write the page for `board`; curves and pictures are looked for below `runs`."""
    with many_objects():
        sets = overall(board) if sets is None else sets
        data, origins = _data(board, runs, judged, sets)
        filled = {
            "STYLE": (HERE / "page.css").read_text(),
            "SCRIPT": "\n".join((HERE / f"page_{name}.js").read_text() for name in SCRIPTS),
            "DATA": _json(data),
            "ORIGINS": _json(origins),
        }
        # In one pass, so that a name that looks like a slot stays a name.
        template = (HERE / "page.html").read_text()
        page = re.sub(r"/\*([A-Z]+)\*/\n?", lambda slot: filled[slot[1]], template)
    atomic.write_text(path, page)


def _json(value: object) -> str:
    """Compact, and without a < that could end the script block it stands in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _data(
    board: Board, runs: Iterable[str | Path], judged: Sequence[Judged], sets: Sequence[Overall]
) -> tuple[PageData, PageOrigins]:
    labels, places = board.labels(), board.places()
    numbers = sum(len(cell.parts) for cell in board.cells.values())
    origins = _Origins(longest=max(SHORTEST_TEXT, TEXT_BYTES // max(1, numbers)))
    columns, cells = _columns_and_cells(board, places, origins)
    data: PageData = {
        "answer": answer(board, sets),
        "sets": [_set(of, board, places) for of in sets],
        "rows": _by_field(PageRow._fields, [_row(row, labels, board) for row in board.rows]),
        "columns": _by_field(PageColumn._fields, columns),
        "cells": cells,
        "pairs": _by_field(PagePair._fields, _pairs(board, places)),
        "numbers": numbers,
        "curves": page_beside.curves(board, runs),
        "pictures": page_beside.pictures(board),
        "figures": figures.for_page(board),
        "judged": [_verdict(j) for j in judged],
        "problems": board.problems,
        "tasks": {name: task.title for name, task in TASKS.items()},
        "newest": _newest(board),
        "version": importlib.metadata.version("backbench"),
    }
    return data, origins.written()


def _newest(board: Board) -> str:
    """The day of the newest measurement: the same records make the same page, whenever it is made."""
    times = [part.recorded for cell in board.cells.values() for part in cell.parts]
    newest = max(times, default=0.0)
    return time.strftime("%Y-%m-%d", time.gmtime(newest)) if 0 < newest < 1e11 else ""


def _by_field(fields: Sequence[str], records: Sequence[tuple[object, ...]]) -> Table:
    """Records as one list per field: each name is written once, not once a record."""
    if not records:
        return {field: [] for field in fields}
    # zip(*records) turns records into fields: all first entries, all second ones, and so on.
    return dict(zip(fields, map(list, zip(*records, strict=True)), strict=True))


def _round(value: float | None) -> float | None:
    """Four decimals; what is not finite is undefined."""
    return None if value is None or not math.isfinite(value) else round(value, 4)


def _ends(interval: tuple[float, float] | None) -> tuple[float | None, float | None]:
    low, high = interval or (None, None)
    return _round(low), _round(high)


def _set(of: Overall, board: Board, places: Mapping[str, int]) -> PageSet:
    which = {column: k for k, column in enumerate(board.columns)}
    found = []
    for row, p in zip(of.rows, of.standing.places, strict=True):
        average, rate = _round(p.average), round(p.win_rate, 2)
        at = places[row.checkpoint]
        found.append(PageRank(at, p.rank, *p.interval, average, rate, p.columns, p.group))
    return {
        "title": of.title,
        "basis": of.basis,
        "columns": [which[column] for column in of.columns],
        "ranks": _by_field(PageRank._fields, found),
    }


# ---- the table


def _row(row: Row, labels: Mapping[str, str], board: Board) -> PageRow:
    published = row.source != MEASURED
    label, labs = labels[row.checkpoint], board.labs.get(row.checkpoint, [])
    about = (row.checkpoint, row.name, row.method, row.arch, row.epochs)
    cost = board.costs.get(row.checkpoint)
    compared = len({one.parameters for one in board.costs.values()}) > 1
    text, hardware = (cost.text, cost.hardware or "") if cost and compared else ("", "")
    return PageRow(*about, published, label, labs, text, hardware)


def _columns_and_cells(
    board: Board, places: Mapping[str, int], origins: _Origins
) -> tuple[list[PageColumn], list[Table]]:
    """Every column, and the table of its cells."""
    # In one pass over the cells: a lookup for each field of the table takes longer.
    by_column: dict[Column, list[tuple[str, Cell]]] = {column: [] for column in board.columns}
    for (checkpoint, column), cell in board.cells.items():
        by_column[column].append((checkpoint, cell))
    columns, tables = [], []
    measured = {row.checkpoint for row in board.measured_rows}
    settings: set[tuple[str, ...]] = set()  # those that a column was met of: the first is the main
    for column, found in by_column.items():
        marks = standing(board, column)
        cells, count = [], 0
        for checkpoint, cell in found:
            count += cell.value is not None and checkpoint in measured
            low, high = _ends(cell.ci95)
            parts = [origins.add(measurement) for measurement in cell.parts]
            mark = marks.get(checkpoint, "")
            place = places[checkpoint]
            cells.append(PageCell(place, _round(cell.value), low, high, mark, cell.note, parts))
        tables.append(_by_field(PageCell._fields, cells))
        first = column.setting not in settings or not TASKS[column.task].ranked
        settings.add(column.setting)
        columns.append(_column(column, count, main=first))
    return columns, tables


def _column(c: Column, measured: int, *, main: bool) -> PageColumn:
    what = (c.name, c.task, c.dataset, c.metric, c.protocol, c.engine, c.split)
    return PageColumn(*what, measured, main)


class _Origins:
    """Where the numbers come from: every distinct text and every list of keys once. Texts longer
    than `longest` are cut, since the run folder has them whole."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._parts: list[PagePart] = []
        self._texts: dict[str, int] = {}  # text -> its place
        self._keys: dict[tuple[int, ...], int] = {}  # texts of some keys -> their place

    def add(self, measurement: Measurement) -> int:
        """The place of this measurement among the parts."""
        result = measurement.result
        keys, texts = [], []
        for key, value in _about(measurement).items():
            if value is None:
                continue
            text = value if isinstance(value, str) else _IN_ORDER(value)
            if key != "command":  # which would not run when it is cut
                text = self._cut(text)
            keys.append(self._text(key))
            texts.append(self._text(text))
        # Nearly all measurements have the same keys, so a part names the list, not each key.
        low, high = _ends(result.ci95)
        # setdefault counts: a list (or a text) seen before keeps its place, a new one is the next.
        key_list = self._keys.setdefault(tuple(keys), len(self._keys))
        split = self._text(result.split)
        part = PagePart(split, result.seed, _round(result.value), low, high, key_list, texts)
        self._parts.append(part)
        return len(self._parts) - 1

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _cut(self, text: str) -> str:
        if len(text) <= self._longest:
            return text
        return text[: self._longest] + " ... (the whole is in the run folder)"

    def written(self) -> PageOrigins:
        return {
            "parts": _by_field(PagePart._fields, self._parts),
            "keys": [list(keys) for keys in self._keys],
            "texts": list(self._texts),
        }


def _about(measurement: Measurement) -> dict[str, object]:
    """Everything that is known of a measurement beside its number."""
    result, run = measurement
    return {
        **result.provenance,
        **result.origin,
        "chosen": result.chosen,
        "run": str(run),
        "command": again(result),
    }


class _Ranked(NamedTuple):
    place: int  # among the rows
    cell: Cell


def _pairs(board: Board, places: Mapping[str, int]) -> list[PagePair]:
    """All pairs where they are few; else each column's best against the others, as far as PAIRS
    goes. The page has no predictions, so it cannot test any other pair."""
    # 1. What can be tested: in each column the rows that kept predictions, two of them at least.
    able: list[tuple[int, Column, list[_Ranked]]] = []
    for k, column in enumerate(board.columns):
        ranked = []  # best first
        for row, cell in board.measured(column):
            if predictions(cell):
                ranked.append(_Ranked(places[row.checkpoint], cell))
        if len(ranked) > 1:
            able.append((k, column, ranked))
    # 2. How many tests that would be decides whether all are made.
    possible = sum(math.comb(len(ranked), 2) for _, _, ranked in able)
    out: list[PagePair] = []
    for k, column, ranked in able:
        for pair in _chosen_pairs(ranked, everything=possible <= PAIRS):
            if len(out) >= PAIRS:
                return out
            # Each pair once, in the order of the rows; for b - a the page turns the sign.
            a, b = sorted(pair, key=lambda one: one.place)
            d = difference(a.cell, b.cell, column.metric)
            if d is not None:
                out.append(_pair(k, a.place, b.place, d))
    return out


def _chosen_pairs(
    ranked: Sequence[_Ranked], *, everything: bool
) -> Iterable[tuple[_Ranked, _Ranked]]:
    """Each with each other, or the best with each other."""
    if everything:
        return itertools.combinations(ranked, 2)
    return zip(itertools.repeat(ranked[0]), ranked[1:])


def _pair(column: int, a: int, b: int, d: Difference) -> PagePair:
    low, high = _ends(d.ci95)
    p = float(f"{d.p:.3g}")
    return PagePair(column, a, b, _round(d.value), low, high, p, d.real, d.paired, d.n)


def _verdict(judged: Judged) -> PageVerdict:
    low, high = _ends(judged.ci95)
    return {
        "name": judged.row.name,
        "column": judged.column.name,
        "key": judged.key,
        "measured": _round(judged.measured),
        "published": judged.published,
        "low": low,
        "high": high,
        "tolerance": judged.tolerance,
        "verdict": judged.verdict,
        "said": judged.said,
        "others": judged.others,
        "hardware": judged.hardware,
    }
