"""The catalogue of printed tables and figures that grids make, and docs/papers.md made from it.

A grid names the table that it measures (`prints: lorac:2`) and its deviations; its recipes name the
rows that they must reach (`expected`). The catalogue reads both, so it agrees with the jobs.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.board.board import Board, collect
from backbench.errors import BadInput, nearest
from backbench.launch.grid import Grid, read_grid
from backbench.published import (
    judge,
    judging_rules,
    printed_recipes,
    published,
    selection,
    timm_scores,
)
from backbench.published.judge import Judged
from backbench.published.published import Published
from backbench.published.selection import PrintedBeside
from backbench.recipes import config
from backbench.runs.terminal import log
from backbench.untrusted import printable

PAPERS = ("lorac", "jcl", "mio", "arb", "cllr")
UNEXPECTED = "unexpected"  # a number that could be judged, and that no recipe of its grid expects


@dataclass(frozen=True)
class PrintedItem:
    """A printed table or figure: `lorac:2`, `arb:fig.7`."""

    prints: str
    grid: Grid
    keys: frozenset[str]  # the published rows that its recipes must reach
    points: int  # pretrainings, without their seeds

    @property
    def name(self) -> str:
        """LORAC Table 2, ARB Fig. 7, MIO Section 4.1."""
        paper, _, table = self.prints.partition(":")
        return f"{paper.upper()} {published.place_in_paper(table)}"

    @property
    def numbers(self) -> tuple[Published, ...]:
        """The numbers printed there, in their order."""
        start = f"{self.prints}:"
        return tuple(
            number for number in published.rows() if number.key.startswith(start)
        )

    def why_not(self, number: Published) -> str | None:
        """The one word for why a number cannot be judged; None where it can."""
        return judging_rules.reason(number) or (
            None if number.key in self.keys else UNEXPECTED
        )

    @property
    def in_command(self) -> str:
        """The grid, with the argument that it needs where it trains on published lists of labels."""
        return f"{self.grid.name} lists=lists" if self.grid.lists else self.grid.name


@dataclass(frozen=True)
class PrintedSource:
    """One source of printed numbers: how many there are, can be judged, and are measured."""

    name: str
    printed: int
    judgeable: int
    measured: int

    @property
    def words(self) -> str:
        """timm: 9,336 printed, 9,000 judgeable, 2 measured."""
        return f"{self.name}: {self.printed:,} printed, {self.judgeable:,} judgeable, {self.measured:,} measured"


@functools.cache
def items() -> tuple[PrintedItem, ...]:
    """All tables and figures: paper by paper, tables before figures."""

    found = []
    for name in config.recipe_names("grids"):
        paper = name.partition("_")[0]
        if paper not in PAPERS:
            continue
        grid = read_grid(name)
        if grid.prints is None:
            raise BadInput(
                f"grid {name}: add `prints: PAPER:TABLE`, the table or figure it makes"
            )
        keys: list[list[str]] = []
        for sweep in printed_recipes.sweeps(grid):
            keys += [
                printed_recipes.expected_by(sweep, point) for point in sweep.points()
            ]
        item = PrintedItem(
            grid.prints, grid, frozenset(itertools.chain(*keys)), len(keys)
        )
        table = grid.prints.partition(":")[2]
        found.append((PAPERS.index(paper), table.startswith("fig."), table, item))
    return tuple(item for *_, item in sorted(found, key=lambda one: one[:3]))


def find(text: str) -> PrintedItem:
    """The item named `lorac:2`, `arb:fig.7`, or by its grid. BadInput with the nearest name."""
    named = {item.prints: item for item in items()} | {
        item.grid.name: item for item in items()
    }
    if text.lower() not in named:
        raise BadInput(f"no table or figure '{text}'; {nearest(text.lower(), named)}")
    return named[text.lower()]


def coverage() -> Counter[str | None]:
    """How many of all published numbers are judgeable (None), and how many are not, by reason."""
    counts: Counter[str | None] = Counter()
    for item in items():
        counts.update(item.why_not(number) for number in item.numbers)
    counts.update(judging_rules.reason(n) or UNEXPECTED for n in without_grid())
    return counts


def without_grid() -> list[Published]:
    """The numbers of tables that no grid makes."""
    made = tuple(f"{item.prints}:" for item in items())
    return [n for n in published.rows() if not n.key.startswith(made)]


# ---- what is measured

# A printed number: key, task, dataset, metric as it is measured
NumberName = tuple[str, str, str, str]
Verdicts = Mapping[NumberName, Sequence[Judged]]


def measured(runs: Sequence[Path]) -> tuple[Board, list[Judged]]:
    """The measurements below `runs`, and the verdicts on them."""
    board = collect(runs)
    for problem in board.problems:
        log.warning(printable.shown(problem, 1000))
    return board, judge.judge(board, judge.expected_keys(board, runs))


def by_number(judged: Sequence[Judged]) -> dict[NumberName, list[Judged]]:
    """The verdicts by the printed number."""
    found: dict[NumberName, list[Judged]] = {}
    for one in judged:
        name = (one.key, one.column.task, one.column.dataset, one.column.metric)
        found.setdefault(name, []).append(one)
    return found


def name_of(number: Published) -> NumberName:
    """The name by which `verdicts` has a printed number."""
    metric = judging_rules.as_measured(number).metric
    return number.key, number.task, number.dataset, metric


def sources(board: Board, judged: Sequence[Judged]) -> list[PrintedSource]:
    """Group printed numbers by source: papers' tables, csv files, pages of public checkpoints."""
    counts = coverage()
    found = [
        PrintedSource("papers", counts.total(), counts[None], len(by_number(judged)))
    ]
    # 1. The counts of right images; measured are those of a row by the model's own classifier
    own = set()
    for cell in board.cells.values():
        for result, _ in cell.parts:
            match {**result.provenance, "metric": result.metric}:
                case {
                    "metric": "top1",
                    "own_geometry": {"input_size": [*_, int(size)]},
                    "recipe": {"rule": str(rule)},
                }:
                    own.add((result.name, size, result.dataset, rule))
    for name, scores in (
        ("timm", timm_scores.scores()),
        ("testbed", timm_scores.testbed()),
    ):
        judgeable = sum(not score.unlike for score in scores.values())
        count = sum((*key, score.printed.rule) in own for key, score in scores.items())
        found.append(PrintedSource(name, len(scores), judgeable, count))
    # 2. The numbers on the pages of the files in the shipped lists, with the name of the file, once:
    #    a file may stand in several lists
    printed: dict[tuple[str, PrintedBeside], None] = {}
    for name in config.recipe_names(selection.KIND):
        for checkpoint, about in selection.read_list(name).files.items():
            printed |= dict.fromkeys((checkpoint, number) for number in about.beside)
    names = {row.checkpoint: row.name for row in board.measured_rows}
    there = {(names.get(digest), column) for digest, column in board.cells}
    judgeable = sum(number.allowed is not None for _, number in printed)
    count = sum((name, number.column) in there for name, number in printed)
    return [*found, PrintedSource("pages", len(printed), judgeable, count)]


# ---- docs/papers.md

HEAD = """# The papers' tables and figures

Each table and figure of the five papers is a grid, which measures it anew: it pretrains the checkpoints and evaluates
them. Three commands go from a grid to a table.

- `backbench launch run GRID --data ROOT --out RUNS` measures a table. Run again, it measures what is missing. With
  `fast=true` behind GRID it pretrains [in less time](fast.md).
- `backbench paper lorac:2 RUNS` shows what is measured, running and missing. It also says which pairs of a column keep
  their printed order (by paired tests, corrected by Holm), and names deviations and [choices](choices.md).
  `changed: beta, lr` marks a trunk by another recipe. Seeds of one recipe get one verdict, on their mean.
- `backbench leaderboard RUNS --latex DIR` prints the tables.

`backbench paper --markdown docs/papers.md` makes this page.
"""


def markdown(runs: Sequence[Path] = ()) -> str:
    """Return docs/papers.md: each table and figure with its grid, how many of its numbers can be
    judged, how many have a verdict in `runs`, and its deviations."""
    board, judged = measured(runs)
    counts, done = coverage(), by_number(judged)
    lines = [
        HEAD,
        f"Of {len(published.rows())} printed numbers {counts.pop(None, 0)} are judgeable;"
        f" {len(done)} are measured. A number is judgeable if its method, protocol and metric are"
        " here and a recipe must reach it. `backbench reproduce` measures timm's counts and the"
        " numbers on public checkpoints' pages.",
        "",
        "| source | printed | judgeable | measured |",
        "|---|---:|---:|---:|",
    ]
    for one in sources(board, judged):
        lines.append(
            f"| {one.name} | {one.printed:,} | {one.judgeable:,} | {one.measured:,} |"
        )
    lines += ["", "The papers' other numbers are not judged, each for one reason:", ""]
    for why, count in counts.most_common():
        words = judging_rules.WHY.get(str(why), "no recipe expects it")
        lines.append(f"- {count} {why}: {words}")
    lines.append("")
    for paper in PAPERS:
        lines += [f"## {paper.upper()}", ""]
        for item in items():
            if item.prints.startswith(f"{paper}:"):
                numbers = status(item, done).replace(", 0 measured", "")
                line = f"- `{item.in_command}` ({numbers}): {item.grid.title}"
                if item.grid.deviations:
                    line += f". Deviations: {'; '.join(item.grid.deviations)}"
                lines.append(line)
        others = [n for n in without_grid() if n.paper.lower() == paper]
        for table in dict.fromkeys(n.table for n in others):
            reasons = Counter(
                judging_rules.reason(n) for n in others if n.table == table
            )
            lines.append(
                f"- {published.place_in_paper(table)}, no grid ({_counted(reasons)})"
            )
        lines.append("")
    return "\n".join(lines)


def status(item: PrintedItem, measured: Verdicts) -> str:
    """Count the numbers: `18 judgeable, 2 measured, 24 unbuilt`; or a figure's points."""
    if not item.numbers:
        return f"{item.points} points"
    count = Counter(item.why_not(number) for number in item.numbers)
    judgeable = count.pop(None, 0)
    done = sum(name_of(number) in measured for number in item.numbers)
    words = [f"{judgeable} judgeable, {done} measured"] if judgeable else []
    return ", ".join([*words, _counted(count)] if count else words)


def _counted(count: Mapping[str | None, int]) -> str:
    """24 unbuilt, 8 quoted."""
    return ", ".join(f"{n} {why}" for why, n in Counter(count).most_common())
