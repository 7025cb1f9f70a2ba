"""`backbench rank FILE.csv|RUNS`: who leads a table or a folder's results, and how surely."""

import argparse
import csv
import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backbench.board import overall
from backbench.board.board import AVERAGE, collect, text_of
from backbench.board.export import write_lines
from backbench.errors import BadInput, nearest
from backbench.runs.terminal import log
from backbench.stats import column_comparisons, rank_intervals
from backbench.untrusted import opening, printable

_MISSING = {"", "-", "–", "—", "nan", "n/a", "na", "none", "null", "?"}
# A number, perhaps with % behind it, perhaps with its spread: 91.2 ± 0.3, 91.2 (0.3)
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?) *%? *((±|\+-|\+/-|\().*)?", re.I)
# task/dataset[:split]/metric@protocol[+engine], as leaderboard.csv names a column
_OURS = re.compile(r"(?P<task>[^/]+)/(?P<dataset>[^/]+)/(?P<metric>[^/@]+)@(?P<how>[^@]+)")
HEAD = ("rank", "rank_low", "rank_high", "average_rank", "win_rate", "columns", "group", "name")
MOST_BYTES = 64 * opening.MEGABYTE  # of a table; reading takes ten times as much memory
LONGEST = 1000  # characters of a field
SHOWN = 50  # rows on standard output


@dataclass(frozen=True)
class ForeignTable:
    """The table as it is ranked: higher values are better, None is missing."""

    names: list[str]
    columns: list[str]
    datasets: list[str]  # of each column
    values: list[list[float | None]]


def run(args: argparse.Namespace) -> int:
    """Run the verb `rank`."""
    if args.file.is_dir():
        if args.name or args.lower:
            raise BadInput(f"{args.file}: --name and --lower are for a CSV; leave them out")
        table = of_runs(args.file)
    else:
        table = read(args.file, name=args.name, lower=args.lower)
    if len(table.names) > rank_intervals.MOST_ROWS:
        raise BadInput(
            f"{args.file}: {len(table.names)} rows; at most {rank_intervals.MOST_ROWS} are ranked, as every"
            " pair of them is compared: leave the others out"
        )
    values = np.array([[math.nan if v is None else v for v in row] for row in table.values])
    ranking = rank_intervals.ranking(values, table.datasets)
    order = sorted(range(len(table.names)), key=lambda i: (ranking.places[i].rank, table.names[i]))
    lines: list[tuple[object, ...]] = []
    for i in order:
        p = ranking.places[i]
        average, rate = text_of(p.average, ".2f"), f"{p.win_rate:.1f}"
        lines.append((p.rank, *p.interval, average, rate, p.columns, p.group, table.names[i]))
    said = answer(table, ranking)
    args.document = {"answer": said, "ranks": [dict(zip(HEAD, line)) for line in lines]}
    print(said)
    _print(lines)
    if args.csv:
        write_lines(args.csv, [HEAD, *lines])
        log.info(f"wrote {args.csv}")
    return 0


def answer(table: ForeignTable, ranking: rank_intervals.Ranking) -> str:
    """One sentence that says who leads."""
    of = f"{len(table.names)} rows over {len(table.columns)} columns"
    if not ranking.tested:
        return (
            f"No clear winner: nothing can be told apart among {of}; that takes"
            f" {column_comparisons.FEWEST} columns at least, of as many datasets."
        )
    leaders = [printable.shown(table.names[i]) for i in ranking.leaders]
    others = f" and {len(leaders) - 4} others" if len(leaders) > 4 else ""
    lead = f"leads alone among {of}, with"
    if len(leaders) > 1:
        lead = f"lead among {of} and cannot be told apart, with"
    what = "columns" if table.datasets == table.columns else ranking.over
    confidence = f"95% confidence for other {what} like these {ranking.units}"
    return f"{', '.join(leaders[:4])}{others} {lead} {confidence}."


def _print(lines: Sequence[tuple[object, ...]]) -> None:
    print(f"{'rank':>6} {'95%':>9} {'average':>8} {'wins %':>7} {'columns':>8}  name")
    for rank, low, high, average, rate, columns, _, name in lines[:SHOWN]:
        said = printable.shown(str(name))
        print(f"{rank:>6} {f'{low}-{high}':>9} {average:>8} {rate:>7} {columns:>8}  {said}")
    if len(lines) > SHOWN:
        print(f"... and {len(lines) - SHOWN} more; --csv F writes all")


def of_runs(runs: Path) -> ForeignTable:
    """The main columns of the results below a folder; what does not follow is named and left out."""
    board = collect([runs])
    for problem in board.problems:
        log.warning(printable.shown(problem, 1000))
    columns = overall.main_columns(board)
    names, values, labels = [], [], board.labels()
    for row in board.measured_rows:
        cells = [board.cell(row, column) for column in columns]
        of_row = [c.value if c is not None and overall.ranks_by(c) else None for c in cells]
        if any(value is not None for value in of_row):
            names.append(labels[row.checkpoint])
            values.append(of_row)
    if len(names) < 2:
        raise BadInput(f"{runs}: no column where two checkpoints have numbers that can be ranked")
    datasets = [f"{column.dataset}:{column.split or ''}" for column in columns]
    return ForeignTable(names, [column.name for column in columns], datasets, values)


def read(file: Path, *, name: str | None = None, lower: Sequence[str] = ()) -> ForeignTable:
    """Read a CSV with a row for each competitor. The column `name`, or else the first column of
    text, names them; columns of numbers are ranked, and less is better in those that `lower` names.
    BadInput if nothing can be ranked."""
    (_, first), *body = _lines(file)
    head = [heading.strip() for heading in first]
    for given in (*lower, *([name] if name else [])):
        if given not in head:
            raise BadInput(f"{file}: no column '{given}'; {nearest(given, head)}")
    if "source" in head:  # the published rows of our own tables are never ranked with others
        body = [(n, line) for n, line in body if line[head.index("source")] != "published"]
    numeric = []  # the columns of which most fields that are not empty are numbers
    for n, column in enumerate(head):
        fields = [line[n].strip() for _, line in body]
        there = [field for field in fields if field.lower() not in _MISSING]
        others = [field for field in there if not _NUMBER.fullmatch(field)]
        if column != name and 2 * len(others) < len(there):
            numeric.append(n)
        elif column not in (name, "checkpoint") and 0 < len(others) < len(there):
            shown, other = printable.shown(column, 60), printable.shown(others[0], 60)
            log.warning(f"column '{shown}' is not ranked: '{other}' is no number")
    numeric = _of_our_own(head, numeric)
    text_columns = [n for n in range(len(head)) if n not in numeric and head[n] != "checkpoint"]
    named = head.index(name) if name else next(iter(text_columns), None)
    if named is None or not numeric:
        what = "column of names" if numeric else "column of numbers"
        raise BadInput(f"{file}: no {what}; name one with --name, numbers in the others")
    values = []
    for at, line in body:
        row = [_value(line[n], f"{file}:{at}", head[n]) for n in numeric]
        signs = [-1 if head[n] in lower else 1 for n in numeric]
        values.append([None if v is None else s * v for s, v in zip(signs, row)])
    columns = [head[n] for n in numeric]
    # Our own columns name their dataset, any other is a dataset of its own
    ours = [_OURS.fullmatch(column) for column in columns]
    datasets = [own["dataset"] if own else column for own, column in zip(ours, columns)]
    return ForeignTable([line[named] for _, line in body], columns, datasets, values)


def _lines(file: Path) -> list[tuple[int, list[str]]]:
    """The lines that are not empty, three at least, as long as the heading: each one's number in
    the file, and its fields."""
    try:
        text = opening.read_bytes(file, most=MOST_BYTES).decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text))
        lines = [(reader.line_num, line) for line in reader if any(map(str.strip, line))]
    except FileNotFoundError:
        raise BadInput(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{file}: not read as CSV: {error}; give a file of text") from error
    if len(lines) < 3:
        raise BadInput(f"{file}: {len(lines)} lines; ranking takes a heading and two rows at least")
    head = lines[0][1]
    for at, line in lines:
        if len(line) != len(head):
            raise BadInput(f"{file}:{at}: {len(line)} fields, the heading has {len(head)}")
        longest = max(map(len, line))
        if longest > LONGEST:
            raise BadInput(f"{file}: a field of {longest} characters; at most {LONGEST} are read")
    twice = [h for h, count in Counter(map(str.strip, head)).items() if h and count > 1]
    if twice:
        shown = printable.shown(twice[0], 60)
        raise BadInput(f"{file}: two columns are called '{shown}'; rename one")
    return lines


def _value(field: str, where: str, column: str) -> float | None:
    text = field.strip()
    if text.lower() in _MISSING:
        return None
    found = _NUMBER.fullmatch(text)
    value = float(found[1]) if found else math.nan
    cell = f"'{printable.shown(text, 60)}' in column '{printable.shown(column, 120)}'"
    if not math.isfinite(value):
        raise BadInput(f"{where}: {cell} is no number; leave it empty if nothing was measured")
    if not 0 <= value <= 100 and _OURS.fullmatch(column):
        raise BadInput(f"{where}: {cell} is no percentage; write the table again from its results")
    return value


def _of_our_own(head: Sequence[str], numeric: list[int]) -> list[int]:
    """The columns that are ranked: in a leaderboard.csv of ours the main one of each measurement,
    which stands first; in any other table all of them."""
    main: dict[tuple[str, str, str], int] = {}
    for n in numeric:
        ours = _OURS.fullmatch(head[n])
        if ours and ours["dataset"] != AVERAGE and ours["task"] != "analyze":
            main.setdefault((ours["task"], ours["dataset"], ours["how"]), n)
    return list(main.values()) or numeric
