"""Every training augmentation of the project.

A view is decided first (`draw`: a few random numbers) and made afterwards, by torchvision on PIL images (`reference`)
or by OpenCV and torch on arrays (`fast`). Both make the same decisions from the same generator, so the crops of the two
pipelines are equal, and their colours differ by rounding and by one linear step in place of torchvision's hue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import cv2
import numpy as np
import torch

cv2.setNumThreads(
    0
)  # parallelism comes from loader workers; OpenCV's own threads would compete with torch's

LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R 601, as PIL's convert("L")
_SOLARIZE = np.array([v if v < 128 else 255 - v for v in range(256)], np.uint8)


@dataclass(frozen=True, kw_only=True)
class Crops:
    """A group of `count` views made alike. All numbers follow torchvision's transforms of the same names."""

    count: int = 2
    size: int = 224
    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (0.75, 1.3333333333333333)
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    flip: float = 0.5
    jitter: tuple[float, float, float, float] = (
        0.4,
        0.4,
        0.4,
        0.1,
    )  # brightness, contrast, saturation, hue
    jitter_p: float = 0.8
    gray_p: float = 0.2
    blur_p: float = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    blur_kernel: int | None = (
        None  # torchvision's GaussianBlur with this odd size; null: PIL's, without a limit
    )
    solarize_p: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 1 or self.size < 1:
            raise ValueError(f"count and size must be at least 1, not {self.count} and {self.size}")
        chances = {
            name: getattr(self, name)
            for name in ("flip", "jitter_p", "gray_p", "blur_p", "solarize_p")
        }
        for name, chance in chances.items():
            if not 0 <= chance <= 1:
                raise ValueError(f"{name} is a probability, from 0 to 1, not {chance}")
        if not 0 < self.scale[0] <= self.scale[1] or not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(
                f"scale {self.scale} and ratio {self.ratio} must be positive and increasing"
            )
        if self.blur_kernel is not None and self.blur_kernel % 2 == 0:
            raise ValueError(f"blur_kernel must be odd, not {self.blur_kernel}")
        if min(self.jitter) < 0 or self.jitter[3] > 0.5:
            raise ValueError(
                f"jitter {self.jitter} must not be negative, and that of the hue is at most 0.5"
            )
        if not 0 <= self.blur_sigma[0] <= self.blur_sigma[1]:
            raise ValueError(f"blur_sigma {self.blur_sigma} must be from 0 on and increasing")


@dataclass(frozen=True)
class View:
    """What was decided for one view. box: top, left, height, width; jitter: (operation, factor) in order of use;
    blur: sigma in pixels, 0 for none."""

    box: tuple[int, int, int, int]
    flip: bool
    jitter: tuple[tuple[int, float], ...]
    gray: bool
    blur: float
    solarize: bool


BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


def crop_box(
    generator: torch.Generator,
    height: int,
    width: int,
    scale: Sequence[float],
    ratio: Sequence[float],
) -> tuple[int, int, int, int]:
    """RandomResizedCrop.get_params: the same numbers from the same generator state, number for number."""
    area = height * width
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        target = area * torch.empty(1).uniform_(scale[0], scale[1], generator=generator).item()
        aspect = torch.exp(torch.empty(1).uniform_(low, high, generator=generator)).item()
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(torch.randint(0, height - h + 1, (1,), generator=generator))
            left = int(torch.randint(0, width - w + 1, (1,), generator=generator))
            return top, left, h, w
    w, h = width, height  # the whole image, cut to the nearest allowed ratio
    if width / height < ratio[0]:
        h = round(w / ratio[0])
    elif width / height > ratio[1]:
        w = round(h * ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w


def draw(generator: torch.Generator, height: int, width: int, crops: Crops) -> View:
    """Decide one view of an image of (height, width)."""
    box = crop_box(generator, height, width, crops.scale, crops.ratio)
    u = torch.rand(14, generator=generator).tolist()
    jitter: list[tuple[int, float]] = []
    if u[1] < crops.jitter_p:
        for op in sorted(range(4), key=lambda op: u[2 + op]):
            strength = crops.jitter[op]
            if strength:
                low, high = (
                    (-strength, strength) if op == HUE else (max(0.0, 1 - strength), 1 + strength)
                )
                jitter.append((op, low + (high - low) * u[6 + op]))
    low, high = crops.blur_sigma
    return View(
        box=box,
        flip=u[0] < crops.flip,
        jitter=tuple(jitter),
        gray=u[10] < crops.gray_p,
        blur=low + (high - low) * u[12] if u[11] < crops.blur_p else 0.0,
        solarize=u[13] < crops.solarize_p,
    )


# ---------------------------------------------------------------------------------------------------- reference


def render_reference(image: Any, view: View, crops: Crops) -> np.ndarray:
    """PIL RGB -> uint8 (size, size, 3), by torchvision's own functions on PIL images, as the papers' code does."""
    from PIL import ImageFilter
    from torchvision.transforms import functional as F

    mode = F.InterpolationMode(crops.interpolation)
    image = F.resized_crop(image, *view.box, [crops.size, crops.size], mode)
    if view.flip:
        image = F.hflip(image)
    adjust = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
    for op, factor in view.jitter:
        image = adjust[op](image, factor)
    if view.gray:
        image = F.rgb_to_grayscale(image, num_output_channels=3)
    if view.blur and crops.blur_kernel:
        image = F.gaussian_blur(image, [crops.blur_kernel] * 2, [view.blur] * 2)
    elif view.blur:
        image = image.filter(ImageFilter.GaussianBlur(view.blur))
    if view.solarize:
        image = F.solarize(image, 128)
    return np.asarray(image)


# ---------------------------------------------------------------------------------------------------- fast


def render_geometry(image: np.ndarray, view: View, crops: Crops) -> np.ndarray:
    """uint8 (H, W, 3) -> uint8 (size, size, 3): crop, resize, flip.

    OpenCV where the crop grows; where it shrinks torch's antialiased resize, which follows PIL's filter (OpenCV's
    linear one aliases, and its area one is slower than PIL).
    """
    top, left, height, width = view.box
    part = image[top : top + height, left : left + width]
    size = crops.size
    if crops.interpolation == "bilinear" and height <= size and width <= size:
        part = cv2.resize(part, (size, size), interpolation=cv2.INTER_LINEAR)
    else:
        pixels = torch.from_numpy(part).permute(2, 0, 1)[None]
        resized = torch.nn.functional.interpolate(
            pixels, (size, size), mode=crops.interpolation, antialias=True, align_corners=False
        )
        part = resized[0].permute(1, 2, 0).numpy()
    return cv2.flip(part, 1) if view.flip else part


def colour_matrix(view: View, mean: Sequence[float]) -> np.ndarray:
    """The view's jitter and graying as one (3, 4) matrix on RGB in 0..255.

    Contrast pivots on the mean luma at its place in the chain, which follows from the crop's `mean` RGB because every
    step is affine. PIL clips and truncates after each blend: the clipping is left to the end here, the truncation is
    half a level on average. torchvision's hue goes through HSV, here it is a rotation around the gray axis.
    """
    matrix = np.eye(3, 4)
    for op, factor in view.jitter:
        if op == BRIGHTNESS:
            matrix *= factor
            matrix[:, 3] -= 0.5
        elif op == CONTRAST:
            luma = LUMA @ (matrix[:, :3] @ np.asarray(mean) + matrix[:, 3])
            matrix *= factor
            matrix[:, 3] += (1 - factor) * luma - 0.5
        elif op == SATURATION:
            matrix = factor * matrix + (1 - factor) * (LUMA @ matrix)
            matrix[:, 3] -= 0.5
        else:
            matrix = _hue_rotation(factor) @ matrix
    if view.gray:
        matrix = np.tile(LUMA @ matrix, (3, 1))
    return matrix


def _hue_rotation(turns: float) -> np.ndarray:
    """(3, 3): rotation by `turns` (of 360 degrees) around the axis (1, 1, 1)."""
    cos, sin = math.cos(2 * math.pi * turns), math.sin(2 * math.pi * turns)
    a, b = (1 - cos) / 3, sin / math.sqrt(3)
    return np.array([[cos + a, a - b, a + b], [a + b, cos + a, a - b], [a - b, a + b, cos + a]])


def render_fast(image: np.ndarray, view: View, crops: Crops) -> np.ndarray:
    """uint8 RGB (H, W, 3) -> uint8 (size, size, 3); the decisions of `render_reference` at a fraction of its time."""
    out = render_geometry(image, view, crops)
    if view.jitter or view.gray:
        out = cv2.transform(out, colour_matrix(view, cv2.mean(out)[:3]))
    if view.blur and crops.blur_kernel:
        out = cv2.GaussianBlur(out, (crops.blur_kernel, crops.blur_kernel), view.blur)
    elif view.blur:
        out = cv2.GaussianBlur(out, (0, 0), view.blur, borderType=cv2.BORDER_REPLICATE)
    if view.solarize:
        out = cv2.LUT(out, _SOLARIZE)
    return out


def to_pil(image: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(image)


# ---------------------------------------------------------------------------------------------------- on a device


class DeviceColour:
    """What the device needs to finish a batch of fast views that only have their geometry: `apply_colour`'s input."""

    def __init__(self, matrix: np.ndarray, sigma: np.ndarray, solarize: np.ndarray) -> None:
        self.matrix, self.sigma, self.solarize = matrix, sigma, solarize

    @staticmethod
    def empty(count: int) -> DeviceColour:
        return DeviceColour(
            np.tile(np.eye(3, 4, dtype=np.float32), (count, 1, 1)),
            np.zeros(count, np.float32),
            np.zeros(count, bool),
        )

    def set(self, n: int, view: View, pixels: np.ndarray) -> None:
        if view.jitter or view.gray:
            self.matrix[n] = colour_matrix(view, cv2.mean(pixels)[:3])
        self.sigma[n], self.solarize[n] = view.blur, view.solarize

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            "matrix": torch.from_numpy(self.matrix),
            "sigma": torch.from_numpy(self.sigma),
            "solarize": torch.from_numpy(self.solarize),
        }


def apply_colour(
    pixels: torch.Tensor,
    matrix: torch.Tensor,
    sigma: torch.Tensor,
    solarize: torch.Tensor,
    crops: Crops,
) -> torch.Tensor:
    """uint8 (N, 3, h, w) -> float32 in 0..255, on the pixels' device: colour, blur and solarization of a batch.

    matrix (N, 3, 4), sigma (N,) in pixels, solarize (N,). The same decisions as `render_fast`, without its rounding to
    whole levels in between.
    """
    out = (
        torch.einsum("nij,njhw->nihw", matrix[:, :, :3], pixels.float())
        + matrix[:, :, 3, None, None]
    )
    out = out.clamp_(0, 255)
    if crops.blur_p:
        out = _blur(out, sigma, crops)
    if crops.solarize_p:
        out = torch.where(solarize[:, None, None, None] & (out >= 128), 255 - out, out)
    return out


def _blur(images: torch.Tensor, sigma: torch.Tensor, crops: Crops) -> torch.Tensor:
    """Gaussian blur with a sigma for each image; a sigma of 0 leaves the image as it is."""
    radius = crops.blur_kernel // 2 if crops.blur_kernel else math.ceil(3 * crops.blur_sigma[1])
    radius = min(radius, crops.size - 1)
    offsets = torch.arange(-radius, radius + 1, device=images.device, dtype=images.dtype)
    kernel = torch.exp(-0.5 * (offsets / sigma.clamp(min=1e-3)[:, None]).square())
    kernel = (kernel / kernel.sum(1, keepdim=True))[:, :, None, None, None]
    mode = "reflect" if crops.blur_kernel else "replicate"
    size = images.shape[-1]
    padded = torch.nn.functional.pad(images, (radius, radius, 0, 0), mode=mode)
    rows = sum(kernel[:, k] * padded[..., k : k + size] for k in range(2 * radius + 1))
    assert isinstance(rows, torch.Tensor)
    size = images.shape[-2]
    padded = torch.nn.functional.pad(rows, (0, 0, radius, radius), mode=mode)
    out = sum(kernel[:, k] * padded[..., k : k + size, :] for k in range(2 * radius + 1))
    assert isinstance(out, torch.Tensor)
    return out
