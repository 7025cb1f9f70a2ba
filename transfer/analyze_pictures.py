"""The papers' figures from the summary that `backbench analyze` writes: svg and png, all checkpoints in each figure.

`kept-*` shows each checkpoint in the space where its loss was at work (its projector's output where that was kept, the
trunk's otherwise; the legend says which), each panel also alone; `trunk-overview` shows all of them in the trunk's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from backbench import charts

Spaces = Sequence[Mapping[str, Any]]


def draw(summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """Every figure of analysis.json into `folder`; returns the svg files."""
    what = (
        f"{summary['dataset']}, {summary['images']} images, {summary['augmentations']} views each"
    )
    trunk = [s for s in summary["spaces"] if s["space"] == "trunk"]
    projected = {s["checkpoint"]: s for s in summary["spaces"] if s["space"] == "projector"}
    kept = [projected.get(s["checkpoint"], s) for s in trunk]
    sets = {"kept": kept, "trunk": trunk} if projected else {"trunk": trunk}
    out = []
    for prefix, spaces in sets.items():
        colors = charts.colors(len(spaces))
        figure, axes = charts.grid(len(PANELS), columns=3)
        for ax, panel in zip(axes, PANELS.values(), strict=True):
            panel(ax, spaces, colors)
        title = "where the loss works" if prefix == "kept" else "trunk"
        figure.suptitle(f"Features of {what} ({title})", fontsize=11)
        names = [(_label(s), color) for s, color in zip(spaces, colors)]
        charts.legend_below(figure, names)
        out.append(charts.save(figure, folder / f"{prefix}-overview"))
        for name, panel in PANELS.items() if prefix == next(iter(sets)) else ():
            figure, (ax,) = charts.grid(1)
            panel(ax, spaces, colors)
            charts.legend_below(figure, names)
            out.append(charts.save(figure, folder / f"{prefix}-{name}"))
    if summary.get("training"):
        out.append(
            _training(
                summary["training"], {s["checkpoint"]: i for i, s in enumerate(trunk)}, folder
            )
        )
    return out


def _label(space: Mapping[str, Any]) -> str:
    return f"{space['name']} ({space['space']}, {space['dim']}-d)"


def _histogram(
    ax: Axes, histogram: Mapping[str, Any], color: str, *, bars: int = 40, **style: Any
) -> None:
    """A filled outline of about `bars` bars, scaled to an area of 1."""
    counts = histogram["counts"]
    merged = max(1, math.ceil(len(counts) / bars))
    sums = [sum(counts[i : i + merged]) for i in range(0, len(counts), merged)]
    width, total = histogram["width"] * merged, sum(sums)
    if not total:
        return
    edges = [histogram["low"] + i * width for i in range(len(sums) + 1)]
    heights = [s / total / width for s in sums]
    ax.stairs(heights, edges, color=color, linewidth=1.4, **style)
    if "linestyle" not in style:
        ax.stairs(heights, edges, color=color, fill=True, alpha=0.15)


def _per_image(
    name: str, title: str, xlabel: str, number: str, scale: float = 1.0
) -> Callable[..., None]:
    def panel(ax: Axes, spaces: Spaces, colors: Sequence[str]) -> None:
        for space, color in zip(spaces, colors):
            _histogram(ax, space["histograms"][name], color)
            value = space["numbers"].get(number)
            if value is not None:
                ax.axvline(value * scale, color=color, linewidth=1, linestyle=":")
        ax.set(title=title, xlabel=xlabel, ylabel="density over images", ylim=(0, None))
        ax.ticklabel_format(axis="both", scilimits=(-3, 4))

    return panel


def _distances(ax: Axes, spaces: Spaces, colors: Sequence[str]) -> None:
    for space, color in zip(spaces, colors):
        _histogram(ax, space["within"], color)
        _histogram(ax, space["between"], color, linestyle="--")
    ax.set(
        title="Distances within (solid), between classes",
        xlabel="distance of unit features",
        ylabel="density over pairs",
        ylim=(0, None),
    )


def _min_max(ax: Axes, spaces: Spaces, colors: Sequence[str]) -> None:
    for space, color in zip(spaces, colors):
        for key, style in (("min_max", "o-"), ("min_max_gaussian", ":")):
            curve = space[key]
            points = [(d, c) for d, c in zip(curve["dims"], curve["contrast"]) if c]
            ax.plot(
                [p[0] for p in points],
                [p[1] for p in points],
                style,
                color=color,
                markersize=3,
                linewidth=1.4,
            )
            if points:
                ax.set_xscale("log", base=2)
                ax.set_yscale("log")
    ax.set(
        title="Contrast of distances, CLLR Theorem 1",
        xlabel="dimensions kept (dotted: Gaussian)",
        ylabel="(max - min) / min",
    )


def _spectrum(ax: Axes, spaces: Spaces, colors: Sequence[str]) -> None:
    lowest = 1.0
    for space, color in zip(spaces, colors):
        values = [v if v is not None and v > 0 else math.nan for v in space["spectrum"]]
        ax.plot(range(1, len(values) + 1), values, color=color, linewidth=1.4)
        lowest = min([lowest, *(v for v in values if v > 0)])
    if lowest < 1.0:
        ax.set_yscale("log")
        ax.set_ylim(bottom=max(lowest / 2, 1e-12))
    ax.set_xscale("log")
    ax.set(title="Spectrum of the covariance", xlabel="direction", ylabel="share of the variance")


def _alignment(ax: Axes, spaces: Spaces, colors: Sequence[str]) -> None:
    for space, color in zip(spaces, colors):
        x, y = space["numbers"].get("alignment"), space["numbers"].get("uniformity")
        if x is not None and y is not None:
            ax.plot([x], [y], "o", color=color, markersize=8)
    ax.margins(0.2)
    ax.set(
        title="Alignment and uniformity",
        xlabel="alignment (lower: closer views)",
        ylabel="uniformity (lower: wider spread)",
    )


def _rank(ax: Axes, spaces: Spaces, colors: Sequence[str]) -> None:
    for i, (space, color) in enumerate(zip(spaces, colors)):
        value = space["numbers"].get("rankme")
        if value is not None:
            bar = ax.bar([i], [value], color=color, alpha=0.8)
            ax.bar_label(bar, fmt="%.3g", fontsize=8)
        kind = space["numbers"].get("collapse")
        if kind:
            ax.text(
                i,
                0,
                "collapsed" if kind > 1 else "few live\ndirections",
                ha="center",
                va="bottom",
                fontsize=7,
            )
    ax.margins(y=0.15)
    ax.set_xticks([])
    ax.set(title="RankMe", ylabel="effective dimensions")


def _probes(ax: Axes, spaces: Spaces, colors: Sequence[str]) -> None:
    width = 0.8 / max(1, len(spaces))
    for i, (space, color) in enumerate(zip(spaces, colors)):
        for j, number in enumerate(("knn", "fewshot")):
            value = space["numbers"].get(number)
            if value is not None:
                bar = ax.bar([j + (i + 0.5) * width - 0.4], [value], width, color=color, alpha=0.8)
                ax.bar_label(bar, fmt="%.0f", fontsize=7)
    ax.set_xticks([0, 1], ["kNN", "few labels"])
    ax.margins(y=0.15)
    ax.set(title="Probes on the sample", ylabel="top-1, percent")


PANELS: dict[str, Callable[[Axes, Spaces, Sequence[str]], None]] = {
    "nuclear_norm": _per_image(
        "nuclear_norm", "Nuclear norm of an image's views", "nuclear norm", "nuclear_norm"
    ),
    "view_cosine": _per_image(
        "view_cosine", "Similarity of an image's views", "mean cosine of all pairs", "view_cosine"
    ),
    "covariance_diagonal": _per_image(
        "covariance_diagonal",
        "Variance over an image's views",
        "mean diagonal of the covariance",
        "covariance_diagonal_e4",
        1e-4,
    ),
    "distances": _distances,
    "min_max": _min_max,
    "spectrum": _spectrum,
    "alignment_uniformity": _alignment,
    "rank": _rank,
    "probes": _probes,
}


def _training(curves: Sequence[Mapping[str, Any]], place: Mapping[str, int], folder: Path) -> Path:
    """Each term of metrics.jsonl over the steps (ARB Fig. 3)."""
    first = ("loss", "embedding_distance", "base_distance", "variance")
    there = {name for curve in curves for name in curve["terms"]}
    terms = [t for t in first if t in there] + sorted(there - set(first))
    colors = charts.colors(max(place.values()) + 1)
    figure, axes = charts.grid(len(terms), columns=3)
    for ax, term in zip(axes, terms, strict=True):
        for curve in curves:
            values = curve["terms"].get(term)
            if values:
                shown = [math.nan if v is None else v for v in values]
                ax.plot(
                    curve["step"], shown, color=colors[place[curve["checkpoint"]]], linewidth=1.3
                )
        ax.set(title=term.replace("_", " "), xlabel="step")
    charts.legend_below(figure, [(c["name"], colors[place[c["checkpoint"]]]) for c in curves])
    return charts.save(figure, folder / "training")
