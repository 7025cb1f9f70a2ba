"""The few-label probe fits a logistic regression on a few labels per class, in each of many seeded
draws of images. The row is the mean over the draws."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from backbench.datasets import splits
from backbench.datasets.splits import Splits
from backbench.images.image_list import ImageList
from backbench.records.store import Result
from backbench.requests.bounds import Count, NotNegative, Positive, Repeats
from backbench.runs.state import StopFlag
from backbench.stats import confidence
from backbench.transfer import keeping, logreg, scoring
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor, FeatureRows
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocol import Protocol


@dataclass(frozen=True, kw_only=True)
class DrawnLabels(Protocol):
    """Logistic regression on drawn labels, in many draws of them."""

    draws: Repeats = 20
    l2: NotNegative = 0.01  # as in LogReg, on features of unit length
    max_iterations: Count = 500
    tolerance: Positive = 1e-6


@dataclass(frozen=True, kw_only=True)
class FewShot(DrawnLabels):
    """The same number of labels of each class in every draw."""

    shots: Count = 2


def refuse(p: FewShot, name: str, found: Splits) -> None:
    """Raise BadInput if a class has fewer images than shots."""
    splits.draw(found.both(), p.shots, 0, what=f"{p.shots} shots")


def measure(
    task: Assignment[FewShot], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    p = task.protocol
    metric = task.dataset.metric
    features = extractor.of_splits(task.splits, task.dataset.name)
    both = task.splits.both()  # train and val: the images whose labels are drawn
    label = np.asarray(task.splits.test.labels)
    classes = len(both.classes)
    # The draws are the same for every checkpoint, so that checkpoints can be compared draw by draw.
    drawn = draws(both, shots=p.shots, count=p.draws, seed=task.seed)
    rows = []
    # `features` are of train, of val and of test, each with a tensor for each trunk
    for trunk, train, val, test in zip(extractor.trunks, *features):
        bank = FeatureRows((train, val))
        predicted, gradient = predictions(
            bank, both.labels, test, drawn, classes=classes, p=p, stop=stop
        )
        values = [scoring.score(metric, one, label, classes) for one in predicted]
        about = {"draws": values, "shots": p.shots, "labelled_from": "train+val"}
        by_class = label if metric == "mean_per_class" else None
        chosen = None
        if gradient > p.tolerance:
            chosen = {"converged": False, "gradient": gradient}
        rows += keeping.write_plain(
            task,
            trunk.checkpoint,
            {metric: (float(np.mean(values)), about)},
            {"values": np.asarray(values), "prediction": predicted.astype(np.int32)},
            ci95=confidence.of_draws(predicted == label, by_class),
            chosen=chosen,
        )
    return rows


def draws(images: ImageList, *, shots: int, count: int, seed: int) -> list[list[int]]:
    """Return `count` lists of indices with `shots` images of each class."""
    out = []
    for i in range(count):
        chosen, _ = splits.draw(
            images, shots, seed_of_draw(seed, i), what=f"{shots} shots"
        )
        out.append(chosen)
    return out


def seed_of_draw(seed: int, draw: int) -> int:
    """Return the seed by which a draw ranks the images of a class."""
    return seed * 1_000_003 + draw


def predictions(
    bank: FeatureRows,
    labels: Sequence[int],
    test: Tensor,
    drawn: Sequence[Sequence[int]],
    *,
    classes: int,
    p: DrawnLabels,
    stop: StopFlag | None = None,
) -> tuple[NDArray[np.int64], float]:
    """Fit each draw, a list of indices of `bank` (N, d), on features of unit length. Return the
    predicted classes of `test` (M, d) by each, (draws, M), and the largest gradient that a fit was
    left with."""
    # All is in float64: few labels leave nearly equal scores, whose order single precision would
    # decide.
    known = torch.as_tensor(labels)
    queries = F.normalize(test.double(), dim=1)
    predicted = []
    gradient = 0.0
    for indices in drawn:
        if stop is not None:
            stop.end_here("between two draws")
        index = torch.as_tensor(indices)
        features = F.normalize(bank.take(index).double(), dim=1)
        fitted = logreg.fit(
            [(features, known[index])],
            classes=classes,
            l2=p.l2,
            dtype=torch.float64,
            max_iterations=p.max_iterations,
            tolerance=p.tolerance,
        )
        gradient = max(gradient, fitted.gradient)
        predicted.append(fitted.logits(queries).argmax(1).numpy())
    return np.stack(predicted), gradient


PROBE = Probe(
    protocol=FewShot,
    measure=measure,
    metrics=lambda p, dataset: [dataset.metric],
    refuse=refuse,
    words=lambda p: f"{p.draws} draws of {p.shots} labels per class",
)
