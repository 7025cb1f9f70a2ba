"""COCO files: datasets by Detectron2's names, checked before a run; one image and its targets; the order of images.

Records are Detectron2's "standard dataset dicts", so both engines train on the same images in the same order with the
same annotations.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backbench.errors import BadInput, nearest
from backbench.images.files import decode
from backbench.runs import seeding

XYWH = 1  # detectron2.structures.BoxMode.XYWH_ABS
LEFT_RIGHT = (("left", "right"), ("right", "left"))


# fmt: off
VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)
# fmt: on
VOC = {
    f"voc_{year}_{part}": (f"VOC{year}", part)
    for year in (2007, 2012)
    for part in ("trainval", "test")
}


def names() -> dict[str, tuple[str, str, str]]:
    """Dataset name -> (folder below ROOT, annotation file, image folder)."""
    out = {}
    for folder, part in itertools.product(("coco", "scenes"), ("train", "val")):
        name = f"coco_2017_{part}" if folder == "coco" else f"{folder}_{part}"
        out[name] = (folder, f"instances_{part}2017.json", f"{part}2017")
        out[f"keypoints_{name}"] = (folder, f"person_keypoints_{part}2017.json", f"{part}2017")
    return out


@dataclass(frozen=True)
class Split:
    """One annotation file. `categories` are names by contiguous label; `ids` are the file's own, in the same order."""

    name: str
    file: Path
    folder: Path
    categories: tuple[str, ...]
    ids: tuple[int, ...]
    records: list[dict[str, Any]]
    keypoints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    more_files: tuple[Path, ...] = ()  # of the datasets joined to this one

    @property
    def flip(self) -> list[int]:
        """Where each keypoint's value comes from in a mirrored image: left_eye from right_eye."""
        out = []
        for name in self.keypoints:
            partner = next((name.replace(a, b) for a, b in LEFT_RIGHT if a in name), name)
            out.append(
                self.keypoints.index(partner)
                if partner in self.keypoints
                else self.keypoints.index(name)
            )
        return out


def root_folder(data: Path | None) -> Path:
    """--data, or Detectron2's $DETECTRON2_DATASETS."""
    root = data or (
        Path(os.environ["DETECTRON2_DATASETS"]) if os.environ.get("DETECTRON2_DATASETS") else None
    )
    if root is None:
        raise BadInput(
            "no data: give --data ROOT with ROOT/coco/{annotations,train2017,val2017} (or $DETECTRON2_DATASETS)"
        )
    return root


def find(name: str, root: Path) -> tuple[Path, Path, int | None]:
    """A dataset's annotation file, image folder and limit: coco_2017_val_100 is the first 100 images of its file."""
    known = names()
    base, _, tail = name.rpartition("_")
    limit = int(tail) if tail.isdigit() and base in known else None
    key = base if limit else name
    if key not in known:
        raise BadInput(f"DATASETS: unknown dataset '{name}'; {nearest(name, (*known, *VOC))}")
    folder, file, part = known[key]
    return root / folder / "annotations" / file, root / folder / part, limit


def read(name: str, root: Path, *, task: str) -> Split:
    """Read and check a dataset. Raises BadInput, one line, for what would train wrongly. What COCO's own tools skip
    (outlines of fewer than three points; in training, crowds and empty boxes) is skipped here too.
    """
    if name in VOC:
        return read_voc(name, root, task=task)
    file, folder, limit = find(name, root)
    data = _read_json(file)
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such image folder (dataset {name})")
    for key in ("images", "annotations", "categories"):
        if not isinstance(data.get(key), list):
            raise BadInput(f"{file}: has no '{key}' list; expected COCO's format")
    categories = sorted(data["categories"], key=lambda c: c["id"])
    if not categories:
        raise BadInput(f"{file}: 'categories' is empty")
    ids = tuple(c["id"] for c in categories)
    label_of = {id: label for label, id in enumerate(ids)}
    keypoint_names: tuple[str, ...] = ()
    if task == "keypoint_rcnn":
        if len(categories) != 1 or not categories[0].get("keypoints"):
            raise BadInput(
                f"{file}: keypoints need one category with a 'keypoints' list; this has {len(categories)} "
                f"({', '.join(str(c.get('name')) for c in categories[:3])})"
            )
        keypoint_names = tuple(categories[0]["keypoints"])
    chosen = sorted(data["images"], key=lambda i: i["id"])[:limit]
    by_image: dict[int, list[dict[str, Any]]] = {i["id"]: [] for i in data["images"]}
    if len(by_image) != len(data["images"]):
        raise BadInput(f"{file}: two images share one id")
    seen: set[int] = set()
    dropped = 0
    for a in data["annotations"]:
        where = f"{file}: annotation {a.get('id')}"
        if a.get("id") in seen:
            raise BadInput(f"{where}: its id appears twice")
        seen.add(a["id"])
        if a.get("category_id") not in label_of:
            raise BadInput(
                f"{where}: category {a.get('category_id')} is not among the file's {len(ids)} categories"
            )
        if a.get("image_id") not in by_image:
            raise BadInput(f"{where}: image {a.get('image_id')} is not in the file's 'images'")
        annotation = _annotation(a, task, len(keypoint_names), label_of, where)
        if annotation is None:
            dropped += 1
        else:
            by_image[a["image_id"]].append(annotation)
    records = [
        {
            "file_name": str(folder / i["file_name"]),
            "image_id": i["id"],
            "height": i["height"],
            "width": i["width"],
            "annotations": by_image[i["id"]],
        }
        for i in chosen
    ]
    if not records:
        raise BadInput(f"{file}: no images")
    there = {
        p.name for p in folder.iterdir()
    }  # one listing: 118,000 look-ups take long on a network disk
    missing = [
        i["file_name"]
        for i in chosen
        if i["file_name"] not in there and not (folder / i["file_name"]).is_file()
    ]
    if missing:
        raise BadInput(
            f"{folder}: {len(missing)} of {len(chosen)} images of {file.name} are missing, first {missing[0]}"
        )
    if task == "keypoint_rcnn" and not any(
        "keypoints" in a for r in records for a in r["annotations"]
    ):
        raise BadInput(
            f"{file}: no annotation has keypoints; the keypoint task needs a person_keypoints file"
        )
    notes = (f"{dropped} objects without a valid outline left out",) if dropped else ()
    return Split(
        name,
        file,
        folder,
        tuple(str(c["name"]) for c in categories),
        ids,
        records,
        keypoint_names,
        notes,
    )


def _read_json(file: Path) -> dict[str, Any]:
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
    return data


def _annotation(
    a: Mapping[str, Any], task: str, keypoints: int, label_of: Mapping[int, int], where: str
) -> dict[str, Any] | None:
    """One object as Detectron2's standard dict; None where its outline has no three points."""
    box = a.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(math.isfinite(v) for v in box):
        raise BadInput(f"{where}: bbox {box!r} is not [x, y, width, height]")
    crowd = int(a.get("iscrowd", 0))
    out: dict[str, Any] = {
        "bbox": box,
        "bbox_mode": XYWH,
        "category_id": label_of[a["category_id"]],
        "iscrowd": crowd,
    }
    if task == "mask_rcnn":
        outline = a.get("segmentation")
        if outline is None:
            raise BadInput(f"{where}: no 'segmentation'; the mask task needs outlines")
        if isinstance(outline, list):
            outline = [p for p in outline if len(p) % 2 == 0 and len(p) >= 6]
            if not outline:
                return None
            out["segmentation"] = outline
        elif not crowd:
            raise BadInput(
                f"{where}: a run-length mask of a single object; training needs polygons"
            )
    if keypoints and a.get("keypoints"):
        if len(a["keypoints"]) != 3 * keypoints:
            raise BadInput(
                f"{where}: {len(a['keypoints'])} keypoint values instead of {3 * keypoints}"
            )
        # COCO's keypoints are pixel indices; the middle of a pixel is half a pixel further.
        out["keypoints"] = [v if i % 3 == 2 else v + 0.5 for i, v in enumerate(a["keypoints"])]
    return out


def read_voc(name: str, root: Path, *, task: str) -> Split:
    """ROOT/VOC2007/{ImageSets/Main,Annotations,JPEGImages}. Boxes are 1-based and inclusive in the files. Objects
    marked difficult are trained on and, as VOC has it, neither hit nor miss when scored."""
    import xml.etree.ElementTree as ET

    folder, part = root / VOC[name][0], VOC[name][1]
    file = folder / "ImageSets" / "Main" / f"{part}.txt"
    if task != "faster_rcnn":
        raise BadInput(f"{name}: VOC has boxes only; the {task} task needs COCO")
    if not file.is_file():
        raise BadInput(
            f"{file}: no such file; VOC is ROOT/{VOC[name][0]}/{{ImageSets,Annotations,JPEGImages}}"
        )
    records = []
    for image in file.read_text().split():
        path = folder / "Annotations" / f"{image}.xml"
        try:
            tree = ET.parse(path)
            size = {k: int(str(tree.findtext(f"size/{k}"))) for k in ("height", "width")}
            objects = []
            for node in tree.iter("object"):
                x1, y1, x2, y2 = (
                    float(str(node.findtext(f"bndbox/{k}")))
                    for k in ("xmin", "ymin", "xmax", "ymax")
                )
                label = VOC_CLASSES.index(str(node.findtext("name")))
                box = [x1 - 1, y1 - 1, x2 - x1 + 1, y2 - y1 + 1]
                objects.append({"bbox": box, "bbox_mode": XYWH, "category_id": label, "iscrowd": 0})
        except (OSError, ET.ParseError, ValueError) as error:
            raise BadInput(f"{path}: not a VOC annotation file ({error})") from None
        photo = str(folder / "JPEGImages" / f"{image}.jpg")
        records.append({"file_name": photo, "image_id": image, **size, "annotations": objects})
    if not records:
        raise BadInput(f"{file}: no images")
    return Split(name, file, folder / "JPEGImages", VOC_CLASSES, tuple(range(20)), records)


def join(splits: Sequence[Split]) -> Split:
    """Several training sets as one, in the order given; their categories must be the same."""
    first, *others = splits
    for other in others:
        if (other.categories, other.ids) != (first.categories, first.ids):
            raise BadInput(f"{other.file}: its categories are not those of {first.file}")
    return replace(
        first,
        name="+".join(s.name for s in splits),
        records=[r for s in splits for r in s.records],
        notes=tuple(n for s in splits for n in s.notes),
        more_files=tuple(s.file for s in others),
    )


def training_records(split: Split, task: str) -> list[dict[str, Any]]:
    """Images with at least one object that is no crowd, and for keypoints at least one marked keypoint."""
    kept = []
    for r in split.records:
        objects = [a for a in r["annotations"] if not a["iscrowd"]]
        if task == "keypoint_rcnn":
            objects = [a for a in objects if any(v > 0 for v in a.get("keypoints", ())[2::3])]
        if objects:
            kept.append(r)
    if not kept:
        raise BadInput(f"{split.file}: no image has an object to train on")
    return kept


class Order:
    """Which images a run sees: an endless stream of shuffled passes, cut into groups of like orientation.

    A pure function of (records, batch, seed): iteration i's batch does not depend on ranks, workers or restarts. Groups
    of gcd(4, batch) images, the papers' share of a GPU, are all wide or all tall, so little is padded. A group that is
    incomplete at the end of a pass is filled in the next.
    """

    def __init__(
        self, records: Sequence[Mapping[str, Any]], batch: int, seed: int, *, grouped: bool = True
    ) -> None:
        self.wide = [r["width"] > r["height"] for r in records]
        self.batch, self.seed = batch, seed
        self.group = math.gcd(4, batch) if grouped else 1

    def batches(self, first: int = 0) -> Iterator[list[int]]:
        """Record indices of batch `first`, `first + 1`, ..."""
        groups = self._groups()
        per_batch = self.batch // self.group
        for number in itertools.count():
            members = list(itertools.chain.from_iterable(itertools.islice(groups, per_batch)))
            if number >= first:
                yield members

    def _groups(self) -> Iterator[list[int]]:
        open_groups: dict[bool, list[int]] = {True: [], False: []}
        for epoch in itertools.count():
            for i in torch.randperm(
                len(self.wide), generator=seeding.generator(self.seed, "order", epoch)
            ).tolist():
                group = open_groups[self.wide[i] if self.group > 1 else True]
                group.append(i)
                if len(group) == self.group:
                    yield list(group)
                    group.clear()


class Slots(torch.utils.data.Sampler[list[tuple[int, int, int]]]):
    """Batches of one rank for a DataLoader: (iteration, slot in the global batch, record)."""

    def __init__(
        self, order: Order, *, first: int, last: int, rank: int = 0, world: int = 1
    ) -> None:
        self.order, self.first, self.last, self.rank, self.world = order, first, last, rank, world

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        share = self.order.batch // self.world
        stream = self.order.batches(self.first)
        for iteration in range(self.first, self.last):
            members = next(stream)
            yield [
                (iteration, s, members[s])
                for s in range(self.rank * share, (self.rank + 1) * share)
            ]

    def __len__(self) -> int:
        return self.last - self.first


def shortest_edge(height: int, width: int, size: int, limit: int) -> tuple[int, int]:
    """New (height, width) with the shorter side `size`, unless the longer would pass `limit`."""
    scale = size / min(height, width)
    new = (float(size), scale * width) if height < width else (scale * height, float(size))
    if max(new) > limit:
        shrink = limit / max(new)
        new = (new[0] * shrink, new[1] * shrink)
    return int(new[0] + 0.5), int(new[1] + 0.5)


def load_image(record: Mapping[str, Any]) -> Any:
    """The PIL image; BadInput where its size is not the annotation file's."""
    image = decode(record["file_name"])
    if image.size != (record["width"], record["height"]):
        stated = (record["width"], record["height"])
        raise BadInput(
            f"{record['file_name']}: is {image.size} pixels, its annotation file says {stated}"
        )
    return image


def to_uint8(image: Any) -> torch.Tensor:
    """PIL image -> uint8 (3, H, W)."""
    return torch.from_numpy(np.array(image, copy=True)).permute(2, 0, 1).contiguous()


def resized(image: Any, height: int, width: int) -> Any:
    """PIL's antialiased bilinear on uint8, as Detectron2 does it."""
    from PIL import Image

    return (
        image
        if image.size == (width, height)
        else image.resize((width, height), Image.Resampling.BILINEAR)
    )


@dataclass(frozen=True)
class Augment:
    sizes: tuple[int, ...]
    limit: int
    flip: bool
    seed: int
    sampling: str = "choice"


class TrainImages(torch.utils.data.Dataset[dict[str, Any]]):
    """(iteration, slot, record) -> {"image": uint8 (3, H, W), "target": ..., "slot", "iteration"}.

    target: boxes (n, 4) x1 y1 x2 y2, labels (n,) from 1, polygons (n lists of float64 arrays), keypoints (n, K, 3).
    """

    def __init__(
        self,
        records: Sequence[Mapping[str, Any]],
        augment: Augment,
        flip_map: Sequence[int],
        task: str,
    ) -> None:
        self.records, self.augment, self.flip_map, self.task = (
            records,
            augment,
            list(flip_map),
            task,
        )

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, key: tuple[int, int, int]) -> dict[str, Any]:
        iteration, slot, index = key
        record = self.records[index]
        a = self.augment
        draw = seeding.generator(a.seed, "augment", iteration, slot)
        if a.sampling == "range":
            size = int(torch.randint(a.sizes[0], a.sizes[1] + 1, (), generator=draw))
        else:
            size = a.sizes[int(torch.randint(len(a.sizes), (), generator=draw))]
        mirrored = a.flip and bool(torch.rand((), generator=draw) < 0.5)
        image = load_image(record)
        height, width = shortest_edge(record["height"], record["width"], size, a.limit)
        pixels = to_uint8(resized(image, height, width))
        if mirrored:
            pixels = pixels.flip(-1)
        target = targets(
            record, height, width, mirrored=mirrored, flip_map=self.flip_map, task=self.task
        )
        return {
            "image": pixels,
            "target": target,
            "slot": slot,
            "iteration": iteration,
            "image_id": record["image_id"],
        }


def targets(
    record: Mapping[str, Any],
    height: int,
    width: int,
    *,
    mirrored: bool,
    flip_map: Sequence[int],
    task: str,
) -> dict[str, Any]:
    """The record's objects on the image resized to (height, width) and perhaps mirrored. Crowds and objects whose box
    is empty after clipping are left out, as in Detectron2's mapper."""
    sx, sy = width / record["width"], height / record["height"]
    boxes, labels, polygons, keypoints = [], [], [], []
    for a in record["annotations"]:
        if a["iscrowd"]:
            continue
        x, y, w, h = a["bbox"]
        x1, x2 = x * sx, (x + w) * sx
        if mirrored:
            x1, x2 = width - x2, width - x1
        box = np.clip([x1, y * sy, x2, (y + h) * sy], 0, [width, height, width, height]).tolist()
        if box[2] - box[0] <= 1e-5 or box[3] - box[1] <= 1e-5:
            continue
        boxes.append(box)
        labels.append(a["category_id"] + 1)
        if task == "mask_rcnn":
            mirror = width if mirrored else None
            polygons.append(
                [_moved(np.asarray(p, np.float64), sx, sy, mirror) for p in a["segmentation"]]
            )
        if task == "keypoint_rcnn":
            points = np.asarray(a.get("keypoints") or [0] * 3 * len(flip_map), np.float64).reshape(
                -1, 3
            )
            keypoints.append(
                _keypoints(points * [sx, sy, 1], height, width, flip_map if mirrored else None)
            )
    out: dict[str, Any] = {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.int64),
    }
    if task == "mask_rcnn":
        out["polygons"] = polygons
    if task == "keypoint_rcnn":
        out["keypoints"] = torch.tensor(np.array(keypoints), dtype=torch.float32).reshape(
            -1, len(flip_map), 3
        )
    return out


def _moved(points: np.ndarray, sx: float, sy: float, mirror: int | None) -> np.ndarray:
    xy = points.reshape(-1, 2) * [sx, sy]
    if mirror is not None:
        xy[:, 0] = mirror - xy[:, 0]
    return xy.reshape(-1)


def _keypoints(
    points: np.ndarray, height: int, width: int, flip_map: Sequence[int] | None
) -> np.ndarray:
    """(K, 3) in the image of that size, mirrored when a map is given; unmarked ones and those outside it are zero."""
    inside = np.all((points[:, :2] >= 0) & (points[:, :2] <= np.array([width, height])), axis=1)
    if flip_map is not None:
        points[:, 0] = width - points[:, 0]
        points, inside = points[list(flip_map)], inside[list(flip_map)]
    points[~inside, 2] = 0
    points[points[:, 2] == 0] = 0
    return points
