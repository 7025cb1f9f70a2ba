"""The parts of intervals, each against scipy's or against sums written out."""

import numpy as np
import pytest
from scipy import stats

from backbench.stats import confidence


@pytest.mark.parametrize("values", [[70.0, 72.0], [70.0, 72.0, 77.0], [1.0, 1.0, 4.0]])
def test_the_interval_of_seeds_is_students(values):
    found = confidence.of_seeds(values)
    error = stats.sem(values)
    wanted = stats.t.interval(0.95, len(values) - 1, np.mean(values), error)
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize("sizes", [(3, 3, 3), (2, 5, 9), (1, 4), (1, 1, 1)])
def test_a_class_has_three_images_worth_of_the_variance_of_all(sizes):
    draw = np.random.default_rng(0)
    label = np.repeat(np.arange(len(sizes)), sizes)
    right = draw.random(len(label))
    parts = [right[label == each] for each in range(len(sizes))]
    squares = [float(((part - part.mean()) ** 2).sum()) for part in parts]
    degrees = sum(len(part) - 1 for part in parts)
    # Classes of one image each say nothing of the variance within one
    of_all = sum(squares) / degrees if degrees else float(np.var(right))
    wanted = 0.0
    for part, own in zip(parts, squares):
        variance = (own + 3 * of_all) / (len(part) - 1 + 3)
        wanted += variance / len(part)
    found = confidence.ClassWeights(label).variance_of_mean(right)
    assert found == pytest.approx(wanted / len(sizes) ** 2)


@pytest.mark.parametrize("share", [0.05, 0.4, 0.45, 0.3])
def test_misses_have_the_mirrored_interval_of_hits(share):
    """Which of the two is rarer is decided at one half."""
    draw = np.random.default_rng(1)
    hard = draw.beta(2 * share, 2 * (1 - share), size=60)
    hits = draw.random((5, 60)) < hard
    low, high = confidence.of_draws(hits)
    assert confidence.of_draws(~hits) == pytest.approx((100 - high, 100 - low))
