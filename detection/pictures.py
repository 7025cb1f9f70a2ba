"""Small pictures of detections beside the ground truth, drawn with PIL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.runs import atomic
from detection.data.images import load_image
from detection.data.masks import outlines
from detection.data.records import Annotation, Detection, ImageRecord
from detection.data.split import Split

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

COUNT, SIDE = 6, 320
COLOURS = (
    (230, 80, 60),
    (60, 160, 230),
    (90, 200, 90),
    (240, 180, 40),
    (180, 110, 230),
    (60, 200, 190),
)


def write(folder: Path, split: Split, detections: Sequence[Detection]) -> list[Path]:
    """FOLDER/<image>.png: ground truth on the left; on the right as many of the best detections as
    there are objects, at least three."""
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


def _side_by_side(record: ImageRecord, best: Sequence[Detection], split: Split) -> Image:
    from PIL import Image, ImageDraw

    # At most SIDE pixels, and small images at most twice their size
    image = load_image(record)
    scale = min(SIDE / max(image.size), 2.0)
    size = (round(image.width * scale), round(image.height * scale))
    left = image.resize(size)
    right = left.copy()
    # The objects of the file, then what was found: labels there, the file's ids here
    pen = ImageDraw.Draw(left)
    for a in record["annotations"]:
        label = a["category_id"]
        _draw(pen, a, label, text=split.categories[label], scale=scale, points=_marked(a))
    pen = ImageDraw.Draw(right)
    for d in best:
        label = split.ids.index(d["category_id"])
        text = f"{split.categories[label]} {d['score']:.2f}"
        _draw(pen, d, label, text=text, scale=scale, points=_found(d))
    both = Image.new("RGB", (2 * size[0] + 4, size[1]), "white")
    both.paste(left, (0, 0))
    both.paste(right, (size[0] + 4, 0))
    return both


def _marked(annotation: Annotation) -> list[tuple[float, float]]:
    """The keypoints that are marked, as pixel indices again."""
    values = annotation.get("keypoints", [])
    places = zip(values[0::3], values[1::3], values[2::3])
    return [(x - 0.5, y - 0.5) for x, y, visibility in places if visibility > 0]


def _found(detection: Detection) -> list[tuple[float, float]]:
    values = detection.get("keypoints", [])
    return list(zip(values[0::3], values[1::3]))


def _draw(
    draw: ImageDraw,
    item: Annotation | Detection,
    label: int,
    *,
    text: str,
    scale: float,
    points: Sequence[tuple[float, float]],
) -> None:
    colour = COLOURS[label % len(COLOURS)]
    for polygon in outlines(item.get("segmentation")):
        draw.polygon([v * scale for v in polygon], outline=colour)
    x, y, w, h = (v * scale for v in item["bbox"])
    draw.rectangle([x, y, max(x + w, x), max(y + h, y)], outline=colour)
    draw.text((x + 2, y + 1), text, fill=colour)
    for px, py in points:
        left, top = px * scale - 2, py * scale - 2
        draw.ellipse([left, top, px * scale + 2, py * scale + 2], fill=colour)
