"""Decides which images a run sees, and when: for both engines, from the seed alone."""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from backbench.detection.data.dataset_dicts import ImageRecord
from backbench.runs import seeding


class ImageOrder:
    """Makes an endless stream of batches from shuffled passes over the images.

    The stream is a pure function of (records, batch, seed): no batch depends on ranks, workers or
    restarts. The images of a group are all wide or all tall, so that little is padded. A group has
    four images, the papers' share of a GPU, or gcd(4, batch). One that is incomplete at the end of a
    pass is filled in the next.
    """

    def __init__(
        self,
        records: Sequence[ImageRecord],
        batch: int,
        seed: int,
        *,
        grouped: bool = True,
    ) -> None:
        self.wide = [r["width"] > r["height"] for r in records]
        self.batch = batch
        self.seed = seed
        self.group = math.gcd(4, batch) if grouped else 1

    def batches(self, first: int = 0) -> Iterator[list[int]]:
        """Yield the record indices of batch `first`, of `first + 1`, and so on."""
        groups = self._groups()
        groups_per_batch = self.batch // self.group
        # The batches before `first` are drawn and dropped, because which group is full depends on
        # all that came before it.
        for number in itertools.count():
            members: list[int] = []
            for group in itertools.islice(groups, groups_per_batch):
                members += group
            if number >= first:
                yield members

    def _groups(self) -> Iterator[list[int]]:
        # Two groups are open at any time, of wide and of tall images. A full one goes out.
        wide: list[int] = []
        tall: list[int] = []
        for epoch in itertools.count():
            draw = seeding.generator(self.seed, "order", epoch)
            for index in torch.randperm(len(self.wide), generator=draw).tolist():
                # A group of one image has one orientation whatever it is.
                group = wide if self.wide[index] or self.group == 1 else tall
                group.append(index)
                if len(group) == self.group:
                    yield list(group)
                    group.clear()


class Slots(torch.utils.data.Sampler[list[tuple[int, int, int]]]):
    """Yields one rank's batches for a DataLoader: (iteration, slot in the global batch, record)."""

    def __init__(
        self, order: ImageOrder, *, first: int, last: int, rank: int = 0, world: int = 1
    ) -> None:
        self.order = order
        self.first = first
        self.last = last
        self.rank = rank
        self.world = world

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        # A rank has consecutive slots of the global batch, as everywhere: see
        # parallel/distributed.py.
        share = self.order.batch // self.world
        mine = range(self.rank * share, (self.rank + 1) * share)
        stream = self.order.batches(self.first)
        for iteration in range(self.first, self.last):
            members = next(stream)
            yield [(iteration, slot, members[slot]) for slot in mine]

    def __len__(self) -> int:
        return self.last - self.first
