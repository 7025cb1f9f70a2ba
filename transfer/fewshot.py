"""k labels per class: logistic regression on frozen features of unit length, many seeded draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.datasets import splits
from backbench.images.files import ImageList
from backbench.runs.state import StopFlag
from transfer import logreg, metrics


def draws(images: ImageList, *, shots: int, count: int, seed: int) -> list[list[int]]:
    """`count` lists of indices with `shots` images of each class; the same for every checkpoint."""
    out = []
    for i in range(count):
        chosen, _ = splits.draw(images, shots, seed * 1_000_003 + i, what=f"{shots} shots")
        out.append(chosen)
    return out


def accuracies(
    bank: Tensor,
    labels: Sequence[int],
    test: Tensor,
    test_labels: Sequence[int],
    chosen: Sequence[Sequence[int]],
    *,
    metric: str,
    classes: int,
    l2: float,
    max_iterations: int,
    tolerance: float,
    stop: StopFlag | None = None,
) -> list[float]:
    """One value in percent per draw: `chosen` indexes `bank` (N, d) and
    `labels`; all of `test` (M, d) is scored.

    In float64 throughout: so few labels leave nearly equal scores,
    whose order single precision would decide.
    """
    truth, known = np.asarray(test_labels), torch.as_tensor(labels)
    queries = F.normalize(test.double(), dim=1)
    values = []
    for indices in chosen:
        if stop is not None:
            stop.end_here("between two draws")
        index = torch.as_tensor(indices)
        features = F.normalize(bank[index].double(), dim=1)
        fitted = logreg.fit(
            [(features, known[index])],
            classes=classes,
            l2=l2,
            dtype=torch.float64,
            max_iterations=max_iterations,
            tolerance=tolerance,
        )
        prediction = fitted.logits(queries).argmax(1).numpy()
        values.append(metrics.score(metric, prediction, truth, classes))
    return values
