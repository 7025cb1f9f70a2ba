"""Computes COCO's AP of many bootstrap draws of the images, from which intervals follow.

Detections are matched within one image, so the matching is done once. A draw that has an image k
times counts its detections k times.

A run is a row of hits without a miss between them. Precision and recall only rise within a run, so
they are computed at its last hit alone. The detections down to there are counted once for all
thresholds of overlap, and each threshold subtracts the few that it ignores.

Counts are whole numbers, whose sum does not depend on their order, and rounding keeps the order of
quotients. A draw's AP is therefore, bit by bit, what COCOeval.accumulate would compute from all its
detections (benchmarks/ap_intervals.txt). There is one exception: an image that the draw has twice,
with two detections of one category and one score. COCOeval ranks the copies of such an image one
behind the other; here both copies of the first detection come before the second.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Counts held at once, of draws times ends of runs: 16 MB an array
BLOCK = 4_000_000
# COCOeval has numpy's linspace, too. torch's differs in the last bit, and then a recall of 0.35 is
# read off at another hit.
RECALLS = np.linspace(0, 1, 101)


@dataclass(frozen=True)
class RankedDetections:
    """One category's D detections in N images, the highest score first, at T thresholds of overlap."""

    image: np.ndarray  # (D,): the index of the detection's image
    hit: np.ndarray  # (T, D) bool: it found an object that counts
    miss: np.ndarray  # (T, D) bool: it found none; an ignored detection is neither
    truths: np.ndarray  # (N,) float64: how many objects of each image count


def objects_of(truths: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Count the objects of each draw, (draws,), from those of each image (N,).

    `weights` (draws, N) says how often a draw has each image."""
    # Not by BLAS, whose threads would stand in the way of the caller's
    images = np.flatnonzero(truths)
    bounds = np.array([0, len(images)])
    return _sparse_product(truths[images], images, bounds, weights)[:, 0]


def _sparse_product(
    values: np.ndarray, images: np.ndarray, bounds: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Add up, for each draw and each of n rows, the weights of the row's images times their values:
    (b, n).

    Row i has the `values` and `images` from bounds[i] to bounds[i + 1]; `weights` are (b, N)."""
    # Every board imports this file, and importing scipy is slow
    from scipy import sparse

    shape = (len(bounds) - 1, weights.shape[1])
    rows = sparse.csr_array((values.astype(weights.dtype), images, bounds), shape=shape)
    return np.ascontiguousarray((rows @ weights.T).T)


def aps(ranked: RankedDetections, weights: np.ndarray) -> np.ndarray:
    """Compute one category's AP, from 0 to 1, of each draw at each threshold: (draws, T).

    `weights` (draws, N) says how often a draw has each image, in whole numbers; counts are held in
    their type, and those of 32 bits are faster, as is order "F". The AP of a draw without any object
    is meaningless; the caller must leave it out.
    """
    ends = []
    for hit, miss in zip(ranked.hit, ranked.miss, strict=True):
        ends.append(_ends_of_runs(hit, miss))
    draws = len(weights)
    out = np.zeros((draws, len(ends)))
    at_once = max(1, BLOCK // max(1, sum(map(len, ends))))
    for start in range(0, draws, at_once):
        block = slice(start, start + at_once)
        out[block] = _aps_of_block(ranked, ends, np.asfortranarray(weights[block]))
    return out


def _ends_of_runs(hit: np.ndarray, miss: np.ndarray) -> np.ndarray:
    """Return the index of the last hit of each run of hits without a miss between them."""
    counted = np.flatnonzero(hit | miss)
    last = hit[counted]
    last[:-1] &= miss[counted[1:]]
    return counted[last]


def _aps_of_block(
    ranked: RankedDetections, ends: Sequence[np.ndarray], weights: np.ndarray
) -> np.ndarray:
    """Compute the APs of b draws, (b, T), from their weights (b, N).

    `ends` are, for each threshold, the indices of the detections that end a run of hits."""
    # 1. How often a draw has the detections down to each end of some threshold, ignored ones
    #    included, and the hits down to each end of a threshold
    some_end = np.unique(np.concatenate(ends))
    everything = np.arange(len(ranked.image))
    detections = _counted(everything, some_end, ranked.image, weights)
    trues = []
    for hit, of_threshold in zip(ranked.hit, ends, strict=True):
        hits = np.flatnonzero(hit)
        trues.append(_counted(hits, of_threshold, ranked.image, weights))
    # 2. The recalls that so many hits reach
    needed = _hits_needed(objects_of(ranked.truths, weights))
    most = max(int(true[:, -1:].max(initial=0)) for true in trues)
    reached = _recalls_reached(needed, most)
    # 3. Precision and AP at each threshold
    of_thresholds = []
    for t, true in enumerate(trues):
        counted = detections.take(np.searchsorted(some_end, ends[t]), axis=1)
        ignored = np.flatnonzero(~(ranked.hit[t] | ranked.miss[t]))
        if len(ignored):
            counted -= _counted(ignored, ends[t], ranked.image, weights)
        of_thresholds.append(_average_precision(true, counted, reached))
    return np.stack(of_thresholds, 1)


def _counted(
    chosen: np.ndarray, ends: np.ndarray, image: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Count how often each draw has the chosen detections down to each of n ends: (b, n).

    `chosen` and `ends`, which are included, are rising indices of detections; `image` (D,) is where
    each detection is, and `weights` (b, N) says how often a draw has each image."""
    bounds = np.zeros(len(ends) + 1, np.intp)
    bounds[1:] = np.searchsorted(chosen, ends, side="right")
    images = image[chosen[: bounds[-1]]]
    # A row for each end has a 1 for each chosen detection since the end before
    since_last = _sparse_product(np.ones(len(images)), images, bounds, weights)
    return since_last.cumsum(1, dtype=since_last.dtype)


def _hits_needed(objects: np.ndarray) -> np.ndarray:
    """Return the least number of hits that reaches each recall: (b,) objects -> (b, 101).

    A recall of 0 needs one hit, as it is read off at the first.
    """
    total = np.maximum(objects, 1)[:, None]
    least = np.floor(RECALLS * total)
    # COCOeval compares the rounded quotient hits / objects with the recall. Where that of the floor
    # is still below it, one hit more is needed.
    least += least / total < RECALLS
    return np.maximum(least, 1).astype(np.intp)


def _recalls_reached(needed: np.ndarray, most: int) -> np.ndarray:
    """Count the recalls that each number of hits reaches, from none to `most`: (b, most + 1).

    `needed` (b, 101) is how many hits reach each recall."""
    # Recalls that need more than `most` hits fall into one more column, which is left out
    b, width = len(needed), most + 2
    of_draw = np.arange(b)[:, None] * width
    first = np.bincount(
        (np.minimum(needed, most + 1) + of_draw).reshape(-1), minlength=b * width
    )
    reached: np.ndarray = first.reshape(b, width)[:, :-1].cumsum(1)
    return reached


def _average_precision(
    true: np.ndarray, counted: np.ndarray, reached: np.ndarray
) -> np.ndarray:
    """Compute the AP of each draw, (b,), from its n runs of hits, the highest score first.

    `true` and `counted` (b, n) are how many hits, and how many detections, a draw has down to the end
    of each run; `reached` (b, most + 1) is how many recalls so many hits reach.
    """
    b, width = reached.shape
    draw = np.arange(b)[:, None]
    precision = true / (counted + np.spacing(1))
    # 1. For each number of recalls that are reached, from none to all, the best precision
    recalls = reached.reshape(-1).take(true + draw * width)
    recalls += draw * (1 + len(RECALLS))
    best = np.zeros((b, 1 + len(RECALLS)))
    np.maximum.at(best.reshape(-1), recalls.reshape(-1), precision.reshape(-1))
    # 2. Interpolated precision: at each recall the best of that or a higher one, and 0 where the
    #    recall is not reached. AP is its mean over the 101 recalls
    upwards = best[:, :0:-1]
    np.maximum.accumulate(upwards, axis=1, out=upwards)
    of_each: np.ndarray = best[:, 1:].mean(1)
    return of_each
