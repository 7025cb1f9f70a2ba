"""The noise of trainings: what is measured from seeds, and how often equals are called different."""

import itertools
import statistics

import numpy as np
import pytest
from scipy import stats

from backbench.stats import confidence, paired_differences, training_noise
from backbench.stats.column_comparisons import Trainings, compared_pairs
from backbench.stats.training_noise import NOTHING_TRAINED, Seeds, TrainingNoise
from benchmarks import bold


def test_the_images_part_of_the_variance_is_half_the_paired_variance_of_two_seeds():
    rng = np.random.default_rng(0)
    hits = (rng.random((2, 400)) < 0.8).astype(float)
    d = hits[0] - hits[1]
    expected = 1e4 * d.var() / 400 / 2
    assert training_noise.by_images(hits) == pytest.approx(expected, rel=0.01)
    label = rng.integers(0, 2, 400)
    same_weight = training_noise.by_images(hits, np.arange(400) % 2)
    assert same_weight == pytest.approx(training_noise.by_images(hits), rel=1e-9)
    assert training_noise.by_images(hits, label) == pytest.approx(expected, rel=0.1)


def test_the_part_of_resamples_is_theirs():
    rng = np.random.default_rng(1)
    shared = rng.normal(0, 3, 1000)
    own = rng.normal(0, 0.5, (3, 1000))
    own[0, 7] = np.nan  # a resample without a ground truth
    v = training_noise.by_resamples(40 + shared + own, 1000)
    assert v == pytest.approx(0.25, rel=0.1)


def test_noise_is_pooled_by_degrees_of_freedom():
    noise = training_noise.pooled(
        [Seeds([70, 72, 74], 1.0), Seeds([50, 51], 0.5), Seeds([9], 0)]
    )
    assert noise.df == 3 and not noise.known
    assert noise.seed_variance == pytest.approx((2 * 4 + 0.5) / 3)
    assert noise.excess == pytest.approx(noise.seed_variance - (2 * 1.0 + 0.5) / 3)
    quiet = training_noise.pooled([Seeds([70.0, 70.0, 70.1], 1.0)] * 2)
    assert (quiet.excess, quiet.df, quiet.known) == (0.0, 4, True)


def test_a_difference_of_trainings_is_wider_with_fewer_of_them():
    d = paired_differences.of_images(np.repeat([1.0, 0.0, -1.0], [30, 960, 10]))
    noise = TrainingNoise(1.0, 1.0, 10)
    widths = []
    for count in (1, 3, 30):
        tested = training_noise.over_trainings(d, noise, count, count)
        widths.append(tested.ci95[1] - tested.ci95[0])
        assert tested.variance == pytest.approx(d.variance + 2 / count)
    assert widths == sorted(widths, reverse=True)
    uneven = training_noise.over_trainings(d, noise, 1, 4)
    assert uneven.variance == pytest.approx(d.variance + 1 + 1 / 4)
    alone = training_noise.over_trainings(d, NOTHING_TRAINED, 1, 1)
    assert alone.ci95 == pytest.approx(d.ci95, rel=1e-6)


@pytest.mark.parametrize(
    ("t", "df", "columns", "apart"),
    [
        (2.5, 4, 1, False),
        (2.5, 1e6, 1, True),
        (10, 4, 1, True),
        # Six columns were each trained anew, so they show the trainings' noise themselves
        (0.1, 4, 6, True),
    ],
)
def test_ranks_by_few_columns_weigh_trainings_in_their_units(t, df, columns, apart):
    """A gap of 10 points is `t` standard errors of the difference of two trainings."""
    images = np.random.default_rng(2).normal(0, 1e-3, (2, columns, 300))
    of_one_training = (10 / t) ** 2 / 2
    noise = TrainingNoise(of_one_training, of_one_training, df)
    trainings = Trainings([noise] * columns, np.ones((2, columns)))
    values = np.array([[60.0] * columns, [50.0] * columns])
    pairs = compared_pairs(values, ["a"] * columns, images, trainings)
    assert bool(pairs.above[0, 1]) == apart


@pytest.mark.filterwarnings("error")
def test_rows_that_share_no_column_are_not_told_apart():
    values = np.array([[60.0, np.nan], [50.0, np.nan], [np.nan, 90.0]])
    images = np.random.default_rng(3).normal(0, 1e-3, (3, 2, 300))
    trainings = Trainings([TrainingNoise(0.1, 0.1, 9)] * 2, np.ones((3, 2)))
    above = compared_pairs(values, ["a", "b"], images, trainings).above
    assert above[0, 1] and above.sum() == 1


def test_equals_of_one_training_stay_tied():
    """Of five equals one is above the others now and then; that it was chosen is counted."""
    _, _, once = bold.look(bold.Kind(5, 3, 2), 0.0, 0.0, 100)
    assert once[2] <= 5 + 3 * 2.2


@pytest.mark.parametrize("tau", [0.0, 1.0, 2.0])
def test_equals_are_bold_on_few_boards_however_much_trainings_differ(tau):
    repeats = 500
    rule, _, once = bold.look(bold.Kind(2, 3, 2), tau, 0.0, repeats)
    assert rule[1] <= 5.5 + 3 * 1.0
    if tau == 2:
        assert once[1] > 25, "by images alone, of one training each"


def test_the_choice_on_other_validation_images_is_the_algebra_of_two_candidates():
    """Two candidates that differ on 24 of 400 images: the second wins so many resamples."""
    hits = np.ones((2, 400))
    hits[0, :10] = 0
    hits[1, 10:24] = 0
    step = hits[1] - hits[0]  # the first is better by 4 images
    error = step.std() / 400**0.5
    flipped = statistics.NormalDist().cdf(step.mean() / error)
    expected = 1e4 * flipped * (step.mean() ** 2 + error**2)
    assert training_noise.of_choice(hits) == pytest.approx(expected, rel=0.25)
    assert training_noise.of_choice(hits[:1]) == 0
    sure = np.stack([hits[0], np.zeros(400)])
    assert training_noise.of_choice(sure) == 0
    # Level candidates on few images: nothing says which is better, or that they are alike
    level = np.repeat([[1.0, 0.0], [0.0, 1.0]], 10, axis=1)
    assert training_noise.of_choice(level) ** 0.5 > 10
    assert training_noise.of_choice(level, np.arange(20) % 2) ** 0.5 > 10


def test_the_noise_is_at_least_that_of_the_choice():
    measured = training_noise.pooled([Seeds([70, 72, 74], 1.0)] * 2)
    assert measured.at_least(2.0) is measured
    wider = measured.at_least(9.0)
    assert (wider.excess, wider.seed_variance, wider.df) == (9.0, 9.0, 4)
    assert "choice on few validation images" in wider.source


def test_the_images_part_is_half_the_variance_of_the_difference_in_the_mean_over_pairs():
    rng = np.random.default_rng(4)
    hits = rng.random((3, 40)) < [[0.5], [0.7], [0.9]]
    label = np.arange(40) % 10 // 8  # four images in five are of class 0
    for classes in (None, label):
        step = np.full(40, 1 / 40)
        if classes is not None:
            step = 1 / (2 * np.bincount(label)[label])
        variances = []
        for a, b in itertools.combinations(range(3), 2):
            moves = step * (1.0 * hits[a] - hits[b])
            variances.append(40 * moves.var() / 2)
        found = training_noise.by_images(1.0 * hits, classes)
        assert found == pytest.approx(1e4 * np.mean(variances))
    assert training_noise.by_images(1.0 * hits[[0, 0]]) == 0


def test_the_part_of_resamples_leaves_out_undefined_ones_and_is_widened():
    values = np.array([[1.0, 3.0, np.nan, 8.0], [2.0, 2.0, 5.0, 5.0]])
    # Differences of the two seeds: -1, 1 and 3; half of their variance, times 5 / 4
    assert training_noise.by_resamples(values, 5) == pytest.approx(4 / 2 * 5 / 4)
    assert training_noise.by_resamples(values, 1) == pytest.approx(4 / 2)
    assert training_noise.by_resamples(values[:, 1:3], 5) == 0
    assert training_noise.by_resamples(values[:, :2], 5) == pytest.approx(2 / 2 * 5 / 4)


def test_a_difference_over_trainings_is_worked_out_by_hand():
    d = paired_differences.Difference(
        4.0, (3.0, 5.0), 0.5, "images", 40, variance=2.0, df=39
    )
    noise = TrainingNoise(6.0, 4.0, 4)
    found = training_noise.over_trainings(d, noise, 2, 4)
    variance = 2.0 + 4.0 * 0.75
    part = 6.0 * 0.75 / variance
    spread = part ** (2 - 5 / 4 * part) / 4 + (2.0 / variance) ** 2 / 39
    half = stats.t.ppf(0.975, 1 / spread) * variance**0.5
    assert found.ci95 == pytest.approx((4 - half, 4 + half))
    assert (found.variance, found.df) == (variance, pytest.approx(1 / spread))
    assert found.p == pytest.approx(2 * stats.t.sf(4 / variance**0.5, 1 / spread))
    assert (found.value, found.n, found.paired) == (4.0, 40, "images and trainings")
    # The seeds' part is no more than all
    wild = training_noise.over_trainings(d, TrainingNoise(90.0, 4.0, 4), 2, 4)
    assert wild.df == pytest.approx(1 / (1 / 4 + (2.0 / variance) ** 2 / 39))


@pytest.mark.parametrize(
    ("part", "df", "added"),
    [
        (1.0, 2, 1 / 2),
        (0.5, 1e9, 0.25 / 1e9),
        # p^(2 - k p / df), with k of 5; of two draws 12
        (0.5, 2, 0.5 ** (2 - 5 * 0.5 / 2) / 2),
        (0.1, 1, 0.1 ** (2 - 12 * 0.1)),
        # Never less than p^0
        (0.9, 2, 1 / 2),
        (0.5, 1, 1.0),
    ],
)
def test_what_few_degrees_of_freedom_add(part, df, added):
    assert confidence.poorly_known(part, df) == pytest.approx(added)


def test_a_noise_is_known_with_four_degrees_of_freedom():
    assert TrainingNoise(1.0, 1.0, 4).known and not TrainingNoise(1.0, 1.0, 3).known
    noise = TrainingNoise(4.0, 2.0, 5)
    assert noise.at_least(2.0) is noise
    # The whole variance is no less than its part, nor than the choice's
    assert (noise.at_least(3.0).seed_variance, noise.at_least(3.0).excess) == (4.0, 3.0)
    assert (noise.at_least(5.0).seed_variance, noise.at_least(5.0).excess) == (5.0, 5.0)
    nobody = training_noise.pooled([])
    assert (nobody.seed_variance, nobody.excess, nobody.df) == (0.0, 0.0, 0)
