"""Segments by neighbours: each patch takes, pixel by pixel, the labels of patches with similar
features. Nothing is trained.

Images are squared, their tokens standardised, and label maps cut into a patch for each token
(facebookresearch/capi, eval_segmentation.py). As there, a patch whose most frequent label is the
ignored one is nobody's neighbour. Unlike there, an ignored pixel of a neighbour has no vote; where
no neighbour has one, the nearest patch's most frequent class stands.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.dense import DenseList
from backbench.knn import nearest
from backbench.records import store
from backbench.records.store import Result
from backbench.requests.bounds import Count
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag
from backbench.stats import dense_counts
from backbench.transfer.assignment import Assignment
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
from backbench.transfer.protocol import Protocol
from backbench.transfer.scoring import best_of

PIECE = 2**24  # numbers that are looked through at a time: 64 MB of float32
Distance = Literal["cosine", "l2"]
Way = tuple[int, Distance]  # how many neighbours, and by which distance


@dataclass(frozen=True, kw_only=True)
class SegKnn(Protocol):
    """Each pixel takes the most frequent label among the neighbours of its patch. The held-out part
    of train chooses how many neighbours there are, and the distance."""

    k: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 3, 10, 30)
    distances: Annotated[tuple[Distance, ...], Field(min_length=1)] = ("cosine", "l2")
    output_stride: Literal[8, 16, 32] = 16  # of a ResNet, by dilation

    def __post_init__(self) -> None:
        g = self.geometry
        if not g.square or g.resize != g.crop or self.head:
            raise ValueError(
                "whole images are read: geometry.square, resize as crop, no head"
            )


def measure(
    task: Assignment[SegKnn], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    """Return the rows of all trunks, on rank 0. The other ranks take part until the end, and return
    none."""
    p = task.protocol
    # 1. The label maps, and the features: all tokens of an image are one feature. These are too
    #    large to be kept for other runs, so the cache is the run's own.
    trunks = []
    grids = []
    for trunk in extractor.trunks:
        height, width, dim = _grid(trunk, p)
        every_token = TokenFeature(
            lambda x: x.flatten(1), height * width * dim, f"{height} x {width}"
        )
        trunks.append(dataclasses.replace(trunk, of_tokens=every_token))
        grids.append((height, width, dim))
    train_maps, val_maps, test_maps = _maps(task, machine, stop)
    cache = FeatureCache(task.run / OWN_FEATURES, extractor.cache.limit)
    whole = dataclasses.replace(extractor, trunks=trunks, cache=cache)
    features = whole.of_splits(task.splits, task.dataset.name)
    rows = []
    for trunk, grid, train, val, test in zip(trunks, grids, *features):
        seen = Neighbours(task, grid, train, machine, stop)
        # 2. The held-out part chooses, by neighbours in the rest of train.
        ways: list[Way] = [(k, distance) for k in p.k for distance in p.distances]
        chosen: dict[str, object] = {"on": None}
        if len(ways) > 1:
            seen.learn([train], train_maps)
            counted, _ = seen.count(val, val_maps, ways)
            scores = [100 * float(score(counts)["miou"]) for counts in counted]
            names = [f"{k} {distance}" for k, distance in ways]
            chosen = {"on": "val", "scores": dict(zip(names, scores))}
            ways = [ways[best_of(scores)]]
        # 3. The one look at test, by neighbours in all of train
        seen.learn([train, val], torch.cat((train_maps, val_maps)))
        (counts,), shown = seen.count(test, test_maps, ways)
        ((k, distance),) = ways
        chosen |= {"k": k, "distance": distance, "trained_on": "train+val"}
        if machine.main:
            rows += rows_of(task, trunk, counts, chosen, shown)
    store.append(task.run, rows, skip_known=True)
    return rows


def _grid(trunk: FrozenTrunk, p: SegKnn) -> tuple[int, int, int]:
    """Return height, width and dimension of a trunk's map of tokens, found with a blank image.

    The trunk stays dilated to the probe's output stride.
    """
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
    """Read the label maps of train, val and test, uint8 (N, side, side), on every rank."""
    out = []
    for split, images in task.splits.items():
        items = SquareMaps(cast(DenseList, images), task.protocol.geometry.crop)
        what = f"{task.dataset.name} {split} maps"
        progress = Progress(
            task.run if machine.main else None, len(images), what, unit="map"
        )
        # Every rank reads all of them: one rank of one takes batches of 64.
        batches = equal_shares(0, len(images), 64, rank=0, world=1)
        read: list[Tensor] = []
        for maps in pairs(items, batches, machine):
            read += maps
            progress.advance(len(maps))
            machine.preempt(stop, f"at {what}")
        out.append(torch.stack(read))
    return out


def votes(labels: Tensor, classes: int) -> Tensor:
    """Count how many of each row of labels (n, m) are of each class, int32 (n, C)."""
    # Ignored labels become one class more, which is left out at the end.
    found = labels.long().clamp_(max=classes)
    shape = (len(labels), classes + 1)
    counts = torch.zeros(shape, dtype=torch.int32, device=labels.device)
    counts.scatter_add_(1, found, torch.ones_like(found, dtype=torch.int32))
    return counts[:, :classes]


class Neighbours:
    """The patches of images that one trunk has seen: their tokens, standardised by the mean and
    deviation of train's, and their labels. N images have N T patches of P pixels each."""

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
        self.mean = torch.tensor(scaler.mean_).float().to(machine.device)
        self.scale = torch.tensor(scaler.scale_).float().to(machine.device)

    def tokens(self, features: Tensor) -> Tensor:
        """Return the features (n, T D) of images as standardised tokens (n T, D) on the device."""
        each = features.to(self.mean.device).view(-1, self.dim)
        return (each - self.mean) / self.scale

    def cut(self, maps: Tensor) -> Tensor:
        """Cut label maps (n, side, side) into their patches (n T, P)."""
        side = maps.shape[-1]
        down, across = side // self.height, side // self.width
        blocks = maps.view(-1, self.height, down, self.width, across).transpose(2, 3)
        return blocks.reshape(-1, down * across)

    def join(self, patches: Tensor, side: int) -> Tensor:
        """Join the patches (T, P) of an image into its label map (side, side)."""
        blocks = patches.view(self.height, self.width, -1, side // self.width)
        return blocks.transpose(1, 2).reshape(side, side)

    def learn(self, features: list[Tensor], maps: Tensor) -> None:
        """Take the patches of images with these features, in parts, for neighbours."""
        labels = self.cut(maps)
        device = self.machine.device
        common = []  # the most frequent class of each patch
        kept = []  # whether it is at least as frequent as the ignored label
        for rows in _pieces(labels):
            counts = votes(rows, self.classes)
            most, which = counts.max(1)
            ignored = rows.shape[1] - counts.sum(1)
            common.append(which)
            kept.append(most >= ignored)
        self.features = features
        self.kept = torch.cat(kept)  # (N T,)
        # Of the M patches that are kept
        self.labels = labels[self.kept].to(device)  # (M, P)
        self.common = torch.cat(common)[self.kept].to(device)  # (M,)
        if max(self.task.protocol.k) > len(self.labels):
            raise BadInput(
                f"{self.task.dataset.name}: k = {max(self.task.protocol.k)} neighbours of"
                f" {len(self.labels)} labelled patches; write k=1 behind the protocol"
            )

    def _blocks(self) -> Iterator[Tensor]:
        """Yield the tokens of the patches that were learnt, some (m, D) at a time."""
        begin = 0
        for part in self.features:
            for rows in _pieces(part):
                tokens = self.tokens(rows)
                yield tokens[self.kept[begin : begin + len(tokens)].to(tokens.device)]
                begin += len(tokens)

    def predict(self, near: Tensor) -> Tensor:
        """Predict the labels (T, P) of patches whose neighbours are `near` (T, k), nearest first."""
        of_pixels = self.labels[near].transpose(1, 2).flatten(0, 1)  # (T P, k)
        counts = votes(of_pixels, self.classes)
        most, best = counts.max(1)
        most = most.view(len(near), -1)
        best = best.view(len(near), -1)
        # Where no neighbour has a vote, the nearest patch's most frequent class stands.
        nearest_class = self.common[near[:, :1]]
        predicted = torch.where(most > 0, best, nearest_class)
        return predicted.to(torch.uint8).cpu()

    def count(
        self, features: Tensor, maps: Tensor, ways: Sequence[Way]
    ) -> tuple[list[np.ndarray], Shown]:
        """Return, for each of the ways, the counts (N, 3, C) of images with these features and
        label maps; and the first way's label maps of the first images of rank 0."""
        n = len(maps)
        machine = self.machine
        what = f"{self.task.dataset.name} neighbours"
        counted = [torch.zeros(n, 3, self.classes).long() for _ in ways]
        shown: Shown = {}
        progress = Progress(
            self.task.run if machine.main else None, n, what, unit="answer"
        )
        most = max(k for k, _ in ways)
        distances = dict.fromkeys(distance for _, distance in ways)
        mine = torch.tensor(own_images(n, machine))
        for some in mine.split(self.task.protocol.feature_batch):
            # 1. The neighbours of all patches of some images, once for each distance
            x = self.tokens(features[some])
            found = {}
            for distance in distances:
                _, near = nearest(x, self._blocks(), most=most, distance=distance)
                found[distance] = near.view(len(some), -1, most)
            # 2. Their votes, counted image by image in each way
            for place, index in enumerate(some.tolist()):
                label = self.cut(maps[index]).numpy()
                for way, (k, distance) in enumerate(ways):
                    best = self.predict(found[distance][place, :, :k])
                    counts = dense_counts.count(best.numpy(), label, self.classes)
                    counted[way][index] = torch.from_numpy(counts)
                    if way == 0 and machine.main and len(shown) < SHOWN:
                        shown[index] = self.join(best, maps.shape[2]).numpy()
            progress.advance(len(some) * machine.world)
            machine.preempt(self.stop, f"at {what}")
        return [gathered(counts, machine) for counts in counted], shown


def _pieces(rows: Tensor) -> Sequence[Tensor]:
    """Split rows (n, m) into parts of at most `PIECE` numbers."""
    return rows.split(max(1, PIECE // rows.shape[1]))


def _work(p: SegKnn, _: str, splits: Splits, checkpoints: int) -> Mapping[str, int]:
    asked = len(splits.test)
    if len(p.k) * len(p.distances) > 1:
        asked += len(splits.val)
    every = sum(len(images) for _, images in splits.items())
    return {"image": every, "map": every, "answer": checkpoints * asked}


PROBE = Probe(
    protocol=SegKnn,
    measure=measure,
    dense=True,
    together=True,
    words=lambda p: f"k = {', '.join(map(str, p.k))} by {' and '.join(p.distances)}",
    work=_work,
)
