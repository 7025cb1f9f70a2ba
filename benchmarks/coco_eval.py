"""COCO AP of 1,000 images with 100 detections each: pycocotools against the suite's evaluator,
compared bit by bit.

    python benchmarks/coco_eval.py [--images 1000] [--detections 100]

Times alternate A B A B in one process, one thread; the figure that counts is the ratio. The last
output is kept beside this script in coco_eval.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TypeAlias

import numpy as np

OBJECTS = 7  # of an image, as COCO has
Row: TypeAlias = dict[str, object]  # of COCO's JSON


def make(images: int, detections: int, categories: int = 80) -> tuple[dict[str, list], list[Row]]:
    """Ground truth, and detections that are its boxes exactly, near them, or of another
    category."""
    rng = np.random.default_rng(0)
    truth: dict[str, list] = {
        "images": [
            {"id": i, "width": 640, "height": 480, "file_name": f"{i}.jpg"}
            for i in range(1, images + 1)
        ],
        "annotations": [],
        "categories": [{"id": c, "name": str(c)} for c in range(1, categories + 1)],
    }
    found: list[Row] = []
    for image in range(1, images + 1):
        for n in range(detections):
            if n < OBJECTS:
                box = [*rng.uniform(0, 300, 2), *rng.uniform(8, 300, 2)]
                category = int(rng.integers(1, categories + 1))
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
                    category = int(rng.integers(1, categories + 1))
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--detections", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    truth, found = make(args.images, args.detections)
    times: dict[str, list[float]] = {"pycocotools": [], "hotcoco": []}
    stats = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "truth.json"
        file.write_text(json.dumps(truth))
        for _ in range(args.rounds):
            for name, evaluate in (("pycocotools", by_pycocotools), ("hotcoco", by_hotcoco)):
                start = time.perf_counter()
                stats[name] = evaluate(file, found)
                times[name].append(time.perf_counter() - start)
    a, b = (statistics.median(times[n]) for n in times)
    ratios = [x / y for x, y in zip(times["pycocotools"], times["hotcoco"])]
    by_round = ", ".join(f"{r:.1f}" for r in ratios)
    print(
        f"{args.images} images, {len(found)} boxes, {args.rounds} rounds, "
        "median seconds, loading included"
    )
    print(f"pycocotools {a:.2f}   hotcoco {b:.3f}   ratio {a / b:.1f} (by round {by_round})")
    equal = np.array_equal(stats["pycocotools"], stats["hotcoco"])
    print(f"all 12 numbers bit-identical: {equal}; AP {100 * stats['hotcoco'][0]:.4f}")


if __name__ == "__main__":
    main()
