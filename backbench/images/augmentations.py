"""Makes every training augmentation of the project.

A view is decided first (`draw`: a few random numbers), then rendered in one of three ways:

  render_reference   on PIL images, with the pixels of torchvision's functions
  render_fast        on arrays, by OpenCV and torch
  render_geometry    the first half of render_fast, where the image was decoded; `apply_colour` does
                     the second half on the device, for a batch, from its DeviceColour

All take the same decisions from the same generator. Crops are equal; colours differ by rounding,
and because the fast ways replace torchvision's hue by a linear step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cv2
import numpy as np
import torch

from backbench.images.crops import Crops

if TYPE_CHECKING:
    from PIL import Image

# Parallelism comes from loader workers; OpenCV's own threads would compete with torch's
cv2.setNumThreads(0)

LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R 601, as PIL's convert("L")
_LEVELS = np.arange(256)
_SOLARIZE = np.where(_LEVELS < 128, _LEVELS, 255 - _LEVELS).astype(np.uint8)


@dataclass(frozen=True)
class DrawnView:
    """The decisions for one view."""

    box: tuple[int, int, int, int]  # top, left, height, width
    flip: bool
    jitter: tuple[tuple[int, float], ...]  # (operation, factor), in order of use
    gray: bool
    gray_first: bool  # before the jitter
    blur: float  # sigma in pixels, 0 for none
    solarize: bool


BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


def crop_box(
    generator: torch.Generator,
    height: int,
    width: int,
    scale: Sequence[float],
    ratio: Sequence[float],
) -> tuple[int, int, int, int]:
    """Draw (top, left, height, width) as torchvision's RandomResizedCrop.get_params does.

    The same state of the generator gives the same numbers."""
    area = height * width
    low = math.log(ratio[0])
    high = math.log(ratio[1])
    for _ in range(10):
        # 1. An area and an aspect ratio (uniform in its logarithm, so that 3:4 is as likely as 4:3)
        share = torch.empty(1).uniform_(scale[0], scale[1], generator=generator)
        target = area * share.item()
        log_aspect = torch.empty(1).uniform_(low, high, generator=generator)
        aspect = torch.exp(log_aspect).item()
        # 2. w h = target and w / h = aspect
        w = round(math.sqrt(target * aspect))
        h = round(math.sqrt(target / aspect))
        # 3. A place for it, where it fits into the image
        if 0 < w <= width and 0 < h <= height:
            top = int(torch.randint(0, height - h + 1, (1,), generator=generator))
            left = int(torch.randint(0, width - w + 1, (1,), generator=generator))
            return top, left, h, w
    # 4. Ten did not fit: the whole image, cut to the nearest allowed ratio, from the middle
    w, h = width, height
    if width / height < ratio[0]:
        h = round(w / ratio[0])
    elif width / height > ratio[1]:
        w = round(h * ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w


def draw(
    generator: torch.Generator, height: int, width: int, crops: Crops
) -> DrawnView:
    """Decide one view of an image of (height, width)."""
    box = crop_box(generator, height, width, crops.scale, crops.ratio)
    # Fourteen numbers are always drawn, used or not, each for one decision. So the views that follow
    # do not depend on what this one decided
    #   0 flip?  1 jitter?  2-5 the operations' order  6-9 their factors  10 gray?  11 blur?
    #   12 its sigma  13 solarize?
    u = torch.rand(14, generator=generator).tolist()
    jitter: list[tuple[int, float]] = []
    if u[1] < crops.jitter_p:
        # Sorted by random numbers, the operations stand in a random order
        for op in sorted(range(4), key=lambda op: u[2 + op]):
            strength = crops.jitter[op]
            if strength == 0:
                continue
            if op == HUE:  # in turns, where the others are factors
                low, high = -strength, strength
            else:
                low, high = max(0.0, 1 - strength), 1 + strength
            jitter.append((op, low + (high - low) * u[6 + op]))
    low, high = crops.blur_sigma
    sigma = low + (high - low) * u[12]
    return DrawnView(
        box=box,
        flip=u[0] < crops.flip,
        jitter=tuple(jitter),
        gray=u[10] < crops.gray_p,
        gray_first=crops.gray_first,
        blur=sigma if u[11] < crops.blur_p else 0.0,
        solarize=u[13] < crops.solarize_p,
    )


# ---------------------------------------------------------------------- reference


def render_reference(image: Image.Image, view: DrawnView, crops: Crops) -> np.ndarray:
    """Render PIL RGB as uint8 (size, size, 3), with torchvision's pixels, as in the papers' code."""
    from PIL import Image, ImageEnhance, ImageFilter, ImageOps

    top, left, height, width = view.box
    mode = Image.Resampling[crops.interpolation.upper()]
    image = image.crop((left, top, left + width, top + height))
    image = image.resize((crops.size, crops.size), mode)
    # This is SwAV's order. MoCo flips last, which gives the same pixels, because nothing below knows
    # left from right
    if view.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    enhance = {
        BRIGHTNESS: ImageEnhance.Brightness,
        CONTRAST: ImageEnhance.Contrast,
        SATURATION: ImageEnhance.Color,
    }
    if view.gray and view.gray_first:
        image = _gray(image)
    for op, factor in view.jitter:
        if op == HUE:
            image = _turn_hue(image, factor)
        else:
            image = enhance[op](image).enhance(factor)
    if view.gray and not view.gray_first:
        image = _gray(image)
    if view.blur and crops.blur_kernel:
        image = _blur_by_kernel(image, crops.blur_kernel, view.blur)
    elif view.blur:
        image = image.filter(ImageFilter.GaussianBlur(view.blur))
    if view.solarize:
        image = ImageOps.solarize(image, 128)
    return np.asarray(image)


def _gray(image: Image.Image) -> Image.Image:
    """Give all channels the luma."""
    return image.convert("L").convert("RGB")


def _turn_hue(image: Image.Image, turns: float) -> Image.Image:
    """Move the hue of PIL's HSV image by `turns` of 255 levels."""
    from PIL import Image

    hue, saturation, value = image.convert("HSV").split()
    # uint8 overflows as a circle does: 255 is followed by 0
    moved = Image.fromarray(np.asarray(hue) + np.uint8(int(turns * 255) % 256))
    return Image.merge("HSV", (moved, saturation, value)).convert("RGB")


def _blur_by_kernel(image: Image.Image, size: int, sigma: float) -> Image.Image:
    """Blur by a Gaussian of size x size weights; the image is mirrored at its edges."""
    from PIL import Image

    offsets = torch.linspace(-(size - 1) / 2, (size - 1) / 2, size)
    line = torch.exp(-0.5 * (offsets / sigma).square())
    line = line / line.sum()
    kernel = torch.mm(line[:, None], line[None, :]).expand(3, 1, size, size)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
    padded = torch.nn.functional.pad(pixels, [size // 2] * 4, mode="reflect")
    blurred = torch.nn.functional.conv2d(padded, kernel, groups=3)
    levels = blurred.round_().to(torch.uint8)
    return Image.fromarray(levels[0].permute(1, 2, 0).numpy())


# ---------------------------------------------------------------------- fast


def render_geometry(image: np.ndarray, view: DrawnView, crops: Crops) -> np.ndarray:
    """Crop, resize and flip uint8 (H, W, 3) to uint8 (size, size, 3)."""
    top, left, height, width = view.box
    part = image[top : top + height, left : left + width]
    size = crops.size
    if crops.interpolation == "bilinear" and height <= size and width <= size:
        part = cv2.resize(part, (size, size), interpolation=cv2.INTER_LINEAR)
    else:
        # Where the crop shrinks, torch's antialiased resize follows PIL's filter. OpenCV's linear
        # one aliases, and its area one is slower than PIL
        pixels = torch.from_numpy(part).permute(2, 0, 1)[None]
        resized = torch.nn.functional.interpolate(
            pixels,
            (size, size),
            mode=crops.interpolation,
            antialias=True,
            align_corners=False,
        )
        part = resized[0].permute(1, 2, 0).numpy()
    return cv2.flip(part, 1) if view.flip else part


def colour_matrix(view: DrawnView, mean: Sequence[float]) -> np.ndarray:
    """Return the view's jitter and graying as one (3, 4) matrix on RGB in 0..255.

    `mean` is the crop's mean RGB. PIL clips and truncates after each blend; here clipping comes
    last, and truncation is half a level on average. torchvision's hue goes through HSV; ours
    rotates around gray."""
    # The matrix is (A | b), for x -> A x + b. Each operation is a blend f x + (1 - f) y of the pixel
    # x with something y, applied to what the operations before it made
    matrix = np.eye(3, 4)
    if view.gray and view.gray_first:
        matrix = np.tile(LUMA @ matrix, (3, 1))
    for op, factor in view.jitter:
        if op == BRIGHTNESS:
            # y is black
            matrix *= factor
            matrix[:, 3] -= 0.5
        elif op == CONTRAST:
            # y is the image's mean luma at this place in the chain. All steps before are affine, so
            # it is known from the crop's mean: L (A mean + b)
            luma = LUMA @ (matrix[:, :3] @ np.asarray(mean) + matrix[:, 3])
            matrix *= factor
            matrix[:, 3] += (1 - factor) * luma - 0.5
        elif op == SATURATION:
            # y is the pixel's own luma: L (A x + b), equal in all channels
            matrix = factor * matrix + (1 - factor) * (LUMA @ matrix)
            matrix[:, 3] -= 0.5
        else:
            # Hue is no blend but a rotation: R (A x + b)
            matrix = _hue_rotation(factor) @ matrix
    if view.gray and not view.gray_first:
        matrix = np.tile(LUMA @ matrix, (3, 1))
    return matrix


def _hue_rotation(turns: float) -> np.ndarray:
    """Return the (3, 3) rotation by `turns` (of 360 degrees) around the axis of grays, (1, 1, 1)."""
    # Rodrigues' formula for the axis u = (1, 1, 1) / sqrt(3): cos I + sin [u]_x + (1 - cos) u u^T
    angle = 2 * math.pi * turns
    cos = math.cos(angle)
    a = (1 - cos) / 3
    b = math.sin(angle) / math.sqrt(3)
    return np.array(
        [
            [cos + a, a - b, a + b],
            [a + b, cos + a, a - b],
            [a - b, a + b, cos + a],
        ]
    )


def render_fast(image: np.ndarray, view: DrawnView, crops: Crops) -> np.ndarray:
    """Render uint8 RGB (H, W, 3) as uint8 (size, size, 3), like `render_reference` but faster."""
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


# ---------------------------------------------------------------------- on a device


@dataclass(frozen=True)
class DeviceColour:
    """Holds what `apply_colour` needs to complete N fast views. A loader worker makes it."""

    matrix: torch.Tensor  # (N, 3, 4) float32, by `colour_matrix`
    sigma: torch.Tensor  # (N,) float32, in pixels; 0: no blur
    solarize: torch.Tensor  # (N,) bool

    @staticmethod
    def of(drawn: Sequence[DrawnView], pixels: np.ndarray) -> DeviceColour:
        """Make it from N views and their pixels after `render_geometry`, uint8 (N, h, w, 3)."""
        matrix = np.tile(np.eye(3, 4, dtype=np.float32), (len(drawn), 1, 1))
        for n, view in enumerate(drawn):
            if view.jitter or view.gray:
                matrix[n] = colour_matrix(view, cv2.mean(pixels[n])[:3])
        return DeviceColour(
            matrix=torch.from_numpy(matrix),
            sigma=torch.tensor([view.blur for view in drawn], dtype=torch.float32),
            solarize=torch.tensor([view.solarize for view in drawn]),
        )

    def to(self, device: torch.device) -> DeviceColour:
        return DeviceColour(
            *[part.to(device, non_blocking=True) for part in vars(self).values()]
        )

    def pin_memory(self) -> DeviceColour:
        return DeviceColour(*[part.pin_memory() for part in vars(self).values()])


def apply_colour(
    pixels: torch.Tensor, colour: DeviceColour, crops: Crops
) -> torch.Tensor:
    """Colour, blur and solarize a batch on its device: uint8 (N, 3, h, w) -> float32 in 0..255.

    Unlike `render_fast`, it does not round to whole levels in between."""
    linear, offset = colour.matrix[:, :, :3], colour.matrix[:, :, 3, None, None]
    out = torch.einsum("nij,njhw->nihw", linear, pixels.float()) + offset
    out = out.clamp_(0, 255)
    if crops.blur_p:
        out = _blur(out, colour.sigma, crops)
    if crops.solarize_p:
        inverted = colour.solarize[:, None, None, None] & (out >= 128)
        out = torch.where(inverted, 255 - out, out)
    return out


def _blur(images: torch.Tensor, sigma: torch.Tensor, crops: Crops) -> torch.Tensor:
    """Blur by a Gaussian with a sigma for each image; a sigma of 0 leaves the image as it is."""
    if crops.blur_kernel:
        radius = crops.blur_kernel // 2
    else:
        radius = math.ceil(3 * crops.blur_sigma[1])
    radius = min(radius, crops.size - 1)
    # 1. One kernel per image, (N, 2 radius + 1). With sigma 0 all weight is on the middle, because
    #    the exponents of the others are -0.5 (1 / 1e-3)^2 and less, which gives 0 in float32
    offsets = torch.arange(
        -radius, radius + 1, device=images.device, dtype=images.dtype
    )
    kernel = torch.exp(-0.5 * (offsets / sigma.clamp(min=1e-3)[:, None]).square())
    kernel = (kernel / kernel.sum(1, keepdim=True))[:, :, None, None, None]
    # 2. A Gaussian in two dimensions is one along the rows, then one along the columns. Shifted
    #    images are added up, because a convolution wants one kernel for the whole batch
    mode = "reflect" if crops.blur_kernel else "replicate"
    height, width = images.shape[-2:]
    shifts = range(2 * radius + 1)
    padded = torch.nn.functional.pad(images, (radius, radius, 0, 0), mode=mode)
    rows = sum(kernel[:, k] * padded[..., k : k + width] for k in shifts)
    assert isinstance(rows, torch.Tensor)
    padded = torch.nn.functional.pad(rows, (0, 0, radius, radius), mode=mode)
    out = sum(kernel[:, k] * padded[..., k : k + height, :] for k in shifts)
    assert isinstance(out, torch.Tensor)
    return out
