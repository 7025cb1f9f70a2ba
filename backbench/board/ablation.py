"""Ablations found among the results, as curves with error bars over seeds.

A grid's `vary` names its checkpoints `NAME key=value [key=value]`, the seeds of one point alike. That name is all that
is read here, so any rows named so are an ablation, whoever made them.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbench import charts
from backbench.board.board import MEASURED, Board, Column, Row
from backbench.runs import atomic
from backbench.tasks import ORDER, TASKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = tuple[str, tuple[str, ...]]  # name before the keys, values of all keys but the first
_PAIR = re.compile(r" ([\w.]+)=(\[.*?\]|\{.*?\}|\S+)")
_NAME = re.compile(rf"(.+?)((?:{_PAIR.pattern.replace('(', '(?:', 2)})+)")
PANELS = 9  # of one figure; the csv has everything
SHOWN = (
    "nuclear_norm",
    "view_cosine",
    "rankme",
    "class_overlap",
)  # of task analyze, after the accuracies


@dataclass
class Ablation:
    """`points`: (name before the keys, values of the keys) -> its checkpoints, one per seed."""

    keys: tuple[str, ...]
    points: dict[tuple[str, tuple[str, ...]], list[Row]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        names = ", ".join(sorted({name for name, _ in self.points}))
        return f"{names}: {' and '.join(self.keys)}"

    @property
    def slug(self) -> str:
        return re.sub(r"[^\w.-]+", "-", self.title).strip("-").lower()


def parse(name: str) -> tuple[str, dict[str, str]] | None:
    """`lorac beta=2 tau=0.1` -> ("lorac", {"beta": "2", "tau": "0.1"}); None for any other name."""
    match = _NAME.fullmatch(name)
    return (match[1], dict(_PAIR.findall(match[2]))) if match else None


def find(board: Board) -> list[Ablation]:
    """The ablations with at least two points among the measured rows: names with the same keys stand in one."""
    found: dict[tuple[str, ...], Ablation] = {}
    for row in board.rows:
        parsed = parse(row.name) if row.source == MEASURED else None
        if parsed is not None:
            name, values = parsed
            ablation = found.setdefault(tuple(values), Ablation(tuple(values)))
            ablation.points.setdefault((name, tuple(values.values())), []).append(row)
    return [a for a in found.values() if len(a.points) > 1]


def _order(value: str) -> tuple[int, float, str]:
    """Numbers by size, infinity last among them, then words."""
    try:
        return (0, float(value), value)
    except ValueError:
        return (1, 0.0, value)


@dataclass(frozen=True)
class Point:
    """Mean and standard deviation (nan for one seed) of a column over the seeds of one point."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def std(self) -> float:
        n = len(self.values)
        return (
            math.sqrt(sum((v - self.mean) ** 2 for v in self.values) / (n - 1))
            if n > 1
            else math.nan
        )


Measured = Mapping[tuple[str, tuple[str, ...]], Point]


def measure(ablation: Ablation, board: Board, column: Column) -> Measured:
    """The points that have a value in `column`."""
    out = {}
    for where, rows in ablation.points.items():
        cells = (board.cell(row, column) for row in rows)
        values = tuple(c.value for c in cells if c is not None and c.value is not None)
        if values:
            out[where] = Point(values)
    return out


def columns(ablation: Ablation, board: Board) -> list[Column]:
    """The columns with at least two points: accuracies first, then feature statistics, each in the board's order."""
    found = [c for c in board.columns if len(measure(ablation, board, c)) > 1]
    return sorted(found, key=lambda c: (not TASKS[c.task].ranked, ORDER[c.task]))


def _panels(ablation: Ablation, board: Board) -> list[Column]:
    found = columns(ablation, board)
    chosen = [
        c
        for c in found
        if c.task != "analyze" and not c.metric.startswith(("top5", "AP50", "AP75"))
    ]
    statistics = [c for name in SHOWN for c in found if c.task == "analyze" and c.metric == name]
    room = max(2, PANELS - 1 - len(chosen))
    return [*chosen[: PANELS - 1 - min(room, len(statistics))], *statistics[:room]]


def draw(ablation: Ablation, board: Board, stem: Path) -> Path | None:
    """STEM.svg, .png and .csv: each column over the first key, a line per name and per value of the other keys.

    Error bars are one standard deviation over seeds, dots the single seeds. With a nuclear norm there, the last panel
    shows the first accuracy over it (LORAC Fig. 3c).
    """
    chosen = _panels(ablation, board)
    if not chosen:
        return None
    ticks = sorted({values[0] for _, values in ablation.points}, key=_order)
    lines = sorted(
        {(name, values[1:]) for name, values in ablation.points},
        key=lambda x: (x[0], *map(_order, x[1])),
    )
    colors = dict(zip(lines, charts.colors(len(lines))))
    norm = next((c for c in chosen if c.metric == "nuclear_norm"), None)
    first = next((c for c in chosen if c.task != "analyze"), None)
    figure, axes = charts.grid(len(chosen) + (norm is not None and first is not None), columns=3)
    seeds = 0
    for ax, column in zip(axes, chosen):
        measured = measure(ablation, board, column)
        for nth, line in enumerate(lines):
            shift = 0.12 * (nth - (len(lines) - 1) / 2) / max(1, len(lines) - 1)
            points = [
                (i + shift, measured.get((line[0], (tick, *line[1]))))
                for i, tick in enumerate(ticks)
            ]
            there = [(x, p) for x, p in points if p is not None]
            if not there:
                continue
            x = [x for x, _ in there]
            bars = [0.0 if math.isnan(p.std) else p.std for _, p in there]
            style: dict[str, Any] = {
                "color": colors[line],
                "markersize": 4,
                "linewidth": 1.4,
                "capsize": 2,
            }
            ax.errorbar(x, [p.mean for _, p in there], yerr=bars, fmt="o-", **style)
            for position, p in there:
                seeds = max(seeds, len(p.values))
                ax.plot(
                    [position] * len(p.values),
                    p.values,
                    ".",
                    color=colors[line],
                    alpha=0.5,
                    markersize=4,
                )
        ax.set_xticks(range(len(ticks)), [_short(t) for t in ticks])
        task = f"{column.task}, {column.dataset}" + (f", {column.engine}" if column.engine else "")
        ax.set(title=f"{task}: {column.metric}", xlabel=ablation.keys[0], ylabel=column.protocol)
    if norm is not None and first is not None:
        _against(axes[-1], measure(ablation, board, norm), measure(ablation, board, first), colors)
        axes[-1].set(
            title=f"{first.task} over nuclear norm", xlabel="nuclear norm", ylabel=first.metric
        )
    note = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    figure.suptitle(f"{ablation.title} ({note})", fontsize=11)
    labels = [
        " ".join([name, *(f"{k}={v}" for k, v in zip(ablation.keys[1:], rest))])
        for name, rest in lines
    ]
    charts.legend_below(figure, list(zip(labels, colors.values())))
    _write_csv(ablation, board, stem.with_name(stem.name + ".csv"))
    return charts.save(figure, stem)


def _against(ax: Axes, x: Measured, y: Measured, colors: Mapping[Line, str]) -> None:
    for (name, values), point in x.items():
        other = y.get((name, values))
        if other is not None:
            ax.plot([point.mean], [other.mean], "o", color=colors[name, values[1:]], markersize=5)
            ax.annotate(
                _short(values[0]),
                (point.mean, other.mean),
                fontsize=7,
                xytext=(3, 3),
                textcoords="offset points",
            )


def _short(value: str) -> str:
    return value if len(value) <= 12 else value[:11] + "…"


def _write_csv(ablation: Ablation, board: Board, path: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", *ablation.keys, "column", "seeds", "mean", "std", "values"])
    for column in columns(ablation, board):
        measured = measure(ablation, board, column)
        for (name, values), p in sorted(
            measured.items(), key=lambda x: (x[0][0], *map(_order, x[0][1]))
        ):
            std = "" if math.isnan(p.std) else f"{p.std:.6g}"
            each = " ".join(f"{v:.6g}" for v in p.values)
            writer.writerow([name, *values, column.name, len(p.values), f"{p.mean:.6g}", std, each])
    atomic.write_text(path, text.getvalue())


def write(board: Board, folder: Path) -> list[tuple[str, Path]]:
    """Every ablation's figure and csv into `folder`; (title, svg) of each."""
    out = []
    used: Sequence[str] = []
    for ablation in find(board):
        stem = f"ablation-{ablation.slug}"[:100]
        stem = stem if stem not in used else f"{stem}-{len(used)}"
        used = [*used, stem]
        file = draw(ablation, board, folder / stem)
        if file is not None:
            out.append((ablation.title, file))
    return out
