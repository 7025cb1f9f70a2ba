"""The rows of the best layer: what their metrics are called, and how they are told beside each other.

A checkpoint has a row of the reading that was chosen on val and one of its usual reading
(transfer/probes/layers.py). `sayings` tells their difference on the test images, and the whole grid."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from backbench.records import paired_rows
from backbench.records.paired_rows import KeptRow
from backbench.records.result_line import Result

USUAL = "_usual"  # what the metrics of the usual reading end with
READING = "reading"  # in `chosen`: a layer and a pooling, as "block 9 mean"
USUAL_READING = "usual_reading"  # in `chosen`, too
POOLINGS = ("cls", "mean", "cls+mean", "max")
_METRICS = ("top1", "mean_per_class")


def sayings(rows: Sequence[tuple[Result, Path]]) -> list[str]:
    """Say for each checkpoint which reading was chosen, and what it gains over the usual one."""
    usual = {}
    for row, run in rows:
        if row.metric.endswith(USUAL):
            usual[_key(row, row.metric.removesuffix(USUAL), run)] = row
    lines = []
    for row, run in rows:
        other = usual.get(_key(row, row.metric, run))
        if row.metric in _METRICS and other is not None:
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


def _grid(scores: Mapping[str, float]) -> list[str]:
    """Lay the scores on val out as a table of layers and poolings."""
    table: dict[str, dict[str, float]] = {}
    for reading, score in scores.items():
        layer, _, pooling = reading.rpartition(" ")
        table.setdefault(layer, {})[pooling] = score
    alone = table.pop("", {})  # the usual reading that no layer gives
    poolings = [p for p in POOLINGS if any(p in row for row in table.values())]
    # From the first layer on
    layers = sorted(table, key=lambda layer: int(layer.rpartition(" ")[2]))
    heads = "".join(f"{pooling:>10}" for pooling in poolings)
    lines = [f"  {'% on val':<10}{heads}"]
    for layer in layers:
        cells = "".join(f"{table[layer].get(p, float('nan')):>10.1f}" for p in poolings)
        lines.append(f"  {layer:<10}{cells}")
    lines += [f"  {name:<10}{score:>10.1f}" for name, score in alone.items()]
    return lines
