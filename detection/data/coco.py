"""COCO's annotation files as records, under Detectron2's names of datasets, checked before a
run."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from backbench.datasets.detection_check import LARGEST
from backbench.errors import BadInput, nearest
from backbench.untrusted import opening, printable
from detection.data import rows, voc
from detection.data.dataset_dicts import XYWH, Annotation, ImageRecord, Polygon
from detection.data.split import Split, is_marked, join
from detection.task_rows import DetectionTask

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

# Folder below ROOT -> how its datasets' names begin: Detectron2's, and the embedded scenes'
STEMS = {"coco": "coco_2017", "scenes": "scenes"}


class CocoFile(TypedDict):
    """The three lists of an annotation file; rows.py looks at what is in them."""

    images: list[dict[str, Any]]
    annotations: list[dict[str, Any]]
    categories: list[dict[str, Any]]


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


def read_splits(cfg: CfgNode, config: Path, root: Path, task: DetectionTask) -> tuple[Split, Split]:
    """Read the images that DATASETS of a config file train on and score on."""
    parts = {"TRAIN": list(cfg.DATASETS.TRAIN), "TEST": list(cfg.DATASETS.TEST)}
    for part, datasets in parts.items():
        if not datasets:
            raise BadInput(f"{config}: DATASETS.{part} is empty")
    if len(parts["TEST"]) != 1:
        raise BadInput(f"{config}: DATASETS.TEST {parts['TEST']}: one dataset is scored in a run")
    train = join([read(name, root, task=task) for name in parts["TRAIN"]])
    return train, read(parts["TEST"][0], root, task=task)


def read(name: str, root: Path, *, task: DetectionTask) -> Split:
    """Read and check a dataset. Raises BadInput, one line, for what would train wrongly. What
    COCO's own tools skip (outlines of fewer than three points; in training, crowds and empty boxes)
    is skipped here too."""
    if name in voc.VOC:
        return voc.read(name, root, task=task)
    file, folder, limit = find(name, root)
    data = _read_json(file, folder, name)
    # 1. Categories get labels from 0 in the order of their ids; COCO's own ids have gaps.
    rows.identifiers(data["categories"], "categories", file)
    categories = sorted(data["categories"], key=lambda c: c["id"])
    if not categories:
        raise BadInput(f"{file}: 'categories' is empty")
    labels = tuple(rows.category(c, file) for c in categories)
    if len(set(labels)) < len(labels):
        twice = max(labels, key=labels.count)
        raise BadInput(f"{file}: two categories have the name '{twice}'")
    ids = tuple(c["id"] for c in categories)
    keypoints = _keypoint_names(categories, file) if task.keypoints else ()
    # 2. Objects go to their images; images are taken in the order of their ids.
    records = _records(data["images"], folder, file)
    dropped = _fill(records, data["annotations"], file, ids, task=task, keypoints=len(keypoints))
    chosen = [records[id] for id in sorted(records)][:limit]
    # 3. What the file promises must be there.
    if not chosen:
        raise BadInput(f"{file}: no images")
    _check_images(chosen, folder, file)
    if task.keypoints and not _any_keypoints(chosen):
        raise BadInput(
            f"{file}: no annotation has keypoints; the keypoint task needs a person_keypoints file"
        )
    notes = (f"{dropped} objects without a valid outline left out",) if dropped else ()
    return Split(name, file, folder, labels, ids, chosen, keypoints, notes)


def _read_json(file: Path, folder: Path, name: str) -> CocoFile:
    """The three lists that an annotation file must have, their rows not yet looked at."""
    try:
        data = json.loads(opening.read_bytes(file, most=LARGEST))
    except FileNotFoundError:
        raise BadInput(
            f"{file}: no such file; COCO is ROOT/coco/{{annotations,train2017,val2017}}"
        ) from None
    except (ValueError, RecursionError, OSError) as error:
        raise BadInput(f"{file}: not JSON ({printable.shown(str(error), 100)})") from None
    if not isinstance(data, dict):
        raise BadInput(f"{file}: expected COCO's format, found a {type(data).__name__}")
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such image folder (dataset {name})")
    for key in ("images", "annotations", "categories"):
        if not isinstance(data.get(key), list):
            raise BadInput(f"{file}: has no '{key}' list; expected COCO's format")
    return cast(CocoFile, data)


def _keypoint_names(categories: Sequence[Mapping[str, Any]], file: Path) -> tuple[str, ...]:
    names = rows.keypoint_names(categories[0], file)
    if len(categories) != 1 or not names:
        found = ", ".join(str(c.get("name")) for c in categories[:3])
        raise BadInput(
            f"{file}: keypoints need one category with a 'keypoints' list; "
            f"this has {len(categories)} ({found})"
        )
    return names


def _records(
    images: Sequence[Mapping[str, Any]], folder: Path, file: Path
) -> dict[int | str, ImageRecord]:
    """Image id -> its record, without objects yet."""
    rows.identifiers(images, "images", file)
    out: dict[int | str, ImageRecord] = {}
    for image in images:
        where = f"{file}: image {image['id']}"
        height, width = rows.image_size(image, where)
        out[image["id"]] = {
            "file_name": rows.image_file(image, folder, where),
            "image_id": image["id"],
            "height": height,
            "width": width,
            "annotations": [],
        }
    return out


def _fill(
    records: Mapping[int | str, ImageRecord],
    annotations: Sequence[Mapping[str, Any]],
    file: Path,
    ids: Sequence[int],
    *,
    task: DetectionTask,
    keypoints: int,
) -> int:
    """Every object to its image, in the order of the file; how many were dropped for their
    outline."""
    rows.identifiers(annotations, "annotations", file)
    label_of = {id: label for label, id in enumerate(ids)}
    dropped = 0
    for a in annotations:
        where = f"{file}: annotation {a['id']}"
        category, image = a.get("category_id"), a.get("image_id")
        # A list or a group is no id, and cannot be looked up.
        if not isinstance(category, int | str) or category not in label_of:
            raise BadInput(
                f"{where}: category {category} is not among the file's {len(ids)} categories"
            )
        if not isinstance(image, int | str) or image not in records:
            raise BadInput(f"{where}: image {image} is not in the file's 'images'")
        record = records[image]
        annotation = _annotation(a, record, task, keypoints, where)
        if annotation is None:
            dropped += 1
        else:
            annotation["category_id"] = label_of[category]
            record["annotations"].append(annotation)
    return dropped


def _annotation(
    a: Mapping[str, Any], record: ImageRecord, task: DetectionTask, keypoints: int, where: str
) -> Annotation | None:
    """One object as Detectron2's standard dict, its label still to come; None where its outline has
    no three points."""
    box, crowd = rows.box(a, where), rows.crowd(a, where)
    rows.area(a, where)
    out: Annotation = {"bbox": box, "bbox_mode": XYWH, "category_id": 0, "iscrowd": crowd}
    if task.outlines:
        polygons = _polygons(a.get("segmentation"), record, crowd, where)
        if polygons is not None and not polygons:
            return None
        if polygons:
            out["segmentation"] = polygons
    if keypoints:
        points = rows.keypoints(a, keypoints, where)
        # COCO's keypoints are pixel indices; the middle of a pixel is half a pixel further
        # (detectron2/data/datasets/coco.py adds the same half).
        moved = list(points) or [0.0] * 3 * keypoints  # an object without any has unmarked ones
        for i in range(0, len(moved), 3):
            moved[i] += 0.5
            moved[i + 1] += 0.5
        out["keypoints"] = moved
    return out


def _polygons(outline: object, record: ImageRecord, crowd: int, where: str) -> list[Polygon] | None:
    """The polygons of at least three points, perhaps none; None for a crowd, whose run lengths are
    not trained on."""
    if outline is None:
        raise BadInput(f"{where}: no 'segmentation'; the mask task needs outlines")
    if not isinstance(outline, dict):
        return [p for p in rows.polygons(outline, where) if len(p) % 2 == 0 and len(p) >= 6]
    if not crowd:
        raise BadInput(f"{where}: a run-length mask of a single object; training needs polygons")
    rows.run_length(outline, (record["height"], record["width"]), where)
    return None


def _check_images(chosen: Sequence[ImageRecord], folder: Path, file: Path) -> None:
    # One listing, and a look-up only for what is not in it (below a subfolder, say): 118,000
    # look-ups take long on a network disk.
    there = {str(path) for path in Path(os.path.normpath(folder)).iterdir()}
    missing = []
    for record in chosen:
        name = record["file_name"]
        if name not in there and not os.path.isfile(name):  # noqa: PTH113 - any name at all
            missing.append(name)
    if missing:
        raise BadInput(
            f"{folder}: {len(missing)} of {len(chosen)} images of {file.name} are missing, "
            f"first {os.path.relpath(missing[0], folder)}"
        )


def _any_keypoints(records: Sequence[ImageRecord]) -> bool:
    return any(is_marked(a) for r in records for a in r["annotations"])
