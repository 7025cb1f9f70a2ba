"""The claims of a printed table: of each two numbers in one column, which method is better.

Numbers lie so near to each other that most have a neighbour within the tolerance; the order is what
a table says. A claim holds, or is reversed, if a paired test tells the two measured numbers apart
after Holm's correction over all tested claims of the table.
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
from backbench.published.judge import OUTSIDE, WITHIN, Judged
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
        number = self.better
        metric = as_measured(number)
        printed = metric.value - as_measured(self.worse).value
        text = (
            f"{number.task}/{number.dataset}/{metric.metric}:"
            f" {_short(number)} > {_short(self.worse)} by {printed:.3g}"
        )
        if self.measured is not None:
            text += f", measured {self.measured:+.2f}"
        return f"{text}: {self.verdict}"


def _short(number: Published) -> str:
    """Return the key without its paper, its table and what all numbers of a column share."""
    _, _, model, arch, epochs, *more = number.key.split(":")
    return ":".join([model, arch, epochs, *more]).removesuffix(f":{number.trained_on}")


def of_table(
    numbers: Sequence[Published], board: Board, judged: Sequence[Judged]
) -> list[Claim]:
    """Return the claims of a table; two equal numbers claim nothing.

    A trunk that `judged` found to be another than the printed one, or trained by another recipe,
    proves nothing about the claim.
    """
    columns: dict[tuple[str, str, str], list[Published]] = {}
    for n in numbers:
        if judging_rules.reason(n) is None:
            columns.setdefault((n.task, n.dataset, n.metric), []).append(n)
    # 1. Make a board that has one cell for each printed number that was measured.
    together = Board()
    cells: dict[Published, Cell] = {}
    pretrained_again: dict[Column, list[Cell]] = {}
    for n in itertools.chain(*columns.values()):
        one = _verdict_on(n, judged)
        cell = None if one is None else _cell(one, board)
        if one is None or cell is None:
            continue
        cells[n] = cell
        together.rows.append(Row(n.key, n.model, n.model, n.arch, n.epochs))
        together.cells[n.key, one.column] = cell
        if len(one.rows) > 1:
            pretrained_again.setdefault(one.column, []).append(cell)
    # 2. Where pretrainings were repeated, the noise is theirs, even if the task itself trains
    #    nothing: the seeds of a probe do not show how far two pretrainings lie apart.
    for column, repeated in pretrained_again.items():
        spreads = []
        for cell in repeated:
            files = list(predictions(cell).values())
            spreads.append(column_noise.seeds_of(cell.values, files, column.metric))
        together.noises[column] = training_noise.pooled(spreads)
    # 3. Test each claim that is measured.
    claims: list[Claim] = []
    tested: list[tuple[int, Difference]] = []  # (place in `claims`, difference)
    for in_column in columns.values():
        for pair in itertools.combinations(in_column, 2):
            worse, better = sorted(pair, key=lambda n: as_measured(n).value)
            if as_measured(worse).value == as_measured(better).value:
                continue
            high = cells.get(better)
            low = cells.get(worse)
            if high is None or high.value is None or low is None or low.value is None:
                claims.append(Claim(better, worse, NOT_MEASURED))
                continue
            claims.append(Claim(better, worse, ALIKE, high.value - low.value))
            gap = difference(together, column_of(better), high, low)
            if gap is not None:
                tested.append((len(claims) - 1, gap))
    # 4. Correct for the number of tests: with 95% confidence, all claims said to hold or to be
    #    reversed are so at once.
    corrected = multiple_tests.holm(np.array([gap.p for _, gap in tested]))
    for (place, gap), p in zip(tested, corrected, strict=True):
        if p < ALPHA and gap.real:
            word = HOLDS if gap.value > 0 else REVERSED
            claims[place] = replace(claims[place], verdict=word)
    return claims


def _verdict_on(number: Published, judged: Sequence[Judged]) -> Judged | None:
    """Return the verdict on a printed number; None if no trunk like the printed one was measured.

    If there are several, one that was pretrained to the paper's letter goes before others, then one
    over more pretrainings.
    """
    column = column_of(number)
    fit = []
    for one in judged:
        same = one.key == number.key and one.column == column
        if same and one.verdict in (WITHIN, OUTSIDE):
            fit.append(one)
    # `way` is "" where the pretraining was to the letter, and False sorts before True.
    return min(fit, key=lambda one: (one.way != "", -len(one.rows)), default=None)


def _cell(one: Judged, board: Board) -> Cell | None:
    """Return the measurements behind a verdict; None if one of its cells cannot be tested.

    Each measurement counts as a training of its own. Probes of one pretraining are not independent,
    so where there are several pretrainings only the first probe of each is taken.
    """
    parts: list[Measurement] = []
    for row in one.rows:
        cell = board.cells[row.checkpoint, one.column]
        if not (cell.backed and cell.settled):
            return None
        taken = cell.parts[:1] if len(one.rows) > 1 else cell.parts
        for result, run in taken:
            # The paired tests know trainings by their seeds: 0, 1, 2 and so on here.
            result_of_its_own = replace(result, seed=len(parts))
            parts.append(Measurement(result_of_its_own, run))
    return Cell(one.measured, one.ci95, parts)


def counted(claims: Sequence[Claim]) -> str:
    """195 claims: 12 hold, 1 reversed, 3 cannot be told apart, 179 not measured."""
    count = Counter(claim.verdict for claim in claims)
    words = []
    for word in ORDER:
        if count[word]:
            plural = "hold" if word == HOLDS else word
            words.append(f"{count[word]} {plural}")
    return f"{len(claims)} claims: {', '.join(words)}"


def on_page(board: Board, judged: Sequence[Judged]) -> list[str]:
    """Return, for each table with a measured claim, a line with their count and one for each that
    is reversed."""
    tables: dict[str, None] = {}  # a set that keeps its order: lorac:1, ...
    for one in judged:
        paper, table, *_ = one.key.split(":")
        tables[f"{paper}:{table}"] = None
    lines = []
    for table in tables:
        numbers = [n for n in rows() if n.key.startswith(f"{table}:")]
        claims = of_table(numbers, board, judged)
        if any(claim.verdict != NOT_MEASURED for claim in claims):
            lines.append(f"{table}: {counted(claims)}")
            for claim in claims:
                if claim.verdict == REVERSED:
                    lines.append(f"{table}: {claim.words}")
    return lines
