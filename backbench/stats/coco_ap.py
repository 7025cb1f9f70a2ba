"""Computes COCO's AP of many bootstrap draws of the images, from which intervals follow.

Detections are matched within an image, so the matching need not be repeated: a draw counts an
image's detections as often as it has the image. Only the hits matter, a few in a hundred detections,
because precision rises at a hit and falls between two. All counts are whole numbers, which float64
adds without rounding in any order. A draw's AP is therefore, bit by bit, what COCOeval.accumulate
would compute from all its detections (benchmarks/ap_intervals.txt), as long as no image that the
draw has twice has two detections of one category and one score. COCOeval ranks the copies of such
an image one behind the other; here both copies of the first detection come before the second.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCK = 100  # draws at a time: the 11,000 people of COCO, all found, are 9 MB for 100
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


def aps(ranked: RankedDetections, blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Compute one category's AP, from 0 to 1, of each draw at each threshold: (draws, T).

    `blocks` hold the draws, b in each: how often a draw has each image, (N, b). The AP of a draw
    without any object is meaningless; the caller must leave it out.
    """
    needed = [_hits_needed(ranked.truths @ weight) for weight in blocks]
    out = []
    for hit, miss in zip(ranked.hit, ranked.miss, strict=True):
        out.append(_average_precision(ranked.image, hit, miss, blocks, needed))
    return np.stack(out, 1)


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
    image: np.ndarray,
    hit: np.ndarray,
    miss: np.ndarray,
    blocks: Sequence[np.ndarray],
    needed: Sequence[np.ndarray],
) -> np.ndarray:
    """Compute the AP of each draw, (draws,), from the hits and misses (D,) at one threshold."""
    # Its import takes long, and most who verify numbers need no AP
    from scipy import sparse

    hits = np.flatnonzero(hit)
    # For each hit, the images of the detections that count since the hit before it, itself
    # included, as a (hits, N) matrix of counts. Its product with a draw's weights is how many
    # detections the draw counts there.
    counted = np.flatnonzero(hit | miss)
    next_hit = np.searchsorted(hits, counted)
    # Detections after the last hit lower no precision that is read off.
    relevant = next_hit < len(hits)
    rows, columns = next_hit[relevant], image[counted[relevant]]
    since_last_hit = sparse.csr_matrix(
        (np.ones(len(rows)), (rows, columns)), shape=(len(hits), len(blocks[0]))
    )
    read_off = []
    for weight, least in zip(blocks, needed, strict=True):
        # 1. Precision after each hit, (hits + 1, b). The last row, 0, stands for a hit that does
        #    not exist.
        times = weight[image[hits]]
        true = times.cumsum(0)
        detections = (since_last_hit @ weight).cumsum(0)
        precision = np.zeros((len(hits) + 1, weight.shape[1]))
        precision[:-1] = true / (detections + np.spacing(1))
        # 2. The best precision at that recall or a larger one
        upwards = precision[::-1]
        np.maximum.accumulate(upwards, axis=0, out=upwards)
        # 3. The mean of what is read off at 101 recalls; 0 where a recall is not reached
        draw = np.arange(weight.shape[1])[:, None]
        read_off.append(precision[_nth_hits(times, least), draw])
    of_each: np.ndarray = np.concatenate(read_off).mean(1)
    return of_each


def _nth_hits(times: np.ndarray, nth: np.ndarray) -> np.ndarray:
    """Find the n-th hit of each draw, where each of h hits counts `times` (h, b) in b draws.

    `nth` (b, R) are R numbers n of each draw, from 1. Returns the indices of the hits, (b, R), and h
    where a draw has fewer than n.
    """
    h, b = times.shape
    counts = times.T.astype(np.intp, order="C")
    # 1. List every draw's hits, each as often as it counts, one draw behind the other; then h.
    listed = np.repeat(np.tile(np.arange(h), b), counts.reshape(-1))
    listed = np.append(listed, h)
    # 2. A draw's n-th hit is the n-th from where its own hits begin.
    total = counts.sum(1)[:, None]
    begin = total.cumsum(0) - total
    return listed[np.where(nth <= total, begin + nth - 1, -1)]
