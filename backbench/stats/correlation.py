"""Spearman's rank correlation with its 95% interval.

The interval is the percentile bootstrap over pairs; for more than MANY pairs, for speed, that of
Fisher's z with the variance of Bonett and Wright (2000)."""

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


# A column is correlated with many others, mostly over the same checkpoints
@functools.cache
def resampled_ranks(values: tuple[float, ...]) -> UnitRanks:
    """Rank `values` and their resamples, which depend on n alone, so that columns stay paired."""
    array = np.asarray(values, float)
    n = len(values)
    whole = _unit_ranks(array[None])
    if n > MANY:
        return UnitRanks(whole, None)
    # Named, because numpy's default generator may become another one: intervals stay the same
    index = np.random.Generator(np.random.PCG64(0)).integers(0, n, size=(RESAMPLES, n))
    return UnitRanks(whole, _unit_ranks(array[index]))


def _unit_ranks(values: np.ndarray) -> np.ndarray:
    """Rank each row of (B, n); centre the ranks and scale them to unit length.

    A row of equal values becomes nan."""
    from scipy.stats import rankdata

    # Ties share their mean rank, so Pearson's r of the ranks is rho. (The formula by squared
    # differences of ranks holds only without ties.)
    ranks = rankdata(values, axis=1)
    ranks = ranks - ranks.mean(1, keepdims=True)
    length = np.sqrt((ranks**2).sum(1, keepdims=True))
    return ranks / np.where(length > 1e-9, length, np.nan)


def spearman(
    of_x: Sequence[float], of_y: Sequence[float]
) -> tuple[float | None, Interval | None]:
    """Return rho and its interval. rho is None if x or y is constant; the interval is None if most
    resamples are constant."""
    x = resampled_ranks(tuple(of_x))
    y = resampled_ranks(tuple(of_y))
    # Pearson's r is the product of centred unit vectors
    rho = float((x.whole * y.whole).sum())
    if math.isnan(rho):
        return None, None
    if x.resampled is None or y.resampled is None:
        # Fisher's z: atanh(rho) is nearly normal. Its variance for ranks is (1 + rho^2 / 2) / (n - 3)
        # (Bonett and Wright, 2000), for Pearson's r 1 / (n - 3). On the scale of z the interval is
        # symmetric; on that of rho it stays within -1 and 1. atanh(1) would be infinite
        z = math.atanh(max(-0.999999, min(0.999999, rho)))
        half = NORMAL * math.sqrt((1 + rho**2 / 2) / (len(of_x) - 3))
        return rho, (math.tanh(z - half), math.tanh(z + half))
    # A resample of equal values has no rho. Where most are such, the others are no fair sample
    values = (x.resampled * y.resampled).sum(1)
    values = values[~np.isnan(values)]
    if len(values) < RESAMPLES / 2:
        return rho, None
    low, high = np.percentile(values, (2.5, 97.5))
    return rho, (float(low), float(high))
