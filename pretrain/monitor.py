"""Watches a pretraining: loss terms, metrics.jsonl, progress, features, kNN score, and curves."""

import contextlib
import math
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from backbench import charts
from backbench.errors import BadInput
from backbench.images.image_list import ImageList
from backbench.images.preprocess import eval_geometry, to_input
from backbench.knn import knn_scores
from backbench.parallel import loading
from backbench.parallel.precision import bf16_is_quick
from backbench.pretrain.data import LoadedBatch
from backbench.pretrain.recipe import PretrainConfig, ViewsConfig
from backbench.runs import price
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag
from backbench.runs.step_metrics import Metrics, read_metrics
from backbench.runs.terminal import log

# Unit features whose standard deviation is below this share of an isotropic cloud's, or whose
# effective rank is below this one, tell images apart along at most one direction. The features of
# a random ResNet have a share of about 0.1 and a rank far above 2.
COLLAPSED_STD = 1e-3
COLLAPSED_RANK = 1.5
# CLLR's L is dead where it gives back less than this share of phi
DEAD = 0.01
KNN_IMAGES = 10_000  # the most images that are encoded for one kNN score


Terms = Mapping[str, Tensor]  # "loss" and what else a method logs, 0-dim


class RecentTerms:
    """Keeps the terms since the last row of metrics.jsonl; the next row is their mean. They stay on
    the device, as reading one waits for it, and are saved, so that a row may span a restart."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Tensor]] = []

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, parts: Sequence[Terms], device: torch.device) -> None:
        """Add one step's terms: their mean over its micro-batches."""
        row = {}
        for name in parts[0]:
            mean = torch.stack([terms[name] for terms in parts]).mean(0)
            row[name] = mean.to(device, non_blocking=True)
        self.rows.append(row)

    def first_not_finite(self) -> int | None:
        """Return the place of the first loss that is infinite or nan; wait for the device."""
        # A single read answers for all steps since the last row
        finite = torch.stack([row["loss"] for row in self.rows]).isfinite().tolist()
        return None if all(finite) else finite.index(False)

    def mean(self) -> dict[str, float]:
        """Average each term over the steps; wait for the device."""
        means = {}
        for name in self.rows[0]:
            values = torch.stack([row[name].double() for row in self.rows])
            means[name] = float(values.mean())
        return means


class RunLog:
    """Writes the rows of metrics.jsonl, on rank 0 only. A row has the mean of each term since the
    last row, the features' statistics, the images per second, and the share of the time that was
    spent waiting for batches. `shown` is what stands beside the progress."""

    def __init__(
        self, run: Path, config: PretrainConfig, rank: int, step: int, last: int
    ) -> None:
        self.metrics: Metrics | None = None
        self.progress: Progress | None = None
        self.has_knn = (
            False  # whether the step that it begins at has a kNN score already
        )
        if rank == 0:
            self.metrics = Metrics(run, from_step=step)
            for row in read_metrics(run):
                if "knn" in row and row.get("step") == step - 1:
                    self.has_knn = True
            announce(config, last)
            self.progress = Progress(run, last, config.name, done=step)
        self.batch_size = config.batch_size
        self.shown: dict[str, float] = {}
        self.left_out: set[str] = set()
        # Since the last row: when it was, moved on by pauses; seconds spent waiting; steps made
        self.since = time.monotonic()
        self.waited = 0.0
        self.made = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the time inside to that spent waiting for batches."""
        began = time.monotonic()
        yield
        self.waited += time.monotonic() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out of the training speed."""
        began = time.monotonic()
        yield
        # A row's time begins later by what was no training
        self.since += time.monotonic() - began

    def warn_of_skipped(self, parts: Sequence[LoadedBatch]) -> None:
        """Warn of each image that was left out, once."""
        for part in parts:
            for line in part.skipped:
                if line not in self.left_out:
                    log.warning("left out: %s", line)
                    self.left_out.add(line)

    def step(
        self,
        recent: RecentTerms,
        features: "Features",
        *,
        done: int,
        epoch: int,
        lr: float,
        row_due: bool,
    ) -> None:
        """Count a step, after which `done` are made; it was one of `epoch`, at the rate `lr`. Where
        a row is due, write it and forget the terms that it is the mean of."""
        self.made += 1
        if row_due and self.metrics is not None:
            # 1. What the steps came to: the only place that waits for the device.
            now = time.monotonic()
            means = recent.mean() | features.statistics()
            # 2. How fast they were, and the most memory so far in GiB: of the GPU, or of this
            #    process, which Linux counts in KiB. The clock starts anew for the next row.
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
                memory = torch.cuda.max_memory_allocated() / 2**30
            speed = self.made * self.batch_size / (now - self.since)
            waiting = self.waited / (now - self.since)
            self.since = now
            self.waited = 0.0
            self.made = 0
            # 3. What the progress line shows until the next row.
            self.shown = {
                "loss": means["loss"],
                "lr": lr,
                "img/s": speed,
                "waiting": waiting,
            }
            # 4. Rows count steps from 0: the row after step number `done` is that of step done - 1.
            about = {"images_per_s": speed, "waiting": waiting, "memory_gib": memory}
            self.metrics.write(done - 1, epoch=epoch, lr=lr, **means, **about)
            warn_if_collapsed(means, done)
        if row_due:
            recent.rows.clear()

    def knn(self, score: float | None, *, done: int, epoch: int) -> None:
        """Log the score after `done` steps, at the end of `epoch`, if there is one."""
        if score is not None and self.metrics is not None:
            self.metrics.write(done - 1, epoch=epoch, knn=score)
            log.info("epoch %d: kNN %.2f%%", epoch + 1, score)


def announce(config: PretrainConfig, last: int) -> None:
    """Say what the run will do until step `last`, and what would cost less on a CPU."""
    cheaper = ""
    if not torch.cuda.is_available():
        quick = "--fast" if bf16_is_quick("cpu") else "--fast precision=fp32"
        cheaper = f"`{quick}` or `epochs=N` costs less"
    price.announce(
        f"pretrain {config.name}",
        f"{price.plural(config.epochs, 'epoch')}, {config.batch_size} images a step",
        work={"step": last},
        cheaper=cheaper,
    )


class Features:
    """Keeps the features (N, d) that the backbone gave last in training, for `statistics`."""

    def __init__(self, backbone: nn.Module) -> None:
        self.last: Tensor | None = None
        backbone.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: object, output: Tensor) -> None:
        if module.training:  # not while the kNN score is taken
            self.last = output.detach()

    def statistics(self) -> dict[str, float]:
        if self.last is None or len(self.last) < 2:
            return {}
        return feature_statistics(self.last)


@torch.no_grad()
def feature_statistics(features: Tensor) -> dict[str, float]:
    """Measure how far features (N, d) are spread, after scaling each to length 1.

    feature_std is the mean over dimensions of the standard deviation, times sqrt(d): 1 for an
    isotropic cloud, 0 where all features are equal. effective_rank is exp of the entropy of the
    normalised singular values of the centred features (Roy and Vetterli, 2007), at most
    min(N - 1, d)."""
    z = torch.nn.functional.normalize(features.double(), dim=1)
    centred = z - z.mean(0)
    std = centred.square().mean(0).sqrt().mean() * z.shape[1] ** 0.5
    # The singular values are the roots of the eigenvalues of the smaller of X X^T and X^T X
    gram = centred @ centred.T if len(z) <= z.shape[1] else centred.T @ centred
    if not gram.isfinite().all():
        return {"feature_std": float("nan"), "effective_rank": float("nan")}
    singular = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    p = singular / singular.sum().clamp(min=1e-300)
    entropy = -torch.special.xlogy(p, p).sum()  # xlogy: 0 log 0 is 0
    return {"feature_std": float(std), "effective_rank": float(entropy.exp())}


def warn_if_collapsed(row: dict[str, float], step: int) -> None:
    """Warn where the features collapse (they are nearly equal, or on one line), and where CLLR's L
    collapses or explodes."""
    if "rank_L" in row and "kept_L" in row:
        rank = row["rank_L"]
        kept = row["kept_L"]
        # L^T L phi is further from phi than 0 is, so L has grown too large
        if kept < 0:
            log.warning(
                "step %d: CLLR's L explodes (gives %.2g of phi back); optim.lr or method.weight is"
                " too large for these features",
                step,
                kept,
            )
        elif rank < COLLAPSED_RANK or kept < DEAD:
            log.warning(
                "step %d: CLLR's L collapses (effective rank %.3g, gives %.2g of phi back);"
                " method.alpha is too large for these features",
                step,
                rank,
                kept,
            )
    if "feature_std" in row and "effective_rank" in row:
        std, rank = row["feature_std"], row["effective_rank"]
        if std < COLLAPSED_STD or rank < COLLAPSED_RANK:
            log.warning(
                "step %d: the representation collapses (feature std %.2g, effective rank %.3g)",
                step,
                std,
                rank,
            )


class KnnScore(Dataset[tuple[int, Tensor | None]]):
    """Scores a backbone by weighted kNN (Wu et al. 2018) on its own training images: of some evenly
    spaced labelled ones, every second is classified by its 20 nearest neighbours among the others.
    The score is the percentage that is right.

    Item i is (i, centre crop of the first view's size), or (i, None) where image i cannot be read,
    and is left out."""

    def __init__(
        self,
        found: ImageList,
        views: ViewsConfig,
        device: torch.device,
        workers: int = 0,
    ) -> None:
        self.found = found
        self.pixels = views.pixels
        self.device = device
        self.workers = workers
        labelled = [i for i, label in enumerate(found.labels) if label >= 0]
        self.chosen = labelled[:: max(1, math.ceil(len(labelled) / KNN_IMAGES))]
        # The centre crop keeps ImageNet's share of the image, 224 / 256; small images are taken
        # whole
        size = views.per_view[0].size
        resize = size if size <= 64 else round(size * 256 / 224)
        self.geometry = eval_geometry(resize=resize, crop=size)

    def __getitem__(self, index: int) -> tuple[int, Tensor | None]:
        # Training has refused the run by now, or was told to leave the image out
        with contextlib.suppress(BadInput):
            return index, to_input(self.geometry(self.found.open(index)), self.pixels)
        return index, None

    @torch.no_grad()
    def __call__(
        self, backbone: nn.Module, stop: StopFlag | None = None
    ) -> float | None:
        """Return the score, or None without labels and after a stop. The backbone is left as it
        was."""
        if len(self.chosen) < 4 or len(self.found.classes) < 2:
            return None
        training = backbone.training
        backbone.eval()
        try:
            features, read = self._encode(backbone, stop)
        finally:
            backbone.train(training)
        if len(read) < 4:
            return None
        labels = torch.tensor([self.found.labels[i] for i in read], device=self.device)
        table = torch.cat(features)
        bank, queries = table[::2], table[1::2]
        classes = len(self.found.classes)
        k = min(20, len(bank))
        votes = knn_scores(queries, bank, labels[::2], classes=classes, k=(k,))[k]
        return 100 * float((votes.argmax(1) == labels[1::2]).double().mean())

    def _encode(
        self, backbone: nn.Module, stop: StopFlag | None
    ) -> tuple[list[Tensor], list[int]]:
        """Return features (n, d) by batch, and the indices of their images; nothing at all once a
        stop is requested."""
        dtype = next(backbone.parameters()).dtype
        features: list[Tensor] = []
        read: list[int] = []
        size = 256
        starts = range(0, len(self.chosen), size)
        parts = [self.chosen[start : start + size] for start in starts]
        for batch in loading.batches(self, parts, workers=self.workers, collate=list):
            if stop is not None and stop.requested is not None:
                return [], []
            assert not isinstance(batch, loading.Unreadable)
            views = []
            for index, view in batch:
                if view is not None:
                    read.append(index)
                    views.append(view)
            if views:
                images = torch.stack(views).to(self.device, dtype)
                features.append(backbone(images).float())
        return features, read


def plot_curves(run: Path, name: str) -> None:
    """Draw RUN/curves.svg and .png: each logged number against the step, in a panel of its own."""
    rows = read_metrics(run)
    names: list[str] = []  # in the order of their first rows
    for row in rows:
        for key in row:
            if key not in ("step", "epoch", *names):
                names.append(key)
    if not names:
        return
    figure, axes = charts.grid(len(names), columns=3)
    for ax, key in zip(axes, names):
        points = [(row["step"] + 1, row[key]) for row in rows if key in row]
        ax.plot(*zip(*points), marker="." if len(points) < 30 else "", linewidth=1.2)
        ax.set(title=key.replace("_", " "), xlabel="step")
    figure.suptitle(name, fontsize=10)
    charts.save(figure, run / "curves")
