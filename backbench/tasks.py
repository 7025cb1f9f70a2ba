"""What can be measured: one row per task. Every list of tasks in the suite comes from here.

A task is a kind of number (a linear probe, the AP of Mask R-CNN); a verb of the command line
measures one or several of them, and a protocol (a recipe under configs/transfer or
configs/detection) says how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of number. Its place in TASKS is its place in every table."""

    name: str
    title: str  # on the page and in tables
    verb: str  # of the command line
    recipe: str  # the protocol where none is named
    # `kind:` of the protocols in configs/transfer that measure it
    kind: str | None = None
    percent: int | None = None  # of ImageNet's labels
    ious: tuple[str, ...] = ()  # detection: what its APs compare, the task's own first
    cheap: bool = False  # minutes, where the others take hours: what may predict them
    ranked: bool = True  # more is better; False where the numbers only describe features
    # Points by which a measured number may miss a printed one; None: it is not judged. Ours: the
    # papers print one run without an interval, and users report spreads of half a point to a point
    # for one recipe (facebookresearch/barlowtwins#14: 68.9 and 69.7).
    tolerance: float | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)  # on single datasets

    @property
    def detects(self) -> bool:
        return bool(self.ious)

    @property
    def split(self) -> str:
        """What it is scored on, as its rows say it: detectors on what their datasets call val."""
        return "val" if self.detects else "test"

    def tolerance_on(self, dataset: str) -> float | None:
        return self.tolerances.get(dataset, self.tolerance)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="linear",
            title="Linear probe",
            verb="linear",
            recipe="lorac",
            kind="sgd",
            tolerance=1.5,
            tolerances={"imagenet": 0.5, "imagenet100": 1.0, "average": 0.7},
        ),
        Task(
            name="logreg",
            title="Logistic regression",
            verb="linear",
            recipe="logreg",
            kind="logreg",
        ),
        Task(
            name="knn",
            title="Nearest neighbours",
            verb="linear",
            recipe="knn",
            kind="knn",
            cheap=True,
            tolerance=1.5,
        ),
        Task(
            name="fewshot",
            title="Few labels",
            verb="linear",
            recipe="fewshot",
            kind="fewshot",
            cheap=True,
        ),
        Task(
            name="semi_1pct",
            title="1% of labels",
            verb="semisup",
            recipe="semisup",
            kind="finetune",
            percent=1,
            tolerances={"imagenet": 1.5},
        ),
        Task(
            name="semi_10pct",
            title="10% of labels",
            verb="semisup",
            recipe="semisup",
            kind="finetune",
            percent=10,
            tolerances={"imagenet": 1.0},
        ),
        Task(
            name="finetune",
            title="Finetuning",
            verb="finetune",
            recipe="finetune",
            kind="finetune",
        ),
        Task(
            name="faster_rcnn",
            title="Faster R-CNN",
            verb="detect",
            recipe="faster_rcnn_R_50_FPN_1x",
            ious=("bbox",),
            tolerance=0.5,
        ),
        Task(
            name="mask_rcnn",
            title="Mask R-CNN",
            verb="detect",
            recipe="mask_rcnn_R_50_FPN_1x",
            ious=("segm", "bbox"),
            tolerance=0.5,
        ),
        Task(
            name="keypoint_rcnn",
            title="Keypoint R-CNN",
            verb="detect",
            recipe="keypoint_rcnn_R_50_FPN_1x",
            ious=("keypoints", "bbox"),
            tolerance=0.5,
        ),
        Task(
            name="analyze",
            title="Feature analysis",
            verb="analyze",
            recipe="analyze",
            cheap=True,
            ranked=False,
        ),
    )
}
ORDER = {name: place for place, name in enumerate(TASKS)}
DETECTION = tuple(name for name, task in TASKS.items() if task.detects)


@dataclass(frozen=True, kw_only=True)
class MeasuringVerb:
    """A verb that measures tasks: what a grid's evaluation may say to it, and what it must."""

    takes: tuple[str, ...]
    needs: tuple[str, ...]


VERBS: dict[str, MeasuringVerb] = {
    "linear": MeasuringVerb(takes=("datasets", "protocol", "pack"), needs=("datasets",)),
    "semisup": MeasuringVerb(takes=("percent", "lists", "protocol"), needs=("percent",)),
    "finetune": MeasuringVerb(takes=("datasets", "protocol"), needs=("datasets",)),
    "analyze": MeasuringVerb(takes=("datasets", "pack"), needs=("datasets",)),
    "detect": MeasuringVerb(takes=("config", "engine"), needs=("config",)),
}


def by_kind(verb: str) -> dict[str, str]:
    """`kind:` of a protocol -> the task that the verb measures by it."""
    return {
        task.kind: name
        for name, task in TASKS.items()
        if task.verb == verb and task.kind is not None
    }
