"""Describes a folder of boxes of one's own for `data check`, as `detect` would read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
        drawn = own.read(base, MASK_RCNN) if boxes.has_outlines() else None
        posed: tuple[Split, Split] | None = None
        if _has_keypoints(train):
            posed = own.read(base, KEYPOINT_RCNN)
    except BadInput as error:
        return said, [str(error)]
    classes = ", ".join(scored.categories[:MOST_CLASSES])
    said.append(
        f"boxes in {boxes.layout}'s layout, {len(scored.categories)} classes: {classes}"
    )
    # What is said of boxes, outlines and keypoints, once each
    of_train = list(train.notes)
    of_scored = list(scored.notes)
    for pair in (drawn, posed):
        if pair is not None:
            of_train += pair[0].notes
            of_scored += pair[1].notes
    for split, use, notes in (
        (train, "trained on", of_train),
        (scored, "scored", of_scored),
    ):
        part = split.name.replace(f"own_{base.name}_", "")
        said.append(
            f"{part}: {len(split.records)} images, {use}; {_objects(split)} objects;"
            f" sha256 of the list {split.lists_digest}"
        )
        for note in (*dict.fromkeys(notes), *evaluate.health(split)):
            wrong.append(f"{part}: {note}")
    said += _without_objects(train, scored)
    wrong += _alike(scored.categories)
    wrong += lint.untaught(train, scored)
    if posed:
        said.append(_keypoints(*posed))
        try:
            lint.check_partners(posed[0])
        except BadInput as error:
            wrong.append(str(error))
    return said, wrong


def _without_objects(train: Split, scored: Split) -> list[str]:
    """Say which classes and how many images have no object, as both are easily an oversight."""
    there = set()
    said = []
    for split, use in ((train, "trained on"), (scored, "scored")):
        empty = [r for r in split.records if not r["annotations"]]
        if empty:
            first = Path(empty[0]["file_name"]).name
            said.append(
                f"{len(empty)} of {len(split.records)} images that are {use} have no object, first"
                f" {first}"
            )
        there |= {a["category_id"] for r in split.records for a in r["annotations"]}
    absent = [n for k, n in enumerate(scored.categories) if k not in there]
    if absent:
        said.append(
            f"{len(absent)} of {len(scored.categories)} classes have no object:"
            f" {', '.join(absent[:MOST_CLASSES])}"
        )
    return said


def _alike(categories: Sequence[str]) -> list[str]:
    """Say which classes are perhaps one, spelled in two ways."""
    spelled: dict[str, str] = {}
    wrong = []
    for name in categories:
        other = spelled.setdefault("".join(name.lower().split()), name)
        if other != name:
            by = []
            if "".join(other.split()) != "".join(name.split()):
                by.append("capital letters")
            if other.lower() != name.lower():
                by.append("blanks")
            wrong.append(
                f"classes '{other}' and '{name}' differ by {' and '.join(by)} alone; if they are"
                " one, spell it in one way"
            )
    return wrong


def _keypoints(train: Split, scored: Split) -> str:
    """Say which keypoints there are, how many are marked, and which change places when mirrored."""
    names = train.keypoints
    shown = ", ".join(names[:MOST_KEYPOINTS])
    marked, places = own.count_marked(train, scored)
    mirrored = sides.said(names, train.flip)
    return f"{len(names)} keypoints ({shown}), {marked} of {places} marked; {mirrored}"


def _has_keypoints(train: Split) -> bool:
    """Return True where `detect` could train Keypoint R-CNN: one class, with keypoints."""
    about = json.loads(train.annotations())
    used = {row["category_id"] for row in about["annotations"]}
    classes = [c for c in about["categories"] if c["id"] in used or c.get("keypoints")]
    return len(classes) == 1 and bool(classes[0].get("keypoints"))


def _objects(split: Split) -> int:
    """Count the objects of all images."""
    return sum(len(record["annotations"]) for record in split.records)
