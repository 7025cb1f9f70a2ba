"""Gives the features of frozen trunks, from the cache or computed in one pass for all of them:
float32 rows in the order of the image list."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from backbench.datasets.splits import Splits
from backbench.images import contents
from backbench.images.contents import Named
from backbench.images.image_list import ArrayList, ImageList
from backbench.parallel import distributed
from backbench.runs import price
from backbench.runs.folder import STATES
from backbench.runs.resumable import ResumableSteps
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag
from backbench.runs.terminal import log
from backbench.transfer.devices import Machine
from backbench.transfer.features import cache as feature_cache
from backbench.transfer.features.batches import (
    EpochIndex,
    Pictures,
    centred,
    equal_shares,
    loader,
)
from backbench.transfer.features.cache import (
    Description,
    FeatureCache,
    PartFiles,
    Seen,
    describe,
)
from backbench.transfer.features.frozen import (
    FrozenTrunk,
    forward_all,
    refuse_unusable,
)
from backbench.transfer.protocol import Geometry

# The folder below a run's for features that are large, or that no other run may take for its own.
# It lasts while the run measures.
OWN_FEATURES = f"{STATES}/features"
SAVE_EVERY = 20  # batches
WAIT_SECONDS = 1.0  # between two looks at whether another run has finished


@dataclass(frozen=True)
class FeatureRows:
    """Joins feature files as one table (N, D) without a copy: ImageNet's would be 10 GB again."""

    parts: Sequence[Tensor]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def take(self, index: Tensor) -> Tensor:
        """Return the rows at `index` (n,), in that order: (n, D)."""
        if len(self.parts) == 1:
            return self.parts[0][index]
        first = self.parts[0]
        out = first.new_empty(len(index), first.shape[1])
        begin = 0
        taken = 0
        for part in self.parts:
            # This part has the rows begin .. end - 1 of the table.
            end = begin + len(part)
            (here,) = torch.where((index >= begin) & (index < end))
            out[here] = part[index[here] - begin]
            taken += len(here)
            begin = end
        if taken != len(index):
            raise IndexError(f"a row outside 0..{len(self) - 1}")
        return out

    def split(self, rows: int) -> Iterator[Tensor]:
        """Yield all rows in order, at most `rows` at a time, as views."""
        for part in self.parts:
            yield from part.split(rows)


class HashedPictures(Pictures):
    """Item (epoch, index) -> (uint8 (3, H, W), the file's hash). Rows of an array have no hash:
    their pixels are part of the entry's name."""

    def __getitem__(self, key: EpochIndex) -> tuple[Tensor, int]:
        picture, index = super().__getitem__(key)
        if isinstance(self.images, ArrayList):
            return picture, feature_cache.UNKNOWN
        # The file was decoded a moment ago, so it is read from memory and not from the disk.
        return picture, feature_cache.file_hash(self.images, index)


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """Computes features by several trunks at once. All ranks call it with the same lists, in the
    same order; rank 0 alone locks, writes and reports."""

    trunks: Sequence[FrozenTrunk]
    geometry: Geometry
    cache: FeatureCache
    machine: Machine
    batch: int = 256  # images of all ranks together
    run: Path | None = None  # where progress is reported
    stop: StopFlag | None = None

    def __call__(self, images: ImageList, what: str = "features") -> list[Tensor]:
        """Return features (N, dim) per trunk. Preempted is raised on a signal, and the next call
        goes on at that batch."""
        # 1. Name each trunk's entry by all that decides its content.
        named = contents.named(images)
        described = []
        for trunk in self.trunks:
            described.append(describe(trunk, named.digest, self.geometry))
        with contextlib.ExitStack() as held:
            # 2. Rank 0 takes the locks of all entries, while all ranks wait for it.
            held.enter_context(self._locked(described))
            # 3. Rank 0 looks for features of these very images, with the locks in hand, and tells
            #    all ranks which entries are there.
            found = []
            for description in described:
                seen = self.cache.seen(description) if self.machine.main else None
                usable = seen is not None and _unchanged(images, named, seen)
                found.append(int(usable))
            there = self._as_main_says(found)
            # 4. What is missing is computed by all ranks together.
            if all(there):
                price.skip("image", len(images))
            else:
                self._compute(there, described, images, named, what)
            # 5. All of them are mapped from disk and checked, whichever run has computed them.
            out = []
            for trunk, description in zip(self.trunks, described):
                rows = self.cache.open(description)
                assert rows is not None, "features that were just written are gone"
                refuse_unusable(rows, trunk.checkpoint.name)
                out.append(rows)
        return out

    def of_splits(
        self, splits: Splits, name: str
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return features of train, val and test, each per trunk, and verify the trunks after."""
        train = self(splits.train, f"{name} train features")
        val = self(splits.val, f"{name} val features")
        test = self(splits.test, f"{name} test features")
        for trunk in self.trunks:
            trunk.verify()
        return train, val, test

    def _locked(
        self, described: Sequence[Description]
    ) -> AbstractContextManager[object]:
        """Lock these entries for this run alone. While another run computes one, wait a second at a
        time: no rank is in a collective for long, and all hear a signal."""
        waiting = False
        while True:
            locks = self.cache.try_lock(described) if self.machine.main else None
            (taken,) = self._as_main_says([int(locks is not None)])
            if taken and locks is not None:
                return locks
            if taken:  # rank 0 holds the locks for all
                return contextlib.nullcontext()
            if self.machine.main and not waiting:
                log.info(
                    f"{self.cache.folder}: waiting for another run that computes them"
                )
                waiting = True
            self.machine.preempt(self.stop, "while another run computed the features")
            time.sleep(WAIT_SECONDS)

    def _compute(
        self,
        there: list[int],
        described: Sequence[Description],
        images: ImageList,
        named: Named,
        what: str,
    ) -> None:
        """Compute the entries not `there`, from where a stopped run left them (see `PartFiles`)."""
        machine = self.machine
        count = len(images)
        trunks, wanted = [], []
        for trunk, description, yes in zip(self.trunks, described, there):
            if not yes:
                trunks.append(trunk)
                wanted.append(description)
        parts = None
        if machine.main:
            dims = [trunk.dim for trunk in trunks]
            parts = PartFiles(
                self.cache,
                wanted,
                dims,
                count,
                keep=described,
                seen=feature_cache.not_yet_seen(named),
                still=lambda seen: _unchanged(images, named, seen),
            )
        # 1. Where to begin, on all ranks.
        (first,) = self._as_main_says([parts.first if parts else 0])
        progress = None
        if parts:
            progress = Progress(self.run, count, what, unit="image", done=first)

        def save(end: int) -> None:
            # After the last batch the entries are finished instead.
            if parts and end < count:
                parts.save(end)

        batches = ResumableSteps(
            first,
            count,
            size=self.batch,
            stop=self.stop,
            agreement=machine.agreement,
            progress=progress,
            save=save,
            due=lambda end, age: (end - first) % (SAVE_EVERY * self.batch) == 0,
            place="after {done} of {total} images",
        )
        # 2. Rank 0 writes each batch.
        arriving = self._arriving(trunks, images, first)
        for _, (begin, features, hashes) in zip(batches, arriving):
            if begin == first:
                # All rows are checked at the end; a trunk that has diverged is stopped early.
                for trunk, mine in zip(trunks, features):
                    name = trunk.checkpoint.name
                    refuse_unusable(mine, name, images_differ=False)
            if parts:
                parts.write(begin, begin + len(hashes), features, hashes)
        # 3. It finishes the entries, and no rank goes on before.
        if parts:
            parts.finish()
        self._as_main_says([0])

    def _arriving(
        self, trunks: Sequence[FrozenTrunk], images: ImageList, first: int
    ) -> Iterator[tuple[int, list[Tensor], Tensor]]:
        """Yield the batches of `_forwards` on the CPU; a GPU works on the next one meanwhile."""
        if self.trunks[0].device.type != "cuda":
            yield from self._forwards(trunks, images, first)
            return
        # A batch is given when the next one is on its way. This is so on every rank: all of them
        # exchange the next batch before they vote on this one.
        before: tuple[int, distributed.OnTheirWay] | None = None
        for begin, features, hashes in self._forwards(trunks, images, first):
            on_their_way = distributed.OnTheirWay([*features, hashes])
            if before is not None:
                begin_before, sent_before = before
                *arrived, of_files = sent_before.taken()
                yield begin_before, arrived, of_files
            before = (begin, on_their_way)
        if before is not None:
            begin_before, sent_before = before
            *arrived, of_files = sent_before.taken()
            yield begin_before, arrived, of_files

    def _forwards(
        self, trunks: Sequence[FrozenTrunk], images: ImageList, first: int
    ) -> Iterator[tuple[int, list[Tensor], Tensor]]:
        """Yield from image `first` on: a batch's first index, its features per trunk, and the hashes
        of its files. Each rank computes its share, and all gather them."""
        machine = self.machine
        count = len(images)
        batch = self.batch
        device = trunks[0].device
        shares = equal_shares(first, count, batch, machine.rank, machine.world)
        pictures = loader(
            HashedPictures(images, centred(self.geometry)), shares, machine=machine
        )
        for begin, (pixels, hashes) in zip(range(first, count, batch), pictures):
            size = min(batch, count - begin)  # the rest is padding
            features = []
            here = pixels.to(device, non_blocking=True)
            for mine in forward_all(trunks, here, watched=False):
                features.append(distributed.gather_without_gradient(mine)[:size])
            sent_hashes = distributed.sent(hashes, device)
            of_files = distributed.gather_without_gradient(sent_hashes)[:size]
            yield begin, features, of_files

    def _as_main_says(self, numbers: list[int]) -> list[int]:
        """Return rank 0's numbers on every rank. The others wait here until rank 0 has come."""
        values = torch.tensor(numbers, dtype=torch.int64, device=self.trunks[0].device)
        return distributed.broadcast(values).tolist()


def _unchanged(images: ImageList, named: Named, seen: Seen) -> bool:
    """Return whether the images are those that were `seen`; warn of the first that has changed."""
    path = feature_cache.changed_file(images, named, seen)
    if path is not None:
        log.warning(
            f"{images.root / path}: not what it was; its list's features are made anew"
        )
    return path is None
