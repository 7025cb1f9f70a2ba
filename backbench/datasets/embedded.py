"""Real data in real layouts, made in seconds from what scikit-learn ships, for the demo and the tests.

ROOT/digits/{train,val,test}/<0..9>/*.png     1,797 handwritten digits (UCI), 32x32 RGB, as a class folder
ROOT/lists/{1percent,10percent}.txt           labelled parts of digits/train, one `class/file` a line
ROOT/scenes/{train2017,val2017}/*.jpg         scenes composed of those digits, in COCO's layout, with
ROOT/scenes/annotations/*.json                boxes and masks of ten classes, and five keypoints of one class `digit`

Equal drawings never land in two splits, and val scenes are made of test digits, train scenes of train digits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbench.runs import atomic

if TYPE_CHECKING:
    import numpy as np

VERSION = 1
DIGIT_SIZE = 32
SCENE_SIZE = 128
KEYPOINTS = ("top", "bottom", "left", "right", "center")
SCENES = {"full": {"train2017": 200, "val2017": 40}, "tiny": {"train2017": 12, "val2017": 4}}
# Shares of each class; tiny keeps a tenth of train so that every stage is short, and the same kind of splits.
SPLITS = {
    "full": {"test": 0.40, "val": 0.10, "train": 0.50},
    "tiny": {"test": 0.10, "val": 0.05, "train": 0.05},
}


def build(root: str | Path, size: str = "full") -> Path:
    """Make the data below `root`, or recognise it as made. The pixels are the same on every machine and every time."""
    root = Path(root)
    marker = root / "embedded.json"
    about = {"version": VERSION, "size": size}
    if marker.exists() and json.loads(marker.read_text()) == about:
        return root
    for name in ("digits", "scenes", "lists"):
        shutil.rmtree(root / name, ignore_errors=True)
    images, splits = _digits(size)
    _write_digits(root / "digits", images, splits)
    _write_lists(root / "lists", splits["train"])
    for part, split in (("train2017", "train"), ("val2017", "test")):
        _write_scenes(root / "scenes", part, images, splits[split], SCENES[size][part])
    atomic.write_json(marker, about)
    return root


def _digits(size: str) -> tuple[np.ndarray, dict[str, list[tuple[int, int]]]]:
    """(1797, 32, 32) uint8 drawings, and per split the (index, label) pairs; equal drawings share a split."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    bunch = load_digits()
    small = (bunch.images * (255 / 16)).round().astype(np.uint8)
    images = np.stack(
        [
            np.asarray(
                Image.fromarray(d).resize((DIGIT_SIZE, DIGIT_SIZE), Image.Resampling.BICUBIC)
            )
            for d in small
        ]
    )
    splits: dict[str, list[tuple[int, int]]] = {name: [] for name in SPLITS[size]}
    taken: dict[bytes, str] = {}
    for label in range(10):
        order = np.random.default_rng([VERSION, label]).permutation(
            np.flatnonzero(bunch.target == label)
        )
        start = 0.0
        for name, share in SPLITS[size].items():
            part = order[round(start * len(order)) : round((start + share) * len(order))]
            start += share
            for index in part:
                home = taken.setdefault(small[index].tobytes(), name)
                splits[home].append((int(index), label))
    return images, splits


def _write_digits(root: Path, images: np.ndarray, splits: dict[str, list[tuple[int, int]]]) -> None:
    import numpy as np
    from PIL import Image

    for split, members in splits.items():
        for index, label in members:
            folder = root / split / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.repeat(images[index][..., None], 3, axis=2)).save(
                folder / _file(index)
            )


def _file(index: int) -> str:
    return f"{index:04d}.png"


def _write_lists(root: Path, train: Sequence[tuple[int, int]]) -> None:
    """The first 1% and 10% of each class, at least one image; the 1% list is part of the 10% list, as SimCLR's is."""
    for percent in (1, 10):
        lines = []
        for label in range(10):
            members = [index for index, other in train if other == label]
            lines += [
                f"{label}/{_file(i)}"
                for i in members[: max(1, round(len(members) * percent / 100))]
            ]
        atomic.write_text(root / f"{percent}percent.txt", "\n".join(lines) + "\n")


def _write_scenes(
    root: Path, part: str, images: np.ndarray, digits: Sequence[tuple[int, int]], count: int
) -> None:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng([VERSION, len(part)])
    order = rng.permutation(len(digits))
    (root / part).mkdir(parents=True, exist_ok=True)
    instances: list[dict[str, Any]] = []
    people: list[dict[str, Any]] = []
    files: list[dict[str, Any]] = []
    used = 0
    for number in range(1, count + 1):
        members = []
        for _ in range(int(rng.integers(3, 7))):
            members.append(digits[order[used % len(digits)]])
            used += 1
        canvas, objects = _scene(images, members, rng)
        name = f"{number:012d}.jpg"
        Image.fromarray(canvas).save(root / part / name, quality=95)
        files.append({"id": number, "file_name": name, "height": SCENE_SIZE, "width": SCENE_SIZE})
        for item in objects:
            label, keypoints = item.pop("label"), item.pop("keypoints")
            common = {"id": len(instances) + 1, "image_id": number, "iscrowd": 0, **item}
            instances.append({**common, "category_id": label + 1})
            visible = sum(v > 0 for v in keypoints[2::3])
            people.append(
                {**common, "category_id": 1, "keypoints": keypoints, "num_keypoints": visible}
            )
    ten = [{"id": d + 1, "name": str(d), "supercategory": "digit"} for d in range(10)]
    skeleton = [[1, 5], [2, 5], [3, 5], [4, 5]]
    one = [
        {
            "id": 1,
            "name": "digit",
            "supercategory": "digit",
            "keypoints": list(KEYPOINTS),
            "skeleton": skeleton,
        }
    ]
    for kind, objects_of_kind, categories in (
        ("instances", instances, ten),
        ("person_keypoints", people, one),
    ):
        data = {
            "info": {"description": "digit scenes", "version": str(VERSION)},
            "licenses": [],
            "images": files,
            "annotations": objects_of_kind,
            "categories": categories,
        }
        atomic.write_text(root / "annotations" / f"{kind}_{part}.json", json.dumps(data))


def _scene(
    images: np.ndarray, members: Sequence[tuple[int, int]], rng: np.random.Generator
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """A (128, 128, 3) uint8 scene and its objects; later digits are painted over earlier ones."""
    import numpy as np
    from PIL import Image

    ramp = np.linspace(0, 1, SCENE_SIZE)
    slope = rng.uniform(-40, 40, size=2)
    background = 40 + slope[0] * ramp[:, None] + slope[1] * ramp[None, :]
    canvas = np.repeat(
        (background + rng.normal(0, 6, (SCENE_SIZE, SCENE_SIZE)))[..., None], 3, axis=2
    )
    masks: list[np.ndarray] = []
    for index, _ in members:
        side = int(rng.integers(28, 64))
        alpha = (
            np.asarray(
                Image.fromarray(images[index]).resize((side, side), Image.Resampling.BICUBIC)
            )
            / 255.0
        )
        x, y = _place(masks, side, rng)
        paint = np.full((side, side, 3), rng.uniform(170, 255)) + rng.uniform(-15, 15, size=3)
        region = canvas[y : y + side, x : x + side]
        region[:] = region * (1 - alpha[..., None]) + paint * alpha[..., None]
        mask = np.zeros((SCENE_SIZE, SCENE_SIZE), bool)
        mask[y : y + side, x : x + side] = alpha > 0.4
        masks.append(mask)
    objects = []
    for k, (_, label) in enumerate(members):
        whole = masks[k]
        visible = whole & ~np.any(masks[k + 1 :], axis=0) if k + 1 < len(masks) else whole
        polygons = _polygons(visible)
        if polygons and visible.sum() >= 0.4 * whole.sum():
            objects.append({"label": label, **_geometry(whole, visible, polygons)})
    return canvas.clip(0, 255).astype(np.uint8), objects


def _place(masks: Sequence[np.ndarray], side: int, rng: np.random.Generator) -> tuple[int, int]:
    """The least covered of four random places, so that digits overlap at times but rarely vanish."""
    import numpy as np

    covered = np.any(masks, axis=0) if masks else np.zeros((SCENE_SIZE, SCENE_SIZE), bool)
    places = [
        tuple(int(v) for v in rng.integers(0, SCENE_SIZE - side + 1, size=2)) for _ in range(4)
    ]
    x, y = min(places, key=lambda p: covered[p[1] : p[1] + side, p[0] : p[0] + side].sum())
    return x, y


def _polygons(mask: np.ndarray) -> list[list[float]]:
    """Outlines of the mask's parts, as COCO stores them: [x1, y1, x2, y2, ...], at least three points each."""
    import cv2
    import numpy as np

    contours, _ = cv2.findContours(
        mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE
    )
    return [
        c.reshape(-1).astype(float).tolist()
        for c in contours
        if len(c) >= 3 and cv2.contourArea(c) >= 4
    ]


def _geometry(
    whole: np.ndarray, visible: np.ndarray, polygons: list[list[float]]
) -> dict[str, Any]:
    """Box and area of the visible part, and the five keypoints of the stroke: 2 visible, 1 hidden by another digit."""
    import numpy as np

    rows, columns = np.nonzero(visible)
    left, top = int(columns.min()), int(rows.min())
    box = [left, top, int(columns.max()) - left + 1, int(rows.max()) - top + 1]
    ys, xs = np.nonzero(whole)
    middle = np.argmin((xs - xs.mean()) ** 2 + (ys - ys.mean()) ** 2)
    keypoints: list[int] = []
    for i in (ys.argmin(), ys.argmax(), xs.argmin(), xs.argmax(), middle):
        keypoints += [int(xs[i]), int(ys[i]), 2 if visible[ys[i], xs[i]] else 1]
    return {
        "bbox": [float(v) for v in box],
        "area": float(visible.sum()),
        "segmentation": polygons,
        "keypoints": keypoints,
    }
