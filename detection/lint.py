"""Refuses, or warns of, mistakes that would go unnoticed until the numbers are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from backbench.detection import backbones, dialect, evaluate, process_group, voc_ap
from backbench.detection.data import images, voc
from backbench.detection.data.split import Split, training_records
from backbench.detection.dialect import AMP_PRECISION, Given
from backbench.detection.run import DetectionRun, Prepared
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput
from backbench.runs.terminal import log

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

SYNC_NORMS = ("SyncBN", "naiveSyncBN")
# Learning rate at this many images per batch
REFERENCES = {"SGD": (0.02, 16), "ADAMW": (0.0001, 16)}
AT_LEAST_1 = (
    *("SOLVER.IMS_PER_BATCH", "SOLVER.MAX_ITER", "SOLVER.CHECKPOINT_PERIOD"),
    *(
        "INPUT.MIN_SIZE_TRAIN",
        "INPUT.MAX_SIZE_TRAIN",
        "INPUT.MIN_SIZE_TEST",
        "INPUT.MAX_SIZE_TEST",
    ),
    *("MODEL.RPN.BATCH_SIZE_PER_IMAGE", "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE"),
)
# Least values, of each number where there are several
LEAST = {**dict.fromkeys(AT_LEAST_1, 1), "DATALOADER.NUM_WORKERS": 0}
THRESHOLDS = {
    "MODEL.RPN.IOU_THRESHOLDS": 2,
    "MODEL.ROI_HEADS.IOU_THRESHOLDS": 1,
}  # how many


def check(cfg: CfgNode, run: DetectionRun, train: Split, val: Split) -> None:
    """Raise BadInput for what gives a wrong number; log a warning for what departs from the
    published protocol. `cfg` is the run's with the checkpoint's pixels."""
    given, solver = run.given, cfg.SOLVER
    if val.name in voc.DATASETS and run.engine != "detectron2":
        raise BadInput(
            f"{given.path}: VOC's AP is Detectron2's; add --engine detectron2"
        )
    check_ground_truth(cfg, given, train, val, run.task)
    if solver.IMS_PER_BATCH % run.world:
        batch = f"SOLVER.IMS_PER_BATCH {solver.IMS_PER_BATCH}"
        raise BadInput(
            f"{batch} does not divide into {run.world} processes (--num-gpus)"
        )
    check_values(cfg, given)
    gpus = process_group.gpus(given)
    half = solver.AMP.ENABLED and solver.AMP.PRECISION == "fp16"
    if half and not gpus:
        raise BadInput(
            f"{AMP_PRECISION} fp16: a CPU takes a hundred times as long; bf16, or a GPU"
        )
    for departure in departures(cfg, run.task, train, val):
        log.warning(f"{given.path.name}: {departure}")


def check_values(cfg: CfgNode, given: Given) -> None:
    """Refuse numbers with which neither engine can train or test."""
    values = dialect.flat(cfg)
    for key, least in LEAST.items():
        value = values[key]
        numbers = list(value) if isinstance(value, list | tuple) else [value]
        if not numbers or min(numbers) < least:
            raise BadInput(f"{given.path}: {key} {value}: at least {least}")
    if not values["SOLVER.BASE_LR"] > 0:
        raise BadInput(
            f"{given.path}: SOLVER.BASE_LR {values['SOLVER.BASE_LR']}: above 0"
        )
    for key, count in THRESHOLDS.items():
        value = list(values[key])
        if len(value) < count or value != sorted(value):
            rising = f"{count} or more" if count == 1 else f"{count}"
            raise BadInput(
                f"{given.path}: {key} {value}: {rising} overlaps, in rising order"
            )


def files(p: Prepared) -> None:
    """Find images (cut off, of another size) and objects that would end training or scoring. It
    takes minutes for COCO on a network disk, so it runs once, before the first iteration."""
    trained = training_records(p.train, p.task)
    log.info(f"checking {len(trained)} + {len(p.val.records)} images")
    images.check_files(trained)
    images.check_files(p.val.records)
    if p.val.name in voc.DATASETS:
        voc_ap.rehearse(p.val)
        return
    for kind in p.task.aps:
        evaluate.rehearse(p.val, kind, p.cfg.TEST.KEYPOINT_OKS_SIGMAS)


def check_ground_truth(
    cfg: CfgNode, given: Given, train: Split, val: Split, task: DetectionTask
) -> None:
    """The config against the annotation files."""
    classes = cfg.MODEL.ROI_HEADS.NUM_CLASSES
    for split in (train, val):
        if len(split.categories) != classes:
            wanted = f"MODEL.ROI_HEADS.NUM_CLASSES is {classes} ({given.path})"
            raise BadInput(
                f"{split.file}: {len(split.categories)} categories, but {wanted}"
            )
    if (train.categories, train.ids) != (val.categories, val.ids):
        odd = sorted(
            set(zip(train.ids, train.categories)) ^ set(zip(val.ids, val.categories))
        )[0]
        first = f"first difference: {odd[0]} '{odd[1]}'"
        raise BadInput(
            f"{val.file}: its categories are not those of {train.file}; {first}"
        )
    shared = {r["file_name"] for r in train.records} & {
        r["file_name"] for r in val.records
    }
    if shared:
        first = Path(min(shared)).name
        raise BadInput(
            f"{val.name} and {train.name} share {len(shared)} images, first {first}"
        )
    if not task.keypoints:
        return
    # Files, head and the sigmas that score them name equally many keypoints
    wanted = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS
    for split in (train, val):
        if len(split.keypoints) != wanted:
            keys = f"MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {wanted}"
            raise BadInput(
                f"{split.file}: {len(split.keypoints)} keypoints, but {keys}"
            )
    sigmas = len(cfg.TEST.KEYPOINT_OKS_SIGMAS)
    if sigmas != len(val.keypoints):
        raise BadInput(
            f"{given.path}: {sigmas} TEST.KEYPOINT_OKS_SIGMAS for {len(val.keypoints)} keypoints"
        )


def departures(
    cfg: CfgNode, task: DetectionTask, train: Split, val: Split
) -> list[str]:
    """List in words what differs from the protocol of LORAC's Table 4 and JCL's Table 2 (the
    numbers then carry another protocol's name), and what the data lacks."""
    out = []
    m = cfg.MODEL
    # 1. Batch norm is trained over all GPUs in trunk and FPN, re-estimated at the end; heads have none
    if m.BACKBONE.FREEZE_AT:
        out.append(
            f"FREEZE_AT {m.BACKBONE.FREEZE_AT}: the protocol trains all layers (0)"
        )
    if any(m[head].get("NORM") for head in task.heads):
        out.append("norm in the heads: the protocol has it in trunk and FPN only")
    if backbones.is_resnet(cfg):
        if m.RESNETS.NORM not in SYNC_NORMS:
            out.append(
                f"RESNETS.NORM {m.RESNETS.NORM!r}: the protocol has SyncBN in the trunk"
            )
        if backbones.has_fpn(cfg) and m.FPN.NORM not in SYNC_NORMS:
            why = "without it keypoint training does not converge"
            out.append(f"FPN.NORM {m.FPN.NORM!r}: the protocol has SyncBN; {why}")
        if not cfg.TEST.PRECISE_BN.ENABLED:
            out.append(
                "TEST.PRECISE_BN off: the protocol re-estimates batch norm before testing"
            )
    # 2. The rate for the batch. C4 has other rates; the embedded scenes are no protocol's
    rate, images = REFERENCES[cfg.SOLVER.OPTIMIZER]
    lr, batch = cfg.SOLVER.BASE_LR, cfg.SOLVER.IMS_PER_BATCH
    wanted = rate * batch / images
    if (
        backbones.has_fpn(cfg)
        and not 0.5 <= lr / wanted <= 2
        and "scenes" not in train.name
    ):
        out.append(
            f"BASE_LR {lr} for {batch} images per batch; {rate} at {images} scales to {wanted:.3g}"
        )
    # 3. The data
    if not any(r["annotations"] for r in val.records):
        out.append(f"{val.name} has no ground truth at all: every AP will be undefined")
    for split in (train, val):
        out += [f"{split.file.name}: {note}" for note in split.notes]
    return out
