"""Describes a folder of boxes of one's own for `data check`, as `detect` would read it."""

from __future__ import annotations

import json
from pathlib import Path

from backbench.datasets.boxes import box_folders
from backbench.detection import evaluate, lint
from backbench.detection.data import own, sides
from backbench.detection.data.split import Split
from backbench.detection.task_rows import (
    FASTER_RCNN,
    KEYPOINT_RCNN,
    MASK_RCNN,
)
from backbench.errors import BadInput

MOST_CLASSES = 10  # are named in a line
MOST_KEYPOINTS = 20


def check(base: Path) -> tuple[list[str], list[str]]:
    """Read every list and every image of `base`; return what is there, and what is wrong."""
    said: list[str] = []
    wrong: list[str] = []
    try:
        boxes = box_folders.must_find(base)
        train, scored = lint.check_folder(base, FASTER_RCNN)
        if boxes.has_outlines():
            own.read(base, MASK_RCNN)
        posed: tuple[Split, ...] = ()
        if _has_keypoints(train):
            posed = own.read(base, KEYPOINT_RCNN)
    except BadInput as error:
        return said, [str(error)]
    classes = ", ".join(scored.categories[:MOST_CLASSES])
    said.append(
        f"boxes in {boxes.layout}'s layout, {len(scored.categories)} classes: {classes}"
    )
    for split, use in ((train, "trained on"), (scored, "scored")):
        part = split.name.replace(f"own_{base.name}_", "")
        said.append(
            f"{part}: {len(split.records)} images, {use}; {_objects(split)} objects;"
            f" sha256 of the list {split.lists_digest}"
        )
        for note in (*split.notes, *evaluate.health(split)):
            wrong.append(f"{part}: {note}")
    if posed:
        said.append(_keypoints(*posed))
        try:
            lint.check_partners(posed[0])
        except BadInput as error:
            wrong.append(str(error))
    return said, wrong


def _keypoints(train: Split, scored: Split) -> str:
    """Say which keypoints there are, how many are marked, and which change places when mirrored."""
    names = train.keypoints
    shown = ", ".join(names[:MOST_KEYPOINTS])
    marked, places = own.count_marked(train, scored)
    mirrored = sides.said(names, train.flip)
    return f"{len(names)} keypoints ({shown}), {marked} of {places} marked; {mirrored}"


def _has_keypoints(train: Split) -> bool:
    """Return True where `detect` could train Keypoint R-CNN: one class, with keypoints."""
    categories = json.loads(train.annotations())["categories"]
    return len(categories) == 1 and bool(categories[0].get("keypoints"))


def _objects(split: Split) -> int:
    """Count the objects of all images."""
    return sum(len(record["annotations"]) for record in split.records)
