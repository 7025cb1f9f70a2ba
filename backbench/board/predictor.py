"""Which cheap score may be trusted: its rank correlation with each downstream column.

Spearman's rho with a 95% percentile bootstrap over checkpoints (above MANY checkpoints, where that
takes long and adds nothing, Fisher's z with the variance of Bonett and Wright, 2000). With few
checkpoints the intervals are wide, and they are shown for that reason.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from backbench import charts
from backbench.board.board import AVERAGE, Board, Column, text_of
from backbench.results.paired_tests import NORMAL_975
from backbench.runs import atomic
from backbench.tasks import TASKS

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

# Checkpoints below which a correlation says nothing: of five, a bootstrap called every 0.8 sure
LEAST = 8
RESAMPLES = 1000
MANY = 100
HEADLINES = ("top1", "mean_per_class", AVERAGE, "AP", "box_AP", "mask_AP", "keypoint_AP", "bbox_AP",
             "segm_AP")  # fmt: skip
COLUMNS = 24  # of the figure; the csv has everything
DARK = 0.7  # correlations whose colour black letters cannot be read on

Interval = tuple[float, float]


@dataclass(frozen=True)
class Correlation:
    """rho over `n` checkpoints that have both; None where one of the two is constant."""

    cheap: Column
    downstream: Column
    n: int
    rho: float | None
    ci95: Interval | None

    @property
    def sure(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.ci95 is not None and not self.ci95[0] <= 0 <= self.ci95[1]


class Ranks(NamedTuple):
    """Unit ranks of n values, and of their resamples; nan rows where all values are equal."""

    whole: np.ndarray  # (1, n)
    resampled: np.ndarray | None  # (RESAMPLES, n); None above MANY


def spearman(
    x: Sequence[float], y: Sequence[float], *, seed: int = 0
) -> tuple[float | None, Interval | None]:
    """rho with ties at their mean rank, and its interval; None where undefined, and no interval
    where too few resamples have a rho."""
    return _spearman(_ranks(x, seed), _ranks(y, seed))


def _ranks(values: Sequence[float], seed: int = 0) -> Ranks:
    """The resamples depend on the seed and on how many values there are, and on nothing else: two
    columns over the same checkpoints are resampled alike, as pairs must be."""
    import numpy as np

    array, n = np.asarray(values, float), len(values)
    whole = _unit_ranks(array[None])
    if n > MANY:
        return Ranks(whole, None)
    # The generator is named, not numpy's default of the day: the same intervals by every version.
    index = np.random.Generator(np.random.PCG64(seed)).integers(0, n, size=(RESAMPLES, n))
    return Ranks(whole, _unit_ranks(array[index]))


def _unit_ranks(values: np.ndarray) -> np.ndarray:
    """(B, n) -> ranks of each row, centred and of unit length; nan rows where all are equal."""
    import numpy as np
    from scipy.stats import rankdata

    # Ties share their mean rank, so Pearson's r of the ranks is rho (the formula by squared
    # differences of ranks holds without ties only).
    ranks = rankdata(values, axis=1)
    ranks = ranks - ranks.mean(1, keepdims=True)
    length = np.sqrt((ranks**2).sum(1, keepdims=True))
    return ranks / np.where(length > 1e-9, length, np.nan)


def _correlate(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(B, n) unit ranks -> (B,) rho: Pearson's r is the product of centred unit vectors."""
    return (a * b).sum(1)


def _spearman(x: Ranks, y: Ranks) -> tuple[float | None, Interval | None]:
    rho = float(_correlate(x.whole, y.whole)[0])
    if math.isnan(rho):
        return None, None
    if x.resampled is None or y.resampled is None:
        return rho, _fisher(rho, x.whole.shape[1])
    # The bootstrap draws checkpoints with replacement and ranks each resample anew; the middle 95%
    # of its correlations are the interval.
    return rho, _percentiles(_correlate(x.resampled, y.resampled))


def _fisher(rho: float, n: int) -> Interval:
    """Fisher's z: atanh(rho) is nearly normal, with a variance that hardly depends on the truth.
    For ranks it is (1 + rho^2 / 2) / (n - 3) (Bonett and Wright, 2000), against 1 / (n - 3) for
    Pearson's r.
    """
    # On the scale of z the interval is symmetric; on that of rho it stays within -1 and 1.
    z = math.atanh(max(-0.999999, min(0.999999, rho)))  # of 1 it would be infinite
    half = NORMAL_975 * math.sqrt((1 + rho**2 / 2) / (n - 3))
    return math.tanh(z - half), math.tanh(z + half)


def _percentiles(values: np.ndarray) -> Interval | None:
    import numpy as np

    # A resample of equal values has no rho; where most are so, the others are no fair sample.
    values = values[~np.isnan(values)]
    if len(values) < RESAMPLES / 2:
        return None
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def correlations(board: Board) -> list[Correlation]:
    """Every cheap score with every downstream column where LEAST measured checkpoints have both."""
    found = _measured_values(board)
    # A column meets many others, mostly over the same checkpoints: its ranks there are made once.
    ranks: dict[tuple[Column, tuple[str, ...]], Ranks] = {}

    def ranked(column: Column, shared: tuple[str, ...]) -> Ranks:
        if (column, shared) not in ranks:
            ranks[column, shared] = _ranks([found[column][c] for c in shared])
        return ranks[column, shared]

    cheap_columns = [c for c in found if TASKS[c.task].cheap]
    out = []
    for downstream in found:
        if TASKS[downstream.task].cheap:
            continue
        for cheap in cheap_columns:
            # Only over what both have measured; sorted, so that equal sets are resampled alike.
            shared = tuple(sorted(found[cheap].keys() & found[downstream].keys()))
            if len(shared) < LEAST:
                continue
            rho, interval = _spearman(ranked(cheap, shared), ranked(downstream, shared))
            out.append(Correlation(cheap, downstream, len(shared), rho, interval))
    return out


def _measured_values(board: Board) -> Mapping[Column, Mapping[str, float]]:
    """Column -> checkpoint -> value of the measured checkpoints; columns in the board's order."""
    measured = {row.checkpoint for row in board.measured_rows}
    found: dict[Column, dict[str, float]] = {column: {} for column in board.columns}
    for (checkpoint, column), cell in board.cells.items():
        if checkpoint in measured and cell.value is not None:
            found[column][checkpoint] = cell.value
    return found


def write_csv(table: Sequence[Correlation], path: Path) -> None:
    """One line per pair: cheap column, downstream column, checkpoints, rho, interval."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["cheap", "downstream", "checkpoints", "spearman", "ci95_low", "ci95_high"])
    for c in table:
        low, high = c.ci95 or (None, None)
        numbers = [text_of(c.rho, ".4f"), text_of(low, ".4f"), text_of(high, ".4f")]
        writer.writerow([c.cheap.name, c.downstream.name, c.n, *numbers])
    atomic.write_text(path, text.getvalue())


def draw(table: Sequence[Correlation], stem: Path, *, limit: int = COLUMNS) -> Path | None:
    """STEM.svg and .png: rho of each cheap score (lines) with each downstream column; bold where
    the interval leaves out 0. At most `limit` columns, the headline metrics first."""
    import numpy as np

    if not table:
        return None
    # In the order of the table, but the headline metrics first: some columns may not fit.
    cheap = list(dict.fromkeys(c.cheap for c in table))
    every = dict.fromkeys(c.downstream for c in table)
    downstream = sorted(every, key=lambda column: column.metric not in HEADLINES)[:limit]
    shown = [c for c in table if c.downstream in downstream and c.rho is not None]
    values = np.full((len(cheap), len(downstream)), np.nan)
    for c in shown:
        values[cheap.index(c.cheap), downstream.index(c.downstream)] = c.rho
    height, width = 2.6 + 0.42 * len(cheap), 3.6 + 0.8 * len(downstream)
    figure, (ax,) = charts.grid(1, width=width, height=height)
    image = ax.imshow(values, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    ax.grid(visible=False)
    for c in shown:
        _write_rho(ax, c, (downstream.index(c.downstream), cheap.index(c.cheap)))
    ax.set_yticks(range(len(cheap)), list(map(_label, cheap)), fontsize=7)
    names = list(map(_label, downstream))
    ax.set_xticks(range(len(downstream)), names, fontsize=7, rotation=40, ha="right")
    most = max(c.n for c in table)
    figure.suptitle(f"Rank correlation over {most} checkpoints, 95% interval", fontsize=10)
    figure.colorbar(image, ax=ax, shrink=0.6, label="Spearman's rho")
    return charts.save(figure, stem)


def _write_rho(ax: Axes, c: Correlation, place: tuple[int, int]) -> None:
    """rho and its interval into the field at `place` (column, line)."""
    if c.rho is None:
        return
    words = f"{c.rho:+.2f}"
    if c.ci95 is not None:
        words += f"\n[{c.ci95[0]:.1f}, {c.ci95[1]:.1f}]"
    color = "white" if abs(c.rho) > DARK else "black"
    text = ax.text(*place, words, ha="center", va="center", fontsize=6, color=color)
    if c.sure:
        text.set_fontweight("bold")


def _label(column: Column) -> str:
    return f"{column.task} {column.dataset} {column.metric} ({column.protocol})"
