"""The board: results found below some folders as rows, columns and cells, and tests between rows.

A row is a checkpoint. A column is `task/dataset[:split]/metric@protocol[~fingerprint][+engine]`, so
numbers that were measured differently stand in different columns (records/column_keys.py).
Published rows (published/board_rows.py) are marked, and never averaged or ranked with measured
ones. Of the files beside this one only `every_eval_ever`, which reads records, and
`metrics` are imported here; the others take a finished board.
"""

import itertools
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from backbench.board import every_eval_ever, metrics
from backbench.datasets.catalog import DATASETS, TWELVE
from backbench.recipes import fast
from backbench.records import column_keys, store, trunk_costs
from backbench.records.store import Result
from backbench.records.trunk_costs import TrunkCost
from backbench.runs.garbage import many_objects
from backbench.stats import confidence
from backbench.stats.paired_differences import Difference, tied_with_first
from backbench.stats.training_noise import FEWEST, NOTHING_TRAINED, TrainingNoise
from backbench.tasks import ORDER, TASKS
from backbench.untrusted import printable
from backbench.verify import column_noise, flaws, verification
from backbench.verify.paired_tests import compare, of_draws

# Where a row comes from
MEASURED = "measured"
PUBLISHED = "published"
# A row's mark in a column; `standing` defines it
BEST = "best"
TIED = "tied"
UNTESTED = "untested"
ONCE = "once"
UNBACKED = "unbacked"
UNSETTLED = "unsettled"
AVERAGE = "average"  # dataset and metric of the mean over LORAC's twelve

_DATASET_ORDER = ("imagenet", "imagenet100", *TWELVE, AVERAGE)
MOST_PAIRS = 6000  # paired tests computed for the page: about ten seconds


def joined(between: str, *parts: str | None) -> str:
    """Return the parts that are neither None nor empty, with `between` between them."""
    return between.join(part for part in parts if part)


def text_of(value: float | None, form: str, *, missing: str = "") -> str:
    """Return a number in the given form (".1f", "d" for whole ones); `missing` where there is
    none."""
    return missing if value is None else format(value, form)


def _order_among(name: str, known: Sequence[str]) -> int:
    """Return the index of a name among the known ones; unknown names come after them."""
    return known.index(name) if name in known else len(known)


@dataclass(frozen=True)
class Column:
    """One way of measuring. `protocol` and `split` may carry marks (records/column_keys.py)."""

    task: str
    dataset: str
    metric: str
    protocol: str
    engine: str | None = None
    split: str | None = None

    @property
    def name(self) -> str:
        """`task/dataset[:split]/metric@protocol[+engine]`."""
        # The marks of a split (test~n500+50) are our own, so their + stays a +.
        split = printable.part(self.split or "").replace("%2B", "+")
        dataset = joined(":", printable.part(self.dataset), split)
        protocol = printable.part(self.protocol)
        how = joined("+", protocol, printable.part(self.engine or ""))
        return f"{self.task}/{dataset}/{printable.part(self.metric)}@{how}"

    @property
    def order(self) -> tuple[object, ...]:
        """The sorting key: by task, protocol, dataset, then the metrics of one family."""
        return (
            ORDER[self.task],
            self.protocol,
            self.engine or "",
            _order_among(self.dataset, _DATASET_ORDER),
            self.dataset,
            self.split or "",
            *self.place_in_setting,
        )

    @property
    def setting(self) -> tuple[str, str, str, str, str]:
        """The parts that columns of one measurement share: all but the metric."""
        return (
            self.task,
            self.dataset,
            self.split or "",
            self.protocol,
            self.engine or "",
        )

    @property
    def without_marks(self) -> tuple[str, str, str, str, str | None]:
        """The column without the marks of another recipe, other lists or another split."""
        protocol = self.protocol.partition("~")[0]
        return self.task, self.dataset, self.metric, protocol, self.engine

    @property
    def place_in_setting(self) -> tuple[int, int, str]:
        """The sorting key among the columns of one setting: the smallest is the main column."""
        family = 0
        if self.family:
            detector = TASKS[self.task].explains or self.task
            family = _order_among(self.family, TASKS[detector].ious)
        return family, metrics.place(self.metric), metrics.order(self.metric)

    @property
    def family(self) -> str:
        """The beginning of the metric's name: `segm` for segm_AP50, nothing for top1."""
        return metrics.family(self.metric)


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


@dataclass(slots=True)
class Cell:
    """The number of a row in a column, in percent."""

    value: float | None
    ci95: tuple[float, float] | None = None
    # One measurement for each seed; none behind a published number or an average
    parts: list[Measurement] = field(default_factory=list)
    note: str = ""
    # False if nothing was kept to verify one of the parts: such a number never leads
    backed: bool = True
    # Why the number is not ranked (verify/flaws.py); "" where it is
    why_unsettled: str = ""

    @property
    def settled(self) -> bool:
        """False where the number is not ranked."""
        return not self.why_unsettled

    @property
    def values(self) -> list[float]:
        """The defined values of its measurements, one for each seed."""
        return [result.value for result, _ in self.parts if result.value is not None]

    @property
    def half_width(self) -> float | None:
        """Half of the 95% interval."""
        return None if self.ci95 is None else (self.ci95[1] - self.ci95[0]) / 2


@dataclass
class Board:
    """Rows, columns and cells, and what else the records say about checkpoints."""

    rows: list[Row] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)
    # (checkpoint digest, column) -> number
    cells: dict[tuple[str, Column], Cell] = field(default_factory=dict)
    # Messages for whoever reads the board
    problems: list[str] = field(default_factory=list)
    # Checkpoint digest -> the word (recipes/fast.py) for how it was pretrained, where views or
    # precision were not those of the paper
    ways: dict[str, str] = field(default_factory=dict)
    # Checkpoint digest -> its pretraining recipe, where that was kept
    recipes: dict[str, Mapping[str, object]] = field(default_factory=dict)
    # Checkpoint digest -> the labs that measured it, as a set in the order of the records
    # (merged records only)
    labs: dict[str, dict[str, None]] = field(default_factory=dict)
    # Checkpoint digest -> the side of the images that it was trained on, in pixels, where a row
    # says it
    trained: dict[str, int] = field(default_factory=dict)
    # Checkpoint digest -> the sides at which it was measured, where they are not that of its training
    resized: dict[str, set[int]] = field(default_factory=dict)
    # Checkpoint digest -> the cost of its trunk
    costs: dict[str, TrunkCost] = field(default_factory=dict)
    # The marks and the training noise of the columns that were tested so far: `standing` and
    # `noise_of` fill them.
    standings: dict[Column, dict[str, str]] = field(default_factory=dict, repr=False)
    noises: dict[Column, TrainingNoise] = field(default_factory=dict, repr=False)

    def name(self, row: Row) -> str:
        """Return the row's name, with '(fast)' behind it for a trunk trained with `--fast`."""
        is_fast = self.ways.get(row.checkpoint) == fast.WORD
        return f"{row.name} ({fast.WORD})" if is_fast else row.name

    def cell(self, row: Row, column: Column) -> Cell | None:
        """Return the number of a row in a column; None where there is none."""
        return self.cells.get((row.checkpoint, column))

    @property
    def measured_rows(self) -> list[Row]:
        return [row for row in self.rows if row.source == MEASURED]

    def measured(self, column: Column) -> list[tuple[Row, Cell]]:
        """Return the measured rows that have a value here, best first; ties by name."""
        lower_is_better = TASKS[column.task].lower
        ordered = []
        for row in self.measured_rows:
            cell = self.cell(row, column)
            if cell is not None and cell.value is not None:
                value = cell.value if lower_is_better else -cell.value
                ordered.append((value, row.name, row.checkpoint, row, cell))
        ordered.sort(key=lambda one: one[:3])
        return [(row, cell) for *_, row, cell in ordered]

    def backed(self, column: Column) -> list[tuple[Row, Cell]]:
        """Return the measured rows whose value can be recomputed from what was kept, best first."""
        return [(row, cell) for row, cell in self.measured(column) if cell.backed]

    def measured_columns(self) -> list[Column]:
        """Return the columns in which a measured row has a cell, in the board's order."""
        digests = {row.checkpoint for row in self.measured_rows}
        used = {column for checkpoint, column in self.cells if checkpoint in digests}
        return [column for column in self.columns if column in used]

    def main_columns(self) -> list[Column]:
        """Return the main metric's column of each way of measuring that can be ranked."""
        main: dict[tuple[str, ...], Column] = {}
        for column in self.measured_columns():
            if TASKS[column.task].ranked:
                # The main column stands first of its setting, so later ones do not replace it.
                main.setdefault(column.setting, column)
        return list(main.values())

    def row_index(self) -> dict[str, int]:
        """Return checkpoint -> the index of its row."""
        return {row.checkpoint: i for i, row in enumerate(self.rows)}

    def labels(self) -> dict[str, str]:
        """Return checkpoint -> a unique label: its name, and its digest where measured rows share
        one."""
        labels = {row.checkpoint: self.name(row) for row in self.rows}
        count = Counter(labels[row.checkpoint] for row in self.measured_rows)
        for row in self.measured_rows:
            label = labels[row.checkpoint]
            if count[label] > 1:
                labels[row.checkpoint] = f"{label} {row.checkpoint[:6]}"
        return labels


# ---- from results to a board


def collect(runs: str | Path | Iterable[str | Path]) -> Board:
    """Return a board of every result below `runs`, one folder or several. Raises BadInput where a path
    is missing."""
    if isinstance(runs, str | Path):
        runs = [runs]
    # Real path -> the path by which it was reached, so that no file is read twice
    files: dict[str, Path] = {}
    for run in runs:
        for file in store.files_below(run):
            files[os.path.realpath(file)] = file
    problems: list[str] = []
    with many_objects():
        return fill(read_verified(sorted(files.values()), problems), problems)


def read_verified(files: Iterable[Path], problems: list[str]) -> list[Measurement]:
    """Read the results that verification accepts; name others and bad lines in `problems`."""
    measurements: list[Measurement] = []
    for file in files:
        results = []
        # Records of Every Eval Ever are known by their names
        foreign = every_eval_ever.FILE_NAME.fullmatch(file.name)
        read_lines = every_eval_ever.read_file if foreign else store.read_file
        for line in read_lines(file):
            if isinstance(line, Result):
                results.append(line)
            else:
                problems.append(line)
        verdicts = verification.of_run(results, file.parent)
        for result, verdict in zip(results, verdicts, strict=True):
            if verdict.why:
                problems.append(
                    f"{result.name}: {result.column}, seed {result.seed} ({file})"
                    f" is left out: {verdict.why}"
                )
            else:
                result.origin["verified"] = verdict.level
                measurements.append(Measurement(result, file.parent))
    return measurements


def fill(measurements: Iterable[Measurement], problems: Iterable[str] = ()) -> Board:
    """Return a board of these measurements; `problems` are those of reading them."""
    board = Board(problems=list(problems))
    # 1. Each measurement's column. Equal columns are one object: hashing 10^5 of them is slow.
    measurements = list(measurements)
    made: dict[tuple[object, ...], Column] = {}
    read: list[tuple[Measurement, Column]] = []
    keys = column_keys.of_rows([measurement.result for measurement in measurements])
    for measurement, key in zip(measurements, keys, strict=True):
        r = measurement.result
        what = (r.task, r.dataset, r.metric, key, r.engine)
        if what not in made:
            made[what] = Column(
                r.task, r.dataset, r.metric, key.protocol, r.engine, key.split
            )
        read.append((measurement, made[what]))
    # 2. One measurement for each number: of those made twice, the one recorded last.
    counted = _recorded_last(read, board.problems)
    # 3. One cell for each (checkpoint, column), with the seeds that are there.
    parts: dict[tuple[str, Column], list[Measurement]] = {}
    for measurement, column in counted:
        where = (measurement.result.checkpoint, column)
        parts.setdefault(where, []).append(measurement)
    for where, of_cell in parts.items():
        of_cell.sort(key=lambda measurement: measurement.result.seed)
        board.cells[where] = _cell(of_cell)
    # 4. A row for each checkpoint. Of two names, the one recorded last counts.
    by_time = sorted(counted, key=lambda one: one[0].recorded)
    newest = {
        measurement.result.checkpoint: measurement.result for measurement, _ in by_time
    }
    rows = [
        Row(r.checkpoint, r.name, r.method, r.arch, r.epochs) for r in newest.values()
    ]
    board.rows = sorted(rows, key=lambda row: (row.name, row.checkpoint))
    # 5. Facts about checkpoints.
    for (result, _), _ in counted:
        _add_facts(board, result)
    results = [measurement.result for measurement, _ in counted]
    board.costs = trunk_costs.of_results(results)
    # 6. Columns, and the averages, which are made of cells.
    board.columns = in_order({column for _, column in counted})
    _add_averages(board)
    return board


def _add_facts(board: Board, result: Result) -> None:
    """Add what a result says about its checkpoint beside its number."""
    way = fast.word(result.provenance)
    # A trunk that was never trained was trained in no way
    if way and result.epochs != 0:
        board.ways[result.checkpoint] = way
    recipe = result.provenance.get(fast.PRETRAINING)
    if isinstance(recipe, Mapping):
        board.recipes.setdefault(result.checkpoint, recipe)
    sides = result.facts.get("size") or {}
    trained = sides.get("trained")
    measured = sides.get("measured")
    # A trunk that was never trained has no size that it was trained at
    if trained is not None and result.epochs != 0:
        board.trained.setdefault(result.checkpoint, trained)
        if measured not in (None, trained) and TASKS[result.task].ranked:
            board.resized.setdefault(result.checkpoint, set()).add(measured)
    for origin in (result.origin, *(result.origin.get("also") or [])):
        lab = origin.get("lab")
        if lab:
            labs = board.labs.setdefault(result.checkpoint, {})
            labs[printable.shown(str(lab), 60)] = None


def in_order(columns: Iterable[Column]) -> list[Column]:
    """Return the columns in the board's order."""
    return sorted(columns, key=lambda column: column.order)


def _recorded_last(
    measurements: list[tuple[Measurement, Column]], problems: list[str]
) -> list[tuple[Measurement, Column]]:
    """Return one measurement for each (checkpoint, column, seed); unequal duplicates are
    `problems`."""
    read = [
        ((m.result.checkpoint, column, m.result.seed), m) for m, column in measurements
    ]
    latest = dict(read)  # in the order in which they were read
    if len(latest) == len(read):
        return measurements
    known: dict[tuple[str, Column, int], Measurement] = {}
    # Among equals (copies of one file, or lines without a time) the later in the order wins.
    for key, new in sorted(read, key=lambda one: one[1].recorded):
        old = known.get(key, new)
        if old.result.value != new.result.value:
            problems.append(
                f"{new.result.name}: {key[1].name} was measured twice: {new.result.value}"
                f" ({new.run}) counts, recorded after {old.result.value} ({old.run})"
            )
        known[key] = new
        latest[key] = new
    return [(measurement, column) for (_, column, _), measurement in latest.items()]


def _cell(parts: list[Measurement]) -> Cell:
    """Return one seed as measured, or the mean of several; the note says why it is not ranked."""
    cell = _of_seeds(parts)
    why = ""
    for result, _ in parts:
        why = why or flaws.flaw(result)
    cell.why_unsettled = why
    remark = why or flaws.remark(parts[0].result)
    if remark:
        cell.note = joined("; ", cell.note, remark)
    return cell


def _of_seeds(parts: list[Measurement]) -> Cell:
    """Return the measurement of one seed, or the mean of several, with its interval."""
    unbacked = verification.UNBACKED
    backed = all(result.origin.get("verified") != unbacked for result, _ in parts)
    only = parts[0].result
    if len(parts) == 1:
        return Cell(only.value, only.ci95, parts, backed=backed)
    values = [result.value for result, _ in parts if result.value is not None]
    if not values:
        return Cell(None, None, parts)
    trains = TASKS[only.task].trains_in(only.protocol)
    if not trains and len({result.value for result, _ in parts}) == 1:
        # Nothing in it is random: several seeds are one measurement.
        note = f"{len(parts)} seeds, one measurement"
        return Cell(only.value, only.ci95, parts, note, backed)
    note = f"mean of {len(values)} seeds"
    if len(values) < len(parts):
        note += f", {len(parts)} run"
    ci95 = confidence.of_seeds(values)
    over_images = [result.ci95 for result, _ in parts if result.ci95 is not None]
    if ci95 is not None and over_images:
        # Seeds that agree by chance do not tell what other images would give, so the interval
        # is never narrower than the mean one over images.
        low = sum(interval[0] for interval in over_images) / len(over_images)
        high = sum(interval[1] for interval in over_images) / len(over_images)
        ci95 = (min(ci95[0], low), max(ci95[1], high))
    return Cell(sum(values) / len(values), ci95, parts, note, backed)


def _add_averages(board: Board) -> None:
    """Add the mean of LORAC's twelve datasets wherever all of them were measured one way."""
    # One set of columns for each way of measuring, by dataset. A suffix of the metric (_k20 in
    # top1_k20) makes a way of its own. Unusual splits have no average.
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
            cell = _average([board.cell(row, column) for column in columns.values()])
            if cell is not None:
                board.cells[row.checkpoint, average] = cell
                averages.append(average)
    board.columns = in_order({*board.columns, *averages})


def _average(cells: Sequence[Cell | None]) -> Cell | None:
    """Return the mean over cells of different datasets; None where one is missing or undefined."""
    there = [cell for cell in cells if cell is not None and cell.value is not None]
    if len(there) < len(TWELVE):
        return None
    values = [cell.value for cell in there if cell.value is not None]
    average = Cell(sum(values) / len(values), note="mean of the twelve datasets")
    intervals = [cell.ci95 for cell in there if cell.ci95 is not None]
    if len(intervals) == len(values):
        # Errors on different test sets are independent. One that seeds tell is known with their
        # degrees of freedom; one over images alone counts as known exactly.
        freedom = []
        for cell in there:
            seeds_differ = len(set(cell.values)) > 1
            freedom.append(len(cell.values) - 1 if seeds_differ else math.inf)
        average.ci95 = confidence.of_mean(values, intervals, freedom)
    average.backed = all(cell.backed for cell in there)
    average.why_unsettled = next(
        (cell.why_unsettled for cell in there if not cell.settled), ""
    )
    return average


# ---- tests between rows


def predictions(cell: Cell) -> dict[int, Path]:
    """Return seed -> file of predictions, for the measurements behind a cell that kept theirs."""
    files = {}
    for result, run in cell.parts:
        if "predictions" in result.facts:
            files[result.seed] = run / result.facts["predictions"]
    return files


def noise_of(board: Board, column: Column) -> TrainingNoise:
    """Return how far a second training moves a column, from checkpoints with several seeds."""
    task = TASKS[column.task]
    if column in board.noises:
        return board.noises[column]
    if not task.trains_in(column.protocol) or column.dataset == AVERAGE:
        return NOTHING_TRAINED
    seeds = []
    choices: list[float] = []  # variances of the choice on validation images
    for _, cell in board.backed(column):
        for result, _ in cell.parts:
            # It is of the metric that was chosen by, and that is never top-5.
            noise = (result.chosen or {}).get("choice_noise")
            is_of_metric = not column.metric.startswith("top5")
            if isinstance(noise, int | float) and is_of_metric:
                choices.append(noise**2)
        if len(cell.values) > 1:
            files = list(predictions(cell).values())
            seeds.append(column_noise.seeds_of(cell.values, files, column.metric))
    # Published noise is of whole splits.
    is_whole = column.split == task.split
    board.noises[column] = column_noise.measured_or_published(
        seeds,
        protocol=column.protocol,
        dataset=column.dataset if is_whole else "",
        metric=column.metric,
        choice=sum(choices) / len(choices) if choices else 0.0,
    )
    return board.noises[column]


def noise_words(noise: TrainingNoise) -> str:
    """Return how far a second training moves a number; empty where nothing is trained."""
    if noise is NOTHING_TRAINED:
        return ""
    if noise.known:
        points = math.sqrt(noise.seed_variance)
        return f"±{points:.2f} points ({noise.df:g} degrees of freedom, {noise.source})"
    return (
        f"not known: {noise.df:g} degrees of freedom of the {FEWEST} that two checkpoints"
        " with `--seeds 3` give"
    )


def difference(board: Board, column: Column, a: Cell, b: Cell) -> Difference | None:
    """Return the paired difference a - b; None without predictions or if the test lists differ.

    Trained rows are compared over all trainings of both, for other images and trainings. If nobody
    knows how far trainings move a number, the test is over images alone and says so.
    """
    files_a = predictions(a)
    files_b = predictions(b)
    noise = noise_of(board, column)
    if noise is not NOTHING_TRAINED and noise.known:
        return compare(
            list(files_a.values()),
            list(files_b.values()),
            column.metric,
            noise,
            value=_plain_difference(a, b, files_a, files_b),
        )
    shared = sorted(files_a.keys() & files_b.keys())
    seeds_a, seeds_b = shared, shared
    if not shared and noise is NOTHING_TRAINED:
        # Nothing was trained, so any seed of the one stands beside any of the other; labels that
        # a seed draws must be the same
        seeds_a, seeds_b = sorted(files_a)[:1], sorted(files_b)[:1]
        of_both = [files_a[s] for s in seeds_a] + [files_b[s] for s in seeds_b]
        if any(of_draws(file, column.metric) for file in of_both):
            return None
    tested = compare(
        [files_a[seed] for seed in seeds_a],
        [files_b[seed] for seed in seeds_b],
        column.metric,
        value=_plain_difference(a, b, seeds_a, seeds_b),
    )
    if tested is None or noise.known:
        return tested
    return replace(tested, trainings_known=False)


def _plain_difference(
    a: Cell, b: Cell, seeds_a: Collection[int], seeds_b: Collection[int]
) -> float | None:
    """Return the mean of a's numbers of these seeds minus that of b's; None where one has no
    number."""
    means = []
    for cell, seeds in ((a, seeds_a), (b, seeds_b)):
        values = [result.value for result, _ in cell.parts if result.seed in seeds]
        defined = [value for value in values if value is not None]
        if not defined or len(defined) < len(values):
            return None
        means.append(sum(defined) / len(defined))
    return means[0] - means[1]


def standing(board: Board, column: Column) -> dict[str, str]:
    """Return checkpoint -> its mark among the measured ones in this column. Rows without a mark are
    behind.

    best       a paired test puts it above every other row
    tied       if no row is best: the highest value, and all rows that no test tells from it
    untested   the highest value, without predictions to test it against every other
    once       the highest value, if nobody knows how far a second training would move it
    unbacked   nothing was kept to verify it, so it takes no part
    unsettled  it is not ranked (verify/flaws.py), so nobody else is `best`
    """
    if column not in board.standings:
        marks = _tested(board, column)
        if TASKS[column.task].ranked:
            for row, cell in board.measured(column):
                if not cell.settled:
                    marks[row.checkpoint] = UNSETTLED
                if not cell.backed:
                    marks[row.checkpoint] = UNBACKED
        board.standings[column] = marks
    return board.standings[column]


def _tested(board: Board, column: Column) -> dict[str, str]:
    """Return the marks that follow from the values and the paired tests between them."""
    everybody = board.backed(column)
    ranked = [(row, cell) for row, cell in everybody if cell.settled]
    if len(everybody) < 2 or not ranked or not TASKS[column.task].ranked:
        return {}
    # Only the highest can be best, so it alone is tested, against each of the others. That it was
    # chosen for being highest is corrected for.
    first, top = ranked[0]
    if not noise_of(board, column).known:
        return {first.checkpoint: ONCE}
    tested: dict[str, float] = {}  # checkpoint -> p
    for row, cell in ranked[1:]:
        gap = difference(board, column, top, cell)
        if gap is not None:
            shown = gap.real and gap.value > 0
            tested[row.checkpoint] = gap.p if shown else 1.0
    count = tied_with_first(list(tested.values()))
    if count:
        return dict.fromkeys([first.checkpoint, *list(tested)[:count]], TIED)
    # It won every test that could be made; that is "best" only where all of them could.
    return {first.checkpoint: BEST if len(tested) == len(everybody) - 1 else UNTESTED}


class PairedDifference(NamedTuple):
    """A paired test in a column: row a minus row b, by their index on the board; a < b."""

    column: int
    a: int
    b: int
    difference: Difference


def compare_rows(board: Board) -> list[PairedDifference]:
    """Return all paired differences; above MOST_PAIRS those of each column's best row."""
    row_index = board.row_index()
    # 1. In each column, the rows that kept predictions, best first.
    testable: list[list[tuple[int, Cell]]] = []
    for column in board.columns:
        cells = []
        for row, cell in board.measured(column):
            if predictions(cell):
                cells.append((row_index[row.checkpoint], cell))
        testable.append(cells)
    # 2. All pairs, or those of the best: combinations begin with them.
    count = sum(math.comb(len(cells), 2) for cells in testable)
    pairs: list[PairedDifference] = []
    for number, (column, cells) in enumerate(zip(board.columns, testable)):
        most = max(0, len(cells) - 1) if count > MOST_PAIRS else None
        for pair in itertools.islice(itertools.combinations(cells, 2), most):
            if len(pairs) >= MOST_PAIRS:
                return pairs
            # Each pair stands once, in the order of the rows; for b - a the page turns the sign.
            (a, cell_a), (b, cell_b) = sorted(pair, key=lambda one: one[0])
            tested = difference(board, column, cell_a, cell_b)
            if tested is not None:
                pairs.append(PairedDifference(number, a, b, tested))
    return pairs
