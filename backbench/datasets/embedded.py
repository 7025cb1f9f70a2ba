"""Real data in real layouts, made in seconds from what scikit-learn ships, for demo and tests.

ROOT/digits/{train,val,test}/<0..9>/*.png   1,797 handwritten digits (UCI), 32x32 RGB, class folders
ROOT/lists/{1percent,10percent}.txt         labelled parts of digits/train, one `class/file` a line
ROOT/scenes/{train2017,val2017}/*.jpg       scenes composed of those digits, in COCO's layout, with
ROOT/scenes/annotations/*.json              boxes, masks of ten classes, five keypoints of `digit`
ROOT/scenes/maps/{train2017,val2017}/*.png  label maps: 0 background, 1..10 the digits 0..9, 255 what
                                            is left of a digit that others hide

Equal drawings never land in two splits; val scenes show test digits, train scenes train digits.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from backbench.runs import atomic, failures

VERSION = 1
DIGIT_SIZE = 32
SCENE_SIZE = 128
KEYPOINTS = ("top", "bottom", "left", "right", "center")
SCENES = {
    "full": {"train2017": 200, "val2017": 40},
    "tiny": {"train2017": 12, "val2017": 4},
}
# Shares of each class. tiny keeps a tenth of full's train, so that every stage is short
SPLITS = {
    "full": {"test": 0.40, "val": 0.10, "train": 0.50},
    "tiny": {"test": 0.10, "val": 0.05, "train": 0.05},
}


def build(root: str | Path, size: str = "full") -> Path:
    """Make the data below `root`, the same pixels everywhere; nothing is done where it is there."""
    root = Path(root)
    marker = root / "embedded.json"
    about = {"version": VERSION, "size": size, "maps": 1}
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


# Digits

Member = tuple[int, int]  # which of the 1,797 drawings, and its label


def _digits(size: str) -> tuple[np.ndarray, dict[str, list[Member]]]:
    """Return (1797, 32, 32) uint8 drawings and each split's members; equal drawings share a split."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # scikit-learn's levels are 0..16
    small = (bunch.images * (255 / 16)).round().astype(np.uint8)
    images = np.stack([_enlarged(drawing, DIGIT_SIZE) for drawing in small])
    splits: dict[str, list[Member]] = {name: [] for name in SPLITS[size]}
    home: dict[bytes, str] = {}  # pixels -> the split where they were met first
    for label in range(10):
        # Each class is shuffled by itself and cut at the splits' shares. A drawing that equals one
        # met before goes to that one's split, whatever its own place
        rng = np.random.default_rng([VERSION, label])
        order = rng.permutation(np.flatnonzero(bunch.target == label))
        start = 0.0
        for name, share in SPLITS[size].items():
            end = start + share
            part = order[round(start * len(order)) : round(end * len(order))]
            start = end
            for index in part:
                split = home.setdefault(small[index].tobytes(), name)
                splits[split].append((int(index), label))
    return images, splits


def _enlarged(drawing: np.ndarray, side: int) -> np.ndarray:
    return np.asarray(
        Image.fromarray(drawing).resize((side, side), Image.Resampling.BICUBIC)
    )


def _write_digits(
    root: Path, images: np.ndarray, splits: dict[str, list[Member]]
) -> None:
    for split, members in splits.items():
        for index, label in members:
            folder = root / split / str(label)
            failures.make_folder(folder)
            rgb = np.repeat(images[index][..., None], 3, axis=2)
            Image.fromarray(rgb).save(folder / f"{index:04d}.png")


def _write_lists(root: Path, train: Sequence[Member]) -> None:
    """Write the lists of the first 1% and 10% of each class, at least one image.

    The 1% list is part of the 10% list, as SimCLR's is."""
    for percent in (1, 10):
        lines = []
        for label in range(10):
            members = [index for index, other in train if other == label]
            count = max(1, round(len(members) * percent / 100))
            lines += [f"{label}/{index:04d}.png" for index in members[:count]]
        atomic.write_text(root / f"{percent}percent.txt", "\n".join(lines) + "\n")


# Scenes


Json = dict[str, object]


def _write_scenes(
    root: Path, part: str, images: np.ndarray, digits: Sequence[Member], count: int
) -> None:
    """Write `count` scenes as pictures, and their annotations in COCO's two files."""
    rng = np.random.default_rng([VERSION, len(part)])
    order = rng.permutation(len(digits))
    failures.make_folder(root / part)
    failures.make_folder(root / "maps" / part)
    files: list[Json] = []
    instances: list[Json] = []
    people: list[Json] = []
    used = 0
    for number in range(1, count + 1):
        # 1. Three to six digits, each taken once before one is taken again
        members = []
        for _ in range(int(rng.integers(3, 7))):
            members.append(digits[order[used % len(digits)]])
            used += 1
        # 2. The picture
        canvas, objects, labels = _scene(images, members, rng)
        name = f"{number:012d}.jpg"
        Image.fromarray(labels).save(root / "maps" / part / f"{number:012d}.png")
        Image.fromarray(canvas).save(root / part / name, quality=95)
        files.append(
            {"id": number, "file_name": name, "height": SCENE_SIZE, "width": SCENE_SIZE}
        )
        # 3. Every object twice, by one id: an instance of its digit, and a thing with keypoints
        for label, shape, keypoints in objects:
            common = {
                "id": len(instances) + 1,
                "image_id": number,
                "iscrowd": 0,
                **shape,
            }
            instances.append({**common, "category_id": label + 1})
            people.append(
                {
                    **common,
                    "category_id": 1,
                    "keypoints": keypoints,
                    "num_keypoints": sum(v > 0 for v in keypoints[2::3]),
                }
            )
    digit_categories: list[Json] = []
    for digit in range(10):
        digit_categories.append(
            {"id": digit + 1, "name": str(digit), "supercategory": "digit"}
        )
    keypoint_category: Json = {
        "id": 1,
        "name": "digit",
        "supercategory": "digit",
        "keypoints": list(KEYPOINTS),
        "skeleton": [[1, 5], [2, 5], [3, 5], [4, 5]],
    }
    for kind, annotations, categories in (
        ("instances", instances, digit_categories),
        ("person_keypoints", people, [keypoint_category]),
    ):
        data = {
            "info": {"description": "digit scenes", "version": str(VERSION)},
            "licenses": [],
            "images": files,
            "annotations": annotations,
            "categories": categories,
        }
        file = root / "annotations" / f"{kind}_{part}.json"
        atomic.write_text(file, json.dumps(data))


def _scene(
    images: np.ndarray, members: Sequence[Member], rng: np.random.Generator
) -> tuple[np.ndarray, list[tuple[int, Json, list[int]]], np.ndarray]:
    """Return a (128, 128, 3) uint8 scene, its objects (label, and as `_object`), and its label map
    (128, 128). Later digits are painted over earlier ones."""
    # 1. A background that gets brighter in some direction, with noise
    ramp = np.linspace(0, 1, SCENE_SIZE)
    slope = rng.uniform(-40, 40, size=2)
    background = 40 + slope[0] * ramp[:, None] + slope[1] * ramp[None, :]
    noise = rng.normal(0, 6, (SCENE_SIZE, SCENE_SIZE))
    canvas = np.repeat((background + noise)[..., None], 3, axis=2)
    # 2. The digits: a drawing is the share of paint in each pixel, and above 0.4 the mask
    masks: list[np.ndarray] = []
    for index, _ in members:
        side = int(rng.integers(28, 64))
        alpha = _enlarged(images[index], side) / 255.0
        x, y = _place(masks, side, rng)
        brightness = np.full((side, side, 3), rng.uniform(170, 255))
        paint = brightness + rng.uniform(-15, 15, size=3)
        region = canvas[y : y + side, x : x + side]
        region[:] = region * (1 - alpha[..., None]) + paint * alpha[..., None]
        mask = np.zeros((SCENE_SIZE, SCENE_SIZE), bool)
        mask[y : y + side, x : x + side] = alpha > 0.4
        masks.append(mask)
    # 3. What later digits leave to be seen. A digit that they hide by more than 60% is no object
    objects = []
    labels = np.zeros((SCENE_SIZE, SCENE_SIZE), np.uint8)
    for k, (_, label) in enumerate(members):
        whole = masks[k]
        visible = whole.copy()
        for later in masks[k + 1 :]:
            visible &= ~later
        polygons = _polygons(visible)
        is_object = bool(polygons and visible.sum() >= 0.4 * whole.sum())
        labels[visible] = label + 1 if is_object else 255
        if is_object:
            objects.append((label, *_object(whole, visible, polygons)))
    return canvas.clip(0, 255).astype(np.uint8), objects, labels


def _place(
    masks: Sequence[np.ndarray], side: int, rng: np.random.Generator
) -> tuple[int, int]:
    """Return (left, top) of the least covered of four random places.

    So digits overlap at times but rarely vanish."""
    covered = np.zeros((SCENE_SIZE, SCENE_SIZE), bool)
    for mask in masks:
        covered |= mask
    best = (0, 0)
    least = side * side + 1
    for _ in range(4):
        x, y = rng.integers(0, SCENE_SIZE - side + 1, size=2).tolist()
        hidden = int(covered[y : y + side, x : x + side].sum())
        if hidden < least:  # of equal places the first
            best = (x, y)
            least = hidden
    return best


def _polygons(mask: np.ndarray) -> list[list[float]]:
    """Return outlines of the mask's parts, of three points or more, as COCO's [x1, y1, x2, ...]."""
    import cv2

    contours, _ = cv2.findContours(
        mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE
    )
    out = []
    for contour in contours:  # (points, 1, 2)
        if len(contour) >= 3 and cv2.contourArea(contour) >= 4:
            out.append(contour.reshape(-1).astype(float).tolist())
    return out


def _object(
    whole: np.ndarray, visible: np.ndarray, polygons: list[list[float]]
) -> tuple[Json, list[int]]:
    """Return COCO's box (left, top, width, height), area and outlines of the visible part; and the
    whole stroke's five KEYPOINTS (x, y, visibility)."""
    # 1. What can be seen
    rows, columns = np.nonzero(visible)
    left = float(columns.min())
    top = float(rows.min())
    width = float(columns.max()) - left + 1
    height = float(rows.max()) - top + 1
    shape: Json = {
        "bbox": [left, top, width, height],
        "area": float(visible.sum()),
        "segmentation": polygons,
    }
    # 2. The stroke's ends in four directions, and its pixel nearest to its centre of mass. COCO's
    #    visibility: 2 can be seen, 1 is hidden, here by another digit
    ys, xs = np.nonzero(whole)
    middle = np.argmin((xs - xs.mean()) ** 2 + (ys - ys.mean()) ** 2)
    keypoints: list[int] = []
    for i in (ys.argmin(), ys.argmax(), xs.argmin(), xs.argmax(), middle):
        keypoints += [int(xs[i]), int(ys[i]), 2 if visible[ys[i], xs[i]] else 1]
    return shape, keypoints
