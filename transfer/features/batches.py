"""Turns a list of images into batches of pixels: which images a step sees, on which rank, in which
view.

A batch is a pure function of the seed and the step, so a continued run sees what an uninterrupted
one sees, whatever the numbers of processes and workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from backbench.images.augmentations import crop_box
from backbench.images.image_list import ImageList
from backbench.parallel import loading
from backbench.runs import seeding
from backbench.transfer.devices import Machine
from backbench.transfer.protocol import CropAugment, Geometry

if TYPE_CHECKING:
    from PIL import Image

EpochIndex = tuple[int, int]  # the epoch, and an image's index in the list
View = Callable[["Image.Image", EpochIndex], "Image.Image"]


# Which images


def global_batches(
    seed: int, images: int, batch: int, first: int, last: int
) -> Iterator[list[EpochIndex]]:
    """Yield the global batches of steps first..last-1 as (epoch, index) lists."""
    # They are cut from one endless stream of seeded permutations, so a batch may lie across the end
    # of an epoch.
    epoch = -1
    order = torch.empty(0)
    for step in range(first, last):
        out = []
        for position in range(step * batch, (step + 1) * batch):
            if position // images != epoch:
                epoch = position // images
                order = torch.randperm(
                    images, generator=seeding.generator(seed, "order", epoch)
                )
            out.append((epoch, int(order[position % images])))
        yield out


def rank_batches(
    seed: int, images: int, batch: int, first: int, last: int, *, machine: Machine
) -> Iterator[list[EpochIndex]]:
    """Yield this rank's contiguous part of each of `global_batches`. The parts of ranks differ by
    at most one image."""
    begin = batch * machine.rank // machine.world
    end = batch * (machine.rank + 1) // machine.world
    for whole in global_batches(seed, images, batch, first, last):
        yield whole[begin:end]


def equal_shares(
    first: int, count: int, batch: int, rank: int, world: int
) -> list[list[EpochIndex]]:
    """Return this rank's part of each batch of images first..count-1 in order, as (0, index) lists.
    All ranks get equally many, as gathering needs: the last shares are padded with the last image.
    After a gather the first `batch` rows (or as many as are left) are the images in order."""
    shares = []
    for begin in range(first, count, batch):
        # A batch of b images is W contiguous parts of ceil(b / W); behind its end lies padding.
        images = min(begin + batch, count) - begin
        each = math.ceil(images / world)
        mine = range(begin + rank * each, begin + (rank + 1) * each)
        shares.append([(0, min(i, count - 1)) for i in mine])
    return shares


# Their views


class CropFlip:
    """The training view of an image in an epoch: RandomResizedCrop and flip. Seed, epoch and index
    decide it."""

    def __init__(self, augment: CropAugment, seed: int) -> None:
        self.augment, self.seed = augment, seed

    def __call__(self, picture: Image.Image, key: EpochIndex) -> Image.Image:
        from PIL import Image

        a = self.augment
        generator = seeding.generator(self.seed, "crop", *key)
        top, left, height, width = crop_box(
            generator, picture.height, picture.width, a.scale, a.ratio
        )
        flip = torch.rand(1, generator=generator).item() < a.flip
        crop = picture.crop((left, top, left + width, top + height))
        out = crop.resize((a.size, a.size), Image.Resampling[a.interpolation.upper()])
        return out.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else out


def centred(geometry: Geometry) -> View:
    """Return the view of an image that evaluation takes: resized, the centre cropped."""
    transform = geometry.transform()

    def view(picture: Image.Image, _: EpochIndex) -> Image.Image:
        return transform(picture)

    return view


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Item (epoch, index) -> (uint8 (3, H, W), index); `view` makes the PIL image of that size."""

    def __init__(self, images: ImageList, view: View) -> None:
        self.images, self.view = images, view

    def __getitem__(self, key: EpochIndex) -> tuple[Tensor, int]:
        index = key[1]
        picture = np.asarray(self.view(self.images.open(index), key), dtype=np.uint8)
        # PIL's array cannot be written to, so it is copied. Channels stay last in memory, which is
        # how trunks read them.
        return torch.from_numpy(picture.copy()).permute(2, 0, 1), index


def training_pictures(
    images: ImageList,
    augment: CropAugment,
    shares: Iterable[list[EpochIndex]],
    *,
    seed: int,
    machine: Machine,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield augmented views of each of `shares`: (uint8 (n, 3, size, size), indices (n,))."""
    return loader(Pictures(images, CropFlip(augment, seed)), shares, machine=machine)


def loader(
    pictures: Pictures, batches: Iterable[list[EpochIndex]], *, machine: Machine
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (uint8 (N, 3, H, W), indices (N,)) for each of `batches`, lists of (epoch, index).
    Pixels are channels last in memory. BadInput on all ranks if one cannot read an image."""
    pin = machine.device.type == "cuda"
    found = loading.batches(
        pictures,
        batches,
        workers=machine.workers,
        pin=pin,
        prefetch=4,
        collate=_stacked,
    )
    for batch in found:
        yield machine.readable(batch)


def _stacked(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Collate pictures and what is beside each, with channels last in memory."""
    # As they are, they would be written channel after channel.
    channels_last = [(picture.permute(1, 2, 0), beside) for picture, beside in rows]
    pixels, all_beside = loading.stacked(channels_last)
    return pixels.permute(0, 3, 1, 2), all_beside
