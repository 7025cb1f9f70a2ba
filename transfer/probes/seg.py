"""Linear segmentation trains a batch norm and a 1 x 1 convolution on a frozen trunk's last map.

All rates train in one pass, and images are cut once for all checkpoints. Of a grid a held-out part
of train chooses a rate, whose last iterate is scored on test without another training.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.dense import IGNORED, DenseList
from backbench.parallel.batchnorm import SyncBatchNorm
from backbench.parallel.distributed import sent, world_size
from backbench.records import predictions, store
from backbench.records.store import Result
from backbench.runs import atomic, seeding
from backbench.runs.folder import PICTURES
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag
from backbench.stats import confidence, dense_counts
from backbench.transfer import scoring
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
    best_heads,
    chosen_rate,
    train_on_tokens,
)
from backbench.transfer.protocols import Protocol, Seg
from backbench.transfer.scoring import Assignment

SHOWN = 4  # test images in a picture
SHOWN_SIDE = 192  # pixels of their height there
Shown = dict[int, np.ndarray]  # test image -> its predicted label map


class DenseHeads(TokenHeads):
    """Trains H heads with C classes on one trunk's maps of D channels, each as nn.BatchNorm2d and a
    1 x 1 nn.Conv2d would be alone under torch.optim.AdamW. The normalised map x is shared: W (scale
    x + shift) + bias is computed as (W scale) x + (W shift + bias)."""

    norm: SyncBatchNorm

    def __init__(
        self, p: Seg, classes: int, dim: int, *, seed: int, machine: Machine
    ) -> None:
        self.p, self.count, self.seed, self.machine = p, len(p.lr), seed, machine
        self.norm = SyncBatchNorm(dim, affine=False).to(machine.device)
        generator = seeding.generator(seed, "head", classes, dim)
        weight = torch.empty(classes, dim).normal_(0, p.init_std, generator=generator)
        start = {"weight": weight, "bias": torch.zeros(classes)}
        start |= {"scale": torch.ones(dim), "shift": torch.zeros(dim)}
        self.heads = copies(start, len(p.lr), machine.device)
        self.optimizer = torch.optim.AdamW(
            [{"params": list(head.values())} for head in self.heads],
            betas=(p.momentum, 0.999),
            weight_decay=p.weight_decay,
        )

    @torch.no_grad()
    def normalised(self, maps: Tensor) -> Tensor:
        """Maps (N, h, w, D) -> (N, D, h, w) in float32, by the running statistics."""
        self.norm.eval()
        return self.norm(maps.permute(0, 3, 1, 2))

    def logits(self, x: Tensor, index: int) -> Tensor:
        """Normalised maps (N, D, h, w) -> (N, C, h, w) of one head."""
        weight, bias, scale, shift = self.heads[index].values()
        return F.conv2d(x, (weight * scale)[:, :, None, None], bias + weight @ shift)

    def step(
        self, maps: Tensor, labels: Tensor, rates: Tensor, *, batch: int, **_: float
    ) -> Tensor:
        """Take one step on this rank's share of a batch: maps (n, h, w, D), labels (n, c, c).
        Returns the losses (H,), times the images of the share."""
        # 1. What all heads share
        with torch.no_grad():
            x = maps.permute(0, 3, 1, 2)
            if self.p.dropout:
                x = x * self._kept(batch, len(x)).to(x)
            self.norm.train()
            x = self.norm(x)
        # 2. Head by head, since the logits of one at the size of the labels are gigabytes
        target = labels.long()
        pixels = torch.tensor(float(target.numel() * world_size()), device=x.device)
        if self.p.average == "labelled":
            pixels = _summed((target != IGNORED).sum().float()).clamp_min(1)
        losses = []
        for index in range(self.count):
            large = F.interpolate(
                self.logits(x, index),
                labels.shape[-2:],
                mode="bilinear",
                align_corners=False,
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
        """Draw dropout's factors (mine, D, 1, 1) for the whole batch, so ranks do not matter."""
        made = self.optimizer.state.get(self.heads[0]["weight"], {}).get("step", 0)
        generator = seeding.generator(self.seed, "dropout", int(made))
        drawn = torch.rand(batch, self.norm.num_features, generator=generator)
        kept = (drawn >= self.p.dropout).float() / (1 - self.p.dropout)
        begin = batch * self.machine.rank // self.machine.world
        return kept[begin : begin + mine, :, None, None]


def _summed(x: Tensor) -> Tensor:
    """The sum over ranks."""
    if world_size() > 1:
        dist.all_reduce(x)
    return x


class SegTraining(ProbeTraining):
    """The pass of `probe_sgd` over crops of images with their label maps."""

    def _batches(self, first: int) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Maps per trunk, and labels, of this rank's share of each global batch."""
        p, machine, seed = cast(Seg, self.task.protocol), self.machine, self.task.seed
        images = cast(DenseList, self.images)
        count, last = len(images), self.steps
        shares = rank_batches(seed, count, p.batch_size, first, last, machine=machine)
        items = TrainingPairs(images, p, p.side(self.task.dataset.name), seed)
        for pixels, labels, inside in pairs(items, shares, machine):
            here = machine.device
            known = sent(inside, here)
            yield (
                forward_all(self.trunks, sent(pixels, here), tokens=True, inside=known),
                sent(labels, here),
            )


def measure(
    task: Assignment[Seg], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    """The rows of all trunks, on rank 0; the other ranks take part until the end, and have none."""
    p, trunks = task.protocol, extractor.trunks
    if p.batch_size % machine.world:
        raise BadInput(
            f"--devices: {machine.world} do not divide a batch of {p.batch_size} images"
        )
    for trunk in trunks:
        trunk.module.dilate(p.output_stride)
        trunk.module.refuse_size(p.geometry.crop, p.geometry.crop)
    # 1. All rates; one rate alone has nothing to choose, and trains on the held-out part too.
    images = task.splits.train if len(p.lr) > 1 else task.splits.both()
    classes = len(images.classes)
    heads = []
    for trunk in trunks:
        dim = trunk.module.widths[-1]
        heads.append(DenseHeads(p, classes, dim, seed=task.seed, machine=machine))
    train_on_tokens(
        [task], trunks, heads, images, machine=machine, stop=stop, kind=SegTraining
    )
    # 2. The rate, by the held-out part
    scores = None
    if len(p.lr) > 1:
        every = [list(range(len(p.lr)))] * len(trunks)
        counted, _ = Windows(task, trunks, heads, machine, stop).count("val", every)
        scores = []
        for by_rate in counted:
            scores.append([100 * float(score(counts)["miou"]) for counts in by_rate])
    finals = best_heads(p, heads, scores)
    # 3. The one look at test
    best = [[final.index] for final in finals]
    counted, shown = Windows(task, trunks, heads, machine, stop).count("test", best)
    if not machine.main:
        return []
    rows = []
    for trunk, final, (counts,), maps in zip(trunks, finals, counted, shown):
        trunk.verify()
        rows += rows_of(task, trunk, counts, chosen_rate(task, trunk, final), maps)
    store.append(task.run, rows, skip_known=True)
    return rows


def score(counts: np.ndarray) -> dict[str, np.ndarray]:
    """The scores of counts (N, 3, C) of all images together."""
    return dense_counts.scores(*counts.sum(0))


def own_images(n: int, machine: Machine) -> list[int]:
    """Pick the images that this rank counts: equally many on each, as all vote about a stop."""
    return [min(i, n - 1) for i in range(machine.rank, n + machine.rank, machine.world)]


def gathered(counts: Tensor, machine: Machine) -> np.ndarray:
    """Gather the counts (N, 3, C) of all ranks. Two ranks may have seen an image at the end of the
    list: the first one's count is used."""
    own = torch.arange(len(counts)) % machine.world == machine.rank
    return _summed((counts * own[:, None, None]).to(machine.device)).cpu().numpy()


@dataclass
class Windows:
    """Counts pixels on a split. Each image goes in windows through every trunk; logits are averaged
    where windows overlap and brought to the size of the labels."""

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
        p, machine, name = self.task.protocol, self.machine, self.task.dataset.name
        images = cast(DenseList, dict(self.task.splits.items())[split])
        classes, n = len(images.classes), len(images)
        counted = [[torch.zeros(n, 3, classes).long() for _ in of] for of in indices]
        shown: list[Shown] = [{} for _ in self.trunks]
        mine = own_images(n, machine)
        what = f"{name} {split} windows"
        progress = Progress(
            self.task.run if machine.main else None, n, what, unit="image"
        )
        items = TestPairs(images, p.side(name))
        for pixels, labels, index in pairs(items, ([(0, i)] for i in mine), machine):
            for t, (heads, maps) in enumerate(zip(self.heads, self._maps(pixels[0]))):
                x = heads.normalised(maps)
                for k, head in enumerate(indices[t]):
                    logits = self._logits(heads, head, x, *pixels.shape[-2:])
                    best = best_classes(logits, *labels.shape[-2:]).numpy()
                    counts = dense_counts.count(best, labels[0].numpy(), classes)
                    counted[t][k][int(index)] = torch.from_numpy(counts)
                    if k == 0 and machine.main and len(shown[t]) < SHOWN:
                        shown[t][int(index)] = best
            progress.advance(machine.world)
            machine.preempt(self.stop, f"at {what}")
        out = []
        for of_trunk in counted:
            out.append([gathered(counts, machine) for counts in of_trunk])
        return out, shown

    def _corners(self, height: int, width: int) -> list[tuple[int, int]]:
        crop, stride = self.task.protocol.geometry.crop, self.task.protocol.stride
        across = starts(width, crop, stride)
        return [(top, left) for top in starts(height, crop, stride) for left in across]

    def _maps(self, pixels: Tensor) -> list[Tensor]:
        """The trunks' maps of all windows of an image (3, H, W)."""
        p = self.task.protocol
        crop, corners = p.geometry.crop, self._corners(*pixels.shape[-2:])
        windows = torch.stack(
            [pixels[:, y : y + crop, x : x + crop] for y, x in corners]
        )
        parts = []
        for some in windows.to(self.machine.device).split(p.feature_batch):
            parts.append(forward_all(self.trunks, some, tokens=True))
        return [torch.cat(of_trunk) for of_trunk in zip(*parts)]

    @torch.no_grad()
    def _logits(
        self, heads: DenseHeads, head: int, of_windows: Tensor, height: int, width: int
    ) -> Tensor:
        """(C, height, width): the mean of the logits of the windows' normalised maps."""
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
    """The rows of one trunk, from its counts (N, 3, C), and the files beside them."""
    stem = task.stem(trunk.checkpoint)
    arrays = {
        name: counts[:, i].astype(np.uint32)
        for i, name in enumerate(dense_counts.NAMES)
    }
    kept = store.keep_predictions(
        task.run, stem, manifest=task.hashes["test"], **arrays
    )
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
        about = scoring.row(
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
    """A png: the test images that are shown, a row each: the image, its labels, and what is predicted."""
    images = cast(DenseList, task.splits.test)
    # One colour per class, evenly around the circle and of two brightnesses; black is ignored
    colours = np.zeros((256, 3), np.uint8)
    classes = len(images.classes)
    for n in range(classes):
        hsv = (int(255 * n / classes), 200, 255 - 90 * (n % 2))
        colours[n] = np.asarray(Image.new("HSV", (1, 1), hsv).convert("RGB"))[0, 0]
    strips = []
    for index, predicted in shown.items():
        picture, labels = images.pair(index)
        width = max(1, round(picture.width * SHOWN_SIDE / picture.height))
        strip = Image.new("RGB", (3 * width, SHOWN_SIDE))
        for n, each in enumerate(
            (np.asarray(picture), colours[labels], colours[predicted])
        ):
            strip.paste(
                Image.fromarray(each).resize((width, SHOWN_SIDE)), (n * width, 0)
            )
        strips.append(strip)
    whole = Image.new("RGB", (max(s.width for s in strips), SHOWN_SIDE * len(strips)))
    for n, strip in enumerate(strips):
        whole.paste(strip, (0, n * SHOWN_SIDE))
    png = io.BytesIO()
    whole.save(png, format="png")
    return png.getvalue()


def _work(p: Seg, name: str, splits: Splits, _: int) -> dict[str, int]:
    scored = len(splits.test) + (len(splits.val) if len(p.lr) > 1 else 0)
    return {"step": p.steps(name, len(splits.train)), "image": scored}


PROBE = Probe(
    measure=measure,
    dense=True,
    together=True,
    words=lambda p: f"{len(p.lr)} learning rates, {p.batch_size} crops a step",
    work=_work,
)
