"""Calibration and selective prediction of classifiers, from the confidence of each image.

`conf` (N,) is the largest probability of an image, `right` (N,) whether that class is the label.
Lower is better in all of them. Shares are in [0, 1].
"""

import numpy as np

from backbench.stats.confidence import HIGH, LOW, NORMAL, Interval

BINS = (
    15  # as gpleiss/temperature_scaling@126a509, and nearly everybody who prints an ECE
)
RESAMPLES = 500
_AT_ONCE = 4_000  # numbers in working memory


def ece(conf: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error over bins of equal width, right-closed: (lo, hi]."""
    inner_edges = np.linspace(0, 1, BINS + 1)[1:-1]
    # side="left" puts a confidence on an edge into the bin under it
    bins = np.searchsorted(inner_edges, conf, side="left")
    return _gap_of_bins(conf, right, bins)


def aece(conf: np.ndarray, right: np.ndarray) -> float:
    """Return the error over bins of equal count. Of equal confidences, the first image is lower."""
    order = np.argsort(conf, kind="stable")
    bins = np.empty(len(conf), dtype=np.int64)
    for number, members in enumerate(np.array_split(order, BINS)):
        bins[members] = number
    return _gap_of_bins(conf, right, bins)


def _gap_of_bins(conf: np.ndarray, right: np.ndarray, bins: np.ndarray) -> float:
    """Return the sum over bins of n_b / n |mean right - mean confidence|."""
    # n_b times the difference of means is a sum of differences
    gaps = np.bincount(bins, right.astype(np.float64) - conf, minlength=BINS)
    return float(np.abs(gaps).sum()) / len(conf)


def aurc(conf: np.ndarray, right: np.ndarray) -> float:
    """Return the area under the risk-coverage curve.

    It is the mean over i = 1..N of the error rate among the i most confident images."""
    return float(_area(errors_by_confidence(conf, right)))


def eaurc(conf: np.ndarray, right: np.ndarray) -> float:
    """Return `aurc` minus the least that is possible at this accuracy: that with all errors last."""
    errors_last = np.sort(~right.astype(bool)).astype(np.float64)
    return aurc(conf, right) - float(_area(errors_last))


def errors_by_confidence(conf: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return errors (N,), most confident first; equally confident images share their mean error."""
    _, group, size = np.unique(-conf, return_inverse=True, return_counts=True)
    mean = np.bincount(group, ~right.astype(bool)) / size
    return np.repeat(mean, size)


def _area(errors: np.ndarray) -> np.ndarray:
    """Return the area () of errors (N,), or the areas (B,) of errors (B, N)."""
    shares = np.cumsum(errors, axis=-1) / np.arange(1, errors.shape[-1] + 1)
    return shares.mean(axis=-1)


# ---- intervals


def of_mean(losses: np.ndarray) -> Interval | None:
    """Return the normal interval of a mean over images (N,); None of a single image."""
    if len(losses) < 2:
        return None
    half = NORMAL * float(losses.std(ddof=1)) / len(losses) ** 0.5
    mean = float(losses.mean())
    return mean - half, mean + half


def of_aurc(conf: np.ndarray, right: np.ndarray, seed: int) -> Interval:
    """Return the interval of `aurc` by the percentile bootstrap over images."""
    errors = errors_by_confidence(conf, right)
    n = len(errors)
    rng = np.random.default_rng(seed)
    # Short lists are resampled many times at once, as a resample takes longer to ask for than to make
    rows = min(max(1, _AT_ONCE // n), RESAMPLES)
    areas: list[np.ndarray] = []
    for begin in range(0, RESAMPLES, rows):
        some = min(rows, RESAMPLES - begin)
        drawn = rng.integers(0, n, (some, n))
        drawn += (
            n * np.arange(some)[:, None]
        )  # each resample counts in a row of its own
        # How often each resample has each image. Repeating each error in its place keeps the order
        # of confidence, so a resample is not sorted again.
        counts = np.bincount(drawn.ravel(), minlength=some * n)
        again = np.repeat(errors if some == 1 else np.tile(errors, some), counts)
        areas.append(_area(again.reshape(some, n)))
    low, high = np.quantile(np.concatenate(areas), (LOW, HIGH))
    # The quantiles need not enclose the estimate; the interval does.
    estimate = float(_area(errors))
    return min(float(low), estimate), max(float(high), estimate)
