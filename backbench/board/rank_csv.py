"""`backbench rank FILE.csv|RUNS`: who leads a table or a folder's results, and how surely."""

import csv
import dataclasses
import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backbench.board import groups, overall, verdict
from backbench.board.board import AVERAGE, collect, text_of
from backbench.board.export import write_lines
from backbench.board.verdict import NAMED, RankedGroup
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
    "part",
    "name",
)
MOST_BYTES = 64 * opening.MEGABYTE  # of a table; reading takes ten times as much memory
LONGEST = 1000  # characters of a field
SHOWN = 50  # rows on standard output


@dataclass(frozen=True)
class ForeignTable:
    """The table as it is ranked: higher values are better, nan is missing."""

    names: list[str]
    columns: list[str]
    datasets: list[str]  # of each column
    values: np.ndarray  # (rows, columns)


def run(request: RankRequest) -> Outcome:
    """Run the verb `rank`."""
    # 1. The groups of rows that common columns connect, and the answer.
    if request.file.is_dir():
        if request.name or request.lower:
            raise BadInput(
                f"{request.file}: --name and --lower are for a CSV; leave them out"
            )
        ranked, said = of_runs(request.file)
    else:
        table = read(request.file, name=request.name, lower=request.lower)
        _refuse_many(request.file, len(table.names))
        ranked = of_table(table)
        said = answer(ranked, table)
    # 2. The ranks of each group, the best first.
    lines: list[tuple[object, ...]] = []
    for part, group in enumerate(ranked, 1):
        for name, place in zip(group.names, group.standing.places, strict=True):
            low, high = place.interval
            line = (
                place.rank,
                low,
                high,
                text_of(place.average, ".2f"),
                f"{place.win_rate:.1f}",
                place.columns,
                place.group,
                part,
                name,
            )
            lines.append(line)
    # 3. The answer, the first lines, and all of them as a file.
    document = {"answer": said, "ranks": [dict(zip(HEAD, line)) for line in lines]}
    print(printable.shown(said, 4000))
    head = f"{'rank':>6} {'95%':>9} {'average':>8} {'wins %':>7} {'columns':>8}  name"
    headed: set[object] = set()
    for rank, first, last, average, wins, columns, _, number, label in lines[:SHOWN]:
        if number not in headed:
            print(head)
            headed.add(number)
        interval = f"{first}-{last}"
        shown = printable.shown(str(label))
        print(f"{rank:>6} {interval:>9} {average:>8} {wins:>7} {columns:>8}  {shown}")
    if len(lines) > SHOWN:
        print(f"... and {len(lines) - SHOWN} more; --csv F writes all")
    if request.csv:
        write_lines(request.csv, [HEAD, *lines])
        log.info(f"wrote {request.csv}")
    return Outcome(document=document)


def _refuse_many(file: Path, count: int) -> None:
    if count > rank_intervals.MOST_ROWS:
        raise BadInput(
            f"{file}: {count} rows; at most {rank_intervals.MOST_ROWS} are ranked, as every"
            " pair of them is compared: leave the others out"
        )


def of_table(table: ForeignTable) -> list[RankedGroup]:
    """Rank each group of rows that common columns connect; the largest first."""
    ranked = []
    for group in groups.connected(table.values):
        values = table.values[group]
        used = ~np.isnan(values).all(0)
        values = values[:, used]
        datasets = [
            dataset for dataset, is_used in zip(table.datasets, used) if is_used
        ]
        ranking = rank_intervals.ranking(values, datasets)
        names = [printable.shown(table.names[i]) for i in group]
        order = sorted(
            range(len(group)), key=lambda i: (ranking.places[i].rank, names[i])
        )
        ranking = dataclasses.replace(
            ranking,
            places=[ranking.places[i] for i in order],
            above=ranking.above[np.ix_(order, order)],
        )
        count = len(datasets)
        title = f"all {count} columns" if count > 1 else "the one column"
        if count < len(table.columns):
            title = f"{count} of {len(table.columns)} columns"
        what = "columns" if table.datasets == table.columns else ranking.over
        one = RankedGroup(
            names=[names[i] for i in order],
            title=title,
            basis=f"for other {what} like these {ranking.units}",
            standing=ranking,
            met=groups.meetings(values[order]),
        )
        ranked.append(one)
    return ranked


def answer(ranked: Sequence[RankedGroup], table: ForeignTable) -> str:
    """Say who leads each group; and which were never measured together."""
    compared = [group for group in ranked if len(group.names) > 1]
    clauses = []
    for group in compared[:NAMED]:
        if group.standing.tested:
            clauses.append(group.clause())
        else:
            fewest = column_comparisons.FEWEST
            clauses.append(
                f"no clear winner: {verdict.everybody(group.names)} cannot be told apart over"
                f" {group.title}; that takes {fewest} columns at least, of as many datasets"
            )
    if not clauses:
        clauses = ["no two rows share a column: nothing here can be compared"]
    said = "; ".join(clauses)
    if not (compared and compared[0].begins_with_name):
        said = verdict.capitalised(said)
    sentences = [f"{said}."]
    if len(ranked) > 1:
        words = [verdict.in_braces(group.names) for group in ranked[:NAMED]]
        if len(ranked) > NAMED:
            left = len(ranked) - NAMED
            words.append(verdict.counted(left, "other group", "other groups"))
        sentences.append(
            f"Never measured together: {verdict.listed(words)}; a number of each in one column"
            " connects them."
        )
    return " ".join(sentences)


def of_runs(runs: Path) -> tuple[list[RankedGroup], str]:
    """Return the ranks and the answer of the board of a folder, as `leaderboard` has them."""
    board = collect([runs])
    for problem in board.problems:
        log.warning(printable.shown(problem, 1000))
    _refuse_many(runs, len(board.measured_rows))
    sets = overall.overall(board)
    if not sets:
        raise BadInput(
            f"{runs}: no column where two checkpoints have numbers that can be ranked;"
            f" {overall.answer(board, sets)}"
        )
    first_of_group = overall.first_of_groups(sets)
    return list(first_of_group), overall.answer(board, sets)


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
    # 1. Published rows, as our own tables have them, are never ranked with measured ones.
    if "source" in head:
        source = head.index("source")
        measured = [(at, line) for at, line in body if line[source] != "published"]
        if len(measured) < len(body):
            log.warning(
                f"{file}: rows whose 'source' is 'published' are not ranked"
                f" ({len(body) - len(measured)} of {len(body)})"
            )
        body = measured
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
