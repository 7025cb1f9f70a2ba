"""Average precision of images that show several classes each: how well scores rank those that show a
class above those that do not.

Images of equal scores have no order, so a threshold takes all of them or none (as scikit-learn and
torchmetrics have it; VOC's own program takes them in the order of its files).

    area        the sum over thresholds of the gain in recall times precision
    11 points   the mean over recalls 0, 0.1, ... 1 of the best precision at that recall or a larger
                one: VOC's until 2009
"""

import numpy as np

METRICS = ("map", "map11")  # area, 11 points
_AT_ONCE = 4_000_000  # numbers in working memory


def mean_precisions(
    score: np.ndarray,
    present: np.ndarray,
    scored: np.ndarray,
    counts: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Return the mean over classes of either AP, from 0 to 1, for each draw of images: (draws,).

    `score`, `present` and `scored` are (N, C); an image that is not scored for a class is left out
    there. `counts` (draws, N) says how often a draw has each image; without it there is one, of
    all. A class counts in the draws that have an image of it. NaN where no class has one."""
    images, classes = score.shape
    if counts is None:
        counts = np.ones((1, images))
    total = {name: np.zeros(len(counts)) for name in METRICS}
    there = np.zeros(len(counts))
    step = max(1, _AT_ONCE // max(images, 1))
    for label in range(classes):
        kept = scored[:, label]
        for start in range(0, len(counts), step):
            part = slice(start, start + step)
            found = _precisions(
                score[kept, label], present[kept, label], counts[part][:, kept]
            )
            has_images = found["images"] > 0
            there[part] += has_images
            for name in METRICS:
                total[name][part] += np.where(has_images, found[name], 0)
    classes_there = np.where(there > 0, there, np.nan)
    return {name: each / classes_there for name, each in total.items()}


def _precisions(
    score: np.ndarray, present: np.ndarray, counts: np.ndarray
) -> dict[str, np.ndarray]:
    """Return both AP of one class and its number of images, (draws,) each, from scores and labels
    (n,)."""
    draws = len(counts)
    if not present.any():
        nothing = np.zeros(draws)
        return {"map": nothing, "map11": nothing, "images": nothing}
    # 1. The highest score first; a threshold stands behind the last of equal scores
    order = np.argsort(-score, kind="stable")
    ranked = score[order]
    last = np.append(ranked[1:] != ranked[:-1], True)
    times = counts[:, order].astype(np.float64)
    hits = (times * present[order]).cumsum(1)[:, last]
    taken = times.cumsum(1)[:, last]
    images = hits[:, -1]
    # 2. Precision where something was taken, and the gain in recall
    precision = hits / np.maximum(taken, 1)
    gains = np.diff(hits, axis=1, prepend=0)
    whole = np.maximum(images, 1)
    area = (gains * precision).sum(1) / whole
    # 3. At 11 recalls the best precision at that recall or a larger one. Whole numbers are compared:
    #    3 of 10 images are a recall of 0.3, whatever its last bit is
    best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    eleven = np.zeros(draws)
    for tenth in range(11):
        first = (10 * hits < tenth * images[:, None]).sum(1)
        eleven += best[np.arange(draws), first]
    return {"map": area, "map11": eleven / 11, "images": images}
