"""Keeps what a head says of images that show several classes, and computes the numbers that follow.

RUN/predictions/*.npz has `score` (N, C), how surely an image shows a class, and `table` (N, C), what
is true (images/multilabel.py). `verify` computes values and intervals again from these alone.
"""

import numpy as np

from backbench.images.multilabel import IGNORED, PRESENT
from backbench.records.predictions import Arrays
from backbench.runs import seeding
from backbench.stats import confidence, label_ranking, resampling
from backbench.stats.confidence import Interval

METRICS = label_ranking.METRICS
_ALIKE = 1e-6  # percent: a number computed again
_MOST = (
    200_000_000  # images times classes of a stranger's file: COCO's val has 3 million
)


def values(
    score: np.ndarray, table: np.ndarray, counts: np.ndarray | None = None
) -> dict[str, float]:
    """Return each metric in percent."""
    found = label_ranking.mean_precisions(
        score, table == PRESENT, table != IGNORED, counts
    )
    return {name: 100 * float(value[0]) for name, value in found.items()}


def kept(score: np.ndarray, table: np.ndarray, manifest: str) -> dict[str, np.ndarray]:
    """Return what is kept beside a row, with the metrics on resamples of the images.

    The resamples depend on `manifest` alone, so that two checkpoints are compared draw by draw."""
    score = score.astype(np.float32)
    arrays = {
        "manifest": np.array(manifest),
        "images": np.array(len(table)),
        "score": score,
        "table": table,
    }
    for name, drawn in _on_resamples(score, table, manifest).items():
        arrays[f"bootstrap_{name}"] = drawn
    return arrays


def value(x: Arrays, metric: str) -> tuple[float, Interval | None]:
    """Return a metric and its interval, in percent."""
    found = values(x["score"], x["table"])[metric]
    drawn = x[f"bootstrap_{metric}"] / 100
    return found, confidence.of_resamples(found / 100, drawn, len(x["table"]))


def _on_resamples(
    score: np.ndarray, table: np.ndarray, manifest: str
) -> dict[str, np.ndarray]:
    seed = seeding.seed_of("images", manifest, len(table))
    counts = resampling.image_counts(seed, len(table))
    found = label_ranking.mean_precisions(
        score, table == PRESENT, table != IGNORED, counts
    )
    return {name: 100 * drawn for name, drawn in found.items()}


def fault(x: Arrays, metric: str) -> str:
    """Say what in a file cannot be, or is not what its resamples say; "" where all fits."""
    score = x.get("score")
    table = x.get("table")
    if score is None or table is None or metric not in METRICS:
        return "its file does not say which classes its images show"
    if score.ndim != 2 or score.shape != table.shape or table.dtype != np.uint8:
        return "its scores and its classes are no two tables of one shape"
    if not table.size or table.size > _MOST or not np.isfinite(score).all():
        return "its scores are no numbers of images and classes"
    if table.max() > IGNORED or len(table) != int(x["images"]):
        return "its classes are not those of its images"
    drawn = x.get(f"bootstrap_{metric}")
    again = _again.of(x)[metric]
    if drawn is None or not np.allclose(
        drawn, again, rtol=0, atol=_ALIKE, equal_nan=True
    ):
        return "its resamples are not those of its scores"
    return ""


class _Again:
    """The metrics on resamples of the file that was looked at last: a file has two rows."""

    def __init__(self) -> None:
        self.of_file: Arrays | None = None
        self.drawn: dict[str, np.ndarray] = {}

    def of(self, x: Arrays) -> dict[str, np.ndarray]:
        if self.of_file is not x:
            self.of_file = x
            self.drawn = _on_resamples(x["score"], x["table"], str(x["manifest"]))
        return self.drawn


_again = _Again()
