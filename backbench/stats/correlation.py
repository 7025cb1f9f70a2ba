"""Spearman's rank correlation with its 95% interval: the percentile bootstrap over pairs, or above
MANY pairs, for speed, Fisher's z with the variance of Bonett and Wright (2000)."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from backbench.stats.confidence import NORMAL, Interval

RESAMPLES = 1000
MANY = 100


class UnitRanks(NamedTuple):
    """Ranks of n values and of their resamples, centred, of unit length; nan if all are equal."""

    whole: np.ndarray  # (1, n)
    resampled: np.ndarray | None  # (RESAMPLES, n); None above MANY


@functools.cache  # a column meets many others, mostly over the same checkpoints
def resampled_ranks(values: tuple[float, ...]) -> UnitRanks:
    """Rank `values` and resamples that depend on their number alone: columns stay paired."""
    array, n = np.asarray(values, float), len(values)
    whole = _unit_ranks(array[None])
    if n > MANY:
        return UnitRanks(whole, None)
    # The generator is named, not numpy's default of the day: the same intervals by every version.
    index = np.random.Generator(np.random.PCG64(0)).integers(0, n, size=(RESAMPLES, n))
    return UnitRanks(whole, _unit_ranks(array[index]))


def _unit_ranks(values: np.ndarray) -> np.ndarray:
    """(B, n) -> ranks of each row, centred and of unit length; nan rows where all are equal."""
    from scipy.stats import rankdata

    # Ties share their mean rank, so Pearson's r of the ranks is rho (the formula by squared
    # differences of ranks holds without ties only).
    ranks = rankdata(values, axis=1)
    ranks = ranks - ranks.mean(1, keepdims=True)
    length = np.sqrt((ranks**2).sum(1, keepdims=True))
    return ranks / np.where(length > 1e-9, length, np.nan)


def spearman(
    of_x: Sequence[float], of_y: Sequence[float]
) -> tuple[float | None, Interval | None]:
    """rho, None if x or y is constant, and its interval, None if most resamples are constant."""
    x, y = resampled_ranks(tuple(of_x)), resampled_ranks(tuple(of_y))
    # Pearson's r is the product of centred unit vectors.
    rho = float((x.whole * y.whole).sum())
    if math.isnan(rho):
        return None, None
    if x.resampled is None or y.resampled is None:
        # Fisher's z: atanh(rho) is nearly normal. Its variance for ranks is (1 + rho^2 / 2) / (n - 3)
        # (Bonett and Wright, 2000), for Pearson's r 1 / (n - 3). On the scale of z the interval is
        # symmetric; on that of rho it stays within -1 and 1.
        z = math.atanh(max(-0.999999, min(0.999999, rho)))  # of 1 it would be infinite
        half = NORMAL * math.sqrt((1 + rho**2 / 2) / (len(of_x) - 3))
        return rho, (math.tanh(z - half), math.tanh(z + half))
    # A resample of equal values has no rho; where most are so, the others are no fair sample.
    values = (x.resampled * y.resampled).sum(1)
    values = values[~np.isnan(values)]
    if len(values) < RESAMPLES / 2:
        return rho, None
    low, high = np.percentile(values, (2.5, 97.5))
    return rho, (float(low), float(high))
