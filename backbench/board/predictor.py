"""Which cheap score may be trusted: its rank correlation with each downstream column over all checkpoints present.

Spearman's rho with a 95% percentile bootstrap over checkpoints (above MANY checkpoints, where that takes long and adds
nothing, Fisher's z with the variance of Bonett and Wright, 2000). With few checkpoints the intervals are wide, and they
are shown for that reason.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbench import charts
from backbench.board.board import MEASURED, Board, Column
from backbench.runs import atomic
from backbench.tasks import TASKS

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST = 4  # checkpoints below which a correlation says nothing
RESAMPLES = 1000
MANY = 100


@dataclass(frozen=True)
class Correlation:
    """rho over `n` checkpoints that have both; None where one of the two is constant."""

    cheap: Column
    downstream: Column
    n: int
    rho: float | None
    ci95: tuple[float, float] | None


def spearman(
    x: Sequence[float], y: Sequence[float], *, seed: int = 0
) -> tuple[float | None, tuple[float, float] | None]:
    """rho with ties at their mean rank, and its interval; None where undefined, and no interval where too few resamples
    have a rho."""
    import numpy as np

    rho = float(
        _correlate(_ranks(np.asarray(x, float)[None]), _ranks(np.asarray(y, float)[None]))[0]
    )
    if np.isnan(rho):
        return None, None
    if len(x) > MANY:
        return rho, _fisher(rho, len(x))
    index = _resamples(len(x), seed)
    return rho, _interval(_correlate(_ranks(np.asarray(x)[index]), _ranks(np.asarray(y)[index])))


def _resamples(n: int, seed: int) -> NDArray:
    import numpy as np

    return np.random.Generator(np.random.PCG64(seed)).integers(0, n, size=(RESAMPLES, n))


def _ranks(values: NDArray) -> NDArray:
    """(B, n) -> ranks, centred and of unit length; nan rows where all values are equal."""
    import numpy as np
    from scipy.stats import rankdata

    ranks = rankdata(values, axis=1)
    ranks = ranks - ranks.mean(1, keepdims=True)
    length = np.sqrt((ranks**2).sum(1, keepdims=True))
    return ranks / np.where(length > 1e-9, length, np.nan)


def _correlate(a: NDArray, b: NDArray) -> NDArray:
    return (a * b).sum(1)


def _fisher(rho: float, n: int) -> tuple[float, float]:
    z = math.atanh(max(-0.999999, min(0.999999, rho)))
    half = 1.959964 * math.sqrt((1 + rho**2 / 2) / (n - 3))
    return math.tanh(z - half), math.tanh(z + half)


def _interval(values: NDArray) -> tuple[float, float] | None:
    import numpy as np

    values = values[~np.isnan(values)]
    if len(values) < RESAMPLES / 2:
        return None
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def correlations(board: Board) -> list[Correlation]:
    """Every cheap score with every downstream column that share at least LEAST measured checkpoints."""
    import numpy as np

    found: dict[Column, dict[str, float]] = {}
    measured = {row.checkpoint for row in board.rows if row.source == MEASURED}
    for (checkpoint, column), cell in board.cells.items():
        if checkpoint in measured and cell.value is not None:
            found.setdefault(column, {})[checkpoint] = cell.value
    known: dict[tuple[Column, tuple[str, ...]], tuple[NDArray, NDArray]] = {}

    def ranks(column: Column, shared: tuple[str, ...]) -> tuple[NDArray, NDArray]:
        if (column, shared) not in known:
            values = np.array([found[column][c] for c in shared])
            resampled = values[_resamples(len(shared), 0)] if len(shared) <= MANY else values[None]
            known[column, shared] = _ranks(values[None]), _ranks(resampled)
        return known[column, shared]

    out = []
    columns = [c for c in board.columns if c in found]
    for downstream in (c for c in columns if not TASKS[c.task].cheap):
        for cheap in (c for c in columns if TASKS[c.task].cheap):
            shared = tuple(sorted(found[cheap].keys() & found[downstream].keys()))
            if len(shared) < LEAST:
                continue
            (x, many_x), (y, many_y) = ranks(cheap, shared), ranks(downstream, shared)
            rho = float(_correlate(x, y)[0])
            undefined = np.isnan(rho)
            if undefined:
                interval = None
            elif len(shared) > MANY:
                interval = _fisher(rho, len(shared))
            else:
                interval = _interval(_correlate(many_x, many_y))
            out.append(
                Correlation(cheap, downstream, len(shared), None if undefined else rho, interval)
            )
    return out


def write_csv(table: Sequence[Correlation], path: Path) -> None:
    """One line per pair: cheap column, downstream column, checkpoints, rho, interval."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["cheap", "downstream", "checkpoints", "spearman", "ci95_low", "ci95_high"])
    for c in table:
        numbers = [c.rho, *(c.ci95 or (None, None))]
        writer.writerow(
            [
                c.cheap.name,
                c.downstream.name,
                c.n,
                *("" if v is None else f"{v:.4f}" for v in numbers),
            ]
        )
    atomic.write_text(path, text.getvalue())


def draw(table: Sequence[Correlation], stem: Path, *, limit: int = 24) -> Path | None:
    """STEM.svg and .png: rho of each cheap score (lines) with each downstream column; bold where the interval leaves
    out 0. At most `limit` columns, the headline metrics first."""
    headline = (
        "top1",
        "mean_per_class",
        "average",
        "AP",
        "box_AP",
        "mask_AP",
        "keypoint_AP",
        "bbox_AP",
        "segm_AP",
    )
    downstream = sorted(
        dict.fromkeys(c.downstream for c in table), key=lambda c: c.metric not in headline
    )[:limit]
    cheap = list(dict.fromkeys(c.cheap for c in table))
    if not cheap:
        return None
    cells = {(c.cheap, c.downstream): c for c in table}
    import numpy as np

    values = np.full((len(cheap), len(downstream)), np.nan)
    for (row, column), c in cells.items():
        if column in downstream and c.rho is not None:
            values[cheap.index(row), downstream.index(column)] = c.rho
    height, width = 1.9 + 0.3 * len(cheap), 4.2 + 0.72 * len(downstream)
    figure, (ax,) = charts.grid(1, width=width, height=height)
    shown = ax.imshow(values, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    ax.grid(visible=False)
    for (row, column), c in cells.items():
        if column in downstream and c.rho is not None:
            sure = c.ci95 is not None and not c.ci95[0] <= 0 <= c.ci95[1]
            interval = f"\n[{c.ci95[0]:.1f}, {c.ci95[1]:.1f}]" if c.ci95 else ""
            color = "white" if abs(c.rho) > 0.7 else "black"
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6, "color": color}
            text = f"{c.rho:+.2f}{interval}"
            place = downstream.index(column), cheap.index(row)
            ax.text(*place, text, fontweight="bold" if sure else "normal", **style)
    ax.set_yticks(range(len(cheap)), [_label(c) for c in cheap], fontsize=7)
    ax.set_xticks(
        range(len(downstream)), [_label(c) for c in downstream], fontsize=7, rotation=40, ha="right"
    )
    most = max(c.n for c in table)
    ax.set_title(f"Spearman's rho over {most} checkpoints, 95% interval", fontsize=10)
    figure.colorbar(shown, ax=ax, shrink=0.6)
    return charts.save(figure, stem)


def _label(column: Column) -> str:
    return f"{column.task} {column.dataset} {column.metric} ({column.protocol})"
