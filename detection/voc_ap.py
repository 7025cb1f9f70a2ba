"""Intervals for VOC's AP: the images drawn anew, many times.

The numbers themselves are Detectron2's evaluator's (engine_detectron2.voc_scores), which keeps no
account of which detection matched what; so here they are matched once more, by its rules, each
image apart. A test holds the AP of every image once to the evaluator's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK = 50  # draws at a time: 25,000 detections of a category are 10 MB for 50


@dataclass(frozen=True)
class VocObjects:
    """One category's objects in one image."""

    boxes: np.ndarray  # (m, 4): corners, 1-based and inclusive
    difficult: np.ndarray  # (m,) bool: neither hit nor miss


@dataclass(frozen=True)
class VocFound:
    """One category's detections in all images, in the order in which they were written down."""

    image: np.ndarray  # (D,): the image's place in the list
    scores: np.ndarray  # (D,)
    boxes: np.ndarray  # (D, 4), as VocObjects'


def aps(
    found: VocFound,
    objects: Mapping[int, VocObjects],
    weights: Tensor,
    thresholds: Sequence[float],
    *,
    elevens: bool,
) -> Tensor:
    """One category's AP, from 0 to 1, for each draw and threshold: (draws, thresholds). `weights`
    (draws, images) says how often a draw has each image; `objects` are those of each image that has
    any. A draw without an object has AP 0, as the evaluator has it."""
    ranking = np.argsort(-found.scores)  # the evaluator's own call, its ties included
    image = torch.from_numpy(found.image[ranking])
    truths = torch.zeros(weights.shape[1], dtype=weights.dtype)
    for place, mine in objects.items():
        truths[place] = float((~mine.difficult).sum())
    out = torch.zeros(len(weights), len(thresholds), dtype=weights.dtype)
    for t, threshold in enumerate(thresholds):
        hits, misses = _matched(found, ranking, objects, threshold)
        for start in range(0, len(weights), CHUNK):
            part = weights[start : start + CHUNK]
            each = part[:, image]
            out[start : start + CHUNK, t] = _average_precision(
                each * hits, each * misses, part @ truths, elevens=elevens
            )
    return out


def _matched(
    found: VocFound, ranking: np.ndarray, objects: Mapping[int, VocObjects], threshold: float
) -> tuple[Tensor, Tensor]:
    """(D,) hits and (D,) misses of the ranked detections; those on difficult objects are neither."""
    hits, misses = np.zeros(len(ranking), bool), np.zeros(len(ranking), bool)
    taken: set[tuple[int, int]] = set()
    for i, d in enumerate(ranking):
        place = int(found.image[d])
        mine = objects.get(place)
        overlaps = np.zeros(0) if mine is None else _overlaps(found.boxes[d], mine.boxes)
        best = int(overlaps.argmax()) if len(overlaps) else -1
        # 1. On nothing, or on too little of it
        if mine is None or best < 0 or not overlaps[best] > threshold:
            misses[i] = True
        # 2. On an object that counts: the first finds it, the others find it again
        elif not mine.difficult[best]:
            hits[i] = (place, best) not in taken
            misses[i] = not hits[i]
            taken.add((place, best))
    return torch.from_numpy(hits), torch.from_numpy(misses)


def _overlaps(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Intersection over union of one box with (m, 4); a pixel is 1 wide."""
    low, high = np.maximum(box[:2], boxes[:, :2]), np.minimum(box[2:], boxes[:, 2:])
    both = np.prod(np.maximum(high - low + 1, 0), axis=1)
    areas = np.prod(boxes[:, 2:] - boxes[:, :2] + 1, axis=1)
    return both / (np.prod(box[2:] - box[:2] + 1) + areas - both)


def _average_precision(hits: Tensor, misses: Tensor, truths: Tensor, *, elevens: bool) -> Tensor:
    """(draws, D) weighted hits and misses, (draws,) objects -> (draws,)."""
    if not hits.shape[1]:
        return torch.zeros(len(hits), dtype=truths.dtype)
    # 1. Precision and recall after each detection; without an object there is no recall
    true, false = hits.cumsum(1), misses.cumsum(1)
    recall = true / truths.clamp(min=1)[:, None]
    precision = true / (true + false).clamp(min=1e-12)
    # 2. The best precision at that recall or a larger one
    precision = precision.flip(1).cummax(1).values.flip(1)
    if elevens:  # 3a. its mean at eleven recalls (VOC 2007), 0 where a recall is not reached
        recalls = torch.from_numpy(np.arange(0, 1.1, 0.1)).expand(len(recall), -1)
        place = torch.searchsorted(recall.contiguous(), recalls.contiguous())
        reached = (place < recall.shape[1]) & (truths > 0)[:, None]
        return (precision.gather(1, place.clamp(max=recall.shape[1] - 1)) * reached).sum(1) / 11
    # 3b. or the area below it
    steps = torch.diff(recall, dim=1, prepend=torch.zeros(len(recall), 1, dtype=recall.dtype))
    return (steps * precision).sum(1)
