"""COCO AP of 1,000 images with 100 detections each: pycocotools against the suite's evaluator,
compared bit by bit. `python benchmarks/coco_eval.py`; coco_eval.txt is its last output."""

import contextlib
import io
import json
import tempfile
from functools import partial
from pathlib import Path

import hotcoco
import numpy as np
import torch
from machine import describe, least, print_ratios
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

OBJECTS = 7  # of an image, as COCO has
CATEGORIES = 80
IMAGES, DETECTIONS = 1000, 100


def make() -> tuple[dict[str, list], list[dict]]:
    """Ground truth, and detections that are its boxes exactly, near them, or misclassified."""
    rng = np.random.default_rng(0)
    objects: list[dict] = []
    detections: list[dict] = []
    for image in range(1, IMAGES + 1):
        for n in range(DETECTIONS):
            if n < OBJECTS:
                box = [*rng.uniform(0, 300, 2), *rng.uniform(8, 300, 2)]
                category = int(rng.integers(1, CATEGORIES + 1))
                row = {"image_id": image, "category_id": category, "bbox": box}
                crowd = int(rng.random() < 0.02)
                area = box[2] * box[3]
                objects.append({**row, "id": len(objects) + 1, "area": area, "iscrowd": crowd})
            else:
                near = objects[-1 - int(rng.integers(0, OBJECTS))]
                box = (np.array(near["bbox"]) + rng.normal(0, 20, 4)).clip(1).tolist()
                category = near["category_id"]
                if rng.random() >= 0.7:
                    category = int(rng.integers(1, CATEGORIES + 1))
                row = {"image_id": image, "category_id": category, "bbox": box}
            detections.append({**row, "score": float(rng.random())})
    size = {"width": 640, "height": 480}
    images = [{"id": i, "file_name": f"{i}.jpg", **size} for i in range(1, IMAGES + 1)]
    categories = [{"id": c, "name": str(c)} for c in range(1, CATEGORIES + 1)]
    return {"images": images, "annotations": objects, "categories": categories}, detections


def statistics(library: str, file: Path, detections: list[dict]) -> np.ndarray:
    """The twelve numbers of COCO's summary."""
    with contextlib.redirect_stdout(io.StringIO()):
        if library == "hotcoco":
            truth = hotcoco.COCO(str(file))
            ev = hotcoco.COCOeval(truth, truth.load_res(detections), "bbox")
        else:
            truth = COCO(str(file))
            # pycocotools writes to the rows that it is given
            ev = COCOeval(truth, truth.loadRes([dict(d) for d in detections]), "bbox")
        ev.evaluate()
        ev.accumulate()
        ev.summarize()
    return np.asarray(ev.stats)


def main() -> None:
    torch.set_num_threads(1)
    print(describe())
    truth, detections = make()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "truth.json"
        file.write_text(json.dumps(truth))
        ways = {n: partial(statistics, n, file, detections) for n in ("pycocotools", "hotcoco")}
        theirs, ours = (way() for way in ways.values())
        seconds = least(ways, 3)
    print_ratios(f"{IMAGES} images, {len(detections)} boxes, loading included", seconds)
    print(f"all 12 numbers bit-identical: {np.array_equal(theirs, ours)}")


if __name__ == "__main__":
    main()
