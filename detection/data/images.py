"""Prepares an image and its targets for training: reads, resizes and perhaps mirrors them."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor

from backbench.containers.spans import plain_name, read_spelled
from backbench.detection.data.dataset_dicts import ImageRecord, RunLength
from backbench.detection.data.masks import bitmap
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput
from backbench.images.decoding import (
    LARGEST,
    SIDEWAYS,
    decode,
    opened,
    orientation_of,
    readable,
    upright_size,
)
from backbench.runs import seeding
from backbench.untrusted import opening

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode
    from PIL import Image

# A box whose side has at most so many pixels is empty: the box_threshold of
# detectron2/data/detection_utils.py::filter_empty_instances
EMPTY = 1e-5
JPEG_END = b"\xff\xd9"
TAIL = (
    1024  # bytes in which the end is looked for: some writers put a few bytes behind it
)
THREADS = 16
Array: TypeAlias = np.ndarray


class TrainTarget(TypedDict):
    """The n objects of one training image, in its pixels."""

    boxes: Tensor  # (n, 4) float32, x1 y1 x2 y2
    labels: Tensor  # (n,) int64 from 1; 0 is the background
    # Of a mask there is one of the two, by INPUT.MASK_FORMAT.
    polygons: NotRequired[list[list[Array]]]  # n lists of (x1, y1, x2, y2, ...) float64
    bitmaps: NotRequired[Tensor]  # (n, H, W) bool
    keypoints: NotRequired[Tensor]  # (n, K, 3) float32


class TrainSample(TypedDict):
    image: Tensor  # uint8 (3, H, W)
    target: TrainTarget
    slot: int  # in the global batch
    iteration: int


def shortest_edge(height: int, width: int, size: int, limit: int) -> tuple[int, int]:
    """Return (height, width) scaled so that the shorter side is `size`, or the longer is `limit` if
    it would be above. This is Detectron2's ResizeShortestEdge, its rounding included."""
    # The operations and their order are Detectron2's, with one rounding at the end: sizes must
    # agree to the pixel.
    scale = size / min(height, width)
    if height < width:
        new_height, new_width = float(size), scale * width
    else:
        new_height, new_width = scale * height, float(size)
    longer = max(new_height, new_width)
    if longer > limit:
        shrink = limit / longer
        new_height *= shrink
        new_width *= shrink
    return int(new_height + 0.5), int(new_width + 0.5)


def load_image(record: ImageRecord) -> Image.Image:
    """Load an image, turned as its EXIF orientation says. Raises BadInput if its size is not the
    annotation file's: detectron2/data/detection_utils.py::read_image and check_image_size."""
    name = record["file_name"]
    image = decode(plain_name(name), upright=True, data=read_spelled(name))
    _check_size(record, image.size)
    return image


def _check_size(
    record: ImageRecord, size: tuple[int, int], orientation: int = 1
) -> None:
    """Raise BadInput if an image that is shown in this size has another in its annotations."""
    stated = (record["width"], record["height"])
    if size == stated:
        return
    path = plain_name(record["file_name"])
    if orientation in SIDEWAYS and size == stated[::-1]:
        raise BadInput(
            f"{path}: its EXIF orientation {orientation} turns it, so it is shown and read as {size} "
            f"pixels; its annotations say {stated}, the size as stored; annotate what is shown, or, "
            "if the boxes are right for the stored pixels, take the orientation out (`exiftool "
            "-Orientation= FILE`)"
        )
    raise BadInput(f"{path}: is {size} pixels; its annotations say {stated}")


class LookedAt(NamedTuple):
    """Holds what `check_file` learns of an image."""

    turned: bool  # by its EXIF orientation
    length: int  # bytes
    tail: bytes  # a digest of its last bytes


def check_file(record: ImageRecord) -> LookedAt:
    """Raise BadInput for an image that would end a training: one of another size than stated, one
    that is cut off, one of a kind that is not read, or no image at all. Only its head and its tail
    are read."""
    path = plain_name(record["file_name"])
    data = read_spelled(record["file_name"])
    with readable(path, data) as file, opened(file, path) as image:
        size = upright_size(image)
        orientation = orientation_of(image)
        is_jpeg = image.format in ("JPEG", "MPO")  # MPO: a phone's JPEG of two pictures
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - TAIL))
        tail = file.read()
    if is_jpeg and JPEG_END not in tail:
        raise BadInput(f"{path}: corrupt image (truncated: it has no end)")
    _check_size(record, size, orientation)
    return LookedAt(
        turned=orientation in range(2, 9),
        length=length,
        tail=hashlib.sha256(tail).digest(),
    )


def check_files(records: Sequence[ImageRecord]) -> list[LookedAt]:
    """Run `check_file` on all images and raise the error of the first that has one."""
    # Threads, because a network disk answers many requests at a time
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(check_file, records))


def same_bytes(one: ImageRecord, other: ImageRecord) -> bool:
    """Return True if two images are the same file, or copies of one."""
    return _bytes_of(one) == _bytes_of(other)


def _bytes_of(record: ImageRecord) -> bytes:
    data = read_spelled(record["file_name"])
    if data is None:
        data = opening.read_bytes(record["file_name"], most=LARGEST)
    return data


def to_uint8(image: Image.Image) -> Tensor:
    """Turn a PIL image into uint8 (3, H, W)."""
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
    """The whole augmentation: resize each image to a random size, mirror half of them."""

    sizes: tuple[int, ...]  # of the shorter side: several to choose from, or two limits
    limit: int  # of the longer side
    flip: bool  # whether any image is mirrored
    seed: int
    sampling: str = "choice"  # "choice" is one of `sizes`, "range" lies between its two

    @classmethod
    def of(cls, cfg: CfgNode, seed: int) -> ResizeAndFlip:
        return cls(
            sizes=tuple(cfg.INPUT.MIN_SIZE_TRAIN),
            limit=cfg.INPUT.MAX_SIZE_TRAIN,
            flip=cfg.INPUT.RANDOM_FLIP == "horizontal",
            seed=seed,
            sampling=cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING,
        )

    def draw(self, iteration: int, slot: int) -> tuple[int, bool]:
        """Draw the shorter side, and whether to mirror, for the image at this place of the run."""
        # Detectron2 draws with numpy: its numbers are others, their distributions the same.
        generator = seeding.generator(self.seed, "augment", iteration, slot)
        if self.sampling == "range":
            low, high = self.sizes[:2]
            size = int(torch.randint(low, high + 1, (), generator=generator))
        else:
            choice = torch.randint(len(self.sizes), (), generator=generator)
            size = self.sizes[int(choice)]
        mirrored = self.flip and bool(torch.rand((), generator=generator) < 0.5)
        return size, mirrored


class TrainImages(torch.utils.data.Dataset[TrainSample]):
    """Makes a TrainSample for a key of order.Slots, (iteration, slot, record)."""

    def __init__(
        self,
        records: Sequence[ImageRecord],
        augment: ResizeAndFlip,
        flip_map: Sequence[int],
        task: DetectionTask,
        *,
        bitmasks: bool = False,
    ) -> None:
        self.records = records
        self.augment = augment
        self.flip_map = list(flip_map)
        self.task = task
        self.bitmasks = bitmasks

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
            bitmasks=self.bitmasks,
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
    bitmasks: bool = False,
) -> TrainTarget:
    """Put the record's objects on the image, resized to (height, width) and perhaps mirrored.

    Crowds and boxes that are empty after clipping are left out, as in Detectron2's mapper; of
    `bitmasks` those without a pixel, too.
    `flip_map` is the partner of each keypoint: Split.flip.
    """
    scale_x = width / record["width"]
    scale_y = height / record["height"]
    boxes: list[list[float]] = []
    labels: list[int] = []
    polygons: list[list[Array]] = []
    bitmaps: list[Array] = []
    keypoints: list[Array] = []
    for a in record["annotations"]:
        if a["iscrowd"]:
            continue
        # The box is moved first, then cut to the image.
        x, y, w, h = a["bbox"]
        x1, x2 = x * scale_x, (x + w) * scale_x
        y1, y2 = y * scale_y, (y + h) * scale_y
        if mirrored:
            x1, x2 = width - x2, width - x1
        limits = [width, height, width, height]
        box = np.clip([x1, y1, x2, y2], 0, limits).tolist()
        if box[2] - box[0] <= EMPTY or box[3] - box[1] <= EMPTY:
            continue
        if task.outlines:
            outline = a["segmentation"]
            if isinstance(outline, list):
                # Outlines are not cut to the image: rasterising them on a box cuts them to the box.
                moved = []
                for polygon in outline:
                    xy = np.asarray(polygon, np.float64).reshape(-1, 2)
                    xy = xy * [scale_x, scale_y]
                    if mirrored:
                        xy[:, 0] = width - xy[:, 0]
                    moved.append(xy.reshape(-1))
                drawn: list[Array] | RunLength = moved
            else:
                drawn = outline
            if bitmasks:
                pixels = bitmap(drawn, height, width, mirrored=mirrored)
                if not pixels.any():
                    continue
                bitmaps.append(pixels)
            elif isinstance(drawn, list):
                polygons.append(drawn)
        boxes.append(box)
        labels.append(a["category_id"] + 1)
        if task.keypoints:
            points = np.asarray(a["keypoints"], np.float64).reshape(-1, 3)
            points = points * [scale_x, scale_y, 1]
            keypoints.append(
                _keypoints(points, height, width, flip_map if mirrored else None)
            )
    out: TrainTarget = {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.int64),
    }
    if task.outlines and bitmasks:
        stacked = np.array(bitmaps, bool).reshape(-1, height, width)
        out["bitmaps"] = torch.from_numpy(stacked)
    elif task.outlines:
        out["polygons"] = polygons
    if task.keypoints:
        all_points = torch.tensor(np.array(keypoints), dtype=torch.float32)
        out["keypoints"] = all_points.reshape(-1, len(flip_map), 3)
    return out


def _keypoints(
    points: Array, height: int, width: int, flip_map: Sequence[int] | None
) -> Array:
    """Mirror keypoints (K, 3) if a map is given; set the unmarked and those outside the image to 0.

    This is detectron2/data/detection_utils.py::transform_keypoint_annotations.
    """
    # Mirroring keeps a point inside, so it does not matter which of the two comes first.
    xy = points[:, :2]
    inside = np.all((xy >= 0) & (xy <= np.array([width, height])), axis=1)
    if flip_map is not None:
        points[:, 0] = width - points[:, 0]
        # A mirrored left eye is a right eye, so the points change their order, too.
        points = points[list(flip_map)]
        inside = inside[list(flip_map)]
    points[~inside, 2] = 0
    points[points[:, 2] == 0] = 0
    return points
