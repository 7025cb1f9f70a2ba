"""Spearman's rho beside scipy's, and how often its interval covers."""

import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from backbench.stats.correlation import spearman


def test_spearman_is_scipys_with_ties():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 6, 40).astype(float)
    y = x + rng.normal(0, 2, 40)
    rho, interval = spearman(x, y)
    assert rho == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    assert interval is not None
    low, high = interval
    assert low < rho < high < low + 0.7
    assert spearman([1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]) == (None, None)


def test_many_pairs_have_a_narrow_interval():
    rng = np.random.default_rng(0)
    x = rng.normal(size=400)
    rho, interval = spearman(x, x + rng.normal(size=400))
    assert rho is not None and interval is not None
    # Bonett and Wright's; Pearson's is narrower
    half = 1.96 * math.sqrt((1 + rho**2 / 2) / 397)
    ends = np.arctanh(interval) - np.arctanh(rho)
    assert ends == pytest.approx([-half, half], rel=1e-3)


@pytest.mark.parametrize("pairs", [50, 150])
def test_the_interval_covers(pairs):
    """rho of a bivariate normal is 6/pi asin(r/2)."""
    truth = 6 / math.pi * math.asin(0.6 / 2)
    covered = 0
    for draw in range(60):
        rng = np.random.default_rng([1, draw])
        a = rng.normal(size=pairs)
        _, interval = spearman(a, 0.6 * a + 0.8 * rng.normal(size=pairs))
        covered += interval is not None and interval[0] <= truth <= interval[1]
    assert covered >= 51  # 57 expected
