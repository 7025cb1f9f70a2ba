"""Reads kept predictions, one file of arrays per number (see `store.keep_predictions`)."""

import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from backbench.records.result_line import LARGEST
from backbench.runs import seeding
from backbench.runs.terminal import log
from backbench.stats import dense_counts, resampling
from backbench.untrusted import opening, printable

Arrays = Mapping[str, np.ndarray]  # of one file


class _Latest:
    """A cache of the files read last, up to BYTES of arrays; ImageNet's have 1 MB or more."""

    BYTES = 1 << 30

    def __init__(self) -> None:
        self.held: OrderedDict[Path, tuple[Arrays | None, int]] = OrderedDict()
        self.used = 0

    def get(self, path: Path) -> Arrays | None:
        if path in self.held:
            self.held.move_to_end(path)
            return self.held[path][0]
        arrays = _read(path)
        size = _ENTRY + sum(array.nbytes for array in (arrays or {}).values())
        self.held[path], self.used = (arrays, size), self.used + size
        while (
            self.used > self.BYTES
        ):  # one that is larger than all of it is not held either
            self.used -= self.held.popitem(last=False)[1][1]
        return arrays


_PER_IMAGE = (
    "hits5",
    "label",
    "prediction",
    "cluster",
)  # arrays with an entry for each image
# Name -> kinds and dimensions; the predictions of each draw of labels are (D, N)
_ARRAYS = {
    "manifest": ("U", (0,)),
    "images": ("iufb", (0,)),
    "prediction": ("iub", (1, 2)),
    "label": ("iub", (1,)),
    "hits5": ("iub", (1,)),
    "cluster": ("iu", (1,)),
}
_ENTRY = 1000  # bytes of a path and what holds it
_latest = _Latest()


def load(path: Path) -> Arrays | None:
    """The arrays of one file of predictions; None where it is missing or (logged) damaged."""
    return _latest.get(path)


def hits(x: Arrays, metric: str) -> np.ndarray | None:
    """Which images count as right, (N,) or (D, N) bool; None if the file cannot say it."""
    if metric.startswith("top5"):
        return x.get("hits5")
    if (
        metric.startswith(("top1", "mean_per_class"))
        and "prediction" in x
        and "label" in x
    ):
        return x["prediction"] == x["label"]
    return None


def _read(path: Path) -> Arrays | None:
    arrays = read_arrays(path, "predictions", _refuse)
    if arrays is None or dense_counts.NAMES[0] not in arrays:
        return arrays
    return {**arrays, **_on_resamples(arrays)}


def read_arrays(
    path: Path, what: str, refuse: Callable[[Arrays], None]
) -> Arrays | None:
    """The arrays of a stranger's .npz; None where it is missing, or (logged) damaged or refused."""
    try:
        with opening.open_regular(path, most=opening.GIGABYTE) as opened:
            with zipfile.ZipFile(opened) as archive:
                if (
                    sum(member.file_size for member in archive.infolist())
                    > opening.GIGABYTE
                ):
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
    """The metrics of counts of pixels per image, on the resamples of their list of images."""
    counts = [arrays[name].astype(float) for name in dense_counts.NAMES]
    images = len(counts[0])
    seed = seeding.seed_of("images", str(arrays["manifest"]), images)
    drawn = resampling.image_counts(seed, images).astype(float)
    by_metric = dense_counts.scores(*(drawn @ each for each in counts))
    out = {f"bootstrap_{metric}": 100 * values for metric, values in by_metric.items()}
    return {**out, "images": np.array(images)}


def _refuse_counts(arrays: Arrays) -> None:
    """Raises ValueError for what cannot be counts of pixels per image."""
    counts = [arrays[name] for name in dense_counts.NAMES if name in arrays]
    shapes, kinds = (
        {each.shape for each in counts},
        {each.dtype.kind for each in counts},
    )
    if (
        len(counts) < 3
        or len(shapes) > 1
        or counts[0].ndim != 2
        or not kinds <= {"i", "u"}
    ):
        raise ValueError(
            "the counts of pixels are no three tables of images and classes"
        )
    intersection, predicted, labelled = (each.astype(float) for each in counts)
    least = np.minimum(predicted, labelled)
    if not counts[0].size or not ((intersection >= 0) & (intersection <= least)).all():
        raise ValueError("more pixels are right than there are")
    if not np.array_equal(predicted.sum(1), labelled.sum(1)):
        raise ValueError("other numbers of pixels are predicted than are labelled")


def _refuse(arrays: Arrays) -> None:
    """Raises ValueError for arrays that cannot be predictions (see `store.keep_predictions`)."""
    for name, array in arrays.items():
        is_score = name == "values" or name.startswith("bootstrap_")
        kinds, dimensions = _ARRAYS.get(name, ("iufb", (1,)))
        if array.dtype.kind not in kinds:
            raise ValueError(f"'{name}' is of type {array.dtype}")
        if name not in _ARRAYS and not is_score:
            continue  # nobody reads it
        if array.ndim not in dimensions:
            raise ValueError(f"'{name}' has {array.ndim} dimensions")
        if not array.size:
            raise ValueError(f"'{name}' is empty")
        if is_score:  # a value that is no score would spread to the tables
            known = array.astype(float)
            if name != "values":
                known = known[
                    ~np.isnan(known)
                ]  # a resample without a ground truth has no AP
            if not (np.abs(known) <= LARGEST).all():
                raise ValueError(f"'{name}' holds a value that is no score")
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
