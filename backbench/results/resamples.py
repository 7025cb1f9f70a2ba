"""How values move on other test images: kept predictions scored on resamples of their list.

All rows and all columns of one list are scored on the same resamples, so what they share is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.results.paired_tests import hits
from backbench.results.predictions import load
from backbench.runs import seeding
from backbench.stats import confidence

if TYPE_CHECKING:
    import numpy as np

    from backbench.results.predictions import Arrays

COUNT = 300
_ENTRIES = 200_000  # resampled images at once


def moved(files: Sequence[Path], metric: str) -> np.ndarray | None:
    """(COUNT,) in percent: the mean of these files (one for each seed) on each resample, less the
    mean over resamples; as wide as the population's spread. None where they do not tell."""
    import numpy as np

    found = []
    for file in files:
        arrays = load(file)
        values = None if arrays is None else of_arrays(arrays, metric)
        if values is None:
            return None
        found.append(values)
    if not found:
        return None
    mean = np.mean(found, axis=0)
    return mean - mean.mean()


def value_again(x: Arrays, metric: str) -> float | None:
    """The value that these predictions give, in percent; None where they do not tell it."""
    import numpy as np

    right = hits(x, metric)
    if right is None:
        return None
    if metric.startswith("mean_per_class"):
        weight = confidence.Classes(x["label"]).weight
        return 100 * float((np.atleast_2d(right) @ weight).mean())
    return 100 * float(right.mean())


def of_arrays(x: Arrays, metric: str) -> np.ndarray | None:
    """(COUNT,) of one file: in percent, with the spread of the population."""
    import numpy as np

    drawn = x.get(f"bootstrap_{metric}")
    if drawn is not None:
        drawn = drawn[:COUNT].astype(float)
        if len(drawn) < COUNT or not np.isfinite(drawn).all():
            return None
        images = int(x["images"]) if "images" in x else COUNT
        return drawn * (images / max(images - 1, 1)) ** 0.5
    right = hits(x, metric)
    if right is None:
        return None
    return _scored(np.atleast_2d(right), x, metric)


def _scored(right: np.ndarray, x: Arrays, metric: str) -> np.ndarray:
    """Hits (draws, images) on resamples of images, and of draws where there are several."""
    import numpy as np

    draws, n = right.shape
    weight = np.full(n, 1 / n)
    if metric.startswith("mean_per_class"):
        weight = confidence.Classes(x["label"]).weight
    times = _times(str(x["manifest"]), n)
    by_draw = np.empty((draws, COUNT))
    some = max(1, _ENTRIES // n)
    for start in range(0, COUNT, some):
        weights = times[start : start + some] * weight
        by_draw[:, start : start + some] = right @ weights.T / weights.sum(1)
    if draws > 1:
        rng = np.random.default_rng(seeding.seed_of("draws", str(x["manifest"]), draws))
        by_draw = np.take_along_axis(by_draw, rng.integers(0, draws, by_draw.shape), axis=0)
    return 100 * by_draw.mean(0) * (n / max(n - 1, 1)) ** 0.5


@functools.lru_cache(maxsize=4)
def _times(manifest: str, n: int) -> np.ndarray:
    """(COUNT, n): how often each image of this list is in each resample."""
    import numpy as np

    rng = np.random.default_rng(seeding.seed_of("images", manifest, n))
    return rng.multinomial(n, np.full(n, 1 / n), size=COUNT).astype(np.uint16)
