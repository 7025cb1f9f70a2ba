"""Who leads the board: named sets of columns, the rank of every checkpoint over each set
(backbench/stats/rank_intervals.py), and the answer in three sentences.

Only rows that common columns connect are ranked together. Where a test over other datasets or
columns puts nobody alone on top, a test over other images of the columns that can be tested may do
so: it says less, and a column that cannot be tested yet takes nothing from it.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backbench.board import commands, groups, verdict
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
from backbench.board.column_words import as_places, short_names
from backbench.board.verdict import NAMED, RankedGroup, in_braces, listed, some
from backbench.datasets.catalog import TWELVE
from backbench.records import label_curve
from backbench.records.column_keys import USUAL_SPLIT
from backbench.stats import column_comparisons, rank_intervals, resampling
from backbench.stats.column_comparisons import FEWEST
from backbench.tasks import TASKS
from backbench.verify import flaws

# The names of the sets
ALL = "all columns"
OF_TWELVE = "LORAC's twelve"
OF_DETECTION = "detection"
FEW = 0.25  # of a set's columns: rows with numbers in fewer stand below the others
GROUPS = 3  # groups of rows that the answer speaks of; of more, it says how many
NOWHERE = "none is best on any single measurement by a paired test"


@dataclass(frozen=True, kw_only=True)
class Overall(RankedGroup):
    """Checkpoints (`rows`) that common columns of a set connect, the best rank first; those with
    numbers in few of the columns follow."""

    name: str  # of the set
    columns: list[Column]
    rows: list[Row]
    group: int  # of those that have a column in common in any set; 0 is the largest

    def row_leaders(self) -> list[Row]:
        return [self.rows[i] for i in self.leaders]

    def place(self, row: Row) -> rank_intervals.RankPlace:
        return self.standing.places[self.rows.index(row)]

    def rank_of(self, row: Row) -> str:
        """Return a row's rank and its interval, as `2 (1-4)`; empty if it has none."""
        if row not in self.rows:
            return ""
        return f"{self.place(row).rank} ({self.interval(self.rows.index(row), '-')})"


def ranks_by(cell: Cell) -> bool:
    """Return True for a value that is ranked: it follows from what was kept, and its fit has
    converged."""
    return cell.value is not None and cell.backed and cell.settled


def main_columns(board: Board) -> list[Column]:
    """Return the main metric's column of each way of measuring that two checkpoints share."""
    main = [column for column in board.main_columns() if column.dataset != AVERAGE]
    _, values, _ = values_of(board, main)
    count = (~np.isnan(values)).sum(axis=0)  # of checkpoints in each column
    return [column for column, checkpoints in zip(main, count) if checkpoints > 1]


def column_sets(board: Board) -> dict[str, list[Column]]:
    """Return the named sets of columns, the widest first. A set that equals another one is left
    out."""
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
    datasets = []
    for column in columns:
        # Other lists of a dataset hold most of its images: they are no other dataset
        split = (column.split or USUAL_SPLIT).partition("~")[0]
        datasets.append(f"{column.dataset}:{split}")
    return [measured[i] for i in there], values[there], datasets


def connected_rows(board: Board) -> list[list[Row]]:
    """Return the groups of checkpoints that common columns connect, the largest first. A checkpoint
    whose numbers nobody else has is a group of its own; one without a ranked number is in none."""
    columns = [column for column in board.main_columns() if column.dataset != AVERAGE]
    rows, values, _ = values_of(board, columns)
    return [[rows[i] for i in group] for group in groups.connected(values)]


def overall(board: Board) -> list[Overall]:
    """Return the ranks over every set, and of every group in it; none if no column has two
    checkpoints, or if there are too many."""
    if len(board.measured_rows) > rank_intervals.MOST_ROWS:
        return []
    ranks = _Ranks(board)
    out: list[Overall] = []
    for name, columns in column_sets(board).items():
        for one in ranks.of_set(name, columns):
            # A set may be another one without the columns that cannot be tested
            known = [(other.columns, other.rows) for other in out]
            if (one.columns, one.rows) not in known:
                out.append(one)
    return sorted(out, key=lambda one: one.group)


def first_of_groups(sets: Sequence[Overall]) -> list[Overall]:
    """Return the first set of each group: the one that its rows are ordered by. Where the columns
    that can be tested leave a group in several parts, these are its first sets."""
    out: list[Overall] = []
    for of in sets:
        known = {row for other in out for row in other.rows}
        if not known & set(of.rows):
            out.append(of)
    return out


class _Ranks:
    """Ranks of one board. How its numbers move on resamples is worked out once."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.labels = board.labels()
        self.names = short_names(board.main_columns())
        self.main = main_columns(board)
        self.connected = connected_rows(board)
        self._moved: dict[tuple[str, Column], np.ndarray | None] = {}

    def of_set(self, name: str, columns: list[Column]) -> list[Overall]:
        """Rank each group of a set; the largest first."""
        _, values, _ = values_of(self.board, columns)
        out = []
        for group in groups.connected(values):
            measured = ~np.isnan(values[group]).all(0)
            there = [columns[i] for i in np.flatnonzero(measured)]
            if len(group) > 1:
                out += self._of_group(name, there)
        return out

    def _of_group(self, name: str, columns: list[Column]) -> list[Overall]:
        """Return the ranks of one group: over all of its columns, over those that can be tested, or
        both."""
        rows, _, datasets = values_of(self.board, columns)
        # 1. Over other datasets or columns like these, trained anew: one training each will do.
        whole = None
        if len(set(datasets)) >= FEWEST or len(columns) >= FEWEST:
            whole = self._ranked(name, columns, columns)
            if whole.is_decided:
                return [whole]
        # 2. Over other images, in the columns that can be tested. Without the others, some rows may
        #    have no column in common.
        tested = [column for column in columns if self._can_test(column, rows)]
        parts = []
        _, values, _ = values_of(self.board, tested)
        for part in groups.connected(values):
            measured = ~np.isnan(values[part]).all(0)
            there = [tested[i] for i in np.flatnonzero(measured)]
            if len(part) > 1:
                parts.append(self._ranked(name, there, columns, by_images=True))
        # 3. The parts with a leader come first: what can be tested stays said, whatever joins it.
        if whole is None:
            return parts or [self._ranked(name, columns, columns, by_images=True)]
        return [*[part for part in parts if part.is_decided], whole]

    def _can_test(self, column: Column, rows: Sequence[Row]) -> bool:
        """Return True if two rows kept their predictions, and the noise of trainings is known."""
        if not noise_of(self.board, column).known:
            return False
        return sum(self._resampled(row, column) is not None for row in rows) > 1

    def _ranked(
        self,
        name: str,
        columns: list[Column],
        everything: list[Column],
        *,
        by_images: bool = False,
    ) -> Overall:
        """Rank the checkpoints that have a value in one of these columns, which are some of
        `everything` that was measured in this group."""
        board = self.board
        rows, values, datasets = values_of(board, columns)
        # 1. How values move with the images matters only if there are few datasets.
        noise = None
        trainings = None
        images = None
        few = by_images or len(set(datasets)) < FEWEST
        if few and len(rows) <= column_comparisons.MOST_BY_IMAGES:
            noise, runs = self._noise_and_runs(rows, columns)
            noises = [noise_of(board, column) for column in columns]
            trainings = column_comparisons.Trainings(noises, runs)
            images = np.array([self._images_of(rows, column) for column in columns])
        # 2. The best rank first. A rank of few columns says little, so such rows come last.
        ranking = rank_intervals.ranking(
            values,
            datasets,
            noise,
            trainings,
            by_images=by_images,
            images=images,
        )
        in_few = (~np.isnan(values)).sum(axis=1) < FEW * len(columns)
        order = sorted(
            range(len(rows)), key=lambda i: (in_few[i], ranking.places[i].rank, i)
        )
        ranking = dataclasses.replace(
            ranking,
            places=[ranking.places[i] for i in order],
            above=ranking.above[np.ix_(order, order)],
        )
        in_order = [rows[i] for i in order]
        return Overall(
            name=name,
            columns=columns,
            rows=in_order,
            names=[self.labels[row.checkpoint] for row in in_order],
            standing=ranking,
            met=groups.meetings(values[order]),
            title=self._title(name, columns, everything),
            basis=_basis(ranking, columns),
            group=next(
                n for n, group in enumerate(self.connected) if in_order[0] in group
            ),
        )

    def _title(self, name: str, columns: list[Column], everything: list[Column]) -> str:
        """Return the columns of a set in a sentence."""
        count = len(columns)
        is_whole = count == len(everything)
        if name == OF_TWELVE:
            return name if count == len(TWELVE) else f"{count} of {name}"
        if name == OF_DETECTION:
            of = "" if is_whole else f" of {len(everything)}"
            return f"{count}{of} measurements of detection"
        # The largest set of the only group
        if is_whole and columns == self.main:
            return f"all {count} measurements" if count > 1 else self.names[columns[0]]
        if count <= 2:
            return as_places(columns, [], self.names)
        if not is_whole:
            return f"the {count} that can be tested"
        # The whole of one of several groups
        tasks = {TASKS[column.task].title for column in columns}
        datasets = {(column.dataset, column.split) for column in columns}
        if len(tasks) == 1 and len(datasets) == count:
            return f"{tasks.pop()} on {count} datasets"
        return f"{count} measurements"

    def _resampled(self, row: Row, column: Column) -> np.ndarray | None:
        """Return how a value moves on resamples of the images; None if nobody knows."""
        from backbench.verify import resamples

        key = (row.checkpoint, column)
        if key not in self._moved:
            moved = None
            cell = self.board.cell(row, column)
            if cell is not None and ranks_by(cell):
                kept = list(predictions(cell).values())
                if len(kept) >= len(cell.parts):
                    moved = resamples.moved(kept, column.metric)
            self._moved[key] = moved
        return self._moved[key]

    def _images_of(self, rows: Sequence[Row], column: Column) -> float:
        """Return the number of a column's test images; nan if no row kept what tells it."""
        from backbench.verify import resamples

        for row in rows:
            cell = self.board.cell(row, column)
            if cell is not None and self._resampled(row, column) is not None:
                kept = list(predictions(cell).values())
                return resamples.images_of(kept, column.metric)
        return np.nan

    def _noise_and_runs(
        self, rows: Sequence[Row], columns: Sequence[Column]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return how values move on resamples of the images (rows, columns, resamples), nan if
        unknown, and how many trainings each is the mean of (rows, columns)."""
        noise = np.full((len(rows), len(columns), resampling.COUNT), np.nan)
        runs = np.ones((len(rows), len(columns)))
        for r, row in enumerate(rows):
            for c, column in enumerate(columns):
                cell = self.board.cell(row, column)
                if cell is None:
                    continue
                runs[r, c] = max(1, len(cell.values))
                moved = self._resampled(row, column)
                if moved is not None:
                    noise[r, c] = moved
        return noise, runs


def _basis(ranking: rank_intervals.Ranking, columns: Sequence[Column]) -> str:
    """Return the words that say what the intervals are for."""
    if ranking.over == "datasets":
        return f"for other datasets like these {ranking.units}"
    if ranking.over == "columns":
        return f"for other measurements like these {ranking.units}, on other images"
    these = "these measurements" if len(columns) > 1 else "this measurement"
    if any(TASKS[column.task].trains_in(column.protocol) for column in columns):
        return f"for {these} on other images and trainings"
    return f"for {these} on other images"


# ---- the answer


def answer(board: Board, sets: Sequence[Overall]) -> str:
    """Return the sentences of the answer, as one line."""
    return " ".join(sentences(board, sets))


def sentences(board: Board, sets: Sequence[Overall]) -> list[str]:
    """Return three sentences at most: who leads, and what cannot be told apart; who is best where; and what
    is missing for more, with the command that measures it."""
    # 1. Nothing is ranked.
    labels = board.labels()
    connected = connected_rows(board)
    main = main_columns(board)
    count = len(board.measured_rows)
    single = ""
    if not count:
        return ["Nothing is measured here."]
    if count == 1:
        alone = labels[board.measured_rows[0].checkpoint]
        said = f"{alone} is alone here: nothing to compare it with"
    elif count > rank_intervals.MOST_ROWS:
        most = rank_intervals.MOST_ROWS
        return [f"{count} checkpoints are too many to rank: at most {most} are."]
    elif (
        not sets
        and len(connected) > 1
        and not _unsettled_together(board, *connected[:2])
    ):
        said = "No two checkpoints share a measurement: nothing here can be compared"
    elif not sets:
        said = _labels_saved(board) or "Nothing here can be compared"
    else:
        said = _verdict(sets)
        # 2. Who is best where. A column that alone makes a verdict was named with its winner.
        told = [of.columns[0] for of in sets if of.is_decided and len(of.columns) == 1]
        left = [column for column in main if column not in told]
        single = _single(board, left, labels, connected) if len(main) > 1 else ""
    # 3. What is missing.
    missing = "; ".join(_missing(board, sets, labels, connected, main))
    parts = [part for part in (said, single, missing) if part]
    # The first part may begin with a checkpoint's name, whose letters stay as they are
    return [f"{said}.", *[f"{verdict.capitalised(part)}." for part in parts[1:]]]


def _labels_saved(board: Board) -> str:
    """Return the first thing that label curves, which rank nobody, say of each other; "" without
    two."""
    points = []
    for column in board.columns:
        if column.task != label_curve.TASK:
            continue
        for _, cell in board.measured(column):
            points += [(part.result, part.run) for part in cell.parts]
    said = label_curve.sayings(points)
    # The page draws the others
    return verdict.capitalised(said[0]) if said else ""


def _verdict(sets: Sequence[Overall]) -> str:
    """Say who leads each group over its widest set, and over the others."""
    ranked = sorted({of.group for of in sets})
    clauses = []
    for group in ranked[:GROUPS]:
        own = [of for of in sets if of.group == group]
        clauses += _of_group(own)
    if not sets[0].begins_with_name:
        clauses[0] = verdict.capitalised(clauses[0])
    if len(ranked) > GROUPS:
        left = len(ranked) - GROUPS
        more = "1 more group stands" if left == 1 else f"{left} more groups stand"
        clauses.append(f"{more} in the table")
    return "; ".join(clauses)


def _of_group(sets: Sequence[Overall]) -> list[str]:
    """Say who leads one group over its sets."""
    widest = sets[0]
    clauses = [widest.clause()]
    for other in sets[1:]:
        leaders = other.row_leaders()
        over = f"over {other.title}"
        if not other.standing.tested:
            continue  # What is missing to test it is said at the end
        if len(leaders) == len(other.rows):
            everybody = verdict.everybody(other.names)
            clauses.append(f"{over} {everybody} cannot be told apart")
        elif leaders == widest.row_leaders():
            clauses.append(f"{over} too")
        else:
            leads = "leads" if len(leaders) == 1 else "lead"
            clauses.append(
                f"{over} {some([other.names[i] for i in other.leaders])} {leads}"
            )
    return clauses


def _single(
    board: Board,
    columns: Sequence[Column],
    labels: dict[str, str],
    connected: Sequence[Sequence[Row]],
) -> str:
    """Name the columns in which a checkpoint is best, or best of one training; count the others."""
    best = _won(board, columns, BEST)
    once = _won(board, columns, ONCE)
    clauses = []
    if best:
        winners = _winners(board, best, columns, labels, connected)
        clauses.append(f"best by a paired test: {winners}")
    elif columns == main_columns(board):
        clauses.append(NOWHERE)
    if once:
        winners = _winners(board, once, columns, labels, connected)
        clauses.append(f"best of one training each: {winners}")
    won = sum(len(each) for each in (*best.values(), *once.values()))
    if best and won < len(columns):
        left = len(columns) - won
        others = "one" if left == 1 else str(left)
        clauses.append(f"nobody in the other {others}")
    return "; ".join(clauses)


def _won(board: Board, columns: Sequence[Column], mark: str) -> dict[str, list[Column]]:
    """Return checkpoint -> the columns in which it has this mark."""
    won: dict[str, list[Column]] = {}
    for column in columns:
        for checkpoint, own in standing(board, column).items():
            if own == mark:
                won.setdefault(checkpoint, []).append(column)
    return won


def _winners(
    board: Board,
    won: dict[str, list[Column]],
    columns: Sequence[Column],
    labels: dict[str, str],
    connected: Sequence[Sequence[Row]],
) -> str:
    """Return at most NAMED winners and their columns, those with the most columns first."""
    by_count = sorted(won, key=lambda checkpoint: -len(won[checkpoint]))
    names = short_names(board.main_columns())
    clauses = []
    of_group = {row.checkpoint: len(rows) for rows in connected for row in rows}
    for checkpoint in by_count[:NAMED]:
        total = of_group[checkpoint]
        # Of how many checkpoints it is the best, where not all of its group were measured
        of = {}
        for column in won[checkpoint]:
            count = len(board.measured(column))
            of[column] = "" if count >= total else f"{count} of {total} measured"
        where = as_places(won[checkpoint], columns, names, of)
        clauses.append(f"{labels[checkpoint]} in {where}")
    return ", ".join(clauses)


# ---- what is missing


def _missing(
    board: Board,
    sets: Sequence[Overall],
    labels: dict[str, str],
    connected: Sequence[Sequence[Row]],
    main: Sequence[Column],
) -> list[str]:
    """Say what stands in the way of a verdict, a clause each."""
    clauses = [
        _never_together(board, connected, sets, labels),
        _trained_once(board, sets, labels, main),
        _nothing_kept(board, labels),
        _not_ranked(board, connected, labels),
        _without_ranks(board, connected, labels),
        _at_another_size(board, labels),
    ]
    return [clause for clause in clauses if clause]


def _never_together(
    board: Board,
    connected: Sequence[Sequence[Row]],
    sets: Sequence[Overall],
    labels: dict[str, str],
) -> str:
    """Name the groups that share no column, and the command that connects the first two."""
    if len(connected) < 2:
        return ""
    # Within a group, the best stand first
    rank: dict[Row, int] = {}
    for of in sets:
        for row, place in zip(of.rows, of.standing.places, strict=True):
            rank.setdefault(row, place.rank)
    ordered = [sorted(rows, key=lambda row: rank.get(row, 0)) for rows in connected]
    words = []
    for rows in ordered[:GROUPS]:
        words.append(in_braces([labels[row.checkpoint] for row in rows]))
    if len(ordered) > GROUPS:
        left = len(ordered) - GROUPS
        words.append(verdict.counted(left, "other group", "other groups"))
    # What both have, and cannot be ranked by, no command connects
    shared = _unsettled_together(board, ordered[0], ordered[1])
    if shared:
        where = as_places(shared, [], short_names(board.main_columns()))
        return f"not compared: {listed(words)}; a fit in {where} has not converged"
    # The column in which most of the first group were measured
    first = set(ordered[0])
    count = {}
    for column in board.main_columns():
        if column.dataset != AVERAGE:
            having = [row for row, cell in board.measured(column) if ranks_by(cell)]
            count[column] = len(first & set(having))
    column = max(count, key=lambda column: count[column])
    command = commands.measuring(board, column, [ordered[1][0]])
    connects = "them" if len(ordered) == 2 else "the first two"
    apart = f"never measured together{_why_apart(board, ordered[0], ordered[1])}"
    return f"{apart}: {listed(words)}; `{command}` connects {connects}"


def _why_apart(board: Board, one: Sequence[Row], other: Sequence[Row]) -> str:
    """Say where both groups were measured alike, but for the images or the recipe of one name: a
    dataset that was changed in between, say."""
    found: list[dict[tuple[object, ...], Column]] = []
    for rows in (one, other):
        columns: dict[tuple[object, ...], Column] = {}
        for column in board.main_columns():
            if column.dataset != AVERAGE and any(
                board.cell(row, column) is not None for row in rows
            ):
                columns.setdefault(column.without_marks, column)
        found.append(columns)
    for alike, column in found[0].items():
        if alike not in found[1]:
            continue
        if column.protocol != found[1][alike].protocol:
            return f", as their recipes of {alike[3]} differ"
        return f", as their images of {column.dataset} differ"
    return ""


def _unsettled_together(
    board: Board, one: Sequence[Row], other: Sequence[Row]
) -> list[Column]:
    """Return the columns in which both groups have numbers, and a fit that has not converged."""
    columns = []
    for column in board.main_columns():
        cells = dict(board.measured(column))
        settled = [cell.settled for cell in cells.values() if cell.backed]
        in_both = any(row in cells for row in one) and any(
            row in cells for row in other
        )
        if column.dataset != AVERAGE and in_both and not all(settled):
            columns.append(column)
    return columns


def _trained_once(
    board: Board,
    sets: Sequence[Overall],
    labels: dict[str, str],
    main: Sequence[Column],
) -> str:
    """Name the columns that no verdict counts, as nobody knows how far a second training would move
    them; and the command that settles the first of them."""
    decided: set[Column] = set()
    for of in sets:
        # A test over other datasets or columns counts trainings that differ
        if of.is_decided and of.standing.over != "images":
            decided.update(of.columns)
    waiting = []
    for column in main:
        if column not in decided and not noise_of(board, column).known:
            waiting.append(column)
    if not waiting:
        return ""
    names = short_names(board.main_columns())
    where = as_places(waiting, [], names)
    # One command trains all columns of one protocol, or of one dataset
    first = waiting[0]
    alike = [
        column
        for column in waiting
        if (column.task, column.protocol) == (first.task, first.protocol)
        and (commands.takes_several(first) or column.dataset == first.dataset)
    ]
    rows = [row for row, _ in board.backed(first)][:2]
    command = f"`{commands.measuring(board, first, rows, seeds=3, also=alike[1:])}`"
    is_first_alone = len(rows) > 1 and not commands.takes_several(first)
    if is_first_alone:
        command += f" and the same for {labels[rows[1].checkpoint]}"
    settle = "settle" if is_first_alone else "settles"
    what = "it"
    if len(waiting) > 1:
        what = "them" if len(alike) == len(waiting) else names[first]
    return f"trained once each, so not tested yet: {where}; {command} {settle} {what}"


def _nothing_kept(board: Board, labels: dict[str, str]) -> str:
    """Name the columns and checkpoints whose numbers follow from nothing that was kept."""
    of_rows: dict[Column, list[str]] = {}
    for column in board.main_columns():
        for row, cell in board.measured(column):
            if not cell.backed and column.dataset != AVERAGE:
                of_rows.setdefault(column, []).append(labels[row.checkpoint])
    if not of_rows:
        return ""
    names = short_names(board.main_columns())
    whose = sorted({name for rows in of_rows.values() for name in rows})
    where = as_places(list(of_rows), [], names)
    return f"nothing kept to test or rank: {some(whose)} in {where}"


def _not_ranked(
    board: Board, connected: Sequence[Sequence[Row]], labels: dict[str, str]
) -> str:
    """Name the numbers that stand in the table and are not ranked, with the reason: the highest of a
    column may be one."""
    told: list[Column] = []
    if len(connected) > 1:
        told = _unsettled_together(board, *connected[:2])
    of_reasons: dict[str, dict[Column, list[str]]] = {}
    for column in board.main_columns():
        for row, cell in board.measured(column):
            if cell.settled or not cell.backed or column.dataset == AVERAGE:
                continue
            whose = of_reasons.setdefault(flaws.in_short(cell.why_unsettled), {})
            if column not in told:
                whose.setdefault(column, []).append(labels[row.checkpoint])
    names = short_names(board.main_columns())
    clauses = []
    for reason, of_columns in of_reasons.items():
        # Columns of the same rows are told together
        places: dict[tuple[str, ...], list[Column]] = {}
        for column, rows in of_columns.items():
            places.setdefault(tuple(sorted(rows)), []).append(column)
        words = [
            f"{some(rows)} in {as_places(columns, [], names)}"
            for rows, columns in places.items()
        ]
        if words:
            clauses.append(f"not ranked, as {reason}: {some(words)}")
    return "; ".join(clauses)


def _without_ranks(
    board: Board, connected: Sequence[Sequence[Row]], labels: dict[str, str]
) -> str:
    """Name the checkpoints without a number that can be ranked, if nothing else names them."""
    ranked = {row for rows in connected for row in rows}
    named = set()  # of what has nothing kept, or is not settled
    for column in board.main_columns():
        for row, cell in board.measured(column):
            if not cell.backed or not cell.settled:
                named.add(row.checkpoint)
    left = [
        labels[row.checkpoint]
        for row in board.measured_rows
        if row not in ranked and row.checkpoint not in named
    ]
    return f"without a number that can be ranked: {some(left)}" if left else ""


def _at_another_size(board: Board, labels: dict[str, str]) -> str:
    """Name the checkpoints that were measured on images of another size than they were trained on."""
    by_sizes: dict[str, list[str]] = {}
    for row in board.measured_rows:
        if row.checkpoint in board.resized:
            measured = listed(
                [str(side) for side in sorted(board.resized[row.checkpoint])]
            )
            trained = board.trained[row.checkpoint]
            sizes = f"trained at {trained} pixels and measured at {measured}"
            by_sizes.setdefault(sizes, []).append(labels[row.checkpoint])
    return "; ".join(f"{sizes}: {some(names)}" for sizes, names in by_sizes.items())
