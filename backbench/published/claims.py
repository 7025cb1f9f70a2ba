"""The claims of a printed table: of each two numbers in one column, which method is better.

Numbers lie so near to each other that most have a neighbour within the tolerance; the order is what
a table says. A claim holds, or is reversed, where a paired test tells the two measured numbers
apart after Holm's correction over all tested claims of the table.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from backbench.board.board import (
    Board,
    Cell,
    Column,
    Measurement,
    Row,
    difference,
    predictions,
)
from backbench.published import judging_rules
from backbench.published.judge import Judged
from backbench.published.judging_rules import as_measured, column_of
from backbench.published.published import Published, rows
from backbench.stats import multiple_tests, training_noise
from backbench.stats.multiple_tests import ALPHA
from backbench.stats.paired_differences import Difference
from backbench.verify import column_noise

HOLDS, REVERSED = "holds", "reversed"
ALIKE, NOT_MEASURED = "cannot be told apart", "not measured"
ORDER = (HOLDS, REVERSED, ALIKE, NOT_MEASURED)


@dataclass(frozen=True)
class Claim:
    """`better` was printed above `worse`."""

    better: Published
    worse: Published
    verdict: str
    measured: float | None = None  # better minus worse, in points

    @property
    def words(self) -> str:
        """linear/cifar10/top1: lorac > moco-m by 0.5, measured +0.71: holds."""
        n, metric = self.better, as_measured(self.better)
        printed = metric.value - as_measured(self.worse).value
        text = f"{n.task}/{n.dataset}/{metric.metric}: {_short(n)} > {_short(self.worse)} by {printed:.3g}"
        if self.measured is not None:
            text += f", measured {self.measured:+.2f}"
        return f"{text}: {self.verdict}"


def of_table(
    numbers: Sequence[Published], board: Board, judged: Sequence[Judged]
) -> list[Claim]:
    """Return the claims of a table; equal numbers claim nothing. A trunk that is not the printed
    one by its verdict in `judged` proves nothing about it."""
    columns: dict[tuple[str, str, str], list[Published]] = {}
    for n in numbers:
        if judging_rules.reason(n) is None:
            columns.setdefault((n.task, n.dataset, n.metric), []).append(n)
    # 1. One cell for each printed number
    together = Board()
    cells = {}
    pretrained_again: dict[Column, list[Cell]] = {}
    for n in itertools.chain(*columns.values()):
        # The verdict on it, one to the letter first; none if its trunk was not measured
        own = [one for one in judged if (one.key, one.column) == (n.key, column_of(n))]
        fit = [one for one in own if one.verdict in ("within", "outside")]
        one = min(fit, key=lambda one: (bool(one.way), -len(one.rows)), default=None)
        cell = _cell(one, board) if one is not None else None
        if one is None or cell is None:
            continue
        cells[n.key, n.task, n.dataset, n.metric] = cell
        together.rows.append(Row(n.key, n.model, n.model, n.arch, n.epochs))
        together.cells[n.key, one.column] = cell
        if len(one.rows) > 1:
            pretrained_again.setdefault(one.column, []).append(cell)
    # 2. Where pretrainings were repeated, theirs is the noise, also of tasks that train nothing; a
    #    probe's seeds say nothing about it
    for column, repeated in pretrained_again.items():
        spreads = []
        for cell in repeated:
            files = list(predictions(cell).values())
            spreads.append(column_noise.seeds_of(cell.values, files, column.metric))
        together.noises[column] = training_noise.pooled(spreads)
    # 3. A test for each claim that is measured
    claims: list[Claim] = []
    tested: list[tuple[int, Difference]] = []
    for pair in itertools.chain(
        *(itertools.combinations(c, 2) for c in columns.values())
    ):
        worse, better = sorted(pair, key=lambda n: as_measured(n).value)
        if as_measured(worse).value == as_measured(better).value:
            continue
        claims.append(Claim(better, worse, NOT_MEASURED))
        a, b = (
            cells.get((n.key, n.task, n.dataset, n.metric)) for n in (better, worse)
        )
        if (
            a is not None
            and b is not None
            and a.value is not None
            and b.value is not None
        ):
            gap = difference(together, column_of(better), a, b)
            if gap is not None:
                tested.append((len(claims) - 1, gap))
            claims[-1] = Claim(better, worse, ALIKE, a.value - b.value)
    # 4. All of them are right at once with 95% confidence
    corrected = multiple_tests.holm(np.array([gap.p for _, gap in tested]))
    for (place, gap), p in zip(tested, corrected, strict=True):
        if p < ALPHA and gap.real:
            word = HOLDS if gap.value > 0 else REVERSED
            claims[place] = replace(claims[place], verdict=word)
    return claims


def _cell(one: Judged, board: Board) -> Cell | None:
    """The measurements behind a verdict; None where some cannot be tested (Cell.backed, settled).
    Each is a training of its own: the first probe of each pretraining, as probes share its luck."""
    parts: list[Measurement] = []
    for row in one.rows:
        cell = board.cells[row.checkpoint, one.column]
        if not (cell.backed and cell.settled):
            return None
        for result, run in cell.parts[:1] if len(one.rows) > 1 else cell.parts:
            parts.append(Measurement(replace(result, seed=len(parts)), run))
    return Cell(one.measured, one.ci95, parts)


def counted(claims: Sequence[Claim]) -> str:
    """195 claims: 12 hold, 1 reversed, 3 cannot be told apart, 179 not measured."""
    count = Counter(claim.verdict for claim in claims)
    words = [
        f"{count[word]} {'hold' if word == HOLDS else word}"
        for word in ORDER
        if count[word]
    ]
    return f"{len(claims)} claims: {', '.join(words)}"


def on_page(board: Board, judged: Sequence[Judged]) -> list[str]:
    """For each table with a measured claim: their count, and those that are reversed."""
    lines = []
    for start in dict.fromkeys(
        one.key.rsplit(":", one.key.count(":") - 1)[0] for one in judged
    ):
        numbers = [n for n in rows() if n.key.startswith(f"{start}:")]
        claims = of_table(numbers, board, judged)
        if any(claim.verdict != NOT_MEASURED for claim in claims):
            lines.append(f"{start}: {counted(claims)}")
            lines += [f"{start}: {c.words}" for c in claims if c.verdict == REVERSED]
    return lines


def _short(number: Published) -> str:
    """The key without its paper, its table and what a column has in common."""
    _, _, model, arch, epochs, *more = number.key.split(":")
    return ":".join([model, arch, epochs, *more]).removesuffix(f":{number.trained_on}")
