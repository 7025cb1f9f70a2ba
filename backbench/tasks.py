"""The tasks that can be measured, one row each. Every list of tasks in the suite comes from here.

A task is a kind of number (a linear probe, the AP of Mask R-CNN); a verb of the command line
measures one or several of them, and a protocol (a recipe under configs/transfer or
configs/detection) says how.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field


@dataclass(frozen=True)
class Task:
    """A kind of number. Its place in TASKS is its place in every table."""

    name: str
    title: str  # on the page and in tables
    verb: str  # of the command line
    recipe: str  # the protocol where none is named
    _: KW_ONLY
    # `kind:` of the protocols in configs/transfer that measure it
    kind: str | None = None
    percent: int | None = None  # of ImageNet's labels
    ious: tuple[str, ...] = ()  # detection: what its APs compare, the task's own first
    cheap: bool = False  # minutes, where the others take hours: what may predict them
    ranked: bool = True  # False where the numbers only describe features
    lower: bool = False  # less is better; the title says so, too
    # Its probes read one feature an image, which stands in the cache; others read maps or tokens
    pooled: bool = True
    from_scores: bool = False  # computed from what the other tasks' heads said of each image
    # Something is trained by chance: a second run gives another number (stats/training_noise.py).
    # Few labels draw theirs, and their tests count the draws already.
    trains: bool = True
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
        """The split in its rows: detectors are scored on what their datasets call val."""
        return "val" if self.detects else "test"

    def tolerance_on(self, dataset: str) -> float | None:
        return self.tolerances.get(dataset, self.tolerance)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "linear",
            "Linear probe",
            "linear",
            "lorac",
            kind="sgd",
            tolerance=1.5,
            tolerances={"imagenet": 0.5, "imagenet100": 1.0, "average": 0.7},
        ),
        Task("logreg", "Logistic regression", "linear", "logreg", kind="logreg", trains=False),
        Task(
            "knn",
            "Nearest neighbours",
            "linear",
            "knn",
            kind="knn",
            cheap=True,
            trains=False,
            tolerance=1.5,
        ),
        Task(
            "fewshot", "Few labels", "linear", "fewshot", kind="fewshot", cheap=True, trains=False
        ),
        # These two have no interval. Test images are queries and answers at once, so a bootstrap
        # over queries is too narrow: in simulations it covers 72 to 92%
        Task(
            "class_retrieval",
            "Retrieval within classes",
            "linear",
            "class_retrieval",
            kind="class_retrieval",
            cheap=True,
            ranked=False,
            trains=False,
        ),
        Task(
            "cluster",
            "Clustering",
            "linear",
            "cluster",
            kind="cluster",
            cheap=True,
            ranked=False,
            trains=False,
        ),
        Task("attentive", "Attentive probe", "linear", "attentive", kind="attentive", pooled=False),
        Task("segmentation", "Segmentation", "linear", "seg_linear", kind="seg", pooled=False),
        Task(
            "seg_knn",
            "Segmentation by neighbours",
            "linear",
            "seg_knn",
            kind="seg_knn",
            pooled=False,
            cheap=True,
            trains=False,
        ),
        Task(
            "semi_1pct",
            "1% of labels",
            "semisup",
            "semisup",
            kind="finetune",
            percent=1,
            tolerances={"imagenet": 1.5},
        ),
        Task(
            "semi_10pct",
            "10% of labels",
            "semisup",
            "semisup",
            kind="finetune",
            percent=10,
            tolerances={"imagenet": 1.0},
        ),
        Task("finetune", "Finetuning", "finetune", "finetune", kind="finetune"),
        Task(
            "faster_rcnn",
            "Faster R-CNN",
            "detect",
            "faster_rcnn_R_50_FPN_1x",
            ious=("bbox",),
            tolerance=0.5,
        ),
        Task(
            "mask_rcnn",
            "Mask R-CNN",
            "detect",
            "mask_rcnn_R_50_FPN_1x",
            ious=("segm", "bbox"),
            tolerance=0.5,
        ),
        Task(
            "keypoint_rcnn",
            "Keypoint R-CNN",
            "detect",
            "keypoint_rcnn_R_50_FPN_1x",
            ious=("keypoints", "bbox"),
            tolerance=0.5,
        ),
        # Its heads were trained by chance, though not by this verb
        Task("ood", "ImageNet's heads elsewhere", "ood", "ood", kind="ood"),
        Task(
            "calibration",
            "Calibration (less is better)",
            "calibrate",
            "kept scores",
            ranked=False,
            lower=True,
            from_scores=True,
            trains=False,
        ),
        Task(
            "analyze",
            "Feature analysis",
            "analyze",
            "analyze",
            cheap=True,
            ranked=False,
            trains=False,
        ),
    )
}
ORDER = {name: place for place, name in enumerate(TASKS)}
DETECTION = tuple(name for name, task in TASKS.items() if task.detects)


@dataclass(frozen=True, kw_only=True)
class MeasuringVerb:
    """A verb that measures tasks: the options that a grid may give it, and those that it must."""

    takes: tuple[str, ...]
    needs: tuple[str, ...]


VERBS: dict[str, MeasuringVerb] = {
    "linear": MeasuringVerb(takes=("datasets", "protocol", "pack"), needs=("datasets",)),
    "ood": MeasuringVerb(takes=("datasets", "protocol", "pack"), needs=("datasets",)),
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
