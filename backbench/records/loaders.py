"""The rows of several loaders: what their metrics are called, and how far a checkpoint's lie apart.

A row is a checkpoint read by one loader (transfer/probes/loaders.py). `sayings` tells each difference from
the usual loader on the same test images, and the spread."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from backbench.images.loaders import LOADERS, USUAL
from backbench.records import paired_rows
from backbench.records.paired_rows import KeptRow
from backbench.records.result_line import Result

_METRICS = ("top1", "mean_per_class")


def suffix(loader: str) -> str:
    """Return what the metrics of a loader end with: top1_opencv."""
    return f"_{loader}"


def sayings(rows: Sequence[tuple[Result, Path]]) -> list[str]:
    """Say for each checkpoint how far the loaders lie apart."""
    together: dict[tuple[object, ...], dict[str, KeptRow]] = defaultdict(dict)
    for row, run in rows:
        metric, _, loader = row.metric.rpartition("_")
        if metric in _METRICS and loader in LOADERS and row.value is not None:
            key = (row.checkpoint, row.dataset, row.protocol, row.seed, metric, run)
            together[key][loader] = KeptRow(row, run)
    lines = []
    for by_loader in together.values():
        if USUAL in by_loader and len(by_loader) > 1:
            lines += _told(by_loader)
    return lines


def _told(by_loader: dict[str, KeptRow]) -> list[str]:
    """Say the usual value, the spread, and each difference."""
    usual = by_loader[USUAL]
    values = [one.row.value for one in by_loader.values() if one.row.value is not None]
    spread = max(values) - min(values)
    interval = ""
    if usual.row.ci95 is not None:
        low, high = usual.row.ci95
        interval = f" [{low:.2f}, {high:.2f}]"
    lines = [
        f"loaders of {usual.row.dataset}: {usual.row.name} has {usual.row.value:.2f}%{interval}"
        f" by {USUAL}; {len(values)} loaders spread over {spread:.2f} points"
    ]
    for loader, one in by_loader.items():
        if loader != USUAL:
            gain = paired_rows.told(one, usual) or "its predictions were not kept"
            lines.append(f"  {loader:<8}{gain}")
    return lines
