"""Each patch takes, pixel by pixel, the labels of patches that look alike. Nothing is trained.

Images are squared, their tokens standardised, and label maps cut into a patch for each token
(facebookresearch/capi, eval_segmentation.py). As there, a patch whose most frequent label is the
ignored one is nobody's neighbour. Unlike there, an ignored pixel of a neighbour has no vote; where
no neighbour has one, the nearest patch's most frequent class stands.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.dense import DenseList
from backbench.knn import nearest
from backbench.records import store
from backbench.records.store import Result
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag
from backbench.stats import dense_counts
from backbench.transfer.devices import Machine
from backbench.transfer.features.batches import equal_shares
from backbench.transfer.features.cache import FeatureCache
from backbench.transfer.features.dense_views import SquareMaps, pairs
from backbench.transfer.features.extractor import OWN_FEATURES, Extractor
from backbench.transfer.features.frozen import FrozenTrunk, TokenFeature
from backbench.transfer.probes.kind import Probe
from backbench.transfer.probes.seg import (
    SHOWN,
    Shown,
    gathered,
    own_images,
    rows_of,
    score,
)
from backbench.transfer.protocols import Distance, SegKnn
from backbench.transfer.scoring import Assignment, best_of

PIECE = 2**24  # numbers that are looked through at a time: 64 MB of float32
Way = tuple[int, Distance]  # how many neighbours, and by which distance


def measure(
    task: Assignment[SegKnn], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    """The rows of all trunks, on rank 0; the other ranks take part until the end, and have none."""
    p = task.protocol
    # 1. The labels, and all tokens of an image as one feature, too large to be kept for other runs
    trunks, grids = [], []
    for trunk in extractor.trunks:
        height, width, dim = grid = _grid(trunk, p)
        row = TokenFeature(
            lambda x: x.flatten(1), height * width * dim, f"{height} x {width}"
        )
        trunks.append(dataclasses.replace(trunk, of_tokens=row))
        grids.append(grid)
    train_maps, val_maps, test_maps = _maps(task, machine, stop)
    cache = FeatureCache(task.run / OWN_FEATURES, extractor.cache.limit)
    whole = dataclasses.replace(extractor, trunks=trunks, cache=cache)
    features = whole.of_splits(task.splits, task.dataset.name)
    rows = []
    for trunk, grid, train, val, test in zip(trunks, grids, *features):
        seen = Neighbours(task, grid, train, machine, stop)
        # 2. The held-out part chooses, by neighbours in the rest of train
        ways: list[Way] = [(k, distance) for k in p.k for distance in p.distances]
        chosen: dict[str, object] = {"on": None}
        if len(ways) > 1:
            seen.learn([train], train_maps)
            counted, _ = seen.count(val, val_maps, ways)
            scores = [100 * float(score(counts)["miou"]) for counts in counted]
            chosen = {
                "on": "val",
                "scores": {f"{k} {by}": s for (k, by), s in zip(ways, scores)},
            }
            ways = [ways[best_of(scores)]]
        # 3. The one look at test, by neighbours in all of train
        seen.learn([train, val], torch.cat((train_maps, val_maps)))
        (counts,), shown = seen.count(test, test_maps, ways)
        chosen |= {"k": ways[0][0], "distance": ways[0][1], "trained_on": "train+val"}
        if machine.main:
            rows += rows_of(task, trunk, counts, chosen, shown)
    store.append(task.run, rows, skip_known=True)
    return rows


def _grid(trunk: FrozenTrunk, p: SegKnn) -> tuple[int, int, int]:
    """The height, width and numbers of a trunk's tokens, by trying."""
    side = p.geometry.crop
    trunk.module.dilate(p.output_stride)
    trunk.module.refuse_size(side, side)
    blank = torch.zeros(1, 3, side, side, device=trunk.device)
    height, width, dim = trunk(blank, tokens=True).shape[1:]
    if side % height or side % width:
        raise BadInput(
            f"{trunk.checkpoint.name}: {height} x {width} tokens do not divide {side} pixels; write"
            " geometry.resize and geometry.crop, a multiple of its patches, behind the protocol"
        )
    return height, width, dim


def _maps(task: Assignment[SegKnn], machine: Machine, stop: StopFlag) -> list[Tensor]:
    """The label maps of train, val and test, uint8 (N, side, side), on every rank."""
    out = []
    for split, images in task.splits.items():
        items = SquareMaps(cast(DenseList, images), task.protocol.geometry.crop)
        what = f"{task.dataset.name} {split} maps"
        progress = Progress(
            task.run if machine.main else None, len(images), what, unit="map"
        )
        read: list[Tensor] = []
        for maps in pairs(items, equal_shares(0, len(images), 64, 0, 1), machine):
            read += maps
            progress.advance(len(maps))
            machine.preempt(stop, f"at {what}")
        out.append(torch.stack(read))
    return out


def votes(labels: Tensor, classes: int) -> Tensor:
    """How many of each row of (n, m) labels are of each class, (n, C)."""
    found = labels.long().clamp_(max=classes)  # the ignored ones
    counts = torch.zeros(
        len(labels), classes + 1, dtype=torch.int32, device=labels.device
    )
    return counts.scatter_add_(1, found, torch.ones_like(found, dtype=torch.int32))[
        :, :classes
    ]


class Neighbours:
    """One trunk's patches of images, standardised as those of train, and what is known of them."""

    def __init__(
        self,
        task: Assignment[SegKnn],
        grid: tuple[int, int, int],
        train: Tensor,
        machine: Machine,
        stop: StopFlag,
    ) -> None:
        from sklearn.preprocessing import StandardScaler

        self.task, self.machine, self.stop = task, machine, stop
        self.height, self.width, self.dim = grid
        self.classes = len(task.splits.train.classes)
        scaler = StandardScaler()
        for rows in _pieces(train):
            scaler.partial_fit(rows.reshape(-1, self.dim).numpy())
        self.mean = torch.tensor(
            scaler.mean_, dtype=torch.float32, device=machine.device
        )
        self.scale = torch.tensor(
            scaler.scale_, dtype=torch.float32, device=machine.device
        )

    def tokens(self, features: Tensor) -> Tensor:
        """The features (n, T D) of images -> (n T, D) on the device."""
        return (
            features.to(self.mean.device).view(-1, self.dim) - self.mean
        ) / self.scale

    def cut(self, maps: Tensor) -> Tensor:
        """Label maps (n, side, side) -> their patches (n T, P)."""
        down, across = maps.shape[-1] // self.height, maps.shape[-1] // self.width
        blocks = maps.view(-1, self.height, down, self.width, across).transpose(2, 3)
        return blocks.reshape(-1, down * across)

    def learn(self, features: list[Tensor], maps: Tensor) -> None:
        """Take the patches of images with these features, in parts, for neighbours."""
        labels, device = self.cut(maps), self.machine.device
        common, kept = [], []
        for rows in _pieces(labels):
            counts = votes(rows, self.classes)
            most, which = counts.max(1)
            common.append(which)
            kept.append(most >= rows.shape[1] - counts.sum(1))  # or most are ignored
        self.features, self.kept = features, torch.cat(kept)
        self.labels = labels[self.kept].to(device)  # (M, P)
        self.common = torch.cat(common)[self.kept].to(device)  # (M,): each one's class
        if max(self.task.protocol.k) > len(self.labels):
            raise BadInput(
                f"{self.task.dataset.name}: k = {max(self.task.protocol.k)} neighbours of"
                f" {len(self.labels)} labelled patches; write k=1 behind the protocol"
            )

    def _blocks(self) -> Iterator[Tensor]:
        """The tokens of the patches that were learnt, some (m, D) at a time."""
        begin = 0
        for part in self.features:
            for rows in _pieces(part):
                tokens = self.tokens(rows)
                yield tokens[self.kept[begin : begin + len(tokens)].to(tokens.device)]
                begin += len(tokens)

    def predict(self, near: Tensor) -> Tensor:
        """The labels (T, P) of patches whose neighbours are `near` (T, k)."""
        counts = votes(self.labels[near].transpose(1, 2).flatten(0, 1), self.classes)
        most, best = (each.view(len(near), -1) for each in counts.max(1))
        return (
            torch.where(most > 0, best, self.common[near[:, :1]]).to(torch.uint8).cpu()
        )

    def count(
        self, features: Tensor, maps: Tensor, ways: Sequence[Way]
    ) -> tuple[list[np.ndarray], Shown]:
        """Return, for each of the ways, the counts (N, 3, C) of images with these features and
        label maps; and the first way's label maps of the first images of rank 0."""
        n, machine, what = (
            len(maps),
            self.machine,
            f"{self.task.dataset.name} neighbours",
        )
        counted = [torch.zeros(n, 3, self.classes).long() for _ in ways]
        shown: Shown = {}
        progress = Progress(
            self.task.run if machine.main else None, n, what, unit="answer"
        )
        mine = torch.tensor(own_images(n, machine))
        for some in mine.split(self.task.protocol.feature_batch):
            x, most = self.tokens(features[some]), max(k for k, _ in ways)
            found = {}
            for by in dict.fromkeys(by for _, by in ways):
                _, near = nearest(x, self._blocks(), most=most, distance=by)
                found[by] = near.view(len(some), -1, most)
            for place, index in enumerate(some.tolist()):
                label = self.cut(maps[index]).numpy()
                for way, (k, by) in enumerate(ways):
                    best = self.predict(found[by][place, :, :k])
                    counts = dense_counts.count(best.numpy(), label, self.classes)
                    counted[way][index] = torch.from_numpy(counts)
                    if way == 0 and machine.main and len(shown) < SHOWN:
                        blocks = best.view(
                            self.height, self.width, -1, maps.shape[2] // self.width
                        )
                        shown[index] = (
                            blocks.transpose(1, 2).reshape(maps.shape[1:]).numpy()
                        )
            progress.advance(len(some) * machine.world)
            machine.preempt(self.stop, f"at {what}")
        return [gathered(counts, machine) for counts in counted], shown


def _pieces(rows: Tensor) -> Sequence[Tensor]:
    return rows.split(max(1, PIECE // rows.shape[1]))


def _work(p: SegKnn, _: str, splits: Splits, checkpoints: int) -> Mapping[str, int]:
    sizes = {split: len(images) for split, images in splits.items()}
    asked = sizes["test"] + (sizes["val"] if len(p.k) * len(p.distances) > 1 else 0)
    every = sum(sizes.values())
    return {"image": every, "map": every, "answer": checkpoints * asked}


PROBE = Probe(
    measure=measure,
    dense=True,
    together=True,
    words=lambda p: f"k = {', '.join(map(str, p.k))} by {' and '.join(p.distances)}",
    work=_work,
)
