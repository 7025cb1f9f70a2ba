"""How many points of AP50 each kind of error costs, by the rules of TIDE (Bolya et al., ECCV 2020).

An error of a kind costs as much as AP50 rises once all errors of that kind are mended, and nothing
else is. What mending means stands beside each kind below. `detection/tide.py` says which error each
detection is; this file only counts, so the numbers of a resample of the images follow from the same
arrays without another matching.
"""

from dataclasses import dataclass

import numpy as np

from backbench.stats import coco_ap
from backbench.stats.coco_ap import RankedDetections

# What became of a detection. If several detections would find the same object once mended, the one
# with the highest score does, and the others are removed
HIT = 0
CLASS = 1  # on an object of another class: it becomes that object's hit
LOCATION = 2  # beside an object of its class: it becomes that object's hit
BOTH = 3  # beside an object of another class: it is removed
DUPLICATE = 4  # on an object that one of a higher score has found: it is removed
BACKGROUND = 5  # on no object: it is removed
IGNORED = 6  # in a crowd: neither hit nor error
# An object that no hit finds and that no mended detection would find is no longer counted
MISSED = 7

ERRORS = {
    "class": CLASS,
    "location": LOCATION,
    "both": BOTH,
    "duplicate": DUPLICATE,
    "background": BACKGROUND,
    "missed": MISSED,
}
# Points by which the one imagined image of a paired test changes the difference of two costs. With 100
# points, as for a share of images, intervals are too wide: they cover in up to 100% of simulations
IMAGINED = 10.0
NO_CLASS = -1  # of a detection that is removed when it is mended


@dataclass(frozen=True)
class Outcomes:
    """Holds what became of D detections, the highest score first, and of G objects, in `images` images."""

    images: int
    image: np.ndarray  # (D,): the index of the detection's image
    category: np.ndarray  # (D,): its class, from 0
    fault: np.ndarray  # (D,): HIT to IGNORED
    # (D,): the class of the object that it finds when mended, or NO_CLASS
    mended: np.ndarray
    object_image: np.ndarray  # (G,)
    object_category: np.ndarray  # (G,)
    object_missed: np.ndarray  # (G,): 1 for a missed object


def costs(outcomes: Outcomes, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Return the points that each kind of error costs, (draws,) for each of ERRORS.

    `counts` (draws, images) says how often a draw has each image. AP is read at 101 recalls, so
    mending may lower it by a rounding; such a cost is 0, as in TIDE. It is NaN in a draw without
    objects."""
    weights = np.asfortranarray(counts, dtype=np.int32)
    before = _ap50(outcomes, HIT, weights)
    found = {}
    for name, kind in ERRORS.items():
        after = _ap50(outcomes, kind, weights)
        found[name] = 100 * np.maximum(after - before, 0)
    return found


def ap50(outcomes: Outcomes) -> float:
    """Return the AP50 of all images as they are, in percent."""
    return 100 * float(_ap50(outcomes, HIT, np.ones((1, outcomes.images), np.int32))[0])


def _ap50(o: Outcomes, kind: int, weights: np.ndarray) -> np.ndarray:
    """Return the AP50 of each draw, from 0 to 1, once all errors of a kind are mended; HIT mends none.

    `weights` (draws, images) int32 says how often a draw has each image."""
    # 1. The detections that count, as they are after mending
    category = o.category
    hit = o.fault == HIT
    counted = o.fault != IGNORED
    if kind != HIT:
        to_mend = o.fault == kind
        becomes_hit = to_mend & (o.mended != NO_CLASS)
        category = np.where(becomes_hit, o.mended, category)
        hit = hit | becomes_hit
        counted = counted & (~to_mend | becomes_hit)
    # 2. The mean over the classes that have an object in the draw, before anything is mended
    total = np.zeros(len(weights))
    classes = np.zeros(len(weights))
    for one in np.unique(o.object_category):
        mine = o.object_category == one
        objects = _by_image(o, mine)
        has_objects = coco_ap.objects_of(objects, weights) > 0
        if kind == MISSED:
            objects = _by_image(o, mine & (o.object_missed == 0))
        of_class = counted & (category == one)
        ranked = RankedDetections(
            image=o.image[of_class],
            hit=hit[None, of_class],
            miss=~hit[None, of_class],
            truths=objects,
        )
        total += has_objects * coco_ap.aps(ranked, weights)[:, 0]
        classes += has_objects
    return total / np.where(classes > 0, classes, np.nan)


def _by_image(o: Outcomes, objects: np.ndarray) -> np.ndarray:
    """Count the chosen objects (G,) of each image."""
    return np.bincount(o.object_image[objects], minlength=o.images).astype(np.float64)
