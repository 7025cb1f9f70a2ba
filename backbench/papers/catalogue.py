"""Every printed table and figure that a grid makes, and which of its numbers are judged.

A grid under configs/grids says what it prints (`prints: lorac:2`), in what it deviates, and by its
recipes' `expected` which rows they must reach. So nothing is said here that the jobs do not do.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backbench.errors import BadInput, nearest
from backbench.launch import grid as grids
from backbench.launch.grid import Grid, Sweep, SweepPoint, read_grid
from backbench.recipes import config
from backbench.results import judging_rules, published
from backbench.results.published import Published

PAPERS = ("lorac", "jcl", "mio", "arb", "cllr")
UNEXPECTED = "unexpected"  # a number that could be judged, and that no recipe of its grid expects


@dataclass(frozen=True, kw_only=True)
class PrintedItem:
    """A printed table or figure: `lorac:2`, `arb:fig.7`."""

    prints: str
    grid: Grid
    keys: frozenset[str]  # the published rows that its recipes must reach
    points: int  # pretrainings, without their seeds

    @property
    def name(self) -> str:
        """LORAC Table 2, ARB Fig. 7, MIO Section 4.1."""
        paper, _, item = self.prints.partition(":")
        kind = "Table"
        if item.startswith("fig."):
            kind, item = "Fig.", item.removeprefix("fig.")
        elif self.grid.name.startswith(f"{paper}_sec"):
            kind = "Section"
        return f"{paper.upper()} {kind} {item}"

    @property
    def numbers(self) -> tuple[Published, ...]:
        """What is printed there, in its order."""
        start = f"{self.prints}:"
        return tuple(number for number in published.rows() if number.key.startswith(start))

    def why_not(self, number: Published) -> str | None:
        """The one word for why a number is not judged; None where it is."""
        return judging_rules.reason(number) or (None if number.key in self.keys else UNEXPECTED)

    @property
    def command(self) -> str:
        """What measures all of it, and again what is missing."""
        lists = " lists=lists" if self.grid.lists else ""
        return f"backbench launch run {self.grid.name}{lists} --data ROOT --out RUNS"


@functools.cache
def items() -> tuple[PrintedItem, ...]:
    """All of them: paper by paper, tables before figures."""
    found = []
    for name in config.recipe_names("grids"):
        if name.startswith(tuple(f"{paper}_" for paper in PAPERS)):
            found.append(_item(read_grid(name)))
    return tuple(sorted(found, key=_place))


def _place(item: PrintedItem) -> tuple[int, bool, str]:
    paper, _, what = item.prints.partition(":")
    return PAPERS.index(paper), what.startswith("fig."), what


def _item(grid: Grid) -> PrintedItem:
    keys: set[str] = set()
    points = 0
    for sweep in sweeps(grid):
        for point in sweep.points():
            points += 1
            keys.update(_expected(sweep, point))
    if grid.prints is None:
        raise BadInput(f"grid {grid.name}: says by no `prints:` which table or figure it makes")
    return PrintedItem(prints=grid.prints, grid=grid, keys=frozenset(keys), points=points)


def sweeps(grid: Grid) -> Iterator[Sweep]:
    return grids.sweeps(grid, f"grid {grid.name}")


def _expected(sweep: Sweep, point: SweepPoint) -> list[str]:
    """The keys of one point: what the sweep says, else what the recipe does."""
    if sweep.expected is not None:
        return sweep.expected_rows(point)
    # `expected=[]` among the overrides, or nothing about it
    recipe = config.apply_overrides(_recipe(sweep.recipe), sweep.overrides)
    return [str(key) for key in recipe.get("expected") or ()]


@functools.cache
def _recipe(name: str) -> Mapping[str, Any]:
    return config.read_recipe(config.find_recipe(name, "pretrain"))


def find(text: str) -> PrintedItem:
    """`lorac:2`, `arb:fig.7`, or a grid's name. BadInput with the nearest."""
    named = {item.prints: item for item in items()} | {item.grid.name: item for item in items()}
    if text.lower() not in named:
        raise BadInput(f"no table or figure '{text}'; {nearest(text.lower(), named)}")
    return named[text.lower()]


def coverage() -> Counter[str | None]:
    """How many of all published numbers are judged (None), and of the others, by reason."""
    found: Counter[str | None] = Counter()
    seen = 0
    for item in items():
        for number in item.numbers:
            found[item.why_not(number)] += 1
            seen += 1
    found[UNEXPECTED] += len(published.rows()) - seen  # of a table that no grid makes
    return +found
