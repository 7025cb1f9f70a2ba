"""Feeds a training step: which images, in which order, made into which views.

All is a pure function of recipe and dataset: the order of (seed, epoch), each image's views of
(seed, epoch, image). A loader worker decodes, crops and resizes (`ViewBatches` -> LoadedBatch),
then the device brings views to a network's numbers (`finish_views`).
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

CACHE_BYTES = (
    512 << 20
)  # decoded images kept in memory, over all loader workers of a process


def dataset_fingerprint(found: ImageList) -> str:
    """Return 12 hex digits over all names and labels and the pixels of some 16 images. Another set,
    or another order, is another data set."""
    sha = hashlib.sha256()
    for i in range(0, len(found), max(1, len(found) // 16)):
        with contextlib.suppress(
            BadInput
        ):  # a corrupt image is reported when its turn comes
            sha.update(found.array(i).tobytes())
    for path, label in zip(found.paths, found.labels):
        sha.update(f"{path}\t{label}\n".encode())
    return sha.hexdigest()[:12]


def to_train_on(found: ImageList, hold_out: float) -> ImageList:
    """`found` without a random share of it, in its order; the same share for every recipe."""
    if not hold_out:
        return found
    order = torch.randperm(
        len(found), generator=seeding.generator(0, "hold out")
    ).tolist()
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
    """Yield this rank's batches from step `first` to step `last`, as lists of (epoch, image), for
    all micro-batches. Each epoch is a permutation of the images, cut into whole global batches; the
    rest is not used. A micro-batch is rank-major: rank r has its r-th contiguous slice."""
    # An epoch's order is cut into global batches (the rest is left out), a global batch into
    # micro-batches, a micro-batch into the ranks' shares: who holds an image depends on the
    # number of ranks, which images make a micro-batch does not.
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
    """One micro-batch of N images as a loader worker leaves it, on the CPU. views: V tensors (N,
    size, size, 3) uint8, in the order of `ViewsConfig.per_view`; colour: as many, where the device
    is to do what comes after the geometry, else none; index (N,) positions in the dataset, labels
    (N,). `skipped` are images that were replaced and why; with an `error`, an image that may not be
    replaced, there is nothing else."""

    views: tuple[Tensor, ...]
    colour: tuple[DeviceColour, ...]
    index: Tensor
    labels: Tensor
    skipped: tuple[str, ...] = ()
    error: str | None = None

    def pin_memory(self) -> "LoadedBatch":
        """Move it to page-locked memory, from which a GPU copies while the CPU goes on. The
        DataLoader calls it by this name on a type that it does not know."""
        return replace(
            self,
            views=tuple(x.pin_memory() for x in self.views),
            colour=tuple(x.pin_memory() for x in self.colour),
            index=self.index.pin_memory(),
            labels=self.labels.pin_memory(),
        )


@dataclass(frozen=True)
class InputFormat:
    """How a network of this run takes its numbers."""

    device: torch.device
    dtype: torch.dtype
    layout: torch.memory_format

    @staticmethod
    def of(config: PretrainConfig, device: torch.device) -> "InputFormat":
        dtype = torch.float64 if config.precision == "fp64" else torch.float32
        layout = (
            torch.channels_last if config.channels_last else torch.contiguous_format
        )
        return InputFormat(device, dtype, layout)


def finish_views(
    loaded: LoadedBatch, recipe: ViewsConfig, form: InputFormat
) -> list[Tensor]:
    """The views as a network takes them, (N, 3, h, w)."""
    out = []
    for v, (made, crops) in enumerate(zip(loaded.views, recipe.per_view, strict=True)):
        # The bytes travel, a quarter of the floats; (N, h, w, 3) is (N, 3, h, w), channels last
        images = made.to(form.device, non_blocking=True).permute(0, 3, 1, 2)
        if loaded.colour:
            images = augmentations.apply_colour(
                images, loaded.colour[v].to(form.device), crops
            )
        images = normalise(images, recipe.pixels)
        out.append(images.to(form.dtype).contiguous(memory_format=form.layout))
    return out


class ViewBatches(Dataset[LoadedBatch]):
    """(epoch, image) pairs -> LoadedBatch. Images are decoded once for all their views, and kept
    while the memory budget lasts. With `device_colour` only crop, resize and flip happen here, and
    what colour and blur need goes along. A corrupt image is an error, or with `skip_corrupt`
    replaced by the next readable one in the list."""

    def __init__(
        self,
        found: ImageList,
        config: PretrainConfig,
        *,
        cache_bytes: int,
        device_colour: bool,
    ) -> None:
        self.found, self.recipe, self.seed = found, config.views, config.seed
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
            # First come, first kept: nothing is thrown out again, so a worker's memory is bounded
            if image.nbytes <= self.cache_left:
                self.cache_left -= image.nbytes
                self.cache[index] = image
        return image

    def readable(self, index: int, skipped: list[str]) -> tuple[int, np.ndarray]:
        """The image, or where allowed the next one that can be read."""
        for offset in range(len(self.found)):
            i = (index + offset) % len(self.found)
            try:
                return i, self.pixels(i)
            except BadInput as error:
                if not self.skip_corrupt:
                    hint = "remove it, or leave such images out with data.skip_corrupt=true"
                    raise BadInput(f"{error}; {hint}") from None
                skipped.append(str(error))
        raise BadInput(f"{self.found.root}: not one readable image")

    def render(self, image: np.ndarray, view: DrawnView, crops: Crops) -> np.ndarray:
        """Make the part of a view that a worker makes: uint8 (size, size, 3)."""
        if self.device_colour:
            return augmentations.render_geometry(image, view, crops)
        if self.recipe.pipeline == "reference":
            return augmentations.render_reference(Image.fromarray(image), view, crops)
        return augmentations.render_fast(image, view, crops)

    def __getitems__(self, items: Sequence[tuple[int, int]]) -> LoadedBatch:
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
            # Views depend on the image that is shown and on the epoch, on nothing that was before
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
    """This rank's micro-batches from step `first` on, in order. Workers run on across epochs."""
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
