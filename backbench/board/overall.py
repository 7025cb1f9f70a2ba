"""Who leads the board: named sets of columns, the rank of every checkpoint over each set
(backbench/stats/rank_intervals.py), and the answer in one sentence."""

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
        place = self.place(row)
        low, high = place.interval
        return f"{place.rank} ({low}-{high})" if low < high else f"{place.rank} ({low})"

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
    count: dict[Column, int] = dict.fromkeys(main, 0)
    measured = {row.checkpoint for row in board.measured_rows}
    for (checkpoint, column), cell in board.cells.items():
        if column in count and ranks_by(cell) and checkpoint in measured:
            count[column] += 1
    return [column for column in main if count[column] > 1]


def column_sets(board: Board) -> dict[str, list[Column]]:
    """The named sets of columns, the widest first. A set that equals another one is left out."""
    main = main_columns(board)
    sets = {ALL: main, OF_TWELVE: _twelve(board, main)}
    sets[OF_DETECTION] = [column for column in main if TASKS[column.task].detects]
    out: dict[str, list[Column]] = {}
    for name, columns in sets.items():
        if columns and columns not in out.values() and (name == ALL or len(columns) > 1):
            out[name] = columns
    return out


def _twelve(board: Board, main: Sequence[Column]) -> list[Column]:
    """The linear probes on LORAC's twelve, by the protocol that has the most numbers."""
    ways: dict[tuple[str, str], list[Column]] = {}
    for column in main:
        if column.task == "linear" and column.dataset in TWELVE and column.split is None:
            ways.setdefault((column.protocol, column.engine or ""), []).append(column)
    count = {way: sum(len(board.measured(c)) for c in columns) for way, columns in ways.items()}
    most = max(ways, key=lambda way: (count[way], way), default=None)
    return [] if most is None else ways[most]


def overall(board: Board) -> list[Overall]:
    """The ranks over every set; none if no column has two checkpoints, or if there are too many."""
    if len(board.measured_rows) > rank_intervals.MOST_ROWS:
        return []
    return [_ranked(board, name, columns) for name, columns in column_sets(board).items()]


def _ranked(board: Board, name: str, columns: list[Column]) -> Overall:
    """Rank the checkpoints that have a value in one of these columns."""
    # 1. The table of values, without the rows that have none
    measured = board.measured_rows
    place = {row.checkpoint: n for n, row in enumerate(measured)}
    which = {column: n for n, column in enumerate(columns)}
    values = np.full((len(place), len(columns)), np.nan)
    for (checkpoint, column), cell in board.cells.items():
        if column in which and checkpoint in place and ranks_by(cell):
            values[place[checkpoint], which[column]] = cell.value
    there = np.flatnonzero(~np.isnan(values).all(1))
    rows, values = [measured[i] for i in there], values[there]
    # 2. How values move with the images matters only if there are few datasets
    datasets = [f"{c.dataset}:{c.split or ''}" for c in columns]
    noise, trainings = None, None
    few_datasets = len(set(datasets)) < column_comparisons.FEWEST
    if few_datasets and len(rows) <= column_comparisons.MOST_BY_IMAGES:
        noise, runs = _noise_and_runs(board, rows, columns)
        noises = [noise_of(board, column) for column in columns]
        trainings = column_comparisons.Trainings(noises, runs)
    # 3. The best rank first
    ranking = rank_intervals.ranking(values, datasets, noise, trainings)
    order = sorted(range(len(rows)), key=lambda i: (ranking.places[i].rank, i))
    return Overall(name, columns, [rows[i] for i in order], ranking.taken(order))


def _noise_and_runs(
    board: Board, rows: Sequence[Row], columns: Sequence[Column]
) -> tuple[np.ndarray, np.ndarray]:
    """How values move on resamples of the images (rows, columns, resamples), nan if unknown, and
    how many trainings each is the mean of (rows, columns)."""
    from backbench.results import resamples

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
                if moved is not None:
                    noise[r, c] = moved
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
    labels = board.labels()
    single = _single(board, sets[0].columns, labels)
    clauses = [_leaders(sets[0], labels)]
    if count == 2 and len(sets[0].leaders()) == 2 and single == NOWHERE:
        # Of two checkpoints the two clauses are one
        several = f"any of the {len(sets[0].columns)} measurements"
        clauses = [clauses[0].replace(f"over {sets[0].title}", f"on {several}")]
        single = ""
    clauses += [_elsewhere(other, sets[0], labels) for other in sets[1:]]
    clauses.append(single)
    return "; ".join(filter(None, clauses)) + "."


def _names(rows: Sequence[Row], labels: dict[str, str]) -> str:
    names = [labels[row.checkpoint] for row in rows[:NAMED]]
    return _listed([*names, f"{len(rows) - NAMED} others"] if len(rows) > NAMED else names)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _leaders(of: Overall, labels: dict[str, str]) -> str:
    """The clause of the widest set."""
    first, total = of.leaders(), len(of.rows)
    if len(first) == total:
        why = ", as too little was measured, trained again or kept to test it"
        why = "" if of.standing.tested else why
        return f"No clear winner: {_all(first, labels)} cannot be told apart over {of.title}{why}"
    if len(first) == 1:
        alone = f"{labels[first[0].checkpoint]} leads alone over {of.title}"
        return f"{alone}: rank 1 of {total} with 95% confidence, {of.basis}"
    ranks = []
    for row in first[:NAMED]:
        low, high = of.place(row).interval
        ranks.append(str(low) if low == high else f"{low} to {high}")
    return (
        f"{_names(first, labels)} lead over {of.title} and cannot be told apart:"
        f" ranks {', '.join(ranks)} of {total} with 95% confidence, {of.basis}"
    )


def _all(rows: Sequence[Row], labels: dict[str, str]) -> str:
    return _names(rows, labels) if len(rows) <= NAMED else f"the {len(rows)} checkpoints"


def _elsewhere(of: Overall, widest: Overall, labels: dict[str, str]) -> str:
    """The clause of another set."""
    first = of.leaders()
    if len(first) == len(of.rows):
        return f"over {of.title} {_all(first, labels)} cannot be told apart"
    if first == widest.leaders():
        return f"over {of.title} too"
    verb = "leads" if len(first) == 1 else "lead"
    return f"over {of.title} {_names(first, labels)} {verb}"


def _single(board: Board, columns: Sequence[Column], labels: dict[str, str]) -> str:
    """The clause of single columns: in which a checkpoint is best by a paired test, in which it is
    best of one training each, and in how many neither is so."""
    if len(columns) < 2:
        return ""
    marked: dict[str, dict[str, list[Column]]] = {BEST: {}, ONCE: {}}
    for column in columns:
        for checkpoint, mark in standing(board, column).items():
            if mark in marked:
                marked[mark].setdefault(checkpoint, []).append(column)
    clauses, rest = [], len(columns)
    for mark, words in ((BEST, "best by a paired test"), (ONCE, "best of one training each")):
        of_checkpoint = marked[mark]
        rest -= sum(map(len, of_checkpoint.values()))
        winners = []
        for checkpoint in sorted(of_checkpoint, key=lambda c: -len(of_checkpoint[c]))[:NAMED]:
            winners.append(f"{labels[checkpoint]} in {_where(of_checkpoint[checkpoint], columns)}")
        if winners:
            clauses.append(f"{words}: {', '.join(winners)}")
    if not marked[BEST]:
        clauses.insert(0, NOWHERE)
    elif rest:
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
        names.append(title if tasks.count(column.task) == 1 else f"{title} on {column.dataset}")
    return _listed(names)
