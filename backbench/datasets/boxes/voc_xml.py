"""Finds and reads boxes in VOC's format: an XML file for each image.

Corners are VOC's own: whole pixels that are counted from 1, the last one included. hotcoco, and
Detectron2 with it, reads them so, too.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backbench.datasets.boxes.parts import (
    LARGEST_LABELS,
    LARGEST_LIST,
    UNDIVIDED,
    BoxPart,
    CocoContent,
    LabelledImage,
    below,
    files_in,
    last_of,
    one_each,
    pictures_in,
    read_text,
    refuse_unlike,
    split_folders,
    split_named,
)
from backbench.errors import BadInput
from backbench.untrusted import opening, printable

CORNERS = ("xmin", "ymin", "xmax", "ymax")
FARTHEST = 1e6  # pixels; no image is so large


def find(base: Path) -> dict[str, BoxPart] | None:
    """Return split -> images with their XML files. None where there are none.

    They lie in Annotations/ (or annotations/) beside JPEGImages/ (or images/), with VOC's lists in
    ImageSets/Main/ or without; or each beside its image. Without lists a folder a split may have
    either."""
    whole = _labels_and_pictures(base)
    if whole is not None:
        where, pictures = whole
        labels = {file.stem: file for file in files_in(where, ".xml")}
        lists = _lists(base)
        if lists:
            return {
                split: _listed(file, base, where, pictures, labels)
                for split, file in lists.items()
            }
        return {UNDIVIDED: _paired(where, base, pictures, labels)}
    found: dict[Path, tuple[Path, dict[str, Path]]] = {}
    divided = []
    for split, folder in split_folders(base):
        inner = _labels_and_pictures(folder)
        if inner is None and files_in(folder, ".xml"):
            inner = folder, pictures_in(folder)
        if inner is not None:
            divided.append((split, folder))
            found[folder] = inner
    beside = one_each(divided)
    if not beside:
        in_base = files_in(base, ".xml")
        # CVAT's <annotations> are of all images. Of what cannot be read, reading it says what is wrong
        if in_base and _first_tag(in_base[0]) != "annotations":
            beside = {UNDIVIDED: base}
            found[base] = base, pictures_in(base)
    parts = {}
    for split, folder in beside.items():
        where, pictures = found[folder]
        labels = {file.stem: file for file in files_in(where, ".xml")}
        parts[split] = _paired(where, base, pictures, labels)
    return parts or None


def _labels_and_pictures(base: Path) -> tuple[Path, dict[str, Path]] | None:
    """Return the folder of XML files in `base`, and the images beside it; None where there is no such
    folder."""
    for where in (base / "Annotations", base / "annotations"):
        in_folder = files_in(where, ".xml")
        if not in_folder:
            continue
        pictures: dict[str, Path] = {}
        for name in ("JPEGImages", "images"):
            pictures = pictures or pictures_in(base / name)
        if not pictures:
            raise BadInput(
                f"{base}: has {len(in_folder)} XML files in {where.name}, and no images; put them in"
                f" {base / 'JPEGImages'}"
            )
        return where, pictures
    return None


def is_voc(file: Path) -> bool:
    """Return True for an XML file that begins as VOC's do."""
    return _first_tag(file) == "annotation"


def _first_tag(file: Path) -> str | None:
    """Return the tag with which an XML file begins; None for one that cannot be read."""
    try:
        tree = ET.fromstring(opening.read_bytes(file, most=LARGEST_LABELS))
    except (OSError, ET.ParseError, ValueError, LookupError):
        return None
    return tree.tag


def _lists(base: Path) -> dict[str, Path]:
    """Return split -> VOC's list of images. Of trainval.txt the parts are taken, if they are there."""
    named = []
    for file in files_in(base / "ImageSets" / "Main", ".txt"):
        split = split_named(file.stem)
        if split is not None:
            named.append((split, file))
    found = one_each(named)
    trainval = base / "ImageSets" / "Main" / "trainval.txt"
    if "train" not in found and trainval.is_file():
        found["train"] = trainval
        found.pop("val", None)
    return found


def _listed(
    file: Path,
    base: Path,
    where: Path,
    pictures: dict[str, Path],
    labels: dict[str, Path],
) -> BoxPart:
    """Read a list of images. Lists of one class have a second column, which says nothing here."""
    pairs = []
    seen = set()
    lines = read_text(file, most=LARGEST_LIST).splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name = line.split()[0]
        shown = printable.shown(name, 100)
        if name in seen:
            raise BadInput(
                f"{file}: line {number}: '{shown}' is listed twice; take one out"
            )
        seen.add(name)
        stem = last_of(name).rpartition(".")[0]
        if name not in pictures and stem in pictures:
            raise BadInput(
                f"{file}: line {number}: '{shown}' is an image's file; write its name alone, '{stem}'"
            )
        if name not in pictures:
            raise BadInput(
                f"{file}: line {number}: '{shown}' has no image; put it in"
                f" {base / 'JPEGImages'}, or take the line out"
            )
        if name not in labels:
            raise BadInput(
                f"{file}: line {number}: '{shown}' has no {shown}.xml in {where};"
                " write one (without objects, if there are none), or take the line out"
            )
        pairs.append(LabelledImage(below(pictures[name], base), labels[name]))
    if not pairs:
        raise BadInput(f"{file}: lists no image; write one name a line")
    return BoxPart(file, base, tuple(pairs))


def _paired(
    where: Path, base: Path, pictures: dict[str, Path], labels: dict[str, Path]
) -> BoxPart:
    """Pair every image with its XML file; each must have the other."""
    refuse_unlike(pictures, labels, where, ".xml")
    bare = sorted(set(pictures) - set(labels))
    if bare:
        image = pictures[bare[0]]
        raise BadInput(
            f"{where}: {len(bare)} images have no XML file, first {image.name}; write"
            f" {image.stem}.xml (without objects, if there are none), or take the image away"
        )
    pairs = [LabelledImage(below(pictures[s], base), labels[s]) for s in sorted(labels)]
    return BoxPart(where, base, tuple(pairs))


def read(parts: Sequence[BoxPart]) -> list[CocoContent]:
    """Read the XML files of several parts, as COCO's lists, with the classes of all of them."""
    read_parts = []
    for part in parts:
        read_parts.append([_image(pair) for pair in part.pairs])
    names = set()
    for images in read_parts:
        for _, objects in images:
            names |= {name for name, _ in objects}
    if not names:
        raise BadInput(
            f"{parts[0].file}: no image has an object; annotate some, as <object><name>..."
        )
    numbers = {name: number for number, name in enumerate(sorted(names), 1)}
    categories = [{"id": number, "name": name} for name, number in numbers.items()]
    out = []
    for images in read_parts:
        rows: list[dict[str, Any]] = []
        for row, objects in images:
            for name, box in objects:
                rows.append(
                    {
                        "id": len(rows) + 1,
                        "image_id": row["id"],
                        "category_id": numbers[name],
                        "bbox": box,
                        "area": box[2] * box[3],
                        "iscrowd": 0,
                    }
                )
        image_rows = [row for row, _ in images]
        out.append(
            {"images": image_rows, "categories": categories, "annotations": rows}
        )
    return out


def _image(
    pair: LabelledImage,
) -> tuple[dict[str, Any], list[tuple[str, list[float]]]]:
    """Read an XML file: its image's row, and the class and box of each object."""
    file = pair.labels
    assert file is not None
    try:
        tree = ET.fromstring(opening.read_bytes(file, most=LARGEST_LABELS))
    except (OSError, ET.ParseError, ValueError, LookupError) as error:
        said = printable.shown(" ".join(str(error).split()), 100)
        raise BadInput(
            f"{file}: not an XML file that can be read ({said}); export it again"
        ) from None
    if tree.tag != "annotation":
        tag = printable.shown(tree.tag, 40)
        raise BadInput(f"{file}: begins with <{tag}>; VOC's begin with <annotation>")
    width = _side(tree, "width", file)
    height = _side(tree, "height", file)
    objects = []
    for number, node in enumerate(tree.iter("object"), 1):
        objects.append(_object(node, f"{file}: object {number}"))
    row = {"id": pair.image, "file_name": pair.image, "width": width, "height": height}
    return row, objects


def _side(tree: ET.Element, key: str, file: Path) -> int:
    text = tree.findtext(f"size/{key}")
    if text is None:
        raise BadInput(
            f"{file}: has no <size><{key}>; write the image's {key} in pixels"
        )
    value = _number(text)
    if not 1 <= value < FARTHEST or value != int(value):
        shown = printable.shown(text.strip(), 40)
        raise BadInput(
            f"{file}: <{key}> is '{shown}'; write the image's {key} in pixels"
        )
    return int(value)


def _object(node: ET.Element, where: str) -> tuple[str, list[float]]:
    """Read the class and the box of an object."""
    name = (node.findtext("name") or "").strip()
    if not name:
        raise BadInput(f"{where} has no <name>; write its class")
    if character := printable.control_in(name):
        raise BadInput(f"{where}: its <name> holds {character}; take it out")
    corners = []
    for key in CORNERS:
        text = node.findtext(f"bndbox/{key}")
        if text is None:
            raise BadInput(
                f"{where} ({name}) has no <bndbox><{key}>; a box has {', '.join(CORNERS)}"
            )
        value = _number(text)
        # A NaN compares false, so it is refused, too
        if not -FARTHEST < value < FARTHEST:
            shown = printable.shown(text.strip(), 40)
            raise BadInput(f"{where} ({name}): <{key}> is '{shown}'; write pixels")
        corners.append(value)
    left, top, right, bottom = corners
    for low, high in ((0, 2), (1, 3)):
        if corners[high] < corners[low]:
            raise BadInput(
                f"{where} ({name}): {CORNERS[high]} {corners[high]:g} lies before"
                f" {CORNERS[low]} {corners[low]:g}; exchange the two"
            )
    return name, [left - 1, top - 1, right - left + 1, bottom - top + 1]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
