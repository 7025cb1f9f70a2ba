"""Many tests together."""

import itertools

import numpy as np
import pytest

from backbench.stats import multiple_tests
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


def test_tests_leave_one_after_another_until_none_is_told_apart():
    """Three tests of eight units: the second is told apart only once the first has left."""
    units = np.array([1, 1, 1, 1, 1, 1, 1, 1], np.float32)
    weak = np.array([1, 1, 1, 1, 1, 1, 1, -0.3], np.float32)
    none = np.array([1, -1, 1, -1, 1, -1, 1, -1], np.float32)
    differences = np.stack([100 * units, weak, none], 1)
    found = sign_flips(differences, np.full(3, 8), 6)
    assert found.tolist() == [True, True, False]
    # Exactly as many units as are needed
    six = differences[:6, :2]
    assert sign_flips(six, np.full(2, 6), 6).tolist() == [True, True]
    assert not sign_flips(six, np.full(2, 5), 6).any()
    # A test with fewer units counts by the root of their number
    fewer = np.stack([units, units], 1)
    fewer[6:, 1] = 0
    assert sign_flips(fewer, np.array([8, 6]), 6).tolist() == [True, True]


def test_a_sum_of_fewer_units_weighs_by_the_root_of_their_number():
    """Six of six units say more than seven of eight, though both sums are 6."""
    most = np.array([1, 1, 1, 1, 1, 1, -1, 1], np.float32)
    six = np.array([1, 1, 1, 1, 1, 1, 0, 0], np.float32)
    found = sign_flips(np.stack([most, six], 1), np.array([8, 6]), 6)
    # 4 of 128 outcomes are as large as six of six, 9 as seven of eight
    assert found.tolist() == [False, True]


def test_tests_in_parts_are_the_tests_together(monkeypatch):
    rng = np.random.default_rng(1)
    differences = rng.normal(np.linspace(0, 3, 7), 1, (9, 7)).astype(np.float32)
    together = sign_flips(differences, np.full(7, 9), 6)
    assert 0 < together.sum() < 7
    monkeypatch.setattr(multiple_tests, "_AT_ONCE", 2)
    assert sign_flips(differences, np.full(7, 9), 6).tolist() == together.tolist()


@pytest.mark.parametrize(
    ("units", "tests", "outcomes"),
    [(6, 3, 31), (12, 3, 2047), (13, 5000, 1999), (13, 5001, 199)],
)
def test_all_outcomes_of_few_units_are_counted_and_others_drawn(units, tests, outcomes):
    signs = multiple_tests._signs(units, tests)
    assert signs.shape == (outcomes, units)
    assert set(np.unique(signs)) == {-1.0, 1.0}
    if units <= 12:
        assert (signs[:, 0] == 1).all(), "all signs turned are the same outcome"
        assert len(np.unique(signs, axis=0)) == outcomes
        assert (signs.min(1) == -1).all(), "the observed one is not among them"
