"""Intervals and tests on simulated columns: a small part of `benchmarks/intervals.py`, with bounds
three standard errors from what it prints."""

import numpy as np
import pytest
from scipy.stats import chi2, norm, t

from backbench.records import predictions
from backbench.stats import confidence
from backbench.verify.paired_tests import compare
from benchmarks import intervals as simulated


@pytest.mark.parametrize("name", ["few labels, top-1", "few labels, mean per class"])
def test_few_labels_vary_by_draw_and_by_image(name):
    """Without the images a third of equals is called different here; without the draws too."""
    assert simulated.called(name, 500, 0.8, 300) <= 0.05 + 3 * 0.013
    assert simulated.called(name, 500, 0.8, 50, gap=0.05) >= 0.75
    assert 0.95 - 3 * 0.013 <= simulated.covered(name, 500, 0.8, 300) <= 0.99


@pytest.mark.parametrize(
    "name", ["top-1", "mean per class", "three seeds", "AP (500 resamples)"]
)
def test_equals_are_rarely_called_different(name):
    assert simulated.called(name, 500, 0.8, 250) <= 0.05 + 3 * 0.014
    assert simulated.called(name, 500, 0.7, 20, gap=0.3) >= 0.9


@pytest.mark.parametrize(
    "name", ["mean per class", "AP (500 resamples)", "average of twelve"]
)
def test_intervals_cover(name):
    assert 0.95 - 3 * 0.0126 <= simulated.covered(name, 500, 0.9, 300) <= 0.99


@pytest.mark.parametrize("n", [100, 500])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_top1_covers(n, share):
    """Exactly, by the sum over all counts."""
    assert 0.92 <= simulated.top1(n, share) <= 0.985


@pytest.mark.parametrize(
    ("draws", "least", "most"),
    [(2, 0.03, 0.055), (3, 0.044, 0.052), (20, 0.049, 0.051)],
)
@pytest.mark.parametrize("part", [0.05, 0.3, 0.5, 0.8, 0.95])
def test_few_draws_hold_the_rate_whatever_varies(draws, part, least, most):
    """Equals are called different at one rate, integrated over what normal draws may look like."""
    images = 1000
    steps = 100
    weight = np.full(images, 1 / images)
    shape = np.linspace(-1, 1, draws)
    shape /= shape.std(ddof=1)
    rates = []
    for level in (np.arange(steps) + 0.5) / steps:
        spread = part * chi2.ppf(level, draws - 1) / (draws - 1)
        x = np.outer(shape * (spread * draws) ** 0.5, np.ones(images))
        variance, df = confidence.draws_and_images(x, weight, 1 - part)
        assert variance == pytest.approx(spread + 1 - part)
        rates.append(2 * norm.sf(confidence.t_quantile(df) * variance**0.5))
    assert least <= np.mean(rates) <= most


def test_what_draws_and_images_share_counts_once():
    """A mean of N x D independent hits has the variance of so many, not twice as much."""
    hits = np.random.default_rng(3).random((20, 5000)) < 0.5
    x = hits.astype(float)
    by_image = float(x.mean(0).var(ddof=1)) / 5000
    variance, _ = confidence.draws_and_images(x, np.full(5000, 1 / 5000), by_image)
    assert variance == pytest.approx(0.25 / 100_000, rel=0.35)


@pytest.mark.parametrize("draws", [2, 3])
def test_draws_that_agree_by_chance_claim_little(draws):
    """Each draw is right on as many images as the others, on other ones: their means do not vary."""
    x = np.zeros((draws, 300))
    for k in range(draws):
        x[k, 60 * k : 60 * (k + 1)] = 1
    of_images = float(x.mean(0).var(ddof=1)) / 300
    variance, df = confidence.draws_and_images(x, np.full(300, 1 / 300), of_images)
    assert df >= 1
    assert variance >= float(x.mean(0).var(ddof=1)) / 600
    low, high = confidence.of_draws(x > 0)
    assert 2 < high - low < 60


def test_the_average_counts_how_little_few_seeds_tell():
    values = [70.0] * 12
    ends = [(68.0, 72.0)] * 12
    half = 2 / 12**0.5
    found = confidence.of_mean(values, ends, [np.inf] * 12)
    assert found == pytest.approx((70 - half, 70 + half))
    # Three seeds: standard errors of 2 / 4.303 each; twelve of them have 48 degrees of freedom
    low, high = confidence.of_mean(values, ends, [2.0] * 12)
    assert (high - low) / 2 == pytest.approx(2.0106 * 2 / 4.3027 / 12**0.5, rel=1e-3)
    _, high = confidence.of_mean([100.0] * 2, [(97.0, 100.0)] * 2, [np.inf] * 2)
    assert high == 100


@pytest.mark.parametrize(
    ("value", "df", "p"),
    # The table of Student's t
    [
        (1.959964, np.inf, 0.05),
        (2.575829, np.inf, 0.01),
        (12.7062, 1, 0.05),
        (4.30265, 2, 0.05),
        (2.77645, 4, 0.05),
        (4.60409, 4, 0.01),
        (-2.77645, 4, 0.05),
        (0, 4, 1.0),
    ],
)
def test_both_tails_are_those_of_the_table(value, df, p):
    assert confidence.t_both_tails(value, df) == pytest.approx(p, rel=1e-4)


@pytest.mark.parametrize("df", [1, 2.5, 10, 300])
def test_the_quantile_and_the_tails_are_students(df):
    assert confidence.t_quantile(df) == pytest.approx(t.ppf(0.975, df))
    assert confidence.t_both_tails(1.3, df) == pytest.approx(2 * t.sf(1.3, df))


def test_one_seed_has_no_interval():
    assert confidence.of_seeds([70.0]) is None


def test_all_right_is_no_certainty():
    right = np.ones(100, bool)
    assert confidence.of_hits(right) == pytest.approx((97.53, 100), abs=0.01)
    assert confidence.of_hits(~right) == pytest.approx((0, 2.47), abs=0.01)
    label = np.arange(100) % 7
    draws = np.ones((20, 100), bool)
    for low, high in (
        confidence.of_hits(right, label),
        confidence.of_draws(draws),
        confidence.of_draws(draws, label),
    ):
        assert 90 < low < 99
        assert high == 100


def test_few_label_files_are_compared_over_draws_and_images(tmp_path):
    label = np.arange(300) % 10
    p = simulated.Population(0)
    files = []
    for name, hits in zip("ab", p.drawn(2, 300, 0.6, 20, gap=0.2)):
        prediction = np.where(hits, label, (label + 1) % 10)
        arrays = {
            "prediction": prediction,
            "label": label,
            "values": 100 * hits.mean(1),
        }
        kept = predictions.keep(tmp_path, name, manifest="m", **arrays)
        files.append([tmp_path / kept])
    for metric in ("top1", "mean_per_class"):
        found = compare(files[1], files[0], metric)
        assert found.paired == "draws and images"
        assert found.real
        assert found.value == pytest.approx(20, abs=8)
