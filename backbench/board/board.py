"""The board: results found below some folders as rows, columns and cells, and what they tell.

A row is a checkpoint, a column is `task/dataset[:split]/metric@protocol[~print][+engine]`: what was
measured differently stands elsewhere (backbench/results/column_keys.py). Published rows stand beside the
measured ones and are marked; they are never averaged or ranked with them. What is written from a
board lies in the files beside this one, and none of them is imported here.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from backbench.datasets.catalog import DATASETS, TWELVE
from backbench.recipes import fast
from backbench.results import column_keys, judging_rules, published, store, trunk_costs
from backbench.results.paired_tests import compare
from backbench.results.store import Result
from backbench.results.trunk_costs import TrunkCost
from backbench.stats import confidence
from backbench.stats.paired_differences import Difference, tied_with_first
from backbench.tasks import ORDER, TASKS
from backbench.untrusted import printable

MEASURED, PUBLISHED = "measured", "published"  # Row.source
BEST, TIED, UNTESTED = "best", "tied", "untested"  # how a row stands in a column
AVERAGE = "average"  # dataset and metric of the mean over LORAC's twelve

_DATASET_ORDER = ("imagenet", "imagenet100", *TWELVE, AVERAGE)
_METRIC_ORDER = {
    "top1": 0,
    "mean_per_class": 0,
    AVERAGE: 0,
    "top5": 2,
    "AP": 0,
    "AP50": 1,
    "AP75": 2,
}
_OTHER_METRIC = 3


def joined(between: str, *parts: str | None) -> str:
    """The parts that there are, with `between` between them."""
    return between.join(filter(None, parts))


def text_of(value: float | None, form: str, *, missing: str = "") -> str:
    """A number in the form given (".1f", "d" for whole ones), or what stands for none."""
    return missing if value is None else format(value, form)


def _place(name: str, known: Sequence[str]) -> int:
    """Where a name stands among the known ones; all others after them."""
    return known.index(name) if name in known else len(known)


@dataclass(frozen=True)
class Column:
    """What was measured. `protocol` and `split` are as backbench/results/column_keys.py says them."""

    task: str
    dataset: str
    metric: str
    protocol: str
    engine: str | None = None
    split: str | None = None

    @property
    def name(self) -> str:
        # A split's marks (test~n500+50) are ours, and stand between : and /
        split = None if self.split is None else printable.part(self.split).replace("%2B", "+")
        dataset = joined(":", printable.part(self.dataset), split)
        how = joined("+", *map(printable.part, filter(None, (self.protocol, self.engine))))
        return f"{self.task}/{dataset}/{printable.part(self.metric)}@{how}"

    @property
    def family(self) -> str:
        """What a metric's name begins with: `segm` of segm_AP50, nothing of top1."""
        return self._metric[0].removesuffix("_")

    @property
    def order(self) -> tuple[object, ...]:
        """Its place in every table: by task, protocol, dataset, then the metrics of one family."""
        return (
            ORDER[self.task],
            self.protocol,
            self.engine or "",
            _place(self.dataset, _DATASET_ORDER),
            self.dataset,
            self.split or "",
            *self.weight,
        )

    @property
    def setting(self) -> tuple[str, str, str, str, str]:
        """What columns share that differ in their metric only: one measurement, told by several."""
        return self.task, self.dataset, self.split or "", self.protocol, self.engine or ""

    @property
    def weight(self) -> tuple[int, int, str]:
        """Its place among the columns of its setting: the smallest is the main one."""
        family, short = self._metric
        ious = TASKS[self.task].ious
        place = _place(family.removesuffix("_"), ious) if family else 0
        return place, _METRIC_ORDER.get(short, _OTHER_METRIC), self.metric

    @property
    def _metric(self) -> tuple[str, str]:
        """segm_AP50 -> ("segm_", "AP50"); a metric that stands for itself has no family."""
        if self.metric in _METRIC_ORDER:
            return "", self.metric
        short = self.metric.rpartition("_")[2]
        return self.metric.removesuffix(short), short


@dataclass(frozen=True)
class Row:
    """One checkpoint (its digest), or one printed row of a paper (its key)."""

    checkpoint: str
    name: str
    method: str
    arch: str
    epochs: int | None
    source: str = MEASURED


class Measurement(NamedTuple):
    """A result and the run folder that it was found in."""

    result: Result
    run: Path

    @property
    def recorded(self) -> float:
        """Seconds since 1970; a result that does not say counts as older than all that do."""
        return float(self.result.origin.get("recorded") or 0.0)


@dataclass
class Cell:
    """The number in the table, in percent, and the measurements it is made of: one per seed, and
    none where it is published or an average."""

    value: float | None
    ci95: tuple[float, float] | None = None
    parts: list[Measurement] = field(default_factory=list)
    note: str = ""

    @property
    def half_width(self) -> float | None:
        """Half of the 95% interval."""
        return None if self.ci95 is None else (self.ci95[1] - self.ci95[0]) / 2


@dataclass
class Board:
    """`cells` by (Row.checkpoint, column); `problems` are lines for whoever reads the board;
    `labs` has whose numbers a checkpoint's are, where the records say so (backbench merge);
    `ways` has the word (weights/fast.py) for checkpoints that were not pretrained to the letter;
    `costs` what the trunks of checkpoints cost, where their rows say so."""

    rows: list[Row] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)
    cells: dict[tuple[str, Column], Cell] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    ways: dict[str, str] = field(default_factory=dict)
    labs: dict[str, list[str]] = field(default_factory=dict)
    costs: dict[str, TrunkCost] = field(default_factory=dict)
    # How rows stand in a column, once it was tested: the answer, the page and the tables all ask.
    standings: dict[Column, dict[str, str]] = field(default_factory=dict, repr=False)

    def name(self, row: Row) -> str:
        """The row's name, and `(fast)` behind that of a trunk that went the fast way: it is not
        the other one of that name."""
        return (
            f"{row.name} ({fast.WORD})" if self.ways.get(row.checkpoint) == fast.WORD else row.name
        )

    def cell(self, row: Row, column: Column) -> Cell | None:
        """The number of a row in a column; None where there is none."""
        return self.cells.get((row.checkpoint, column))

    @property
    def measured_rows(self) -> list[Row]:
        return [row for row in self.rows if row.source == MEASURED]

    def measured(self, column: Column) -> list[tuple[Row, Cell]]:
        """The measured rows that have a value here, best first; ties by name."""
        have: list[tuple[Row, Cell]] = []
        for row in self.measured_rows:
            cell = self.cell(row, column)
            if cell is not None and cell.value is not None:
                have.append((row, cell))
        have.sort(key=lambda rc: (-(rc[1].value or 0.0), rc[0].name, rc[0].checkpoint))
        return have

    def measured_columns(self) -> list[Column]:
        """The columns in which a measured row has a cell, in the board's order."""
        digests = {row.checkpoint for row in self.measured_rows}
        used = {column for checkpoint, column in self.cells if checkpoint in digests}
        return [column for column in self.columns if column in used]

    def places(self) -> dict[str, int]:
        """Checkpoint -> the place of its row."""
        return {row.checkpoint: i for i, row in enumerate(self.rows)}

    def labels(self) -> dict[str, str]:
        """Checkpoint -> a name for its row; where two measured ones share a name, the start of the
        digest is added."""
        count = Counter((row.source, self.name(row)) for row in self.rows)
        labels = {}
        for row in self.rows:
            label = self.name(row)
            if row.source == MEASURED and count[row.source, label] > 1:
                label += f" {row.checkpoint[:6]}"
            labels[row.checkpoint] = label
        return labels


# ---- from results to a board


def collect(runs: Iterable[str | Path]) -> Board:
    """Every result below `runs`, duplicates resolved as docs/results.md says. BadInput where a path
    is missing."""
    files: dict[str, Path] = {}  # real path -> as it was found, so that no file is read twice
    for run in runs:
        for file in store.files_below(run):
            files[os.path.realpath(file)] = file
    problems: list[str] = []
    found: list[Measurement] = []
    with many_objects():
        for file in sorted(files.values()):
            run = file.parent
            for line in store.read_file(file):
                if isinstance(line, str):
                    problems.append(line)
                else:
                    found.append(Measurement(line, run))
        return fill(found, problems)


@contextlib.contextmanager
def many_objects() -> Iterator[None]:
    """No garbage collection while 10^5 results are made: it would look at all of them, often."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def fill(found: Iterable[Measurement], problems: Iterable[str] = ()) -> Board:
    """A board of these measurements, in the order of files and lines; `problems` of reading them
    are said on it, before those of filling it."""
    board = Board(problems=list(problems))
    # 1. Each measurement's column: what was measured in another way stands beside it.
    found = list(found)
    columns = _columns(found)
    # 2. One measurement for each number: of those made twice, the one recorded last.
    counted = _recorded_last(zip(found, columns), board.problems)
    # 3. One cell for each (checkpoint, column), with the seeds that are there.
    parts: dict[tuple[str, Column], list[Measurement]] = {}
    for measurement, column in counted:
        parts.setdefault((measurement.result.checkpoint, column), []).append(measurement)
    for where, measurements in parts.items():
        board.cells[where] = _cell(sorted(measurements, key=lambda m: m.result.seed))
    # 4. Everything in its place, and then the averages, which are made of cells in that order.
    board.rows = _rows(measurement for measurement, _ in counted)
    for (result, _), _ in counted:
        if way := fast.word(result.provenance):
            board.ways[result.checkpoint] = way
        for lab in _labs_of(result):
            known = board.labs.setdefault(result.checkpoint, [])
            if lab not in known:
                known.append(lab)
    board.costs = trunk_costs.of_results(measurement.result for measurement, _ in counted)
    board.columns = _in_order({column for _, column in counted})
    _add_averages(board)
    return board


def _labs_of(result: Result) -> list[str]:
    """Who measured this number; nobody is named where records were not merged."""
    origin = result.origin
    if "lab" not in origin:
        return []
    also = origin.get("also")
    others = [one.get("lab") for one in also if isinstance(one, dict)] if also else []
    return [printable.shown(str(lab), 60) for lab in (origin["lab"], *others) if lab]


def _in_order(columns: Iterable[Column]) -> list[Column]:
    return sorted(columns, key=lambda column: column.order)


def _recorded_last(
    found: Iterable[tuple[Measurement, Column]], problems: list[str]
) -> list[tuple[Measurement, Column]]:
    """One measurement for each (checkpoint, column, seed), in the order in which they first came.
    Duplicates of another value are named in `problems`."""
    counts: dict[tuple[str, Column, int], Measurement] = {}
    for new, column in found:
        result = new.result
        key = (result.checkpoint, column, result.seed)
        known = counts.setdefault(key, new)
        if known is new:
            continue
        # Among equals (copies of one file, or lines without a time) the later in the order wins.
        older, newer = known, new
        if new.recorded < known.recorded:
            older, newer = new, known
        if older.result.value != newer.result.value:
            problems.append(
                f"{result.name}: {column.name} was measured twice: {newer.result.value} "
                f"({newer.run}) counts, recorded after {older.result.value} ({older.run})"
            )
        counts[key] = newer
    return [(measurement, column) for (_, column, _), measurement in counts.items()]


def _columns(found: Sequence[Measurement]) -> list[Column]:
    """The column of each measurement. One object for all that stand in it: they are met often."""
    results = [measurement.result for measurement in found]
    made: dict[tuple[object, ...], Column] = {}
    columns = []
    for r, place in zip(results, column_keys.of_rows(results)):
        key = (r.task, r.dataset, r.metric, place, r.engine)
        if key not in made:
            made[key] = Column(r.task, r.dataset, r.metric, place.protocol, r.engine, place.split)
        columns.append(made[key])
    return columns


def _rows(counted: Iterable[Measurement]) -> list[Row]:
    """One row for each checkpoint, by name. Weights that were measured under two names are one row,
    under the name that was recorded last."""
    newest: dict[str, Measurement] = {}
    for measurement in counted:
        checkpoint = measurement.result.checkpoint
        known = newest.get(checkpoint)
        if known is None or measurement.recorded >= known.recorded:
            newest[checkpoint] = measurement
    rows = []
    for r, _ in newest.values():
        rows.append(Row(r.checkpoint, r.name, r.method, r.arch, r.epochs))
    return sorted(rows, key=lambda row: (row.name, row.checkpoint))


def _cell(parts: list[Measurement]) -> Cell:
    """One seed as it was measured; several as their mean, with the t-interval over seeds instead of
    the intervals over test images."""
    if len(parts) == 1:
        only = parts[0].result
        return Cell(only.value, only.ci95, parts)
    values = [result.value for result, _ in parts if result.value is not None]
    if not values:
        return Cell(None, None, parts)
    note = f"mean of {len(values)} seeds"
    if len(values) < len(parts):
        note += f", {len(parts)} run"
    return Cell(sum(values) / len(values), confidence.of_seeds(values), parts, note)


def _add_averages(board: Board) -> None:
    """The mean of LORAC's twelve, for each checkpoint and way of measuring that has all of them."""
    # One set of columns for each way of measuring, by dataset. What follows the dataset's own
    # metric (the _k20 of top1_k20, say) is a way of its own. Unusual splits have no average.
    sets: dict[tuple[str, str, str | None, str], dict[str, Column]] = {}
    for column in board.columns:
        if column.dataset not in TWELVE or column.split is not None:
            continue
        metric = DATASETS[column.dataset].metric
        if column.metric.startswith(metric):
            suffix = column.metric.removeprefix(metric)
            way = (column.task, column.protocol, column.engine, suffix)
            sets.setdefault(way, {})[column.dataset] = column
    averages = []
    for (task, protocol, engine, suffix), columns in sets.items():
        if len(columns) < len(TWELVE):
            continue
        average = Column(task, AVERAGE, AVERAGE + suffix, protocol, engine)
        for row in board.rows:
            cell = _average(board.cell(row, column) for column in columns.values())
            if cell is not None:
                board.cells[row.checkpoint, average] = cell
                averages.append(average)
    board.columns = _in_order({*board.columns, *averages})


def _average(cells: Iterable[Cell | None]) -> Cell | None:
    """The mean of cells of different datasets; None where one is missing or undefined."""
    values: list[float] = []
    ends: list[tuple[float, float]] = []
    known: list[float] = []
    for cell in cells:
        if cell is None or cell.value is None:
            return None
        values.append(cell.value)
        if cell.ci95 is not None:
            ends.append(cell.ci95)
            seeds = sum(result.value is not None for result, _ in cell.parts)
            known.append(seeds - 1 if seeds > 1 else math.inf)
    # Errors on different test sets are independent.
    ci95 = confidence.of_mean(values, ends, known) if len(ends) == len(values) else None
    return Cell(sum(values) / len(values), ci95, note="mean of the twelve datasets")


def add_published(board: Board) -> None:
    """The papers' rows below the measured ones: in the measured column where the protocols are the
    same, else in columns of their own."""
    columns = set(board.columns)
    rows: dict[str, Row] = {}
    for number in published.rows():
        # Spreads are not columns of a leaderboard.
        if judging_rules.reason(number) == judging_rules.SPREAD:
            continue
        column = column_of(number)
        columns.add(column)
        name = f"{number.model} ({number.paper} Table {number.table})"
        row = Row(number.key, name, number.model, number.arch, number.epochs, PUBLISHED)
        rows.setdefault(number.key, row)
        value = judging_rules.as_measured(number).value
        board.cells[number.key, column] = Cell(value, note=number.note)
    board.rows.extend(rows.values())
    board.columns = _in_order(columns)


def column_of(number: published.Published) -> Column:
    """The column that a printed number stands in."""
    protocol, engine = judging_rules.protocol(number)
    measured = judging_rules.as_measured(number)
    split = measured.split or TASKS[number.task].split
    named = None if split == column_keys.USUAL_SPLIT else split
    return Column(number.task, number.dataset, measured.metric, protocol, engine, named)


# ---- what can be said of two rows


def predictions(cell: Cell) -> dict[int, Path]:
    """Seed -> file of predictions, of the measurements behind a cell that kept theirs."""
    kept = {}
    for result, run in cell.parts:
        name = result.provenance.get("predictions")
        if name:
            kept[result.seed] = run / str(name)
    return kept


def difference(a: Cell, b: Cell, metric: str) -> Difference | None:
    """a - b, from the predictions of the seeds that both have; None where none were kept or the
    test lists differ."""
    files_a, files_b = predictions(a), predictions(b)
    seeds = sorted(files_a.keys() & files_b.keys())
    return compare([files_a[s] for s in seeds], [files_b[s] for s in seeds], metric)


def standing(board: Board, column: Column) -> dict[str, str]:
    """Checkpoint -> how it stands among the measured ones in this column.

    `best` is above every other by a paired test; without such a one, `tied` are the highest value
    and all that no test tells from it. `untested` is the highest value where predictions to test it
    with are missing. Rows that are not named are behind.
    """
    if column not in board.standings:
        board.standings[column] = _tested(board, column)
    return board.standings[column]


def _tested(board: Board, column: Column) -> dict[str, str]:
    ranked = board.measured(column)
    if len(ranked) < 2 or not TASKS[column.task].ranked:
        return {}
    # Only the highest can be best, so it alone is tested: against each other one, not against their
    # mean or the second. That it was chosen for being highest is corrected for.
    (first, top), others = ranked[0], ranked[1:]
    tested: list[tuple[str, float]] = []  # checkpoint, p
    for row, cell in others:
        gap = difference(top, cell, column.metric)
        if gap is not None:
            tested.append((row.checkpoint, gap.p if gap.real and gap.value > 0 else 1.0))
    untested = len(tested) < len(others)
    count = tied_with_first([p for _, p in tested])
    tied = [checkpoint for checkpoint, _ in tested[:count]]
    if tied:
        return dict.fromkeys([first.checkpoint, *tied], TIED)
    # It won every test that could be made; that is "best" only where all of them could.
    if untested:
        return {first.checkpoint: UNTESTED}
    return {first.checkpoint: BEST}
