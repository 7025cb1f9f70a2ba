"""When one number is really above another: paired tests on predictions that were kept (docs/results.md).

Two checkpoints scored on the same test list share its hard and its easy images, so their difference is far better known
than either value. Nothing here compares intervals of two values with each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbench.runs import seeding

if TYPE_CHECKING:
    import numpy as np

ALPHA = 0.05
_DRAWS = 1999
_TAIL = 0.015  # of a percentile interval


@dataclass(frozen=True)
class Difference:
    """a - b in percent, its 95% interval, a two-sided p-value, what was paired and how many of it.

    `real` asks both of the test and of the interval, so it errs on the side of noise.
    """

    value: float
    ci95: tuple[float, float]
    p: float
    paired: str  # images | draws | resamples
    n: int

    @property
    def real(self) -> bool:
        return self.p < ALPHA and not self.ci95[0] <= 0 <= self.ci95[1]


@functools.lru_cache(maxsize=4096)
def load(path: Path) -> Mapping[str, Any] | None:
    """The arrays of one file of predictions, or None where it is missing or damaged."""
    import zipfile

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def compare(a: Sequence[Path], b: Sequence[Path], metric: str) -> Difference | None:
    """a - b on `metric`, from the kept predictions of the same seeds in the same order; None where they do not pair."""
    import numpy as np

    if not a or len(a) != len(b):
        return None
    kept = [(load(x), load(y)) for x, y in zip(a, b)]
    pairs = [(x, y) for x, y in kept if x is not None and y is not None and _same_list(x, y)]
    if len(pairs) != len(a) or len({str(x["manifest"]) for x, _ in pairs}) > 1:
        return None
    name = f"bootstrap_{metric}"
    if all(name in x and name in y and x[name].shape == y[name].shape for x, y in pairs):
        return of_resamples(np.mean([x[name] - y[name] for x, y in pairs], axis=0))
    if all(
        "values" in x and "values" in y and x["values"].shape == y["values"].shape for x, y in pairs
    ):
        return of_draws(np.concatenate([x["values"] - y["values"] for x, y in pairs]))
    scores = [(_hits(x, metric), _hits(y, metric)) for x, y in pairs]
    found = [(x, y) for x, y in scores if x is not None and y is not None and len(x) == len(y)]
    if len(found) != len(pairs):
        return None
    d = np.mean([x.astype(float) - y for x, y in found], axis=0)
    return of_images(d, pairs[0][0]["label"] if metric.startswith("mean_per_class") else None)


def _same_list(x: Mapping[str, Any], y: Mapping[str, Any]) -> bool:
    same = "manifest" in x and "manifest" in y and str(x["manifest"]) == str(y["manifest"])
    return same and ("label" not in x or "label" not in y or bool((x["label"] == y["label"]).all()))


def _hits(x: Mapping[str, Any], metric: str) -> np.ndarray | None:
    """(N,) bool: which images count as right, or None where this file cannot say it for `metric`."""
    if metric.startswith("top5"):
        return x.get("hits5")
    if metric.startswith(("top1", "mean_per_class")) and "prediction" in x and "label" in x:
        return x["prediction"] == x["label"]
    return None


def of_images(d: np.ndarray, classes: np.ndarray | None = None) -> Difference:
    """Per-image differences (N,) in [-1, 1]; with `classes` (N,) the mean of the class means.

    Test: sign flips. Where the two are equally good, each image's difference is as likely to be minus itself, so the
    sum is one of binomials, one for each distinct weight; with one weight this is the exact sign test (McNemar's).
    Interval: normal, of the paired differences, half a count added to either side (Agresti and Min, 2005).
    """
    import numpy as np

    n = len(d)
    weight = np.full(n, 1 / n)
    if classes is not None:
        _, inverse, count = np.unique(classes, return_inverse=True, return_counts=True)
        weight = 1 / (len(count) * count[inverse])
    step = weight * d
    value = float(step.sum())
    # Two imagined images, one won and one lost, keep the interval from closing on nothing when nobody disagrees.
    variance = float((step**2).sum() - (step.sum() ** 2) / n) + 0.5 * float(weight.max()) ** 2 * 2
    half = 1.959964 * math.sqrt(max(variance, 0.0))
    return Difference(
        100 * value, (100 * (value - half), 100 * (value + half)), _sign_flip(step), "images", n
    )


def _sign_flip(step: np.ndarray) -> float:
    """Two-sided p-value of sum(step) when every step's sign is a fair coin."""
    import numpy as np
    from scipy.stats import binom

    size, group = np.unique(np.abs(step[step != 0]).round(12), return_inverse=True)
    if not len(size):
        return 1.0
    won = np.bincount(group, weights=(step[step != 0] > 0).astype(float))
    m = np.bincount(group)
    if len(size) == 1:
        least = int(min(won[0], m[0] - won[0]))
        return float(min(1.0, 2 * binom.cdf(least, int(m[0]), 0.5)))
    observed = abs(float((size * (2 * won - m)).sum()))
    rng = np.random.default_rng(seeding.seed_of("sign flip", len(step), int(m.sum())))
    flips = np.abs((2 * rng.binomial(m, 0.5, size=(_DRAWS, len(m))) - m) @ size)
    return float((1 + (flips >= observed - 1e-12).sum()) / (1 + _DRAWS))


def of_draws(d: np.ndarray) -> Difference:
    """Differences (D,) in percent of the same draws: a paired t-test over draws, with the test images as given."""
    from scipy.stats import t

    n, value = len(d), float(d.mean())
    if n < 2:
        return Difference(value, (-math.inf, math.inf), 1.0, "draws", n)
    error = float(d.std(ddof=1)) / math.sqrt(n)
    half = float(t.ppf(0.975, n - 1)) * error
    p = float(2 * t.sf(abs(value) / error, n - 1)) if error else float(value == 0)
    return Difference(value, (value - half, value + half), p, "draws", n)


def of_resamples(d: np.ndarray) -> Difference:
    """Differences (B,) in percent on the same resamples of the images: the percentile interval, with tails of 1.5%.

    Tails of 2.5% called equal pairs different in 6.1% (40 images), 5.6% (150) and 5.2% (720) of simulations with 500
    resamples; tails of 1.5% in 4.6%, 3.6% and 3.4%. The p-value is scaled alike.
    """
    import numpy as np

    d = d[np.isfinite(d)]
    n = len(d)
    if n < 100:  # too few for such tails
        return Difference(float(d.mean()) if n else 0.0, (-math.inf, math.inf), 1.0, "resamples", n)
    low, high = np.percentile(d, [100 * _TAIL, 100 * (1 - _TAIL)])
    p = min(1.0, ALPHA / _TAIL * (1 + min(int((d <= 0).sum()), int((d >= 0).sum()))) / (1 + n))
    return Difference(float(d.mean()), (float(low), float(high)), p, "resamples", n)


def seeds_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95% t-interval of the mean over seeds; None below two seeds."""
    from scipy.stats import t

    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    half = float(t.ppf(0.975, n - 1)) * spread / math.sqrt(n)
    return mean - half, mean + half


def correlation(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Pearson's r and Spearman's rho; nan below three points."""
    from scipy.stats import pearsonr, spearmanr

    if len(x) < 3:
        return math.nan, math.nan
    return float(pearsonr(x, y).statistic), float(spearmanr(x, y).statistic)
