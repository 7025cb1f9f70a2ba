"""Noise of a column's trainings: from seeds measured in it, or published (noise.yaml)."""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from backbench.stats import training_noise
from backbench.stats.training_noise import Seeds, TrainingNoise
from backbench.untrusted import yamls
from backbench.verify.paired_tests import classes_of, of_seeds


def seeds_of(values: Sequence[float], files: Sequence[Path], metric: str) -> Seeds:
    """Return the values of one checkpoint's trainings, and how much of their spread is these
    images'."""
    kept = of_seeds(files, metric) if len(files) == len(values) else None
    # Several draws of labels for each seed do not tell the images' part.
    if kept is None or kept.scores.ndim > 2:
        return Seeds(values, 0.0)
    if kept.images is not None:
        return Seeds(values, training_noise.by_resamples(kept.scores, kept.images))
    classes = classes_of(kept.first, metric)
    return Seeds(values, training_noise.by_images(kept.scores, classes))


def measured_or_published(
    checkpoints: Iterable[Seeds],
    *,
    protocol: str,
    dataset: str,
    metric: str,
    choice: float = 0.0,
) -> TrainingNoise:
    """Training noise of a column, never below the noise of the `choice` on validation images.

    It is a published one where that is known with more degrees of freedom.
    """
    measured = training_noise.pooled(checkpoints)
    for row in _published():
        fits = protocol in row["protocols"] and dataset == row["dataset"]
        if fits and metric in row["metrics"] and measured.df < row["df"]:
            # Nobody printed which part of it is the images', so all of it counts.
            variance = row["s"] ** 2
            return TrainingNoise(variance, variance, row["df"], row["source"])
    return measured.at_least(choice)


@functools.cache
def _published() -> list[dict[str, Any]]:
    rows = yamls.read(Path(__file__).with_name("noise.yaml"))
    assert isinstance(rows, list)
    return rows
