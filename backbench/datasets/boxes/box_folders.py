"""Finds the boxes of a folder, in whichever layout, and says which images are trained on."""

from __future__ import annotations

import contextlib
import itertools
import shlex
from pathlib import Path

from backbench.containers import finding
from backbench.datasets.boxes import coco_json, voc_xml, yolo_text
from backbench.datasets.boxes.parts import (
    UNDIVIDED,
    BoxFolder,
    files_in,
    near,
    split_folders,
)
from backbench.errors import BadInput, no_folder
from backbench.images.folder_walk import subfolders

LAYOUTS = "COCO's annotations/*.json, VOC's Annotations/*.xml, or YOLO's data.yaml and labels/*.txt"

# Folders of one that are looked into for what may have been meant
MOST_FOLDERS = 20

# Folders that the configs of detection name: COCO's, VOC's, and the demo's scenes
NAMED_BY_CONFIGS = ("coco", "scenes", "VOC2007", "VOC2012")
# What rows call them; any other dataset of a detector is a folder of boxes of one's own
KNOWN_BOXES = ("coco2017", "voc2007", "scenes")


def find(base: Path) -> BoxFolder | None:
    """Return the boxes of a folder; None for a folder without any.

    BadInput for two layouts at once, and for lists without images to train on and to score."""
    found: list[BoxFolder] = []
    if not base.is_dir():
        return None
    of_coco = coco_json.find(base)
    if of_coco:
        found.append(BoxFolder(base, "COCO", of_coco))
    of_voc = voc_xml.find(base)
    if of_voc:
        found.append(BoxFolder(base, "VOC", of_voc))
    of_yolo = yolo_text.find(base)
    if of_yolo:
        found.append(of_yolo)
    if not found:
        return None
    if len(found) > 1:
        kinds = " and ".join(each.layout for each in found)
        raise BadInput(
            f"{base}: holds boxes in the layouts of {kinds}; move one of them away"
        )
    boxes = found[0]
    if UNDIVIDED in boxes.parts and len(boxes.parts) > 1:
        beside = [part for part in boxes.parts if part]
        named = f"{' and '.join(beside)} {'is' if len(beside) == 1 else 'are'}"
        raise BadInput(
            f"{boxes.parts[UNDIVIDED].file}: its name tells no split, and {named} beside it; call it"
            " train, or move it away"
        )
    if UNDIVIDED not in boxes.parts and "train" not in boxes.parts:
        there = ", ".join(boxes.parts)
        raise BadInput(
            f"{base}: has {there}, but no train list; call one of them train, or leave the split"
            " out, and a fifth of the images is drawn for test"
        )
    return boxes


def looks_like_boxes(base: Path) -> bool:
    """Return True for a folder with boxes, whatever may be wrong with them."""
    try:
        return find(base) is not None
    except BadInput:
        return True


def refuse(base: Path) -> None:
    """Raise BadInput for a folder of boxes, where images of one class each are read."""
    if looks_like_boxes(base):
        raise BadInput(
            f"{base}: holds boxes, no folder for each class; `backbench evaluate CHECKPOINT --data"
            f" {shlex.quote(str(base))}` trains a detector on them and scores it"
        )


def pictures_of(base: Path) -> Path | None:
    """Return the folder of the images that a folder of boxes trains on; None for no boxes."""
    try:
        boxes = find(base)
    except BadInput:  # boxes with something wrong are boxes all the same
        return base / "images"
    if boxes is None:
        return None
    part = "train" if "train" in boxes.parts else UNDIVIDED
    return boxes.parts[part].pictures


def above(folder: Path) -> Path | None:
    """Return the folder of boxes that a folder of images or labels is a part of."""
    for base in (folder.parent, folder.parent.parent):
        if looks_like_boxes(base):
            return base
    return None


def must_find(base: Path) -> BoxFolder:
    """Return the boxes of a folder. BadInput says what it holds instead."""
    if not base.is_dir():
        for ending in itertools.chain(*finding.ENDINGS.values()):
            archive = base.with_name(base.name + ending)
            if archive.exists():
                raise BadInput(
                    f"{archive}: boxes are read from folders; unpack it to {base}"
                )
        raise BadInput(f"{base}: {no_folder(base)}; expected {LAYOUTS}")
    boxes = find(base)
    if boxes is not None:
        return boxes
    if hint := almost(base):
        raise BadInput(f"{base}: holds no boxes itself; {hint}")
    what = "is empty" if not any(base.iterdir()) else "holds no boxes"
    raise BadInput(f"{base}: {what}; expected {LAYOUTS}")


def almost(base: Path) -> str:
    """Say what of a folder without boxes may have been meant: boxes in a folder below it, or label
    files in a layout that is not read. Empty where nothing may."""
    if not base.is_dir():
        return ""
    folders = [base / name for name in subfolders(base)[:MOST_FOLDERS]]
    below = [one / name for one in folders for name in subfolders(one)[:MOST_FOLDERS]]
    for folder in (*folders, *below):
        with contextlib.suppress(BadInput):
            if find(folder) is not None:
                inside = folder.relative_to(base)
                splits = [split.name for _, split in split_folders(folder.parent)]
                if folder.name in splits and len(splits) > 1:
                    return (
                        f"its folder {inside} holds the boxes of one split; put {', '.join(splits)}"
                        f" together, as {LAYOUTS}"
                    )
                return f"its folder {inside} holds boxes; name {folder}"
    for folder in (base, *folders):
        for file in files_in(folder, ".json", ".xml", ".csv", ".txt"):
            if file.suffix.lower() == ".xml" and voc_xml.is_voc(file):
                return f"{file} is VOC's, whose XML lies in Annotations/ beside JPEGImages/ or images/"
            # Other programs write notes and lists as text, too
            if file.suffix.lower() != ".txt" or near(file.stem, folder):
                return f"{file} may hold boxes in a layout that is not read; export them as {LAYOUTS}"
    return ""
