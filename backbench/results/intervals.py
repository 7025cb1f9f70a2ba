"""95% intervals of measured values, in percent: what they cover stands in docs/results.md.

All of them have one form. An estimate p with variance V is as well known as the share of hits among
p (1 - p) / V independent images; its interval is Jeffreys' of that many (Brown, Cai and DasGupta,
2001), which does not shrink to nothing where all images are right, and never leaves [0, 100].
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Interval = tuple[float, float]
LOW, HIGH = 0.025, 0.975  # the quantiles that 95% lie between
_NORMAL = 1.959964  # the standard normal's HIGH
_PRIOR = 0.5  # Jeffreys': half a hit and half a miss
# How many images the other classes' spread counts as in a class's own. It keeps classes of a few
# images, all right or all wrong, from claiming that nothing varies in them.
_SHARED = 3.0


def of_share(share: float, variance: float, images: float, df: float = math.inf) -> Interval:
    """Of an estimate `share` in [0, 1] with its variance, itself known with `df` degrees of
    freedom. `images` is as how many hits it counts where nothing varies."""
    from scipy.stats import beta, t

    share = min(max(share, 0.0), 1.0)
    n = share * (1 - share) / variance if variance > 0 else images
    # Of a variance that is known badly the normal's quantile is too small by this much.
    wider = t.ppf(HIGH, max(df, 1.0)) / _NORMAL if math.isfinite(df) else 1.0
    n = max(n, 1e-3) / wider**2
    hits, misses = n * share + _PRIOR, n * (1 - share) + _PRIOR
    low = 0.0 if share == 0 else float(beta.ppf(LOW, hits, misses))
    high = 1.0 if share == 1 else float(beta.ppf(HIGH, hits, misses))
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
    # Half an image always right and half a one never: few draws of few errors show no hard images.
    by_image += 0.5 / images**2
    variance, df = two_way(right, weight, by_image)
    return of_share(float((right @ weight).mean()), variance, images, df)


def two_way(x: np.ndarray, weight: np.ndarray, by_image: float) -> tuple[float, float]:
    """The variance of a mean over draws and images, both chosen at random, and its degrees of
    freedom (Satterthwaite). `x` (D, N); `weight` (N,) sums to 1; `by_image` is the variance over
    images of the mean over these draws."""
    draws, n = x.shape
    # 1. The draws' means vary by the draw, and by what is left between draw and image.
    of_draw = x @ weight
    by_draw = float(of_draw.var(ddof=1)) / draws
    # 2. What is left is in both variances, so it is counted twice: it is taken off once.
    steps = x * weight
    left = steps - steps.mean(0) - (of_draw - of_draw.mean())[:, None] / n
    both = n * float((left**2).sum()) / ((draws - 1) * max(n - 1, 1)) / draws
    # 3. Neither source makes the other's smaller, whatever the estimates say.
    variance = max(by_draw + by_image - both, by_draw, by_image)
    spread = by_draw**2 / (draws - 1) + by_image**2 / max(n - 1, 1)
    return variance, variance**2 / spread if spread > 0 else math.inf


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
