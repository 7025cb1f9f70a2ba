"""Reads boxes as labels: which classes an image shows, from COCO's json, VOC's XML or YOLO's text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backbench.datasets import splits
from backbench.datasets.boxes import box_folders, voc_xml, yolo_text
from backbench.datasets.boxes.parts import (
    LARGEST_JSON,
    UNDIVIDED,
    BoxFolder,
    CocoContent,
)
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.multilabel import MultiLabelList, mark
from backbench.untrusted import jsons, opening, printable


def read(base: Path, seed: int) -> Splits:
    """Read the boxes of a folder. Scored is the test list, or else val, or else a drawn fifth, as by
    detectors; of what is left val chooses, or a fifth that is held out."""
    boxes = box_folders.must_find(base)
    contents = _contents(boxes)
    classes = sorted({row["name"] for about in contents.values() for row in about[0]})
    lists = {}
    for split, (categories, content) in contents.items():
        part = boxes.parts[split]
        lists[split] = _list_of(part.folder, part.file, categories, content, classes)
    scored = "test" if "test" in lists else "val"
    if scored not in lists:
        ((name, whole),) = lists.items()
        # By one seed, whatever the run's is: all seeds are scored on one list
        rest, drawn = splits.hold_out(whole, seed=0)
        lacks = "split" if name == UNDIVIDED else "list of test or val"
        note = (
            f"{base} has no {lacks}: a fifth of the images ({len(drawn)} of {len(whole)}) is drawn"
            " for test, by sha256 of '0 <path>'"
        )
        train = whole.subset(rest)
        return splits.with_hold_out(
            train, whole.subset(drawn), seed=seed, notes=(note,)
        )
    val = lists.get("val") if scored == "test" else None
    return splits.with_hold_out(lists["train"], lists[scored], val, seed=seed)


def _contents(
    boxes: BoxFolder,
) -> dict[str, tuple[list[dict[str, Any]], CocoContent]]:
    """Return split -> its categories and its lists, as COCO has them."""
    names = list(boxes.parts)
    parts = [boxes.parts[name] for name in names]
    contents: list[CocoContent] = []
    if boxes.layout == "COCO":
        contents = [_json_of(part.file) for part in parts]
    elif boxes.layout == "VOC":
        contents = list(voc_xml.read(parts))
    else:
        assert boxes.classes is not None
        for part in parts:
            contents.append(
                yolo_text.read(part, boxes.classes, keypoints=boxes.keypoints)
            )
    found = {}
    for name, part, content in zip(names, parts, contents, strict=True):
        found[name] = (_categories(part.file, content), content)
    return found


def _json_of(file: Path) -> CocoContent:
    try:
        content = jsons.decode(opening.read_bytes(file, most=LARGEST_JSON))
    except (OSError, ValueError) as error:
        said = printable.shown(" ".join(str(error).split()), 100)
        raise BadInput(f"{file}: not readable ({said}); export it again") from None
    for key in ("images", "annotations", "categories"):
        rows = content.get(key) if isinstance(content, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise BadInput(f"{file}: has no list '{key}' as COCO's; export it again")
    found: CocoContent = content
    return found


def _categories(file: Path, content: CocoContent) -> list[dict[str, Any]]:
    for row in content["categories"]:
        if not isinstance(row.get("name"), str) or "id" not in row:
            raise BadInput(
                f"{file}: a category needs an id and a name, not"
                f" {printable.shown(str(row), 80)}"
            )
    return content["categories"]


def _list_of(
    folder: Path,
    file: Path,
    categories: list[dict[str, Any]],
    content: CocoContent,
    classes: list[str],
) -> MultiLabelList:
    """Make the list of a split. A class with a crowd of objects counts as present."""
    label_of = {row["id"]: classes.index(row["name"]) for row in categories}
    present: dict[object, set[int]] = {}
    for row in content["images"]:
        if not isinstance(row.get("file_name"), str) or "id" not in row:
            raise BadInput(
                f"{file}: an image needs an id and a file_name, not"
                f" {printable.shown(str(row), 80)}"
            )
        present[row["id"]] = set()
    for row in content["annotations"]:
        image = row.get("image_id")
        category = row.get("category_id")
        if image not in present or category not in label_of:
            raise BadInput(
                f"{file}: annotation {printable.shown(str(row.get('id')), 20)} is of image"
                f" {printable.shown(str(image), 40)} and category"
                f" {printable.shown(str(category), 40)}, which the file does not have"
            )
        present[image].add(label_of[category])
    pairs = sorted(
        (row["file_name"], mark(present[row["id"]])) for row in content["images"]
    )
    paths = tuple(path for path, _ in pairs)
    for path in paths:
        if path.startswith("/") or ".." in path.split("/"):
            raise BadInput(
                f"{file}: file_name '{printable.shown(path, 100)}' is outside of {folder}"
            )
    marks = tuple(said for _, said in pairs)
    # An image of several classes has no label of its own; the marks have its classes.
    labels = (0,) * len(paths)
    return MultiLabelList(folder, paths, labels, tuple(classes), marks)
