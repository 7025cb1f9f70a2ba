"""Reads a folder of boxes of one's own as the images to train on and those to score."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from backbench.containers.spans import plain_name
from backbench.datasets.boxes import box_folders, voc_xml, yolo_text
from backbench.datasets.boxes.parts import BoxFolder, BoxPart, Keypoints
from backbench.detection.data import coco, reading, sides
from backbench.detection.data.dataset_dicts import ImageRecord
from backbench.detection.data.split import (
    DatasetFiles,
    Split,
    join,
    refuse_unlike_keypoints,
)
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput
from backbench.runs.terminal import log
from backbench.untrusted import opening, printable

SHARE = 0.2  # of the images that are drawn for test where there is no split
FEWEST = 5  # images, without a split


def read(base: Path, task: DetectionTask) -> tuple[Split, Split]:
    """Return the images to train on and those to score of the folder `base`, whose name is the
    dataset's.

    Scored is the test list, or else val, or else a drawn fifth; everything else is trained on.
    Classes and images are in the order of their names, so that one set in another layout gives the
    same lists and the same numbers. Raises BadInput, one line, for what would train wrongly."""
    boxes = box_folders.must_find(base)
    scored = "test" if "test" in boxes.parts else "val"
    if scored not in boxes.parts:
        (whole,) = _parts(boxes, list(boxes.parts), task)
        train, test = _divided(whole, base)
    else:
        trained = [split for split in ("train", "val") if split in boxes.parts]
        if scored == "val":
            trained = ["train"]
        *first, test = _parts(boxes, [*trained, scored], task)
        for part in first:
            _refuse_empty(part, "trained on")
            _refuse_unlike_classes(part, test)
        # Label programs number the classes of each file anew, so names alone say which are alike
        first = [replace(part, ids=test.ids) for part in first]
        train = first[0] if len(first) == 1 else join(first)
        refuse_unlike_keypoints(train, test)
    _refuse_empty(test, "scored")
    train = replace(train, lists_digest=_digest(train))
    return train, replace(test, lists_digest=_digest(test))


def _refuse_empty(split: Split, use: str) -> None:
    """Raise BadInput for a list in which no image has an object."""
    if not any(record["annotations"] for record in split.records):
        raise BadInput(
            f"{split.file}: none of its {len(split.records)} images has an object, and they are to be"
            f" {use}; annotate them, or leave '{split.part}' out"
        )


def _refuse_unlike_classes(taught: Split, scored: Split) -> None:
    """Raise BadInput where one list has a class that the other does not name."""
    for one, other in ((taught, scored), (scored, taught)):
        more = [name for name in one.categories if name not in other.categories]
        if more:
            raise BadInput(
                f"{other.file}: its categories are not those of {one.file}: it lacks"
                f" '{printable.shown(more[0], 60)}'; name the same ones in both, also those without"
                " objects"
            )


def _parts(boxes: BoxFolder, names: Sequence[str], task: DetectionTask) -> list[Split]:
    """Read several parts of a folder, each with its classes and images in order."""
    parts = [boxes.parts[name] for name in names]
    texts: list[bytes] = []
    if boxes.layout == "COCO":
        files = [_annotation_file(part, task) for part in parts]
        texts = [_bytes_of(file) for file in files]
    elif task.outlines and boxes.layout == "VOC":
        raise BadInput(
            f"{boxes.base}: VOC's XML has boxes only, and {task.name} needs outlines; take"
            " faster_rcnn"
        )
    elif task.keypoints and boxes.layout == "VOC":
        raise BadInput(
            f"{boxes.base}: VOC's XML has boxes only, and {task.name} needs keypoints; export"
            " COCO's json, or YOLO's text with kpt_shape"
        )
    elif task.keypoints and boxes.keypoints is None:
        raise BadInput(
            f"{boxes.base}: no data.yaml has kpt_shape, and {task.name} needs keypoints; write"
            " `kpt_shape: [K, 3]` for K keypoints of x, y and visibility, or take faster_rcnn"
        )
    elif boxes.layout == "VOC":
        texts = [json.dumps(content).encode() for content in voc_xml.read(parts)]
    else:
        assert boxes.classes is not None
        for part in parts:
            content = yolo_text.read(
                part,
                boxes.classes,
                outlines=task.outlines,
                keypoints=boxes.keypoints,
            )
            texts.append(json.dumps(content).encode())
    splits = []
    for name, part, text in zip(names, parts, texts, strict=True):
        split = _split(boxes.base, name, part, text, task)
        if task.keypoints and boxes.keypoints is not None:
            split = _with_partners(split, boxes.keypoints)
        splits.append(split)
    return splits


def _with_partners(split: Split, described: Keypoints) -> Split:
    """Let a description say which keypoints change places in a mirrored image."""
    if described.partners is not None:
        return replace(split, partners=described.partners)
    return replace(split, partners_unknown=not described.named)


def _split(
    base: Path, name: str, part: BoxPart, text: bytes, task: DetectionTask
) -> Split:
    files = DatasetFiles(
        f"own_{base.name}_{name or 'all'}", part.file, part.folder, dataset=base.name
    )
    try:
        split = coco.parse(text, files, task)
    except BadInput as error:
        raise BadInput(f"{part.file}: {error}") from None
    names = [record["file_name"] for record in split.records]
    if len(set(names)) < len(names):
        twice = max(names, key=names.count)
        raise BadInput(
            f"{part.file}: image '{printable.shown(twice, 100)}' is listed twice; take one out"
        )
    reading.find_images(split)
    return replace(_in_order(split), content=text)


def _annotation_file(part: BoxPart, task: DetectionTask) -> Path:
    if task.keypoints and part.keypoints:
        return part.keypoints
    return part.file


def _bytes_of(file: Path) -> bytes:
    try:
        return opening.read_bytes(file, most=coco.LARGEST_FILE)
    except OSError as error:
        said = printable.shown(error.strerror or str(error), 100)
        raise BadInput(f"{file}: not readable ({said})") from None


def _in_order(split: Split) -> Split:
    """Put the classes in the order of their names, and the images in that of their files' names."""
    order = sorted(range(len(split.categories)), key=lambda i: split.categories[i])
    label_of = {old: new for new, old in enumerate(order)}
    for record in split.records:
        for annotation in record["annotations"]:
            annotation["category_id"] = label_of[annotation["category_id"]]
    return replace(
        split,
        categories=tuple(split.categories[i] for i in order),
        ids=tuple(split.ids[i] for i in order),
        records=sorted(split.records, key=_place),
    )


def _place(record: ImageRecord) -> tuple[str, str]:
    path = plain_name(record["file_name"])
    return Path(path).name, path


def _divided(whole: Split, base: Path) -> tuple[Split, Split]:
    """Draw a fifth of the images for test, the same whatever the layout, the run and its seed."""
    count = len(whole.records)
    if count < FEWEST:
        raise BadInput(
            f"{whole.file}: {count} images and no split; {FEWEST} are the fewest that are divided"
        )

    def rank(record: ImageRecord) -> str:
        return hashlib.sha256(f"0 {_place(record)[0]}".encode()).hexdigest()

    drawn = sorted(whole.records, key=rank)[: round(SHARE * count)]
    scored = {id(record) for record in drawn}
    log.info(
        f"{base.name}: no split; a fifth of the images ({len(drawn)} of {count}) is drawn for test, by"
        " sha256 of '0 <name>'"
    )
    halves = []
    for part, taken in (("train", False), ("test", True)):
        records = [each for each in whole.records if (id(each) in scored) is taken]
        files = replace(whole.files, name=f"own_{base.name}_{part}")
        halves.append(replace(whole, files=files, records=records))
    train, test = halves
    return train, replace(test, notes=())


def count_marked(*splits: Split) -> tuple[int, int]:
    """Count the keypoints of all objects that are marked, and all that could be."""
    marked = 0
    places = 0
    for split in splits:
        for record in split.records:
            for annotation in record["annotations"]:
                visibilities = annotation["keypoints"][2::3]
                places += len(visibilities)
                marked += sum(visibility > 0 for visibility in visibilities)
    return marked, places


def _digest(split: Split) -> str:
    """Name a list by what it says of each image, and not by the file in which it says so."""
    sha = hashlib.sha256()
    for record in split.records:
        objects = []
        for annotation in record["annotations"]:
            name = split.categories[annotation["category_id"]]
            rest = {
                key: value
                for key, value in annotation.items()
                if key not in ("bbox", "bbox_mode", "category_id")
            }
            box = [float(value) for value in annotation["bbox"]]
            objects.append(json.dumps([name, box, rest], sort_keys=True))
        name = Path(plain_name(record["file_name"])).name
        about = [name, record["width"], record["height"], sorted(objects)]
        sha.update(json.dumps(about).encode())
    sha.update(json.dumps([split.categories, split.keypoints]).encode())
    if split.flip != sides.partners(split.keypoints):
        sha.update(json.dumps(split.flip).encode())
    return sha.hexdigest()
