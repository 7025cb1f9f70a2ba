"""Many tests together: with 95% confidence, none of them wrongly tells two equals apart."""

import itertools

import numpy as np

ALPHA = 0.05
FLIPS = 1999  # random outcomes, if there are too many to count them all
FLIPS_OF_MANY = 199  # random outcomes for more than MANY tests, which take seconds
MANY = 5000
_COUNTED = 12  # of so many units or fewer, all outcomes are counted: up to 2,048
_AT_ONCE = 2000  # tests


def holm(p: np.ndarray) -> np.ndarray:
    """Adjust p-values (Holm, 1979).

    The smallest is multiplied by the number of tests, the next by one less, and so on; none becomes
    smaller than the one before."""
    order = np.argsort(p, kind="stable")
    left = len(p) - np.arange(len(p))
    out = np.empty(len(p))
    out[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * left))
    return out


def sign_flips(differences: np.ndarray, count: np.ndarray, fewest: int) -> np.ndarray:
    """Test each column of `differences` (units, tests) for a mean of 0.

    Return (tests,) bool: True if the mean is told from 0. A unit that a test lacks holds 0 there;
    `count` (tests,) is how many units it has, and tests with less than `fewest` are left out.

    If two rows are equally good, a unit's difference is as likely to be minus itself. So all
    differences of a unit turn their sign together, by a coin. p is how often the largest of
    |sum| / sqrt(count) over all tests is as large as the observed one (Westfall and Young, 1993).
    That is exact for any spread of the differences, and however tests depend on each other. Tests
    that are told from 0 then leave, and the others are tested again (step-down: Romano and Wolf,
    2005).
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
    """Return outcomes (flips, units) of the coins, 1 or -1, without the observed one.

    Of few units these are all, otherwise random ones, always the same."""
    if units <= _COUNTED:
        # The first coin stays 1, because turning all signs changes no |sum|. The first outcome is
        # the observed one
        others = list(itertools.product((1, -1), repeat=units - 1))[1:]
        return np.array([(1, *signs) for signs in others], np.float32)
    rng = np.random.Generator(np.random.PCG64(units))
    flips = FLIPS if tests <= MANY else FLIPS_OF_MANY
    return (rng.integers(0, 2, size=(flips, units)) * 2 - 1).astype(np.float32)
