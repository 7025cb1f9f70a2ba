"""95% intervals of measured values, in percent: what they cover stands in docs/results.md.

All of them have one form. An estimate p with variance V is as well known as the share of hits among
p (1 - p) / V independent images; its interval is Jeffreys' of that many (Brown, Cai and DasGupta,
2001), which does not shrink to nothing where all images are right, and never leaves [0, 100].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Interval = tuple[float, float]
LOW, HIGH = 0.025, 0.975  # the quantiles that 95% lie between
_NORMAL = 1.959964  # the standard normal's HIGH
_MANY = 1e9  # degrees of freedom: none is missed
_PRIOR = 0.5  # Jeffreys': half a hit and half a miss
# How many images the other classes' spread counts as in a class's own. It keeps classes of a few
# images, all right or all wrong, from claiming that nothing varies in them.
_SHARED = 3.0
# Satterthwaite's square of the draws' part p of a variance becomes p^(2 - _TRUST p / (draws - 1)).
# Integrated over normal draws and well-known images, whatever their parts: 4.5 to 5.1% of equals
# are called different, for three draws and for any more. It was up to 7.8% of three with the square,
# and the same exponent leaves 7.5% of two, for which 3.5 to 5.3% is what another one reaches.
_TRUST, _TRUST_OF_TWO = 5.0, 12.0


def t_quantile(df: float) -> float:
    """HIGH of Student's t, with `df` degrees of freedom (`scipy.stats` takes a second to import)."""
    from scipy.special import stdtrit

    return float(stdtrit(min(df, _MANY), HIGH))


def t_both_tails(t: float, df: float) -> float:
    """The probability that Student's t is as far from 0 as `t`."""
    from scipy.special import stdtr

    return float(2 * stdtr(min(df, _MANY), -abs(t)))


def of_share(share: float, variance: float, images: float, df: float = math.inf) -> Interval:
    """Of an estimate `share` in [0, 1] with its variance, itself known with `df` degrees of
    freedom. `images` is as how many hits it counts where nothing varies."""
    from scipy.special import betaincinv

    share = min(max(round(share, 12), 0.0), 1.0)  # a sum of weights is 1 but for its last bits
    n = share * (1 - share) / variance if variance > 0 else 0.0
    n = n or images
    # Of a variance that is known badly the normal's quantile is too small by this much.
    wider = t_quantile(max(df, 1.0)) / _NORMAL
    n = max(n, 1e-3) / wider**2
    hits, misses = n * share + _PRIOR, n * (1 - share) + _PRIOR
    low = 0.0 if share == 0 else float(betaincinv(hits, misses, LOW))
    high = 1.0 if share == 1 else float(betaincinv(hits, misses, HIGH))
    return 100 * min(low, share), 100 * max(high, share)


def of_hits(hits: np.ndarray, label: np.ndarray | None = None) -> Interval:
    """Of the share of right images (N,), or with `label` (N,) of the mean of the classes' shares:
    what it would be on other images of the same kind."""
    import numpy as np

    if label is None:
        share = float(hits.mean())
        return of_share(share, share * (1 - share) / len(hits), len(hits))
    classes = Classes(label)
    right = hits.astype(np.float64)
    share = float((classes.weight * right).sum())
    variance = classes.variance_of_mean(right)
    return of_share(share, variance, classes.images)


def of_draws(hits: np.ndarray, label: np.ndarray | None = None) -> Interval:
    """Of the mean over draws of labels, from which images (D, N) are right in each draw: what it
    would be with other draws and on other images. With `label` (N,) the mean of class means."""
    import numpy as np

    if len(hits) < 2:
        return of_hits(hits[0], label)
    n = hits.shape[1]
    right = hits.astype(np.float64)
    if label is None:
        weight, by_image = np.full(n, 1 / n), float(right.mean(0).var(ddof=1)) / n
        images = float(n)
    else:
        classes = Classes(label)
        weight, images = classes.weight, classes.images
        by_image = classes.variance_of_mean(right.mean(0))
    # Half an image more and half a one less of the rarer kind (sometimes wrong, or sometimes right),
    # as hard as those seen: few draws of few errors show no hard images.
    by_image += 0.5 * _of_the_rare(right.mean(0)) / images**2
    variance, df = two_way(right, weight, by_image)
    return of_share(float((right @ weight).mean()), variance, images, df)


def _of_the_rare(share: np.ndarray) -> float:
    """Of images (N,) right in these shares of the draws: the mean share of wrong (or right,
    whichever is rarer) draws, over the images that have any; 1 where none has."""
    rare = 1 - share if share.mean() > 0.5 else share
    return float(rare[rare > 0].mean()) if rare.any() else 1.0


def two_way(x: np.ndarray, weight: np.ndarray, by_image: float) -> tuple[float, float]:
    """The variance of a mean over draws and images, both chosen at random, and its degrees of
    freedom (Satterthwaite). `x` (D, N); `weight` (N,) sums to 1; `by_image` is the variance over
    images of the mean over these draws."""
    draws, n = x.shape
    # 1. The draws' means vary by the draw, and by what is left between draw and image.
    of_draw = x @ weight
    by_draw = float(of_draw.var(ddof=1)) / draws
    # 2. What is left, x w - its mean over draws - its mean over images, is in both variances, so it
    #    is counted twice: it is taken off once. Its sum of squares is that of x w without those of
    #    the means, which are orthogonal to it.
    squares = float((x**2).sum(0) @ weight**2)
    of_image = draws * float((x.mean(0) * weight) @ (x.mean(0) * weight))
    left = max(squares - of_image - float(((of_draw - of_draw.mean()) ** 2).sum()) / n, 0.0)
    both = n * left / ((draws - 1) * max(n - 1, 1)) / draws
    # 3. What is left of the images' part is known from all images, whatever few draws say; the
    #    draws' part may be nothing, by chance. Draws that agree by chance leave half of the images'
    #    part standing; of two, which say nothing of a third, all of it.
    least = by_image if draws == 2 else by_image / 2
    variance = max(by_draw + max(by_image - both, 0.0), least)
    if not variance:
        return 0.0, math.inf
    # 4. Satterthwaite squares both parts. Of few draws that trusts too much what they say of
    #    themselves, and the more so the larger their part: see _TRUST.
    part = by_draw / variance
    trust = _TRUST / (draws - 1) if draws > 2 else _TRUST_OF_TWO
    spread = part ** max(2 - trust * part, 0) / (draws - 1)
    spread += min(by_image / variance, 1.0) ** 2 / max(n - 1, 1)
    return variance, 1 / spread


def of_mean(values: Sequence[float], ends: Sequence[Interval], df: Sequence[float]) -> Interval:
    """Of the mean of independent values, in percent, from the ends of their intervals and with how
    many degrees of freedom each is known: infinitely many over images, one less than seeds."""
    variance = of_spread = 0.0
    for (low, high), known in zip(ends, df, strict=True):
        # 1. Variances add: each as the half-width would be, were it known well.
        of_one = (_NORMAL / t_quantile(known) * (high - low) / 2) ** 2
        variance += of_one
        # 2. Satterthwaite's degrees of freedom of the sum, with Welch's correction: the square of
        #    an estimated variance is too large by (df + 2) / df.
        of_spread += of_one**2 / (known + 2)
    wider = t_quantile(variance**2 / of_spread) / _NORMAL if of_spread else 1.0
    mean, half = sum(values) / len(values), wider * math.sqrt(variance) / len(values)
    return max(mean - half, min(mean, 0.0)), min(mean + half, max(mean, 100.0))


def of_resamples(share: float, resamples: np.ndarray, images: int) -> Interval | None:
    """Of a score in [0, 1] that is no mean over images, as an AP, from its values (B,) on resamples
    of so many images; None where none is defined."""
    import numpy as np

    defined = resamples[np.isfinite(resamples)]
    if len(defined) < 2:
        return None
    # A resample has the spread of the sample, which is smaller than the population's.
    variance = float(defined.var(ddof=1)) * images / max(images - 1, 1)
    return of_share(share, variance, images, min(len(defined), images) - 1)


class Classes:
    """The classes of a test list (N,) as strata: each weighs the same, however many images it has.

    `weight` (N,) makes a mean of class means a plain sum; `images` is as many images of equal
    weight as would do as well.
    """

    def __init__(self, label: np.ndarray) -> None:
        import numpy as np

        _, self.of, self.size = np.unique(label, return_inverse=True, return_counts=True)
        self.count = len(self.size)
        self.weight = 1 / (self.count * self.size[self.of])
        self.images = float(self.count**2 / (1 / self.size).sum())

    def variance_of_mean(self, x: np.ndarray) -> float:
        """Of the mean of class means of `x` (N,), over other images of the same classes."""
        import numpy as np

        mean = np.bincount(self.of, x) / self.size
        squares = np.bincount(self.of, (x - mean[self.of]) ** 2)
        # 1. The spread within all classes; where each has one image, the spread of all images.
        degrees = self.size - 1
        shared = squares.sum() / degrees.sum() if degrees.sum() else float(x.var())
        # 2. A class's own spread, and _SHARED images' worth of the others'.
        own = (squares + _SHARED * shared) / (degrees + _SHARED)
        return float((own / self.size).sum()) / self.count**2
