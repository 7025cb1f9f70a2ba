"""Ranks over many columns: what is plain by hand, and a small part of `benchmarks/ranks.py`."""

import itertools

import numpy as np
import pytest
from scipy.stats import rankdata

from backbench.stats import (
    column_comparisons,
    confidence,
    rank_intervals,
    resampling,
)
from backbench.stats.paired_differences import of_images
from backbench.stats.training_noise import NOTHING_TRAINED, TrainingNoise
from backbench.verify import resamples
from benchmarks import ranks as simulated

NAN = np.nan


def of(values, **more):
    values = np.asarray(values, float)
    datasets = more.pop("datasets", [str(c) for c in range(values.shape[1])])
    return rank_intervals.ranking(values, datasets, **more)


def test_ranks_of_columns_are_scipys():
    draw = np.random.default_rng(0)
    for _ in range(100):
        # Few unlike values, so that many are equal
        values = draw.integers(0, 4, draw.integers(1, 8, 2)).astype(float)
        values[draw.random(values.shape) < 0.3] = NAN
        expected = rankdata(-values, axis=0, nan_policy="omit")
        np.testing.assert_array_equal(rank_intervals.column_ranks(values), expected)


def test_exact_ties_share_a_rank():
    third = 100 / 12
    found = of([[third] * 8, [third] * 8, [1.0] * 8])
    assert [p.rank for p in found.places] == [1, 1, 3]
    assert [p.average for p in found.places] == [1.5, 1.5, 3.0]
    assert found.places[0].win_rate == pytest.approx(found.places[1].win_rate)
    ranks = rank_intervals.column_ranks(np.array([[5.0], [NAN], [5.0], [7.0]]))
    assert ranks[:, 0] == pytest.approx([2.5, NAN, 2.5, 1.0], nan_ok=True)


def test_nothing_is_imputed():
    rng = np.random.default_rng(0)
    strong = rng.normal(80, 1, (3, 12))
    values = np.full((5, 24), NAN)
    values[:3, :12] = strong
    values[0, 12:] = 90
    values[3, 12:] = 60  # met only by the first
    values[4, :12] = strong.mean(0) + 3  # measured on the first half only
    found = of(values)
    assert found.places[4].columns == 12
    assert found.places[4].rank == 1
    # Rows that share no column are not compared
    for a, b in ((1, 3), (3, 4)):
        assert not found.above[a, b] and not found.above[b, a]
    assert found.above[0, 3]
    low, high = found.places[3].interval
    assert low > 1 and high == 5


def test_a_pair_that_wins_all_and_one_that_swaps():
    rng = np.random.default_rng(1)
    base = rng.uniform(50, 90, 12)
    better = base + 3 + rng.normal(0, 0.5, 12)
    swapping = base + rng.normal(0, 1, 12)
    values = np.array([base, better, swapping])
    found = of(values)
    assert found.leaders == [1]
    assert found.places[1].interval == (1, 1) and found.places[1].average == 1.0
    assert {found.places[0].interval, found.places[2].interval} == {(2, 3)}
    assert [p.group for p in found.places] == [2, 1, 2]
    assert found.places[1].win_rate > 90


def test_the_scale_of_a_column_decides_nothing():
    rng = np.random.default_rng(2)
    values = rng.normal(0, 1, (6, 14)) + np.arange(6)[:, None] * 0.7
    scale = rng.uniform(0.1, 50, 14)
    shift = rng.uniform(-50, 50, 14)
    one = of(values)
    other = of(values * scale + shift)
    assert one.places == other.places
    assert (one.above == other.above).all()
    turned = of(values[::-1])
    assert [p.interval for p in turned.places[::-1]] == [p.interval for p in one.places]


def test_few_columns_say_nothing_without_predictions():
    values = np.array([[90.0] * 5, [50.0] * 5])
    found = of(values)
    assert (found.over, found.tested) == ("images", False)
    assert [p.interval for p in found.places] == [(1, 2), (1, 2)]
    rng = np.random.default_rng(3)
    moved = rng.normal(0, 1, (2, 5, resampling.COUNT))
    known = of(values, noise=moved)
    assert known.tested and known.places[0].interval == (1, 1)
    assert not of(values, noise=40 * moved).above.any()
    moved[1, 2] = NAN  # one column of one row without predictions
    assert of(values, noise=moved).places[0].interval == (1, 1), "the others still say"
    moved[0, [0, 1]] = moved[1, [3, 4]] = NAN  # no column with those of both
    assert not of(values, noise=moved).tested


def test_columns_of_one_dataset_are_no_better_known_than_its_images():
    """Eight columns that all say the same by chance: by columns alone they were certain."""
    rng = np.random.default_rng(4)
    values = np.array([[80.0] * 8, [79.0] * 8]) + rng.normal(0, 0.01, (2, 8))
    shared = rng.normal(0, 2, (2, 1, resampling.COUNT)) + np.zeros((2, 8, 1))
    assert of(values).above[0, 1]
    assert not of(values, datasets=["digits"] * 8, noise=shared).above.any()
    assert of(values, datasets=["digits"] * 8, noise=shared / 40).above[0, 1]
    assert not of(values, datasets=["digits"] * 8).tested


def test_a_thousand_rows():
    rng = np.random.default_rng(5)
    values = rng.normal(50, 5, (300, 40))
    values[7] += 30
    found = of(values)
    assert found.leaders == [7] and found.places[7].interval == (1, 1)
    some = rank_intervals.ranking(values[:90], [str(c) for c in range(40)])
    assert some.leaders == [7]


@pytest.mark.parametrize("shape", [simulated.Shape(5, 6), simulated.Shape(10, 12)])
def test_equals_stay_together_and_intervals_cover(shape):
    seen = simulated.look(shape, [0.0] * shape.rows, 80)
    assert seen.covered >= 93
    assert seen.together >= 95 - 3 * 2.4
    apart = simulated.look(shape, [2.0 * n for n in range(shape.rows)], 40)
    assert apart.covered >= 93


def test_the_best_is_seen():
    shape = simulated.Shape(5, 12)
    assert simulated.look(shape, [0.0, 0, 0, 0, 5.0], 40).alone >= 70
    assert simulated.look(shape, [0.0, 0, 0, 0, 0.2], 40).alone <= 5


def test_of_six_columns_the_other_pairs_say_how_much_one_varies():
    """By its own six differences no pair of ten rows is sure; two rows have no other pair."""
    shape = simulated.Shape(10, 6)
    assert simulated.look(shape, [0.0] * 9 + [5.0], 40).beats >= 60
    uneven = simulated.Shape(10, 6, uneven=True)
    assert simulated.look(uneven, [0.0] * 10, 60).together >= 95 - 3 * 2.8


def test_images_alone():
    equal = simulated.of_images(2, 3, 0.0, 30)
    assert equal.together >= 95 - 3 * 4
    assert simulated.of_images(2, 3, 12.0, 5).alone >= 90


# The steps, each beside a loop


def test_columns_are_scaled_by_their_usual_difference():
    values = np.array(
        [
            [1.0, 7.0, 5.0, NAN],
            [4.0, 7.0, NAN, NAN],
            [9.0, 7.0, NAN, NAN],
            [NAN, 7.0, NAN, NAN],
        ]
    )
    scaled, units = column_comparisons._scaled(values)
    # Of 1, 4 and 9 the differences are 3, 5 and 8, and the median is 4; equals have none
    assert units.tolist() == [5.0, 1.0, 1.0, 1.0]
    assert scaled[:3, 0].tolist() == [-0.6, 0.0, 1.0]
    assert scaled[:, 1].tolist() == [0.0] * 4
    assert np.isnan(scaled[:, 2:]).all() and np.isnan(scaled[3, 0])
    # Two equals do not make the usual difference smaller
    _, units = column_comparisons._scaled(np.array([[1.0], [1.0], [2.0], [7.0]]))
    assert units.tolist() == [5.0]
    # Of more than a hundred rows the quartiles tell it
    many = np.arange(101.0)[:, None]
    _, units = column_comparisons._scaled(many)
    assert units[0] == pytest.approx(50 / 2**0.5)
    _, units = column_comparisons._scaled(many[:100])
    assert units[0] == np.median([b - a for a in range(100) for b in range(a + 1, 100)])
    assert column_comparisons._scaled(np.ones((101, 1)))[1].tolist() == [1.0]


def test_differences_are_means_over_the_columns_of_a_unit_that_both_rows_have():
    rng = np.random.default_rng(6)
    scaled = rng.normal(size=(4, 7))
    units = np.array([2, 0, 0, 5, 2, 2, 0])
    scaled[1, [0, 4]] = NAN
    scaled[2, [3]] = NAN
    scaled[3, [0, 4, 5]] = NAN
    first, second = np.triu_indices(4, 1)
    each, count = column_comparisons._differences(scaled, units, first, second)
    for pair, (a, b) in enumerate(zip(first, second)):
        there = 0
        for n, unit in enumerate((0, 2, 5)):
            gaps = (scaled[a] - scaled[b])[units == unit]
            gaps = gaps[~np.isnan(gaps)]
            there += len(gaps) > 0
            mean = gaps.mean() if len(gaps) else 0.0
            assert each[n, pair] == pytest.approx(mean, abs=1e-6)
        assert count[pair] == there


def test_a_pair_is_tested_over_images_and_trainings_in_the_columns_that_both_kept():
    rng = np.random.default_rng(7)
    scaled = rng.normal(size=(4, 5))
    scaled[2, 0] = NAN
    scaled[3] = NAN
    moved = rng.normal(size=(4, 5, 300))
    moved[1, 2, 17] = NAN
    scales = np.array([2.0, 0.5, 1.0, 4.0, 3.0])
    unknown = TrainingNoise(9.0, 9.0, 3)
    noises = [TrainingNoise(3.0, 2.0, 6), NOTHING_TRAINED, NOTHING_TRAINED, unknown]
    noises.append(TrainingNoise(1.0, 0.0, 4))
    runs = np.array([[1, 2, 3, 1, 2], [4, 1, 1, 1, 1], [2, 2, 5, 1, 3], [1] * 5])
    for trainings in (None, column_comparisons.Trainings(noises, runs)):
        found = column_comparisons._over_images(scaled, scales, moved, trainings)
        for pair, (a, b) in enumerate(itertools.combinations(range(4), 2)):
            columns = []
            for c in range(5):
                kept = np.isfinite(scaled[[a, b], c]).all()
                kept &= np.isfinite(moved[[a, b], c]).all()
                if kept and (trainings is None or noises[c].known):
                    columns.append(c)
            mean, variance, df = (part[pair] for part in found)
            if b == 3:
                assert np.isnan([mean, variance]).all()
                continue
            gaps = [scaled[a, c] - scaled[b, c] for c in columns]
            assert mean == pytest.approx(np.mean(gaps))
            together = np.mean([moved[a, c] - moved[b, c] for c in columns], axis=0)
            whole = together.var(ddof=1)
            seeds = []
            for c in columns:
                weight = 1 / runs[a, c] + 1 / runs[b, c]
                weight /= (scales[c] * len(columns)) ** 2
                if trainings is not None:
                    whole += noises[c].excess * weight
                    seeds.append((noises[c].seed_variance * weight, noises[c].df))
            assert variance == pytest.approx(whole)
            spread = sum(
                confidence.poorly_known(min(s / whole, 1), k) for s, k in seeds
            )
            assert df == pytest.approx(1 / spread if spread else np.inf)


def test_wins_are_counted_column_by_column_and_ties_are_halves():
    rng = np.random.default_rng(8)
    values = rng.integers(0, 4, (5, 9)).astype(float)
    values[rng.random((5, 9)) < 0.3] = NAN
    won, met = rank_intervals._wins(values)
    for a, b in itertools.product(range(5), repeat=2):
        both = ~np.isnan(values[a] + values[b]) & (a != b)
        assert met[a, b] == both.sum()
        wins = (values[a] > values[b])[both].sum() + (values[a] == values[b])[
            both
        ].sum() / 2
        assert won[a, b] == wins
    # The largest likelihood: each row wins as often as it should, the imagined tie included
    strength = rank_intervals._strengths(won, met)
    expected = met / (1 + np.exp(strength[None, :] - strength[:, None]))
    imagined = 1 / (1 + np.exp(-strength))
    np.testing.assert_allclose(expected.sum(1) + imagined, won.sum(1) + 0.5, atol=1e-6)


def test_groups_stand_one_below_the_other_and_a_circle_is_one():
    above = np.zeros((6, 6), bool)
    for high, low in ((5, 0), (0, 1), (1, 2), (2, 0), (3, 2), (5, 3)):
        above[high, low] = True
    # 5 and 4 have nobody above, and 3 only 5; 0, 1 and 2 are a circle
    assert rank_intervals._groups(above) == [3, 3, 3, 2, 1, 1]


def test_intervals_count_who_is_surely_before_and_behind():
    values = np.array([[3.0, 3.0], [2.0, 2.0], [1.0, NAN], [NAN, NAN]])
    above = np.zeros((4, 4), bool)
    above[0, [1, 2]] = True
    strength = np.array([1.0, 0.0, 0.0, -1.0])
    places = rank_intervals._places(values, strength, above)
    assert [place.rank for place in places] == [1, 2, 2, 4]
    assert [place.interval for place in places] == [(1, 2), (2, 4), (2, 4), (1, 4)]
    assert [place.average for place in places] == [1.0, 2.0, 3.0, None]
    assert [place.columns for place in places] == [2, 2, 1, 0]
    assert [place.group for place in places] == [1, 2, 2, 1]
    # Against rows as strong the half is won
    odds = [1 / (1 + np.exp(-gap)) for gap in (1, 1, 2)]
    assert places[0].win_rate == pytest.approx(100 * sum(odds) / 3)
    ranking = rank_intervals.Ranking(places, "columns", 2, above, True)
    assert ranking.leaders == [0, 3]


def test_six_datasets_are_enough_and_not_too_many_rows_are_resampled(monkeypatch):
    values = np.stack([np.arange(6.0) + 50, np.arange(6.0) + 40])
    datasets = list("abcdef")
    assert of(values, datasets=datasets).over == "datasets"
    assert of(values, datasets=datasets).units == 6
    five = of(values, datasets=list("abcdee"))
    assert (five.over, five.units, five.tested) == ("columns", 6, False)
    assert of(values, datasets=datasets, by_images=True).over == "images"
    # A column in which nobody has a number is none
    empty = np.column_stack([values, [NAN, NAN]])
    assert of(empty, datasets=[*datasets, "g"]).units == 6
    monkeypatch.setattr(column_comparisons, "MOST_BY_IMAGES", 5)
    moved = np.random.default_rng(9).normal(size=(6, 2, resampling.COUNT))
    many = np.arange(12.0).reshape(6, 2)
    assert of(many[:5], noise=moved[:5]).tested
    assert not of(many, noise=moved).tested


def told_apart(won, lost, images, columns=1):
    """Whether a row that is right alone on `won` images is above one that is right alone on
    `lost`, both being right on every second one of the others."""
    difference = np.repeat([1, -1, 0], [won, lost, images - won - lost])
    both = (difference == 0) & (np.arange(images) % 2 == 0)
    values = []
    moved = []
    for right in (both | (difference > 0), both | (difference < 0)):
        kept = {"label": np.zeros(images, int), "manifest": np.array(str(images))}
        kept["prediction"] = 1 - right.astype(int)
        drawn = resamples.of_arrays(kept, "top1")
        values.append([100 * right.mean()] * columns)
        moved.append([drawn - drawn.mean()] * columns)
    counts = np.full(columns, float(images))
    found = of(values, datasets=["one"] * columns, noise=np.array(moved), images=counts)
    assert found.tested
    return bool(found.above[0, 1]), of_images(difference)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("images", [9, 15, 30])
def test_few_images_tell_no_more_apart_than_their_paired_test(images, columns):
    """Three images of nine that one row alone gets right are no evidence (p = 0.125); columns of
    the same images add none."""
    decided = 0
    for lost in range(3):
        for won in range(lost + 1, images - lost):
            above, paired = told_apart(won, lost, images, columns)
            decided += above
            assert paired.p < 0.05 or not above, (won, lost)
            # Nor much less: it is found where the paired test is sure
            assert above or paired.p > 0.02, (won, lost)
    assert decided


def test_a_column_that_shows_nothing_hides_nothing():
    """A row that is 8 standard errors ahead in two columns leads, however small its difference in a
    third one is; and of equals few are told apart."""
    rng = np.random.default_rng(10)

    def drawn(gaps):
        moved = rng.normal(size=(2, len(gaps), 500))
        values = 60 + np.array([gaps, [0.0] * len(gaps)])
        return of(values, noise=moved, images=np.full(len(gaps), 1000.0))

    for third in (-1.0, -0.1, 0.0, 0.1, 1.0):
        assert drawn([11.0, 11.0, third]).above[0, 1], third
    equals = [drawn(rng.normal(scale=2**0.5, size=3)).above.any() for _ in range(300)]
    assert np.mean(equals) < 0.06


def test_the_error_of_a_column_is_that_of_a_difference_of_two_rows():
    rng = np.random.default_rng(11)
    noise = rng.normal(size=(4, 3, 400)) * np.array([1.0, 3.0, 1.0])[None, :, None]
    noise += 5 * rng.normal(size=(1, 3, 400))  # what all rows share
    noise[3, 1] = NAN
    noise[1:, 2] = NAN
    runs = np.array([[1, 2, 1], [4, 1, 1], [1, 1, 1], [2, 1, 1]])
    noises = [TrainingNoise(3.0, 2.0, 6), NOTHING_TRAINED, NOTHING_TRAINED]
    lists = column_comparisons.ColumnImages(np.zeros(3, int), np.array([50.0, 25, 9]))
    found = column_comparisons._errors(
        noise, column_comparisons.Trainings(noises, runs), lists
    )
    for c, rows in ((0, range(4)), (1, range(3))):
        squares = []
        for a, b in itertools.combinations(rows, 2):
            own = (noise[a, c] - noise[b, c]).var(ddof=1)
            own += noises[c].excess * (1 / runs[a, c] + 1 / runs[b, c])
            squares.append(own + (100 / lists.counts[c]) ** 2)
        assert found[c] == pytest.approx(np.mean(squares) ** 0.5)
    assert found[2] == 0, "nobody to differ from"


def test_an_image_counts_in_the_unit_of_its_column():
    """A gap of 10 points over 30 images is tested alike, whatever the columns' spreads are."""
    scaled = np.array([[10.0, 1.0], [0.0, 0.0]])
    still = np.zeros((2, 2, 300))
    lists = column_comparisons.ColumnImages(np.array([0, 1]), np.array([50.0, 200.0]))
    for scales in (np.array([1.0, 1.0]), np.array([4.0, 0.5])):
        _, variance, df = column_comparisons._over_images(
            scaled, scales, still, None, lists
        )
        # An image is 2 points of the one, half a point of the other, each over two columns
        steps = np.array([2.0, 0.5]) / scales / 2
        assert variance[0] == pytest.approx((steps**2).sum())
        assert df[0] == pytest.approx(49, rel=0.05)
    same = column_comparisons.ColumnImages(np.array([0, 0]), np.array([50.0, 50.0]))
    _, variance, _ = column_comparisons._over_images(
        scaled, np.ones(2), still, None, same
    )
    assert variance[0] == pytest.approx(2.0**2), "the same image moves both"
