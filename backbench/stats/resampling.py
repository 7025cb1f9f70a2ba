"""How a value moves on other test images: hits scored on resamples of their list."""

import numpy as np

COUNT = 300  # resamples
AP_COUNT = 500  # resamples of which detectors keep the AP
_ENTRIES = 200_000  # resampled images at once


def image_counts(seed: int, images: int) -> np.ndarray:
    """Images' counts in each resample (COUNT, images); the same seed gives the same resamples."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(images, np.full(images, 1 / images), size=COUNT).astype(
        np.uint16
    )


def resampled_means(
    right: np.ndarray, weight: np.ndarray, counts: np.ndarray, draws_seed: int
) -> np.ndarray:
    """The weighted share of hits `right` (draws, images) on each resample: (COUNT,), with the
    spread of the population. If there are several draws, they are resampled too."""
    draws, n = right.shape
    by_draw = np.empty((draws, COUNT))
    some = max(1, _ENTRIES // n)
    for start in range(0, COUNT, some):
        weights = counts[start : start + some] * weight
        by_draw[:, start : start + some] = right @ weights.T / weights.sum(1)
    if draws > 1:
        rng = np.random.default_rng(draws_seed)
        by_draw = np.take_along_axis(
            by_draw, rng.integers(0, draws, by_draw.shape), axis=0
        )
    return by_draw.mean(0) * widening(n)


def widening(images: int) -> float:
    """The population's spread by that of resamples of a sample of so many images."""
    return (images / max(images - 1, 1)) ** 0.5
