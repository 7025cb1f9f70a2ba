"""What a person watches during pretraining: are the features alive, what are they worth, what do
the curves do."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from backbench.errors import BadInput
from backbench.images.image_list import ImageList
from backbench.images.preprocess import Pixels, eval_geometry, to_input
from backbench.knn import knn_scores
from backbench.parallel import loading
from backbench.runs import atomic
from backbench.runs.step_metrics import Metrics, read_metrics
from backbench.runs.terminal import log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch.utils.tensorboard import SummaryWriter

# Unit features whose standard deviation is this part of an isotropic cloud's, or whose effective
# rank is this low, tell images apart along at most one direction. A random ResNet has about 0.1 and
# a rank far above 2.
COLLAPSED_STD, COLLAPSED_RANK = 1e-3, 1.5
DEAD = 0.01  # share of phi that CLLR's L gives back
KNN_IMAGES = 10_000  # at most so many images are encoded for one kNN score


class Features:
    """Keeps the last features (N, d) that left the backbone in training, for `statistics`."""

    def __init__(self, backbone: nn.Module) -> None:
        self.last: Tensor | None = None
        backbone.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: object, output: Tensor) -> None:
        if module.training:  # not while the kNN score is taken
            self.last = output.detach()

    def statistics(self) -> dict[str, float]:
        return feature_statistics(self.last) if self.last is not None and len(self.last) > 1 else {}


@torch.no_grad()
def feature_statistics(features: Tensor) -> dict[str, float]:
    """(N, d) -> feature_std: per-dimension standard deviation of the unit features, times sqrt(d),
    so that isotropic features have 1 and equal ones 0; effective_rank: exp of the entropy of the
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
    """Say so when all images get nearly the same features, or features along one line only.

    The same of CLLR's L.
    """
    rank_l, kept = row.get("rank_L"), row.get("kept_L")
    if rank_l is not None and kept is not None and (rank_l < COLLAPSED_RANK or kept < DEAD):
        log.warning(
            "step %d: CLLR's L collapses (effective rank %.3g, gives %.2g of phi back); "
            "method.alpha is too large for these features",
            step,
            rank_l,
            kept,
        )
    std, rank = row.get("feature_std"), row.get("effective_rank")
    if std is not None and rank is not None and (std < COLLAPSED_STD or rank < COLLAPSED_RANK):
        log.warning(
            "step %d: the representation collapses (feature std %.2g, effective rank %.3g)",
            step,
            std,
            rank,
        )


class MetricsWriter:
    """metrics.jsonl, and with `tensorboard` the same numbers as event files in RUN/tensorboard."""

    def __init__(self, run: Path, *, from_step: int, tensorboard: bool) -> None:
        self.metrics = Metrics(run, from_step=from_step)
        self.events: SummaryWriter | None = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(run / "tensorboard"), purge_step=from_step)

    def write(self, step: int, **values: float) -> None:
        self.metrics.write(step, **values)
        if self.events is not None:
            for name, value in values.items():
                self.events.add_scalar(name, value, step)
            self.events.flush()


@torch.no_grad()
def knn_score(
    backbone: nn.Module,
    found: ImageList,
    pixels: Pixels,
    *,
    size: int,
    device: torch.device,
    workers: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Percent of every second labelled training image that its 20 neighbours among the others
    classify rightly (Wu et al. 2018).

    Evenly spaced images, centre crops of `size`; None without labels, or once `stop()`. An
    unreadable image is left out, the backbone is left as it was.
    """
    labelled = [i for i, label in enumerate(found.labels) if label >= 0]
    if len(labelled) < 4 or len(found.classes) < 2:
        return None
    chosen = labelled[:: math.ceil(len(labelled) / KNN_IMAGES)]
    training = backbone.training
    backbone.eval()
    try:
        centred = _Centred(found, pixels, size)
        encoded = _encode(backbone, centred, chosen, device=device, workers=workers, stop=stop)
    finally:
        backbone.train(training)
    if encoded is None or len(encoded[1]) < 4:
        return None
    features, read = encoded
    labels = torch.tensor([found.labels[i] for i in read], device=device)
    bank, queries = features[::2], features[1::2]
    k = min(20, len(bank))
    votes = knn_scores(queries, bank, labels[::2], classes=len(found.classes), k=(k,))[k]
    return 100 * float((votes.argmax(1) == labels[1::2]).double().mean())


class _Centred(Dataset[tuple[int, Tensor | None]]):
    """An image's number and its centre crop (3, size, size), None where it cannot be read."""

    def __init__(self, found: ImageList, pixels: Pixels, size: int) -> None:
        # The share of the image that the centre crop keeps is ImageNet's 224 / 256; small images
        # are taken whole
        resize = size if size <= 64 else round(size * 256 / 224)
        self.geometry = eval_geometry(resize=resize, crop=size)
        self.found, self.pixels = found, pixels

    def __getitem__(self, index: int) -> tuple[int, Tensor | None]:
        # Training has refused the run by now, or was told to leave the image out
        with contextlib.suppress(BadInput):
            return index, to_input(self.geometry(self.found.open(index)), self.pixels)
        return index, None


def _encode(
    backbone: nn.Module,
    centred: _Centred,
    chosen: list[int],
    *,
    device: torch.device,
    workers: int,
    stop: Callable[[], bool],
) -> tuple[Tensor, list[int]] | None:
    """Features (N, d) of the chosen images that can be read, and which they are.

    None once `stop()`.
    """
    dtype = next(backbone.parameters()).dtype
    features: list[Tensor] = []
    read: list[int] = []
    parts = [chosen[start : start + 256] for start in range(0, len(chosen), 256)]
    for batch in loading.batches(centred, parts, workers=workers, collate=list):
        if stop():
            return None
        assert not isinstance(batch, loading.Unreadable)
        seen = [(index, view) for index, view in batch if view is not None]
        read += [index for index, _ in seen]
        if seen:
            views = torch.stack([view for _, view in seen])
            features.append(backbone(views.to(device, dtype)).float())
    return (torch.cat(features), read) if features else None


def plot_curves(run: Path, name: str) -> None:
    """RUN/curves.svg and .png: every logged number against the step, one small panel each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_metrics(run)
    keys = dict.fromkeys(key for row in rows for key in row)  # in the order of their first row
    names = [key for key in keys if key not in ("step", "epoch")]
    if not names:
        return
    columns = min(3, len(names))
    lines = math.ceil(len(names) / columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4 * columns, 2.4 * lines), squeeze=False)
    figure.subplots_adjust(
        left=0.06, right=0.98, bottom=0.35 / lines, top=1 - 0.3 / lines, wspace=0.25, hspace=0.4
    )
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, key in zip(axes.flat, names):
        _plot_curve(axis, rows, key)
    for axis in axes[-1]:
        axis.set_xlabel("step", fontsize=8)
    figure.suptitle(name, fontsize=10)
    # Without the date and random ids in them, two runs with equal numbers have equal files
    with matplotlib.rc_context({"svg.hashsalt": name}):
        for suffix in ("svg", "png"):
            with atomic.atomic_path(run / f"curves.{suffix}") as temporary:
                metadata = {"Date": None} if suffix == "svg" else {}
                figure.savefig(temporary, format=suffix, dpi=110, metadata=metadata)
    plt.close(figure)


def _plot_curve(axis: Axes, rows: list[dict[str, float]], key: str) -> None:
    points = [(row["step"] + 1, row[key]) for row in rows if key in row]
    axis.plot(*zip(*points), marker="." if len(points) < 30 else "", linewidth=1.2)
    axis.set_title(key.replace("_", " "), fontsize=9, loc="left")
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
