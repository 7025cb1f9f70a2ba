"""`backbench rank FILE.csv|RUNS`: who leads a table or a folder's results, and how surely."""

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
from backbench.requests.options import Outcome
from backbench.requests.runs import RankRequest
from backbench.runs.terminal import log
from backbench.stats import column_comparisons, rank_intervals
from backbench.tasks import TASKS
from backbench.untrusted import opening, printable

_MISSING = {"", "-", "–", "—", "nan", "n/a", "na", "none", "null", "?"}
# A number, perhaps with % behind it, perhaps with its spread: 91.2 ± 0.3, 91.2 (0.3)
_NUMBER = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?) *%? *((±|\+-|\+/-|\().*)?", re.I
)
# task/dataset[:split]/metric@protocol[+engine], as leaderboard.csv names a column
_OURS = re.compile(
    rf"(?P<task>{'|'.join(TASKS)})/(?P<dataset>[^/]+)/[^/@]+@(?P<how>[^@]+)"
)
HEAD = (
    "rank",
    "rank_low",
    "rank_high",
    "average_rank",
    "win_rate",
    "columns",
    "group",
    "name",
)
MOST_BYTES = 64 * opening.MEGABYTE  # of a table; reading takes ten times as much memory
LONGEST = 1000  # characters of a field
SHOWN = 50  # rows on standard output
NAMED = 4  # leaders in the sentence; of more it says how many others


@dataclass(frozen=True)
class ForeignTable:
    """The table as it is ranked: higher values are better, nan is missing."""

    names: list[str]
    columns: list[str]
    datasets: list[str]  # of each column
    values: np.ndarray  # (rows, columns)


def run(request: RankRequest) -> Outcome:
    """Run the verb `rank`."""
    # 1. The table.
    if request.file.is_dir():
        if request.name or request.lower:
            raise BadInput(
                f"{request.file}: --name and --lower are for a CSV; leave them out"
            )
        table = of_runs(request.file)
    else:
        table = read(request.file, name=request.name, lower=request.lower)
    if len(table.names) > rank_intervals.MOST_ROWS:
        raise BadInput(
            f"{request.file}: {len(table.names)} rows; at most {rank_intervals.MOST_ROWS} are"
            " ranked, as every pair of them is compared: leave the others out"
        )
    # 2. The ranks, the best first.
    ranking = rank_intervals.ranking(table.values, table.datasets)
    order = sorted(
        range(len(table.names)), key=lambda i: (ranking.places[i].rank, table.names[i])
    )
    lines: list[tuple[object, ...]] = []
    for i in order:
        place = ranking.places[i]
        low, high = place.interval
        line = (
            place.rank,
            low,
            high,
            text_of(place.average, ".2f"),
            f"{place.win_rate:.1f}",
            place.columns,
            place.group,
            table.names[i],
        )
        lines.append(line)
    # 3. The answer, the first lines, and all of them as a file.
    said = answer(table, ranking)
    document = {"answer": said, "ranks": [dict(zip(HEAD, line)) for line in lines]}
    print(said)
    print(f"{'rank':>6} {'95%':>9} {'average':>8} {'wins %':>7} {'columns':>8}  name")
    for rank, first, last, average, wins, columns, _, name in lines[:SHOWN]:
        interval = f"{first}-{last}"
        shown = printable.shown(str(name))
        print(f"{rank:>6} {interval:>9} {average:>8} {wins:>7} {columns:>8}  {shown}")
    if len(lines) > SHOWN:
        print(f"... and {len(lines) - SHOWN} more; --csv F writes all")
    if request.csv:
        write_lines(request.csv, [HEAD, *lines])
        log.info(f"wrote {request.csv}")
    return Outcome(document=document)


def answer(table: ForeignTable, ranking: rank_intervals.Ranking) -> str:
    """One sentence that says who leads."""
    of = f"{len(table.names)} rows over {len(table.columns)} columns"
    if not ranking.tested:
        return (
            f"No clear winner: nothing can be told apart among {of}; that takes"
            f" {column_comparisons.FEWEST} columns at least, of as many datasets."
        )
    leaders = [printable.shown(table.names[i]) for i in ranking.leaders]
    names = ", ".join(leaders[:NAMED])
    if len(leaders) > NAMED:
        names += f" and {len(leaders) - NAMED} others"
    lead = f"leads alone among {of}"
    if len(leaders) > 1:
        lead = f"lead among {of} and cannot be told apart"
    what = "columns" if table.datasets == table.columns else ranking.over
    return f"{names} {lead}, with 95% confidence for other {what} like these {ranking.units}."


def of_runs(runs: Path) -> ForeignTable:
    """The main columns of the results below a folder; what does not follow is named and left out."""
    board = collect([runs])
    for problem in board.problems:
        log.warning(printable.shown(problem, 1000))
    columns = overall.main_columns(board)
    rows, values, datasets = overall.values_of(board, columns)
    if len(rows) < 2:
        raise BadInput(
            f"{runs}: no column where two checkpoints have numbers that can be ranked"
        )
    labels = board.labels()
    names = [labels[row.checkpoint] for row in rows]
    return ForeignTable(names, [column.name for column in columns], datasets, values)


def read(
    file: Path, *, name: str | None = None, lower: Sequence[str] = ()
) -> ForeignTable:
    """Read a CSV with a row for each competitor, named by column `name` or the first column of
    text. Columns of numbers are ranked; less is better in `lower`. BadInput if there are none."""
    (_, first), *body = _lines(file)
    head = [heading.strip() for heading in first]
    for given in (*lower, *([name] if name else [])):
        if given not in head:
            raise BadInput(f"{file}: no column '{given}'; {nearest(given, head)}")
    # 1. The published rows of our own tables are never ranked with others.
    if "source" in head:
        source = head.index("source")
        body = [(at, line) for at, line in body if line[source] != "published"]
    # 2. The columns of which most fields that are not empty are numbers.
    numeric = []
    for n, column in enumerate(head):
        fields = [line[n].strip() for _, line in body]
        there = [field for field in fields if field.lower() not in _MISSING]
        others = [field for field in there if not _NUMBER.fullmatch(field)]
        if column != name and 2 * len(others) < len(there):
            numeric.append(n)
        elif column not in (name, "checkpoint") and 0 < len(others) < len(there):
            shown = printable.shown(column, 60)
            other = printable.shown(others[0], 60)
            log.warning(f"column '{shown}' is not ranked: '{other}' is no number")
    # 3. Of a leaderboard.csv of ours the main column of each ranked measurement, which stands
    #    first.
    ours = [_OURS.fullmatch(heading) for heading in head]
    main: dict[tuple[str, str, str], int] = {}
    for n in numeric:
        own = ours[n]
        if own and own["dataset"] != AVERAGE and TASKS[own["task"]].ranked:
            main.setdefault((own["task"], own["dataset"], own["how"]), n)
    if any(ours):
        numeric = list(main.values())
    # 4. The column of names.
    if name:
        named: int | None = head.index(name)
    else:
        text_columns = [
            n for n in range(len(head)) if n not in numeric and head[n] != "checkpoint"
        ]
        named = text_columns[0] if text_columns else None
    if named is None or not numeric:
        what = "column of names" if numeric else "column of numbers that can be ranked"
        raise BadInput(
            f"{file}: no {what}; name one with --name, numbers in the others"
        )
    # 5. The values, higher is better.
    columns = [head[n] for n in numeric]
    values = np.empty((len(body), len(numeric)))
    for row, (at, line) in zip(values, body):
        row[:] = [_value(line[n], f"{file}:{at}", head[n]) for n in numeric]
    values[:, [column in lower for column in columns]] *= -1
    # Our own columns name their dataset; any other is a dataset of its own.
    datasets = []
    for n in numeric:
        own = ours[n]
        datasets.append(own["dataset"] if own else head[n])
    return ForeignTable([line[named] for _, line in body], columns, datasets, values)


def _lines(file: Path) -> list[tuple[int, list[str]]]:
    """Return non-empty lines, at least three and of equal length: number and fields of each."""
    try:
        text = opening.read_bytes(file, most=MOST_BYTES).decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text))
        lines = [
            (reader.line_num, line) for line in reader if any(map(str.strip, line))
        ]
    except FileNotFoundError:
        raise BadInput(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(
            f"{file}: not read as CSV: {error}; give a file of text"
        ) from error
    if len(lines) < 3:
        raise BadInput(
            f"{file}: {len(lines)} lines; ranking takes a heading and two rows at least"
        )
    head = lines[0][1]
    for at, line in lines:
        if len(line) != len(head):
            raise BadInput(
                f"{file}:{at}: {len(line)} fields, the heading has {len(head)}"
            )
        longest = max(map(len, line))
        if longest > LONGEST:
            raise BadInput(
                f"{file}: a field of {longest} characters; at most {LONGEST} are read"
            )
    twice = [h for h, count in Counter(map(str.strip, head)).items() if h and count > 1]
    if twice:
        shown = printable.shown(twice[0], 60)
        raise BadInput(f"{file}: two columns are called '{shown}'; rename one")
    return lines


def _value(field: str, where: str, column: str) -> float:
    text = field.strip()
    if text.lower() in _MISSING:
        return math.nan
    found = _NUMBER.fullmatch(text)
    value = float(found[1]) if found else math.nan
    cell = f"'{printable.shown(text, 60)}' in column '{printable.shown(column, 120)}'"
    if not math.isfinite(value):
        raise BadInput(
            f"{where}: {cell} is no number; leave it empty if nothing was measured"
        )
    if not 0 <= value <= 100 and _OURS.fullmatch(column):
        raise BadInput(
            f"{where}: {cell} is no percentage; write the table again from its results"
        )
    return value
