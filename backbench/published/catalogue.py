"""The catalogue of printed tables and figures that grids measure, and docs/papers.md made from it.

A grid names the table that it measures (`prints: lorac:2`) and its deviations; its recipes name the
rows that they must reach (`expected`). The catalogue reads both, so it agrees with the jobs.
"""

import functools
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.board.board import Board, collect
from backbench.errors import BadInput, nearest
from backbench.launch.grid import Grid, read_grid
from backbench.published import (
    grid_recipes,
    judging_rules,
    published,
    reproduction_lists,
    timm_scores,
)
from backbench.published.expected_rows import expected_keys
from backbench.published.judge import Judged, judge
from backbench.published.published import Published
from backbench.published.reproduction_lists import PrintedBeside
from backbench.recipes import config
from backbench.runs.terminal import log
from backbench.untrusted import printable

PAPERS = ("lorac", "jcl", "mio", "arb", "cllr")
UNEXPECTED = (
    "unexpected"  # a number that could be judged, but no recipe of its grid expects it
)


@dataclass(frozen=True)
class PrintedItem:
    """A printed table or figure: `lorac:2`, `arb:fig.7`."""

    prints: str
    grid: Grid
    keys: frozenset[str]  # the published rows that its recipes must reach
    # Those of them that rest on a lost L: CLLR's, whose penalty takes it away
    lost: frozenset[str]
    # Those of them whose training ends without a trunk: CLLR's at the printed rate
    exploding: frozenset[str]
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
        return tuple(n for n in published.rows() if n.key.startswith(start))

    def why_not(self, number: Published) -> str | None:
        """Return the one word for why a number cannot be judged; None if it can."""
        reason = judging_rules.reason(number)
        if reason is None and number.key not in self.keys:
            return UNEXPECTED
        return reason

    @property
    def on_lost_projection(self) -> int:
        """How many judgeable numbers rest on an L that CLLR's penalty takes away."""
        return self._judgeable_among(self.lost)

    @property
    def on_exploding_training(self) -> int:
        """How many judgeable numbers rest on a training of CLLR that explodes as printed."""
        return self._judgeable_among(self.exploding)

    def _judgeable_among(self, keys: Container[str]) -> int:
        """Count the judgeable numbers of these rows."""
        return sum(n.key in keys and self.why_not(n) is None for n in self.numbers)

    @property
    def beside(self) -> tuple[str, ...]:
        """The recipes of the grid that are measured beside the printed rows, and judged by none of
        them: they write `expected: []`."""
        names = []
        for sweep in grid_recipes.sweeps(self.grid):
            if grid_recipes.shipped(sweep.recipe).get("expected") == []:
                names.append(sweep.recipe)
        return tuple(names)

    @property
    def in_command(self) -> str:
        """The grid as `backbench launch run` takes it: one that trains on published lists of labels
        needs their folder."""
        return f"{self.grid.name} lists=lists" if self.grid.lists else self.grid.name


@dataclass(frozen=True)
class PrintedSource:
    """One source of printed numbers: how many there are, can be judged, and are measured."""

    name: str
    printed: int
    judgeable: int
    measured: int
    on_lost_projection: int = 0  # of the judgeable ones; CLLR's
    on_exploding_training: int = 0  # the same; most of them also rest on a lost L

    @property
    def words(self) -> str:
        """timm: 9,336 printed, 9,000 judgeable, 2 measured."""
        apart = words_of_those_apart(self)
        return (
            f"{self.name}: {self.printed:,} printed, {self.judgeable:,} judgeable{apart},"
            f" {self.measured:,} measured"
        )


def words_of_those_apart(counted: PrintedItem | PrintedSource) -> str:
    """Return ` (of them 108 on a lost L, 86 on a training that explodes)`, or as much of it as there
    is (docs/choices.md has the reasons: CLLR: alpha 10, CLLR: lambda from 0.1 on)."""
    words = []
    if counted.on_lost_projection:
        words.append(f"{counted.on_lost_projection} on a lost L")
    if counted.on_exploding_training:
        words.append(f"{counted.on_exploding_training} on a training that explodes")
    return f" (of them {', '.join(words)})" if words else ""


@functools.cache
def items() -> tuple[PrintedItem, ...]:
    """Return all tables and figures: paper by paper, tables before figures."""
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
        keys: set[str] = set()
        lost: set[str] = set()
        exploding: set[str] = set()
        points = 0
        for sweep in grid_recipes.sweeps(grid):
            for point in sweep.points():
                expected = grid_recipes.expected_by(sweep, point)
                keys.update(expected)
                if grid_recipes.loses_projection(sweep, point):
                    lost.update(expected)
                if grid_recipes.explodes(sweep, point):
                    exploding.update(expected)
                points += 1
        item = PrintedItem(
            grid.prints,
            grid,
            frozenset(keys),
            frozenset(lost),
            frozenset(exploding),
            points,
        )
        found.append(item)
    return tuple(sorted(found, key=_place))


def _place(item: PrintedItem) -> tuple[int, bool, str]:
    """Return the place of an item among all items."""
    paper, _, table = item.prints.partition(":")
    return PAPERS.index(paper), table.startswith("fig."), table


def find(text: str) -> PrintedItem:
    """Return the item named `lorac:2`, `arb:fig.7`, or by its grid.

    Raises BadInput, with the nearest name, if there is none.
    """
    named = {}
    for item in items():
        named[item.prints] = item
    for item in items():
        named[item.grid.name] = item
    name = text.lower()
    if name in PAPERS:
        of_paper = [
            item.prints for item in items() if item.prints.startswith(f"{name}:")
        ]
        raise BadInput(
            f"'{text}' is a paper; name one of its items: {', '.join(of_paper)}"
        )
    if name not in named:
        raise BadInput(f"no table or figure '{text}'; {nearest(name, named)}")
    return named[name]


def coverage() -> Counter[str | None]:
    """Count all published numbers: the judgeable ones under None, the others by their reason."""
    counts: Counter[str | None] = Counter()
    for item in items():
        counts.update(item.why_not(number) for number in item.numbers)
    for number in without_grid():
        counts[judging_rules.reason(number) or UNEXPECTED] += 1
    return counts


def without_grid() -> list[Published]:
    """Return the numbers of tables that no grid measures."""
    made = tuple(f"{item.prints}:" for item in items())
    return [n for n in published.rows() if not n.key.startswith(made)]


# ---- what is measured

# What names a printed number: its key, task, dataset, and the metric as it is measured
NumberName = tuple[str, str, str, str]
Verdicts = Mapping[NumberName, Sequence[Judged]]


def measured(runs: Sequence[Path]) -> tuple[Board, list[Judged]]:
    """Return the board of the measurements below `runs`, and the verdicts on them."""
    board = collect(runs)
    for problem in board.problems:
        log.warning(printable.shown(problem, 1000))
    return board, judge(board, expected_keys(board, runs))


def by_number(judged: Sequence[Judged]) -> dict[NumberName, list[Judged]]:
    """Group the verdicts by the printed number that they are about."""
    found: dict[NumberName, list[Judged]] = {}
    for one in judged:
        name = (one.key, one.column.task, one.column.dataset, one.column.metric)
        found.setdefault(name, []).append(one)
    return found


def name_of(number: Published) -> NumberName:
    """Return the name by which `by_number` has a printed number."""
    metric = judging_rules.as_measured(number).metric
    return number.key, number.task, number.dataset, metric


def sources(board: Board, judged: Sequence[Judged]) -> list[PrintedSource]:
    """Count the printed numbers of each source: the papers' tables, the csv files of counts, and the
    pages of public checkpoints."""
    counts = coverage()
    found = [
        PrintedSource(
            "papers",
            counts.total(),
            counts[None],
            len(by_number(judged)),
            on_lost_projection=sum(item.on_lost_projection for item in items()),
            on_exploding_training=sum(item.on_exploding_training for item in items()),
        )
    ]
    # 1. The counts of right images. One is measured if there is a row of the same model by its own
    #    classifier, at the same image size, on the same set, by the same rule.
    measured_counts = set()
    for cell in board.cells.values():
        for result, _ in cell.parts:
            match {**result.provenance, "metric": result.metric}:
                case {
                    "metric": "top1",
                    "own_geometry": {"input_size": [*_, int(size)]},
                    "recipe": {"rule": str(rule)},
                }:
                    measured_counts.add((result.name, size, result.dataset, rule))
    for name, scores in (
        ("timm", timm_scores.scores()),
        ("testbed", timm_scores.testbed()),
    ):
        judgeable = 0
        count = 0
        for (model, size, dataset), score in scores.items():
            if not score.unlike:
                judgeable += 1
            if (model, size, dataset, score.printed.rule) in measured_counts:
                count += 1
        found.append(PrintedSource(name, len(scores), judgeable, count))
    # 2. The numbers on the pages of the files in the shipped lists. A file may stand in several
    #    lists, but its numbers count once: the dict stands for a set that keeps its order.
    on_pages: dict[tuple[str, PrintedBeside], None] = {}
    for name in config.recipe_names(reproduction_lists.KIND):
        for checkpoint, about in reproduction_lists.read_list(name).files.items():
            for number in about.beside:
                on_pages[checkpoint, number] = None
    names = {row.checkpoint: row.name for row in board.measured_rows}
    there = {(names.get(digest), column) for digest, column in board.cells}
    judgeable = sum(number.allowed is not None for _, number in on_pages)
    count = sum((name, number.column) in there for name, number in on_pages)
    found.append(PrintedSource("pages", len(on_pages), judgeable, count))
    return found


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

# Figures of measurements that no grid makes, by their paper
IMAGELESS_FIGURES = {
    "cllr": "- Fig. 3, no grid (text): Distances between sentences of BookCorpus"
}
# With the number of printed numbers on a lost L
LOST_PROJECTION = """{} numbers of CLLR rest on a lost L. Trained as printed, its penalty (alpha 1 to 20) takes nearly
all of L away, and little of L phi is left to probe ([CLLR: alpha 10](choices.md#cllr)). They are judged as printed, and
counted apart: whether such a number is reached says little about the method."""
# With the number of printed numbers on a training that explodes
EXPLODING = """{} numbers of CLLR, most of them among these, rest on a training that explodes. With SGD and lambda from
0.1 on, its loss is not finite within its first steps ([CLLR: lambda from 0.1 on](choices.md#cllr)). They are counted
apart, too: as printed, such a run ends with a refusal and no number. What the paper did to train it is not known."""


def markdown(runs: Sequence[Path] = ()) -> str:
    """Return docs/papers.md: each table and figure with its grid, how many of its numbers can be
    judged, how many have a verdict in `runs`, and its deviations."""
    board, judged = measured(runs)
    counts = coverage()
    done = by_number(judged)
    # 1. The sums over all papers
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
    counted = sources(board, judged)
    for source in counted:
        apart = words_of_those_apart(source)
        lines.append(
            f"| {source.name} | {source.printed:,} | {source.judgeable:,}{apart} |"
            f" {source.measured:,} |"
        )
    lost = sum(source.on_lost_projection for source in counted)
    exploding = sum(source.on_exploding_training for source in counted)
    lines += ["", LOST_PROJECTION.format(lost)]
    lines += ["", EXPLODING.format(exploding)]
    lines += ["", "The papers' other numbers are not judged, each for one reason:", ""]
    for why, count in counts.most_common():
        words = judging_rules.WHY.get(str(why), "no recipe expects it")
        lines.append(f"- {count} {why}: {words}")
    lines.append("")
    # 2. Each paper's tables and figures, and then its tables without a grid
    for paper in PAPERS:
        lines += [f"## {paper.upper()}", ""]
        for item in items():
            if not item.prints.startswith(f"{paper}:"):
                continue
            numbers = status(item, done).replace(", 0 measured", "")
            line = f"- `{item.in_command}` ({numbers}): {item.grid.title}"
            if item.grid.deviations:
                line += f". Deviations: {'; '.join(item.grid.deviations)}"
            lines.append(line)
        reasons: dict[str, Counter[str | None]] = {}
        for number in without_grid():
            if number.paper.lower() == paper:
                of_table = reasons.setdefault(number.table, Counter())
                of_table[judging_rules.reason(number)] += 1
        for table, count_of in reasons.items():
            place = published.place_in_paper(table)
            lines.append(f"- {place}, no grid ({_counted(count_of)})")
        if paper in IMAGELESS_FIGURES:
            lines.append(IMAGELESS_FIGURES[paper])
        lines.append("")
    return "\n".join(lines)


def status(item: PrintedItem, measured: Verdicts) -> str:
    """Count the numbers: `18 judgeable, 2 measured, 24 unbuilt`; or the points of a figure."""
    if not item.numbers:
        return f"{item.points} points"
    count = Counter(item.why_not(number) for number in item.numbers)
    judgeable = count.pop(None, 0)
    done = sum(name_of(number) in measured for number in item.numbers)
    words = []
    if judgeable:
        apart = words_of_those_apart(item)
        words.append(f"{judgeable} judgeable{apart}, {done} measured")
    if count:
        words.append(_counted(count))
    return ", ".join(words)


def _counted(count: Counter[str | None]) -> str:
    """Return `24 unbuilt, 8 quoted`."""
    return ", ".join(f"{n} {why}" for why, n in count.most_common())
