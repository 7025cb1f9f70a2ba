"""PASCAL VOC's files as records. AP by VOC's rules is in detection/voc_ap.py."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from backbench.errors import BadInput
from backbench.untrusted import opening, printable
from detection.data import rows
from detection.data.dataset_dicts import XYWH, Annotation, ImageRecord
from detection.data.split import Split
from detection.task_rows import DetectionTask

# fmt: off
VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train",
    "tvmonitor",
)
# fmt: on
# Detectron2's names -> (folder below ROOT, list of images)
VOC = {
    "voc_2007_trainval": ("VOC2007", "trainval"),
    "voc_2007_test": ("VOC2007", "test"),
    "voc_2012_trainval": ("VOC2012", "trainval"),
    "voc_2012_test": ("VOC2012", "test"),
}


def read(name: str, root: Path, *, task: DetectionTask) -> Split:
    """ROOT/VOC2007/{ImageSets/Main,Annotations,JPEGImages}. Objects marked difficult are trained on
    and, as VOC has it, neither hit nor miss when scored."""
    year, part = VOC[name]
    folder = root / year
    file = folder / "ImageSets" / "Main" / f"{part}.txt"
    if task.outlines or task.keypoints:
        raise BadInput(f"{name}: VOC has boxes only; the {task.name} task needs COCO")
    if not file.is_file():
        raise BadInput(
            f"{file}: no such file; VOC is ROOT/{year}/{{ImageSets,Annotations,JPEGImages}}"
        )
    try:
        names = opening.read_bytes(file, most=opening.GIGABYTE).decode().split()
    except (OSError, ValueError) as error:
        raise BadInput(f"{file}: not a list of images ({error})") from None
    records = [_record(folder, image) for image in names]
    if not records:
        raise BadInput(f"{file}: no images")
    labels = tuple(range(len(VOC_CLASSES)))
    return Split(name, file, folder / "JPEGImages", VOC_CLASSES, labels, records)


def _record(folder: Path, image: str) -> ImageRecord:
    path = folder / "Annotations" / f"{image}.xml"
    try:
        if not re.fullmatch(r"[\w-]{1,100}", image):
            raise ValueError("a name that is no plain word")
        with opening.open_regular(path, most=opening.GIGABYTE) as opened:
            tree = ET.parse(opened)
        height, width = (int(str(tree.findtext(f"size/{k}"))) for k in ("height", "width"))
        if not 0 < height < 1 << 31 > width > 0:
            raise ValueError(f"{width} x {height} pixels")
        objects = [_object(node) for node in tree.iter("object")]
    except (OSError, ET.ParseError, ValueError, LookupError) as error:
        where, said = printable.shown(str(path), 300), printable.shown(str(error), 100)
        raise BadInput(f"{where}: not a VOC annotation file ({said})") from None
    return {
        "file_name": str(folder / "JPEGImages" / f"{image}.jpg"),
        "image_id": image,
        "height": height,
        "width": width,
        "annotations": objects,
    }


def _object(node: ET.Element) -> Annotation:
    # What the evaluator reads as well, after the training
    for key in ("pose", "truncated", "difficult"):
        if node.find(key) is None:
            raise ValueError(f"an object has no <{key}>")
    # Boxes are 1-based and inclusive in the files.
    corners = [float(str(node.findtext(f"bndbox/{k}"))) for k in ("xmin", "ymin", "xmax", "ymax")]
    if not all(map(rows.is_number, corners)):
        raise ValueError(f"a box {corners}")
    x1, y1, x2, y2 = corners
    label = VOC_CLASSES.index(str(node.findtext("name")))
    box = [x1 - 1, y1 - 1, x2 - x1 + 1, y2 - y1 + 1]
    difficult = bool(int(str(node.findtext("difficult"))))
    return {
        "bbox": box,
        "bbox_mode": XYWH,
        "category_id": label,
        "iscrowd": 0,
        "difficult": difficult,
    }
