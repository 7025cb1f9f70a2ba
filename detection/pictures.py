"""Small pictures of predictions beside the ground truth, drawn with PIL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backbench.runs import atomic
from detection.data.coco import Split, load_image

COUNT, SIDE = 6, 320
COLOURS = (
    (230, 80, 60),
    (60, 160, 230),
    (90, 200, 90),
    (240, 180, 40),
    (180, 110, 230),
    (60, 200, 190),
)


def write(
    folder: Path, split: Split, predictions: Sequence[Mapping[str, Any]], task: str
) -> list[Path]:
    """FOLDER/<image>.png: ground truth on the left; on the right as many of the best predictions as there are objects,
    at least three."""
    from PIL import Image, ImageDraw

    by_image: dict[int, list[Mapping[str, Any]]] = {}
    for p in predictions:
        by_image.setdefault(p["image_id"], []).append(p)
    label_of = {id: i for i, id in enumerate(split.ids)}
    out = []
    for record in split.records[:COUNT]:
        image = load_image(record)
        scale = min(SIDE / max(image.size), 2.0)
        size = (round(image.width * scale), round(image.height * scale))
        image = image.resize(size)
        best = sorted(by_image.get(record["image_id"], ()), key=lambda p: -p["score"])
        best = best[: max(3, len(record["annotations"]))]
        left, right = image.copy(), image.copy()
        for a in record["annotations"]:
            name = split.categories[a["category_id"]]
            points = [v - (0.5 if i % 3 < 2 else 0) for i, v in enumerate(a.get("keypoints", ()))]
            _draw(ImageDraw.Draw(left), a, a["category_id"], text=name, scale=scale, points=points)
        for p in best:
            label = label_of[p["category_id"]]
            text = f"{split.categories[label]} {p['score']:.2f}"
            points = [1 if i % 3 == 2 else v for i, v in enumerate(p.get("keypoints", ()))]
            _draw(ImageDraw.Draw(right), p, label, text=text, scale=scale, points=points)
        both = Image.new("RGB", (2 * size[0] + 4, size[1]), "white")
        both.paste(left, (0, 0))
        both.paste(right, (size[0] + 4, 0))
        file = folder / f"{Path(record['file_name']).stem}.png"
        with atomic.atomic_path(file) as temporary:
            both.save(temporary, format="PNG")
        out.append(file)
    return out


def _draw(
    draw: Any,
    item: Mapping[str, Any],
    label: int,
    *,
    text: str,
    scale: float,
    points: Sequence[float],
) -> None:
    colour = COLOURS[label % len(COLOURS)]
    for polygon in _polygons(item.get("segmentation")):
        draw.polygon([v * scale for v in polygon], outline=colour)
    x, y, w, h = (v * scale for v in item["bbox"])
    draw.rectangle([x, y, max(x + w, x), max(y + h, y)], outline=colour)
    draw.text((x + 2, y + 1), text, fill=colour)
    for px, py, visible in zip(points[0::3], points[1::3], points[2::3]):
        if visible > 0:
            draw.ellipse(
                [px * scale - 2, py * scale - 2, px * scale + 2, py * scale + 2], fill=colour
            )


def _polygons(outline: Any) -> list[list[float]]:
    """COCO polygons as they are; a run-length mask by its contours."""
    if not outline:
        return []
    if isinstance(outline, list):
        return outline
    import cv2
    from pycocotools import mask

    if isinstance(outline["counts"], list):
        outline = mask.frPyObjects(outline, *outline["size"])
    contours, _ = cv2.findContours(mask.decode(outline), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    return [c.reshape(-1).tolist() for c in contours if len(c) >= 3]
