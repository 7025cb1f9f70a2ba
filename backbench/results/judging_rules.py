"""Which printed numbers are judged: by which protocol a measured one must be made, and as what; or
the one word for why a number is not judged.

A number is judged where its table's authors scored the row, by a protocol that this suite ships,
with a method that it has built. Which recipe must reach it says that recipe (`expected:`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from backbench.recipes import config
from backbench.results.published import Published, slug
from backbench.tasks import TASKS

SPREAD, QUOTED, UNBUILT, UNIDENTIFIED = "spread", "quoted", "unbuilt", "unidentified"
WHY = {
    SPREAD: "a standard deviation over trials, no score",
    QUOTED: "the table's authors took it from another paper and do not say how it was scored",
    UNBUILT: "the method is not built: WCoRD and CRCD",
    UNIDENTIFIED: "the row's label is lost, so nobody can say what was trained",
}
# How the names of models begin whose training this suite does not have
_UNBUILT = ("WCoRD", "CRCD")


@dataclass(frozen=True, kw_only=True)
class ScoredBy:
    """Rows of a printed table that one recipe of configs/transfer scores."""

    protocol: str  # the recipe's name
    models: tuple[str, ...] = ("",)  # how the models' names begin; "" is any
    datasets: tuple[str, ...] = ()  # () is any
    task: str = ""  # "" is any


_CIFAR = ("cifar10", "cifar100")
_MIO = (
    ScoredBy(protocol="mio_stl10", datasets=("stl10",)),
    ScoredBy(protocol="mio_cifar", datasets=_CIFAR),
)
_ARB = (
    ScoredBy(protocol="knn_cifar", datasets=_CIFAR, task="knn"),
    ScoredBy(protocol="arb_cifar", datasets=_CIFAR),
    ScoredBy(protocol="imagenet_arb"),
)
_CLLR = (
    # "We adopt the projection result L Phi(x) for feature extraction" (Section 4)
    ScoredBy(protocol="cllr_cifar_lphi", datasets=_CIFAR, models=("CLLR",)),
    ScoredBy(protocol="cllr_stl10_lphi", datasets=("stl10",), models=("CLLR",)),
    ScoredBy(protocol="cllr_imagenet100_lphi", datasets=("imagenet100",), models=("CLLR",)),
    ScoredBy(protocol="cllr_cifar", datasets=_CIFAR),
    ScoredBy(protocol="cllr_stl10", datasets=("stl10",)),
    ScoredBy(protocol="cllr_imagenet100", datasets=("imagenet100",)),
)
# (paper, table) -> what scores its rows; the first that fits counts. A paper alone: all its tables
_SCORED: dict[tuple[str, str], tuple[ScoredBy, ...]] = {
    ("LORAC", "1"): (
        ScoredBy(protocol="imagenet_moco", models=("MoCo-v", "JCL")),
        ScoredBy(protocol="imagenet_lorac"),
    ),
    ("LORAC", "2"): (ScoredBy(protocol="lorac"),),
    ("LORAC", "3"): (ScoredBy(protocol="semisup"),),
    ("LORAC", "5"): (
        ScoredBy(protocol="imagenet100_moco", models=("MoCo-v2",)),
        ScoredBy(protocol="imagenet100_lorac"),
    ),
    ("JCL", "1"): (ScoredBy(protocol="imagenet_moco"),),
    ("MIO", ""): _MIO,
    ("ARB", ""): _ARB,
    ("CLLR", ""): _CLLR,
}
DETECTION = "detection-1x-v1"  # what configs/detection/*_1x.yaml are called in rows


def reason(number: Published) -> str | None:
    """Why a number is not judged, in one of the words of WHY; None where it is."""
    if number.metric.endswith("_std"):
        return SPREAD
    if number.quoted:
        return QUOTED
    if number.model.startswith(_UNBUILT):
        return UNBUILT
    if number.model.startswith("ARB loss variant"):
        return UNIDENTIFIED
    return None


def recipe(number: Published) -> str | None:
    """The recipe under configs/transfer that scores this number; None for a detection, and for
    what is not judged."""
    if reason(number) is not None or TASKS[number.task].detects:
        return None
    rules = _SCORED.get((number.paper, number.table)) or _SCORED[number.paper, ""]
    for rule in rules:
        of_model = number.model.startswith(rule.models)
        of_dataset = not rule.datasets or number.dataset in rule.datasets
        if of_model and of_dataset and rule.task in ("", number.task):
            return rule.protocol
    raise AssertionError(f"nothing scores {number.key} on {number.dataset}")


@functools.cache
def protocol_name(recipe: str) -> str:
    """What a recipe under configs/transfer is called in rows."""
    data = config.read_recipe(config.find_recipe(recipe, "transfer"))
    head = f"-{data['head']}" if data.get("head") else ""
    return f"{data['protocol']}{head}"


def protocol(number: Published) -> tuple[str, str | None]:
    """(protocol, engine) of the leaderboard column that this number stands in.

    What is not judged was scored by others in their own ways: each such table is a protocol of its
    own.
    """
    engine = "detectron2" if TASKS[number.task].detects else None
    if reason(number) is not None:
        return f"{slug(number.paper)}-table-{slug(number.table)}", engine
    if engine:
        return DETECTION, engine
    found = recipe(number)
    assert found is not None
    return protocol_name(found), engine


@dataclass(frozen=True)
class AsMeasured:
    """A printed number as the metric of this suite that it is compared with, in percent."""

    metric: str
    value: float
    split: str | None = None  # where it is not the task's


def as_measured(number: Published) -> AsMeasured:
    """The metric and value that a row of results must have."""
    # kNN rows carry their k, and ARB's has 5 neighbours.
    if number.task == "knn":
        return AsMeasured(f"{number.metric}_k5", number.value)
    # CLLR's tables 0.4 and 0.6 are headed "Top5", and their numbers are top-1's: 100 - 6.9 of 0.6
    # is 93.1, the top-1 accuracy of the same training in Table 1.
    if number.paper == "CLLR" and number.table == "0.4":
        return AsMeasured("top1", number.value)
    if number.metric == "test_error_top5":
        return AsMeasured("top1", round(100 - number.value, 4))
    if number.metric == "train_error_top5":
        return AsMeasured("train_top1", round(100 - number.value, 4), "train")
    return AsMeasured(number.metric, number.value)


def tolerance(number: Published) -> float | None:
    """How far, in points, a measured value may be from this number; None where it is not judged."""
    if reason(number) is not None:
        return None
    return TASKS[number.task].tolerance_on(number.dataset)
