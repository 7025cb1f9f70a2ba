"""COCO AP of 1,000 images with 100 detections each: pycocotools against the suite's evaluator,
compared bit by bit.

    python benchmarks/coco_eval.py

Times alternate A B A B in one process, one thread; the figure that counts is the ratio. The last
output is kept beside this script in coco_eval.txt.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import TypeAlias

import numpy as np
from machine import describe, in_turns, print_ratios

OBJECTS = 7  # of an image, as COCO has
CATEGORIES = 80
Row: TypeAlias = dict[str, object]  # of COCO's JSON


def make(images: int, detections: int) -> tuple[dict[str, list], list[Row]]:
    """Ground truth, and detections that are its boxes exactly, near them, or of another
    category."""
    rng = np.random.default_rng(0)
    truth: dict[str, list] = {
        "images": [
            {"id": i, "width": 640, "height": 480, "file_name": f"{i}.jpg"}
            for i in range(1, images + 1)
        ],
        "annotations": [],
        "categories": [{"id": c, "name": str(c)} for c in range(1, CATEGORIES + 1)],
    }
    found: list[Row] = []
    for image in range(1, images + 1):
        for n in range(detections):
            if n < OBJECTS:
                box = [*rng.uniform(0, 300, 2), *rng.uniform(8, 300, 2)]
                category = int(rng.integers(1, CATEGORIES + 1))
                new = {
                    "id": len(truth["annotations"]) + 1,
                    "image_id": image,
                    "category_id": category,
                    "bbox": box,
                    "area": box[2] * box[3],
                    "iscrowd": int(rng.random() < 0.02),
                }
                truth["annotations"].append(new)
            else:
                near = truth["annotations"][-1 - int(rng.integers(0, OBJECTS))]
                box = (np.array(near["bbox"]) + rng.normal(0, 20, 4)).clip(1).tolist()
                category = near["category_id"]
                if rng.random() >= 0.7:
                    category = int(rng.integers(1, CATEGORIES + 1))
            score = float(rng.random())
            row = {"image_id": image, "category_id": category, "bbox": box, "score": score}
            found.append(row)
    return truth, found


def by_pycocotools(file: Path, found: list[Row]) -> np.ndarray:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(file))
        ev = COCOeval(truth, truth.loadRes([dict(d) for d in found]), "bbox")
        ev.evaluate()
        ev.accumulate()
        ev.summarize()
    return np.asarray(ev.stats)


def by_hotcoco(file: Path, found: list[Row]) -> np.ndarray:
    import hotcoco

    with contextlib.redirect_stdout(io.StringIO()):
        truth = hotcoco.COCO(str(file))
        ev = hotcoco.COCOeval(truth, truth.load_res(found), "bbox")
        ev.evaluate()
        ev.accumulate()
        ev.summarize()
    return np.asarray(ev.stats)


def main() -> None:
    print(describe())
    truth, found = make(images=1000, detections=100)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "truth.json"
        file.write_text(json.dumps(truth))
        equal = np.array_equal(by_pycocotools(file, found), by_hotcoco(file, found))
        ways = {
            "pycocotools": lambda: by_pycocotools(file, found),
            "hotcoco": lambda: by_hotcoco(file, found),
        }
        times = in_turns(ways, 3, warm=0)
    print_ratios(f"1000 images, {len(found)} boxes, loading included", times)
    print(f"all 12 numbers bit-identical: {equal}")


if __name__ == "__main__":
    main()
