"""Two checkpoints compared by the predictions that they kept (docs/results.md).

This file reads the predictions and pairs them; backbench/stats/paired_differences.py tests them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from backbench.results.predictions import hits, load
from backbench.stats import paired_differences, training_noise
from backbench.stats.paired_differences import Difference
from backbench.stats.training_noise import TrainingNoise

if TYPE_CHECKING:
    import numpy as np

    from backbench.results.predictions import Arrays


def compare(a: Sequence[Path], b: Sequence[Path], metric: str) -> Difference | None:
    """a - b on `metric`, from the kept predictions of the same seeds in the same order; None if
    they do not pair.

    Resamples of several seeds are averaged one by one. Hits of several seeds and of several draws
    of labels stand side by side: the seeds vary, and so do the images.
    """
    import numpy as np

    pairs = _paired_files(a, b)
    if not pairs:
        return None
    # 1. The metric itself on resamples of the images
    resampled = _resampled(pairs, f"bootstrap_{metric}")
    if resampled is not None:
        return paired_differences.of_resamples(resampled, int(pairs[0][0]["images"]))
    # 2. Or what was predicted for each image: (draws, images) of each seed
    differences = []
    for x, y in pairs:
        hits_x, hits_y = hits(x, metric), hits(y, metric)
        if hits_x is None or hits_y is None or hits_x.shape != hits_y.shape:
            return None
        differences.append(np.atleast_2d(hits_x.astype(float) - hits_y))
    if len({d.shape[1] for d in differences}) > 1:
        return None
    classes = pairs[0][0]["label"] if metric.startswith("mean_per_class") else None
    d = np.concatenate(differences)
    if len(d) == 1:
        return paired_differences.of_images(d[0], classes)
    return paired_differences.of_draws_and_images(d, classes)


class RepeatedScores(NamedTuple):
    """The scores of several trainings of one checkpoint on the same images."""

    scores: np.ndarray  # (K, N) hits, or (K, B) the metric on resamples of `images` images
    images: int | None
    classes: np.ndarray | None  # (N,) where the metric is a mean over classes
    first: Arrays


def stacked(files: Sequence[Path], metric: str) -> RepeatedScores | None:
    """The trainings that kept these files; None where they are not of one test list."""
    import numpy as np

    every = [load(file) for file in files]
    kept = [arrays for arrays in every if arrays is not None]
    if not kept or len(kept) < len(every) or not all(_same_list(kept[0], x) for x in kept):
        return None
    name, images = f"bootstrap_{metric}", None
    if all({name, "images"} <= x.keys() for x in kept):
        scores, images = [x[name].astype(float) for x in kept], int(kept[0]["images"])
    else:
        right = [hits(x, metric) for x in kept]
        scores = [x.astype(float) for x in right if x is not None and x.ndim == 1]
    if len(scores) < len(kept) or len({x.shape for x in scores}) > 1:
        return None
    classes = kept[0]["label"] if metric.startswith("mean_per_class") else None
    return RepeatedScores(np.stack(scores), images, classes, kept[0])


def compare_trained(
    a: Sequence[Path], b: Sequence[Path], metric: str, noise: TrainingNoise
) -> Difference | None:
    """a - b on `metric`, means over all trainings of each, for other images and other trainings;
    None if they do not pair."""
    x, y = stacked(a, metric), stacked(b, metric)
    if x is None or y is None or not _same_list(x.first, y.first):
        return None
    if x.images != y.images or x.scores.shape[1:] != y.scores.shape[1:]:
        return None
    d = x.scores.mean(0) - y.scores.mean(0)
    if x.images is None:
        over_images: Difference | None = paired_differences.of_images(d, x.classes)
    else:
        over_images = paired_differences.of_resamples(d, x.images)
    if over_images is None:
        return None
    return training_noise.over_trainings(over_images, noise, len(a), len(b))


def _paired_files(a: Sequence[Path], b: Sequence[Path]) -> list[tuple[Arrays, Arrays]]:
    """The arrays of a[i] beside those of b[i]; nothing unless all of them are of one test list."""
    if len(a) != len(b):
        return []
    pairs: list[tuple[Arrays, Arrays]] = []
    for file_a, file_b in zip(a, b):
        x, y = load(file_a), load(file_b)
        if x is None or y is None:
            return []
        first = pairs[0][0] if pairs else x
        if not _same_list(x, y) or not _same_list(first, x):
            return []
        pairs.append((x, y))
    return pairs


def _same_list(x: Arrays, y: Arrays) -> bool:
    """True if both were scored on the same images in the same order, with the same labels."""
    import numpy as np

    if str(x["manifest"]) != str(y["manifest"]):
        return False
    return "label" not in x or "label" not in y or np.array_equal(x["label"], y["label"])


def _resampled(pairs: Sequence[tuple[Arrays, Arrays]], name: str) -> np.ndarray | None:
    """The mean over seeds of the differences of array `name` (B,), on resamples of `images` images;
    None if a file lacks one of the two, or has as many resamples as no other."""
    import numpy as np

    differences = []
    for x, y in pairs:
        if not {name, "images"} <= x.keys() & y.keys():
            return None
        if x[name].shape != y[name].shape:
            return None
        differences.append(x[name].astype(float) - y[name])
    if len({d.shape for d in differences}) > 1:
        return None
    return np.mean(differences, axis=0)
