"""Who leads the board: named sets of columns, the rank of every checkpoint over each set
(backbench/stats/rank_intervals.py), and the answer in one sentence."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backbench.board.board import (
    AVERAGE,
    BEST,
    ONCE,
    Board,
    Cell,
    Column,
    Row,
    noise_of,
    predictions,
    standing,
)
from backbench.datasets.catalog import TWELVE
from backbench.stats import column_comparisons, rank_intervals, resampling
from backbench.tasks import TASKS

# The names of the sets
ALL = "all columns"
OF_TWELVE = "LORAC's twelve"
OF_DETECTION = "detection"
NAMED = 4  # checkpoints that a sentence names; of more, it says how many others
PLACES = 4  # columns that it names; of more, it says how many
NOWHERE = "none is best on any single measurement by a paired test"


@dataclass(frozen=True)
class Overall:
    """The checkpoints (`rows`) that have a value in one of the set's `columns`, best rank first."""

    name: str
    columns: list[Column]
    rows: list[Row]
    standing: rank_intervals.Ranking

    def leaders(self) -> list[Row]:
        return [self.rows[i] for i in self.standing.leaders]

    def place(self, row: Row) -> rank_intervals.RankPlace:
        return self.standing.places[self.rows.index(row)]

    def interval_of(self, row: Row, between: str) -> str:
        """The ends of a row's interval, as `1-4`; one number if they are equal."""
        low, high = self.place(row).interval
        return str(low) if low == high else f"{low}{between}{high}"

    def rank_of(self, row: Row) -> str:
        """A row's rank and its interval, as `2 (1-4)`; empty if it has none."""
        if row not in self.rows:
            return ""
        return f"{self.place(row).rank} ({self.interval_of(row, '-')})"

    @property
    def title(self) -> str:
        """The set's name in a sentence, with the number of its columns."""
        count = len(self.columns)
        if self.name == OF_TWELVE:
            return self.name if count == len(TWELVE) else f"{count} of {self.name}"
        if self.name == OF_DETECTION:
            return f"{count} measurements of detection"
        return f"all {count} measurements" if count > 1 else "the one measurement"

    @property
    def basis(self) -> str:
        """The words that say what the intervals are for."""
        over, units = self.standing.over, self.standing.units
        if over == "datasets":
            return f"for other datasets like these {units}"
        if over == "columns":
            return f"for other measurements like these {units}, on other images"
        if any(TASKS[column.task].trains for column in self.columns):
            return "for these measurements on other images and trainings"
        return "for these measurements on other images"


def ranks_by(cell: Cell) -> bool:
    """True for a value that is ranked: it follows from what was kept, and its fit has converged."""
    return cell.value is not None and cell.backed and cell.settled


def main_columns(board: Board) -> list[Column]:
    """The main metric's column of each way of measuring that two checkpoints share."""
    main = [column for column in board.main_columns() if column.dataset != AVERAGE]
    _, values, _ = values_of(board, main)
    count = (~np.isnan(values)).sum(axis=0)  # of checkpoints in each column
    return [column for column, checkpoints in zip(main, count) if checkpoints > 1]


def column_sets(board: Board) -> dict[str, list[Column]]:
    """The named sets of columns, the widest first. A set that equals another one is left out."""
    main = main_columns(board)
    detection = [column for column in main if TASKS[column.task].detects]
    sets = {ALL: main, OF_TWELVE: _of_twelve(board, main), OF_DETECTION: detection}
    out: dict[str, list[Column]] = {}
    for name, columns in sets.items():
        is_set = len(columns) > 1 or (name == ALL and columns)
        if is_set and columns not in out.values():
            out[name] = columns
    return out


def _of_twelve(board: Board, main: Sequence[Column]) -> list[Column]:
    """Linear probes on LORAC's twelve, by the protocol that has the most numbers."""
    ways: dict[tuple[str, str], list[Column]] = {}
    count: Counter[tuple[str, str]] = Counter()  # of a protocol's numbers
    for column in main:
        is_linear = column.task == "linear" and column.split is None
        if is_linear and column.dataset in TWELVE:
            way = (column.protocol, column.engine or "")
            ways.setdefault(way, []).append(column)
            count[way] += len(board.measured(column))
    if not ways:
        return []
    return ways[max(ways, key=lambda way: (count[way], way))]


def values_of(
    board: Board, columns: Sequence[Column]
) -> tuple[list[Row], np.ndarray, list[str]]:
    """Return checkpoints with a ranked value, values (rows, columns; nan: none), and datasets."""
    measured = board.measured_rows
    row_index = {row.checkpoint: n for n, row in enumerate(measured)}
    column_index = {column: n for n, column in enumerate(columns)}
    values = np.full((len(measured), len(columns)), np.nan)
    for (checkpoint, column), cell in board.cells.items():
        if column in column_index and checkpoint in row_index and ranks_by(cell):
            values[row_index[checkpoint], column_index[column]] = cell.value
    there = np.flatnonzero(~np.isnan(values).all(axis=1))
    datasets = [f"{column.dataset}:{column.split or ''}" for column in columns]
    return [measured[i] for i in there], values[there], datasets


def overall(board: Board) -> list[Overall]:
    """The ranks over every set; none if no column has two checkpoints, or if there are too many."""
    if len(board.measured_rows) > rank_intervals.MOST_ROWS:
        return []
    return [
        _ranked(board, name, columns) for name, columns in column_sets(board).items()
    ]


def _ranked(board: Board, name: str, columns: list[Column]) -> Overall:
    """Rank the checkpoints that have a value in one of these columns."""
    rows, values, datasets = values_of(board, columns)
    # 1. How values move with the images matters only if there are few datasets.
    noise = None
    trainings = None
    few_datasets = len(set(datasets)) < column_comparisons.FEWEST
    if few_datasets and len(rows) <= column_comparisons.MOST_BY_IMAGES:
        noise, runs = _noise_and_runs(board, rows, columns)
        noises = [noise_of(board, column) for column in columns]
        trainings = column_comparisons.Trainings(noises, runs)
    # 2. The best rank first.
    ranking = rank_intervals.ranking(values, datasets, noise, trainings)
    order = sorted(range(len(rows)), key=lambda i: (ranking.places[i].rank, i))
    ranking = dataclasses.replace(
        ranking,
        places=[ranking.places[i] for i in order],
        above=ranking.above[np.ix_(order, order)],
    )
    return Overall(name, columns, [rows[i] for i in order], ranking)


def _noise_and_runs(
    board: Board, rows: Sequence[Row], columns: Sequence[Column]
) -> tuple[np.ndarray, np.ndarray]:
    """How values move on resamples of the images (rows, columns, resamples), nan if unknown, and
    how many trainings each is the mean of (rows, columns)."""
    from backbench.verify import resamples

    noise = np.full((len(rows), len(columns), resampling.COUNT), np.nan)
    runs = np.ones((len(rows), len(columns)))
    for r, row in enumerate(rows):
        for c, column in enumerate(columns):
            cell = board.cell(row, column)
            if cell is None:
                continue
            runs[r, c] = max(1, len(cell.values))
            kept = list(predictions(cell).values())
            if not ranks_by(cell) or len(kept) < len(cell.parts):
                continue
            moved = resamples.moved(kept, column.metric)
            if moved is not None:
                noise[r, c] = moved
    return noise, runs


# ---- the answer


def answer(board: Board, sets: Sequence[Overall]) -> str:
    """One sentence that says who leads, where, and what cannot be told apart."""
    # 1. Nothing is ranked.
    labels = board.labels()
    count = len(board.measured_rows)
    if not count:
        return "Nothing is measured here."
    if count == 1:
        alone = labels[board.measured_rows[0].checkpoint]
        return f"{alone} is alone here: nothing to compare it with."
    if count > rank_intervals.MOST_ROWS:
        most = rank_intervals.MOST_ROWS
        return f"{count} checkpoints are too many to rank: at most {most} are."
    if not sets:
        return "No two checkpoints share a measurement: nothing here can be compared."
    # 2. Who leads over the widest set, over the others, and in single columns.
    widest = sets[0]
    clauses = [_leaders(widest, labels)]
    for other in sets[1:]:
        leaders = other.leaders()
        over = f"over {other.title}"
        if len(leaders) == len(other.rows):
            clauses.append(f"{over} {_all(leaders, labels)} cannot be told apart")
        elif leaders == widest.leaders():
            clauses.append(f"{over} too")
        else:
            leads = "leads" if len(leaders) == 1 else "lead"
            clauses.append(f"{over} {_names(leaders, labels)} {leads}")
    single = _single(board, widest.columns, labels)
    if single:
        clauses.append(single)
    return "; ".join(clauses) + "."


def _names(rows: Sequence[Row], labels: dict[str, str]) -> str:
    """The names of rows in a sentence: NAMED of them, and how many others."""
    names = [labels[row.checkpoint] for row in rows[:NAMED]]
    if len(rows) > NAMED:
        names.append(f"{len(rows) - NAMED} others")
    return listed(names)


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _leaders(of: Overall, labels: dict[str, str]) -> str:
    """The clause of the widest set."""
    leaders = of.leaders()
    total = len(of.rows)
    if len(leaders) == total:
        why = ""
        if not of.standing.tested:
            why = ", as too little was measured, trained again or kept to test it"
        everybody = _all(leaders, labels)
        return f"No clear winner: {everybody} cannot be told apart over {of.title}{why}"
    confidence = f"of {total} with 95% confidence, {of.basis}"
    if len(leaders) == 1:
        name = labels[leaders[0].checkpoint]
        return f"{name} leads alone over {of.title}: rank 1 {confidence}"
    ranks = ", ".join(of.interval_of(row, " to ") for row in leaders[:NAMED])
    return (
        f"{_names(leaders, labels)} lead over {of.title} and cannot be told apart:"
        f" ranks {ranks} {confidence}"
    )


def _all(rows: Sequence[Row], labels: dict[str, str]) -> str:
    """All rows in a sentence: by name, or by their number if they are many."""
    if len(rows) > NAMED:
        return f"the {len(rows)} checkpoints"
    return _names(rows, labels)


def _single(board: Board, columns: Sequence[Column], labels: dict[str, str]) -> str:
    """Name the columns in which a checkpoint is best, or best of one training; count the others."""
    if len(columns) < 2:
        return ""
    best = _won(board, columns, BEST)
    once = _won(board, columns, ONCE)
    clauses = [NOWHERE]
    if best:
        clauses = [f"best by a paired test: {_winners(best, columns, labels)}"]
    if once:
        winners = _winners(once, columns, labels)
        clauses.append(f"best of one training each: {winners}")
    won = sum(len(each) for each in (*best.values(), *once.values()))
    if best and won < len(columns):
        clauses.append(f"nobody in the other {len(columns) - won}")
    return "; ".join(clauses)


def _won(board: Board, columns: Sequence[Column], mark: str) -> dict[str, list[Column]]:
    """Checkpoint -> the columns in which it has this mark."""
    won: dict[str, list[Column]] = {}
    for column in columns:
        for checkpoint, own in standing(board, column).items():
            if own == mark:
                won.setdefault(checkpoint, []).append(column)
    return won


def _winners(
    won: dict[str, list[Column]], columns: Sequence[Column], labels: dict[str, str]
) -> str:
    """At most NAMED winners and their columns, those with the most columns first."""
    by_count = sorted(won, key=lambda checkpoint: -len(won[checkpoint]))
    clauses = []
    for checkpoint in by_count[:NAMED]:
        clauses.append(f"{labels[checkpoint]} in {_where(won[checkpoint], columns)}")
    return ", ".join(clauses)


def _where(won: Sequence[Column], columns: Sequence[Column]) -> str:
    """The names of some columns, as short as tells them from the others."""
    if len(won) == len(columns):
        return f"each of the {len(won)} measurements"
    if len(won) > PLACES:
        return f"{len(won)} measurements"
    tasks = [column.task for column in columns]
    names = []
    for column in won:
        title = TASKS[column.task].title
        is_only = tasks.count(column.task) == 1
        names.append(title if is_only else f"{title} on {column.dataset}")
    return listed(names)
