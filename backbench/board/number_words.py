"""What other places call our numbers: metrics, tasks and datasets.

A share (top1, an AP) is a proportion from 0 to 1 elsewhere, where here it is a percentage. Its name
is the one that sklearn, torchmetrics and the Hub's `evaluate` give it; a ranked metric without such a
name keeps ours behind `backbench.`. What only describes features keeps our name and our scale.
"""

import re
from dataclasses import dataclass, field

from backbench.datasets import catalog
from backbench.records.result_line import Result
from backbench.tasks import TASKS


@dataclass(frozen=True, kw_only=True)
class MetricWords:
    """A metric as other places know it."""

    id: str
    name: str
    kind: str
    share: bool = True  # a proportion, from 0 to 1
    parameters: dict[str, str | int] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        """The number by which a value of ours is divided."""
        return 100.0 if self.share else 1.0


_SHARES = {
    "top1": MetricWords(
        id="accuracy", name="Accuracy", kind="accuracy", parameters={"k": 1}
    ),
    "top5": MetricWords(
        id="top_5_accuracy",
        name="Top-5 accuracy",
        kind="accuracy",
        parameters={"k": 5},
    ),
    # The mean of the classes' recalls
    "mean_per_class": MetricWords(
        id="balanced_accuracy", name="Mean per-class accuracy", kind="accuracy"
    ),
    "miou": MetricWords(id="mean_iou", name="Mean IoU", kind="iou"),
    "macc": MetricWords(id="mean_accuracy", name="Mean accuracy", kind="accuracy"),
    "pixel_acc": MetricWords(
        id="overall_accuracy", name="Pixel accuracy", kind="accuracy"
    ),
}
_AP = re.compile(r"(bbox|segm|keypoints)_AP(50|75|s|m|l)?")
_AP_SUFFIXES = {
    None: "",
    "50": "_50",
    "75": "_75",
    "s": "_small",
    "m": "_medium",
    "l": "_large",
}
_NEIGHBOURS = re.compile(r"(.+)_k(\d+)")


def metric_words(result: Result) -> MetricWords:
    """Return the words for the metric of a number."""
    metric = result.metric
    if not TASKS[result.task].ranked:
        name = f"backbench.{result.task}.{metric}"
        return MetricWords(id=name, name=metric, kind=metric, share=False)
    neighbours: dict[str, str | int] = {}
    if match := _NEIGHBOURS.fullmatch(metric):
        metric = match[1]
        neighbours = {"neighbours": int(match[2])}
    if match := _AP.fullmatch(metric):
        return MetricWords(
            id=f"mean_average_precision{_AP_SUFFIXES[match[2]]}",
            name=f"COCO AP{match[2] or ''} ({match[1]})",
            kind="mean_average_precision",
            parameters={"iou_type": match[1]},
        )
    known = _SHARES.get(metric)
    if known is None:
        name = f"backbench.{result.task}.{metric}"
        return MetricWords(id=name, name=metric, kind=metric, parameters=neighbours)
    name = known.name
    if neighbours:
        name = f"{name} ({neighbours['neighbours']} neighbours)"
    return MetricWords(
        id=known.id,
        name=name,
        kind=known.kind,
        parameters=known.parameters | neighbours,
    )


def hub_dataset(name: str) -> str | None:
    """Return the repository of a dataset on the Hugging Face Hub, where its owner has one there."""
    known = catalog.DATASETS.get(name)
    return None if known is None else known.hub


def hub_task(result: Result) -> str:
    """Return the Hub's name for the kind of task."""
    task = TASKS[result.task]
    if task.name == "keypoint_rcnn" and result.metric.startswith("keypoints"):
        return "keypoint-detection"
    if task.name == "mask_rcnn" and result.metric.startswith("segm"):
        return "image-segmentation"
    if task.detects:
        return "object-detection"
    if (task.kind or "").startswith("seg"):
        return "image-segmentation"
    if task.name == "analyze" or task.kind in ("cluster", "class_retrieval"):
        return "image-feature-extraction"
    return "image-classification"


def model_slug(name: str, digest: str) -> str:
    """Return a name for folders and addresses: two checkpoints of one name differ by their
    digests."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80]
    return f"{plain or 'model'}-{digest[:8]}"
