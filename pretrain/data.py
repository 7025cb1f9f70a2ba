"""What a training step is fed: which images, in which order, made into which views. All of it is a pure function of
(recipe, dataset): the order of (seed, epoch), each image's views of (seed, epoch, image)."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from backbench.errors import BadInput
from backbench.images import views
from backbench.images.files import ImageList
from backbench.runs import seeding
from backbench.runs.state import StopFlag
from pretrain.config import PretrainConfig, Views

CACHE_BYTES = 512 << 20  # decoded images kept in memory, over all loader workers of a process


def fingerprint(found: ImageList) -> str:
    """12 hex digits over all names and labels and the pixels of some 16 images: another set, or another order, is
    another data set."""
    sha = hashlib.sha256()
    for i in range(0, len(found), max(1, len(found) // 16)):
        with contextlib.suppress(BadInput):  # a corrupt image is reported when its turn comes
            sha.update(found.array(i).tobytes())
    for path, label in zip(found.paths, found.labels):
        sha.update(f"{path}\t{label}\n".encode())
    return sha.hexdigest()[:12]


class Order:
    """The batches of this rank from step `first` to step `last`, as lists of (epoch, image), for all micro-batches.

    Each epoch is a permutation of the images, cut into whole global batches; what is left over is not used. A global
    batch is rank-major: rank r has its r-th contiguous slice.
    """

    def __init__(
        self,
        count: int,
        config: PretrainConfig,
        *,
        first: int,
        last: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.count, self.seed, self.batch_size = count, config.seed, config.batch_size
        self.first, self.last = first, last
        self.rank, self.ranks, self.accumulate = rank, ranks, config.accumulate

    def __len__(self) -> int:
        return (self.last - self.first) * self.accumulate

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        per_epoch = self.count // self.batch_size
        share = self.batch_size // self.ranks
        micro = share // self.accumulate
        order: list[int] = []
        for step in range(self.first, self.last):
            epoch, position = divmod(step, per_epoch)
            if not order or position == 0:
                order = torch.randperm(
                    self.count, generator=seeding.generator(self.seed, "order", epoch)
                ).tolist()
            start = position * self.batch_size + self.rank * share
            for _ in range(self.accumulate):
                yield [(epoch, i) for i in order[start : start + micro]]
                start += micro


class ViewBatches(Dataset):
    """(epoch, image) pairs -> their views as uint8, (N, size, size, 3) for each view.

    Images are decoded once for all their views, and kept decoded while the memory budget lasts. With `device_colour`
    only crop, resize and flip happen here, and what colour and blur need goes along. A corrupt image is reported in
    `error`, or with `skip_corrupt` replaced by the next readable one in the list and reported in `skipped`.
    """

    def __init__(
        self,
        found: ImageList,
        recipe: Views,
        *,
        seed: int,
        skip_corrupt: bool,
        cache_bytes: int,
        device_colour: bool,
    ) -> None:
        self.found, self.recipe, self.seed, self.skip_corrupt = found, recipe, seed, skip_corrupt
        self.cache: dict[int, np.ndarray] = {}
        self.cache_left = cache_bytes
        self.device_colour = device_colour
        self.crops = [group for group in recipe.crops for _ in range(group.count)]

    def __len__(self) -> int:
        return len(self.found)

    def pixels(self, index: int) -> np.ndarray:
        """Image `index`, uint8 (H, W, 3)."""
        image = self.cache.get(index)
        if image is None:
            if self.recipe.pipeline == "reference":
                image = np.asarray(self.found.open(index))
            else:
                image = self.found.array(index)
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

    def __getitems__(self, items: Sequence[tuple[int, int]]) -> dict[str, Any]:
        pixels = [np.empty((len(items), c.size, c.size, 3), np.uint8) for c in self.crops]
        colour = (
            [views.DeviceColour.empty(len(items)) for _ in self.crops] if self.device_colour else []
        )
        index: list[int] = []
        skipped: list[str] = []
        generator = torch.Generator()
        for n, (epoch, wanted) in enumerate(items):
            try:
                i, image = self.readable(wanted, skipped)
            except BadInput as error:
                return {"error": str(error)}
            index.append(i)
            generator.manual_seed(seeding.seed_of(self.seed, "views", epoch, i))
            for v, crops in enumerate(self.crops):
                view = views.draw(generator, image.shape[0], image.shape[1], crops)
                if self.device_colour:
                    pixels[v][n] = views.render_geometry(image, view, crops)
                    colour[v].set(n, view, pixels[v][n])
                elif self.recipe.pipeline == "reference":
                    pixels[v][n] = views.render_reference(views.to_pil(image), view, crops)
                else:
                    pixels[v][n] = views.render_fast(image, view, crops)
        labels = [self.found.labels[i] for i in index]
        return {
            "views": [torch.from_numpy(p) for p in pixels],
            "colour": [c.tensors() for c in colour],
            "index": torch.tensor(index),
            "labels": torch.tensor(labels),
            "skipped": skipped,
        }


def _as_is(batch: Any) -> Any:
    return batch


def _start_worker(_: int) -> None:
    """Signals are the main process's business: a group-wide SIGTERM must not take the data away from its last step."""
    import signal

    for name in StopFlag.SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    torch.set_num_threads(1)


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
) -> Iterator[dict[str, Any]]:
    """All micro-batches of this rank, in order, from step `first` on; workers run on across epochs."""
    dataset = ViewBatches(
        found,
        config.views,
        seed=config.seed,
        skip_corrupt=config.data.skip_corrupt,
        cache_bytes=CACHE_BYTES // max(1, workers),
        device_colour=on_gpu and config.views.pipeline == "fast",
    )
    order = Order(len(found), config, first=first, last=last, rank=rank, ranks=ranks)
    return iter(
        DataLoader(
            dataset,
            batch_sampler=order,
            num_workers=workers,
            collate_fn=_as_is,
            pin_memory=on_gpu,
            worker_init_fn=_start_worker,
        )
    )
