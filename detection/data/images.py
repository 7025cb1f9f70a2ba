"""One image and its targets as a network is trained on them: read, resized, perhaps mirrored."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor

from backbench.containers.spans import plain_name, read_spelled
from backbench.detection.data.dataset_dicts import ImageRecord
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput
from backbench.images.image_list import FORMATS, decode, readable
from backbench.runs import seeding

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode
    from PIL import Image

# Pixels: the box_threshold of detectron2/data/detection_utils.py::filter_empty_instances
EMPTY = 1e-5
EXIF_ORIENTATION, SIDEWAYS = (
    0x0112,
    (5, 6, 7, 8),
)  # the tag, and its values that swap the sides
JPEG_END, TAIL = b"\xff\xd9", 1024  # some writers put a few bytes behind the end
THREADS = 16
Array: TypeAlias = np.ndarray


class TrainTarget(TypedDict):
    """The objects of one training image, n of them, in its pixels."""

    boxes: Tensor  # (n, 4) float32, x1 y1 x2 y2
    labels: Tensor  # (n,) int64 from 1; 0 is the background
    polygons: NotRequired[list[list[Array]]]  # n lists of (x1, y1, x2, y2, ...) float64
    keypoints: NotRequired[Tensor]  # (n, K, 3) float32


class TrainSample(TypedDict):
    image: Tensor  # uint8 (3, H, W)
    target: TrainTarget
    slot: int
    iteration: int


def shortest_edge(height: int, width: int, size: int, limit: int) -> tuple[int, int]:
    """Return (height, width) with the shorter side `size`, unless the longer would pass `limit`:
    Detectron2's ResizeShortestEdge, its rounding included."""
    # Its operations in its order, rounded once at the end: sizes must agree to the pixel.
    scale = size / min(height, width)
    new = (
        (float(size), scale * width)
        if height < width
        else (scale * height, float(size))
    )
    if max(new) > limit:
        shrink = limit / max(new)
        new = (new[0] * shrink, new[1] * shrink)
    return int(new[0] + 0.5), int(new[1] + 0.5)


def load_image(record: ImageRecord) -> Image.Image:
    """Load the image, turned as its EXIF orientation says; BadInput if its size is not the
    annotation file's: detectron2/data/detection_utils.py::read_image and check_image_size."""
    name = record["file_name"]
    image = decode(plain_name(name), upright=True, data=read_spelled(name))
    _check_size(record, image.size)
    return image


def _check_size(record: ImageRecord, size: tuple[int, int]) -> None:
    stated = (record["width"], record["height"])
    if size != stated:
        raise BadInput(
            f"{plain_name(record['file_name'])}: is {size} pixels; its annotations say {stated}"
        )


def check_file(record: ImageRecord) -> None:
    """Raise BadInput for an image that would end a training: of another size than stated, cut off,
    or no image. Only its head and its tail are read."""
    from PIL import Image

    path = plain_name(record["file_name"])
    data = read_spelled(record["file_name"])
    with readable(path, data) as file, Image.open(file, formats=FORMATS) as image:
        size, jpeg = image.size, image.format == "JPEG"
        if image.getexif().get(EXIF_ORIENTATION) in SIDEWAYS:
            size = (image.height, image.width)
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        whole = not jpeg or JPEG_END in file.read()
    if not whole:
        raise BadInput(f"{path}: corrupt image (truncated: it has no end)")
    _check_size(record, size)


def check_files(records: Sequence[ImageRecord]) -> None:
    """Run `check_file` on all, in threads for network disks; raise the first error in order."""
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(check_file, records):
            pass


def to_uint8(image: Image.Image) -> Tensor:
    """PIL image -> uint8 (3, H, W)."""
    return torch.from_numpy(np.array(image, copy=True)).permute(2, 0, 1).contiguous()


def resized(image: Image.Image, height: int, width: int) -> Image.Image:
    """Resize by PIL's antialiased bilinear on uint8, as Detectron2 does; torchvision's detectors
    resize floats without antialiasing."""
    from PIL import Image

    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.BILINEAR)


@dataclass(frozen=True)
class ResizeAndFlip:
    """Does the whole augmentation: the shorter side is one of `sizes` ("choice") or between its two
    ("range"), the longer at most `limit`; half of the images are mirrored where `flip`."""

    sizes: tuple[int, ...]
    limit: int
    flip: bool
    seed: int
    sampling: str = "choice"

    @classmethod
    def of(cls, cfg: CfgNode, seed: int) -> ResizeAndFlip:
        i = cfg.INPUT
        flip = i.RANDOM_FLIP == "horizontal"
        sizes = tuple(i.MIN_SIZE_TRAIN)
        return cls(sizes, i.MAX_SIZE_TRAIN, flip, seed, i.MIN_SIZE_TRAIN_SAMPLING)

    def draw(self, iteration: int, slot: int) -> tuple[int, bool]:
        """Draw the shorter side, and whether to mirror, for the image at this place of the run."""
        # Detectron2 draws with numpy: the same distributions, other numbers.
        draw = seeding.generator(self.seed, "augment", iteration, slot)
        if self.sampling == "range":
            size = int(
                torch.randint(self.sizes[0], self.sizes[1] + 1, (), generator=draw)
            )
        else:
            size = self.sizes[int(torch.randint(len(self.sizes), (), generator=draw))]
        return size, self.flip and bool(torch.rand((), generator=draw) < 0.5)


class TrainImages(torch.utils.data.Dataset[TrainSample]):
    """(iteration, slot, record), a key of order.Slots -> TrainSample."""

    def __init__(
        self,
        records: Sequence[ImageRecord],
        augment: ResizeAndFlip,
        flip_map: Sequence[int],
        task: DetectionTask,
    ) -> None:
        self.records, self.augment, self.task = records, augment, task
        self.flip_map = list(flip_map)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, key: tuple[int, int, int]) -> TrainSample:
        iteration, slot, index = key
        record = self.records[index]
        size, mirrored = self.augment.draw(iteration, slot)
        image = load_image(record)
        height, width = shortest_edge(
            record["height"], record["width"], size, self.augment.limit
        )
        pixels = to_uint8(resized(image, height, width))
        if mirrored:
            pixels = pixels.flip(-1)
        target = targets(
            record,
            height,
            width,
            mirrored=mirrored,
            flip_map=self.flip_map,
            task=self.task,
        )
        return {"image": pixels, "target": target, "slot": slot, "iteration": iteration}


def targets(
    record: ImageRecord,
    height: int,
    width: int,
    *,
    mirrored: bool,
    flip_map: Sequence[int],
    task: DetectionTask,
) -> TrainTarget:
    """Put the record's objects on the image resized to (height, width) and perhaps mirrored. Crowds
    and boxes that are empty after clipping are left out, as in Detectron2's mapper."""
    sx, sy = width / record["width"], height / record["height"]
    mirror = width if mirrored else None
    boxes, labels, polygons, keypoints = [], [], [], []
    for a in record["annotations"]:
        if a["iscrowd"]:
            continue
        # The box moves first, then it is cut to the image; what nothing is left of is left out.
        x, y, w, h = a["bbox"]
        x1, x2 = x * sx, (x + w) * sx
        if mirrored:
            x1, x2 = width - x2, width - x1
        box = np.clip(
            [x1, y * sy, x2, (y + h) * sy], 0, [width, height, width, height]
        ).tolist()
        if box[2] - box[0] <= EMPTY or box[3] - box[1] <= EMPTY:
            continue
        boxes.append(box)
        labels.append(a["category_id"] + 1)
        if task.outlines:
            # Outlines are not cut: a head's grid is, when they are rasterised on its box.
            polygons.append([_moved(p, sx, sy, mirror) for p in a["segmentation"]])
        if task.keypoints:
            points = np.asarray(a["keypoints"], np.float64).reshape(-1, 3) * [sx, sy, 1]
            keypoints.append(
                _keypoints(points, height, width, flip_map if mirrored else None)
            )
    out: TrainTarget = {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.int64),
    }
    if task.outlines:
        out["polygons"] = polygons
    if task.keypoints:
        stacked = torch.tensor(np.array(keypoints), dtype=torch.float32)
        out["keypoints"] = stacked.reshape(-1, len(flip_map), 3)
    return out


def _moved(polygon: Sequence[float], sx: float, sy: float, mirror: int | None) -> Array:
    """A polygon on the resized image, `mirror` pixels wide if it is mirrored."""
    xy = np.asarray(polygon, np.float64).reshape(-1, 2) * [sx, sy]
    if mirror is not None:
        xy[:, 0] = mirror - xy[:, 0]
    return xy.reshape(-1)


def _keypoints(
    points: Array, height: int, width: int, flip_map: Sequence[int] | None
) -> Array:
    """(K, 3) in the image of that size, mirrored when a map is given; unmarked ones and those
    outside it are zero: detectron2/data/detection_utils.py::transform_keypoint_annotations."""
    # Mirroring keeps a point inside, so it does not matter which comes first.
    inside = np.all(
        (points[:, :2] >= 0) & (points[:, :2] <= np.array([width, height])), axis=1
    )
    if flip_map is not None:
        points[:, 0] = width - points[:, 0]
        # A mirrored left eye is a right eye: not only the place changes, but also whose it is.
        points, inside = points[list(flip_map)], inside[list(flip_map)]
    points[~inside, 2] = 0
    points[points[:, 2] == 0] = 0
    return points
