"""RUN/predictions/*.npz: what a model said of each test image, one file of arrays per number.

`keep` writes such a file, beside which checkpoints are compared image by image. `load` reads it
again; it may come from anybody, so arrays that cannot be predictions are refused.
"""

import io
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from backbench.records.result_line import LARGEST
from backbench.runs import atomic, seeding
from backbench.runs.folder import PREDICTIONS
from backbench.runs.terminal import log
from backbench.stats import dense_counts, resampling
from backbench.untrusted import opening, printable

Arrays = Mapping[str, np.ndarray]  # of one file

# Arrays with an entry for each image
_PER_IMAGE = ("hits5", "label", "prediction", "cluster")
# Name -> kinds of dtype and numbers of dimensions; the predictions of each draw of labels are
# (D, N)
_ARRAYS = {
    "manifest": ("U", (0,)),
    "images": ("iufb", (0,)),
    "prediction": ("iub", (1, 2)),
    "label": ("iub", (1,)),
    "hits5": ("iub", (1,)),
    "cluster": ("iu", (1,)),
}
_NUMBERS = ("iufb", (1,))  # of an array of another name


# ---- writing


def keep(run: str | Path, name: str, **arrays: ArrayLike) -> str:
    """Write RUN/predictions/NAME.npz; returns its path relative to RUN, for
    `provenance["predictions"]`.

    `manifest` (str) is the digest of the test list; two files are compared only when theirs are
    equal. Beside it one of
        prediction, label (N,) int, and hits5 (N,) bool where top-5 is reported: one entry per test
            image, in the order of the manifest;
        values (D,): one value in percent per draw or fold, in the order of the draws (fewshot);
        bootstrap_<metric> (B,), one array per metric: the metric on B resamples of the test
            images, drawn from the manifest's digest alone (detection);
        label, and queries_r1 and queries_map_r, or cluster (N,): retrieval and clustering;
        intersection, predicted, labelled (N, C) int: pixels of each test image and class, of which
            all metrics and their resamples are made (segmentation).
    """
    if "manifest" not in arrays:
        raise ValueError("predictions need the manifest's digest")
    relative = f"{PREDICTIONS}/{name.replace('/', '_')}.npz"
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # one name is numpy's own
    atomic.write_bytes(Path(run) / relative, buffer.getvalue())
    return relative


# ---- reading


def load(path: Path) -> Arrays | None:
    """Return the arrays of one file of predictions; None where it is missing or (logged)
    damaged."""
    return _latest.get(path)


def hits(x: Arrays, metric: str) -> np.ndarray | None:
    """Return which images count as right, (N,) or (D, N) bool; None if the file cannot say it."""
    if metric.startswith("top5"):
        return x.get("hits5")
    if not metric.startswith(("top1", "mean_per_class")):
        return None
    if "prediction" not in x or "label" not in x:
        return None
    return x["prediction"] == x["label"]


class _Latest:
    """A cache of the files read last, up to BYTES of arrays; ImageNet's have 1 MB or more."""

    BYTES = 1 << 30
    ENTRY = 1000  # bytes of a path and what holds it

    def __init__(self) -> None:
        self.held: OrderedDict[Path, tuple[Arrays | None, int]] = OrderedDict()
        self.used = 0

    def get(self, path: Path) -> Arrays | None:
        if path in self.held:
            self.held.move_to_end(path)
            return self.held[path][0]
        arrays = _read(path)
        size = self.ENTRY + sum(array.nbytes for array in (arrays or {}).values())
        self.held[path] = (arrays, size)
        self.used += size
        # A file that is larger than the whole cache is dropped at once, too.
        while self.used > self.BYTES:
            _, (_, freed) = self.held.popitem(last=False)
            self.used -= freed
        return arrays


_latest = _Latest()


def _read(path: Path) -> Arrays | None:
    arrays = read_arrays(path, "predictions", _refuse)
    if arrays is None or dense_counts.NAMES[0] not in arrays:
        return arrays
    return {**arrays, **_on_resamples(arrays)}


def read_arrays(
    path: Path, what: str, refuse: Callable[[Arrays], None]
) -> Arrays | None:
    """Return the arrays of a stranger's .npz; None where it is missing, or (logged) damaged or
    refused."""
    try:
        with opening.open_regular(path, most=opening.GIGABYTE) as opened:
            with zipfile.ZipFile(opened) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
            if unpacked > opening.GIGABYTE:
                raise ValueError("more than 1 GB when unpacked")
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        refuse(arrays)
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever a broken file provokes in zipfile or numpy
        why = printable.shown(" ".join(str(error).split()), 100) or type(error).__name__
        log.warning(f"{printable.shown(str(path), 300)}: {what} left out: {why}")
        return None
    return arrays


def _on_resamples(arrays: Arrays) -> Arrays:
    """Return the metrics of counts of pixels per image, on the resamples of their list of
    images."""
    counts = [arrays[name].astype(float) for name in dense_counts.NAMES]
    images = len(counts[0])
    seed = seeding.seed_of("images", str(arrays["manifest"]), images)
    drawn = resampling.image_counts(seed, images).astype(float)
    by_metric = dense_counts.scores(*(drawn @ each for each in counts))
    out = {f"bootstrap_{metric}": 100 * values for metric, values in by_metric.items()}
    out["images"] = np.array(images)
    return out


# ---- what cannot be predictions


def _refuse(arrays: Arrays) -> None:
    """Raise ValueError for arrays that cannot be predictions (see `keep`)."""
    for name, array in arrays.items():
        _refuse_array(name, array)
    if "manifest" not in arrays:
        raise ValueError("no manifest")
    if any(name in arrays for name in dense_counts.NAMES):
        _refuse_counts(arrays)
    per_image = [name for name in _PER_IMAGE if name in arrays]
    if len({arrays[name].shape[-1] for name in per_image}) > 1:
        raise ValueError(f"{', '.join(per_image)} have different lengths")
    images = arrays.get("images")
    if images is not None and (images.dtype.kind not in "iu" or images < 1):
        raise ValueError("'images' is no number of images")


def _refuse_array(name: str, array: np.ndarray) -> None:
    """Raise ValueError for an array that is not what its name says."""
    kinds, dimensions = _ARRAYS.get(name, _NUMBERS)
    if array.dtype.kind not in kinds:
        raise ValueError(f"'{name}' is of type {array.dtype}")
    is_score = name == "values" or name.startswith("bootstrap_")
    if name not in _ARRAYS and not is_score:
        return  # nobody reads it
    if array.ndim not in dimensions:
        raise ValueError(f"'{name}' has {array.ndim} dimensions")
    if not array.size:
        raise ValueError(f"'{name}' is empty")
    if is_score:
        # A value that is no score would spread to the tables.
        scores = array.astype(float)
        if name != "values":
            # A resample without a ground truth has no AP.
            scores = scores[~np.isnan(scores)]
        if not (np.abs(scores) <= LARGEST).all():
            raise ValueError(f"'{name}' holds a value that is no score")


def _refuse_counts(arrays: Arrays) -> None:
    """Raise ValueError for what cannot be counts of pixels per image."""
    counts = [arrays[name] for name in dense_counts.NAMES if name in arrays]
    are_three = len(counts) == len(dense_counts.NAMES)
    are_alike = len({each.shape for each in counts}) == 1
    are_whole = all(each.dtype.kind in "iu" for each in counts)
    if not are_three or not are_alike or not are_whole or counts[0].ndim != 2:
        raise ValueError(
            "the counts of pixels are no three tables of images and classes"
        )
    intersection, predicted, labelled = (each.astype(float) for each in counts)
    least = np.minimum(predicted, labelled)
    if not counts[0].size or not ((intersection >= 0) & (intersection <= least)).all():
        raise ValueError("more pixels are right than there are")
    if not np.array_equal(predicted.sum(1), labelled.sum(1)):
        raise ValueError("other numbers of pixels are predicted than are labelled")
