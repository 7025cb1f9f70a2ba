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

# Unit features whose standard deviation is this part of an isotropic cloud's, or whose effective
# rank is this low, tell images apart along at most one direction. A random ResNet has about 0.1 and
# a rank far above 2.
COLLAPSED_STD, COLLAPSED_RANK = 1e-3, 1.5
DEAD = 0.01  # share of phi that CLLR's L gives back
KNN_IMAGES = 10_000  # at most so many images are encoded for one kNN score


Terms = Mapping[str, Tensor]  # "loss" and what else a method logs, 0-dim


class RecentTerms:
    """Keeps the terms since the last row of metrics.jsonl, which will be their mean. They stay on
    the device, as reading one waits for it. They are saved, so that a row may span a restart."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Tensor]] = []

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, parts: Sequence[Terms], device: torch.device) -> None:
        """Add one step's terms: their mean over its micro-batches."""
        row = {}
        for name in parts[0]:
            row[name] = (
                torch.stack([terms[name] for terms in parts])
                .mean(0)
                .to(device, non_blocking=True)
            )
        self.rows.append(row)

    def first_not_finite(self) -> int | None:
        """Return the place of the first loss that is infinite or nan; waits for the device."""
        # One read for all steps since the last row
        finite = torch.stack([row["loss"] for row in self.rows]).isfinite().tolist()
        return None if all(finite) else finite.index(False)

    def mean(self) -> dict[str, float]:
        """Average each term over the steps; waits for the device."""
        means = {}
        for name in self.rows[0]:
            means[name] = float(
                torch.stack([row[name].double() for row in self.rows]).mean()
            )
        return means


class RunLog:
    """Writes rows and progress, on rank 0 only. A row has the mean of the terms since the last one,
    the features' statistics, images per second, and the share of time spent waiting for batches."""

    def __init__(
        self, run: Path, config: PretrainConfig, rank: int, step: int, last: int
    ) -> None:
        self.metrics: Metrics | None = None
        self.progress: Progress | None = None
        self.has_knn = False  # of the step that it begins at
        if rank == 0:
            self.metrics = Metrics(run, from_step=step)
            self.has_knn = any(
                "knn" in row and row.get("step") == step - 1
                for row in read_metrics(run)
            )
            quick = "--fast" if bf16_is_quick("cpu") else "--fast precision=fp32"
            dear = f"`{quick}` or `epochs=N` costs less"
            price.announce(
                f"pretrain {config.name}",
                f"{price.plural(config.epochs, 'epoch')}, {config.batch_size} images a step",
                work={"step": last},
                cheaper="" if torch.cuda.is_available() else dear,
            )
            self.progress = Progress(run, last, config.name, done=step)
        self.batch_size = config.batch_size
        self.shown: dict[str, float] = {}  # beside the progress, from the last row
        self.left_out: set[str] = set()
        self.since = time.monotonic()  # of the last row, without pauses
        self.waited, self.made = (
            0.0,
            0,
        )  # since then: seconds waiting for batches, steps

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the wait for a batch."""
        began = time.monotonic()
        yield
        self.waited += time.monotonic() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out of the training speed."""
        began = time.monotonic()
        yield
        # Time that is not training passes before the row's time begins
        self.since += time.monotonic() - began

    def warn_of_skipped(self, parts: Sequence[LoadedBatch]) -> None:
        """Name each image that was left out, once."""
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
        """Count a step: `done` are made, the last in `epoch` at `lr`. A due row resets terms."""
        self.made += 1
        if row_due and self.metrics is not None:
            # 1. What the steps came to: the only place that waits for the device.
            now = time.monotonic()
            means = recent.mean() | features.statistics()
            # 2. How fast they were, and the most memory so far: of the GPU, or of this process
            #    (Linux counts in KiB); the clock starts anew for the next row.
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
                memory = torch.cuda.max_memory_allocated() / 2**30
            speed = self.made * self.batch_size / (now - self.since)
            waiting = self.waited / (now - self.since)
            self.since, self.waited, self.made = now, 0.0, 0
            # 3. What the progress line shows until then.
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
        if self.progress is not None:
            self.progress.advance(1, **self.shown)

    def knn(self, score: float | None, *, done: int, epoch: int) -> None:
        """Log the score after `done` steps, at the end of `epoch`; None means that there is none."""
        if score is not None and self.metrics is not None:
            self.metrics.write(done - 1, epoch=epoch, knn=score)
            log.info("epoch %d: kNN %.2f%%", epoch + 1, score)


class Features:
    """Keeps the last features (N, d) that left the backbone in training, for `statistics`."""

    def __init__(self, backbone: nn.Module) -> None:
        self.last: Tensor | None = None
        backbone.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: object, output: Tensor) -> None:
        if module.training:  # not while the kNN score is taken
            self.last = output.detach()

    def statistics(self) -> dict[str, float]:
        return (
            feature_statistics(self.last)
            if self.last is not None and len(self.last) > 1
            else {}
        )


@torch.no_grad()
def feature_statistics(features: Tensor) -> dict[str, float]:
    """(N, d) -> feature_std: per-dimension standard deviation of the unit features, times sqrt(d)
    (1: isotropic, 0: all equal); effective_rank: exp of the entropy of the normalised singular
    values of the centred features (Roy and Vetterli, 2007), at most min(N - 1, d)."""
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
    """Warn of features that are nearly equal, or on one line; the same of CLLR's L."""
    rank_l, kept = row.get("rank_L"), row.get("kept_L")
    if (
        rank_l is not None
        and kept is not None
        and (rank_l < COLLAPSED_RANK or kept < DEAD)
    ):
        text = "step %d: CLLR's L collapses (effective rank %.3g, gives %.2g of phi back); "
        text += "method.alpha is too large for these features"
        log.warning(text, step, rank_l, kept)
    std, rank = row.get("feature_std"), row.get("effective_rank")
    if (
        std is not None
        and rank is not None
        and (std < COLLAPSED_STD or rank < COLLAPSED_RANK)
    ):
        text = "step %d: the representation collapses (feature std %.2g, effective rank %.3g)"
        log.warning(text, step, std, rank)


class KnnScore(Dataset[tuple[int, Tensor | None]]):
    """Classifies every second labelled training image by its 20 neighbours among the others: the
    percentage of right ones (Wu et al. 2018). The images are evenly spaced. Item i is (i, centre
    crop of the first view's size), or (i, None) where image i cannot be read, and is left out."""

    def __init__(
        self,
        found: ImageList,
        views: ViewsConfig,
        device: torch.device,
        workers: int = 0,
    ) -> None:
        self.found, self.pixels, self.device, self.workers = (
            found,
            views.pixels,
            device,
            workers,
        )
        labelled = [i for i, label in enumerate(found.labels) if label >= 0]
        self.chosen = labelled[:: max(1, math.ceil(len(labelled) / KNN_IMAGES))]
        # The share of the image that the centre crop keeps is ImageNet's 224 / 256; small images
        # are taken whole
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
        """The score, the backbone left as it was; None without labels or after a stop."""
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
        bank, queries, classes = table[::2], table[1::2], len(self.found.classes)
        k = min(20, len(bank))
        votes = knn_scores(queries, bank, labels[::2], classes=classes, k=(k,))[k]
        return 100 * float((votes.argmax(1) == labels[1::2]).double().mean())

    def _encode(
        self, backbone: nn.Module, stop: StopFlag | None
    ) -> tuple[list[Tensor], list[int]]:
        """Return features (n, d) by batch, and whose they are; nothing once a stop is requested."""
        dtype = next(backbone.parameters()).dtype
        features: list[Tensor] = []
        read: list[int] = []
        parts = [
            self.chosen[start : start + 256]
            for start in range(0, len(self.chosen), 256)
        ]
        for batch in loading.batches(self, parts, workers=self.workers, collate=list):
            if stop is not None and stop.requested is not None:
                return [], []
            assert not isinstance(batch, loading.Unreadable)
            seen = [(index, view) for index, view in batch if view is not None]
            read += [index for index, _ in seen]
            if seen:
                views = torch.stack([view for _, view in seen])
                features.append(backbone(views.to(self.device, dtype)).float())
        return features, read


def plot_curves(run: Path, name: str) -> None:
    """RUN/curves.svg and .png: every logged number against the step, one small panel each."""
    rows = read_metrics(run)
    keys = dict.fromkeys(
        key for row in rows for key in row
    )  # in the order of their first row
    names = [key for key in keys if key not in ("step", "epoch")]
    if not names:
        return
    figure, axes = charts.grid(len(names), columns=3)
    for ax, key in zip(axes, names):
        points = [(row["step"] + 1, row[key]) for row in rows if key in row]
        ax.plot(*zip(*points), marker="." if len(points) < 30 else "", linewidth=1.2)
        ax.set(title=key.replace("_", " "), xlabel="step")
    figure.suptitle(name, fontsize=10)
    charts.save(figure, run / "curves")
