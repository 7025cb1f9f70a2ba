"""How many labels per class one curve needs to be as good as another is with a given number.

A curve is interpolated on the logarithm of its labels. What it needs is where it first reaches the
other's accuracy: `BEYOND` where it never does, and `BELOW` where its first point is better already.

The interval has every number of labels with which the curve cannot be told from the other's accuracy:
those that the paired test over new draws and new test images does not refuse at 5%. Between two
points the test is of a mixture of their hits, as the curve is of their accuracies. Since the test
holds its level, the interval covers 95% however steep or flat the curve is. (A bootstrap over draws
and images counts twice too often what is special to one draw and one image: in the same simulation
it covers up to 97.9%, and 90.8% with three draws.) benchmarks/labels_needed.py simulates both ends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backbench.stats import confidence, paired_differences

BELOW = 0.0  # fewer labels than the first point has
BEYOND = math.inf  # more than all labels
# Two draws cannot say how far draws vary: see benchmarks/labels_needed.txt
FEWEST_DRAWS = 3
_STEPS = 4  # tests from a point to the next
_ALIKE = 1e-9  # shares of images that are equal but for their rounding


@dataclass(frozen=True)
class LabelsNeeded:
    """How many labels per class a curve needs, or BELOW or BEYOND."""

    value: float
    ci95: tuple[float, float] | None  # None for too few draws


def compare(
    target: np.ndarray,
    curve: np.ndarray,
    labels: Sequence[float],
    classes: np.ndarray | None = None,
) -> LabelsNeeded:
    """Return what a curve needs to be as good as a point of another one, its target.

    `target` (D, N) are the hits of D draws on N test images, and `curve` (P, D, N) those of the same
    draws on the same images at P points with `labels` (P,) per class, in rising order. With
    `classes` (N,) both are scored by means of class means."""
    weight = confidence.weights(target.shape[1], classes)
    # Too few draws have no test
    tested = len(target) >= FEWEST_DRAWS
    logs = np.log(labels)
    at: list[float] = []
    gaps: list[float] = []
    tests: list[float] = []  # each gap, in half-widths of its interval
    for point in range(len(logs)):
        # The last point has none behind it
        steps = _STEPS if point + 1 < len(logs) else 1
        for step in range(steps):
            share = step / _STEPS
            here = curve[point].astype(np.float64)
            log = logs[point]
            if step:
                here += share * (curve[point + 1] - here)
                log += share * (logs[point + 1] - log)
            gap = here - target
            at.append(float(log))
            gaps.append(float((gap @ weight).mean()))
            if tested:
                difference = paired_differences.of_draws_and_images(gap, classes)
                low, high = difference.ci95
                tests.append(2 * difference.value / (high - low))
    value = _first_at_least(at, gaps, -_ALIKE)
    if not tested:
        return LabelsNeeded(value, None)
    # The lower end is where the curve first is not told to be worse, and the upper one where it last
    # is not told to be better
    low = _first_at_least(at, tests, -1.0)
    high = _last_at_most(at, tests, 1.0)
    return LabelsNeeded(value, (low, high))


def _first_at_least(
    at: Sequence[float], values: Sequence[float], least: float
) -> float:
    """Return the labels at which values first reach `least`, between two of them on a line."""
    for n, value in enumerate(values):
        if value >= least:
            if n == 0:
                return math.exp(at[0]) if value <= least + 2 * _ALIKE else BELOW
            share = (least - values[n - 1]) / (value - values[n - 1])
            return math.exp(at[n - 1] + share * (at[n] - at[n - 1]))
    return BEYOND


def _last_at_most(at: Sequence[float], values: Sequence[float], most: float) -> float:
    """Return the labels at which values are at `most` for the last time."""
    for n in reversed(range(len(values))):
        if values[n] <= most:
            if n == len(values) - 1:
                return BEYOND
            share = (most - values[n]) / (values[n + 1] - values[n])
            return math.exp(at[n] + share * (at[n + 1] - at[n]))
    return BELOW
