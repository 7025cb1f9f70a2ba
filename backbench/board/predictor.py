"""The early predictor: the rank correlation of each cheap score with each downstream column, with
its interval over checkpoints (stats/correlation.py), which is wide if there are few."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backbench import charts
from backbench.board.board import AVERAGE, Board, Column, text_of
from backbench.board.export import write_lines
from backbench.stats import correlation
from backbench.stats.confidence import Interval
from backbench.tasks import TASKS

# Checkpoints below which a correlation says nothing: with five, a bootstrap called every 0.8 sure
LEAST = 8
HEADLINES = (
    "top1",
    "mean_per_class",
    AVERAGE,
    "AP",
    "box_AP",
    "mask_AP",
    "keypoint_AP",
    "bbox_AP",
    "segm_AP",
)
COLUMNS = 24  # of the figure; the csv has everything
DARK = 0.7  # correlations whose colour black letters cannot be read on


@dataclass(frozen=True)
class Correlation:
    """rho over the `n` checkpoints that have both; None if one of the two is constant."""

    cheap: Column
    downstream: Column
    n: int
    rho: float | None
    ci95: Interval | None

    @property
    def sure(self) -> bool:
        """True if the interval leaves out 0."""
        return self.ci95 is not None and not self.ci95[0] <= 0 <= self.ci95[1]


def correlations(board: Board) -> list[Correlation]:
    """Correlate each cheap score with each downstream column that LEAST checkpoints share."""
    values: dict[Column, dict[str, float]] = {column: {} for column in board.columns}
    measured = {row.checkpoint for row in board.measured_rows}
    for (checkpoint, column), cell in board.cells.items():
        if checkpoint in measured and cell.value is not None:
            values[column][checkpoint] = cell.value
    out = []
    for downstream, far in values.items():
        if TASKS[downstream.task].cheap:
            continue
        for cheap, near in values.items():
            # Only over what both have measured; sorted, so that equal sets are resampled alike.
            shared = sorted(near.keys() & far.keys())
            if TASKS[cheap.task].cheap and len(shared) >= LEAST:
                x, y = ([of[c] for c in shared] for of in (near, far))
                rho = correlation.spearman(x, y)
                out.append(Correlation(cheap, downstream, len(shared), *rho))
    correlation.resampled_ranks.cache_clear()
    return out


def write_csv(table: Sequence[Correlation], path: Path) -> None:
    """Write a line for each pair: cheap column, downstream column, checkpoints, rho, interval."""
    head = ("cheap", "downstream", "checkpoints", "spearman", "ci95_low", "ci95_high")
    lines: list[tuple[object, ...]] = [head]
    for c in table:
        low, high = c.ci95 or (None, None)
        numbers = [text_of(c.rho, ".4f"), text_of(low, ".4f"), text_of(high, ".4f")]
        lines.append((c.cheap.name, c.downstream.name, c.n, *numbers))
    write_lines(path, lines)


def draw(table: Sequence[Correlation], stem: Path) -> Path | None:
    """Draw STEM.svg and .png: rho of each cheap score (lines) with each downstream column, bold if
    the interval leaves out 0. There are at most COLUMNS columns, the headline metrics first."""
    if not table:
        return None
    # In the order of the table, but the headline metrics first: some columns may not fit.
    cheap = list(dict.fromkeys(c.cheap for c in table))
    every = dict.fromkeys(c.downstream for c in table)
    downstream = sorted(every, key=lambda column: column.metric not in HEADLINES)[
        :COLUMNS
    ]
    shown = [c for c in table if c.downstream in downstream and c.rho is not None]
    values = np.full((len(cheap), len(downstream)), np.nan)
    for c in shown:
        values[cheap.index(c.cheap), downstream.index(c.downstream)] = c.rho
    height, width = 2.6 + 0.42 * len(cheap), 3.6 + 0.8 * len(downstream)
    figure, (ax,) = charts.grid(1, width=width, height=height)
    image = ax.imshow(values, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    ax.grid(visible=False)
    for c in shown:
        words = f"{c.rho:+.2f}"
        if c.ci95 is not None:
            words += f"\n[{c.ci95[0]:.1f}, {c.ci95[1]:.1f}]"
        place = (downstream.index(c.downstream), cheap.index(c.cheap))
        text = ax.annotate(words, place, ha="center", va="center", fontsize=6)
        text.set_color("white" if abs(c.rho or 0) > DARK else "black")
        if c.sure:
            text.set_fontweight("bold")
    ax.set_yticks(range(len(cheap)), list(map(_label, cheap)), fontsize=7)
    names = list(map(_label, downstream))
    ax.set_xticks(range(len(downstream)), names, fontsize=7, rotation=40, ha="right")
    most = max(c.n for c in table)
    figure.suptitle(
        f"Rank correlation over {most} checkpoints, 95% interval", fontsize=10
    )
    figure.colorbar(image, ax=ax, shrink=0.6, label="Spearman's rho")
    return charts.save(figure, stem)


def _label(column: Column) -> str:
    return f"{column.task} {column.dataset} {column.metric} ({column.protocol})"
