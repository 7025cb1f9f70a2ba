"""Finds annotation files in COCO's format, and the folder of each file's images."""

from __future__ import annotations

import os
import re
from pathlib import Path

from backbench.datasets.boxes.parts import (
    LARGEST_JSON,
    UNDIVIDED,
    BoxPart,
    files_in,
    near,
    split_folders,
    split_named,
)
from backbench.errors import BadInput
from backbench.untrusted import jsons, opening, printable

# Files of COCO that hold no boxes
OTHERS = ("captions", "image_info", "panoptic", "stuff")
KEYPOINTS = "person_keypoints"
# The lists that make a json file one of annotations
LISTS = (b'"images"', b'"annotations"', b'"categories"')


def find(base: Path) -> dict[str, BoxPart] | None:
    """Return split -> annotation file: those in annotations/, in the folder itself, or beside the
    images of each split. None where there are none."""
    files = files_in(base / "annotations", ".json")
    if not files:
        files = [file for file in files_in(base, ".json") if _has_boxes(file)]
    if not files:
        for _, folder in split_folders(base):
            files += [file for file in files_in(folder, ".json") if _has_boxes(file)]
    files = [file for file in files if not file.stem.startswith(OTHERS)]
    if not files:
        return None
    # 1. The split of each file, and whether it is the one of keypoints
    boxes: dict[str, Path] = {}
    keypoints: dict[str, Path] = {}
    for file in files:
        split = _split_of_file(file, base)
        of_kind = keypoints if file.stem.startswith(KEYPOINTS) else boxes
        if split in of_kind:
            whose = f"for '{split}'" if split else "of no split"
            raise BadInput(
                f"{file.parent}: two annotation files {whose}, {of_kind[split].name} and"
                f" {file.name}; keep one, or name the splits in them (train, val, test)"
            )
        of_kind[split] = file
    # 2. One part a split
    parts = {}
    for split in sorted({*boxes, *keypoints}):
        file = boxes.get(split) or keypoints[split]
        folder = _image_folder(file, base, split)
        parts[split] = BoxPart(file, folder, keypoints=keypoints.get(split))
    return parts


def _has_boxes(file: Path) -> bool:
    """Return True for a json file that has the lists of annotations."""
    try:
        text = opening.read_bytes(file, most=LARGEST_JSON)
    except OSError:
        return False
    return all(name in text for name in LISTS)


def _split_of_file(file: Path, base: Path) -> str:
    """Return the split that a file's name states, or else its folder's."""
    for word in re.split(r"[^A-Za-z0-9]+", file.stem):
        split = split_named(word)
        if split is not None:
            return split
    if file.parent != base:
        return split_named(file.parent.name) or UNDIVIDED
    return UNDIVIDED


def _image_folder(file: Path, base: Path, split: str) -> Path:
    """Return the first of the usual folders that has the file's first image."""
    name = _first_image(file)
    last_word = re.split(r"[^A-Za-z0-9]+", file.stem)[-1]
    usual = [file.parent, base / "images", base]
    for above in (base, base / "images"):
        if last_word and (above / last_word).is_dir():
            usual.insert(0, above / last_word)
        usual += [folder for each, folder in split_folders(above) if each == split]
    usual.append(base / "JPEGImages")
    for folder in usual:
        if _lies_below(name, folder):
            return folder
    shown = printable.shown(name, 100)
    for folder in usual:
        if meant := near(name, folder):
            raise BadInput(
                f"{file}: its first image '{shown}' is no image below {base}, but {folder / meant} is; write each"
                f" file_name as it lies below its folder, '{meant}'"
            )
    raise BadInput(
        f"{file}: its first image '{shown}' lies neither beside it nor in"
        f" {base}/{{images,images/{split or 'train'},{split or 'train'}}}; put the images there"
    )


def _lies_below(name: str, folder: Path) -> bool:
    """Return whether `folder` has an image of that name, which may be an absolute path."""
    inside = os.path.relpath(name, folder) if name.startswith("/") else name
    inside = os.path.normpath(inside)
    if inside.startswith(".."):
        return False
    return (folder / inside).is_file()


def _first_image(file: Path) -> str:
    try:
        about = jsons.decode(opening.read_bytes(file, most=LARGEST_JSON))
        if isinstance(about, list):
            raise BadInput(
                f"{file}: a list, as of detections, and no annotation file in COCO's format; export"
                " the annotations"
            )
        images = about["images"]
        if not isinstance(images, list):
            raise BadInput(
                f"{file}: 'images' is no list, and so no annotation file in COCO's format; export"
                " it again"
            )
        name = images[0]["file_name"]
    except IndexError:
        raise BadInput(
            f"{file}: its 'images' list is empty; list the images, or take the file away"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = printable.shown(" ".join(str(error).split()), 100)
        raise BadInput(
            f"{file}: not an annotation file in COCO's format ({said}); export it again"
        ) from None
    if not isinstance(name, str) or not name:
        raise BadInput(
            f"{file}: 'images' number 1: file_name {name!r:.60}; it must be an image's name"
        )
    return name
