"""Paired tests on simulated hits with known truth: noise is not called a difference, a real one is."""

import math

import numpy as np
import pytest
from scipy.stats import binom, binomtest, norm, t

from backbench.stats import confidence
from backbench.stats.paired_differences import (
    Difference,
    of_draws_and_images,
    of_images,
    of_resamples,
    tied_with_first,
)
from benchmarks import intervals as simulated

IMAGES = 720


def called(gap: float, *, mean_per_class: bool, repeats: int) -> tuple[float, float]:
    """The shares of simulated pairs that are called different, and whose interval has the truth."""
    population = simulated.Population(0)
    real = covered = 0
    for _ in range(repeats):
        a, b = population.hits(2, IMAGES, 0.7, gap)
        label = population.rng.integers(0, 10, size=IMAGES)
        d = of_images(b.astype(float) - a, label if mean_per_class else None)
        real += d.real
        covered += d.ci95[0] <= 100 * gap <= d.ci95[1]
    return real / repeats, covered / repeats


@pytest.mark.parametrize("mean_per_class", [False, True])
def test_noise_is_called_at_most_one_time_in_twenty(mean_per_class):
    false, covered = called(0.0, mean_per_class=mean_per_class, repeats=600)
    assert false <= 0.05 + 2 * 0.009
    assert covered >= 0.93
    of_small_gap, _ = called(0.02, mean_per_class=mean_per_class, repeats=150)
    of_larger_gap, _ = called(0.05, mean_per_class=mean_per_class, repeats=150)
    assert of_small_gap < of_larger_gap
    of_large_gap, _ = called(0.10, mean_per_class=mean_per_class, repeats=50)
    assert of_large_gap > 0.95


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("images", [40, 100, 500])
def test_equal_pairs_of_one_weight_are_never_called_more_often(images, share):
    """Exactly, by the sum over all counts."""
    assert simulated.top1_called(images, share) <= 0.0502


def test_the_test_of_images_is_mcnemars_mid_p():
    d = np.array([1.0] * 14 + [-1.0] * 4 + [0.0] * 100)
    exact = binomtest(4, 18, 0.5).pvalue
    assert of_images(d).p == pytest.approx(exact - binom.pmf(4, 18, 0.5))
    assert of_images(d).value == pytest.approx(100 * 10 / 118)
    assert of_images(-d).value == pytest.approx(-100 * 10 / 118)
    assert of_images(-d).p == of_images(d).p


def test_class_means_weigh_classes_alike():
    label = np.array([0] * 90 + [1] * 10)
    d = np.zeros(100)
    d[90:] = 1  # all ten of the small class
    assert of_images(d, label).value == pytest.approx(50.0)
    assert of_images(d).value == pytest.approx(10.0)


def test_the_p_value_of_class_means_is_that_of_their_interval():
    rng = np.random.default_rng(4)
    label = rng.integers(0, 5, 400)
    d = rng.integers(-1, 2, 400).astype(float)
    for shift in np.linspace(0, 0.2, 9):
        moved = np.where(rng.random(400) < shift, 1.0, d)
        found = of_images(moved, label)
        assert (found.p < 0.05) == found.real


def test_p_values_are_the_tails_beyond_the_value_in_standard_errors():
    """Each test's p-value is worked out again from its value and from the width of its interval."""
    draw = np.random.default_rng(5)
    label = draw.integers(0, 5, 400)
    hits = draw.random((4, 400)) < 0.15
    for found in (
        of_images(hits[0].astype(float) - hits[1], label),
        of_draws_and_images(hits[:3].astype(float) - hits[1:]),
        of_resamples(draw.normal(1.5, 1, 500), 200),
    ):
        half = (found.ci95[1] - found.ci95[0]) / 2
        if np.isinf(found.df):
            error = half / norm.ppf(0.975)
            expected = 2 * norm.sf(abs(found.value) / error)
        else:
            error = half / t.ppf(0.975, found.df)
            expected = 2 * t.sf(abs(found.value) / error, found.df)
        assert 0.001 < expected < 0.999, "a value that a wrong factor would change"
        assert found.p == pytest.approx(expected, rel=1e-4)


def test_nobody_disagrees():
    d = of_images(np.zeros(500))
    assert (d.value, d.p, d.real) == (0.0, 1.0, False)
    assert d.ci95[0] < 0 < d.ci95[1]


def test_one_resample_says_nothing():
    assert of_resamples(np.array([3.0, np.nan]), 100) is None


def test_the_highest_of_many_is_one_of_all_pairs():
    assert tied_with_first([0.04]) == 0, "one pair"
    assert tied_with_first([0.9, 0.02]) == 2, "three pairs, so 0.06"
    assert tied_with_first([0.9, 0.001]) == 1, "only the last is told apart"
    assert tied_with_first([0.04, 0.001]) == 0, "with one pair left"


def test_intervals_of_differences_are_those_of_sums_written_out():
    # 1. Images: one imagined image is added, half won and half lost
    d = np.repeat([1.0, 0.0, -1.0], [6, 31, 3])
    found = of_images(d)
    half = 196 * math.sqrt((9 - 3**2 / 40) / 40**2 + 1 / 40**2)
    assert found.ci95 == pytest.approx((7.5 - half, 7.5 + half), rel=1e-4)
    assert found.variance == pytest.approx((half / 1.96) ** 2, rel=1e-4)
    assert (found.n, found.df) == (40, math.inf)
    # 2. Class means
    label = np.repeat([0, 1], [30, 10])
    step = d / np.where(label == 0, 60, 20)
    imagined = (30 / 60**2 + 10 / 20**2) / 40
    error = math.sqrt((step**2).sum() - step.sum() ** 2 / 40 + imagined)
    by_class = of_images(d, label)
    assert by_class.ci95[1] == pytest.approx(100 * (step.sum() + 1.959964 * error))
    assert by_class.p == pytest.approx(2 * norm.sf(abs(step.sum()) / error))
    # 3. Resamples: the sample's spread is widened, and one image may differ by all points
    drawn = np.array([1.0, 2.0, 4.0, np.nan, 5.0])
    for images, df in ((3, 2), (30, 3)):
        variance = np.array([1, 2, 4, 5]).var(ddof=1) * images / (images - 1)
        half = t.ppf(0.975, df) * math.sqrt(variance + (100 / images) ** 2)
        whole = of_resamples(drawn, images)
        assert whole.ci95 == pytest.approx((3 - half, 3 + half))
        assert (whole.value, whole.n, whole.df) == (pytest.approx(3), 4, df)
    half = t.ppf(0.975, 3) * math.sqrt(variance + (10 / 30) ** 2)
    given = of_resamples(drawn, 30, value=2.5, imagined=10.0)
    assert given.ci95 == pytest.approx((2.5 - half, 2.5 + half))
    assert of_resamples(drawn[:2], 1).df == 1


def test_draws_and_images_have_an_image_won_in_as_many_draws_as_those_that_differ():
    d = np.zeros((3, 20))
    d[0, :6] = 1
    d[1, :3] = 1
    d[2, 3] = -1
    weight = np.full(20, 1 / 20)
    mean = d.mean(0)
    by_image = mean.var(ddof=1) / 20
    variance, df = confidence.draws_and_images(d, weight, by_image)
    differing = mean[mean != 0]
    error = math.sqrt(variance + (differing**2).mean() / 20**2)
    found = of_draws_and_images(d)
    half = 100 * t.ppf(0.975, df) * error
    assert found.ci95 == pytest.approx(
        (100 * mean.mean() - half, 100 * mean.mean() + half)
    )
    assert (found.n, found.df) == (20, pytest.approx(df))
    # Draws that agree on every image still have an imagined one
    equal = of_draws_and_images(np.zeros((3, 20)))
    assert (equal.variance, equal.p) == pytest.approx((1e4 / 20**2, 1))
    assert of_draws_and_images(np.ones((2, 1))).ci95[0] < 100


@pytest.mark.parametrize(
    ("p", "ends", "known", "real"),
    [
        (0.01, (1.0, 3.0), True, True),
        (0.05, (1.0, 3.0), True, False),
        (0.01, (0.0, 3.0), True, False),
        (0.01, (-3.0, 0.0), True, False),
        (0.01, (-3.0, -1.0), True, True),
        (0.01, (1.0, 3.0), False, False),
    ],
)
def test_a_difference_is_real_by_test_interval_and_trainings(p, ends, known, real):
    found = Difference(1.0, ends, p, "images", 9, trainings_known=known)
    assert found.real == real


def test_a_tie_at_five_percent_is_a_tie():
    assert tied_with_first([0.05]) == 1 and tied_with_first([0.0499]) == 0
    # Three rows are three pairs
    assert tied_with_first([0.001, 0.0166]) == 0
    assert tied_with_first([0.001, 0.0167]) == 2
    assert tied_with_first([]) == 0
