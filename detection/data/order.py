"""Which images a run sees, and when: for both engines, from the seed alone."""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from backbench.detection.data.dataset_dicts import ImageRecord
from backbench.runs import seeding


class ImageOrder:
    """An endless stream of shuffled passes, cut into groups of like orientation. It is a pure
    function of (records, batch, seed): no batch depends on ranks, workers or restarts. Groups of
    gcd(4, batch) images, the papers' share of a GPU, are all wide or all tall, so little is padded.
    A group that is incomplete at the end of a pass is filled in the next."""

    def __init__(
        self,
        records: Sequence[ImageRecord],
        batch: int,
        seed: int,
        *,
        grouped: bool = True,
    ) -> None:
        self.wide = [r["width"] > r["height"] for r in records]
        self.batch, self.seed = batch, seed
        self.group = math.gcd(4, batch) if grouped else 1

    def batches(self, first: int = 0) -> Iterator[list[int]]:
        """Record indices of batch `first`, `first + 1`, ..."""
        groups = self._groups()
        per_batch = self.batch // self.group
        # The batches before `first` are drawn and dropped: which group is full depends on all that
        # came before it.
        for number in itertools.count():
            members = list(
                itertools.chain.from_iterable(itertools.islice(groups, per_batch))
            )
            if number >= first:
                yield members

    def _groups(self) -> Iterator[list[int]]:
        # Two groups are open at any time: an image goes to its orientation's, a full one goes out.
        open_groups: dict[bool, list[int]] = {True: [], False: []}
        for epoch in itertools.count():
            draw = seeding.generator(self.seed, "order", epoch)
            for i in torch.randperm(len(self.wide), generator=draw).tolist():
                group = open_groups[self.wide[i] if self.group > 1 else True]
                group.append(i)
                if len(group) == self.group:
                    yield list(group)
                    group.clear()


class Slots(torch.utils.data.Sampler[list[tuple[int, int, int]]]):
    """Batches of one rank for a DataLoader: (iteration, slot in the global batch, record)."""

    def __init__(
        self, order: ImageOrder, *, first: int, last: int, rank: int = 0, world: int = 1
    ) -> None:
        self.order, self.first, self.last, self.rank, self.world = (
            order,
            first,
            last,
            rank,
            world,
        )

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        share = (
            self.order.batch // self.world
        )  # rank-major, as everywhere: see runs/distributed.py
        mine = range(self.rank * share, (self.rank + 1) * share)
        stream = self.order.batches(self.first)
        for iteration in range(self.first, self.last):
            members = next(stream)
            yield [(iteration, slot, members[slot]) for slot in mine]

    def __len__(self) -> int:
        return self.last - self.first
