"""Kept predictions scored on resamples of their test list: the same for all rows and columns."""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from backbench.records.predictions import Arrays, hits, load
from backbench.runs import seeding
from backbench.stats import confidence, resampling
from backbench.verify.paired_tests import classes_of


def moved(files: Sequence[Path], metric: str) -> np.ndarray | None:
    """Return how the mean of these files (one for each seed) moves on resamples of their test list.

    Returns its value on each resample, in percent, minus the mean over resamples:
    (resampling.COUNT,). None if a file does not tell.
    """
    by_file = []
    for file in files:
        arrays = load(file)
        values = None if arrays is None else of_arrays(arrays, metric)
        if values is None:
            return None
        by_file.append(values)
    if not by_file:
        return None
    mean = np.mean(by_file, axis=0)
    return mean - mean.mean()


def value_again(x: Arrays, metric: str) -> float | None:
    """Return the value that these predictions give, in percent; None if they do not tell it."""
    right = hits(x, metric)
    if right is None:
        return None
    return 100 * float((np.atleast_2d(right) @ weights(x, metric)).mean())


def of_arrays(x: Arrays, metric: str) -> np.ndarray | None:
    """Return the values of one file in percent on each resample, with the spread of the
    population."""
    drawn = x.get(f"bootstrap_{metric}")
    if drawn is not None:
        drawn = drawn[: resampling.COUNT].astype(float)
        are_enough = len(drawn) == resampling.COUNT and np.isfinite(drawn).all()
        if not are_enough or "images" not in x:
            return None
        return drawn * resampling.widening(int(x["images"]))
    right = hits(x, metric)
    if right is None:
        return None
    right = np.atleast_2d(right)
    manifest = str(x["manifest"])
    draws_seed = seeding.seed_of("draws", manifest, len(right))
    counts = _image_counts(manifest, right.shape[1])
    return 100 * resampling.resampled_means(
        right, weights(x, metric), counts, draws_seed
    )


def weights(x: Arrays, metric: str) -> np.ndarray:
    """Return the weight of each image (N,): equal, or those of a mean of class means."""
    per_image = x["prediction"] if "prediction" in x else x["hits5"]
    return confidence.weights(per_image.shape[-1], classes_of(x, metric))


def images_of(files: Sequence[Path], metric: str) -> float:
    """Return of how many test images the value of these files is the mean; nan if they do not tell.

    Of a mean of class means it is the number of images that would count as much each, in the root
    mean square."""
    kept = load(files[0]) if files else None
    if kept is None:
        return np.nan
    if f"bootstrap_{metric}" in kept:
        return float(kept["images"]) if "images" in kept else np.nan
    return float((weights(kept, metric) ** 2).mean() ** -0.5)


@functools.lru_cache(maxsize=4)
def _image_counts(manifest: str, images: int) -> np.ndarray:
    """Return the resamples of one test list, kept for the columns that share it."""
    return resampling.image_counts(seeding.seed_of("images", manifest, images), images)
