"""Find ablations among the results, and draw them with error bars over seeds.

A grid's `vary` names its checkpoints `NAME key=value [key=value]`, all seeds of a point alike. Any
rows with such names are an ablation, whoever made them.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from backbench import charts
from backbench.board.board import Board, Column, Row, joined, text_of
from backbench.board.export import write_lines
from backbench.tasks import ORDER, TASKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A value is a list, a mapping, or a word without a space. A name is words, then such pairs only.
_VALUE = r"\[.*?\]|\{.*?\}|\S+"
_PAIR = re.compile(rf" ([\w.]+)=({_VALUE})")
_NAME = re.compile(rf"(.+?)((?: [\w.]+=(?:{_VALUE}))+)")
PANELS = 9  # of one figure; the csv has everything
# The statistics of `analyze` that are drawn, behind the accuracies
SHOWN = ("nuclear_norm", "view_cosine", "rankme", "class_overlap")
# A top-5 or an AP50 moves along with the metric that it belongs to, so it has no panel.
MOVES_ALONG = ("top5", "AP50", "AP75")
TICK = 12  # letters under an axis


class Setting(NamedTuple):
    """One point of an ablation. The first key is the axis; the other values name a curve."""

    name: str
    values: tuple[str, ...]

    @property
    def curve(self) -> Setting:
        return Setting(self.name, self.values[1:])


@dataclass
class Ablation:
    """Settings with the same keys; `points` are the checkpoints of each setting, one per seed."""

    keys: tuple[str, ...]
    points: dict[Setting, list[Row]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        names = ", ".join(sorted({setting.name for setting in self.points}))
        return f"{names}: {' and '.join(self.keys)}"


def parse(name: str) -> tuple[str, dict[str, str]] | None:
    """`lorac beta=2 tau=0.1` -> ("lorac", {"beta": "2", "tau": "0.1"}); None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return match[1], dict(_PAIR.findall(match[2]))


def find(board: Board) -> list[Ablation]:
    """Find the ablations of two points or more: one per set of keys, a point with all its seeds."""
    by_keys: dict[tuple[str, ...], Ablation] = {}
    for row in board.measured_rows:
        parsed = parse(row.name)
        if parsed is None:
            continue
        name, pairs = parsed
        ablation = by_keys.setdefault(tuple(pairs), Ablation(tuple(pairs)))
        # The board says of a name whether its trunk was pretrained with `--fast`.
        shown = board.name(replace(row, name=name))
        setting = Setting(shown, tuple(pairs.values()))
        ablation.points.setdefault(setting, []).append(row)
    return [ablation for ablation in by_keys.values() if len(ablation.points) > 1]


def _order(value: str) -> tuple[int, float, str]:
    """Return a key to sort values by: numbers by size, then words."""
    try:
        return (0, float(value), value)
    except ValueError:
        return (1, 0.0, value)


def _setting_order(setting: Setting) -> tuple[object, ...]:
    """Return a key to sort settings (or curves) by: the name, then each value."""
    return (setting.name, *map(_order, setting.values))


# The values of a column over the seeds of each setting
Measured = Mapping[Setting, Sequence[float]]


def measure(ablation: Ablation, board: Board, column: Column) -> Measured:
    """Return the points of the settings that have a value in `column`."""
    out = {}
    for setting, rows in ablation.points.items():
        values = []
        for row in rows:
            cell = board.cell(row, column)
            if cell is not None and cell.value is not None:
                values.append(cell.value)
        if values:
            out[setting] = values
    return out


def _spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation over seeds; None for one seed."""
    return statistics.stdev(values) if len(values) > 1 else None


def columns(ablation: Ablation, board: Board) -> list[Column]:
    """Return the columns with two points or more: accuracies first, then feature statistics."""
    several = [c for c in board.columns if len(measure(ablation, board, c)) > 1]
    return sorted(several, key=lambda c: (not TASKS[c.task].ranked, ORDER[c.task]))


def _panels(every: Sequence[Column]) -> list[Column]:
    """Return the columns of the figure: accuracies, then feature statistics.

    One panel is left for the norm, and two of the statistics have a place at least, if there are
    any.
    """
    accuracies = []
    features = []
    for column in every:
        if column.task == "analyze":
            if column.metric in SHOWN:
                features.append(column)
        # A top-5 or an AP50 has no panel beside its main metric.
        elif not column.metric.startswith(MOVES_ALONG):
            accuracies.append(column)
    features.sort(key=lambda column: SHOWN.index(column.metric))
    most = PANELS - 1
    # The accuracies come first, but leave room for two statistics.
    room = max(2, most - len(accuracies))
    features = features[:room]
    accuracies = accuracies[: most - len(features)]
    return [*accuracies, *features]


def draw(ablation: Ablation, board: Board, stem: Path) -> Path | None:
    """Write STEM.svg, .png and .csv: each column over the first key, a line per name and other
    values. Error bars are one standard deviation over seeds, dots the single seeds. If a nuclear
    norm was measured, the last panel shows the first accuracy over it (LORAC Fig. 3c)."""
    chosen = {
        column: measure(ablation, board, column)
        for column in _panels(columns(ablation, board))
    }
    if not chosen:
        return None
    # 1. The first key runs along the axis. The rest of a setting is a curve, of one colour
    #    everywhere.
    ticks = sorted({setting.values[0] for setting in ablation.points}, key=_order)
    curves = sorted({setting.curve for setting in ablation.points}, key=_setting_order)
    colors = dict(zip(curves, charts.colors(len(curves))))
    # 2. LORAC Fig. 3c needs a norm and an accuracy: then there is one panel more than columns.
    norm = next((c for c in chosen if c.metric == "nuclear_norm"), None)
    first = next((c for c in chosen if c.task != "analyze"), None)
    panels = len(chosen)
    if norm is not None and first is not None:
        panels += 1
    figure, axes = charts.grid(panels, columns=3)
    for ax, (column, measured) in zip(axes, chosen.items()):
        _draw_panel(ax, measured, ticks, colors)
        what = joined(", ", column.task, column.dataset, column.engine)
        ax.set(
            title=f"{what}: {column.metric}",
            xlabel=ablation.keys[0],
            ylabel=column.protocol,
        )
    if norm is not None and first is not None:
        _draw_against(axes[-1], chosen[norm], chosen[first], colors)
        axes[-1].set(
            title=f"{first.task} over nuclear norm",
            xlabel="nuclear norm",
            ylabel=first.metric,
        )
    # 3. The title says of how many seeds, at most, a point is the mean.
    seeds = max(len(values) for points in chosen.values() for values in points.values())
    over = "one seed"
    if seeds > 1:
        over = f"mean and standard deviation over {seeds} seeds"
    figure.suptitle(f"{ablation.title} ({over})", fontsize=11)
    # 4. The legend names the curves.
    legend = []
    for curve, color in colors.items():
        pairs = zip(ablation.keys[1:], curve.values)
        words = [curve.name, *(f"{key}={value}" for key, value in pairs)]
        legend.append((" ".join(words), color))
    _write_csv(ablation, board, stem.with_name(f"{stem.name}.csv"))
    return charts.save(figure, stem, legend)


def _draw_panel(
    ax: Axes, measured: Measured, ticks: Sequence[str], colors: Mapping[Setting, str]
) -> None:
    """Draw every curve of one column over the places of `ticks`."""
    for nth, (curve, color) in enumerate(colors.items()):
        # Curves share 0.12 of a tick, so that their error bars do not cover each other.
        shift = 0.12 * (nth - (len(colors) - 1) / 2) / max(1, len(colors) - 1)
        x, means, bars, seeds = [], [], [], []
        for place, tick in enumerate(ticks):
            values = measured.get(Setting(curve.name, (tick, *curve.values)))
            if values is not None:
                x.append(place + shift)
                means.append(statistics.fmean(values))
                bars.append(_spread(values) or 0.0)
                seeds.append(values)
        if x:
            ax.errorbar(
                x,
                means,
                yerr=bars,
                fmt="o-",
                color=color,
                markersize=4,
                lw=1.4,
                capsize=2,
            )
        for position, values in zip(x, seeds):
            ax.plot(
                [position] * len(values),
                values,
                ".",
                color=color,
                alpha=0.5,
                markersize=4,
            )
    ax.set_xticks(range(len(ticks)), [_short(tick) for tick in ticks])


def _draw_against(
    ax: Axes, x: Measured, y: Measured, colors: Mapping[Setting, str]
) -> None:
    """Draw a dot for each setting that both columns have, and label it with its first value."""
    for setting in x:
        if setting not in y:
            continue
        across = statistics.fmean(x[setting])
        up = statistics.fmean(y[setting])
        ax.plot([across], [up], "o", color=colors[setting.curve], markersize=5)
        ax.annotate(
            _short(setting.values[0]),
            (across, up),
            fontsize=7,
            xytext=(3, 3),
            textcoords="offset points",
        )


def _short(value: str) -> str:
    return value if len(value) <= TICK else value[: TICK - 1] + "…"


def _write_csv(ablation: Ablation, board: Board, path: Path) -> None:
    """Write a line for each point of each column, with the values of its seeds."""
    head = ("name", *ablation.keys, "column", "seeds", "mean", "std", "values")
    lines: list[Sequence[object]] = [head]
    for column in columns(ablation, board):
        measured = measure(ablation, board, column)
        for setting in sorted(measured, key=_setting_order):
            values = measured[setting]
            line = [
                setting.name,
                *setting.values,
                column.name,
                len(values),
                f"{statistics.fmean(values):.6g}",
                text_of(_spread(values), ".6g"),
                " ".join(f"{value:.6g}" for value in values),
            ]
            lines.append(line)
    write_lines(path, lines)


def write(board: Board, folder: Path) -> list[tuple[str, Path]]:
    """Write every ablation's figure and csv into `folder`; returns (title, svg) of each."""
    out: dict[Path, str] = {}
    for ablation in find(board):
        slug = re.sub(r"[^\w.-]+", "-", ablation.title).strip("-").lower()
        # File names have a limit; those that are cut to the same start are told apart by number.
        stem = folder / f"ablation-{slug}"[:100]
        if stem.with_name(f"{stem.name}.svg") in out:
            stem = stem.with_name(f"{stem.name}-{len(out)}")
        file = draw(ablation, board, stem)
        if file is not None:
            out[file] = ablation.title
    return [(title, file) for file, title in out.items()]
