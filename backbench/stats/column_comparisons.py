"""Which rows are better than which others over many columns: tests of all pairs of rows together.

What counts as a random sample depends on the table:
  Columns of six or more datasets   datasets: the differences of a dataset's columns turn their signs
                                    together (multiple_tests.sign_flips)
  Six or more columns of fewer      columns; as they share test images, a pair must also differ over
  datasets                          the images
  Fewer columns, or `by_images`     the images alone

Sign flips need six units: five have 16 outcomes, so no p is below 0.06.

A test over images takes a pair's columns that it can test: those of which both rows kept their
predictions and whose training noise is known. So a column that cannot be tested yet changes nothing.
It takes the mean over the columns, each divided by its own unit: the root of a^2 + (2 b)^2, where a
is the column's usual difference between two rows, and b the standard error of such a difference.
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
CLEAR = 2.0  # standard errors: a difference that one column shows by itself


class Trainings(NamedTuple):
    """The trainings behind the values of a table."""

    noises: Sequence[TrainingNoise]  # of each column
    runs: np.ndarray  # (rows, columns): how many trainings a value is the mean of


class ColumnImages(NamedTuple):
    """The test images behind the columns of a table."""

    datasets: np.ndarray  # (columns,): the number of each column's dataset
    # (columns,): of how many images a value, in percent, is the mean
    counts: np.ndarray


class ComparedPairs(NamedTuple):
    """The tests of all pairs of rows. `above[a, b]` is True if a is better than b by test."""

    above: np.ndarray  # (rows, rows) bool
    over: str  # what was taken for random: datasets, columns or images
    # How many datasets or columns were compared; never a number of images
    units: int
    tested: bool  # False if there was too little to test any pair


def compared_pairs(
    values: np.ndarray,
    datasets: Sequence[str],
    noise: np.ndarray | None = None,
    trainings: Trainings | None = None,
    *,
    by_images: bool = False,
    images: np.ndarray | None = None,
) -> ComparedPairs:
    """Test all pairs of rows. The arguments are those of rank_intervals.ranking."""
    from scipy.special import stdtr

    # 1. The pairs' differences in each unit: a dataset, where there are enough, or a column
    used = ~np.isnan(values).all(0)
    names, of_name = np.unique(np.asarray(datasets)[used], return_inverse=True)
    by_dataset = len(names) >= FEWEST and not by_images
    unit_of_column = of_name if by_dataset else np.arange(len(of_name))
    scaled, scales = _scaled(values[:, used])
    first, second = np.triu_indices(len(values), 1)
    each, count = _differences(scaled, unit_of_column, first, second)
    sums = each.sum(0)
    few = by_images or len(each) < FEWEST
    # 2. Over other units like these
    apart = sign_flips(each, count, FEWEST)
    over = "datasets"
    tested = True
    if not by_dataset:
        # 3. Over other images. Without predictions nobody knows the variance (nan), and nothing is
        #    told apart. Other columns are trained anew, so the test over columns counts trainings
        #    already; where columns are too few for it, the trainings' variance is added here
        mean = np.full(len(first), np.nan)
        variance = np.full(len(first), np.nan)
        df = np.full(len(first), np.inf)
        if noise is not None and len(values) <= MOST_BY_IMAGES:
            counted = None
            if trainings is not None and few:
                noises = list(itertools.compress(trainings.noises, used))
                counted = Trainings(noises, trainings.runs[:, used])
            lists = None
            if images is not None:
                lists = ColumnImages(of_name, images[used])
            # A column whose rows differ by noise alone would count as much as one that tells them
            # apart, and drown it: its unit is no less than what such a test can see
            errors = _errors(noise[:, used], counted, lists)
            image_scales = np.hypot(scales, CLEAR * errors)
            mean, variance, df = _over_images(
                scaled * (scales / image_scales),
                image_scales,
                noise[:, used] / image_scales[None, :, None],
                counted,
                lists,
            )
        known = variance > 0
        t = np.abs(mean)[known] / np.sqrt(variance[known])
        p = np.ones(len(first))
        p[known] = 2 * stdtr(np.minimum(df[known], 1e9), -t)
        apart_by_images = holm(p) <= ALPHA
        tested = bool(np.isfinite(variance).any())
        # 4. A pair that differs over columns must differ over images, too. From few columns nothing
        #    can be said about other columns
        if few:
            over = "images"
            apart = apart_by_images
            sums = mean
        else:
            over = "columns"
            apart &= apart_by_images & (np.sign(mean) == np.sign(sums))
    above = np.zeros((len(values), len(values)), bool)
    above[first, second] = apart & (sums > 0)
    above[second, first] = apart & (sums < 0)
    return ComparedPairs(above, over, len(each), tested)


def _scaled(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return every column in units of its usual difference between two rows, with a median of 0.

    So no column counts more because its values spread more. Also return these units (columns,)."""
    out = np.full(values.shape, np.nan)
    units = np.ones(values.shape[1])
    for c, column in enumerate(values.T):
        there = ~np.isnan(column)
        known = column[there]
        if len(known) < 2:
            continue
        if len(known) > MOST_BY_IMAGES:
            # There are too many pairs, so the unit is that of normal values with the same quartiles:
            # their median difference is the distance of the quartiles over the root of 2
            low, high = np.percentile(known, [25, 75])
            if high != low:
                units[c] = (high - low) / 2**0.5
        else:
            # The median difference of two unequal values
            first, second = np.triu_indices(len(known), 1)
            gaps = np.abs(known[first] - known[second])
            if gaps.any():
                units[c] = np.median(gaps[gaps > 0])
        out[there, c] = (known - np.median(known)) / units[c]
    return out, units


def _differences(
    scaled: np.ndarray, units: np.ndarray, first: np.ndarray, second: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs' differences (units, pairs), and how many units each pair has (pairs,).

    In each unit the difference is the mean over the columns that both rows have, 0 if there is
    none."""
    each = np.zeros((len(np.unique(units)), len(first)), np.float32)
    count = np.zeros(len(first), int)
    for n, unit in enumerate(np.unique(units)):
        part = scaled.T[units == unit].astype(np.float32)
        if not np.isnan(part).any():
            # A mean of differences is a difference of means, which takes less memory
            mean = part.mean(0)
            each[n] = mean[first] - mean[second]
            count += 1
            continue
        # (columns, pairs), nan unless both are there
        gap = part[:, first] - part[:, second]
        missing = np.isnan(gap)
        gap[missing] = 0
        shared = len(part) - missing.sum(0)
        each[n] = gap.sum(0) / np.maximum(shared, 1)
        count += shared > 0
    return each, count


def _errors(
    noise: np.ndarray, trainings: Trainings | None, lists: ColumnImages | None
) -> np.ndarray:
    """Return the usual standard error of a difference of two rows in each column (columns,), in
    points; 0 where no two rows kept their predictions. `noise` (rows, columns, resamples) is how
    values move on resamples."""
    kept = np.isfinite(noise).all(2)
    variance = np.zeros(noise.shape[1])
    for c, rows in enumerate(kept.T):
        if rows.sum() < 2:
            continue
        moved = noise[rows, c]
        # The mean over pairs of the variance of their difference
        own = (moved - moved.mean(0)).var(1, ddof=1).sum()
        variance[c] = 2 * own / (len(moved) - 1)
        if trainings is not None and trainings.noises[c].known:
            runs = 1 / trainings.runs[rows, c]
            variance[c] += 2 * trainings.noises[c].excess * runs.mean()
        if lists is not None and np.isfinite(lists.counts[c]):
            variance[c] += (100 / lists.counts[c]) ** 2
    return np.sqrt(variance)


def _over_images(
    scaled: np.ndarray,
    scales: np.ndarray,
    moved: np.ndarray,
    trainings: Trainings | None,
    lists: ColumnImages | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each pair's mean difference over the columns that can be tested, its variance, and the
    degrees of freedom of that (pairs,); nan where no column can be.

    It is the variance over other images, and over other `trainings` if given. `moved` (rows,
    columns, resamples) are the values on resamples, in the columns' units."""
    can_test = ~np.isnan(scaled) & np.isfinite(moved).all(2)
    if trainings is not None:
        can_test &= np.array([noise.known for noise in trainings.noises])
    first, second = np.triu_indices(len(scaled), 1)
    mean = np.full(len(first), np.nan)
    variance = np.full(len(first), np.nan)
    df = np.full(len(first), np.inf)
    for n, (a, b) in enumerate(zip(first, second)):
        both = can_test[a] & can_test[b]
        if not both.any():
            continue
        mean[n] = (scaled[a, both] - scaled[b, both]).mean()
        variance[n] = (moved[a, both] - moved[b, both]).mean(0).var(ddof=1)
        estimated = []  # (a part of the variance, the degrees of freedom of its estimate)
        # The mean over the shared columns divides a difference by the column's unit and by the
        # number of columns
        parts = scales[both] * both.sum()
        if lists is not None:
            variance[n] += _of_imagined(
                100 / lists.counts[both] / parts, lists.datasets[both]
            )
            estimated.append((variance[n], max(lists.counts[both].min() - 1, 1)))
        if trainings is not None:
            # A column's noise s^2 adds s^2 (1/k_a + 1/k_b) to the variance of its difference of
            # means over k_a and k_b trainings
            of_runs = (1 / trainings.runs[a] + 1 / trainings.runs[b])[both]
            weights = of_runs / parts**2
            for noise, weight in zip(
                itertools.compress(trainings.noises, both), weights
            ):
                variance[n] += noise.excess * weight
                estimated.append((noise.seed_variance * weight, noise.df))
        if variance[n] > 0:
            spread = sum(
                poorly_known(min(part / variance[n], 1.0), known)
                for part, known in estimated
            )
            df[n] = 1 / spread if spread else np.inf
    return mean, variance, df


def _of_imagined(steps: np.ndarray, datasets: np.ndarray) -> float:
    """Return the variance that one imagined image of each dataset adds, half won and half lost.

    Without it, as without half a count in paired_differences.of_images, few images look surer than
    they are: 3 of 9 that one row alone gets right would tell two rows apart. `steps` (columns,) say
    how far an image moves the mean difference; a dataset's columns are moved together."""
    together = np.bincount(datasets, steps)
    return float((together**2).sum())
