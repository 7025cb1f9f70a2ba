"""Small pictures of detections beside the ground truth, drawn with PIL."""

from __future__ import annotations

import functools
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

COUNT, SIDE, LARGER = (
    6,
    320,
    4.0,
)  # pictures of a run; pixels of one side, times of a small one
LETTERS, GAP = 13, 6  # pixels
COLOURS = (
    (230, 80, 60),
    (60, 160, 230),
    (90, 200, 90),
    (240, 180, 40),
    (180, 110, 230),
    (60, 200, 190),
)


def write(folder: Path, split: Split, detections: Sequence[Detection]) -> list[Path]:
    """Draw FOLDER/<image>.png: ground truth on the left; on the right as many of the best
    detections as there are objects, at least three. Which is which stands above them."""
    by_image: dict[int | str, list[Detection]] = {}
    for d in detections:
        by_image.setdefault(d["image_id"], []).append(d)
    out = []
    for record in split.records[:COUNT]:
        best = sorted(by_image.get(record["image_id"], ()), key=lambda d: -d["score"])
        both = _side_by_side(record, best[: max(3, len(record["annotations"]))], split)
        file = folder / f"{Path(record['file_name']).stem}.png"
        with atomic.atomic_path(file) as temporary:
            both.save(temporary, format="PNG")
        out.append(file)
    return out


def _side_by_side(
    record: ImageRecord, best: Sequence[Detection], split: Split
) -> Image:
    from PIL import Image, ImageDraw

    # At most SIDE pixels, and small images at most LARGER times their size
    image = load_image(record)
    scale = min(SIDE / max(image.size), LARGER)
    size = (round(image.width * scale), round(image.height * scale))
    left = image.resize(size)
    right = left.copy()
    # The objects of the file have labels; detections have the file's ids. The surest is drawn last,
    # so that its name lies on top
    objects = [
        (a, a["category_id"], split.categories[a["category_id"]])
        for a in record["annotations"]
    ]
    detected = []
    for d in reversed(best):
        label = split.ids.index(d["category_id"])
        detected.append((d, label, f"{split.categories[label]} {d['score']:.2f}"))
    for side, items, shift in ((left, objects, 0.5), (right, detected, 0.0)):
        pen = ImageDraw.Draw(side)
        for item, label, _ in items:
            _draw(pen, item, label, scale=scale, shift=shift)
        for item, label, name in items:
            _write(pen, name, item["bbox"], label, scale)
    # A line above says which side is which
    high = LETTERS + 2 * GAP
    both = Image.new("RGB", (2 * size[0] + GAP, size[1] + high), "white")
    pen = ImageDraw.Draw(both)
    for x, side, text in (
        (0, left, "ground truth"),
        (size[0] + GAP, right, "detected" if best else "nothing detected"),
    ):
        pen.text((x + GAP, GAP - 1), text, fill="black", font=_font())
        both.paste(side, (x, high))
    return both


def _draw(
    draw: ImageDraw,
    item: Annotation | Detection,
    label: int,
    *,
    scale: float,
    shift: float,
) -> None:
    """Draw outline, box and keypoints. `shift` is where a pixel's middle is: at .5 in annotations.
    An annotation's unmarked keypoint is left out; a detection's last value is its score."""
    colour = COLOURS[label % len(COLOURS)]
    for polygon in outlines(item.get("segmentation")):
        draw.polygon([v * scale for v in polygon], outline=colour)
    x, y, w, h = (v * scale for v in item["bbox"])
    draw.rectangle([x, y, max(x + w, x), max(y + h, y)], outline=colour, width=2)
    values = item.get("keypoints", [])
    for px, py, seen in zip(values[0::3], values[1::3], values[2::3]):
        if shift and not seen > 0:
            continue
        left, top = (px - shift) * scale - 3, (py - shift) * scale - 3
        right, bottom = (px - shift) * scale + 3, (py - shift) * scale + 3
        draw.ellipse([left, top, right, bottom], fill=colour, outline="white")


def _write(
    draw: ImageDraw, text: str, box: Sequence[float], label: int, scale: float
) -> None:
    """The label on a ground of its colour, above the box where there is room, else inside it."""
    x, y = box[0] * scale, box[1] * scale
    left, top, right, bottom = draw.textbbox((0, 0), text, font=_font())
    wide, high = right - left + 4, bottom - top + 4
    y = y - high if y >= high else y
    x = max(0.0, min(x, draw.im.size[0] - wide))
    draw.rectangle([x, y, x + wide, y + high], fill=COLOURS[label % len(COLOURS)])
    draw.text((x + 2 - left, y + 2 - top), text, fill="black", font=_font())


@functools.cache
def _font() -> FreeTypeFont | ImageFont:
    """PIL's own, which every machine has."""
    from PIL import ImageFont as fonts

    return fonts.load_default(size=LETTERS)
