"""Ranks over many columns: what is plain by hand, and a small part of `benchmarks/ranks.py`."""

import numpy as np
import pytest

from backbench.stats import rank_intervals, resampling
from benchmarks import ranks as simulated

NAN = np.nan


def of(values, **more):
    values = np.asarray(values, float)
    datasets = more.pop("datasets", [str(c) for c in range(values.shape[1])])
    return rank_intervals.ranking(values, datasets, **more)


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
