"""What the checkpoints' pretraining logged, thinned out to what a figure can show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from backbench.runs.step_metrics import read_metrics
from backbench.weights import header
from backbench.weights.checkpoint import Checkpoint
from transfer.analyze_summary import CheckpointCurve, finite

NOT_DRAWN = ("step", "epoch", "images_per_s", "waiting")  # of metrics.jsonl: time, not training
CURVE_BINS = 300


def training_curves(
    files: Sequence[Path], checkpoints: Sequence[Checkpoint]
) -> list[CheckpointCurve]:
    """metrics.jsonl beside each checkpoint file, where it is still in its pretraining's folder."""
    out: list[CheckpointCurve] = []
    wanted = {c.digest for c in checkpoints}  # whose curve is not there yet
    for file in files:
        rows = [row for row in read_metrics(file.parent) if "step" in row]
        digest = header.digest(file)
        if len(rows) < 2 or digest is None or digest not in wanted:
            continue
        wanted.remove(digest)
        # At most CURVE_BINS groups of neighbouring rows.
        size = math.ceil(len(rows) / CURVE_BINS)
        bins = [rows[i : i + size] for i in range(0, len(rows), size)]
        steps = [int(part[-1]["step"]) for part in bins]
        terms = {name: _bin_means(bins, name) for name in _drawn_terms(rows)}
        out.append({"checkpoint": digest, "step": steps, "terms": terms})
    return out


def _drawn_terms(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The names of all numbers in the rows; not every row has every term."""
    names = set()
    for row in rows:
        names |= {name for name, value in row.items() if isinstance(value, int | float)}
    return sorted(names - set(NOT_DRAWN))


def _bin_means(bins: Sequence[Sequence[Mapping[str, object]]], name: str) -> list[float | None]:
    """The mean of a term over each bin's rows that have it; None where none has."""
    out: list[float | None] = []
    for rows in bins:
        values = [v for row in rows if isinstance(v := row.get(name), int | float)]
        out.append(finite(sum(values) / len(values)) if values else None)
    return out
