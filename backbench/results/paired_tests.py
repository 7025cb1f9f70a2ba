"""Two checkpoints compared by the predictions that they kept (docs/results.md).

This file reads the predictions and pairs them; backbench/stats/paired_differences.py tests them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.results.predictions import hits, load
from backbench.stats import paired_differences
from backbench.stats.paired_differences import Difference

if TYPE_CHECKING:
    import numpy as np

    from backbench.results.predictions import Arrays


def compare(a: Sequence[Path], b: Sequence[Path], metric: str) -> Difference | None:
    """a - b on `metric`, from the kept predictions of the same seeds in the same order; None if
    they do not pair.

    Resamples of several seeds are averaged one by one. Hits of several seeds and of several draws
    of labels stand side by side: the seeds vary, and so do the images.
    """
    import numpy as np

    pairs = _paired_files(a, b)
    if not pairs:
        return None
    # 1. The metric itself on resamples of the images
    resampled = _resampled(pairs, f"bootstrap_{metric}")
    if resampled is not None:
        return paired_differences.of_resamples(resampled, int(pairs[0][0]["images"]))
    # 2. Or what was predicted for each image: (draws, images) of each seed
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
    if len(d) == 1:
        return paired_differences.of_images(d[0], classes)
    return paired_differences.of_draws_and_images(d, classes)


def _paired_files(a: Sequence[Path], b: Sequence[Path]) -> list[tuple[Arrays, Arrays]]:
    """The arrays of a[i] beside those of b[i]; nothing unless all of them are of one test list."""
    if len(a) != len(b):
        return []
    pairs: list[tuple[Arrays, Arrays]] = []
    for file_a, file_b in zip(a, b):
        x, y = load(file_a), load(file_b)
        if x is None or y is None:
            return []
        first = pairs[0][0] if pairs else x
        if not _same_list(x, y) or not _same_list(first, x):
            return []
        pairs.append((x, y))
    return pairs


def _same_list(x: Arrays, y: Arrays) -> bool:
    """True if both were scored on the same images in the same order, with the same labels."""
    import numpy as np

    if str(x["manifest"]) != str(y["manifest"]):
        return False
    return "label" not in x or "label" not in y or np.array_equal(x["label"], y["label"])


def _resampled(pairs: Sequence[tuple[Arrays, Arrays]], name: str) -> np.ndarray | None:
    """The mean over seeds of the differences of array `name` (B,), on resamples of `images` images;
    None if a file lacks one of the two, or has as many resamples as no other."""
    import numpy as np

    differences = []
    for x, y in pairs:
        if not {name, "images"} <= x.keys() & y.keys():
            return None
        if x[name].shape != y[name].shape:
            return None
        differences.append(x[name].astype(float) - y[name])
    if len({d.shape for d in differences}) > 1:
        return None
    return np.mean(differences, axis=0)
