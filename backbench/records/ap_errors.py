"""Why an AP is what it is: what each kind of error costs, as rows beside the AP.

`detection/tide.py` says once which error each kept detection is. That stands in a file of its own
beside the run's predictions, from which the rows follow without boxes, images or annotations: `verify`
computes them again from it alone.

A row has no interval: in simulations one from its resamples covers in 82 to 97% of cases. The
difference of two detectors has one, which covers in 94 to 97% (benchmarks/ap_errors.txt).
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from backbench.records.predictions import Arrays
from backbench.runs import seeding
from backbench.stats import ap_errors, resampling
from backbench.stats.ap_errors import ERRORS, HIT, IGNORED, NO_CLASS, Outcomes
from backbench.untrusted import printable

# The arrays of each kind (bbox, segm) begin with its name: bbox_fault
_PER_DETECTION = ("image", "category", "fault", "mended")
_PER_OBJECT = ("object_image", "object_category", "object_missed")
_ALIKE = 1e-6  # points: a number computed again
# Bounds on what a stranger's file may cost: LVIS has 1,203 classes, Open Images 125,436 test images
_MOST_CLASSES = 3_000
_MOST_IMAGES = 200_000


def metric_name(kind: str, error: str) -> str:
    """Return the metric of a row: bbox_location."""
    return f"{kind}_{error}"


def is_cost(metric: str) -> bool:
    """Return whether a metric is what a kind of error costs."""
    kind, _, error = metric.rpartition("_")
    return kind in ("bbox", "segm") and error in ERRORS


def file_stem(stem: str) -> str:
    """Return the name of the file of outcomes, from that of the AP's resamples."""
    return f"errors-{stem}"


def kept(by_kind: Mapping[str, Outcomes], manifest: str) -> dict[str, np.ndarray]:
    """Return what is kept of the outcomes of each kind, with the costs on resamples.

    The resamples depend on `manifest` alone, so that two checkpoints are compared draw by draw."""
    arrays = {"manifest": np.array(manifest)}
    for kind, outcomes in by_kind.items():
        arrays["images"] = np.array(outcomes.images)
        for name in (*_PER_DETECTION, *_PER_OBJECT):
            arrays[f"{kind}_{name}"] = getattr(outcomes, name)
        for error, drawn in _on_resamples(outcomes, manifest).items():
            arrays[f"bootstrap_{metric_name(kind, error)}"] = drawn
    return arrays


def value(x: Arrays, metric: str) -> float:
    """Return the points of AP50 that a kind of error costs."""
    kind, _, error = metric.rpartition("_")
    return float(_again.on_all_images(x, kind)[error][0])


def count(x: Arrays, metric: str) -> int:
    """Return how many errors of a kind there are."""
    kind, _, error = metric.rpartition("_")
    if error == "missed":
        return int(x[f"{kind}_object_missed"].sum())
    return int((x[f"{kind}_fault"] == ERRORS[error]).sum())


def ap50(outcomes: Outcomes) -> float:
    """Return the AP50 of the detections as they are, in percent."""
    return ap_errors.ap50(outcomes)


def _outcomes(x: Arrays, kind: str) -> Outcomes:
    arrays = {name: x[f"{kind}_{name}"] for name in (*_PER_DETECTION, *_PER_OBJECT)}
    return Outcomes(images=int(x["images"]), **arrays)


def _on_resamples(outcomes: Outcomes, manifest: str) -> dict[str, np.ndarray]:
    seed = seeding.seed_of("images", manifest, outcomes.images)
    return ap_errors.costs(outcomes, resampling.image_counts(seed, outcomes.images))


# ---- a stranger's file


def fault(x: Arrays, metric: str) -> str:
    """Say what in a file of outcomes cannot be, or is not what its resamples say; "" where all fits."""
    kind, _, error = metric.rpartition("_")
    if not is_cost(metric):
        return f"'{printable.shown(metric, 60)}' is no error of a detection"
    for names in (_PER_DETECTION, _PER_OBJECT):
        arrays = [x.get(f"{kind}_{name}") for name in names]
        lengths = {None if array is None else array.shape for array in arrays}
        if len(lengths) > 1 or not all(_are_whole(array) for array in arrays):
            return f"its file does not say what became of each {kind}"
    why = _impossible(_outcomes(x, kind))
    if why:
        return why
    drawn = x.get(f"bootstrap_{metric}")
    again = _again.on_resamples(x, kind)[error]
    if drawn is None or not np.allclose(
        drawn, again, rtol=0, atol=_ALIKE, equal_nan=True
    ):
        return "its resamples are not those of its detections"
    return ""


def _are_whole(array: np.ndarray | None) -> bool:
    return array is not None and array.dtype.kind in "iu" and array.ndim == 1


def _impossible(o: Outcomes) -> str:
    """Say what no detections give; "" where all fits."""
    if not o.object_image.size:
        return "its file has no object"
    if len(np.unique(o.object_category)) > _MOST_CLASSES or o.images > _MOST_IMAGES:
        return "its file has more classes or images than any list of boxes"
    for image in (o.image, o.object_image):
        if image.size and not 0 <= image.min() <= image.max() < o.images:
            return f"its file names images that are not among its {o.images}"
    for array, least, most in (
        (o.category, 0, None),
        (o.object_category, 0, None),
        (o.mended, NO_CLASS, None),
        (o.fault, HIT, IGNORED),
        (o.object_missed, 0, 1),
    ):
        below = array.size and array.min() < least
        if below or (most is not None and array.max(initial=0) > most):
            return "its file names classes or errors that there are not"
    if (o.fault == HIT).sum() > len(o.object_image):
        return "its file has more hits than objects"
    return ""


@dataclass(frozen=True, eq=False)
class _CostsOfFile:
    """The costs that follow from one file, by kind, once they are asked for."""

    arrays: Arrays
    whole: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    drawn: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)


class _Again:
    """The costs of the files that were looked at last: a file has a row for each error, and a board
    compares two files by one error after another."""

    FILES = 16

    def __init__(self) -> None:
        self.held: OrderedDict[int, _CostsOfFile] = OrderedDict()

    def on_all_images(self, x: Arrays, kind: str) -> dict[str, np.ndarray]:
        whole = self._of(x).whole
        if kind not in whole:
            outcomes = _outcomes(x, kind)
            once = np.ones((1, outcomes.images))
            whole[kind] = ap_errors.costs(outcomes, once)
        return whole[kind]

    def on_resamples(self, x: Arrays, kind: str) -> dict[str, np.ndarray]:
        drawn = self._of(x).drawn
        if kind not in drawn:
            outcomes = _outcomes(x, kind)
            drawn[kind] = _on_resamples(outcomes, str(x["manifest"]))
        return drawn[kind]

    def _of(self, x: Arrays) -> _CostsOfFile:
        # The arrays are held with their costs, so that no others can have their id
        found = self.held.setdefault(id(x), _CostsOfFile(x))
        self.held.move_to_end(id(x))
        if len(self.held) > self.FILES:
            self.held.popitem(last=False)
        return found


_again = _Again()
