"""Other ways to load a picture than ours (Pillow's antialiased resize), which a model may meet elsewhere.

Each brings a picture to the size and crop of an evaluation's geometry. Resizing without antialiasing, and
a JPEG written again, change the pixels; torch's antialiased resize hardly does.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

from backbench.images.preprocess import eval_geometry

if TYPE_CHECKING:
    from PIL import Image

    Resize = Callable[[Image.Image, tuple[int, int]], Image.Image]

Loader = Literal["pil", "opencv", "torch", "jpeg95", "jpeg75"]
LOADERS: tuple[Loader, ...] = get_args(Loader)
USUAL: Loader = "pil"
_QUALITY = {"jpeg95": 95, "jpeg75": 75}  # of libjpeg, with Pillow's usual 4:2:0


def geometry_by(
    loader: Loader,
    *,
    resize: int,
    crop: int,
    interpolation: Literal["bilinear", "bicubic"] = "bilinear",
    square: bool = False,
) -> Callable[[Image.Image], Image.Image]:
    """Return the function of an evaluation's geometry, as another loader would do it."""
    resized_by: Resize | None = None
    if loader == "opencv":
        resized_by = _opencv(interpolation)
    if loader == "torch":
        resized_by = _torch(interpolation)
    geometry = eval_geometry(
        resize=resize,
        crop=crop,
        interpolation=interpolation,
        square=square,
        resized_by=resized_by,
    )
    if loader not in _QUALITY:
        return geometry
    quality = _QUALITY[loader]

    def written_again(image: Image.Image) -> Image.Image:
        return geometry(_as_jpeg(image, quality))

    return written_again


def _opencv(interpolation: str) -> Resize:
    """Return a resize that does what cv2.resize does, without antialiasing."""
    import cv2
    import numpy
    from PIL import Image

    mode = cv2.INTER_CUBIC if interpolation == "bicubic" else cv2.INTER_LINEAR

    def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
        pixels = cv2.resize(numpy.asarray(image), size, interpolation=mode)
        return Image.fromarray(pixels)

    return resized


def _torch(interpolation: str) -> Resize:
    """Return a resize that does what torchvision's does with uint8 tensors and antialiasing."""
    import numpy
    import torch
    import torch.nn.functional as F
    from PIL import Image

    def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
        pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)[None]
        width, height = size
        resampled = F.interpolate(
            pixels, size=(height, width), mode=interpolation, antialias=True
        )
        return Image.fromarray(resampled[0].permute(1, 2, 0).contiguous().numpy())

    return resized


def _as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    """Write a picture as a JPEG, and read that."""
    from PIL import Image

    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    buffer.seek(0)
    return Image.open(buffer).convert("RGB")
