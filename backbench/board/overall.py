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

ALL, OF_TWELVE, OF_DETECTION = "all columns", "LORAC's twelve", "detection"
NAMED = 4  # checkpoints that a sentence names; of more, how many others
PLACES = 4  # and columns
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

    def rank_of(self, row: Row) -> str:
        """A row's rank and its interval, as `2 (1-4)`; empty if it has none."""
        if row not in self.rows:
            return ""
        ends = dict.fromkeys(map(str, self.place(row).interval))
        return f"{self.place(row).rank} ({'-'.join(ends)})"

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
        of = self.standing
        if of.over == "datasets":
            return f"for other datasets like these {of.units}"
        if of.over == "columns":
            return f"for other measurements like these {of.units}, on other images"
        trained = any(TASKS[column.task].trains for column in self.columns)
        return f"for these measurements on other images{' and trainings' if trained else ''}"


def ranks_by(cell: Cell) -> bool:
    """True for a value that is ranked: it follows from what was kept, and its fit has converged."""
    return cell.value is not None and cell.backed and cell.settled


def main_columns(board: Board) -> list[Column]:
    """The main metric's column of each way of measuring that two checkpoints share."""
    main = [column for column in board.main_columns() if column.dataset != AVERAGE]
    _, values, _ = values_of(board, main)
    shared = (~np.isnan(values)).sum(0) > 1
    return [column for column, by_two in zip(main, shared) if by_two]


def column_sets(board: Board) -> dict[str, list[Column]]:
    """The named sets of columns, the widest first. A set that equals another one is left out."""
    main = main_columns(board)
    # Linear probes on LORAC's twelve, by the protocol that has the most numbers
    ways: dict[tuple[str, str], list[Column]] = {("", ""): []}
    count: Counter[tuple[str, str]] = Counter()
    for column in main:
        if (
            column.task == "linear"
            and column.dataset in TWELVE
            and column.split is None
        ):
            way = (column.protocol, column.engine or "")
            ways.setdefault(way, []).append(column)
            count[way] += len(board.measured(column))
    sets = {ALL: main, OF_TWELVE: ways[max(ways, key=lambda way: (count[way], way))]}
    sets[OF_DETECTION] = [column for column in main if TASKS[column.task].detects]
    out: dict[str, list[Column]] = {}
    for name, columns in sets.items():
        if (
            columns
            and columns not in out.values()
            and (name == ALL or len(columns) > 1)
        ):
            out[name] = columns
    return out


def values_of(
    board: Board, columns: Sequence[Column]
) -> tuple[list[Row], np.ndarray, list[str]]:
    """Return checkpoints with a ranked value, values (rows, columns; nan: none), and datasets."""
    measured = board.measured_rows
    place = {row.checkpoint: n for n, row in enumerate(measured)}
    which = {column: n for n, column in enumerate(columns)}
    values = np.full((len(place), len(columns)), np.nan)
    for (checkpoint, column), cell in board.cells.items():
        if column in which and checkpoint in place and ranks_by(cell):
            values[place[checkpoint], which[column]] = cell.value
    there = np.flatnonzero(~np.isnan(values).all(1))
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
    # 1. How values move with the images matters only if there are few datasets
    noise, trainings = None, None
    few_datasets = len(set(datasets)) < column_comparisons.FEWEST
    if few_datasets and len(rows) <= column_comparisons.MOST_BY_IMAGES:
        noise, runs = _noise_and_runs(board, rows, columns)
        noises = [noise_of(board, column) for column in columns]
        trainings = column_comparisons.Trainings(noises, runs)
    # 2. The best rank first
    ranking = rank_intervals.ranking(values, datasets, noise, trainings)
    order = sorted(range(len(rows)), key=lambda i: (ranking.places[i].rank, i))
    places, above = (
        [ranking.places[i] for i in order],
        ranking.above[np.ix_(order, order)],
    )
    ranking = dataclasses.replace(ranking, places=places, above=above)
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
            if ranks_by(cell) and len(kept) == len(cell.parts):
                moved = resamples.moved(kept, column.metric)
                noise[r, c] = np.nan if moved is None else moved
    return noise, runs


# ---- the answer


def answer(board: Board, sets: Sequence[Overall]) -> str:
    """One sentence that says who leads, where, and what cannot be told apart."""
    count = len(board.measured_rows)
    if not count:
        return "Nothing is measured here."
    if count == 1:
        return f"{board.labels()[board.measured_rows[0].checkpoint]} is alone here: nothing to compare it with."
    if count > rank_intervals.MOST_ROWS:
        return f"{count} checkpoints are too many to rank: at most {rank_intervals.MOST_ROWS} are."
    if not sets:
        return "No two checkpoints share a measurement: nothing here can be compared."
    widest, labels = sets[0], board.labels()
    clauses = [_leaders(widest, labels)]
    for other in sets[1:]:
        first, over = other.leaders(), f"over {other.title}"
        if len(first) == len(other.rows):
            clauses.append(f"{over} {_all(first, labels)} cannot be told apart")
        elif first == widest.leaders():
            clauses.append(f"{over} too")
        else:
            clauses.append(
                f"{over} {_names(first, labels)} {'leads' if len(first) == 1 else 'lead'}"
            )
    clauses.append(_single(board, widest.columns, labels))
    return "; ".join(filter(None, clauses)) + "."


def _names(rows: Sequence[Row], labels: dict[str, str]) -> str:
    names = [labels[row.checkpoint] for row in rows[:NAMED]]
    return _listed(
        [*names, f"{len(rows) - NAMED} others"] if len(rows) > NAMED else names
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _leaders(of: Overall, labels: dict[str, str]) -> str:
    """The clause of the widest set."""
    first, total = of.leaders(), len(of.rows)
    if len(first) == total:
        why = ", as too little was measured, trained again or kept to test it"
        why *= not of.standing.tested
        return f"No clear winner: {_all(first, labels)} cannot be told apart over {of.title}{why}"
    if len(first) == 1:
        alone = f"{labels[first[0].checkpoint]} leads alone over {of.title}"
        return f"{alone}: rank 1 of {total} with 95% confidence, {of.basis}"
    ends = [dict.fromkeys(map(str, of.place(row).interval)) for row in first[:NAMED]]
    return (
        f"{_names(first, labels)} lead over {of.title} and cannot be told apart:"
        f" ranks {', '.join(map(' to '.join, ends))} of {total} with 95% confidence, {of.basis}"
    )


def _all(rows: Sequence[Row], labels: dict[str, str]) -> str:
    return (
        _names(rows, labels) if len(rows) <= NAMED else f"the {len(rows)} checkpoints"
    )


def _single(board: Board, columns: Sequence[Column], labels: dict[str, str]) -> str:
    """Name the columns in which a checkpoint is best, or best of one training; count the others."""
    if len(columns) < 2:
        return ""
    clauses, rest = [], len(columns)
    for mark, words in (
        (BEST, "best by a paired test"),
        (ONCE, "best of one training each"),
    ):
        won: dict[str, list[Column]] = {}
        for column in columns:
            for checkpoint, own in standing(board, column).items():
                if own == mark:
                    won.setdefault(checkpoint, []).append(column)
                    rest -= 1
        winners = []
        for checkpoint in sorted(won, key=lambda c: -len(won[c]))[:NAMED]:
            winners.append(
                f"{labels[checkpoint]} in {_where(won[checkpoint], columns)}"
            )
        if winners:
            clauses.append(f"{words}: {', '.join(winners)}")
        elif mark == BEST:
            clauses.append(NOWHERE)
    if rest and NOWHERE not in clauses:
        clauses.append(f"nobody in the other {rest}")
    return "; ".join(clauses)


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
        names.append(
            title if tasks.count(column.task) == 1 else f"{title} on {column.dataset}"
        )
    return _listed(names)
