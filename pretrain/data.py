"""Feeds a training step: decides which images come, in which order, and makes them into views.

All of it is a pure function of recipe and dataset: the order depends on (seed, epoch), an image's
views on (seed, epoch, image). A loader worker decodes, crops and resizes (`ViewBatches` makes a
LoadedBatch), then the device turns the bytes into a network's numbers (`finish_views`).
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from backbench.errors import BadInput
from backbench.images import augmentations
from backbench.images.augmentations import DeviceColour, DrawnView
from backbench.images.crops import Crops
from backbench.images.image_list import ImageList
from backbench.images.preprocess import normalise
from backbench.parallel import loading
from backbench.pretrain.recipe import PretrainConfig, ViewsConfig
from backbench.runs import seeding

# Of decoded images that are kept in memory, over all loader workers of a process
CACHE_BYTES = 512 << 20


def dataset_fingerprint(found: ImageList) -> str:
    """Return 12 hex digits over all names and labels, in their order, and the pixels of some 16
    images."""
    sha = hashlib.sha256()
    for i in range(0, len(found), max(1, len(found) // 16)):
        # A corrupt image is reported when its turn comes
        with contextlib.suppress(BadInput):
            sha.update(found.array(i).tobytes())
    for path, label in zip(found.paths, found.labels):
        sha.update(f"{path}\t{label}\n".encode())
    return sha.hexdigest()[:12]


def to_train_on(found: ImageList, hold_out: float) -> ImageList:
    """Leave out the share `hold_out` of the images, drawn alike for all recipes and seeds. The
    others keep their order."""
    if not hold_out:
        return found
    generator = seeding.generator(0, "hold out")
    order = torch.randperm(len(found), generator=generator).tolist()
    return found.subset(sorted(order[round(hold_out * len(found)) :]))


def batch_order(
    count: int,
    config: PretrainConfig,
    *,
    first: int,
    last: int,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[list[tuple[int, int]]]:
    """Yield this rank's share of each micro-batch from step `first` to step `last`, as a list of
    (epoch, image). Each epoch is a permutation of the images."""
    # An epoch's order is cut into global batches (what remains is not used), a global batch into
    # micro-batches, and a micro-batch into contiguous shares, the r-th for rank r. So the images of
    # a micro-batch do not depend on the number of ranks, only who holds them does.
    per_epoch = count // config.batch_size
    micro = config.batch_size // config.accumulate
    share = micro // ranks
    order: list[int] = []
    for step in range(first, last):
        epoch, position = divmod(step, per_epoch)
        # A run that continues in the middle of an epoch draws that epoch's order again
        if not order or position == 0:
            generator = seeding.generator(config.seed, "order", epoch)
            order = torch.randperm(count, generator=generator).tolist()
        start = position * config.batch_size + rank * share
        for _ in range(config.accumulate):
            yield [(epoch, i) for i in order[start : start + share]]
            start += micro


@dataclass(frozen=True)
class LoadedBatch:
    """One micro-batch of N images as a loader worker leaves it, on the CPU."""

    # V of (N, size, size, 3) uint8, in the order of `ViewsConfig.per_view`
    views: tuple[Tensor, ...]
    # V, where the device does what comes after the geometry; else none
    colour: tuple[DeviceColour, ...]
    index: Tensor  # (N,) positions in the dataset
    labels: Tensor  # (N,)
    skipped: tuple[str, ...] = ()  # images that were replaced, and why
    # An image that may not be replaced; then the batch has nothing else
    error: str | None = None

    def pin_memory(self) -> "LoadedBatch":
        """Move the batch to page-locked memory, from which a GPU copies while the CPU goes on. The
        DataLoader calls this method, by this name, on types that it does not know."""
        return replace(
            self,
            views=tuple(x.pin_memory() for x in self.views),
            colour=tuple(x.pin_memory() for x in self.colour),
            index=self.index.pin_memory(),
            labels=self.labels.pin_memory(),
        )


@dataclass(frozen=True)
class InputFormat:
    """Where and in which form the networks of this run take their images."""

    device: torch.device
    dtype: torch.dtype
    layout: torch.memory_format

    @staticmethod
    def of(config: PretrainConfig, device: torch.device) -> "InputFormat":
        dtype = torch.float64 if config.precision == "fp64" else torch.float32
        layout = torch.contiguous_format
        if config.channels_last:
            layout = torch.channels_last
        return InputFormat(device, dtype, layout)


def finish_views(
    loaded: LoadedBatch, recipe: ViewsConfig, form: InputFormat
) -> list[Tensor]:
    """Return the views as a network takes them, V tensors (N, 3, h, w)."""
    out = []
    for v, (made, crops) in enumerate(zip(loaded.views, recipe.per_view, strict=True)):
        # Bytes travel to the device, as floats are four times as large. Permuted, (N, h, w, 3) is
        # (N, 3, h, w) with channels last
        images = made.to(form.device, non_blocking=True).permute(0, 3, 1, 2)
        if loaded.colour:
            images = augmentations.apply_colour(
                images, loaded.colour[v].to(form.device), crops
            )
        images = normalise(images, recipe.pixels)
        out.append(images.to(form.dtype).contiguous(memory_format=form.layout))
    return out


class ViewBatches(Dataset[LoadedBatch]):
    """Makes a LoadedBatch of (epoch, image) pairs.

    An image is decoded once for all its views, and kept while the memory budget lasts. With
    `device_colour` only crop, resize and flip happen here, and the batch carries what the device
    needs for colour and blur. A corrupt image is an error, or with `skip_corrupt` replaced by the
    next readable one in the list."""

    def __init__(
        self,
        found: ImageList,
        config: PretrainConfig,
        *,
        cache_bytes: int,
        device_colour: bool,
    ) -> None:
        self.found = found
        self.recipe = config.views
        self.seed = config.seed
        self.skip_corrupt = config.data.skip_corrupt
        self.cache: dict[int, np.ndarray] = {}
        self.cache_left = cache_bytes
        self.device_colour = device_colour

    def pixels(self, index: int) -> np.ndarray:
        """Image `index`, uint8 (H, W, 3)."""
        image = self.cache.get(index)
        if image is None:
            if self.recipe.pipeline == "reference":
                image = np.asarray(self.found.open(index))
            else:
                image = self.found.array(index)
            # The first images are kept for good, so a worker's memory is bounded
            if image.nbytes <= self.cache_left:
                self.cache_left -= image.nbytes
                self.cache[index] = image
        return image

    def readable(self, index: int, skipped: list[str]) -> tuple[int, np.ndarray]:
        """Return the image and its index or, where allowed, those of the next one that can be
        read. Raise BadInput where there is none."""
        for offset in range(len(self.found)):
            i = (index + offset) % len(self.found)
            try:
                return i, self.pixels(i)
            except BadInput as error:
                if not self.skip_corrupt:
                    raise BadInput(
                        f"{error}; remove it, or leave such images out with"
                        " data.skip_corrupt=true"
                    ) from None
                skipped.append(str(error))
        raise BadInput(f"{self.found.root}: not one readable image")

    def render(self, image: np.ndarray, view: DrawnView, crops: Crops) -> np.ndarray:
        """Make the worker's part of a view, uint8 (size, size, 3)."""
        if self.device_colour:
            return augmentations.render_geometry(image, view, crops)
        if self.recipe.pipeline == "reference":
            return augmentations.render_reference(Image.fromarray(image), view, crops)
        return augmentations.render_fast(image, view, crops)

    def __getitems__(self, items: Sequence[tuple[int, int]]) -> LoadedBatch:
        """Make the batch of these (epoch, image) pairs; the DataLoader calls it."""
        groups = self.recipe.per_view
        count = len(items)
        pixels = [
            np.empty((count, crops.size, crops.size, 3), np.uint8) for crops in groups
        ]
        drawn: list[list[DrawnView]] = [[] for _ in groups]
        index: list[int] = []
        skipped: list[str] = []
        generator = torch.Generator()
        for n, (epoch, wanted) in enumerate(items):
            try:
                i, image = self.readable(wanted, skipped)
            except BadInput as error:
                nothing = torch.empty(0, dtype=torch.int64)
                return LoadedBatch(
                    (), (), index=nothing, labels=nothing, error=str(error)
                )
            index.append(i)
            # Views depend on the epoch and on the image that is shown, which may be a replacement,
            # and on nothing that was drawn before
            generator.manual_seed(seeding.seed_of(self.seed, "views", epoch, i))
            height, width = image.shape[:2]
            for v, crops in enumerate(groups):
                view = augmentations.draw(generator, height, width, crops)
                pixels[v][n] = self.render(image, view, crops)
                drawn[v].append(view)
        colour: list[DeviceColour] = []
        if self.device_colour:
            colour = [
                DeviceColour.of(*made) for made in zip(drawn, pixels, strict=True)
            ]
        return LoadedBatch(
            views=tuple(torch.from_numpy(p) for p in pixels),
            colour=tuple(colour),
            index=torch.tensor(index),
            labels=torch.tensor([self.found.labels[i] for i in index]),
            skipped=tuple(skipped),
        )


def loader(
    found: ImageList,
    config: PretrainConfig,
    *,
    first: int,
    last: int,
    workers: int,
    rank: int = 0,
    ranks: int = 1,
    on_gpu: bool = False,
) -> Iterator[LoadedBatch]:
    """Yield this rank's micro-batches from step `first` on, in order. The workers live through all
    epochs."""
    dataset = ViewBatches(
        found,
        config,
        cache_bytes=CACHE_BYTES // max(1, workers),
        device_colour=on_gpu and config.views.pipeline == "fast",
    )
    order = batch_order(
        len(found), config, first=first, last=last, rank=rank, ranks=ranks
    )
    return loading.started(dataset, order, workers=workers, pin=on_gpu)
