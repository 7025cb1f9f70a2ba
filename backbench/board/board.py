"""`backbench leaderboard`: every result found below some folders as one table, and what can be said about it.

A row is a checkpoint, a column is `task/dataset/metric@protocol[+engine]`: what was measured differently stands
elsewhere. Published rows stand beside the measured ones and are marked; they are never averaged or ranked with them.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import gc
import io
import json
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backbench.errors import EXIT_FAILED, BadInput
from backbench.results import published, store
from backbench.results.compare import Difference, compare, seeds_interval
from backbench.results.store import Result
from backbench.runs import atomic
from backbench.runs.folder import RESULTS_FILE, log
from backbench.tasks import ORDER, TASKS
from backbench.weights import header

# LORAC's Table 2, in its order, with the metric of each; `average` is the mean of exactly these.
TWELVE = {
    "aircraft": "mean_per_class",
    "birdsnap": "top1",
    "caltech101": "mean_per_class",
    "cars": "top1",
    "cifar10": "top1",
    "cifar100": "top1",
    "dtd": "top1",
    "flowers": "mean_per_class",
    "food": "top1",
    "pets": "mean_per_class",
    "places365": "top1",
    "sun397": "top1",
}
ABOUT = ("checkpoint", "name", "method", "arch", "epochs", "source")
MEASURED, PUBLISHED = "measured", "published"
_DATASETS = {name: i for i, name in enumerate(("imagenet", "imagenet100", *TWELVE, "average"))}
_METRICS = {"top1": 0, "mean_per_class": 0, "top5": 2, "average": 0, "AP": 0, "AP50": 1, "AP75": 2}
_SPLITS = ("test", "val", "val2017")  # the split a column is about, where it holds more than one


@dataclass(frozen=True)
class Column:
    """What was measured. `split` stands in the name only where one column would otherwise mix two."""

    task: str
    dataset: str
    metric: str
    protocol: str
    engine: str | None = None
    split: str | None = None

    @property
    def name(self) -> str:
        dataset = f"{self.dataset}:{self.split}" if self.split else self.dataset
        return f"{self.task}/{dataset}/{self.metric}@{self.protocol}" + (
            f"+{self.engine}" if self.engine else ""
        )

    @property
    def order(self) -> tuple[object, ...]:
        short = self.metric.rsplit("_", 1)[-1] if self.metric not in _METRICS else self.metric
        return (
            ORDER[self.task],
            self.protocol,
            self.engine or "",
            _DATASETS.get(self.dataset, len(_DATASETS) if self.dataset != "average" else 99),
            self.dataset,
            self.split or "",
            self.metric.removesuffix(short),
            _METRICS.get(short, 3),
            self.metric,
        )


@dataclass(frozen=True)
class Row:
    """One checkpoint (its digest), or one printed row of a paper (its key)."""

    checkpoint: str
    name: str
    method: str
    arch: str
    epochs: int | None
    source: str = MEASURED


@dataclass
class Cell:
    """The number in the table, and the measurements it is made of (none where it is published or an average)."""

    value: float | None
    ci95: tuple[float, float] | None = None
    parts: list[tuple[Result, Path]] = field(
        default_factory=list
    )  # one per seed, with the run folder of each
    note: str = ""


@dataclass
class Board:
    rows: list[Row] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)
    cells: dict[tuple[str, Column], Cell] = field(default_factory=dict)  # (Row.checkpoint, column)
    problems: list[str] = field(default_factory=list)

    def cell(self, row: Row, column: Column) -> Cell | None:
        return self.cells.get((row.checkpoint, column))

    def measured(self, column: Column) -> list[tuple[Row, Cell]]:
        """The measured rows that have a value here, best first; ties by name."""
        found = [
            (row, self.cells.get((row.checkpoint, column)))
            for row in self.rows
            if row.source == MEASURED
        ]
        have = [(row, cell) for row, cell in found if cell is not None and cell.value is not None]
        return sorted(have, key=lambda rc: (-(rc[1].value or 0.0), rc[0].name, rc[0].checkpoint))

    def labels(self) -> dict[str, str]:
        """A name for each row; where two rows share one, the start of the digest is added."""
        count: dict[tuple[str, str], int] = {}
        for row in self.rows:
            count[row.source, row.name] = count.get((row.source, row.name), 0) + 1
        return {
            row.checkpoint: f"{row.name} {row.checkpoint[:6]}"
            if row.source == MEASURED and count[row.source, row.name] > 1
            else row.name
            for row in self.rows
        }


def collect(runs: Iterable[str | Path]) -> Board:
    """Every result below `runs`, duplicates resolved as docs/results.md says. BadInput where a path is missing."""
    files = sorted(
        {file.resolve(): file for run in runs for file in store.files_below(run)}.values()
    )
    board = Board()
    found: list[tuple[Result, Path]] = []
    with many_objects():
        for file in files:
            run = file.parent
            for line in store.read_file(file):
                if isinstance(line, str):
                    board.problems.append(line)
                else:
                    found.append((line, run))
        return fill(board, found)


@contextlib.contextmanager
def many_objects() -> Iterator[None]:
    """No garbage collection while a hundred thousand results are made and kept: it would look at all of them, often."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def fill(board: Board, found: Sequence[tuple[Result, Path]]) -> Board:
    """Rows, columns and cells of `board` from results with the run folder of each."""
    measured: dict[tuple[Any, ...], tuple[Result, Path]] = {}
    for result, run in found:
        key = (result.checkpoint, result.column, result.split, result.seed)
        known = measured.get(key)
        if known is None:
            measured[key] = (result, run)
            continue
        newer = result.origin.get("recorded", 0.0) >= known[0].origin.get("recorded", 0.0)
        if known[0].value != result.value:
            old, new = (known, (result, run)) if newer else ((result, run), known)
            board.problems.append(
                f"{result.name}: {result.column} was measured twice: {new[0].value} ({new[1]}) counts, recorded after "
                f"{old[0].value} ({old[1]})"
            )
        if newer:
            measured[key] = (result, run)

    splits: dict[str, set[str]] = {}
    for result, _ in measured.values():
        splits.setdefault(result.column, set()).add(result.split)
    usual = {
        column: min(names, key=lambda s: (_SPLITS.index(s) if s in _SPLITS else len(_SPLITS), s))
        for column, names in splits.items()
    }
    columns: dict[tuple[str, str], Column] = {}
    parts: dict[tuple[str, Column], list[tuple[Result, Path]]] = {}
    rows: dict[str, tuple[float, Row]] = {}
    for result, run in measured.values():
        column = columns.get((result.column, result.split))
        if column is None:
            split = result.split if result.split != usual[result.column] else None
            column = Column(
                result.task, result.dataset, result.metric, result.protocol, result.engine, split
            )
            columns[result.column, result.split] = column
        parts.setdefault((result.checkpoint, column), []).append((result, run))
        when = float(result.origin.get("recorded", 0.0))
        if result.checkpoint not in rows or when >= rows[result.checkpoint][0]:
            row = Row(result.checkpoint, result.name, result.method, result.arch, result.epochs)
            rows[result.checkpoint] = (when, row)
    board.rows = sorted((row for _, row in rows.values()), key=lambda r: (r.name, r.checkpoint))
    board.columns = sorted(columns.values(), key=lambda c: c.order)
    for where, measurements in parts.items():
        board.cells[where] = _cell(sorted(measurements, key=lambda part: part[0].seed))
    _add_averages(board)
    return board


def _cell(parts: list[tuple[Result, Path]]) -> Cell:
    if len(parts) == 1:
        return Cell(parts[0][0].value, parts[0][0].ci95, parts)
    values = [r.value for r, _ in parts if r.value is not None]
    if not values:
        return Cell(None, None, parts)
    note = f"mean of {len(values)} seeds" + (
        "" if len(values) == len(parts) else f", {len(parts)} run"
    )
    return Cell(sum(values) / len(values), seeds_interval(values), parts, note)


def _add_averages(board: Board) -> None:
    """The mean of the twelve, for each checkpoint and protocol that has all of them; half-widths add in squares."""
    protocols: dict[tuple[str, str, str | None, str], dict[str, Column]] = {}
    for column in board.columns:
        metric = TWELVE.get(column.dataset, "none")
        if (
            column.metric.startswith(metric) and column.split is None
        ):  # what follows, _k20 say, is a metric of its own
            key = (column.task, column.protocol, column.engine, column.metric.removeprefix(metric))
            protocols.setdefault(key, {})[column.dataset] = column
    for (task, protocol, engine, suffix), columns in protocols.items():
        average = Column(task, "average", "average" + suffix, protocol, engine)
        for row in board.rows if len(columns) == len(TWELVE) else ():
            cells = [board.cells.get((row.checkpoint, column)) for column in columns.values()]
            values = [c.value for c in cells if c is not None and c.value is not None]
            if len(values) < len(TWELVE):
                continue
            value = sum(values) / len(values)
            widths = [
                (c.ci95[1] - c.ci95[0]) / 2 for c in cells if c is not None and c.ci95 is not None
            ]
            half = sum(w**2 for w in widths) ** 0.5 / len(values)
            ci95 = (value - half, value + half) if len(widths) == len(values) else None
            board.cells[row.checkpoint, average] = Cell(
                value, ci95, [], "mean of the twelve datasets"
            )
            if average not in board.columns:
                board.columns.append(average)
    board.columns.sort(key=lambda c: c.order)


def add_published(board: Board) -> None:
    """The papers' rows below the measured ones: in the measured column where the protocols are the same."""
    columns = set(board.columns)
    rows: dict[str, Row] = {}
    for number in published.rows():
        if number.metric.endswith("_std") or number.metric.endswith(("error_top5", "error_top1")):
            continue  # spreads and error curves are not columns of a leaderboard
        protocol, engine = published.protocol(number)
        column = Column(number.task, number.dataset, number.metric, protocol, engine)
        columns.add(column)
        name = f"{number.model} ({number.paper} Table {number.table})"
        rows.setdefault(
            number.key, Row(number.key, name, number.model, number.arch, number.epochs, PUBLISHED)
        )
        board.cells[number.key, column] = Cell(number.value, note=number.note)
    board.rows.extend(rows.values())
    board.columns = sorted(columns, key=lambda c: c.order)


def write_csv(board: Board, path: Path) -> None:
    """leaderboard.csv: one row per checkpoint, one column per `task/dataset/metric@protocol[+engine]`, in percent."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*ABOUT, *(column.name for column in board.columns)])
    for row in board.rows:
        cells = (board.cells.get((row.checkpoint, column)) for column in board.columns)
        numbers = [
            "" if cell is None or cell.value is None else _number(cell.value) for cell in cells
        ]
        epochs = "" if row.epochs is None else row.epochs
        writer.writerow(
            [row.checkpoint, row.name, row.method, row.arch, epochs, row.source, *numbers]
        )
    atomic.write_text(path, text.getvalue())


def _number(value: float) -> str:
    """Four decimals, without the zeros at the end."""
    return f"{value:.4f}".rstrip("0").rstrip(".")


TIDY = (*ABOUT, "task", "dataset", "split", "metric", "protocol", "engine", "seed", "value", "ci95_low", "ci95_high",
        "chosen", "code", "hardware", "recorded", "command", "run")  # fmt: skip


def write_tidy(board: Board, path: Path) -> None:
    """results.csv: one row per number that counts, with where it comes from; published numbers have a source only."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(TIDY)
    rows = {row.checkpoint: row for row in board.rows}
    for (checkpoint, column), cell in board.cells.items():
        row = rows[checkpoint]
        about = [
            row.checkpoint,
            row.name,
            row.method,
            row.arch,
            "" if row.epochs is None else row.epochs,
            row.source,
        ]
        if row.source == PUBLISHED:
            what = [
                column.task,
                column.dataset,
                "",
                column.metric,
                column.protocol,
                column.engine or "",
                "",
            ]
            writer.writerow(
                [*about, *what, _number(cell.value or 0.0), "", "", "", "", "", "", "", ""]
            )
        for result, run in cell.parts:
            low, high = ("", "") if result.ci95 is None else map(_number, result.ci95)
            value = "" if result.value is None else _number(result.value)
            chosen = "" if result.chosen is None else json.dumps(result.chosen, sort_keys=True)
            origin = result.origin
            writer.writerow(
                [*about, result.task, result.dataset, result.split, result.metric, result.protocol]
                + [result.engine or "", result.seed, value, low, high, chosen]
                + [origin.get(key, "") for key in ("code", "hardware", "recorded")]
                + [again(result) or "", run]
            )
    atomic.write_text(path, text.getvalue())


def again(result: Result, out: str = "runs/again") -> str | None:
    """The command that measures this number anew, in a folder of its own; None where no command was recorded."""
    command = result.provenance.get("command") or result.origin.get("command")
    if not command:
        return None
    return _elsewhere(
        shlex.join(map(str, command)) if isinstance(command, list) else str(command), out
    )


@functools.lru_cache(maxsize=65536)
def _elsewhere(command: str, out: str) -> str:
    words = shlex.split(command)
    for i, word in enumerate(words):
        if word in ("--out", "OUTPUT_DIR") and i + 1 < len(words):
            words[i + 1] = out
        elif word.startswith("--out="):
            words[i] = f"--out={out}"
    return shlex.join(words)


def predictions(cell: Cell) -> list[tuple[int, Path]]:
    """(seed, file) of every measurement behind a cell that kept its predictions."""
    return [
        (result.seed, run / str(result.provenance["predictions"]))
        for result, run in cell.parts
        if result.provenance.get("predictions")
    ]


def difference(a: Cell, b: Cell, metric: str) -> Difference | None:
    """a - b, from the predictions of the seeds that both have; None where none were kept or the test lists differ."""
    files_a, files_b = dict(predictions(a)), dict(predictions(b))
    seeds = sorted(files_a.keys() & files_b.keys())
    return compare([files_a[s] for s in seeds], [files_b[s] for s in seeds], metric)


BEST, TIED, UNTESTED = "best", "tied", "untested"


def standing(board: Board, column: Column) -> dict[str, str]:
    """Checkpoint -> how it stands among the measured ones in this column.

    `best` is above every other by a paired test; without such a one, `tied` are the highest value and all that no test
    tells from it. `untested` is the highest value where predictions to test it with are missing.
    """
    ranked = board.measured(column)
    if len(ranked) < 2 or not TASKS[column.task].ranked:
        return {}
    first, top = ranked[0]
    tied, untested = [], False
    for row, cell in ranked[1:]:
        gap = difference(top, cell, column.metric)
        if gap is None:
            untested = True
        elif not (gap.real and gap.value > 0):
            tied.append(row.checkpoint)
    if tied:
        return dict.fromkeys([first.checkpoint, *tied], TIED)
    return {first.checkpoint: UNTESTED if untested else BEST}


@dataclass(frozen=True)
class Judged:
    """A measured number beside the published one that its checkpoint must reproduce."""

    row: Row
    column: Column
    key: str
    published: float
    measured: float
    ci95: tuple[float, float] | None
    tolerance: float
    hardware: str

    @property
    def within(self) -> bool:
        return abs(self.measured - self.published) <= self.tolerance


def expected_keys(board: Board, runs: Iterable[str | Path]) -> dict[str, list[str]]:
    """Checkpoint digest -> keys of the published rows it must reproduce: a recipe's `expected`, `import --published`.

    Looked for in the results' provenance, in checkpoint files below `runs` and in those that the commands name.
    """
    keys: dict[str, set[str]] = {}
    files: set[Path] = {
        file for run in runs if Path(run).is_dir() for file in Path(run).rglob("*.safetensors")
    }
    commands = set()
    for cell in board.cells.values():
        for result, _ in cell.parts:
            keys.setdefault(result.checkpoint, set()).update(published.keys_in(result.provenance))
            commands.add((result.origin.get("cwd", "."), result.origin.get("command", "")))
    for cwd, command in commands:
        files |= {
            Path(cwd) / word for word in shlex.split(command) if word.endswith(".safetensors")
        }
    for file in files:
        about = header.about(file)
        if about.get("digest") in keys:
            keys[about["digest"]].update(published.keys_in(about.get("provenance") or {}))
    return {digest: sorted(found) for digest, found in keys.items() if found}


def judge(board: Board, expected: Mapping[str, Sequence[str]]) -> list[Judged]:
    """Every measured number whose checkpoint has a published one by the same protocol (and engine)."""
    rows = {row.checkpoint: row for row in board.rows if row.source == MEASURED}
    out = []
    for digest, keys in expected.items():
        for key in keys:
            try:
                numbers = published.lookup(key)
            except BadInput as error:
                board.problems.append(f"{rows[digest].name}: {error}")
                continue
            for number in numbers:
                protocol, engine = published.protocol(number)
                column = Column(number.task, number.dataset, number.metric, protocol, engine)
                cell = board.cells.get((digest, column))
                tolerance = published.tolerance(number)
                if cell is None or cell.value is None or tolerance is None:
                    continue
                hardware = ", ".join(
                    sorted({str(r.origin.get("hardware", "unknown")) for r, _ in cell.parts})
                )
                out.append(
                    Judged(
                        rows[digest],
                        column,
                        key,
                        number.value,
                        cell.value,
                        cell.ci95,
                        tolerance,
                        hardware or "-",
                    )
                )
    return out


def run(args: argparse.Namespace) -> int:
    """The verb `leaderboard`."""
    start = time.perf_counter()
    board = collect(args.runs)
    if not board.rows and not board.problems:
        raise BadInput(
            f"{', '.join(map(str, args.runs))}: no {RESULTS_FILE} below; run an evaluation with --out there"
        )
    judged = judge(board, expected_keys(board, args.runs))
    if args.published:
        add_published(board)
    for problem in board.problems:
        log.warning(problem)
    if args.csv:
        write_csv(board, args.csv)
    if args.tidy:
        write_tidy(board, args.tidy)
    if args.html:
        from backbench.board.page import write_page

        write_page(board, args.html, runs=args.runs, judged=judged)
    if args.latex or args.markdown:
        from backbench.board import tables

        tables.write(board, judged, latex=args.latex, markdown=args.markdown)
    if args.figures:
        from backbench.board import figures

        for title, file in figures.write(board, args.figures):
            log.info(f"{title}: {file}")
    _print(board)
    for verdict in judged:
        word = "within" if verdict.within else "OUTSIDE"
        interval = (
            "" if verdict.ci95 is None else f" [{verdict.ci95[0]:.1f}, {verdict.ci95[1]:.1f}]"
        )
        log.info(
            f"{word} {verdict.tolerance:g} of {verdict.key}: {verdict.row.name} {verdict.column.name} "
            f"{verdict.measured:.2f}{interval}, published {verdict.published:g}"
        )
    log.debug(f"took {time.perf_counter() - start:.1f} s")
    if args.check:
        outside = sum(not verdict.within for verdict in judged)
        print(f"{len(judged)} published numbers judged, {outside} outside their tolerance")
        return EXIT_FAILED if outside else 0
    return 0


def _print(board: Board, limit: int = 30) -> None:
    """The table on standard output: a line per checkpoint, a column per dataset's first metric."""
    rows = [row for row in board.rows if row.source == MEASURED]
    shown: dict[tuple[object, ...], Column] = {}
    for column in board.columns:
        if column.task == "analyze" and column.metric not in ("nuclear_norm", "rankme"):
            continue  # fifteen a space: the csv and the page have them
        if any(board.cells.get((row.checkpoint, column)) for row in rows):
            family = column.metric.rpartition("_")[0] if column.metric not in _METRICS else ""
            family = column.metric if column.task == "analyze" else family
            shown.setdefault(
                (column.task, column.dataset, family, column.protocol, column.engine, column.split),
                column,
            )
    labels = board.labels()
    wide = max((len(labels[row.checkpoint]) for row in rows), default=4)
    columns = list(shown.values())
    for n, column in enumerate(columns, 1):
        print(f"[{n}] {column.name}")
    print(" " * wide + "".join(f"{f'[{n}]':>8}" for n in range(1, len(columns) + 1)))
    for row in rows[:limit]:
        cells = [board.cells.get((row.checkpoint, column)) for column in columns]
        values = ("" if c is None else "-" if c.value is None else f"{c.value:.1f}" for c in cells)
        print(f"{labels[row.checkpoint]:<{wide}}" + "".join(f"{v:>8}" for v in values))
    if len(rows) > limit:
        print(f"... and {len(rows) - limit} more")
