"""Draws charts as svg and png in one look.

The same numbers give the same bytes. pyplot, which keeps state of its own, is not used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.runs import atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette without black: colour-blind readers tell the colours apart, also in print
PALETTE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#8C6D1F",
    "#7A7A7A",
)


def colors(count: int) -> list[str]:
    """Return a colour for each of `count` lines: of the palette, or of a colour map if it is short."""
    if count <= len(PALETTE):
        return list(PALETTE[:count])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["turbo"]((i + 0.5) / count)) for i in range(count)]


def grid(
    count: int, *, columns: int = 1, width: float = 4.2, height: float = 3.0
) -> tuple[Figure, list[Axes]]:
    """Make a figure with `count` axes in rows of `columns`, each of `width` x `height` inches."""
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure(
        figsize=(width * columns, height * rows + 0.4), layout="constrained"
    )
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(count)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=8)
        ax.title.set_fontsize(10)
        ax.xaxis.label.set_fontsize(9)
        ax.yaxis.label.set_fontsize(9)
    return figure, axes


def save(figure: Figure, stem: Path, legend: Sequence[tuple[str, str]] = ()) -> Path:
    """Write STEM.svg and STEM.png, without a date or version in them; return the svg's path.

    `legend` has (name, colour) of each line, and stands under all axes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

    if legend:
        handles = [
            Line2D([], [], color=color, linewidth=3, label=name)
            for name, color in legend
        ]
        # A name takes about 3.4 inches
        fitting = max(1, int(figure.get_figwidth() // 3.4))
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=min(len(legend), fitting),
            fontsize=8,
            frameon=False,
        )
    # A dollar in a name is a dollar, and begins no formula. On a scale's ticks it does begin one
    for text in figure.findobj(Text):
        if "$" in text.get_text() and "\\mathdefault" not in text.get_text():
            text.set_parse_math(False)
    png = stem.with_name(f"{stem.name}.png")
    svg = stem.with_name(f"{stem.name}.svg")
    # Without the salt, the svg's ids would be drawn at random. Text is written as paths, so that the
    # reader needs no font
    with rc_context({"svg.hashsalt": stem.name, "svg.fonttype": "path"}):
        # The places of all axes are found once, not again for each file
        FigureCanvasAgg(figure)
        layout = figure.get_layout_engine()
        if layout is not None:
            layout.execute(figure)
        figure.set_layout_engine("none")
        figure.set_dpi(130)
        # These are the canvases' own methods, because `savefig` draws every figure twice
        with atomic.atomic_path(png) as temporary:
            FigureCanvasAgg(figure).print_png(temporary, metadata={"Software": None})
        with atomic.atomic_path(svg) as temporary:
            metadata = {"Date": None, "Creator": None}
            FigureCanvasSVG(figure).print_svg(temporary, metadata=metadata)
    return svg
