"""Many tests together."""

import itertools

import numpy as np
import pytest

from backbench.stats.multiple_tests import holm, sign_flips


def test_holm_by_hand():
    assert holm(np.array([0.04, 0.001, 0.03])) == pytest.approx([0.06, 0.003, 0.06])
    assert holm(np.array([0.5, 0.6])) == pytest.approx([1.0, 1.0])


def test_signs_of_few_units_are_counted_out():
    """Beside a loop over all 128 outcomes of seven units, one test at a time leaving."""
    rng = np.random.default_rng(0)
    differences = rng.normal([3.0, 1.2, 0.1, 0.0], 1.0, (7, 4)).astype(np.float32)
    observed = np.abs(differences.sum(0))
    outcomes = []
    for signs in itertools.product((1, -1), repeat=7):
        outcomes.append(np.array(signs) @ differences)
    left = [0, 1, 2, 3]
    apart = []
    while left:
        largest = [np.abs(outcome[left]).max() for outcome in outcomes]
        first = max(left, key=lambda k: observed[k])
        if np.mean([value >= observed[first] - 1e-4 for value in largest]) > 0.05:
            break
        apart.append(first)
        left.remove(first)
    found = sign_flips(differences, np.full(4, 7), 6)
    assert np.flatnonzero(found).tolist() == sorted(apart) == [0, 1]


def test_tests_of_too_few_units_are_left_out():
    differences = np.ones((8, 2), np.float32)
    differences[3:, 1] = 0
    assert sign_flips(differences, np.array([8, 3]), 6).tolist() == [True, False]


@pytest.mark.parametrize("units", [6, 9, 20])
def test_equals_are_told_apart_one_time_in_twenty(units):
    """Whatever the tests share and however much they spread: 600 families of correlated tests."""
    rng = np.random.default_rng(units)
    wrong = 0
    for _ in range(600):
        rows = rng.standard_t(3, (units, 5)) * np.exp(rng.normal(0, 1, 5))
        first, second = np.triu_indices(5, 1)
        differences = (rows[:, first] - rows[:, second]).astype(np.float32)
        wrong += sign_flips(differences, np.full(10, units), 6).any()
    assert wrong / 600 <= 0.05 + 3 * 0.009
