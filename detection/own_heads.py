"""Fits a detector's heads to boxes of one's own: as many classes and keypoints as these have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.detection import backbones
from backbench.detection.data import own
from backbench.detection.data.split import Split
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput
from backbench.requests.detect import OWN_CONFIG, OWN_PLAIN_CONFIG, DetectRequest
from backbench.runs.terminal import log
from backbench.weights import importing

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

# Keys that the dataset decides
DECIDED = (
    "DATASETS.TRAIN",
    "DATASETS.TEST",
    "MODEL.ROI_HEADS.NUM_CLASSES",
    "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS",
)
SIGMAS = "TEST.KEYPOINT_OKS_SIGMAS"
# COCO's keypoints with their sigmas (cocodataset.org, keypoints evaluation)
COCO_SIGMAS = {
    "nose": 0.026,
    "left_eye": 0.025,
    "right_eye": 0.025,
    "left_ear": 0.035,
    "right_ear": 0.035,
    "left_shoulder": 0.079,
    "right_shoulder": 0.079,
    "left_elbow": 0.072,
    "right_elbow": 0.072,
    "left_wrist": 0.062,
    "right_wrist": 0.062,
    "left_hip": 0.107,
    "right_hip": 0.107,
    "left_knee": 0.087,
    "right_knee": 0.087,
    "left_ankle": 0.089,
    "right_ankle": 0.089,
}
# Of a keypoint that is none of COCO's: COCO's widest
OTHER_SIGMA = max(COCO_SIGMAS.values())


def refuse_keys(request: DetectRequest, opts: Sequence[str]) -> None:
    """Raise BadInput for an override of what the dataset decides."""
    if request.dataset is None:
        return
    for key in DECIDED:
        if key in opts:
            raise BadInput(
                f"{key} comes from --dataset {request.dataset}; leave it out"
            )


def config_for(request: DetectRequest) -> str:
    """Return the config for boxes of one's own that suits a checkpoint's trunk."""
    if request.dataset is None:
        raise BadInput(
            "no config: give --config-file NAME, or --dataset NAME for boxes of your own"
        )
    if request.checkpoint is None:
        return OWN_CONFIG
    trunk = importing.read(Path(request.checkpoint)).blank()
    return OWN_PLAIN_CONFIG if backbones.is_plain(trunk) else OWN_CONFIG


def fit(cfg: CfgNode, task: DetectionTask, train: Split, val: Split) -> None:
    """Give the heads the dataset's classes and keypoints, and say by which sigmas these are scored."""
    cfg.DATASETS.TRAIN = (train.name,)
    cfg.DATASETS.TEST = (val.name,)
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = len(val.categories)
    log.info(
        f"{val.dataset}: {len(val.categories)} classes ({', '.join(val.categories[:10])});"
        f" {len(train.records)} images to train on, {len(val.records)} of '{val.part}' to score"
    )
    if not task.keypoints:
        return
    cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS = len(val.keypoints)
    if not cfg.TEST.KEYPOINT_OKS_SIGMAS:
        cfg.TEST.KEYPOINT_OKS_SIGMAS = [
            COCO_SIGMAS.get(name, OTHER_SIGMA) for name in val.keypoints
        ]
    pairs = zip(val.keypoints, cfg.TEST.KEYPOINT_OKS_SIGMAS)
    said = ", ".join(f"{name} {sigma:g}" for name, sigma in pairs)
    marked, places = own.count_marked(train, val)
    log.info(
        f"{val.dataset}: {marked} of {places} keypoints are marked; their sigmas: {said} ({SIGMAS}"
        " changes them)"
    )
