"""Computes intervals for COCO's AP: the images are drawn anew, many times.

Matching is per image, so a draw counts an image's detections as often as it has the image. Only
hits matter, a few in a hundred detections: precision rises at a hit and falls between two. Counts
are whole numbers, which float64 adds without rounding in any order, so a draw's AP is, bit by bit,
what COCOeval.accumulate would make of all detections (benchmarks/ap_intervals.txt).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

BLOCK = 100  # draws at a time: the 11,000 people of COCO, all found, are 9 MB for 100
# numpy's, as COCOeval has them: torch's differ in the last bit, which a recall of 0.35 is on.
RECALLS = np.linspace(0, 1, 101)


@dataclass(frozen=True)
class RankedDetections:
    """One category's D detections in N images, the surest first, at T thresholds of overlap."""

    image: np.ndarray  # (D,): the image's place in the list
    hit: np.ndarray  # (T, D) bool: it found an object that counts
    miss: np.ndarray  # (T, D) bool: it found none; what is ignored is neither
    truths: np.ndarray  # (N,) float64: objects to be found in each image


def aps(ranked: RankedDetections, blocks: Sequence[np.ndarray]) -> Tensor:
    """Compute one category's AP, from 0 to 1, for each draw and threshold: (draws, T). `blocks` (N,
    b) say how often a draw has each image. Where a draw has no object the AP has no meaning."""
    needed = [_needed(ranked.truths @ weight) for weight in blocks]
    out = []
    for hit, miss in zip(ranked.hit, ranked.miss, strict=True):
        out.append(_average_precision(ranked.image, hit, miss, blocks, needed))
    return torch.stack(out, 1)


def _needed(positives: np.ndarray) -> np.ndarray:
    """(b,) objects -> (b, 101): the least number of hits whose share of them, a rounded quotient,
    reaches each recall; 1 for a recall of 0."""
    of = np.maximum(positives, 1)[:, None]
    least = np.floor(RECALLS * of)
    least += least / of < RECALLS
    return np.maximum(least, 1).astype(np.intp)


def _average_precision(
    image: np.ndarray,
    hit: np.ndarray,
    miss: np.ndarray,
    blocks: Sequence[np.ndarray],
    needed: Sequence[np.ndarray],
) -> Tensor:
    """AP of each draw, (draws,), from hit and miss (D,) of ranked detections."""
    hits = np.flatnonzero(hit)
    # The detections before and at each hit, since the one before it, as a (hits, N) matrix: times
    # an image's weight it is how many a draw counts there.
    counted = np.flatnonzero(hit | miss)
    place = np.searchsorted(hits, counted)
    before = place < len(hits)  # what comes after the last hit lowers no precision
    entries = (np.ones(before.sum()), (place[before], image[counted[before]]))
    between = sparse.csr_matrix(entries, shape=(len(hits), len(blocks[0])))
    read = []
    for weight, least in zip(blocks, needed, strict=True):
        # 1. Precision after each hit, (hits + 1, b); 0 in the place of a hit that there is not
        times = weight[image[hits]]
        precision = np.zeros((len(hits) + 1, weight.shape[1]))
        precision[:-1] = times.cumsum(0) / (
            (between @ weight).cumsum(0) + np.spacing(1)
        )
        # 2. The best precision at that recall or a larger one
        upwards = precision[::-1]
        np.maximum.accumulate(upwards, axis=0, out=upwards)
        # 3. Read off at 101 recalls; 0 where a recall is not reached
        draw = np.arange(weight.shape[1])[:, None]
        read.append(precision[_nth_hits(times, least), draw])
    return torch.from_numpy(np.concatenate(read)).mean(1)


def _nth_hits(times: np.ndarray, nth: np.ndarray) -> np.ndarray:
    """Find each draw's n-th hit, for (b, R) n from 1: (b, R) indices of hits, h where there are
    fewer. Each of h hits counts `times` (h, b) in b draws."""
    h, b = times.shape
    counts = times.T.astype(np.intp, order="C")
    # 1. All draws' hits in one row, one draw's behind another's, each as often as it counts; and h
    of = np.append(np.repeat(np.tile(np.arange(h), b), counts.reshape(-1)), h)
    # 2. A draw's n-th is the n-th from where its own begin.
    total = counts.sum(1)[:, None]
    begin = total.cumsum(0) - total
    return of[np.where(nth <= total, begin + nth - 1, -1)]
