"""The paired difference of two rows of one run, from the predictions that were kept beside each."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from backbench.records import predictions
from backbench.records.result_line import Result
from backbench.stats import paired_differences
from backbench.stats.paired_differences import Difference


class KeptRow(NamedTuple):
    """A row, and the folder of its run."""

    row: Result
    run: Path


def difference(one: KeptRow, other: KeptRow) -> Difference | None:
    """Return `one` minus `other`; None where predictions are missing, or of other images."""
    arrays = []
    right = []
    for row, run in (one, other):
        kept = predictions.load(run / str(row.facts.get("predictions")))
        hits = None if kept is None else predictions.hits(kept, row.metric)
        if kept is None or hits is None or hits.ndim != 1:
            return None
        arrays.append(kept)
        right.append(hits.astype(np.float64))
    same_list = str(arrays[0]["manifest"]) == str(arrays[1]["manifest"])
    if not same_list or not np.array_equal(arrays[0]["label"], arrays[1]["label"]):
        return None
    by_class = one.row.metric.startswith("mean_per_class")
    classes = arrays[0]["label"] if by_class else None
    return paired_differences.of_images(right[0] - right[1], classes)


def told(one: KeptRow, other: KeptRow) -> str:
    """Write the difference with its interval: +2.50 [0.43, 4.57]; "" where there is none."""
    found = difference(one, other)
    if found is None:
        return ""
    low, high = found.ci95
    return f"{found.value:+.2f} [{low:.2f}, {high:.2f}]"
