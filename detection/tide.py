"""Says which error each detection is, by the rules of TIDE (Bolya et al., ECCV 2020).

Detections of an image are matched as COCO matches them at an overlap of 0.5. Then every detection that
is no hit is the first of these that it fits:

    location     its best overlap with an object of its class is 0.1 to 0.5
    class        it overlaps an object of another class by 0.5 or more
    duplicate    it overlaps an object of its class by 0.5 or more, which a surer detection has found
    background   it overlaps no object by more than 0.1
    both         anything else: beside an object of another class

hotcoco counts these errors, too, and must find the same, but it does not say which detection is which.
The one thing that it counts otherwise is left out of the comparison: it takes a crowd for an object.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from backbench.detection import evaluate
from backbench.detection.data.dataset_dicts import Detection
from backbench.detection.data.split import Split
from backbench.errors import BadInput
from backbench.stats import ap_errors
from backbench.stats.ap_errors import (
    BACKGROUND,
    BOTH,
    CLASS,
    DUPLICATE,
    HIT,
    IGNORED,
    LOCATION,
    NO_CLASS,
    Outcomes,
)

KINDS = ("bbox", "segm")  # keypoints have no overlap
FOUND = 0.5  # overlap of a detection with its object
BESIDE = 0.1  # overlap of a detection that is beside an object, and not on background
MOST = 100  # detections of one image and class, the surest: COCO's
_OF_HOTCOCO = {
    "class": "Cls",
    "location": "Loc",
    "both": "Both",
    "duplicate": "Dupe",
    "background": "Bkg",
    "missed": "Miss",
}

Row = Mapping[str, Any]  # an object or a detection, as COCOeval takes it


def outcomes(split: Split, detections: Sequence[Detection], kind: str) -> Outcomes:
    """Return what became of the detections of a split. BadInput where hotcoco counts otherwise."""
    truth = evaluate.ground_truth(split, kind)
    rows = evaluate.rows_of(detections, split, kind)
    check_with_hotcoco(split, truth, rows, kind)
    return of_rows(truth, rows, kind)


def of_rows(truth: Mapping[str, Any], rows: Sequence[Row], kind: str) -> Outcomes:
    """Return what became of detections, from COCO's dataset and results; ids count from 1."""
    shape = evaluate.AP_KINDS[kind].shape
    objects: dict[int, list[Row]] = {}
    found: dict[int, list[Row]] = {}
    for a in truth["annotations"]:
        objects.setdefault(a["image_id"], []).append(a)
    for row in rows:
        found.setdefault(row["image_id"], []).append(row)
    of_detections: list[np.ndarray] = []
    of_objects: list[np.ndarray] = []
    for index, about in enumerate(truth["images"]):
        annotations = objects.get(about["id"], [])
        surest = _surest(found.get(about["id"], []))
        score, table, missed = _of_image(
            _drawable(annotations, about, shape), surest, shape
        )
        of_detections.append(
            np.column_stack([score, np.full(len(score), index), table])
        )
        of_objects.append(np.column_stack([np.full(len(missed), index), missed]))
    everything = np.concatenate(of_detections)
    # Of equals the first image's comes first, as in COCOeval
    everything = everything[np.argsort(-everything[:, 0], kind="stable")]
    _, image, category, fault, mended = everything.T
    object_image, object_category, object_missed = np.concatenate(of_objects).T
    return Outcomes(
        images=len(truth["images"]),
        image=image.astype(np.int32),
        category=category.astype(np.int16),
        fault=fault.astype(np.uint8),
        mended=mended.astype(np.int16),
        object_image=object_image.astype(np.int32),
        object_category=object_category.astype(np.int16),
        object_missed=object_missed.astype(np.uint8),
    )


def _surest(detections: Sequence[Row]) -> list[Row]:
    """Put an image's detections in order, the surest first, and keep the first MOST of each class."""
    kept = []
    seen: dict[int, int] = {}
    for row in sorted(detections, key=lambda row: -row["score"]):
        seen[row["category_id"]] = seen.get(row["category_id"], 0) + 1
        if seen[row["category_id"]] <= MOST:
            kept.append(row)
    return kept


def _drawable(annotations: Sequence[Row], about: Row, shape: str) -> list[Row]:
    """Turn outlines into the run lengths that overlaps are computed from."""
    if shape != "segmentation":
        return list(annotations)
    from pycocotools import mask

    drawn: list[Row] = []
    for a in annotations:
        outline = a[shape]
        if isinstance(outline, list) or isinstance(outline["counts"], list):
            outline = mask.frPyObjects(outline, about["height"], about["width"])
        if isinstance(outline, list):
            outline = mask.merge(outline)
        drawn.append({**a, shape: outline})
    return drawn


def _of_image(
    annotations: Sequence[Row], detections: Sequence[Row], shape: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return of one image the scores (d,), the class, fault and mended class of each detection (d, 3),
    and the class of each object and whether it is missed (g, 2)."""
    objects = [a for a in annotations if not a["iscrowd"]]
    crowds = [a for a in annotations if a["iscrowd"]]
    category = _classes(detections)
    of_object = _classes(objects)
    overlap = _overlaps(detections, objects, shape, crowd=False)
    own = overlap * (category[:, None] == of_object)
    other = overlap - own
    in_crowd = _overlaps(detections, crowds, shape, crowd=True)
    in_crowd = in_crowd * (category[:, None] == _classes(crowds))
    # 1. COCO's matching: the surest detection takes the free object that it overlaps most
    fault = np.full(len(detections), BOTH)
    is_found = np.zeros(len(objects), bool)
    for d in range(len(detections)):
        free = np.where(is_found, 0, own[d])
        if _most(free) >= FOUND:
            # Of equals COCOeval takes the last
            is_found[len(free) - 1 - free[::-1].argmax()] = True
            fault[d] = HIT
        elif _most(in_crowd[d]) >= FOUND:
            fault[d] = IGNORED
    # 2. Why the others are no hits, and which object each could find
    mended = np.full(len(detections), NO_CLASS)
    within_reach = is_found.copy()
    for d in np.flatnonzero(fault == BOTH).tolist():
        target = None
        if BESIDE <= _most(own[d]) <= FOUND:
            fault[d] = LOCATION
            target = int(own[d].argmax())
        elif _most(other[d]) >= FOUND:
            fault[d] = CLASS
            target = int(other[d].argmax())
        elif _most(own[d]) >= FOUND:
            fault[d] = DUPLICATE
        elif _most(overlap[d]) <= BESIDE:
            fault[d] = BACKGROUND
        # The surest detection of an object that is not found yet would find it
        if target is not None and not within_reach[target]:
            within_reach[target] = True
            mended[d] = of_object[target]
    score = np.array([row["score"] for row in detections], np.float64)
    table = np.column_stack([category, fault, mended])
    return score, table, np.column_stack([of_object, ~within_reach])


def _classes(rows: Sequence[Row]) -> np.ndarray:
    return np.array([row["category_id"] - 1 for row in rows], np.int64)


def _most(overlaps: np.ndarray) -> float:
    return float(overlaps.max(initial=0.0))


def _overlaps(
    detections: Sequence[Row], objects: Sequence[Row], shape: str, *, crowd: bool
) -> np.ndarray:
    """Return the overlaps (d, g); with a crowd it is the part of the detection inside."""
    from pycocotools import mask

    if not detections or not objects:
        return np.zeros((len(detections), len(objects)))
    overlaps = mask.iou(
        [row[shape] for row in detections],
        [row[shape] for row in objects],
        [int(crowd)] * len(objects),
    )
    return np.asarray(overlaps, np.float64)


def check_with_hotcoco(
    split: Split, truth: Mapping[str, Any], rows: Sequence[Row], kind: str
) -> None:
    """Raise BadInput unless hotcoco finds the same errors, and costs, where nothing is a crowd."""
    # 1. The same objects without crowds, and scores without equals, which it ranks in its own order
    alone = [a for a in truth["annotations"] if not a["iscrowd"]]
    without_crowds = {**truth, "annotations": alone}
    order = sorted(range(len(rows)), key=lambda i: -rows[i]["score"])
    ranked = [dict(row) for row in rows]
    for place, index in enumerate(order):
        ranked[index]["score"] = 1 - place / len(rows)
    # 2. Both
    theirs = evaluate.matched(without_crowds, ranked, kind, ()).tide_errors()
    ours = of_rows(without_crowds, ranked, kind)
    costs = ap_errors.costs(ours, np.ones((1, ours.images)))
    for name, code in ap_errors.ERRORS.items():
        counted = int((ours.fault == code).sum())
        if code == ap_errors.MISSED:
            counted = int(ours.object_missed.sum())
        said = int(theirs["counts"][_OF_HOTCOCO[name]])
        cost = 100 * float(theirs["delta_ap"][_OF_HOTCOCO[name]])
        if counted != said or abs(costs[name][0] - cost) > evaluate.ROUNDING * 100:
            raise BadInput(
                f"{split.file}: {counted} errors of {kind} are '{name}' and cost"
                f" {costs[name][0]:.4f} points; hotcoco has {said} and {cost:.4f}; install another"
                " hotcoco"
            )
