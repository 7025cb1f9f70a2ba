"""Brings images to what a trunk expects: the checkpoint's channel statistics, and the protocol's
resize and crop."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy
    import torch
    from PIL import Image

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# SwAV's released code has .228, and so has LORAC's, which is built on it
SWAV_STD = (0.228, 0.224, 0.225)
# CLIP's own: openai/CLIP, clip/clip.py
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)  # mean and deviation of SigLIP's and many of Google's
CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Pixels:
    """Mean and standard deviation in [0, 1] units, in the network's order of channels."""

    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    order: Literal["RGB", "BGR"] = "RGB"

    def __post_init__(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            finite = [isinstance(v, int | float) and math.isfinite(v) for v in values]
            if len(finite) != 3 or not all(finite):
                raise ValueError(
                    f"{name} must be three finite numbers, not {values!s:.60}"
                )
        if min(self.std) <= 0:
            raise ValueError(
                f"std must be above 0, not {self.std}: pixels are divided by it"
            )
        if self.order not in ("RGB", "BGR"):
            raise ValueError(f"order must be RGB or BGR, not {self.order!s:.20}")


# Statistics by the names that `import --pixels` and the tables of formats give them
PIXELS = {
    "imagenet": Pixels(),
    "half": Pixels(HALF, HALF),
    "clip": Pixels(CLIP_MEAN, CLIP_STD),
    "swav": Pixels(std=SWAV_STD),
    "cllr": Pixels(CIFAR_MEAN, (0.2023, 0.1994, 0.2010)),
    # What ARB's CIFAR/main.py and solo-learn's classification_dataloader.py share
    "cifar_rounded": Pixels(CIFAR_MEAN, (0.247, 0.243, 0.261)),
}


def to_input(image: Image.Image | numpy.ndarray, pixels: Pixels) -> torch.Tensor:
    """Turn uint8 RGB pixels, a PIL image or an array (H, W, 3), into the network's float32 (3, H, W)."""
    import numpy
    import torch

    array = torch.from_numpy(numpy.array(image, dtype=numpy.uint8, copy=True))
    return normalise(array.permute(2, 0, 1), pixels)


def normalise(images: torch.Tensor, pixels: Pixels) -> torch.Tensor:
    """Turn uint8 RGB (..., 3, H, W) into float32: scale to [0, 1], order channels, subtract the mean
    and divide by the deviation."""
    import torch

    # On a CPU, where channels are last in memory ((n, h, w, 3) seen as (n, 3, h, w)), a table is
    # faster
    bytes_on_cpu = images.dtype == torch.uint8 and images.device.type == "cpu"
    channels_last = images.ndim == 4 and images.stride(1) == 1
    if bytes_on_cpu and channels_last:
        return _look_up(images, pixels)
    mean, std = _statistics(pixels, images.device)
    if pixels.order == "BGR":
        images = images.flip(-3)
    return (images.float() / 255 - mean) / std


@functools.lru_cache
def _statistics(
    pixels: Pixels, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation (3, 1, 1), sent to the device once."""
    import torch

    mean = torch.tensor(pixels.mean, dtype=torch.float32)
    std = torch.tensor(pixels.std, dtype=torch.float32)
    return mean.view(3, 1, 1).to(device), std.view(3, 1, 1).to(device)


def _look_up(images: torch.Tensor, pixels: Pixels) -> torch.Tensor:
    """Do `normalise` on channels-last pixels, as decoders leave them: the same numbers, 3x as fast."""
    import cv2
    import torch

    # 1. All 256 values of each channel, through `normalise` itself: (3, 1, 256) -> (1, 256, 3)
    values = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)
    table = normalise(values, pixels).permute(1, 2, 0).contiguous()
    # 2. Every pixel's value is looked up, in rows as OpenCV takes them
    n, _, h, w = images.shape
    rows = images.permute(0, 2, 3, 1).reshape(n * h, w, 3)
    if pixels.order == "BGR":
        rows = rows.flip(-1).contiguous()
    found = cv2.LUT(rows.numpy(), table.numpy())
    return torch.from_numpy(found).view(n, h, w, 3).permute(0, 3, 1, 2)


def eval_geometry(
    *,
    resize: int,
    crop: int,
    interpolation: Literal["bilinear", "bicubic"] = "bilinear",
    square: bool = False,
    resized_by: Callable[[Image.Image, tuple[int, int]], Image.Image] | None = None,
) -> Callable[[Image.Image], Image.Image]:
    """Return torchvision's Resize of the shorter side (both if `square`), then CenterCrop. Pillow
    resizes, or another function that brings an image to (width, height)."""
    from PIL import Image

    mode = Image.Resampling[interpolation.upper()]

    def geometry(image: Image.Image) -> Image.Image:
        width, height = image.size
        short = min(width, height)
        if square:
            size = (resize, resize)
        else:  # torchvision rounds the longer side down
            size = (resize * width // short, resize * height // short)
        if resized_by is None:
            image = image.resize(size, mode)
        else:
            image = resized_by(image, size)
        left, top = (_crop_start(side - crop) for side in image.size)
        return image.crop((left, top, left + crop, top + crop))

    return geometry


def _crop_start(over: int) -> int:
    """Return where torchvision's CenterCrop begins along a side that is `over` pixels longer."""
    if over > 0:
        # Python rounds half a pixel to the even number, as torchvision does
        return round(over / 2)
    # A side that is too short gets black pixels on both ends: half of them, rounded down, before it
    return -(-over // 2)
