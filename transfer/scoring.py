"""Turns predictions on test into metrics in percent with their intervals, and chooses by a score."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backbench.runs.terminal import log
from backbench.stats import confidence
from backbench.transfer.assignment import Assignment
from backbench.transfer.protocol import Protocol
from backbench.weights.checkpoint import Checkpoint


def rank_classes(logits: Tensor) -> Tensor:
    """Return the five best classes (N, min(5, C)) by logits (N, C), on the CPU; -1 where a head has
    diverged."""
    ranking = logits.topk(min(5, logits.shape[1]), dim=1).indices.cpu()
    # nan would rank before every number, and a diverged head would seem to have an opinion.
    broken = ~torch.isfinite(logits).all(1).cpu()
    ranking[broken] = -1
    return ranking


# Metrics: predictions (N,) and labels (N,) -> percent


def per_class(
    prediction: NDArray[np.integer], label: NDArray[np.integer], classes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count the right images and all images of each class, (classes,) each."""
    right = np.bincount(label[prediction == label], minlength=classes)
    total = np.bincount(label, minlength=classes)
    return right.astype(np.int64), total.astype(np.int64)


def score(
    metric: str,
    prediction: NDArray[np.integer],
    label: NDArray[np.integer],
    classes: int,
) -> float:
    """Return `top1`, or `mean_per_class` over the classes that have test images, in percent."""
    if metric == "top1":
        return 100.0 * float((prediction == label).mean())
    right, total = per_class(prediction, label, classes)
    there = total > 0
    return 100.0 * float((right[there] / total[there]).mean())


def score_ranking(
    metric: str, ranking: NDArray[np.int64], label: NDArray[np.int64], classes: int
) -> tuple[float, tuple[float, float]]:
    """Return `top1`, `top5` or `mean_per_class` of rankings (N, 5), best class first, in percent,
    with its 95% interval."""
    if metric == "top5":
        hits = (ranking == label[:, None]).any(1)
        return 100.0 * float(hits.mean()), confidence.of_hits(hits)
    prediction = ranking[:, 0]
    value = score(metric, prediction, label, classes)
    by_class = label if metric == "mean_per_class" else None
    return value, confidence.of_hits(prediction == label, by_class)


def confusion(
    prediction: NDArray[np.integer], label: NDArray[np.integer], classes: int
) -> NDArray[np.int64]:
    """Counts (classes, classes) of true by predicted class; predictions of no class are left out."""
    inside = (prediction >= 0) & (prediction < classes)
    # The pair (true, predicted) is written as one number, so that one count fills the matrix.
    pairs = label[inside] * classes + prediction[inside]
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


# Choices


def best_of(scores: Sequence[float]) -> int:
    """Return the index of the best score, the first of equal ones. Grids begin with the smallest
    rate or the strongest penalty, so a tie goes to that."""
    return max(range(len(scores)), key=lambda i: scores[i])


def warn_edge(
    task: Assignment[Protocol],
    checkpoint: Checkpoint,
    what: str,
    best: float,
    grid: Sequence[float],
    *,
    scores: Sequence[float],
) -> bool:
    """Return whether the best value is the first or last of its grid; warn if a better one may lie
    outside. `scores` in percent chose it, one for each value of `grid`."""
    edge = len(set(grid)) > 1 and best in (min(grid), max(grid))
    if not edge:
        return False
    highest = max(scores)
    as_good = {value for value, score in zip(grid, scores) if score == highest}
    # Where others of the grid score the same, or nothing can score more, none is missing
    if as_good == {best} and highest < 100:
        which = "largest" if best == max(grid) else "smallest"
        log.warning(
            f"{checkpoint.name} on {task.dataset.name}: the best {what} {best:g} is the {which} of"
            " the grid; a better one may lie outside it"
        )
    return True
