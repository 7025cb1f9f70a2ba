"""The parts of intervals, each against scipy's or against sums written out."""

import numpy as np
import pytest
from scipy import stats

from backbench.stats import confidence, resampling


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


@pytest.mark.parametrize(
    ("share", "variance", "images", "trials"),
    [
        # As many trials as would know the share as well
        (0.8, 0.8 * 0.2 / 50, 900, 50),
        # Without a variance, or without errors, the images count
        (0.8, 0.0, 900, 900),
        (1.0, 0.01, 30, 30),
        (0.0, 0.01, 30, 30),
        (1 + 1e-13, 0.01, 30, 30),
    ],
)
def test_a_share_has_jeffreys_interval_of_as_many_trials(
    share, variance, images, trials
):
    low, high = confidence.of_share(share, variance, images)
    hits = trials * round(share, 9)
    ends = stats.beta.ppf([0.025, 0.975], hits + 0.5, trials - hits + 0.5)
    assert low == pytest.approx(0 if share == 0 else 100 * ends[0], abs=1e-6)
    assert high == pytest.approx(100 if share >= 1 else 100 * ends[1], abs=1e-6)


def test_a_poorly_known_variance_makes_fewer_trials():
    found = confidence.of_share(0.8, 0.8 * 0.2 / 50, 900, df=3)
    trials = 50 / (stats.t.ppf(0.975, 3) / 1.959964) ** 2
    hits = 0.8 * trials
    ends = stats.beta.ppf([0.025, 0.975], hits + 0.5, trials - hits + 0.5)
    assert found == pytest.approx(tuple(100 * ends))
    # One degree of freedom is the least that t has
    one = confidence.of_share(0.8, 0.8 * 0.2 / 50, 900, df=1)
    assert confidence.of_share(0.8, 0.8 * 0.2 / 50, 900, df=0.5) == one
    # It holds the share, whatever the trials are
    low, high = confidence.of_share(0.999, 0.9, 1)
    assert low <= 99.9 <= high


def test_the_interval_of_resamples_is_that_of_their_widened_variance():
    drawn = np.array([0.4, np.nan, 0.5, 0.6, 0.55])
    defined = drawn[[0, 2, 3, 4]]
    for images, df in ((3, 2), (40, 3), (1, 0)):
        variance = defined.var(ddof=1) * images / max(images - 1, 1)
        expected = confidence.of_share(0.5, variance, images, df)
        assert confidence.of_resamples(0.5, drawn, images) == expected
    assert confidence.of_resamples(0.5, drawn[:2], 40) is None
    assert confidence.of_resamples(0.5, drawn[:3], 40) is not None


def test_the_interval_of_draws_adds_half_an_error_as_hard_as_those_seen():
    draw = np.random.default_rng(2)
    hits = draw.random((3, 50)) < np.where(np.arange(50) < 40, 0.97, 0.6)
    x = 1.0 * hits
    weight = np.full(50, 1 / 50)
    wrong = 1 - x.mean(0)
    hard = wrong[wrong > 0].mean()
    by_image = x.mean(0).var(ddof=1) / 50 + 0.5 * hard / 50**2
    variance, df = confidence.draws_and_images(x, weight, by_image)
    expected = confidence.of_share(x.mean(), variance, 50, df)
    assert confidence.of_draws(hits) == pytest.approx(expected)
    # Where nothing was wrong, an error would be one of every draw
    right = np.ones((3, 50), bool)
    variance, df = confidence.draws_and_images(1.0 * right, weight, 0.5 / 50**2)
    expected = confidence.of_share(1.0, variance, 50, df)
    assert confidence.of_draws(right) == pytest.approx(expected)
    # Of one draw it is that of its hits; of class means, the effective number of images counts
    label = np.repeat([0, 1], [40, 10])
    assert confidence.of_draws(hits[:1], label) == confidence.of_hits(hits[0], label)
    classes = confidence.ClassWeights(label)
    assert classes.images == pytest.approx(4 / (1 / 40 + 1 / 10))
    by_image = classes.variance_of_mean(x.mean(0)) + 0.5 * hard / classes.images**2
    variance, df = confidence.draws_and_images(x, classes.weight, by_image)
    share = (x @ classes.weight).mean()
    expected = confidence.of_share(share, variance, classes.images, df)
    assert confidence.of_draws(hits, label) == pytest.approx(expected)


def test_the_variance_over_draws_and_images_is_the_sum_of_its_parts():
    """The interaction is worked out entry by entry, as what draw and image leave."""
    draw = np.random.default_rng(3)
    x = draw.random((4, 30))
    weight = draw.random(30)
    weight /= weight.sum()
    by_image = 0.004
    moves = x * weight
    left = moves - moves.mean(0) - moves.mean(1, keepdims=True) + moves.mean()
    interaction = 30 * (left**2).sum() / (3 * 29) / 4
    by_draw = (x @ weight).var(ddof=1) / 4
    variance, df = confidence.draws_and_images(x, weight, by_image)
    assert variance == pytest.approx(by_draw + by_image - interaction)
    spread = confidence.poorly_known(by_draw / variance, 3)
    spread += min(by_image / variance, 1) ** 2 / 29
    assert df == pytest.approx(1 / spread)
    # At least half of the images' part stays, and all of it with two draws
    small = interaction / 100
    least, _ = confidence.draws_and_images(x, weight, small)
    assert least == pytest.approx(max(by_draw, small / 2))
    alike = np.stack([x[0], x[0]])
    assert confidence.draws_and_images(alike, weight, small)[0] == pytest.approx(small)
    assert confidence.draws_and_images(alike, weight, 0.0) == (0.0, np.inf)


def test_a_mean_over_resamples_is_that_of_lists_written_out(monkeypatch):
    draw = np.random.default_rng(4)
    right = draw.random((2, 7)) < 0.6
    weight = draw.random(7)
    weight /= weight.sum()
    counts = resampling.image_counts(5, 7)
    assert counts.shape == (resampling.COUNT, 7) and (counts.sum(1) == 7).all()
    of_one = []
    of_two = []
    chosen = np.random.default_rng(9).integers(0, 2, (2, resampling.COUNT))
    for n, count in enumerate(counts):
        images = np.repeat(np.arange(7), count)
        shares = right[:, images] @ weight[images] / weight[images].sum()
        of_one.append(shares[0])
        of_two.append(shares[chosen[:, n]].mean())
    wider = (7 / 6) ** 0.5
    for at_once in (200_000, 7 * 7, 1):
        monkeypatch.setattr(resampling, "_ENTRIES", at_once)
        found = resampling.resampled_means(right[:1], weight, counts, 9)
        np.testing.assert_allclose(found, np.array(of_one) * wider)
        found = resampling.resampled_means(right, weight, counts, 9)
        np.testing.assert_allclose(found, np.array(of_two) * wider)
    assert resampling.widening(1) == 1
