"""Views of an image together with its label map: the crops of training, the windows of a test."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from PIL import Image
from torch import Tensor

# Imported here and not later, so that workers, which are forked, share it.
from torchvision.transforms import functional as F

from backbench.images.dense import IGNORED, DenseList
from backbench.parallel import loading
from backbench.runs import seeding
from backbench.transfer.devices import Machine
from backbench.transfer.features.batches import EpochIndex

TRIES = 10  # crops that are drawn until no class fills one
Bilinear, Nearest = Image.Resampling.BILINEAR, Image.Resampling.NEAREST


def resized_to(width: int, height: int, side: int) -> tuple[int, int]:
    """Scale width and height to the shorter side `side`; the longer one is rounded as in DINOv3."""
    if height > width:
        return side, int(side * height / width + 0.5)
    return int(side * width / height + 0.5), side


class TrainingPairs(torch.utils.data.Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Item (epoch, index) -> a crop uint8 (3, c, c), its labels uint8 (c, c), and which of its
    pixels are the image's and no padding, bool (1, c, c). Seed, epoch and index decide all."""

    def __init__(
        self,
        images: DenseList,
        *,
        side: int,
        scale: tuple[float, float],
        crop: int,
        most_of_a_class: float,
        hue: float,
        seed: int,
    ) -> None:
        self.images = images
        self.side = side  # the image's shorter one, in pixels
        self.scale = scale  # factors on it, drawn between these two
        self.crop = crop
        self.most_of_a_class = most_of_a_class  # of a crop's labelled pixels
        self.hue = hue  # turns of the colour circle, at most
        self.seed = seed

    def __getitem__(self, key: EpochIndex) -> tuple[Tensor, Tensor, Tensor]:
        crop = self.crop
        generator = seeding.generator(self.seed, "pair", *key)
        picture, labels = self.images.pair(key[1])
        # 1. Another size, the same for both. Labels take the nearest value, never a mean of two.
        low, high = self.scale
        factor = low + (high - low) * torch.rand(1, generator=generator).item()
        size = resized_to(*picture.size, int(self.side * factor))
        picture = picture.resize(size, Bilinear)
        labels = np.asarray(Image.fromarray(labels).resize(size, Nearest))
        # 2. A crop that no class fills
        places = torch.rand(TRIES + 1, 2, generator=generator).tolist()
        left, top = self._place(labels, places)
        pixels = np.asarray(picture)[top : top + crop, left : left + crop]
        labels = labels[top : top + crop, left : left + crop]
        # 3. Flip and colours
        u = torch.rand(10, generator=generator).tolist()
        if u[0] < 0.5:
            pixels = pixels[:, ::-1]
            labels = labels[:, ::-1]
        pixels = distorted(pixels, u[1:], self.hue)
        # 4. Padding at the right and below, where the image is smaller than the crop
        height, width = labels.shape
        image = torch.zeros(3, crop, crop, dtype=torch.uint8)
        classes = torch.full((crop, crop), IGNORED, dtype=torch.uint8)
        inside = torch.zeros(1, crop, crop, dtype=torch.bool)
        image[:, :height, :width] = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
        classes[:height, :width] = torch.from_numpy(labels.copy())
        inside[:, :height, :width] = True
        return image, classes, inside

    def _place(self, labels: np.ndarray, drawn: list[list[float]]) -> tuple[int, int]:
        """Find the left and upper edge of the first crop of `drawn` that has two classes, none of
        them too large; of the last one if none has."""
        crop = self.crop
        height, width = labels.shape
        left = top = 0
        for u, v in drawn:
            top = int(u * (max(height - crop, 0) + 1))
            left = int(v * (max(width - crop, 0) + 1))
            inside = labels[top : top + crop, left : left + crop]
            counts = np.bincount(inside.ravel())[:IGNORED]
            several = (counts > 0).sum() > 1
            if several and counts.max() / counts.sum() < self.most_of_a_class:
                break
        return left, top


def distorted(pixels: np.ndarray, u: list[float], hue: float) -> np.ndarray:
    """Change brightness, contrast, saturation and hue of uint8 (h, w, 3), each with probability
    1/2, as nine numbers `u` in [0, 1) say. This is mmseg's PhotoMetricDistortion, which DINOv3
    uses."""

    def scaled(image: np.ndarray, factor: float, offset: float) -> np.ndarray:
        exact = image.astype(np.float32) * factor + offset
        return np.clip(exact, 0, 255).astype(np.uint8)

    (
        brighter,
        brightness,
        contrasts,
        contrast,
        saturates,
        saturation,
        turns,
        turn,
        order,
    ) = u
    contrast_first = order < 0.5
    if brighter < 0.5:
        pixels = scaled(pixels, 1.0, 64 * brightness - 32)
    if contrasts < 0.5 and contrast_first:
        pixels = scaled(pixels, 0.5 + contrast, 0.0)
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    if saturates < 0.5:
        image = F.adjust_saturation(image, 0.5 + saturation)
    if turns < 0.5:
        image = F.adjust_hue(image, hue * (2 * turn - 1))
    pixels = image.permute(1, 2, 0).numpy()
    if contrasts < 0.5 and not contrast_first:
        pixels = scaled(pixels, 0.5 + contrast, 0.0)
    return pixels


class TestPairs(torch.utils.data.Dataset[tuple[Tensor, Tensor, int]]):
    """Item (0, index) -> the image, uint8 (3, h, w), with the shorter side `side`; its labels at
    their own size, uint8 (H, W); and the index."""

    def __init__(self, images: DenseList, side: int) -> None:
        self.images, self.side = images, side

    def __getitem__(self, key: EpochIndex) -> tuple[Tensor, Tensor, int]:
        picture, labels = self.images.pair(key[1])
        picture = picture.resize(resized_to(*picture.size, self.side), Bilinear)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        return pixels, torch.from_numpy(labels), key[1]


class SquareMaps(torch.utils.data.Dataset[Tensor]):
    """Item (0, index) -> the labels of an image brought to `side` x `side`, uint8 (side, side)."""

    def __init__(self, images: DenseList, side: int) -> None:
        self.images, self.side = images, side

    def __getitem__(self, key: EpochIndex) -> Tensor:
        _, labels = self.images.pair(key[1])
        square = Image.fromarray(labels).resize((self.side, self.side), Nearest)
        return torch.from_numpy(np.array(square))


def pairs(
    items: TrainingPairs | TestPairs | SquareMaps,
    batches: Iterable[list[EpochIndex]],
    machine: Machine,
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the items at each list of keys, collated. BadInput on all ranks if one of them cannot
    read a pair."""
    pin = machine.device.type == "cuda"
    for batch in loading.batches(items, batches, workers=machine.workers, pin=pin):
        yield tuple(machine.readable(batch))


# Windows


def starts(length: int, window: int, stride: int) -> list[int]:
    """List where the windows along a side begin; the last one is shifted inside."""
    count = max(length - window + stride - 1, 0) // stride + 1
    return [min(i * stride, max(length - window, 0)) for i in range(count)]


def bilinear(before: int, after: int) -> Tensor:
    """Return the matrix (after, before) that interpolates a side, without antialiasing."""
    # Its columns are the interpolated unit vectors.
    unit = torch.eye(before)[None]
    rows = torch.nn.functional.interpolate(
        unit, after, mode="linear", align_corners=False
    )
    return rows[0].T


def best_classes(logits: Tensor, height: int, width: int, rows: int = 64) -> Tensor:
    """Resize logits (C, h, w) bilinearly and return each pixel's best class, uint8 (height, width);
    of equal ones the smallest. `rows` rows are made at a time: all logits of a photograph would
    take gigabytes."""
    down = bilinear(logits.shape[1], height).to(logits.device)
    across = bilinear(logits.shape[2], width).to(logits.device).T
    out = torch.empty(height, width, dtype=torch.uint8)
    for first in range(0, height, rows):
        strip = down[first : first + rows]
        # A strip depends on few rows of the logits: those from the first to the last weight.
        used = strip.any(0).nonzero().flatten()
        low, high = int(used[0]), int(used[-1]) + 1
        values = strip[:, low:high] @ logits[:, low:high] @ across  # (C, rows, width)
        out[first : first + rows] = values.argmax(0).to(torch.uint8).cpu()
    return out
