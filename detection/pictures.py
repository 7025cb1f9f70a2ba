"""Draws small pictures of detections beside the ground truth, with PIL."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.detection.data.dataset_dicts import Annotation, Detection, ImageRecord
from backbench.detection.data.images import load_image
from backbench.detection.data.masks import outlines
from backbench.detection.data.split import Split
from backbench.runs import atomic

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

COUNT = 6  # pictures of a run
SIDE = 320  # pixels of an image's longer side
ENLARGED = 4.0  # small images are enlarged at most so many times
LETTERS = 13  # pixels
GAP = 6  # pixels
COLOURS = (
    (230, 80, 60),
    (60, 160, 230),
    (90, 200, 90),
    (240, 180, 40),
    (180, 110, 230),
    (60, 200, 190),
)


def write(folder: Path, split: Split, detections: Sequence[Detection]) -> list[Path]:
    """Draw FOLDER/<image>.png for the first images and return the files.

    The ground truth is on the left. On the right are as many of the best detections as there are
    objects, but at least three. A line above says which is which.
    """
    by_image: dict[int | str, list[Detection]] = {}
    for detection in detections:
        by_image.setdefault(detection["image_id"], []).append(detection)
    files = []
    drawn: Counter[str] = Counter()
    for record in split.records[:COUNT]:
        found = by_image.get(record["image_id"], [])
        ranked = sorted(found, key=lambda detection: -detection["score"])
        best = ranked[: max(3, len(record["annotations"]))]
        stem = Path(record["file_name"]).stem
        drawn[stem] += 1
        # Images of several folders may share a name
        again = f"_{drawn[stem]}" if drawn[stem] > 1 else ""
        file = folder / f"{stem}{again}.png"
        with atomic.atomic_path(file) as temporary:
            _side_by_side(record, best, split).save(temporary, format="PNG")
        files.append(file)
    return files


def _side_by_side(
    record: ImageRecord, best: Sequence[Detection], split: Split
) -> Image:
    from PIL import Image, ImageDraw

    image = load_image(record)
    scale = min(SIDE / max(image.size), ENLARGED)
    width = max(1, round(image.width * scale))
    height = max(1, round(image.height * scale))
    # 1. The objects, on the left. Their category is a label already.
    left = image.resize((width, height))
    pen = ImageDraw.Draw(left)
    for a in record["annotations"]:
        _draw(pen, a, a["category_id"], scale=scale, shift=0.5)
    for a in record["annotations"]:
        label = a["category_id"]
        _write(pen, split.categories[label], a["bbox"], label, scale)
    # 2. The detections, on the right. Their category is the file's id. The surest is drawn last, so
    #    that its name lies on top.
    right = image.resize((width, height))
    pen = ImageDraw.Draw(right)
    for d in reversed(best):
        _draw(pen, d, split.ids.index(d["category_id"]), scale=scale, shift=0.0)
    for d in reversed(best):
        label = split.ids.index(d["category_id"])
        text = f"{split.categories[label]} {d['score']:.2f}"
        _write(pen, text, d["bbox"], label, scale)
    # 3. Both, below a line that says which is which
    heading = LETTERS + 2 * GAP
    both = Image.new("RGB", (2 * width + GAP, height + heading), "white")
    both.paste(left, (0, heading))
    both.paste(right, (width + GAP, heading))
    pen = ImageDraw.Draw(both)
    said = "detected" if best else "nothing detected"
    pen.text((GAP, GAP - 1), "ground truth", fill="black", font=_font())
    pen.text((width + 2 * GAP, GAP - 1), said, fill="black", font=_font())
    return both


def _draw(
    draw: ImageDraw,
    item: Annotation | Detection,
    label: int,
    *,
    scale: float,
    shift: float,
) -> None:
    """Draw outline, box and keypoints. `shift` is where the middle of a pixel is: at .5 in
    annotations, at .0 in detections."""
    colour = COLOURS[label % len(COLOURS)]
    for polygon in outlines(item.get("segmentation")):
        draw.polygon([v * scale for v in polygon], outline=colour)
    x, y, w, h = (v * scale for v in item["bbox"])
    draw.rectangle([x, y, max(x + w, x), max(y + h, y)], outline=colour, width=2)
    values = item.get("keypoints", [])
    for px, py, seen in zip(values[0::3], values[1::3], values[2::3]):
        # An annotation's keypoint may be unmarked. In a detection the value is a score instead,
        # which may be negative.
        if shift and not seen > 0:
            continue
        middle_x = (px - shift) * scale
        middle_y = (py - shift) * scale
        draw.ellipse(
            [middle_x - 3, middle_y - 3, middle_x + 3, middle_y + 3],
            fill=colour,
            outline="white",
        )


def _write(
    draw: ImageDraw, text: str, box: Sequence[float], label: int, scale: float
) -> None:
    """Write a text on a ground of its label's colour, above the box if there is room, else inside."""
    x = box[0] * scale
    y = box[1] * scale
    left, top, right, bottom = draw.textbbox((0, 0), text, font=_font())
    width = right - left + 4
    height = bottom - top + 4
    if y >= height:
        y -= height
    x = max(0.0, min(x, draw.im.size[0] - width))
    draw.rectangle([x, y, x + width, y + height], fill=COLOURS[label % len(COLOURS)])
    draw.text((x + 2 - left, y + 2 - top), text, fill="black", font=_font())


@functools.cache
def _font() -> FreeTypeFont | ImageFont:
    """Load PIL's own font, which every machine has."""
    from PIL import ImageFont as fonts

    return fonts.load_default(size=LETTERS)
