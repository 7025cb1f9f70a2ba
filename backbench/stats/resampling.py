"""How a value moves on other test images: hits scored on resamples of their list."""

import numpy as np

COUNT = 300  # resamples
AP_COUNT = 500  # resamples of which detectors keep the AP
_ENTRIES = 200_000  # resampled images at once


def image_counts(seed: int, images: int) -> np.ndarray:
    """Count each image in each resample: (COUNT, images). One seed gives the same resamples."""
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(images, np.full(images, 1 / images), size=COUNT)
    return counts.astype(np.uint16)


def resampled_means(
    right: np.ndarray, weight: np.ndarray, counts: np.ndarray, draws_seed: int
) -> np.ndarray:
    """Return the weighted share of hits `right` (draws, images) on each resample, times `widening`:
    (COUNT,).

    Only differences between the resamples have a meaning. Several draws of labels are resampled,
    too."""
    draws, n = right.shape
    by_draw = np.empty((draws, COUNT))
    at_once = max(1, _ENTRIES // n)
    for start in range(0, COUNT, at_once):
        part = slice(start, start + at_once)
        weights = counts[part] * weight
        by_draw[:, part] = right @ weights.T / weights.sum(1)
    if draws > 1:
        rng = np.random.default_rng(draws_seed)
        chosen = rng.integers(0, draws, by_draw.shape)
        by_draw = np.take_along_axis(by_draw, chosen, axis=0)
    return by_draw.mean(0) * widening(n)


def widening(images: int) -> float:
    """Return the factor from the spread of resamples of so many images to the population's."""
    return (images / max(images - 1, 1)) ** 0.5
