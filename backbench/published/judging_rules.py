"""The rules that say which printed numbers are judged, by which protocol, and as which metric.

A number can be judged if its table's authors scored the row themselves, by a protocol and a method
that this suite has. `WHY` has a word for each reason not to. A recipe's `expected:` says which
numbers it must reach.

Which numbers are quoted follows from the tables' marks: in LORAC Table 1 they lack the mark of an
own measurement, in JCL Table 1 they have another paper's mark or none. ARB Table 1 has no marks:
there a baseline is quoted if solo-learn's README has both its accuracies, digit for digit. Nor have
the detection tables: there three rows' masks are quoted, whose digits other papers have.
"""

import functools
from dataclasses import dataclass

from backbench.board.board import Column
from backbench.published.published import Published, lookup, slug
from backbench.recipes import config, own_probe
from backbench.records import column_keys
from backbench.stats import confidence
from backbench.tasks import TASKS

SPREAD, QUOTED, UNBUILT, UNIDENTIFIED = "spread", "quoted", "unbuilt", "unidentified"
IMAGELESS, HOURS = "imageless", "hours"
WHY = {
    SPREAD: "a standard deviation over trials, no score",
    QUOTED: "the table's authors took it from another paper or from solo-learn",
    IMAGELESS: "text and control (CLLR Tables 2 and 4)",
    HOURS: "a training time; the grid measures the ratio to the host",
    UNBUILT: "WCoRD and CRCD are not built",
    UNIDENTIFIED: "the row's label is lost",
}
# Numbers that are no scores of images, and have no column on a leaderboard
NO_SCORES = (SPREAD, IMAGELESS, HOURS)
_OTHER_TASKS = {"text": IMAGELESS, "control": IMAGELESS, "pretraining": HOURS}
# The names of models whose training this suite does not have begin with these.
_UNBUILT = ("WCoRD", "CRCD")


@dataclass(frozen=True, kw_only=True)
class ScoredBy:
    """The rows of a printed table that one recipe of configs/transfer scores."""

    protocol: str  # the recipe's name
    models: tuple[str, ...] = ("",)  # beginnings of the models' names; "" fits all
    datasets: tuple[str, ...] = ()  # () fits all
    task: str = ""  # "" fits all

    def fits(self, number: Published) -> bool:
        return (
            number.model.startswith(self.models)
            and (not self.datasets or number.dataset in self.datasets)
            and self.task in ("", number.task)
        )


_CIFAR = ("cifar10", "cifar100")


def _own_probe_of(method: str) -> tuple[ScoredBy, ...]:
    """Return the probe that a paper states for its method, which scores the paper's baselines,
    too."""
    rules = []
    for dataset, probe in own_probe.BY_METHOD[method].items():
        rules.append(ScoredBy(protocol=probe, datasets=(dataset,)))
    return tuple(rules)


_ARB = (
    ScoredBy(protocol="knn_cifar", datasets=_CIFAR, task="knn"),
    *_own_probe_of("arb"),
)
_CLLR = (
    # "We adopt the projection result L Phi(x) for feature extraction" (Section 4)
    ScoredBy(protocol="cllr_cifar_lphi", datasets=_CIFAR, models=("CLLR",)),
    ScoredBy(protocol="cllr_stl10_lphi", datasets=("stl10",), models=("CLLR",)),
    ScoredBy(
        protocol="cllr_imagenet100_lphi", datasets=("imagenet100",), models=("CLLR",)
    ),
    *_own_probe_of("cllr"),
)
# (paper, table) -> the rules for its rows, of which the first that fits counts. Table "" stands for
# all tables of the paper.
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
    ("MIO", ""): _own_probe_of("mio"),
    ("ARB", ""): _ARB,
    ("CLLR", ""): _CLLR,
}
DETECTION = "detection-1x-v1"  # the protocol of configs/detection/*_1x.yaml in rows


def reason(number: Published) -> str | None:
    """Return the word of WHY that says why a number is not judged; None if it is judged."""
    if number.metric.endswith("_std"):
        return SPREAD
    if number.task in _OTHER_TASKS:
        return _OTHER_TASKS[number.task]
    if number.quoted:
        return QUOTED
    if number.model.startswith(_UNBUILT):
        return UNBUILT
    if number.model.startswith("ARB loss variant"):
        return UNIDENTIFIED
    return None


def recipe(number: Published) -> str | None:
    """Return the recipe that scores this number; None for detection and numbers not judged."""
    if reason(number) is not None or TASKS[number.task].detects:
        return None
    rules = _SCORED.get((number.paper, number.table)) or _SCORED[number.paper, ""]
    for rule in rules:
        if rule.fits(number):
            return rule.protocol
    raise AssertionError(f"nothing scores {number.key} on {number.dataset}")


@functools.cache
def protocol_name(recipe: str) -> str:
    """Return the name that rows have for the protocol of a recipe under configs/transfer.

    It is that of `Protocol.name`, without torch."""
    data = config.read_recipe(config.find_recipe(recipe, "transfer"))
    name = str(data["protocol"])
    if data.get("precision", "fp32") != "fp32":
        name += f"-{data['precision']}"
    if data.get("head"):
        name += f"-{data['head']}"
    return name


def column_of(number: Published) -> Column:
    """Return the leaderboard column that a printed score stands in."""
    scored_by = recipe(number)
    if reason(number) is not None:
        # Others scored it in their own way: each such table is a protocol of its own.
        protocol = f"{slug(number.paper)}-table-{slug(number.table)}"
    elif scored_by is None:
        protocol = DETECTION
    else:
        protocol = protocol_name(scored_by)
    metric = as_measured(number)
    split = metric.split or TASKS[number.task].split
    return Column(
        task=number.task,
        dataset=number.dataset,
        metric=metric.metric,
        protocol=protocol,
        engine="detectron2" if TASKS[number.task].detects else None,
        split=None if split == column_keys.USUAL_SPLIT else split,
    )


@dataclass(frozen=True)
class AsMeasured:
    """A printed number, in percent, as the metric of this suite that it is compared with."""

    metric: str
    value: float
    split: str | None = None  # where it differs from the task's usual split


def as_measured(number: Published) -> AsMeasured:
    """Return the metric and the value that a measured row must have."""
    # kNN metrics of this suite have k in their names; ARB, the one paper with kNN, has 5 neighbours.
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


# Trials behind a printed spread, by CLLR Section 4.1; Table 0.6 does not say otherwise
_TRIALS = 5


def tolerance(number: Published, trainings: int = 1) -> float | None:
    """Return how far, in points, the mean over `trainings` may lie from a number; None if the
    number is not judged.

    If the paper prints the spread s of its trials, chance alone keeps 95% of all differences between
    the two means within t s sqrt(1 / trials + 1 / trainings). The larger of this and the task's
    tolerance counts.
    """
    if reason(number) is not None:
        return None
    allowed = TASKS[number.task].tolerance_on(number.dataset)
    spread = [n.value for n in lookup(number.key) if n.metric == f"{number.metric}_std"]
    if allowed is None or not spread:
        return allowed
    t = confidence.t_quantile(_TRIALS - 1)
    by_trials = t * (1 / _TRIALS + 1 / trainings) ** 0.5
    return max(allowed, round(by_trials * spread[0], 2))
