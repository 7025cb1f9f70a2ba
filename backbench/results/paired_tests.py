"""When one number is really above another: paired tests on kept predictions (docs/results.md).

Two checkpoints scored on the same test list share its hard and its easy images, so their
difference is far better known than either value. Nothing here compares intervals of two values
with each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.results.predictions import load
from backbench.runs import seeding
from backbench.stats import confidence

if TYPE_CHECKING:
    import numpy as np

    from backbench.results.predictions import Arrays

ALPHA = 0.05
NORMAL_975 = 1.959964  # standard normal quantile: half of a 95% interval, in standard errors
_DRAWS = 1999  # of sign flips; with the observed one, 2000
_TAIL = 0.015  # of a percentile interval: see `of_resamples`
# Of the probability of what was observed. With nothing the test is exact and calls 2.9% of equal
# pairs different where 1 of 100 is wrong, at 1,000 images; with a half up to 5.0%; so 4.1 to 4.9%.
_OBSERVED = 0.35
_RESOLVED = 20  # of the sign flips beyond the observed: fewer tell too little of so small a p
_FEWEST_RESAMPLES = 100  # for such tails
# Of the imagined half counts where classes weigh differently: so many sums are possible that the
# sign flips call 5%, and the interval needs little. With all of it 3.3% where 1 of 100 is wrong.
_SPARE_OF_CLASSES = 0.25


@dataclass(frozen=True)
class Difference:
    """a - b in percent, its 95% interval, a two-sided p-value, what was paired and how many of it.

    `real` asks both of the test and of the interval, so it errs on the side of noise.
    """

    value: float
    ci95: tuple[float, float]
    p: float
    paired: str  # images | draws and images | draws (as given: the images) | resamples
    n: int

    @property
    def real(self) -> bool:
        return self.p < ALPHA and not self.ci95[0] <= 0 <= self.ci95[1]


def compare(a: Sequence[Path], b: Sequence[Path], metric: str) -> Difference | None:
    """a - b on `metric`, from the kept predictions of the same seeds in the same order; None where
    they do not pair. Of several seeds resamples are averaged one by one; what was predicted by each
    seed, and in each draw of labels, stands side by side: they vary, and so do the images.
    """
    import numpy as np

    pairs = _paired_files(a, b)
    if not pairs:
        return None
    # What the files hold says how they are compared: the metric itself on resamples, values of
    # draws, or what was predicted for each image.
    resampled = _both(pairs, f"bootstrap_{metric}")
    if resampled is not None:
        images = pairs[0][0].get("images")
        count = None if images is None else int(images)
        return of_resamples(np.mean([x - y for x, y in resampled], axis=0), count)
    drawn = _both(pairs, "values")
    if drawn is not None and not all("prediction" in x and "prediction" in y for x, y in pairs):
        return of_draws(np.concatenate([x - y for x, y in drawn]))  # older files kept no more
    differences = []
    for x, y in pairs:
        hits_x, hits_y = hits(x, metric), hits(y, metric)
        if hits_x is None or hits_y is None or hits_x.shape != hits_y.shape:
            return None
        differences.append(np.atleast_2d(hits_x.astype(float) - hits_y))
    if len({d.shape[1] for d in differences}) > 1:
        return None
    classes = pairs[0][0]["label"] if metric.startswith("mean_per_class") else None
    d = np.concatenate(differences)
    return of_images(d[0], classes) if len(d) == 1 else of_draws_and_images(d, classes)


def _paired_files(a: Sequence[Path], b: Sequence[Path]) -> list[tuple[Arrays, Arrays]]:
    """The arrays of a[i] beside those of b[i]; nothing unless all of them are of one test list."""
    if len(a) != len(b):
        return []
    pairs = []
    for file_a, file_b in zip(a, b):
        x, y = load(file_a), load(file_b)
        if x is None or y is None or not _same_list(x, y):
            return []
        pairs.append((x, y))
    first = pairs[0][0] if pairs else {}
    return pairs if all(_same_list(first, x) for x, _ in pairs) else []


def _same_list(x: Arrays, y: Arrays) -> bool:
    """Whether both were scored on the same images in the same order, with the same labels."""
    import numpy as np

    if "manifest" not in x or "manifest" not in y or str(x["manifest"]) != str(y["manifest"]):
        return False
    if "label" in x and "label" in y:
        return np.array_equal(x["label"], y["label"])
    return True


def _both(
    pairs: Sequence[tuple[Arrays, Arrays]], name: str
) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Array `name` of both sides of every pair, as floats; None where one lacks it or has another
    shape."""
    found = []
    for x, y in pairs:
        if name not in x or name not in y:
            return None
        found.append((x[name].astype(float), y[name].astype(float)))
    shapes = {side.shape for pair in found for side in pair}
    return found if len(shapes) == 1 else None


def hits(x: Arrays, metric: str) -> np.ndarray | None:
    """(N,) bool: which images count as right; None where this file cannot say it for `metric`."""
    if metric.startswith("top5"):
        return x.get("hits5")
    if metric.startswith(("top1", "mean_per_class")) and "prediction" in x and "label" in x:
        return x["prediction"] == x["label"]
    return None


def of_images(d: np.ndarray, classes: np.ndarray | None = None) -> Difference:
    """Per-image differences (N,) in [-1, 1]; with `classes` (N,) the mean of the class means.

    Test: sign flips. Where the two are equally good, each image's difference is as likely to be
    minus itself, so the sum is one of binomials, one for each distinct weight; with one weight this
    is the sign test (McNemar's) without a part of the probability of what was observed (as mid-p,
    which leaves out half of it; Fagerland, Lydersen and Laake, 2013). Interval: normal, of the
    paired differences, half a count added to either side (Agresti and Min, 2005;
    less for class means).
    """
    n = len(d)
    weight = _weights(n, classes)
    step = weight * d
    value = float(step.sum())
    # Variance of a sum of N independent steps: sum of squares minus N times the squared mean.
    spare = 1.0 if classes is None else _SPARE_OF_CLASSES
    variance = float((step**2).sum() - value**2 / n) + spare * _half_a_count(weight)
    half = NORMAL_975 * math.sqrt(max(variance, 0.0))
    interval = (100 * (value - half), 100 * (value + half))
    return Difference(100 * value, interval, _sign_flip(step), "images", n)


def of_draws_and_images(d: np.ndarray, classes: np.ndarray | None = None) -> Difference:
    """Differences (D, N) in [-1, 1] of the same images in the same draws of labels (or by the same
    seeds), as they would be with other draws and on other images: a t-test with the variance and
    the degrees of freedom of both (intervals.two_way)."""
    n = d.shape[1]
    weight = _weights(n, classes)
    mean = d.mean(0)
    by_image = n * float((weight * mean).var(ddof=1)) if n > 1 else 0.0
    variance, df = confidence.two_way(d, weight, by_image)
    # The imagined images are won and lost in as many draws as those on which the two differ.
    of_differing = float((mean[mean != 0] ** 2).mean()) if mean.any() else 1.0
    error = math.sqrt(variance + _half_a_count(weight) * of_differing)
    value = float((d @ weight).mean())
    half = confidence.t_quantile(df) * error
    p = confidence.t_both_tails(value / error, df)
    interval = (100 * (value - half), 100 * (value + half))
    return Difference(100 * value, interval, p, "draws and images", n)


def _weights(n: int, classes: np.ndarray | None) -> np.ndarray:
    """(N,) that make the value a plain sum: 1/N, or for a mean of C class means 1/(C N_c) with N_c
    images in the image's class."""
    import numpy as np

    return np.full(n, 1 / n) if classes is None else confidence.Classes(classes).weight


def _half_a_count(weight: np.ndarray) -> float:
    """What half an imagined image won and half a one lost, of the usual weight, add to the
    variance: they keep an interval from closing on nothing when nobody disagrees."""
    return float((weight**2).mean())


def _sign_flip(step: np.ndarray) -> float:
    """Two-sided p-value of sum(step) (N,) when every step's sign is a fair coin."""
    import numpy as np
    from scipy.special import bdtr, ndtr

    # 1. A step of 0 has no sign. The others in groups of one size |s| each; rounded, since sizes
    #    that are equal but were computed in other ways differ in their last bits.
    signed = step[step != 0]
    size, group = np.unique(np.abs(signed).round(12), return_inverse=True)
    if not len(size):
        return 1.0
    won = np.bincount(group, weights=(signed > 0).astype(float))
    m = np.bincount(group)
    # 2. One size: the number of steps above 0 is Binomial(m, 1/2), and the sum grows with it. Twice
    #    its smaller tail, without a part of what was observed.
    if len(size) == 1:
        least = int(min(won[0], m[0] - won[0]))
        tail, rest = bdtr([least, least - 1], int(m[0]), 0.5)  # at most so many; fewer
        tail -= _OBSERVED * (tail - (rest if least else 0.0))
        return float(min(1.0, 2 * tail))
    # 3. Several sizes: with K_g ~ Binomial(m_g, 1/2) steps of group g above 0 the sum is
    #    sum_g size_g (2 K_g - m_g), so one binomial per group stands for all its coins. The
    #    observed sum counts as one of the draws, which keeps the test valid at any number of them.
    observed = abs(float((size * (2 * won - m)).sum()))
    rng = np.random.default_rng(seeding.seed_of("sign flip", len(step), int(m.sum())))
    flips = np.abs(_flipped(rng, size, m))
    beyond = int((flips >= observed - 1e-12).sum())
    # 4. What so few draws cannot resolve is the normal's tail of the same sum; but no outcome is
    #    rarer than all coins alike.
    if beyond < _RESOLVED:
        error = math.sqrt(float((m * size**2).sum()))
        return float(max(2 * ndtr(-observed / error), 2.0 ** (1 - int(m.sum()))))
    return (1 + beyond) / (1 + _DRAWS)


def _flipped(rng: np.random.Generator, size: np.ndarray, m: np.ndarray) -> np.ndarray:
    """(_DRAWS,) sums of m[g] fair coins of each size[g], plus or minus: bits, 64 coins a word."""
    import numpy as np

    # 1. Full words, and one for what is left of each group: how many coins, and of which size.
    words = np.concatenate([np.full((m // 64).sum(), 64), m % 64])
    of = np.concatenate([np.arange(len(m)).repeat(m // 64), np.arange(len(m))])
    of, words = of[words > 0], words[words > 0]
    # 2. A coin is a bit that is kept.
    unused = (64 - words).astype(np.uint64)
    bits = rng.integers(0, 2**64, size=(_DRAWS, len(words)), dtype=np.uint64) >> unused
    ones = getattr(np, "bitwise_count", _ones)(bits)
    return (2.0 * ones - words) @ size[of]


def _ones(words: np.ndarray) -> np.ndarray:
    """How many bits of each uint64 are 1, where numpy is older than 2.0: `np.bitwise_count`."""
    import numpy as np

    # Sums of neighbouring bits, then of pairs, then of fours; their bytes are added by the product.
    words = words - ((words >> np.uint64(1)) & np.uint64(0x5555555555555555))
    pairs = np.uint64(0x3333333333333333)
    words = (words & pairs) + ((words >> np.uint64(2)) & pairs)
    words = (words + (words >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (words * np.uint64(0x0101010101010101)) >> np.uint64(56)


def of_draws(d: np.ndarray) -> Difference:
    """Differences (D,) in percent of the same draws: a paired t-test over draws, with the test
    images as given."""
    n, value = len(d), float(d.mean())
    if n < 2:
        return _unknown(value, "draws", n)
    error = float(d.std(ddof=1)) / math.sqrt(n)
    half = confidence.t_quantile(n - 1) * error
    if error:
        p = confidence.t_both_tails(value / error, n - 1)
    else:  # all draws differ by the same: certain, whichever way
        p = float(value == 0)
    return Difference(value, (value - half, value + half), p, "draws", n)


def of_resamples(d: np.ndarray, images: int | None = None) -> Difference:
    """Differences (B,) in percent on the same resamples of so many images: a t-test with the
    spread of the resamples. Older files do not say how many images there were: see `_percentiles`.
    """
    import numpy as np

    d = d[np.isfinite(d)]  # a resample without a ground truth has no AP
    n = len(d)
    if n < _FEWEST_RESAMPLES:
        return _unknown(float(d.mean()) if n else 0.0, "resamples", n)
    if images is None:
        return _percentiles(d)
    value = float(d.mean())
    # A resample has the spread of the sample, which is smaller than the population's; half a count
    # is added as for images (`_half_a_count`).
    variance = float(d.var(ddof=1)) * images / max(images - 1, 1) + (100 / images) ** 2
    error, df = math.sqrt(variance), max(min(images, n) - 1, 1)
    half = confidence.t_quantile(df) * error
    p = confidence.t_both_tails(value / error, df)
    return Difference(value, (value - half, value + half), p, "resamples", n)


def _percentiles(d: np.ndarray) -> Difference:
    """The percentile interval, with tails of 1.5%.

    Tails of 2.5% called equal pairs different in 6.1% (40 images), 5.6% (150) and 5.2% (720) of
    simulations with 500 resamples; tails of 1.5% in 4.6%, 3.6% and 3.4%. The p-value is scaled
    alike.
    """
    import numpy as np

    n = len(d)
    low, high = np.percentile(d, [100 * _TAIL, 100 * (1 - _TAIL)])
    # The share of resamples on the wrong side of 0 (one more, so that it is never nothing) reaches
    # _TAIL where the interval touches 0; times ALPHA / _TAIL, p reaches ALPHA at that same place.
    wrong = min(int((d <= 0).sum()), int((d >= 0).sum()))
    p = min(1.0, ALPHA / _TAIL * (1 + wrong) / (1 + n))
    return Difference(float(d.mean()), (float(low), float(high)), p, "resamples", n)


def _unknown(value: float, paired: str, n: int) -> Difference:
    """A difference of which nothing can be said: too few to pair."""
    return Difference(value, (-math.inf, math.inf), 1.0, paired, n)


def tied_with_first(p_values: Sequence[float], alpha: float = ALPHA) -> int:
    """How many of the others, best first, cannot be told from the first. `p_values` are of the
    first against each of them, 1 where the first is not above.

    The first is chosen for being highest, so a test of it against one of K - 1 others is one of all
    K (K - 1) / 2 pairs (Bonferroni). From the last on: whoever is told apart is out, and those that
    remain are fewer pairs. So the chance that any of the equally best is left out is at most alpha.
    """
    left = len(p_values)
    while left:
        pairs = (left + 1) * left / 2
        if p_values[left - 1] * pairs >= alpha:
            break
        left -= 1
    return left


def seeds_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95% t-interval of the mean over seeds, in percent; None below two seeds."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    half = confidence.t_quantile(n - 1) * spread / math.sqrt(n)
    return mean - half, mean + half
