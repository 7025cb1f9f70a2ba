"""How a column is named, ordered, formatted and explained by its metric.

A metric that is not in METRICS stands behind those that are, under its own name. To show one in
another way, add its entry here: the order of all tables follows it, and the page's script reads
the same entry with each column.
"""

import re
from dataclasses import dataclass

from backbench.stats.ap_errors import ERRORS

LAST = 3  # the place of a metric without an entry


@dataclass(frozen=True, kw_only=True)
class MetricKind:
    """The look of the columns of one metric."""

    place: int = LAST  # among the metrics of one measurement; the smallest is the main
    heading: str = ""  # on the page; without one, the metric's name with spaces
    decimals: int = 1  # of a value in the page's table
    ranks: bool = False  # the page ranks checkpoints by it
    by_size: bool = False  # of small, medium or large objects: hidden at first
    explained: str = ""  # beside the button that shows it


METRICS = {
    "top1": MetricKind(place=0, heading="top-1", ranks=True),
    "mean_per_class": MetricKind(place=0, heading="mean/class", ranks=True),
    # The mean over LORAC's twelve datasets
    "average": MetricKind(place=0, heading="mean of 12", ranks=True),
    "miou": MetricKind(place=0),
    "map": MetricKind(place=0, ranks=True),
    "map11": MetricKind(place=1),
    "AP": MetricKind(place=0, ranks=True),
    "AP50": MetricKind(place=1),
    "top5": MetricKind(place=2, heading="top-5"),
    "pixel_acc": MetricKind(place=2),
    "macc": MetricKind(place=2),
    "AP75": MetricKind(place=2),
    # Kinds of errors in detection, in TIDE's order
    **{name: MetricKind(place=place, decimals=2) for place, name in enumerate(ERRORS)},
    "APs": MetricKind(by_size=True, explained="small"),
    "APm": MetricKind(by_size=True, explained="medium"),
    "APl": MetricKind(by_size=True, explained="large"),
}
_OTHER = MetricKind()
_SHAPES = ("bbox", "segm")  # whose errors are counted
_NEIGHBOURS = re.compile(r"_k\d+$")  # top1_k20: of the 20 nearest neighbours
_LABELS = re.compile(r"(?<=_labels)\d+$")  # top1_labels5: a point of a label curve


def family(metric: str) -> str:
    """Return the beginning of the metric's name: `segm` for segm_AP50, nothing for top1."""
    return "" if metric in METRICS else metric.rpartition("_")[0]


def place(metric: str) -> int:
    """Return the place of a metric among those of its family, by the end of its name."""
    short = metric.rpartition("_")[2] if family(metric) else metric
    return METRICS.get(short, _OTHER).place


def order(metric: str) -> str:
    """Return the sorting key among metrics of one place: points of a curve by their numbers of
    labels."""
    return _LABELS.sub(lambda number: number[0].zfill(10), metric)


def kind_of(metric: str) -> MetricKind:
    """Return the entry of a metric. `segm_AP` has that of `AP`, and `top1_k20` that of `top1`."""
    name = _NEIGHBOURS.sub("", metric)
    shape, _, last = name.rpartition("_")
    of_shape = last.startswith("AP") or (shape in _SHAPES and last in ERRORS)
    return METRICS.get(last if of_shape else name, _OTHER)


def heading(metric: str) -> str:
    """Return the words above a column of this metric: `top-1 k20` for top1_k20."""
    for name, kind in METRICS.items():
        if kind.heading and metric.startswith(name):
            metric = kind.heading + metric.removeprefix(name)
            break
    return metric.replace("_", " ")
