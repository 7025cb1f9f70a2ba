"""95% intervals of measured values, in percent. docs/results.md says what they cover.

All of them have one form. An estimate p with variance V is as well known as the share of hits among
n = p (1 - p) / V independent images: the effective sample size of survey statistics (Korn and
Graubard, 1998). Its interval is Jeffreys' of n images (Brown, Cai and DasGupta, 2001). It keeps a
width where all images are right, and it never leaves [0, 100].

Two variances need more than a sum of squares. They are derived here.

A mean of class means (`ClassWeights`). Each class has a variance of its own, and many classes have
too few images to know it: three images that are all right would say that nothing varies. So a
class's own variance is averaged with that of all classes together, which weighs as much as three
images (a moderated variance: Smyth, 2004).

A mean over draws and images (`draws_and_images`). With a draw's effect a, an image's effect b and
their interaction c, a hit is x = mean + a + b + c. The mean of D draws and N images has variance
    var(a) / D + var(b) / N + var(c) / (D N).
The variance of the D draw means, divided by D, estimates the first and the last term, with D - 1
degrees of freedom. The variance of the N image means, divided by N, estimates the last two. Their
sum counts the interaction twice, so it is taken off once. (Seeds are draws, too.)

How well is that sum known? Satterthwaite's answer, with q the draws' part of it, is
    1 / df = q^2 / (D - 1) + (images' part)^2 / (N - 1).
But q is estimated by the same few draws. If they agree by chance, q is small, and df claims that
the variance is well known just when it is too small. For normal draws the error can be integrated
over all outcomes of the draws' variance. Two equal rows are then called different in up to 12.8% of
cases for D = 2, 7.8% for 3, 5.8% for 5 and 5.0% for 20. Howe's margin (1974) holds 5% at any q, and
that of Cochran and Cox (1950) does for D = 3 and more. But at D = 3 and middle q they call only 2.3
and 2.9% different, and Howe's intervals of three seeds were 42% wider on a simulated board. So q^2
is made larger instead,
    q^max(2 - k q / (D - 1), 0),
which is Satterthwaite's for many draws and has D - 1 degrees of freedom at q = 1. The only number
to choose is k. With k = 5, equal rows are called different in 4.5 to 5.1% of cases for D = 3, and
closer to 5% for more draws, whatever q is. For D = 2 it would be 7.5%; there k = 12 gives 3.5 to
5.2%. tests/backbench/stats/test_confidence.py does the integration.
"""

import math
from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]
# 95% lie between these quantiles
LOW = 0.025
HIGH = 0.975
NORMAL = 1.959964  # the standard normal's HIGH
_MANY = 1e9  # degrees of freedom that stand for infinitely many
_PRIOR = 0.5  # Jeffreys' prior: half a hit and half a miss
_SHARED = 3.0  # images: the weight of all classes' variance beside a class's own
# k of the degrees of freedom over draws and images; of two draws
_K = 5.0
_K_OF_TWO = 12.0


def t_quantile(df: float) -> float:
    """Return the quantile HIGH of Student's t."""
    # Not from `scipy.stats`, whose import takes a second
    from scipy.special import stdtrit

    return float(stdtrit(min(df, _MANY), HIGH))


def t_both_tails(t: float, df: float) -> float:
    """Return the probability that Student's t is as far from 0 as `t`."""
    from scipy.special import stdtr

    return float(2 * stdtr(min(df, _MANY), -abs(t)))


def of_share(
    share: float, variance: float, images: float, df: float = math.inf
) -> Interval:
    """Return the interval, in percent, of an estimate `share` in [0, 1].

    Its variance is known with `df` degrees of freedom. If the variance is zero, the estimate counts
    as `images` independent trials."""
    from scipy.special import betaincinv

    # A sum of weights is 1 but for its last bits
    share = min(max(round(share, 12), 0.0), 1.0)
    n = share * (1 - share) / variance if variance > 0 else 0.0
    if n == 0:
        n = images
    # If the variance is poorly known, t's quantile is wider than the normal's
    wider = t_quantile(max(df, 1.0)) / NORMAL
    n = max(n, 1e-3) / wider**2
    hits = n * share + _PRIOR
    misses = n * (1 - share) + _PRIOR
    low = 0.0 if share == 0 else float(betaincinv(hits, misses, LOW))
    high = 1.0 if share == 1 else float(betaincinv(hits, misses, HIGH))
    return 100 * min(low, share), 100 * max(high, share)


def of_hits(hits: np.ndarray, label: np.ndarray | None = None) -> Interval:
    """Return the interval of the share of hits (N,), for new images.

    With `label` (N,) it is that of the mean of class means."""
    if label is None:
        share = float(hits.mean())
        return of_share(share, share * (1 - share) / len(hits), len(hits))
    classes = ClassWeights(label)
    right = hits.astype(np.float64)
    share = float((classes.weight * right).sum())
    variance = classes.variance_of_mean(right)
    return of_share(share, variance, classes.images)


def of_draws(hits: np.ndarray, label: np.ndarray | None = None) -> Interval:
    """Return the interval of the mean over draws of labels, for new draws and new images.

    `hits` (D, N) says which images are right in each draw. With `label` (N,) it is that of the mean
    of class means."""
    if len(hits) < 2:
        return of_hits(hits[0], label)
    n = hits.shape[1]
    right = hits.astype(np.float64)
    if label is None:
        weight = np.full(n, 1 / n)
        images = float(n)
        by_image = float(right.mean(0).var(ddof=1)) / n
    else:
        classes = ClassWeights(label)
        weight = classes.weight
        images = classes.images
        by_image = classes.variance_of_mean(right.mean(0))
    # If errors are rare, few draws show too little variation between images. So the variance of one
    # imagined image is added, counted half as the rarer outcome (right, or wrong) and half not. It
    # has that outcome in as many draws as the images that were seen with it, in the mean
    share = right.mean(0)
    rare = 1 - share if share.mean() > 0.5 else share
    of_rare = float(rare[rare > 0].mean()) if rare.any() else 1.0
    by_image += 0.5 * of_rare / images**2
    variance, df = draws_and_images(right, weight, by_image)
    return of_share(float((right @ weight).mean()), variance, images, df)


def of_seeds(values: Sequence[float]) -> Interval | None:
    """Return the t-interval of the mean over seeds, in percent; None below two seeds."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    half = t_quantile(n - 1) * spread / math.sqrt(n)
    return mean - half, mean + half


def of_mean(
    values: Sequence[float], ends: Sequence[Interval], df: Sequence[float]
) -> Interval:
    """Return the interval of the mean of independent values in percent, from those of the values.

    `df` are each interval's degrees of freedom: infinite over images, seeds - 1 over seeds."""
    # In units of the normal's half-width, squared
    variance = of_spread = 0.0
    for (low, high), known in zip(ends, df, strict=True):
        # 1. Variances add. Each is taken from its interval's half-width, which has t's quantile
        of_one = (NORMAL / t_quantile(known) * (high - low) / 2) ** 2
        variance += of_one
        # 2. Satterthwaite's degrees of freedom of the sum, with Welch's correction: the square of
        #    an estimated variance is too large by (df + 2) / df
        of_spread += of_one**2 / (known + 2)
    wider = t_quantile(variance**2 / of_spread) / NORMAL if of_spread else 1.0
    mean = sum(values) / len(values)
    half = wider * math.sqrt(variance) / len(values)
    # Within 0 and 100, but it always holds the mean
    return max(mean - half, min(mean, 0.0)), min(mean + half, max(mean, 100.0))


def of_resamples(share: float, resamples: np.ndarray, images: int) -> Interval | None:
    """Return the interval of a score in [0, 1] that is no mean over images, as an AP.

    `resamples` (B,) are its values on resamples of `images` images. None if fewer than two of them
    are defined."""
    defined = resamples[np.isfinite(resamples)]
    if len(defined) < 2:
        return None
    # A resample has the spread of the sample, which is smaller than the population's
    variance = float(defined.var(ddof=1)) * images / max(images - 1, 1)
    return of_share(share, variance, images, min(len(defined), images) - 1)


def draws_and_images(
    x: np.ndarray, weight: np.ndarray, by_image: float
) -> tuple[float, float]:
    """Return the variance of the mean of `x` (D, N) over draws and images, both chosen at random,
    and its degrees of freedom.

    `weight` (N,) sums to 1; `by_image` is the variance over images of the mean over these draws.
    The derivation is on top of this file."""
    draws, n = x.shape
    # 1. The draws' means vary by the draw, and by the interaction of draw and image
    of_draw = x @ weight
    by_draw = float(of_draw.var(ddof=1)) / draws
    # 2. The interaction is x w minus its means over draws and over images. Its sum of squares is
    #    that of x w minus those of the means, which are orthogonal to it
    squares = float((x**2).sum(0) @ weight**2)
    image_squares = draws * float((x.mean(0) * weight) @ (x.mean(0) * weight))
    draw_squares = float(((of_draw - of_draw.mean()) ** 2).sum()) / n
    left = max(squares - image_squares - draw_squares, 0.0)
    both = n * left / ((draws - 1) * max(n - 1, 1)) / draws
    # 3. Both variances hold the interaction, so it is taken off once. The draws' part may be nothing
    #    by chance, where draws agree; the images' part is known from all images. So at least half of
    #    it stays, and all of it with two draws, which say nothing of a third
    least = by_image if draws == 2 else by_image / 2
    variance = max(by_draw + max(by_image - both, 0.0), least)
    if not variance:
        return 0.0, math.inf
    # 4. Degrees of freedom
    spread = poorly_known(by_draw / variance, draws - 1)
    spread += min(by_image / variance, 1.0) ** 2 / max(n - 1, 1)
    return variance, 1 / spread


def poorly_known(part: float, df: float) -> float:
    """Return what a part q (0 to 1) of a variance, estimated with few `df`, adds to the whole's 1 / df.

    It is q^max(2 - k q / df, 0) / df, derived on top of this file."""
    trust = _K / df if df > 1 else _K_OF_TWO
    return part ** max(2 - trust * part, 0) / df


def weights(n: int, classes: np.ndarray | None) -> np.ndarray:
    """Return weights (N,) that make a mean a sum: 1/N, or 1/(C N_c) for a mean of C class means."""
    if classes is None:
        return np.full(n, 1 / n)
    return ClassWeights(classes).weight


class ClassWeights:
    """The classes of a test list (N,) as strata of equal weight.

    `weight` (N,) makes a mean of class means a plain sum. `images` is the effective number of
    images: so many of equal weight would know the mean as well."""

    def __init__(self, label: np.ndarray) -> None:
        _, self.of, self.size = np.unique(
            label, return_inverse=True, return_counts=True
        )
        self.count = len(self.size)
        self.weight = 1 / (self.count * self.size[self.of])
        self.images = float(self.count**2 / (1 / self.size).sum())

    def variance_of_mean(self, x: np.ndarray) -> float:
        """Return the variance of the mean of class means of `x` (N,), over new images per class."""
        mean = np.bincount(self.of, x) / self.size
        squares = np.bincount(self.of, (x - mean[self.of]) ** 2)
        # 1. The variance within all classes; if each has one image, the variance of all images
        degrees = self.size - 1
        shared = squares.sum() / degrees.sum() if degrees.sum() else float(x.var())
        # 2. A class's own variance, averaged with _SHARED images' worth of the shared one
        own = (squares + _SHARED * shared) / (degrees + _SHARED)
        return float((own / self.size).sum()) / self.count**2
