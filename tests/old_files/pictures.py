"""The pictures that the old runs saw, by plain integer arithmetic: equal bytes everywhere, for ever.

They are PPM files, whose bytes are the pixels: the size of a PNG file depends on the compressor, and the feature cache
knows a picture by its size and its time of change.
"""

import json
import os
from pathlib import Path

import numpy as np

CLASSES = ("ring", "star", "wave")
PARTS = {"train": 32, "val": 12, "test": 18}
CHANGED = 1_700_000_000  # the time of change of every picture, in seconds
SCENES = {"train": 4, "val": 6}
LISTED = 12  # of the training pictures, for semi-supervised finetuning


def ppm(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width, _ = pixels.shape
    path.write_bytes(f"P6 {width} {height} 255\n".encode() + pixels.astype(np.uint8).tobytes())
    os.utime(path, (CHANGED, CHANGED))


def picture(number: int, label: int, size: int = 32) -> np.ndarray:
    """Stripes of a direction and colour that belong to the class, with an offset and a grain of the picture's own."""
    y, x, c = np.ogrid[:size, :size, :3]
    stripes = ((label + 1) * x + (3 - label) * y + 5 * number) % 16 * 9
    grain = (x * x * 7 + y * y * 11 + x * y * 3 + c * 29 + number * 13) % 83
    return stripes + grain + 35 * ((c + label) % 3 == 0)


def write_shapes(root: Path) -> None:
    """ROOT/shapes/{train,val,test}/<class>/<number>.ppm."""
    number = 0
    for part, count in PARTS.items():
        for _ in range(count):
            label = number % len(CLASSES)
            ppm(
                root / "shapes" / part / CLASSES[label] / f"{number:03}.ppm", picture(number, label)
            )
            number += 1


def write_list(folder: Path) -> None:
    """FOLDER/10percent.txt: the first training pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{CLASSES[n % len(CLASSES)]}/{n:03}.ppm" for n in range(LISTED)]
    (folder / "10percent.txt").write_text("\n".join(lines) + "\n")


def write_scenes(root: Path) -> None:
    """ROOT/scenes as COCO lays itself out: three boxes of one of three colours on a striped ground."""
    number = 0
    for part, count in SCENES.items():
        images, annotations = [], []
        for _ in range(count):
            pixels = picture(number, 0, 128)
            for n in range(3):
                kind = (number + n) % 3
                left, top, width, height = (
                    4 + 40 * n,
                    8 + 17 * ((number + 2 * n) % 5),
                    36,
                    32 + 4 * n,
                )
                pixels[top : top + height, left : left + width] = [
                    250 - 100 * kind,
                    20 + 110 * kind,
                    90 * kind,
                ]
                box = {"bbox": [left, top, width, height], "area": width * height, "iscrowd": 0}
                annotations.append(
                    {"id": 10 * number + n + 1, "image_id": number, "category_id": kind + 1, **box}
                )
            ppm(root / "scenes" / f"{part}2017" / f"{number:03}.ppm", pixels)
            images.append(
                {"id": number, "file_name": f"{number:03}.ppm", "width": 128, "height": 128}
            )
            number += 1
        categories = [{"id": kind + 1, "name": str(kind)} for kind in range(10)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        file = root / "scenes" / "annotations" / f"instances_{part}2017.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))


def write_all(root: Path) -> None:
    write_shapes(root)
    write_scenes(root)
    write_list(root / "lists")
