"""Which rows are better than which others over many columns: tests of all pairs of rows together.

What is random depends on what there is. With columns of six datasets or more, datasets are: the
differences of a dataset's columns turn their signs together (multiple_tests.sign_flips). With six
columns or more of fewer datasets, columns are; as they share test images, a pair must also differ
by the images. With fewer columns, only the images are.

Six is the fewest for which signs can tell: five units have 16 outcomes, so no p is below 0.06.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from backbench.stats.confidence import poorly_known
from backbench.stats.multiple_tests import ALPHA, holm, sign_flips
from backbench.stats.training_noise import TrainingNoise

FEWEST = 6
MOST_BY_IMAGES = 100  # rows whose resampled values are compared, pair by pair


class Trainings(NamedTuple):
    """The trainings behind the values of a table."""

    noises: Sequence[TrainingNoise]  # of each column
    runs: np.ndarray  # (rows, columns): how many trainings a value is the mean of


class ComparedPairs(NamedTuple):
    """All pairs of rows, tested. `above[a, b]`: a is better than b by test."""

    above: np.ndarray  # (rows, rows) bool
    over: str  # what was taken for random: datasets, columns or images
    units: int  # how many of them
    tested: bool  # False if there was too little to test any pair


def compared_pairs(
    values: np.ndarray,
    datasets: Sequence[str],
    noise: np.ndarray | None = None,
    trainings: Trainings | None = None,
) -> ComparedPairs:
    """Test all pairs of rows. The arguments are those of rank_intervals.ranking."""
    from scipy.special import stdtr

    used = ~np.isnan(values).all(0)
    names, of_name = np.unique(np.asarray(datasets)[used], return_inverse=True)
    by_dataset = len(names) >= FEWEST
    units = of_name if by_dataset else np.arange(len(of_name))
    scaled, scales = _scaled(values[:, used])
    first, second = np.triu_indices(len(values), 1)
    each, count = _differences(scaled, units, first, second)
    sums = each.sum(0)
    # 1. Over other units like these
    apart = sign_flips(each, count, FEWEST)
    over, tested = "datasets", True
    if not by_dataset:
        # 2. Over other images: without predictions nothing is told apart. Other columns are trained
        #    anew, so over columns trainings vary already; of few columns they are added.
        over, by_image, df = (
            "columns",
            np.full(len(first), np.nan),
            np.full(len(first), np.inf),
        )
        if noise is not None and len(values) <= MOST_BY_IMAGES:
            counted = None
            if trainings is not None and len(each) < FEWEST:
                noises = list(itertools.compress(trainings.noises, used))
                counted = Trainings(noises, trainings.runs[:, used])
            moved = noise[:, used] / scales[None, :, None]
            by_image, df = _variances(scaled, scales, moved, counted)
        p, known = np.ones(len(first)), by_image > 0
        t = np.abs(sums / np.maximum(count, 1))[known] / np.sqrt(by_image[known])
        p[known] = 2 * stdtr(np.minimum(df[known], 1e9), -t)
        of_images = holm(p) <= ALPHA
        tested = bool(np.isfinite(by_image).any())
        # 3. A pair that differs over columns must differ over images, too. Of few columns nothing
        #    can be said of others.
        if len(each) < FEWEST:
            over, apart = "images", of_images
        else:
            apart &= of_images
    above = np.zeros((len(values), len(values)), bool)
    above[first, second] = apart & (sums > 0)
    above[second, first] = apart & (sums < 0)
    return ComparedPairs(above, over, len(each), tested)


def _scaled(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every column in units of its usual difference between two rows, so that no column counts
    more because its values spread more; the median of a column is 0. And these units (columns,)."""
    out = np.full(values.shape, np.nan)
    units = np.ones(values.shape[1])
    for c, column in enumerate(values.T):
        there = ~np.isnan(column)
        known = column[there]
        if len(known) < 2:
            continue
        if (
            len(known) > MOST_BY_IMAGES
        ):  # the unit of normal values with the same quartiles
            low, high = np.percentile(known, [25, 75])
            units[c] = (high - low) / 2**0.5 or 1.0
        else:  # the median difference of two unequal values
            first, second = np.triu_indices(len(known), 1)
            gaps = np.abs(known[first] - known[second])
            units[c] = np.median(gaps[gaps > 0]) if gaps.any() else 1.0
        out[there, c] = (known - np.median(known)) / units[c]
    return out, units


def _differences(
    scaled: np.ndarray, units: np.ndarray, first: np.ndarray, second: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The pairs' differences (units, pairs): in each unit the mean over the columns that both rows
    have, 0 if there is none. And how many units each pair has (pairs,)."""
    each = np.zeros((len(np.unique(units)), len(first)), np.float32)
    count = np.zeros(len(first), int)
    for n, unit in enumerate(np.unique(units)):
        part = scaled.T[units == unit].astype(np.float32)
        if not np.isnan(part).any():  # a mean of differences is a difference of means
            mean = part.mean(0)
            each[n] = mean[first] - mean[second]
            count += 1
            continue
        gap = (
            part[:, first] - part[:, second]
        )  # (columns, pairs), nan unless both are there
        missing = np.isnan(gap)
        gap[missing] = 0
        shared = len(part) - missing.sum(0)
        each[n] = gap.sum(0) / np.maximum(shared, 1)
        count += shared > 0
    return each, count


def _variances(
    scaled: np.ndarray,
    scales: np.ndarray,
    moved: np.ndarray,
    trainings: Trainings | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The variance of each pair's mean difference over other images, and over other trainings if
    given, and its degrees of freedom (pairs,); nan where nobody knows."""
    there = ~np.isnan(scaled)
    first, second = np.triu_indices(len(scaled), 1)
    variance, df = np.full(len(first), np.nan), np.full(len(first), np.inf)
    for n, (a, b) in enumerate(zip(first, second)):
        both = there[a] & there[b]
        if both.any():
            variance[n] = (moved[a, both] - moved[b, both]).mean(0).var(ddof=1)
        if trainings is None:
            continue
        # The mean over the shared columns weighs each by its unit, and a value by its trainings
        of_each = (1 / trainings.runs[a] + 1 / trainings.runs[b])[both]
        weights = of_each / (scales[both] * both.sum()) ** 2
        estimated = []
        for noise, weight in zip(itertools.compress(trainings.noises, both), weights):
            variance[n] += noise.excess * weight if noise.known else np.nan
            estimated.append((noise.seeds * weight, noise.df))
        if np.isfinite(variance[n]) and variance[n] > 0:
            parts = [
                poorly_known(min(of / variance[n], 1.0), known)
                for of, known in estimated
            ]
            df[n] = 1 / sum(parts) if sum(parts) else np.inf
    return variance, df
