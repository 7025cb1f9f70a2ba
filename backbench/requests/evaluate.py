"""`backbench evaluate`: several readings of one's own models, to the table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from backbench.requests.bounds import MOST_SIDE
from backbench.requests.options import argument, option
from backbench.requests.places import (
    Accelerator,
    JsonRequest,
    WeightsRequest,
    seed_option,
    workers_option,
)


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(WeightsRequest, JsonRequest):
    """Measure your models on your folder of images, in minutes."""

    verb: ClassVar[str] = "evaluate"
    words: tuple[str, ...] = argument(
        "MODEL|TASK",
        "checkpoint files, timm:NAME or hf:ORG/REPO; then, if you like, tasks (knn, fewshot, logreg,"
        " label_curve, layers, loaders, linear, multilabel, multilabel_svm, class_retrieval, cluster, attentive,"
        " calibration, finetune, semi_10pct, ood/imagenet-a, segmentation/voc2012; knn@RECIPE,"
        " knn/DATASET)",
    )
    data: Path = option(
        "the images as FOLDER/<class>/, or in FOLDER/{train,val,test}/<class>/, or a tar or"
        " zip file; or with boxes, as COCO's json, VOC's XML or YOLO's text; or ROOT, with"
        " TASK/DATASET",
        "FOLDER",
    )
    out: Path = option(
        "folder of runs, page and table; the same command continues", "RUNS"
    )
    size: int | None = option(
        "read every model at one size, in pixels (default: each at its own)",
        "N",
        default=None,
        least=1,
        most=MOST_SIDE,
    )
    seed: int = seed_option("of the draws and the training")
    accelerator: Accelerator = option("auto: a GPU where there is one", default="auto")
    workers: int | None = workers_option()

    @classmethod
    def more_help(cls) -> str:
        # Imported here: other verbs' words are parsed without the tasks
        from backbench import tasks

        return (
            "what readings cost (a run says its own counts and, once it is timed, minutes):\n"
            + tasks.prices("linear")
        )
