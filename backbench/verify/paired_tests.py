"""Two checkpoints compared by kept predictions; stats/paired_differences.py has the tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from backbench.records import ap_errors
from backbench.records.predictions import Arrays, hits, load
from backbench.stats import paired_differences, training_noise
from backbench.stats.ap_errors import IMAGINED
from backbench.stats.paired_differences import Difference
from backbench.stats.training_noise import TrainingNoise


class SeedScores(NamedTuple):
    """The scores of one checkpoint's seeds on the same images."""

    # (K, N) hits of K seeds, (K, D, N) of D draws of labels each, or (K, B) the metric itself on
    # resamples of `images` images
    scores: np.ndarray
    images: int | None
    first: Arrays  # of the first seed


def of_seeds(files: Sequence[Path], metric: str) -> SeedScores | None:
    """Return the scores in the predictions of a checkpoint's seeds; None unless all are of one
    list."""
    # 1. Every file is there, and of the list of the first one.
    loaded = [load(file) for file in files]
    kept = [arrays for arrays in loaded if arrays is not None]
    if not kept or len(kept) < len(files):
        return None
    if not all(_same_list(kept[0], arrays) for arrays in kept):
        return None
    # 2. The metric on resamples where all have it, else the hits.
    name = f"bootstrap_{metric}"
    images = None
    scores = []
    if all(name in x and "images" in x for x in kept):
        images = int(kept[0]["images"])
        scores = [x[name].astype(float) for x in kept]
    else:
        for x in kept:
            right = hits(x, metric)
            if right is None:
                return None
            scores.append(right.astype(float))
    if len({score.shape for score in scores}) > 1:
        return None
    return SeedScores(np.stack(scores), images, kept[0])


def of_draws(file: Path, metric: str) -> bool:
    """Return True if the predictions in a file are those of several draws of labels."""
    one = of_seeds([file], metric)
    return one is not None and one.images is None and one.scores.ndim > 2


def classes_of(x: Arrays, metric: str) -> np.ndarray | None:
    """Return the class of each image (N,) where the metric is a mean over classes."""
    return x["label"] if metric.startswith("mean_per_class") else None


def compare(
    a: Sequence[Path],
    b: Sequence[Path],
    metric: str,
    noise: TrainingNoise | None = None,
    *,
    value: float | None = None,
) -> Difference | None:
    """Compare a - b on `metric` by the kept predictions of their seeds; None if they do not pair.

    `value` is the difference of the two numbers in percent. Where only resamples of the metric were
    kept, it stands in the middle of the interval; without it, their mean does.
    With `noise`, means over all seeds are compared, for other images and other trainings. Without
    it both need the same seeds in the same order, and seeds count like draws of labels.
    """
    # 1. The same images, scored in the same way
    x = of_seeds(a, metric)
    y = of_seeds(b, metric)
    if x is None or y is None or not _same_list(x.first, y.first):
        return None
    if (x.images is None) != (y.images is None):
        return None
    if x.scores.shape[1:] != y.scores.shape[1:]:
        return None
    if noise is None and len(a) != len(b):
        return None
    # 2. Over images: resamples of them, or each one's hits
    images = x.scores.shape[-1]
    classes = classes_of(x.first, metric)
    tested: Difference | None
    if x.images is not None:
        gaps = x.scores.mean(0) - y.scores.mean(0)
        if ap_errors.is_cost(metric):
            tested = paired_differences.of_resamples(
                gaps,
                x.images,
                value=_mean_cost(a, metric) - _mean_cost(b, metric),
                imagined=IMAGINED,
            )
        else:
            tested = paired_differences.of_resamples(gaps, x.images, value=value)
    elif noise is None and x.scores[..., 0].size > 1:
        gaps = (x.scores - y.scores).reshape(-1, images)
        tested = paired_differences.of_draws_and_images(gaps, classes)
    else:
        of_a = x.scores.reshape(-1, images).mean(0)
        of_b = y.scores.reshape(-1, images).mean(0)
        tested = paired_differences.of_images(of_a - of_b, classes)
    # 3. And over trainings
    if tested is None or noise is None:
        return tested
    return training_noise.over_trainings(tested, noise, len(a), len(b))


def _mean_cost(files: Sequence[Path], metric: str) -> float:
    """Return what a kind of error costs in the mean over seeds."""
    kept = [load(file) for file in files]
    return float(np.mean([ap_errors.value(x, metric) for x in kept if x is not None]))


def _same_list(x: Arrays, y: Arrays) -> bool:
    """Return True if both were scored on the same images in the same order, with the same
    labels."""
    if str(x["manifest"]) != str(y["manifest"]):
        return False
    both = [name for name in ("label", "labelled") if name in x and name in y]
    return all(np.array_equal(x[name], y[name]) for name in both)
