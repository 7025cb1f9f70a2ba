"""Computes COCO's AP of many bootstrap draws of the images, from which intervals follow.

Detections are matched within an image, so the matching need not be repeated: a draw counts an
image's detections as often as it has the image. Precision rises at a hit and falls between two, so
it is needed at the hits alone, a few in a hundred detections. How many detections stand above a hit
is counted once for all thresholds of overlap, whose few ignored detections are then subtracted. All
counts are whole numbers, whose sum no order changes. A draw's AP is therefore, bit by bit, what
COCOeval.accumulate would compute from all its detections (benchmarks/ap_intervals.txt), as long as
no image that the draw has twice has two detections of one category and one score. COCOeval ranks
the copies of such an image one behind the other; here both copies of the first detection come
before the second.
"""

from dataclasses import dataclass

import numpy as np

# Counts held at once, of draws times detections: 8 MB an array
BLOCK = 1_000_000
# COCOeval has numpy's linspace, too. torch's differs in the last bit, and then a recall of 0.35 is
# read off at another hit.
RECALLS = np.linspace(0, 1, 101)


@dataclass(frozen=True)
class RankedDetections:
    """One category's D detections in N images, the surest first, at T thresholds of overlap."""

    image: np.ndarray  # (D,): the index of the detection's image
    hit: np.ndarray  # (T, D) bool: it found an object that counts
    miss: np.ndarray  # (T, D) bool: it found none; an ignored detection is neither
    truths: np.ndarray  # (N,) float64: how many objects of each image count


def aps(ranked: RankedDetections, weights: np.ndarray) -> np.ndarray:
    """Compute one category's AP, from 0 to 1, of each draw at each threshold: (draws, T).

    `weights` (draws, N) says how often a draw has each image, in whole numbers; counts are held in
    their type, and those of 32 bits are faster. The AP of a draw without any object is meaningless; the
    caller must leave it out.
    """
    draws = len(weights)
    out = np.zeros((draws, len(ranked.hit)))
    at_once = max(1, BLOCK // max(1, len(ranked.image)))
    for start in range(0, draws, at_once):
        block = slice(start, start + at_once)
        out[block] = _aps_of_block(ranked, weights[block])
    return out


def _aps_of_block(ranked: RankedDetections, weights: np.ndarray) -> np.ndarray:
    """Compute the APs of b draws, (b, T), from their weights (b, N)."""
    images = np.flatnonzero(ranked.truths)
    needed = _hits_needed(weights.take(images, axis=1) @ ranked.truths[images])
    # How often a draw has each detection, and how many it has down to each that is a hit at some
    # threshold, ignored ones included
    times = weights.take(ranked.image, axis=1)
    some_hit = np.flatnonzero(ranked.hit.any(0))
    times_hit = times.take(some_hit, axis=1)
    detections = _summed(times).take(some_hit, axis=1)
    of_thresholds = []
    for hit, miss in zip(ranked.hit, ranked.miss, strict=True):
        hits = np.flatnonzero(hit[some_hit])
        counted = detections.take(hits, axis=1)
        ignored = np.flatnonzero(~(hit | miss))
        if len(ignored):
            counted -= _above(some_hit[hits], ignored, times)
        true = _summed(times_hit.take(hits, axis=1))
        of_thresholds.append(_average_precision(true, counted, needed))
    return np.stack(of_thresholds, 1)


def _summed(counts: np.ndarray) -> np.ndarray:
    """Add up the counts (b, n) of each draw from the first on, in their type; numpy would widen it."""
    sums: np.ndarray = counts.cumsum(1, dtype=counts.dtype)
    return sums


def _above(hits: np.ndarray, ignored: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Count the ignored detections that rank above each of h hits, in b draws: (b, h).

    `hits` and `ignored` are indices of detections; `times` (b, D) is how often a draw has each.
    """
    counts = np.zeros((len(times), len(ignored) + 1), times.dtype)
    counts[:, 1:] = _summed(times.take(ignored, axis=1))
    return counts.take(np.searchsorted(ignored, hits), axis=1)


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


def _average_precision(
    true: np.ndarray, counted: np.ndarray, needed: np.ndarray
) -> np.ndarray:
    """Compute the AP of each draw, (b,), from its h hits, the surest first.

    `true` and `counted` (b, h) are how many hits, and how many detections, a draw has down to each
    hit, itself included; `needed` (b, 101) is how many hits reach each recall.
    """
    b, h = true.shape
    if h == 0:
        return np.zeros(b)
    # 1. Precision after each hit, one draw behind the other, and a 0 at the end
    precision = np.zeros(b * h + 1)
    np.divide(true, counted + np.spacing(1), out=precision[:-1].reshape(b, h))
    # 2. Where each recall is reached first. Before it stand all hits of the draws before, and as
    #    many of its own as have fewer hits down to them than are needed.
    total = true[:, -1:]
    width = int(total.max()) + 1
    draw = np.arange(b)[:, None]
    with_count = np.bincount((true + draw * width).reshape(-1), minlength=b * width)
    before = with_count.cumsum().reshape(b, width)
    reached = needed <= total
    first = np.where(
        reached, before[draw, np.minimum(needed, width) - 1], (draw + 1) * h
    )
    # 3. The best precision from one recall to the next, then that at a recall or a larger one. From
    #    the last recall of a draw to the first of the next come only hits that the next draw lacks,
    #    whose precision is 0.
    best = np.maximum.reduceat(precision, first.reshape(-1)).reshape(first.shape)
    best[~reached] = 0
    upwards = best[:, ::-1]
    np.maximum.accumulate(upwards, axis=1, out=upwards)
    # 4. The mean over the 101 recalls; 0 where a recall is not reached
    of_each: np.ndarray = best.mean(1)
    return of_each
