"""Two checkpoints compared by kept predictions; stats/paired_differences.py has the tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from backbench.records.predictions import Arrays, hits, load
from backbench.stats import paired_differences, training_noise
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
    """The scores in the predictions of a checkpoint's seeds; None unless all are of one list."""
    kept = [arrays for arrays in map(load, files) if arrays is not None]
    if (
        not kept
        or len(kept) < len(files)
        or not all(_same_list(kept[0], x) for x in kept)
    ):
        return None
    name, images = f"bootstrap_{metric}", None
    if all({name, "images"} <= x.keys() for x in kept):
        scores, images = [x[name].astype(float) for x in kept], int(kept[0]["images"])
    else:
        right = [hits(x, metric) for x in kept]
        scores = [x.astype(float) for x in right if x is not None]
    if len(scores) < len(kept) or len({x.shape for x in scores}) > 1:
        return None
    return SeedScores(np.stack(scores), images, kept[0])


def classes_of(x: Arrays, metric: str) -> np.ndarray | None:
    """The class of each image (N,) where the metric is a mean over classes."""
    return x["label"] if metric.startswith("mean_per_class") else None


def compare(
    a: Sequence[Path],
    b: Sequence[Path],
    metric: str,
    noise: TrainingNoise | None = None,
) -> Difference | None:
    """Compare a - b on `metric` by the kept predictions of their seeds; None if they do not pair.

    With `noise`, means over all seeds are compared, for other images and other trainings. Without
    it both need the same seeds in the same order, and seeds count like draws of labels.
    """
    # 1. The same images, scored in the same way
    x, y = of_seeds(a, metric), of_seeds(b, metric)
    if x is None or y is None or not _same_list(x.first, y.first):
        return None
    if (x.images is None) != (y.images is None) or x.scores.shape[1:] != y.scores.shape[
        1:
    ]:
        return None
    if noise is None and len(a) != len(b):
        return None
    # 2. Over images: resamples of them, or each one's hits
    images, classes = x.scores.shape[-1], classes_of(x.first, metric)
    tested: Difference | None
    if x.images is not None:
        tested = paired_differences.of_resamples(
            x.scores.mean(0) - y.scores.mean(0), x.images
        )
    elif noise is None and x.scores[..., 0].size > 1:
        d = (x.scores - y.scores).reshape(-1, images)
        tested = paired_differences.of_draws_and_images(d, classes)
    else:
        of_a, of_b = (s.scores.reshape(-1, images).mean(0) for s in (x, y))
        tested = paired_differences.of_images(of_a - of_b, classes)
    # 3. And over trainings
    if tested is None or noise is None:
        return tested
    return training_noise.over_trainings(tested, noise, len(a), len(b))


def _same_list(x: Arrays, y: Arrays) -> bool:
    """True if both were scored on the same images in the same order, with the same labels."""
    if str(x["manifest"]) != str(y["manifest"]):
        return False
    both = [name for name in ("label", "labelled") if name in x and name in y]
    return all(np.array_equal(x[name], y[name]) for name in both)
