"""p-values of many tests together, such that all of them are right at once with 95% confidence."""

import itertools

import numpy as np

ALPHA = 0.05
FLIPS = 1999  # random outcomes, if there are too many to count them all
FLIPS_OF_MANY = 199  # of more than MANY tests, which take seconds
MANY = 5000
_COUNTED = 12  # units of which all 2,048 outcomes are counted
_AT_ONCE = 2000  # tests


def holm(p: np.ndarray) -> np.ndarray:
    """Adjusted p-values (Holm, 1979): the smallest times the number of tests, the next times one
    less, and so on, and none smaller than the one before."""
    order = np.argsort(p, kind="stable")
    left = len(p) - np.arange(len(p))
    out = np.empty(len(p))
    out[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * left))
    return out


def sign_flips(differences: np.ndarray, count: np.ndarray, fewest: int) -> np.ndarray:
    """Test each column of `differences` (units, tests) for a mean of 0: (tests,) bool, True if it
    is told from 0. A unit that a test lacks holds 0 there; `count` (tests,) is how many units it
    has, and tests with less than `fewest` are left out.

    If two rows are equally good, a unit's difference is as likely to be minus itself. So all
    differences of a unit turn their sign together, by a coin. p is how often the largest of
    |sum| / sqrt(count) over all tests is as large as the observed one (Westfall and Young, 1993).
    That is exact whatever the spread of the differences and whatever they share. Tests that are
    told from 0 then leave, and the others are looked at again (step-down: Romano and Wolf, 2005).
    """
    scale = (1 / np.sqrt(np.maximum(count, 1))).astype(np.float32)
    observed = np.abs(differences.sum(0)) * scale
    signs = _signs(*differences.shape)
    apart = np.zeros(len(count), bool)
    left = np.flatnonzero(count >= fewest)
    while len(left):
        # 1. The largest statistic of each outcome, among the tests that are left
        largest = np.zeros(len(signs), np.float32)
        for start in range(0, len(left), _AT_ONCE):
            some = left[start : start + _AT_ONCE]
            flipped = signs @ (differences[:, some] * scale[some])
            np.maximum(largest, flipped.max(1), out=largest)
            np.maximum(largest, -flipped.min(1), out=largest)
        # 2. How many outcomes are as large, the observed one included; float32 rounds
        smaller = np.searchsorted(np.sort(largest), observed[left] - 1e-4)
        p = (1 + len(signs) - smaller) / (1 + len(signs))
        if not (p <= ALPHA).any():
            break
        apart[left[p <= ALPHA]] = True
        left = left[p > ALPHA]
    return apart


def _signs(units: int, tests: int) -> np.ndarray:
    """Outcomes (flips, units) of the coins, 1 or -1, beside the observed one: all of few units,
    else random ones, always the same. The first coin stays 1: -outcome is the same test."""
    if units <= _COUNTED:
        rest = list(itertools.product((1, -1), repeat=units - 1))[1:]
        return np.array([(1, *signs) for signs in rest], np.float32)
    rng = np.random.Generator(np.random.PCG64(units))
    flips = FLIPS if tests <= MANY else FLIPS_OF_MANY
    return (rng.integers(0, 2, size=(flips, units)) * 2 - 1).astype(np.float32)
