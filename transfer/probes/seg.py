"""Linear segmentation trains a batch norm and a 1 x 1 convolution on a frozen trunk's last map.

All rates train in one pass, and images are cut once for all checkpoints. With a grid, a held-out
part of train chooses a rate, and its last iterate is scored on test without another training.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from pydantic import Field
from torch import Tensor

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.dense import IGNORED, DenseList
from backbench.parallel.batchnorm import SyncBatchNorm
from backbench.parallel.distributed import sent, world_size
from backbench.records import predictions, store
from backbench.records.store import Result
from backbench.requests.bounds import Count, NotNegative, Positive
from backbench.runs import atomic, seeding
from backbench.runs.folder import PICTURES
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag
from backbench.stats import confidence, dense_counts
from backbench.transfer import keeping
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.batches import rank_batches
from backbench.transfer.features.dense_views import (
    TestPairs,
    TrainingPairs,
    best_classes,
    pairs,
    starts,
)
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.features.frozen import FrozenTrunk, forward_all
from backbench.transfer.heads import TokenHeads, copies
from backbench.transfer.probes.kind import Probe
from backbench.transfer.probes.sgd import (
    ProbeTraining,
    TokenProbe,
    best_heads,
    chosen_rate,
    train_on_tokens,
)
from backbench.transfer.protocol import (
    CropAugment,
    Protocol,
)

SHOWN = 4  # test images in a picture
SHOWN_SIDE = 192  # pixels of their height there
Shown = dict[int, np.ndarray]  # test image -> its predicted label map


@dataclass(frozen=True, kw_only=True)
class Seg(TokenProbe):
    """A batch norm and a 1 x 1 convolution on the last map. `geometry.resize` is the shorter side of
    an image, `geometry.crop` the side of a training crop and of a test window."""

    augment: CropAugment | None = None  # pairs are cut by the keys below
    stride: Count  # pixels from one test window to the next
    # The shorter side on the datasets that have another one
    sides: dict[str, Count] = field(default_factory=dict)
    # The range of factors on the shorter side in training
    scale: tuple[Positive, Positive] = (0.5, 2.0)
    # The largest share of a crop's labelled pixels that one class may have
    most_of_a_class: Annotated[float, Field(gt=0, le=1)] = 0.75
    hue: NotNegative = 0.1  # turns of the colour circle, at most
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the map's channels
    output_stride: Literal[8, 16, 32] = 16  # of a ResNet, by dilation
    # The sum of the pixels' losses is divided by the number of all pixels, or of the labelled ones.
    average: Literal["all", "labelled"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer != "adamw" or self.augment is not None:
            raise ValueError("segmentation has `optimizer: adamw`, and no `augment`")
        smallest = min([self.geometry.resize, *self.sides.values()])
        if not self.stride <= self.geometry.crop <= smallest:
            raise ValueError(
                "geometry.crop may be at most resize, stride at most geometry.crop"
            )

    def side(self, dataset: str) -> int:
        """Return the shorter side of a dataset's images, in pixels."""
        return self.sides.get(dataset, self.geometry.resize)


class DenseHeads(TokenHeads):
    """Trains H heads with C classes on one trunk's maps of D channels. Each trains as nn.BatchNorm2d
    and a 1 x 1 nn.Conv2d would alone under torch.optim.AdamW. All heads share the normalised map x:
    W (scale x + shift) + bias is computed as (W scale) x + (W shift + bias)."""

    norm: SyncBatchNorm

    def __init__(
        self, p: Seg, classes: int, dim: int, *, seed: int, machine: Machine
    ) -> None:
        self.p = p
        self.count = len(p.lr)
        self.seed = seed
        self.machine = machine
        self.norm = SyncBatchNorm(dim, affine=False).to(machine.device)
        generator = seeding.generator(seed, "head", classes, dim)
        weight = torch.empty(classes, dim).normal_(0, p.init_std, generator=generator)
        start = {
            "weight": weight,
            "bias": torch.zeros(classes),
            "scale": torch.ones(dim),
            "shift": torch.zeros(dim),
        }
        self.heads = copies(start, len(p.lr), machine.device)
        self.optimizer = torch.optim.AdamW(
            [{"params": list(head.values())} for head in self.heads],
            betas=(p.momentum, 0.999),
            weight_decay=p.weight_decay,
        )

    @torch.no_grad()
    def normalised(self, maps: Tensor) -> Tensor:
        """Return maps (N, h, w, D) as (N, D, h, w) in float32, normalised by the running statistics."""
        self.norm.eval()
        return self.norm(maps.permute(0, 3, 1, 2))

    def logits(self, x: Tensor, index: int) -> Tensor:
        """Return the logits (N, C, h, w) of one head for normalised maps (N, D, h, w)."""
        weight, bias, scale, shift = self.heads[index].values()
        return F.conv2d(x, (weight * scale)[:, :, None, None], bias + weight @ shift)

    def step(
        self, maps: Tensor, labels: Tensor, rates: Tensor, *, batch: int, **_: float
    ) -> Tensor:
        """Take one step on this rank's share of a batch: maps (n, h, w, D), labels (n, c, c).
        Return this rank's part of the mean losses (H,), times the images of the whole batch."""
        # 1. The normalised map, which all heads share
        with torch.no_grad():
            x = maps.permute(0, 3, 1, 2)
            if self.p.dropout:
                x = x * self._kept(batch, len(x)).to(x)
            self.norm.train()
            x = self.norm(x)
        # 2. The number of pixels, on all ranks, by which the sum of losses is divided
        target = labels.long()
        if self.p.average == "labelled":
            pixels = _summed((target != IGNORED).sum().float()).clamp_min(1)
        else:
            pixels = torch.tensor(float(target.numel() * world_size()), device=x.device)
        # 3. Head by head, since the logits of one at the size of the labels are gigabytes
        losses = []
        for index in range(self.count):
            logits = self.logits(x, index)
            large = F.interpolate(
                logits, labels.shape[-2:], mode="bilinear", align_corners=False
            )
            summed = F.cross_entropy(
                large, target, ignore_index=IGNORED, reduction="sum"
            )
            loss = summed / pixels
            loss.backward()
            losses.append(loss.detach() * batch)
        self.descend(rates)
        return torch.stack(losses)

    def _kept(self, batch: int, mine: int) -> Tensor:
        """Draw dropout's factors, and return those (mine, D, 1, 1) of this rank's images."""
        # They are drawn for the whole batch, and by the number of steps, so that they depend
        # neither on the number of ranks nor on where a training was stopped.
        of_weight = self.optimizer.state.get(self.heads[0]["weight"], {})
        steps = int(of_weight.get("step", 0))
        generator = seeding.generator(self.seed, "dropout", steps)
        drawn = torch.rand(batch, self.norm.num_features, generator=generator)
        kept = (drawn >= self.p.dropout).float() / (1 - self.p.dropout)
        begin = batch * self.machine.rank // self.machine.world
        return kept[begin : begin + mine, :, None, None]


def _summed(x: Tensor) -> Tensor:
    """Sum over ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(x)
    return x


class SegTraining(ProbeTraining):
    """The training pass of the SGD probe, over crops of images with their label maps."""

    def _batches(self, first: int) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Yield the maps per trunk and the labels of this rank's share of each global batch."""
        p = cast(Seg, self.task.protocol)
        images = cast(DenseList, self.images)
        machine, seed = self.machine, self.task.seed
        shares = rank_batches(
            seed, len(images), p.batch_size, first, self.steps, machine=machine
        )
        items = TrainingPairs(
            images,
            side=p.side(self.task.dataset.name),
            scale=p.scale,
            crop=p.geometry.crop,
            most_of_a_class=p.most_of_a_class,
            hue=p.hue,
            seed=seed,
        )
        here = machine.device
        for pixels, labels, inside in pairs(items, shares, machine):
            maps = forward_all(
                self.trunks, sent(pixels, here), tokens=True, inside=sent(inside, here)
            )
            yield maps, sent(labels, here)


def measure(
    task: Assignment[Seg], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    """Return the rows of all trunks, on rank 0. The other ranks take part until the end, and return
    none."""
    p, trunks = task.protocol, extractor.trunks
    if p.batch_size % machine.world:
        raise BadInput(
            f"--devices: {machine.world} do not divide a batch of {p.batch_size} images"
        )
    for trunk in trunks:
        trunk.module.dilate(p.output_stride)
        trunk.module.refuse_size(p.geometry.crop, p.geometry.crop)
    # 1. All rates train. One rate alone has nothing to choose, and trains on the held-out part too.
    images = task.splits.train if len(p.lr) > 1 else task.splits.both()
    classes = len(images.classes)
    heads = []
    for trunk in trunks:
        dim = trunk.module.widths[-1]
        heads.append(DenseHeads(p, classes, dim, seed=task.seed, machine=machine))
    train_on_tokens(
        [task], trunks, heads, images, machine=machine, stop=stop, kind=SegTraining
    )
    # 2. The held-out part chooses the rate.
    windows = Windows(task, trunks, heads, machine, stop)
    scores = None
    if len(p.lr) > 1:
        every = [list(range(len(p.lr)))] * len(trunks)
        counted, _ = windows.count("val", every)
        scores = []
        for by_rate in counted:
            scores.append([100 * float(score(counts)["miou"]) for counts in by_rate])
    finals = best_heads(p, heads, scores)
    # 3. The one look at test
    best = [[final.index] for final in finals]
    counted, shown = windows.count("test", best)
    if not machine.main:
        return []
    rows = []
    for trunk, final, (counts,), maps in zip(trunks, finals, counted, shown):
        trunk.verify()
        rows += rows_of(task, trunk, counts, chosen_rate(task, trunk, final), maps)
    store.append(task.run, rows, skip_known=True)
    return rows


def score(counts: np.ndarray) -> dict[str, np.ndarray]:
    """Score the counts (N, 3, C) of all images together."""
    return dense_counts.scores(*counts.sum(0))


def own_images(n: int, machine: Machine) -> list[int]:
    """List the images that this rank counts. All ranks have equally many, because all vote on a
    stop after each; at the end of the list two may have the same."""
    return [min(i, n - 1) for i in range(machine.rank, n + machine.rank, machine.world)]


def gathered(counts: Tensor, machine: Machine) -> np.ndarray:
    """Gather the counts (N, 3, C) of all ranks."""
    # Image i is counted by rank i mod world. Whoever else has seen it has only padded a list.
    own = torch.arange(len(counts)) % machine.world == machine.rank
    return _summed((counts * own[:, None, None]).to(machine.device)).cpu().numpy()


@dataclass
class Windows:
    """Counts pixels on a split. Each image goes in windows through every trunk. Logits are averaged
    where windows overlap, and then brought to the size of the labels."""

    task: Assignment[Seg]
    trunks: Sequence[FrozenTrunk]
    heads: Sequence[DenseHeads]
    machine: Machine
    stop: StopFlag

    def count(
        self, split: str, indices: Sequence[Sequence[int]]
    ) -> tuple[list[list[np.ndarray]], list[Shown]]:
        """Return per trunk, for each head at its `indices`, the counts (N, 3, C); and the first
        head's label maps of the first images of rank 0."""
        p, name = self.task.protocol, self.task.dataset.name
        machine = self.machine
        images = cast(DenseList, dict(self.task.splits.items())[split])
        n = len(images)
        classes = len(images.classes)
        counted = [[torch.zeros(n, 3, classes).long() for _ in of] for of in indices]
        shown: list[Shown] = [{} for _ in self.trunks]
        what = f"{name} {split} windows"
        progress = Progress(
            self.task.run if machine.main else None, n, what, unit="image"
        )
        items = TestPairs(images, p.side(name))
        one_by_one = ([(0, i)] for i in own_images(n, machine))
        for pixels, labels, index in pairs(items, one_by_one, machine):
            place = int(index)
            known = labels[0].numpy()
            of_trunks = self._maps(pixels[0])
            for t, (heads, maps) in enumerate(zip(self.heads, of_trunks)):
                x = heads.normalised(maps)
                for k, head in enumerate(indices[t]):
                    logits = self._logits(heads, head, x, *pixels.shape[-2:])
                    best = best_classes(logits, *known.shape).numpy()
                    counts = dense_counts.count(best, known, classes)
                    counted[t][k][place] = torch.from_numpy(counts)
                    if k == 0 and machine.main and len(shown[t]) < SHOWN:
                        shown[t][place] = best
            progress.advance(machine.world)
            machine.preempt(self.stop, f"at {what}")
        out = []
        for of_trunk in counted:
            out.append([gathered(counts, machine) for counts in of_trunk])
        return out, shown

    def _corners(self, height: int, width: int) -> list[tuple[int, int]]:
        """List the upper left corners of an image's windows."""
        crop, stride = self.task.protocol.geometry.crop, self.task.protocol.stride
        across = starts(width, crop, stride)
        return [(top, left) for top in starts(height, crop, stride) for left in across]

    def _maps(self, pixels: Tensor) -> list[Tensor]:
        """Return the trunks' maps of all windows of an image (3, H, W)."""
        p = self.task.protocol
        crop = p.geometry.crop
        windows = []
        for y, x in self._corners(*pixels.shape[-2:]):
            windows.append(pixels[:, y : y + crop, x : x + crop])
        sent_windows = torch.stack(windows).to(self.machine.device)
        parts = []
        for some in sent_windows.split(p.feature_batch):
            parts.append(forward_all(self.trunks, some, tokens=True))
        return [torch.cat(of_trunk) for of_trunk in zip(*parts)]

    @torch.no_grad()
    def _logits(
        self, heads: DenseHeads, head: int, of_windows: Tensor, height: int, width: int
    ) -> Tensor:
        """Return the logits (C, height, width) of an image, by the normalised maps of its windows:
        the mean of those of the windows that a pixel lies in."""
        crop = self.task.protocol.geometry.crop
        small = heads.logits(of_windows, head)
        total = small.new_zeros(small.shape[1], height, width)
        times = small.new_zeros(height, width)
        for (y, x), window in zip(self._corners(height, width), small):
            large = F.interpolate(
                window[None], (crop, crop), mode="bilinear", align_corners=False
            )
            total[:, y : y + crop, x : x + crop] += large[0]
            times[y : y + crop, x : x + crop] += 1
        return total / times


def rows_of(
    task: Assignment[Protocol],
    trunk: FrozenTrunk,
    counts: np.ndarray,
    chosen: Mapping[str, object],
    shown: Shown,
) -> list[Result]:
    """Make the rows of one trunk from its counts (N, 3, C), and write the files beside them."""
    stem = task.stem(trunk.checkpoint)
    arrays = {}
    for i, name in enumerate(dense_counts.NAMES):
        arrays[name] = counts[:, i].astype(np.uint32)
    kept = predictions.keep(task.run, stem, manifest=task.hashes["test"], **arrays)
    file = f"{PICTURES}/{stem}.png"
    atomic.write_bytes(task.run / file, _montage(task, shown))
    drawn = predictions.load(task.run / kept)
    assert drawn is not None, "counts that were just written are gone"
    rows = []
    for metric, share in score(counts).items():
        ci95 = None
        if metric in dense_counts.COVERED:
            resampled = drawn[f"bootstrap_{metric}"] / 100
            ci95 = confidence.of_resamples(float(share), resampled, len(counts))
        about = keeping.row(
            task,
            trunk.checkpoint,
            metric=metric,
            value=100 * float(share),
            ci95=ci95,
            chosen=chosen,
            provenance={
                "predictions": kept,
                "picture": file,
                "trunk_sha256": trunk.state,
                "map_stride": trunk.module.strides[-1],
            },
        )
        rows.append(about)
    return rows


def _montage(task: Assignment[Protocol], shown: Shown) -> bytes:
    """Draw a png with a row for each test image of `shown`: the image, its labels, the prediction."""
    images = cast(DenseList, task.splits.test)
    classes = len(images.classes)
    # 1. A colour per class, evenly around the circle and of two brightnesses. What is ignored stays
    #    black.
    colours = np.zeros((256, 3), np.uint8)
    for n in range(classes):
        hsv = (int(255 * n / classes), 200, 255 - 90 * (n % 2))
        colours[n] = np.asarray(Image.new("HSV", (1, 1), hsv).convert("RGB"))[0, 0]
    # 2. A strip per image
    strips = []
    for index, predicted in shown.items():
        picture, labels = images.pair(index)
        width = max(1, round(picture.width * SHOWN_SIDE / picture.height))
        strip = Image.new("RGB", (3 * width, SHOWN_SIDE))
        columns = (np.asarray(picture), colours[labels], colours[predicted])
        for n, each in enumerate(columns):
            small = Image.fromarray(each).resize((width, SHOWN_SIDE))
            strip.paste(small, (n * width, 0))
        strips.append(strip)
    # 3. The strips below one another
    whole = Image.new("RGB", (max(s.width for s in strips), SHOWN_SIDE * len(strips)))
    for n, strip in enumerate(strips):
        whole.paste(strip, (0, n * SHOWN_SIDE))
    png = io.BytesIO()
    whole.save(png, format="png")
    return png.getvalue()


def _work(p: Seg, name: str, splits: Splits, _: int) -> dict[str, int]:
    scored = len(splits.test)
    if len(p.lr) > 1:
        scored += len(splits.val)
    return {"step": p.steps(name, len(splits.train)), "image": scored}


PROBE = Probe(
    protocol=Seg,
    measure=measure,
    dense=True,
    together=True,
    words=lambda p: f"{len(p.lr)} learning rates, {p.batch_size} crops a step",
    work=_work,
)
