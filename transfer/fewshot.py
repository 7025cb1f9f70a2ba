"""k labels per class: logistic regression on frozen features of unit length, many seeded draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from backbench.datasets import splits
from backbench.images.image_list import ImageList
from backbench.runs.state import StopFlag
from transfer import logreg
from transfer.feature_rows import FeatureRows


def draws(images: ImageList, *, shots: int, count: int, seed: int) -> list[list[int]]:
    """`count` lists of indices with `shots` images of each class; the same for every checkpoint."""
    out = []
    for i in range(count):
        chosen, _ = splits.draw(images, shots, seed * 1_000_003 + i, what=f"{shots} shots")
        out.append(chosen)
    return out


def predictions(
    bank: FeatureRows,
    labels: Sequence[int],
    test: Tensor,
    chosen: Sequence[Sequence[int]],
    *,
    classes: int,
    l2: float,
    max_iterations: int,
    tolerance: float,
    stop: StopFlag | None = None,
) -> NDArray[np.int64]:
    """(draws, M): the class of each of `test` (M, d), in each draw; `chosen` indexes `bank` (N, d)
    and `labels`.

    In float64 throughout: so few labels leave nearly equal scores,
    whose order single precision would decide.
    """
    known = torch.as_tensor(labels)
    queries = F.normalize(test.double(), dim=1)
    found = []
    for indices in chosen:
        if stop is not None:
            stop.end_here("between two draws")
        index = torch.as_tensor(indices)
        features = F.normalize(bank.take(index).double(), dim=1)
        fitted = logreg.fit(
            [(features, known[index])],
            classes=classes,
            l2=l2,
            dtype=torch.float64,
            max_iterations=max_iterations,
            tolerance=tolerance,
        )
        found.append(fitted.logits(queries).argmax(1).numpy())
    return np.stack(found)
