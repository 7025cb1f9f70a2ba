"""The difference of two rows scored on the same images: its interval and its p-value.

The rows share hard and easy images, so the difference is far better known than either value.
Nothing here compares the intervals of two values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backbench.stats import confidence

ALPHA = 0.05


@dataclass(frozen=True)
class Difference:
    """The difference a - b of two rows."""

    value: float  # in percent
    ci95: confidence.Interval
    p: float  # two-sided
    # What was paired: images | draws and images | resamples; then "and trainings", if those vary
    paired: str
    n: int  # the number of what was paired
    # The variance of the value, in points squared, is known with `df` degrees of freedom
    variance: float = 0.0
    df: float = math.inf
    # False if both rows were trained, and nobody knows how far a second training would move them
    trainings_known: bool = True

    @property
    def real(self) -> bool:
        """True if the test and the interval tell the rows apart, and nothing else can vary."""
        told_apart = self.p < ALPHA and not self.ci95[0] <= 0 <= self.ci95[1]
        return told_apart and self.trainings_known


def of_images(d: np.ndarray, classes: np.ndarray | None = None) -> Difference:
    """Return the mean of differences `d` (N,), each -1, 0 or 1; with `classes` (N,) of class means.

    The interval is normal, with half a count added to either side (Agresti and Min, 2005). The test
    is McNemar's mid-p (Fagerland, Lydersen and Laake, 2013). Class means have no binomial: their
    p-value is that of the interval.
    """
    from scipy.special import bdtr

    n = len(d)
    weight = confidence.weights(n, classes)
    step = weight * d
    value = float(step.sum())
    # The variance of a sum of N independent steps is the sum of squares minus N times the squared
    # mean. One imagined image is added, half won and half lost, so that no interval is empty
    variance = float((step**2).sum() - value**2 / n) + float((weight**2).mean())
    error = math.sqrt(max(variance, 0.0))
    if classes is None:
        # If the rows are equal, a coin decides each image on which they disagree. p is twice the
        # smaller tail of the binomial, with half of the probability of the observed count:
        # 2 (P[X < least] + P[X = least] / 2) = P[X <= least] + P[X < least]
        won = int((d > 0).sum())
        lost = int((d < 0).sum())
        least = min(won, lost)
        at_most = float(bdtr(least, won + lost, 0.5))
        below = float(bdtr(least - 1, won + lost, 0.5)) if least else 0.0
        p = min(1.0, at_most + below)
    else:
        p = confidence.t_both_tails(value / error, math.inf)
    return _difference(value, error, p, "images", n)


def of_draws_and_images(d: np.ndarray, classes: np.ndarray | None = None) -> Difference:
    """Return the mean of differences `d` (D, N) of the same images in the same draws of labels.

    (Or by the same seeds.) The t-test is for new draws and new images: see
    confidence.draws_and_images."""
    n = d.shape[1]
    weight = confidence.weights(n, classes)
    mean = d.mean(0)
    by_image = n * float((weight * mean).var(ddof=1)) if n > 1 else 0.0
    variance, df = confidence.draws_and_images(d, weight, by_image)
    # The imagined images are won and lost in as many draws as those on which the two differ
    of_differing = float((mean[mean != 0] ** 2).mean()) if mean.any() else 1.0
    error = math.sqrt(variance + float((weight**2).mean()) * of_differing)
    value = float((d @ weight).mean())
    p = confidence.t_both_tails(value / error, df)
    return _difference(value, error, p, "draws and images", n, df=df)


def of_resamples(
    d: np.ndarray,
    images: int,
    *,
    value: float | None = None,
    imagined: float = 100.0,
) -> Difference | None:
    """Return the mean of differences `d` (B,) in percent on the same resamples of `images` images, or
    the difference `value` on these images where it is known.

    The t-test takes its spread from the resamples, and from an imagined image that differs by
    `imagined` points. None if fewer than two of them are defined."""
    d = d[np.isfinite(d)]  # a resample without a ground truth has no AP
    if len(d) < 2:
        return None
    if value is None:
        value = float(d.mean())
    # A resample has the spread of the sample, which is smaller than the population's. Half a count
    # is added to either side, as for images
    variance = float(d.var(ddof=1)) * images / max(images - 1, 1)
    variance += (imagined / images) ** 2
    error = math.sqrt(variance)
    df = max(min(images, len(d)) - 1, 1)
    p = confidence.t_both_tails(value / error, df)
    return _difference(value / 100, error / 100, p, "resamples", len(d), df=df)


def _difference(
    value: float, error: float, p: float, paired: str, n: int, *, df: float = math.inf
) -> Difference:
    """Make the difference in percent from its value and its standard error, both fractions."""
    quantile = confidence.NORMAL if math.isinf(df) else confidence.t_quantile(df)
    half = quantile * error
    interval = (100 * (value - half), 100 * (value + half))
    return Difference(100 * value, interval, p, paired, n, (100 * error) ** 2, df)


def tied_with_first(p_values: Sequence[float]) -> int:
    """Count the rows after the first, best first, that cannot be told from it.

    `p_values` are of the first against each of them, 1 if the first is not above.

    The first is chosen for being highest, so a test of it against one of K - 1 others is one of all
    K (K - 1) / 2 pairs (Bonferroni). The last row is tested first: if it is told apart, it leaves,
    and fewer pairs remain for the next. So the chance that any of the equally best is left out is
    at most ALPHA.
    """
    left = len(p_values)
    while left:
        pairs = (left + 1) * left / 2
        if p_values[left - 1] * pairs >= ALPHA:
            break
        left -= 1
    return left
