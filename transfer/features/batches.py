"""Turns a list of images into batches of pixels: which images a step sees, where, in which view.

A batch is a pure function of the seed and the step, so a continued run sees what an uninterrupted
one sees, whatever the numbers of processes and workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from backbench.images.augmentations import crop_box
from backbench.images.image_list import ImageList
from backbench.parallel import loading
from backbench.runs import seeding
from backbench.transfer.devices import Machine
from backbench.transfer.protocols import CropAugment, Geometry

if TYPE_CHECKING:
    from PIL import Image

EpochIndex = tuple[int, int]  # the epoch, and an image's index in the list
View = Callable[["Image.Image", EpochIndex], "Image.Image"]


# Which images


def global_batches(
    seed: int, images: int, batch: int, first: int, last: int
) -> Iterator[list[EpochIndex]]:
    """The global batches of steps first..last-1 as (epoch, index) lists."""
    # One endless stream of seeded permutations; a batch may lie across the end of an epoch.
    epoch, order = -1, torch.empty(0)
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
    """This rank's contiguous part of each of `global_batches`; parts differ by one image at most."""
    rank, world = machine.rank, machine.world
    begin, end = batch * rank // world, batch * (rank + 1) // world
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
        each = -(-(min(begin + batch, count) - begin) // world)
        mine = range(begin + rank * each, begin + (rank + 1) * each)
        shares.append([(0, min(i, count - 1)) for i in mine])
    return shares


# Their views


class CropFlip:
    """The training view of an image in an epoch: RandomResizedCrop and flip, by the seed alone."""

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
    """The view of an image that evaluation takes: resized, the centre cropped."""
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
        # A copy, since PIL's array cannot be written to; channels last in memory, as trunks take it
        return torch.from_numpy(picture.copy()).permute(2, 0, 1), index


def training_pictures(
    images: ImageList,
    augment: CropAugment,
    shares: Iterable[list[EpochIndex]],
    *,
    seed: int,
    machine: Machine,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Augmented views of each share of `shares`: (uint8 (n, 3, size, size), indices (n,))."""
    return loader(Pictures(images, CropFlip(augment, seed)), shares, machine=machine)


def loader(
    pictures: Pictures, batches: Iterable[list[EpochIndex]], *, machine: Machine
) -> Iterator[tuple[Tensor, Tensor]]:
    """Load (uint8 (N, 3, H, W), indices (N,)) for each of `batches`, lists of (epoch, index).
    Pixels are channels last in memory. BadInput, on all ranks, for an unreadable image of one."""
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
    # default_collate itself would write channel after channel
    pixels, about = default_collate(
        [(picture.permute(1, 2, 0), one) for picture, one in rows]
    )
    return pixels.permute(0, 3, 1, 2), about
