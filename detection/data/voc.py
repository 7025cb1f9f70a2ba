"""Reads PASCAL VOC's files as records. AP by VOC's rules is in detection/voc_ap.py."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import numpy as np

from backbench.datasets.readers import VOC07_CLASSES
from backbench.detection.data import box_format
from backbench.detection.data.dataset_dicts import (
    LARGEST,
    XYWH,
    Annotation,
    ImageRecord,
)
from backbench.detection.data.split import DatasetFiles, Split
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput
from backbench.untrusted import opening, printable

LARGEST_FILE = opening.GIGABYTE  # of a list of images
LAYOUT = "VOC is ROOT/VOC<year>/{ImageSets,Annotations,JPEGImages}"
# Detectron2's names -> (list of images, folder of the images) below ROOT
DATASETS = {
    f"voc_{year}_{part}": (
        f"VOC{year}/ImageSets/Main/{part}.txt",
        f"VOC{year}/JPEGImages",
    )
    for year in (2007, 2012)
    for part in ("trainval", "test")
}


def parse(text: bytes, files: DatasetFiles, task: DetectionTask) -> Split:
    """Read the images that a list names, and their objects from ROOT/VOC<year>/Annotations.

    Objects marked difficult are trained on; in scoring they are neither hit nor miss, as in VOC.
    """
    try:
        names = text.decode().split()
    except ValueError as error:
        raise BadInput(f"not a list of images ({error})") from None
    records: list[ImageRecord] = []
    for name in names:
        path = files.folder.parent / "Annotations" / f"{name}.xml"
        try:
            if not re.fullmatch(r"[\w-]{1,100}", name):
                raise ValueError("a name that is no plain word")
            tree = ET.fromstring(opening.read_bytes(path, most=opening.GIGABYTE))
            height = int(str(tree.findtext("size/height")))
            width = int(str(tree.findtext("size/width")))
            if not (0 < height < 1 << 31 and 0 < width < 1 << 31):
                raise ValueError(f"{width} x {height} pixels")
            objects = [_object(node) for node in tree.iter("object")]
        except (OSError, ET.ParseError, ValueError, LookupError) as error:
            where = printable.shown(f"{path.parent.name}/{path.name}")
            said = printable.shown(str(error), 100)
            raise BadInput(f"{where}: not a VOC annotation file ({said})") from None
        records.append(
            {
                "file_name": f"{name}.jpg",
                "image_id": name,
                "height": height,
                "width": width,
                "annotations": objects,
            }
        )
    if not records:
        raise BadInput("no images")
    ids = tuple(range(len(VOC07_CLASSES)))
    notes = box_format.check(_boxes(records))
    return Split(files, VOC07_CLASSES, ids, records, notes=tuple(notes))


def _boxes(records: Sequence[ImageRecord]) -> box_format.Boxes:
    """Collect the boxes of all images."""
    names: list[int | str] = []
    values = []
    sizes = []
    for record in records:
        for annotation in record["annotations"]:
            names.append(record["image_id"])
            values.append(annotation["bbox"])
            sizes.append((record["width"], record["height"]))
    return box_format.Boxes(
        "image",
        names,
        np.array(values, float).reshape(-1, 4),
        np.array(sizes, float).reshape(-1, 2),
        rule=box_format.VOC,
    )


def _object(node: ET.Element) -> Annotation:
    # The evaluator reads these, too, after the training; it would end with an error.
    for key in ("pose", "truncated", "difficult"):
        if node.find(key) is None:
            raise ValueError(f"an object has no <{key}>")
    corners = []
    for key in ("xmin", "ymin", "xmax", "ymax"):
        corners.append(float(str(node.findtext(f"bndbox/{key}"))))
    # A NaN compares false, so it is refused, too.
    if not all(-LARGEST < value < LARGEST for value in corners):
        raise ValueError(f"a box {corners}")
    # In the files corners are 1-based and inclusive.
    x1, y1, x2, y2 = corners
    return {
        "bbox": [x1 - 1, y1 - 1, x2 - x1 + 1, y2 - y1 + 1],
        "bbox_mode": XYWH,
        "category_id": VOC07_CLASSES.index(str(node.findtext("name"))),
        "iscrowd": 0,
        "difficult": bool(int(str(node.findtext("difficult")))),
    }
