"""What ruins a detection run in silence, found before a day is spent on it. One line each, refused
or warned about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.errors import BadInput
from backbench.runs.terminal import log
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint
from detection import amp, dialect, evaluate, process_group, trunks
from detection.data import images, voc
from detection.data.split import Split, training_records
from detection.dialect import Given, Value
from detection.run import Prepared
from detection.task_rows import DetectionTask

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

PIXEL_TOLERANCE = 0.01  # of 255; converters round the statistics
# Learning rate at this many images per batch
REFERENCES = {"SGD": (0.02, 16), "ADAMW": (0.0001, 16)}
OPTIMIZERS = tuple(REFERENCES)
# What a trunk that is wrapped as it is does not follow -> the values that stand for nothing
IDLE_KEYS: dict[str, tuple[Value, ...]] = {
    "MODEL.BACKBONE.FREEZE_AT": (0,),
    "MODEL.RESNETS.NORM": ("SyncBN", "BN"),
    "MODEL.RESNETS.STRIDE_IN_1X1": (False,),
    "MODEL.RESNETS.OUT_FEATURES": (["res2", "res3", "res4", "res5"],),
    "MODEL.FPN.IN_FEATURES": (["res2", "res3", "res4", "res5"],),
    "SOLVER.NESTEROV": (False,),
    "SOLVER.BIAS_LR_FACTOR": (1.0,),
    "SOLVER.WEIGHT_DECAY_BIAS": (None,),
}
NORMS = ("SyncBN", "naiveSyncBN")


def check(
    cfg: CfgNode, given: Given, train: Split, val: Split, *, task: DetectionTask, world: int
) -> None:
    """Raise BadInput for what gives a wrong number; log a warning for what departs from the
    published protocol."""
    ground_truth(cfg, given, train, val, task)
    batch, lr = cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.BASE_LR
    if batch % world:
        raise BadInput(
            f"SOLVER.IMS_PER_BATCH {batch} does not divide into {world} processes (--num-gpus)"
        )
    if min(batch, cfg.SOLVER.MAX_ITER) < 1 or lr <= 0:
        raise BadInput(f"{given.path}: SOLVER.IMS_PER_BATCH, MAX_ITER and BASE_LR must be positive")
    if (
        cfg.SOLVER.AMP.ENABLED
        and cfg.SOLVER.AMP.PRECISION == "fp16"
        and not process_group.gpus(given)
    ):
        raise BadInput(
            f"{amp.PRECISION} fp16: a CPU takes a hundred times as long with it; bf16, or a GPU"
        )
    for line in (*norm_departures(cfg, task), *other_departures(cfg, train, val)):
        log.warning(f"{given.path.name}: {line}")


def files(p: Prepared) -> None:
    """What a training would stumble over in its middle, or its scoring after it: images that are
    cut off or of another size, objects that COCO's evaluation cannot take. Minutes for COCO on a
    network disk, so once, before a run's first iteration."""
    trained = training_records(p.train, p.task)
    log.info(f"checking {len(trained)} + {len(p.val.records)} images")
    images.check_files(trained)
    images.check_files(p.val.records)
    if p.val.name in voc.VOC:
        from detection.engine_detectron2 import voc_rehearse

        voc_rehearse(p.val)
        return
    for kind in p.task.aps:
        evaluate.rehearse(p.val, kind, p.cfg.TEST.KEYPOINT_OKS_SIGMAS)


def weights(cfg: CfgNode, given: Given, checkpoint: Checkpoint) -> None:
    """The config against the checkpoint: channels, statistics, stride, depth, stem."""
    pixels, name = checkpoint.pixels, checkpoint.name
    if trunks.wraps(cfg):
        _wrapped(cfg, given, checkpoint)
    else:
        _resnet(cfg, given, checkpoint)
    order = given.get("INPUT.FORMAT", pixels.order)
    if order != pixels.order:
        raise BadInput(
            f"{given.path}: INPUT.FORMAT is {order} but {name} was trained on {pixels.order} images"
        )
    for key, own in (("MODEL.PIXEL_MEAN", pixels.mean), ("MODEL.PIXEL_STD", pixels.std)):
        stated = given.get(key)
        wanted = [round(255 * v, 3) for v in own]
        if stated is not None and not _near(stated, wanted):
            raise BadInput(
                f"{given.path}: {key} is {list(stated)} but {name} was trained with {wanted}; "
                "leave the key out"
            )


def _wrapped(cfg: CfgNode, given: Given, checkpoint: Checkpoint) -> None:
    """A trunk of any kind, as it is: what it must be, and the keys that it does not follow."""
    trunks.refuse(checkpoint.backbone(), cfg.MODEL.BACKBONE.NAME)
    stated = cfg.MODEL.TRUNK.ARCH
    if stated and archs.canonical(stated, archs.NATIVE)[0] != checkpoint.arch:
        raise BadInput(
            f"{given.path}: MODEL.TRUNK.ARCH is {stated} but {checkpoint.name} is {checkpoint.arch}; "
            f"it is for MODEL.WEIGHTS random, leave it out"
        )
    for key, allowed in IDLE_KEYS.items():
        if key in given.values and _plain(given.values[key]) not in allowed:
            raise BadInput(
                f"{given.path}: {key} {given.values[key]!r} would decide nothing for "
                f"{checkpoint.arch}; it must be {' or '.join(map(repr, allowed))}"
            )
    solver, trunk = cfg.SOLVER, cfg.MODEL.TRUNK
    if solver.OPTIMIZER not in OPTIMIZERS:
        raise BadInput(
            f"{given.path}: SOLVER.OPTIMIZER {solver.OPTIMIZER}: {' or '.join(OPTIMIZERS)}"
        )
    if not 0 < solver.LAYER_DECAY <= 1 or not 0 <= trunk.DROP_PATH < 1:
        raise BadInput(
            f"{given.path}: SOLVER.LAYER_DECAY must be above 0 and at most 1, "
            "MODEL.TRUNK.DROP_PATH from 0 to below 1"
        )
    if cfg.MODEL.BACKBONE.NAME == trunks.SIMPLE and not cfg.MODEL.FPN.NORM:
        raise BadInput(f"{given.path}: MODEL.FPN.NORM '': the simple feature pyramid needs one, LN")


def _resnet(cfg: CfgNode, given: Given, checkpoint: Checkpoint) -> None:
    """One of our ResNets, as each engine builds it by itself."""
    name = checkpoint.name
    for key, value in dialect.OURS.items():
        if given.get(key, value) != value:
            raise BadInput(
                f"{given.path}: {key} {given.get(key)!r} would decide nothing with MODEL.BACKBONE.NAME "
                f"{cfg.MODEL.BACKBONE.NAME}; {trunks.FPN} takes ResNets, too"
            )
    if not archs.is_resnet(checkpoint.arch):
        raise BadInput(
            f"{name} is {checkpoint.arch}, and {given.path} is for ResNets; use a config with "
            f"MODEL.BACKBONE.NAME {trunks.FPN} (hierarchical) or {trunks.SIMPLE} (plain)"
        )
    if checkpoint.stem != "imagenet":
        raise BadInput(
            f"{name} has the {checkpoint.stem} stem; "
            "detection needs the imagenet stem (stride 2, max-pool)"
        )
    depth = int(checkpoint.arch.removeprefix("resnet"))
    if depth != cfg.MODEL.RESNETS.DEPTH:
        raise BadInput(
            f"{given.path}: MODEL.RESNETS.DEPTH is {cfg.MODEL.RESNETS.DEPTH} "
            f"but {name} is a {checkpoint.arch}"
        )
    # MSRA's ResNet-50, which Detectron2's own configs start from, strides in the first 1x1
    # convolution of a stage; torchvision's, and with it every checkpoint here, in the 3x3. Both
    # have the same names and shapes.
    if cfg.MODEL.RESNETS.STRIDE_IN_1X1:
        raise BadInput(
            f"{given.path}: MODEL.RESNETS.STRIDE_IN_1X1 is True, as MSRA's weights want it; "
            f"{name} strides in the 3x3 convolution: it would load without a word and compute "
            "other features; set it to False"
        )


def _plain(value: Value) -> Value:
    return list(value) if isinstance(value, tuple) else value


def _near(stated: Sequence[float], wanted: Sequence[float]) -> bool:
    if len(stated) != len(wanted):
        return False
    return all(abs(a - b) <= PIXEL_TOLERANCE for a, b in zip(stated, wanted))


def ground_truth(cfg: CfgNode, given: Given, train: Split, val: Split, task: DetectionTask) -> None:
    """The config against the annotation files."""
    classes = cfg.MODEL.ROI_HEADS.NUM_CLASSES
    for split in (train, val):
        if len(split.categories) != classes:
            raise BadInput(
                f"{split.file}: {len(split.categories)} categories, "
                f"but MODEL.ROI_HEADS.NUM_CLASSES is {classes} ({given.path})"
            )
    if (train.categories, train.ids) != (val.categories, val.ids):
        odd = sorted(set(zip(train.ids, train.categories)) ^ set(zip(val.ids, val.categories)))[0]
        raise BadInput(
            f"{val.file}: its categories are not those of {train.file}; "
            f"first difference: {odd[0]} '{odd[1]}'"
        )
    shared = {r["file_name"] for r in train.records} & {r["file_name"] for r in val.records}
    if shared:
        raise BadInput(
            f"{val.name} and {train.name} share {len(shared)} images, "
            f"{Path(min(shared)).name} the first"
        )
    if task.keypoints:
        _keypoint_counts(cfg, given, train, val)


def _keypoint_counts(cfg: CfgNode, given: Given, train: Split, val: Split) -> None:
    """Files, head and the sigmas that score them name equally many."""
    wanted = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS
    for split in (train, val):
        if len(split.keypoints) != wanted:
            raise BadInput(
                f"{split.file}: {len(split.keypoints)} keypoints, "
                f"but MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {wanted}"
            )
    sigmas = len(cfg.TEST.KEYPOINT_OKS_SIGMAS)
    if sigmas != len(val.keypoints):
        raise BadInput(
            f"{given.path}: {sigmas} TEST.KEYPOINT_OKS_SIGMAS for {len(val.keypoints)} keypoints"
        )


# What differs from the protocol of LORAC's Table 4 and JCL's Table 2 is said in words; the numbers
# then carry another protocol's name.


def norm_departures(cfg: CfgNode, task: DetectionTask) -> list[str]:
    """Batch norm trained over all GPUs in trunk and FPN, re-estimated at the end, and none in the
    heads."""
    out = []
    m = cfg.MODEL
    if m.BACKBONE.FREEZE_AT:
        out.append(f"FREEZE_AT {m.BACKBONE.FREEZE_AT}: the protocol trains all layers (0)")
    if any(m[head].get("NORM") for head in task.heads):
        out.append(
            "norm in the heads: the protocol has it in trunk and FPN only, heads are standard"
        )
    if trunks.wraps(cfg):
        return out
    if m.RESNETS.NORM not in NORMS:
        out.append(f"RESNETS.NORM {m.RESNETS.NORM!r}: the protocol has SyncBN in the trunk")
    if _has_fpn(cfg) and m.FPN.NORM not in NORMS:
        out.append(
            f"FPN.NORM {m.FPN.NORM!r}: the protocol has SyncBN; "
            "without it keypoint training does not converge"
        )
    if not cfg.TEST.PRECISE_BN.ENABLED:
        out.append(
            "TEST.PRECISE_BN off: the protocol re-estimates batch norm statistics before testing"
        )
    return out


def other_departures(cfg: CfgNode, train: Split, val: Split) -> list[str]:
    """The rate for the batch, and what the data lacks."""
    out = []
    rate, images = REFERENCES[cfg.SOLVER.OPTIMIZER]
    lr, batch = cfg.SOLVER.BASE_LR, cfg.SOLVER.IMS_PER_BATCH
    wanted = rate * batch / images
    # C4 has other rates; the embedded scenes are no protocol's.
    if _has_fpn(cfg) and not 0.5 <= lr / wanted <= 2 and "scenes" not in train.name:
        out.append(
            f"BASE_LR {lr} for {batch} images per batch; {rate} at {images} scales to {wanted:.3g}"
        )
    if not any(r["annotations"] for r in val.records):
        out.append(f"{val.name} has no ground truth at all: every AP will be undefined")
    for split in (train, val):
        out += [f"{split.file.name}: {note}" for note in split.notes]
    return out


def _has_fpn(cfg: CfgNode) -> bool:
    return "fpn" in cfg.MODEL.BACKBONE.NAME
