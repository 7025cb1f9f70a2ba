"""COCO's annotation files as records, under Detectron2's names of datasets, checked before a
run."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict, cast

from backbench.errors import BadInput, nearest
from detection.data import voc
from detection.data.records import XYWH, Annotation, ImageRecord, Outline, Polygon
from detection.data.split import Split
from detection.tasks import DetectionTask

# Folder below ROOT -> how its datasets' names begin: Detectron2's, and the embedded scenes'
STEMS = {"coco": "coco_2017", "scenes": "scenes"}


class CocoImage(TypedDict):
    id: int
    file_name: str
    height: int
    width: int


class CocoCategory(TypedDict):
    id: int
    name: str
    keypoints: NotRequired[list[str]]


class CocoObject(TypedDict):
    """One object of the file; what may be missing or malformed is looked at before it is
    believed."""

    id: int
    image_id: int
    category_id: int
    bbox: list[float]
    area: NotRequired[float]
    iscrowd: NotRequired[int]
    segmentation: NotRequired[Outline]
    keypoints: NotRequired[list[float]]


class CocoFile(TypedDict):
    images: list[CocoImage]
    annotations: list[CocoObject]
    categories: list[CocoCategory]


def names() -> dict[str, tuple[str, str, str]]:
    """Dataset name -> (folder below ROOT, annotation file, image folder)."""
    out = {}
    for (folder, stem), part in itertools.product(STEMS.items(), ("train", "val")):
        name = f"{stem}_{part}"
        out[name] = (folder, f"instances_{part}2017.json", f"{part}2017")
        out[f"keypoints_{name}"] = (folder, f"person_keypoints_{part}2017.json", f"{part}2017")
    return out


def root_folder(data: Path | None) -> Path:
    """--data, or Detectron2's $DETECTRON2_DATASETS."""
    root = data or os.environ.get("DETECTRON2_DATASETS")
    if not root:
        raise BadInput(
            "no data: give --data ROOT with ROOT/coco/{annotations,train2017,val2017} "
            "(or $DETECTRON2_DATASETS)"
        )
    return Path(root)


def find(name: str, root: Path) -> tuple[Path, Path, int | None]:
    """A dataset's annotation file, image folder and limit: coco_2017_val_100 is the first 100
    images of its file."""
    known = names()
    base, _, tail = name.rpartition("_")
    limit = int(tail) if tail.isdigit() and base in known else None
    key = base if limit else name
    if key not in known:
        raise BadInput(f"DATASETS: unknown dataset '{name}'; {nearest(name, (*known, *voc.VOC))}")
    folder, file, part = known[key]
    return root / folder / "annotations" / file, root / folder / part, limit


def read(name: str, root: Path, *, task: DetectionTask) -> Split:
    """Read and check a dataset. Raises BadInput, one line, for what would train wrongly. What
    COCO's own tools skip (outlines of fewer than three points; in training, crowds and empty boxes)
    is skipped here too."""
    if name in voc.VOC:
        return voc.read(name, root, task=task)
    file, folder, limit = find(name, root)
    data = _read_json(file, folder, name)
    # 1. Categories get labels from 0 in the order of their ids; COCO's own ids have gaps.
    categories = sorted(data["categories"], key=lambda c: c["id"])
    if not categories:
        raise BadInput(f"{file}: 'categories' is empty")
    ids = tuple(c["id"] for c in categories)
    keypoints = _keypoint_names(categories, file) if task.keypoints else ()
    # 2. Objects go to their images; images are taken in the order of their ids.
    chosen = sorted(data["images"], key=lambda i: i["id"])[:limit]
    by_image, dropped = _by_image(data, file, ids, task, len(keypoints))
    records = [_record(image, folder, by_image[image["id"]]) for image in chosen]
    # 3. What the file promises must be there.
    if not records:
        raise BadInput(f"{file}: no images")
    _check_images(chosen, folder, file)
    if task.keypoints and not _any_keypoints(records):
        raise BadInput(
            f"{file}: no annotation has keypoints; the keypoint task needs a person_keypoints file"
        )
    notes = (f"{dropped} objects without a valid outline left out",) if dropped else ()
    labels = tuple(str(c["name"]) for c in categories)
    return Split(name, file, folder, labels, ids, records, keypoints, notes)


def _read_json(file: Path, folder: Path, name: str) -> CocoFile:
    """The three lists that an annotation file must have, their rows not yet looked at."""
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError:
        raise BadInput(
            f"{file}: no such file; COCO is ROOT/coco/{{annotations,train2017,val2017}}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: not JSON ({error})") from None
    if not isinstance(data, dict):
        raise BadInput(f"{file}: expected COCO's format, found a {type(data).__name__}")
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such image folder (dataset {name})")
    for key in ("images", "annotations", "categories"):
        if not isinstance(data.get(key), list):
            raise BadInput(f"{file}: has no '{key}' list; expected COCO's format")
    return cast(CocoFile, data)


def _keypoint_names(categories: Sequence[CocoCategory], file: Path) -> tuple[str, ...]:
    if len(categories) != 1 or not categories[0].get("keypoints"):
        found = ", ".join(str(c.get("name")) for c in categories[:3])
        raise BadInput(
            f"{file}: keypoints need one category with a 'keypoints' list; "
            f"this has {len(categories)} ({found})"
        )
    return tuple(categories[0]["keypoints"])


def _by_image(
    data: CocoFile, file: Path, ids: Sequence[int], task: DetectionTask, keypoints: int
) -> tuple[dict[int, list[Annotation]], int]:
    """Image id -> its objects in the order of the file; and how many were dropped for their
    outline."""
    by_image: dict[int, list[Annotation]] = {i["id"]: [] for i in data["images"]}
    if len(by_image) != len(data["images"]):
        raise BadInput(f"{file}: two images share one id")
    label_of = {id: label for label, id in enumerate(ids)}
    seen: set[int] = set()
    dropped = 0
    for a in data["annotations"]:
        where = f"{file}: annotation {a.get('id')}"
        if a.get("id") in seen:
            raise BadInput(f"{where}: its id appears twice")
        seen.add(a["id"])
        if a.get("category_id") not in label_of:
            raise BadInput(
                f"{where}: category {a.get('category_id')} is not among the file's "
                f"{len(ids)} categories"
            )
        if a.get("image_id") not in by_image:
            raise BadInput(f"{where}: image {a.get('image_id')} is not in the file's 'images'")
        annotation = _annotation(a, task, keypoints, label_of, where)
        if annotation is None:
            dropped += 1
        else:
            by_image[a["image_id"]].append(annotation)
    return by_image, dropped


def _annotation(
    a: CocoObject, task: DetectionTask, keypoints: int, label_of: Mapping[int, int], where: str
) -> Annotation | None:
    """One object as Detectron2's standard dict; None where its outline has no three points."""
    box = a.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(math.isfinite(v) for v in box):
        raise BadInput(f"{where}: bbox {box!r} is not [x, y, width, height]")
    crowd = int(a.get("iscrowd", 0))
    label = label_of[a["category_id"]]
    out: Annotation = {"bbox": box, "bbox_mode": XYWH, "category_id": label, "iscrowd": crowd}
    if task.outlines:
        polygons = _polygons(a.get("segmentation"), crowd, where)
        if polygons is not None and not polygons:
            return None
        if polygons:
            out["segmentation"] = polygons
    points = a.get("keypoints")
    if keypoints and points:
        if len(points) != 3 * keypoints:
            raise BadInput(f"{where}: {len(points)} keypoint values instead of {3 * keypoints}")
        # COCO's keypoints are pixel indices; the middle of a pixel is half a pixel further
        # (detectron2/data/datasets/coco.py adds the same half).
        moved = list(points)
        for i in range(0, len(moved), 3):
            moved[i] += 0.5
            moved[i + 1] += 0.5
        out["keypoints"] = moved
    return out


def _polygons(outline: Outline | None, crowd: int, where: str) -> list[Polygon] | None:
    """The polygons of at least three points, perhaps none; None for a crowd, whose run lengths are
    not trained on."""
    if outline is None:
        raise BadInput(f"{where}: no 'segmentation'; the mask task needs outlines")
    if isinstance(outline, list):
        return [p for p in outline if len(p) % 2 == 0 and len(p) >= 6]
    if not crowd:
        raise BadInput(f"{where}: a run-length mask of a single object; training needs polygons")
    return None


def _record(image: CocoImage, folder: Path, annotations: list[Annotation]) -> ImageRecord:
    return {
        "file_name": str(folder / image["file_name"]),
        "image_id": image["id"],
        "height": image["height"],
        "width": image["width"],
        "annotations": annotations,
    }


def _check_images(chosen: Sequence[CocoImage], folder: Path, file: Path) -> None:
    # One listing, and a look-up only for what is not in it (below a subfolder, say): 118,000
    # look-ups take long on a network disk.
    there = {p.name for p in folder.iterdir()}
    missing = []
    for image in chosen:
        name = image["file_name"]
        if name not in there and not (folder / name).is_file():
            missing.append(name)
    if missing:
        raise BadInput(
            f"{folder}: {len(missing)} of {len(chosen)} images of {file.name} are missing, "
            f"first {missing[0]}"
        )


def _any_keypoints(records: Sequence[ImageRecord]) -> bool:
    return any("keypoints" in a for r in records for a in r["annotations"])
