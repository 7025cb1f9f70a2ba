"""How far a score moves when flawed test images are left out, or scored by another label.

New test images would have other flawed ones, and more or fewer of them. So the change is a difference
of two ratios over all images. It is linearised: each image counts by how far it moves either mean, and
the interval is the normal one of these moves.

Few flawed images say too little. With ten of them, or where two or three wrong answers decide, the same
interval covers 90 to 100%: nothing can be said of what was not seen. There is none then. Two draws of
labels say too little of a third: with one degree of freedom the interval covers 93 to 99.6%. So three
are needed. benchmarks/left_out.py simulates the others.
"""

import math
from typing import NamedTuple

import numpy as np

from backbench.stats import confidence
from backbench.stats.confidence import Interval

FEWEST_FLAWED = 20
# The sum of squared moves, in units of an image that goes from right to wrong
FEWEST_DECIDING = 5.0
# Of each class, where scores are means of class means: fewer do not know how far it varies
FEWEST_OF_CLASS = 10
# Draws of labels, where a score is the mean over several
FEWEST_DRAWS = 3


class Change(NamedTuple):
    """The score without the flaws minus the full one, in percent."""

    value: float
    ci95: Interval | None  # None where too few images or draws decide


def change(
    full: np.ndarray,
    clean: np.ndarray,
    kept: np.ndarray,
    flawed: np.ndarray,
    *,
    classes: np.ndarray | None = None,
    clean_classes: np.ndarray | None = None,
) -> Change:
    """Return the score of the `kept` images (N,) by their right labels minus that of all, of one row.

    `full` and `clean` (D, N) are the hits of D draws of labels by either set's labels. `flawed` (N,)
    are the images that are left out or have another label. With classes (N,) of either set, scores
    are means of class means."""
    n = full.shape[1]
    weight = confidence.weights(n, classes)
    clean_weight = np.zeros(n)
    kept_classes = None if clean_classes is None else clean_classes[kept]
    clean_weight[kept] = confidence.weights(int(kept.sum()), kept_classes)
    values = clean @ clean_weight - full @ weight
    value = 100 * float(values.mean())
    # 1. By how far each image moves the difference: its hit, from the mean that it is a part of
    moves = clean_weight * _from_mean(clean, clean_weight, clean_classes)
    moves -= weight * _from_mean(full, weight, classes)
    # 2. Whether enough of them, and of the draws, decide
    by_image = moves.mean(0)
    fewest, widening = _class_sizes(kept, clean_classes)
    squares = float((by_image**2 * widening).sum())
    deciding = squares / float((weight**2).mean()) / _squared_move_of_rare_image(full)
    too_few = flawed.sum() < FEWEST_FLAWED or deciding < FEWEST_DECIDING
    too_few_draws = 1 < len(full) < FEWEST_DRAWS
    if too_few or too_few_draws or fewest < FEWEST_OF_CLASS:
        return Change(value, None)
    # 3. The variance over new images, and over new draws
    variance = squares
    quantile = confidence.NORMAL
    if len(full) > 1:
        as_hits = values[:, None] + moves / weight
        variance, df = confidence.draws_and_images(as_hits, weight, variance)
        quantile = confidence.t_quantile(df)
    half = 100 * quantile * math.sqrt(variance)
    return Change(value, (value - half, value + half))


def _class_sizes(
    kept: np.ndarray, classes: np.ndarray | None
) -> tuple[int, np.ndarray]:
    """Return how many images of the smallest class are kept, and for each image (N,) the factor from
    the spread within its class to that of new images."""
    if classes is None:
        classes = np.zeros(len(kept), dtype=np.int64)
    of = np.unique(classes, return_inverse=True)[1]
    size = np.bincount(of[kept], minlength=of.max() + 1)
    return int(size.min()), (size / np.maximum(size - 1, 1))[of]


def _squared_move_of_rare_image(hits: np.ndarray) -> float:
    """Return the squared change of the score, in images, by an image of the rarer outcome (right, or
    wrong), in the mean.

    With one draw it is 1. With several draws (D, N) it is less, as such an image has that outcome in
    some of them only."""
    share = hits.mean(0)
    rare = 1 - share if share.mean() > 0.5 else share
    return float((rare[rare > 0] ** 2).mean()) if rare.any() else 1.0


def _from_mean(
    hits: np.ndarray, weight: np.ndarray, classes: np.ndarray | None
) -> np.ndarray:
    """Return hits (D, N) minus their weighted mean, that of their class where there are classes."""
    of = np.zeros(hits.shape[1], dtype=np.int64)
    if classes is not None:
        of = np.unique(classes, return_inverse=True)[1]
    total = np.bincount(of, weight)
    rows = [np.bincount(of, weight * row) / np.maximum(total, 1e-300) for row in hits]
    return hits - np.stack(rows)[:, of]
