"""The few-label probe fits a logistic regression on k labels per class, in each of many seeded
draws of unit features. The row is the mean over the draws."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from backbench.datasets import splits
from backbench.datasets.splits import Splits
from backbench.images.image_list import ImageList
from backbench.records.store import Result
from backbench.runs.state import StopFlag
from backbench.stats import confidence
from backbench.transfer import logreg, scoring
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor, FeatureRows
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocols import FewShot
from backbench.transfer.scoring import Assignment


def refuse(p: FewShot, name: str, found: Splits) -> None:
    """BadInput if a class has fewer images than shots."""
    splits.draw(found.both(), p.shots, 0, what=f"{p.shots} shots")


def measure(
    task: Assignment[FewShot], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    features = extractor.of_splits(task.splits, task.dataset.name)
    p, both, metric = task.protocol, task.splits.both(), task.dataset.metric
    label, classes = np.asarray(task.splits.test.labels), len(both.classes)
    # The draws are the same for every checkpoint, so that checkpoints can be compared draw by draw.
    drawn = draws(both, shots=p.shots, count=p.draws, seed=task.seed)
    rows = []
    for trunk, train, val, test in zip(extractor.trunks, *features):
        bank = FeatureRows((train, val))
        predicted, gradient = predictions(
            bank, both.labels, test, drawn, classes=classes, p=p, stop=stop
        )
        values = [scoring.score(metric, one, label, classes) for one in predicted]
        by_class = label if metric == "mean_per_class" else None
        about = {"draws": values, "shots": p.shots, "labelled_from": "train+val"}
        rows += scoring.write_plain(
            task,
            trunk.checkpoint,
            {metric: (float(np.mean(values)), about)},
            {"values": np.asarray(values), "prediction": predicted.astype(np.int32)},
            ci95=confidence.of_draws(predicted == label, by_class),
            chosen={"converged": False, "gradient": gradient}
            if gradient > p.tolerance
            else None,
        )
    return rows


def draws(images: ImageList, *, shots: int, count: int, seed: int) -> list[list[int]]:
    """`count` lists of indices with `shots` images of each class; the same for every checkpoint."""
    out = []
    for i in range(count):
        chosen, _ = splits.draw(
            images, shots, seed * 1_000_003 + i, what=f"{shots} shots"
        )
        out.append(chosen)
    return out


def predictions(
    bank: FeatureRows,
    labels: Sequence[int],
    test: Tensor,
    drawn: Sequence[Sequence[int]],
    *,
    classes: int,
    p: FewShot,
    stop: StopFlag | None = None,
) -> tuple[NDArray[np.int64], float]:
    """Predict (draws, M): the class of each row of `test` (M, d) by each draw, a list of indices of
    `bank` (N, d); and the largest gradient that a fit was left with. All is in float64, because few
    labels leave nearly equal scores, whose order single precision would decide."""
    known = torch.as_tensor(labels)
    queries = F.normalize(test.double(), dim=1)
    predicted, gradient = [], 0.0
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
    measure=measure,
    metrics=lambda p, dataset: [dataset.metric],
    refuse=refuse,
    words=lambda p: f"{p.draws} draws of {p.shots} labels per class",
)
