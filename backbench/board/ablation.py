"""Ablations found among the results, as curves with error bars over seeds.

A grid's `vary` names its checkpoints `NAME key=value [key=value]`, the seeds of one point alike.
That name is all that is read here, so any rows named so are an ablation, whoever made them.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from backbench import charts
from backbench.board.board import Board, Column, Row, joined, text_of
from backbench.runs import atomic
from backbench.tasks import ORDER, TASKS
from backbench.untrusted import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A value is a list, a mapping, or a word without a space. A name is words, then such pairs only.
_PAIR = re.compile(r" ([\w.]+)=(\[.*?\]|\{.*?\}|\S+)")
_NAME = re.compile(rf"(.+?)((?:{_PAIR.pattern.replace('(', '(?:', 2)})+)")
PANELS = 9  # of one figure; the csv has everything
SHOWN = ("nuclear_norm", "view_cosine", "rankme", "class_overlap")  # of analyze, after accuracies
TICK = 12  # letters under an axis


class Setting(NamedTuple):
    """One point of an ablation: the name before the keys, and a value for each key."""

    name: str
    values: tuple[str, ...]

    @property
    def curve(self) -> Curve:
        """The line it lies on: the first key runs along the axis."""
        return Curve(self.name, self.values[1:])


class Curve(NamedTuple):
    """One line of the figure: the name, and values of all keys but the first."""

    name: str
    values: tuple[str, ...]

    def at(self, tick: str) -> Setting:
        return Setting(self.name, (tick, *self.values))


@dataclass
class Ablation:
    """`points`: setting -> its checkpoints, one per seed."""

    keys: tuple[str, ...]
    points: dict[Setting, list[Row]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        names = ", ".join(sorted({setting.name for setting in self.points}))
        return f"{names}: {' and '.join(self.keys)}"

    @property
    def slug(self) -> str:
        return re.sub(r"[^\w.-]+", "-", self.title).strip("-").lower()


def parse(name: str) -> tuple[str, dict[str, str]] | None:
    """`lorac beta=2 tau=0.1` -> ("lorac", {"beta": "2", "tau": "0.1"}); None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return match[1], dict(_PAIR.findall(match[2]))


def find(board: Board) -> list[Ablation]:
    """The measured rows' ablations of two points and more: names with the same keys are one."""
    found: dict[tuple[str, ...], Ablation] = {}
    for row in board.measured_rows:
        parsed = parse(row.name)
        if parsed is None:
            continue
        name, values = parsed
        name = board.name(replace(row, name=name))
        keys = tuple(values)
        # Names with the same keys are lines of one figure, the seeds of a setting one point.
        setting = Setting(name, tuple(values.values()))
        ablation = found.setdefault(keys, Ablation(keys))
        ablation.points.setdefault(setting, []).append(row)
    return [ablation for ablation in found.values() if len(ablation.points) > 1]


def _order(value: str) -> tuple[int, float, str]:
    """Numbers by size, infinity last among them, then words."""
    try:
        return (0, float(value), value)
    except ValueError:
        return (1, 0.0, value)


def _place(point: Setting | Curve) -> tuple[object, ...]:
    """By name, then by each value."""
    return (point.name, *map(_order, point.values))


@dataclass(frozen=True)
class Point:
    """Mean and standard deviation (None for one seed) of a column over the seeds of one setting."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def std(self) -> float | None:
        n = len(self.values)
        if n < 2:
            return None
        return math.sqrt(sum((v - self.mean) ** 2 for v in self.values) / (n - 1))


Measured = Mapping[Setting, Point]  # one column's


def measure(ablation: Ablation, board: Board, column: Column) -> Measured:
    """The points that have a value in `column`."""
    out = {}
    for setting, rows in ablation.points.items():
        values = []
        for row in rows:
            cell = board.cell(row, column)
            if cell is not None and cell.value is not None:
                values.append(cell.value)
        if values:
            out[setting] = Point(tuple(values))
    return out


def columns(ablation: Ablation, board: Board) -> list[Column]:
    """The columns with at least two points: accuracies first, then feature statistics, each in the
    board's order."""
    found = [c for c in board.columns if len(measure(ablation, board, c)) > 1]
    return sorted(found, key=lambda c: (not TASKS[c.task].ranked, ORDER[c.task]))


def _panels(ablation: Ablation, board: Board) -> list[Column]:
    """The columns of the figure, at most PANELS - 1 so that one is left for the norm: accuracies,
    and at least two of the feature statistics where there are any."""
    accuracies: list[Column] = []
    by_metric: dict[str, list[Column]] = {}  # of the feature statistics
    # A top-5 or an AP50 moves with the metric it belongs to; the csv has it.
    for column in columns(ablation, board):
        if column.task == "analyze":
            by_metric.setdefault(column.metric, []).append(column)
        elif not column.metric.startswith(("top5", "AP50", "AP75")):
            accuracies.append(column)
    features: list[Column] = []
    for metric in SHOWN:
        features += by_metric.get(metric, [])
    # Features fill what the accuracies leave, and take two places from them where they leave none.
    room = max(2, PANELS - 1 - len(accuracies))
    features = features[:room]
    return [*accuracies[: PANELS - 1 - len(features)], *features]


def draw(ablation: Ablation, board: Board, stem: Path) -> Path | None:
    """STEM.svg, .png and .csv: each column over the first key, a line per name and per value of the
    other keys.

    Error bars are one standard deviation over seeds, dots the single seeds. With a nuclear norm
    there, the last panel shows the first accuracy over it (LORAC Fig. 3c).
    """
    chosen = {column: measure(ablation, board, column) for column in _panels(ablation, board)}
    if not chosen:
        return None
    # The first key runs along the axis; the rest of a setting is a line, one colour in all panels.
    ticks = sorted({setting.values[0] for setting in ablation.points}, key=_order)
    curves = sorted({setting.curve for setting in ablation.points}, key=_place)
    colors = dict(zip(curves, charts.colors(len(curves))))
    # LORAC Fig. 3c needs both; then there is one panel more than there are columns.
    norm = next((c for c in chosen if c.metric == "nuclear_norm"), None)
    first = next((c for c in chosen if c.task != "analyze"), None)
    both = norm is not None and first is not None
    figure, axes = charts.grid(len(chosen) + both, columns=3)
    for ax, (column, measured) in zip(axes, chosen.items()):
        _draw_panel(ax, measured, ticks, colors)
        what = joined(", ", column.task, column.dataset, column.engine)
        ax.set(title=f"{what}: {column.metric}", xlabel=ablation.keys[0], ylabel=column.protocol)
    if norm is not None and first is not None:
        _against(axes[-1], chosen[norm], chosen[first], colors)
        title = f"{first.task} over nuclear norm"
        axes[-1].set(title=title, xlabel="nuclear norm", ylabel=first.metric)
    figure.suptitle(f"{ablation.title} ({_seeds(chosen.values())})", fontsize=11)
    labels = [_label(curve, ablation.keys[1:]) for curve in curves]
    charts.legend_below(figure, list(zip(labels, colors.values())))
    _write_csv(ablation, board, stem.with_name(stem.name + ".csv"))
    return charts.save(figure, stem)


def _draw_panel(
    ax: Axes, measured: Measured, ticks: Sequence[str], colors: Mapping[Curve, str]
) -> None:
    """Every curve of one column, over the places of `ticks`."""
    for nth, (curve, color) in enumerate(colors.items()):
        # Curves share 0.12 of a tick, so that their error bars do not cover each other.
        shift = 0.12 * (nth - (len(colors) - 1) / 2) / max(1, len(colors) - 1)
        x, means, bars, seeds = [], [], [], []
        for place, tick in enumerate(ticks):
            point = measured.get(curve.at(tick))
            if point is not None:
                x.append(place + shift)
                means.append(point.mean)
                bars.append(point.std or 0.0)
                seeds.append(point.values)
        if not x:
            continue
        ax.errorbar(
            x, means, yerr=bars, fmt="o-", color=color, markersize=4, linewidth=1.4, capsize=2
        )
        for position, values in zip(x, seeds):
            places = [position] * len(values)
            ax.plot(places, values, ".", color=color, alpha=0.5, markersize=4)
    ax.set_xticks(range(len(ticks)), list(map(_short, ticks)))


def _against(ax: Axes, x: Measured, y: Measured, colors: Mapping[Curve, str]) -> None:
    """A dot for each setting that both columns have, with the value of its first key."""
    for setting, point in x.items():
        other = y.get(setting)
        if other is None:
            continue
        place = (point.mean, other.mean)
        ax.plot([place[0]], [place[1]], "o", color=colors[setting.curve], markersize=5)
        tick = _short(setting.values[0])
        ax.annotate(tick, place, fontsize=7, xytext=(3, 3), textcoords="offset points")


def _seeds(shown: Iterable[Measured]) -> str:
    """Over how many seeds, at most, the points of these columns are means."""
    seeds = 0
    for measured in shown:
        for point in measured.values():
            seeds = max(seeds, len(point.values))
    if seeds > 1:
        return f"mean and standard deviation over {seeds} seeds"
    return "one seed"


def _label(curve: Curve, keys: Sequence[str]) -> str:
    pairs = [f"{key}={value}" for key, value in zip(keys, curve.values)]
    return " ".join([curve.name, *pairs])


def _short(value: str) -> str:
    if len(value) <= TICK:
        return value
    return value[: TICK - 1] + "…"


def _write_csv(ablation: Ablation, board: Board, path: Path) -> None:
    """A line for each point of each column, with the values of its seeds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", *ablation.keys, "column", "seeds", "mean", "std", "values"])
    for column in columns(ablation, board):
        measured = measure(ablation, board, column)
        for setting in sorted(measured, key=_place):
            p = measured[setting]
            each = " ".join(f"{v:.6g}" for v in p.values)
            what = [setting.name, *setting.values, column.name]
            line = [*what, len(p.values), f"{p.mean:.6g}", text_of(p.std, ".6g"), each]
            writer.writerow(map(printable.spreadsheet, line))
    atomic.write_text(path, text.getvalue())


def write(board: Board, folder: Path) -> list[tuple[str, Path]]:
    """Every ablation's figure and csv into `folder`; (title, svg) of each."""
    out = []
    used: list[str] = []
    for ablation in find(board):
        # File names have a limit; those that are cut to the same start are told apart by number.
        stem = f"ablation-{ablation.slug}"[:100]
        if stem in used:
            stem = f"{stem}-{len(used)}"
        used.append(stem)
        file = draw(ablation, board, folder / stem)
        if file is not None:
            out.append((ablation.title, file))
    return out
