"""The rows of the best layer: what their metrics are called, and how they are told beside each other.

A checkpoint has a row of the reading that was chosen on val and one of its usual reading
(transfer/probes/layers.py). `sayings` tells their difference on the test images, and the whole grid."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.records import paired_rows
from backbench.records.paired_rows import KeptRow
from backbench.records.result_line import Result

USUAL = "_usual"  # what the metrics of the usual reading end with
READING = "reading"  # in `chosen`: a layer and a pooling, as "block 9 mean"
USUAL_READING = "usual_reading"  # in `chosen`, too
POOLINGS = ("cls", "mean", "cls+mean", "max")
METRICS = ("top1", "mean_per_class")  # of the chosen reading
_LAYER = re.compile(r"[a-z]+ [0-9]{1,4}")  # block 9


def sayings(rows: Sequence[tuple[Result, Path]]) -> list[str]:
    """Say for each checkpoint which reading was chosen, and what it gains over the usual one."""
    usual = {}
    for row, run in rows:
        if row.metric.endswith(USUAL):
            usual[_key(row, row.metric.removesuffix(USUAL), run)] = row
    lines = []
    for row, run in rows:
        other = usual.get(_key(row, row.metric, run))
        if row.metric in METRICS and other is not None:
            lines += _told(KeptRow(row, run), KeptRow(other, run))
    return lines


def _key(row: Result, metric: str, run: Path) -> tuple[object, ...]:
    return row.checkpoint, row.dataset, row.protocol, row.seed, metric, run


def _told(best: KeptRow, usual: KeptRow) -> list[str]:
    """Say what was chosen for a checkpoint, and its grid."""
    row = best.row
    chosen: Mapping[str, object] = row.chosen or {}
    reading = chosen.get(READING)
    usual_reading = chosen.get(USUAL_READING)
    scores = chosen.get("scores")
    if not isinstance(scores, dict) or row.value is None:
        return []
    about = f"layers of {row.dataset}: {row.name} is read best by"
    of_usual = f"the usual {usual_reading}"
    if usual_reading == "usual":
        of_usual = "its usual reading"
    if reading == usual_reading:
        return [f"{about} {of_usual}: {row.value:.2f}%", *_grid(scores)]
    line = f"{about} {reading}: {row.value:.2f}%"
    gain = paired_rows.told(best, usual)
    if gain:
        line += f", {gain} against {of_usual}"
    return [line, *_grid(scores)]


@dataclass(frozen=True)
class LayerGrid:
    """The score on val of every reading of a checkpoint, in percent."""

    layers: tuple[str, ...]  # from the first on
    poolings: tuple[str, ...]
    scores: Mapping[tuple[str, str], float]  # of a layer and a pooling
    alone: Mapping[str, float]  # the usual reading that no layer gives


def grid(scores: Mapping[str, object]) -> LayerGrid:
    """Sort scores by the layer and the pooling that they are of. What is no score of a reading is
    left out."""
    table = {}
    alone = {}
    for reading, score in scores.items():
        if not isinstance(score, int | float) or not math.isfinite(score):
            continue
        layer, _, pooling = reading.rpartition(" ")
        if _LAYER.fullmatch(layer) and pooling in POOLINGS:
            table[layer, pooling] = float(score)
        elif not layer:
            alone[reading] = float(score)
    layers = {layer for layer, _ in table}
    of_table = {pooling for _, pooling in table}
    return LayerGrid(
        layers=tuple(sorted(layers, key=lambda layer: int(layer.split()[1]))),
        poolings=tuple(pooling for pooling in POOLINGS if pooling in of_table),
        scores=table,
        alone=alone,
    )


def _grid(scores: Mapping[str, object]) -> list[str]:
    """Lay the scores on val out as a table of layers and poolings."""
    found = grid(scores)
    heads = "".join(f"{pooling:>10}" for pooling in found.poolings)
    lines = [f"  {'% on val':<10}{heads}"]
    for layer in found.layers:
        cells = ""
        for pooling in found.poolings:
            cells += f"{found.scores.get((layer, pooling), math.nan):>10.1f}"
        lines.append(f"  {layer:<10}{cells}")
    lines += [f"  {name:<10}{score:>10.1f}" for name, score in found.alone.items()]
    return lines
