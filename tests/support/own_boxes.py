"""Writes one small set of boxes in the layouts of COCO, VOC and YOLO.

Images have 64 pixels a side and boxes even ones, so that YOLO's six digits hold them exactly."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hotcoco
import numpy as np
from PIL import Image

SIDE = 64
CLASSES = ("zebra", "cat")  # not in the order of their names
COUNTS = {"train": 6, "val": 3, "test": 3}


def content(split: str, *, outlines: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Make the annotations of a split in COCO's format."""
    draw = np.random.Generator(np.random.PCG64(len(split)))
    images = []
    objects: list[dict[str, Any]] = []
    for number in range(1, COUNTS[split] + 1):
        name = f"{split}_{number}.png"
        images.append({"id": number, "file_name": name, "width": SIDE, "height": SIDE})
        for label in (1, 2):
            x, y = 2 * draw.integers(0, 14, 2)
            width, height = 2 * draw.integers(8, 17, 2)
            box = [int(x), int(y), int(width), int(height)]
            row = {
                "id": len(objects) + 1,
                "image_id": number,
                "category_id": label,
                "bbox": box,
                "area": box[2] * box[3],
                "iscrowd": 0,
            }
            if outlines:
                right, bottom = box[0] + box[2], box[1] + box[3]
                outline = [box[0], box[1], right, box[1], right, bottom, box[0], bottom]
                row["segmentation"] = [outline]
            objects.append(row)
    categories = [{"id": i, "name": name} for i, name in enumerate(CLASSES, 1)]
    return {"images": images, "categories": categories, "annotations": objects}


def draw_images(about: Mapping[str, list[dict[str, Any]]], folder: Path) -> None:
    """Draw the boxes of a split, each class in a colour of its own, on noise."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.Generator(np.random.PCG64(0))
    for image in about["images"]:
        pixels = draw.integers(0, 90, (SIDE, SIDE, 3), dtype=np.uint8)
        for row in about["annotations"]:
            if row["image_id"] == image["id"]:
                x, y, width, height = row["bbox"]
                pixels[y : y + height, x : x + width, row["category_id"]] += 150
        Image.fromarray(pixels).save(folder / image["file_name"])


def coco(base: Path, *, outlines: bool = False) -> Path:
    """Write annotations/instances_<split>.json and images/<split>."""
    (base / "annotations").mkdir(parents=True)
    for split in COUNTS:
        about = content(split, outlines=outlines)
        draw_images(about, base / "images" / split)
        file = base / "annotations" / f"instances_{split}.json"
        file.write_text(json.dumps(about))
    return base


def voc(base: Path) -> Path:
    """Write Annotations, JPEGImages and ImageSets/Main, the XML files by hotcoco."""
    (base / "ImageSets" / "Main").mkdir(parents=True)
    for split in COUNTS:
        about = content(split)
        draw_images(about, base / "JPEGImages")
        hotcoco.COCO(about).to_voc(str(base))
        names = [Path(image["file_name"]).stem for image in about["images"]]
        (base / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(names))
    return base


def yolo(base: Path) -> Path:
    """Write data.yaml, images/<split> and labels/<split>, the label files by hotcoco."""
    for split in COUNTS:
        about = content(split)
        draw_images(about, base / "images" / split)
        hotcoco.COCO(about).to_yolo(str(base / "labels" / split))
        (base / "labels" / split / "data.yaml").unlink()
    lines = [f"{split}: images/{split}" for split in COUNTS]
    names = ", ".join(CLASSES)
    (base / "data.yaml").write_text("\n".join([*lines, f"names: [{names}]"]))
    return base


# Two sides of a fish, and its middle
KEYPOINTS = ("left_eye", "right_eye", "tail")
PARTNERS = (1, 0, 2)


def posed(split: str) -> dict[str, list[dict[str, Any]]]:
    """Make the annotations of a split of one class, with three keypoints in each box: the second is
    not marked in each second object, and the third is hidden."""
    about = content(split)
    about["categories"] = [{"id": 1, "name": "fish", "keypoints": list(KEYPOINTS)}]
    for number, row in enumerate(about["annotations"]):
        x, y, width, height = row["bbox"]
        second = [0, 0, 0] if number % 2 else [x + width - 4, y + 4, 2]
        third = [x + width // 2, y + height - 4, 1]
        row |= {"category_id": 1, "keypoints": [x + 4, y + 4, 2, *second, *third]}
    return about


def posed_coco(base: Path) -> Path:
    """Write the set with keypoints in COCO's layout."""
    (base / "annotations").mkdir(parents=True)
    for split in COUNTS:
        about = posed(split)
        draw_images(about, base / "images" / split)
        file = base / "annotations" / f"instances_{split}.json"
        file.write_text(json.dumps(about))
    return base


def posed_yolo(base: Path, *, numbers: int = 3) -> Path:
    """Write the set with keypoints in Ultralytics' layout, of 2 or 3 numbers each."""
    for split in COUNTS:
        about = posed(split)
        draw_images(about, base / "images" / split)
        (base / "labels" / split).mkdir(parents=True)
        for image in about["images"]:
            lines = []
            for row in about["annotations"]:
                if row["image_id"] != image["id"]:
                    continue
                x, y, width, height = row["bbox"]
                middle = [x + width / 2, y + height / 2, width, height]
                words = ["0", *(str(value / SIDE) for value in middle)]
                for place, value in enumerate(row["keypoints"]):
                    if place % 3 < 2:
                        words.append(str(value / SIDE))
                    elif numbers == 3:
                        words.append(str(value))
                lines.append(" ".join(words))
            stem = Path(image["file_name"]).stem
            (base / "labels" / split / f"{stem}.txt").write_text("\n".join(lines))
    lines = [f"{split}: images/{split}" for split in COUNTS]
    lines += ["names: [fish]", f"kpt_shape: [{len(KEYPOINTS)}, {numbers}]"]
    lines += [f"flip_idx: {list(PARTNERS)}", f"kpt_names: {{0: {list(KEYPOINTS)}}}"]
    (base / "data.yaml").write_text("\n".join(lines))
    return base


LAYOUTS: dict[str, Callable[[Path], Path]] = {"COCO": coco, "VOC": voc, "YOLO": yolo}
