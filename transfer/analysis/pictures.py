"""Declares the content of RUN/analysis.json, and draws the papers' figures from it, as svg and png.

`kept-*` shows the output of projectors, where the loss was at work, of the checkpoints that have kept
one. Each panel of it also stands alone. `trunk-overview` shows the trunk's output, of all checkpoints.
The two spaces have other dimensions and scales, so no panel has both.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np
from matplotlib.axes import Axes

from backbench import charts
from backbench.runs.step_metrics import read_metrics
from backbench.transfer.analysis.statistics import (
    HistogramSummary,
    MinMaxSummary,
    finite,
)
from backbench.weights import header

BARS = 40  # of a histogram in a picture, about
# Terms of metrics.jsonl that say when a step was, and how fast
NOT_DRAWN = ("step", "epoch", "images_per_s", "waiting")
CURVE_BINS = 300


# RUN/analysis.json. null stands for what is undefined.

TRUNK, PROJECTOR = "trunk", "projector"  # the two spaces


class SpaceCurves(TypedDict):
    histograms: dict[str, HistogramSummary]  # of the statistics of an image's views
    within: HistogramSummary  # distances between images of one class
    between: HistogramSummary
    spectrum: list[float | None]  # shares of the variance
    min_max: MinMaxSummary
    min_max_gaussian: MinMaxSummary


class SpaceSummary(SpaceCurves):
    """One checkpoint in one space."""

    name: str  # as figures call it
    checkpoint: str
    method: str
    space: str
    dim: int
    numbers: dict[str, float | None]


class TrainingCurve(TypedDict):
    """metrics.jsonl of a checkpoint's pretraining, as the means of some 300 bins."""

    checkpoint: str
    step: list[int]  # the last of each bin
    terms: dict[str, list[float | None]]
    name: str


class Summary(TypedDict):
    dataset: str
    images: int
    augmentations: int
    spaces: list[SpaceSummary]
    training: list[TrainingCurve]


# Draws a statistic of all spaces, each in its colour
Panel = Callable[[Axes, Sequence[SpaceSummary], Sequence[str]], None]


def draw(summary: Summary, folder: Path) -> list[Path]:
    """Draw every figure of analysis.json into `folder`; return the svg files."""
    trunk = [s for s in summary["spaces"] if s["space"] == TRUNK]
    projected = [s for s in summary["spaces"] if s["space"] == PROJECTOR]
    images = f"{summary['dataset']}, {summary['images']} images"
    what = f"Features of {images}, {summary['augmentations']} views each"
    every = list(PANELS.values())
    out = []
    if projected:
        title = f"{what} (projector, where the loss works)"
        out.append(_figure(every, projected, folder / "kept-overview", title))
    out.append(_figure(every, trunk, folder / "trunk-overview", f"{what} (trunk)"))
    for name, panel in PANELS.items():
        stem = f"kept-{name}" if projected else f"trunk-{name}"
        out.append(_figure([panel], projected or trunk, folder / stem))
    if summary.get("training"):
        order = {s["checkpoint"]: i for i, s in enumerate(trunk)}
        out.append(_training(summary["training"], order, folder))
    return out


def _figure(
    panels: Sequence[Panel], spaces: Sequence[SpaceSummary], stem: Path, title: str = ""
) -> Path:
    """Draw panels of all spaces as one figure with one legend."""
    colors = charts.colors(len(spaces))
    figure, axes = charts.grid(len(panels), columns=3)
    for ax, panel in zip(axes, panels, strict=True):
        panel(ax, spaces, colors)
    if title:
        figure.suptitle(title, fontsize=11)
    names = [f"{s['name']} ({s['space']}, {s['dim']}-d)" for s in spaces]
    return charts.save(figure, stem, list(zip(names, colors)))


# Panels: one statistic of all checkpoints


def _histogram(
    ax: Axes,
    histogram: HistogramSummary,
    color: str,
    *,
    line: Literal["solid", "dashed"] = "solid",
) -> None:
    """Draw an outline of about BARS bars with an area of 1, filled where the line is solid."""
    counts = histogram["counts"]
    total = sum(counts)
    if not total:
        return
    merged = max(1, math.ceil(len(counts) / BARS))
    sums = [sum(counts[i : i + merged]) for i in range(0, len(counts), merged)]
    width = histogram["width"] * merged
    edges = [histogram["low"] + i * width for i in range(len(sums) + 1)]
    heights = [s / total / width for s in sums]
    ax.stairs(heights, edges, color=color, linewidth=1.4, linestyle=line)
    if line == "solid":
        ax.stairs(heights, edges, color=color, fill=True, alpha=0.15)


def _per_image(name: str, title: str, xlabel: str) -> Panel:
    """Make a panel: the histogram over images of a statistic of their views, a line at its mean."""

    def panel(ax: Axes, spaces: Sequence[SpaceSummary], colors: Sequence[str]) -> None:
        for space, color in zip(spaces, colors):
            _histogram(ax, space["histograms"][name], color)
            # A small statistic is listed in units of 1e-4.
            mean = space["numbers"].get(name)
            in_e4 = space["numbers"].get(f"{name}_e4")
            if in_e4 is not None:
                mean = 1e-4 * in_e4
            if mean is not None:
                ax.axvline(mean, color=color, linewidth=1, linestyle=":")
        ax.set(title=title, xlabel=xlabel, ylabel="density over images", ylim=(0, None))
        ax.ticklabel_format(axis="both", scilimits=(-3, 4))

    return panel


def _distances(ax: Axes, spaces: Sequence[SpaceSummary], colors: Sequence[str]) -> None:
    for space, color in zip(spaces, colors):
        _histogram(ax, space["within"], color)
        _histogram(ax, space["between"], color, line="dashed")
    ax.set(
        title="Distances within (solid), between classes",
        xlabel="distance of unit features",
        ylabel="density over pairs",
        ylim=(0, None),
    )


def _min_max(ax: Axes, spaces: Sequence[SpaceSummary], colors: Sequence[str]) -> None:
    for space, color in zip(spaces, colors):
        for curve, style in (
            (space["min_max"], "o-"),
            (space["min_max_gaussian"], ":"),
        ):
            dims = []
            contrasts = []
            for dim, contrast in zip(curve["dims"], curve["contrast"]):
                # What is undefined or 0 has no place on a logarithmic axis.
                if contrast:
                    dims.append(dim)
                    contrasts.append(contrast)
            ax.plot(dims, contrasts, style, color=color, markersize=3, linewidth=1.4)
            if dims:
                ax.set_xscale("log", base=2)
                ax.set_yscale("log")
    ax.set(
        title="Contrast of distances, CLLR Theorem 1",
        xlabel="dimensions kept (dotted: Gaussian)",
        ylabel="(max - min) / min",
    )


def _spectrum(ax: Axes, spaces: Sequence[SpaceSummary], colors: Sequence[str]) -> None:
    lowest = 1.0
    for space, color in zip(spaces, colors):
        # What is 0 or undefined is a gap in the line.
        shares = [share or math.nan for share in space["spectrum"]]
        ax.plot(range(1, len(shares) + 1), shares, color=color, linewidth=1.4)
        lowest = min([lowest, *(share for share in shares if share > 0)])
    if lowest < 1.0:
        ax.set_yscale("log")
        ax.set_ylim(bottom=max(lowest / 2, 1e-12))
    ax.set_xscale("log")
    ax.set(
        title="Spectrum of the covariance",
        xlabel="direction",
        ylabel="share of the variance",
    )


def _alignment(ax: Axes, spaces: Sequence[SpaceSummary], colors: Sequence[str]) -> None:
    for space, color in zip(spaces, colors):
        x = space["numbers"].get("alignment")
        y = space["numbers"].get("uniformity")
        if x is not None and y is not None:
            ax.plot([x], [y], "o", color=color, markersize=8)
    ax.margins(0.2)
    ax.set(
        title="Alignment and uniformity",
        xlabel="alignment (lower: closer views)",
        ylabel="uniformity (lower: wider spread)",
    )


def _rank(ax: Axes, spaces: Sequence[SpaceSummary], colors: Sequence[str]) -> None:
    for i, (space, color) in enumerate(zip(spaces, colors)):
        value = space["numbers"].get("rankme")
        if value is not None:
            bar = ax.bar([i], [value], color=color, alpha=0.8)
            ax.bar_label(bar, fmt="%.3g", fontsize=8)
        kind = space["numbers"].get("collapse")
        if kind:
            text = "collapsed" if kind > 1 else "few live\ndirections"
            ax.text(i, 0, text, ha="center", va="bottom", fontsize=7)
    ax.margins(y=0.15)
    ax.set_xticks([])
    ax.set(title="RankMe", ylabel="effective dimensions")


def _probes(ax: Axes, spaces: Sequence[SpaceSummary], colors: Sequence[str]) -> None:
    # Two groups of bars, at 0 and 1, each 0.8 wide and shared by the checkpoints.
    width = 0.8 / max(1, len(spaces))
    for i, (space, color) in enumerate(zip(spaces, colors)):
        for group, number in enumerate(("knn", "fewshot")):
            value = space["numbers"].get(number)
            if value is not None:
                middle = group + (i + 0.5) * width - 0.4
                bar = ax.bar([middle], [value], width, color=color, alpha=0.8)
                ax.bar_label(bar, fmt="%.0f", fontsize=7)
    ax.set_xticks([0, 1], ["kNN", "few labels"])
    ax.margins(y=0.15)
    ax.set(title="Probes on the sample", ylabel="top-1, percent")


PANELS: dict[str, Panel] = {
    "nuclear_norm": _per_image(
        "nuclear_norm", "Nuclear norm of an image's views", "nuclear norm"
    ),
    "view_cosine": _per_image(
        "view_cosine", "Similarity of an image's views", "mean cosine of all pairs"
    ),
    "covariance_diagonal": _per_image(
        "covariance_diagonal",
        "Variance over an image's views",
        "mean diagonal of the covariance",
    ),
    "distances": _distances,
    "min_max": _min_max,
    "spectrum": _spectrum,
    "alignment_uniformity": _alignment,
    "rank": _rank,
    "probes": _probes,
}


# Training curves


def training_curves(
    files: Sequence[Path], names: Mapping[str, str]
) -> list[TrainingCurve]:
    """Read metrics.jsonl beside each checkpoint file that still lies in the folder of its
    pretraining. `names` are those of the analyzed checkpoints, by digest; each has one curve at
    most."""
    out: list[TrainingCurve] = []
    wanted = set(names)
    for file in files:
        rows = [row for row in read_metrics(file.parent) if "step" in row]
        digest = header.digest(file)
        if len(rows) < 2 or digest is None or digest not in wanted:
            continue
        wanted.remove(digest)
        # 1. At most CURVE_BINS groups of neighbouring rows.
        size = math.ceil(len(rows) / CURVE_BINS)
        bins = [rows[i : i + size] for i in range(0, len(rows), size)]
        # 2. The names of all numbers; not every row has every term.
        terms: set[str] = set()
        for row in rows:
            for name, value in row.items():
                if isinstance(value, int | float):
                    terms.add(name)
        drawn = sorted(terms - set(NOT_DRAWN))
        curve: TrainingCurve = {
            "checkpoint": digest,
            "step": [int(part[-1]["step"]) for part in bins],
            "terms": {name: _bin_means(bins, name) for name in drawn},
            "name": names[digest],
        }
        out.append(curve)
    return out


def _bin_means(
    bins: Sequence[Sequence[Mapping[str, object]]], name: str
) -> list[float | None]:
    """Return the mean of a term over each bin's rows that have it; None where none has."""
    out: list[float | None] = []
    for rows in bins:
        values = []
        for row in rows:
            value = row.get(name)
            if isinstance(value, int | float):
                values.append(value)
        out.append(finite(sum(values) / len(values)) if values else None)
    return out


def _training(
    curves: Sequence[TrainingCurve], order: Mapping[str, int], folder: Path
) -> Path:
    """Draw each term of metrics.jsonl over the steps (ARB Fig. 3); `order` decides the colours."""
    # The terms that the papers draw come first, the rest by name.
    first = ("loss", "embedding_distance", "base_distance", "variance")
    there: set[str] = set()
    for curve in curves:
        there |= curve["terms"].keys()
    terms = [t for t in first if t in there] + sorted(there - set(first))
    colors = charts.colors(max(order.values()) + 1)
    figure, axes = charts.grid(len(terms), columns=3)
    for ax, term in zip(axes, terms, strict=True):
        for curve in curves:
            values = curve["terms"].get(term)
            if values:
                color = colors[order[curve["checkpoint"]]]
                # None becomes nan, which is a gap in the line.
                ax.plot(
                    curve["step"], np.array(values, float), color=color, linewidth=1.3
                )
        ax.set(title=term.replace("_", " "), xlabel="step")
    legend = [(c["name"], colors[order[c["checkpoint"]]]) for c in curves]
    return charts.save(figure, folder / "training", legend)
