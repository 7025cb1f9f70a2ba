"""Refuses, or warns of, mistakes that would go unnoticed until the numbers are wrong."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.containers.spans import plain_name
from backbench.detection import backbones, dialect, evaluate, process_group, voc_ap
from backbench.detection.data import images, own, sides, voc
from backbench.detection.data.dataset_dicts import ImageRecord
from backbench.detection.data.images import LookedAt
from backbench.detection.data.split import (
    Split,
    refuse_unlike_keypoints,
    training_records,
)
from backbench.detection.dialect import AMP_PRECISION, Given
from backbench.detection.run import DetectionRun, Prepared
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput
from backbench.requests.bounds import (
    MOST,
    MOST_BATCH,
    MOST_DETECTION_SIDE,
    MOST_EPOCHS,
    MOST_SEED,
    MOST_WORKERS,
)
from backbench.runs.terminal import log

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

SYNC_NORMS = ("SyncBN", "naiveSyncBN")
# Optimiser -> the published learning rate, and its number of images per batch
REFERENCES = {"SGD": (0.02, 16), "ADAMW": (0.0001, 16)}
# Key -> its least and its largest value, which hold for each number where there are several
BOUNDS = {
    "SOLVER.IMS_PER_BATCH": (1, MOST_BATCH),
    "SOLVER.EPOCHS": (0, MOST_EPOCHS),  # 0: MAX_ITER counts
    "SOLVER.MAX_ITER": (1, MOST),
    "SOLVER.CHECKPOINT_PERIOD": (1, MOST),
    "INPUT.MIN_SIZE_TRAIN": (1, MOST_DETECTION_SIDE),
    "INPUT.MAX_SIZE_TRAIN": (1, MOST),
    "INPUT.MIN_SIZE_TEST": (1, MOST_DETECTION_SIDE),
    "INPUT.MAX_SIZE_TEST": (1, MOST),
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE": (1, MOST_BATCH),
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": (1, MOST_BATCH),
    "DATALOADER.NUM_WORKERS": (0, MOST_WORKERS),
    "SEED": (-1, MOST_SEED),  # -1 is Detectron2's word for none
}
# From this share on, val images in the training set decide what is measured.
SHARED = 0.01
# Training images a class, in the median, below which an AP is worth a warning. Few-shot detection, a
# task of its own, begins there: its usual settings have 1 to 10 objects a class
FEW_IMAGES = 10
# Key -> the least number of thresholds
THRESHOLDS = {"MODEL.RPN.IOU_THRESHOLDS": 2, "MODEL.ROI_HEADS.IOU_THRESHOLDS": 1}


def check(cfg: CfgNode, run: DetectionRun, train: Split, val: Split) -> None:
    """Raise BadInput for what gives a wrong number; log a warning for what departs from the
    published protocol. `cfg` is the run's, with the checkpoint's pixels filled in."""
    given = run.given
    solver = cfg.SOLVER
    if val.name in voc.DATASETS and run.engine != "detectron2":
        raise BadInput(
            f"{given.path}: VOC's AP is Detectron2's; add --engine detectron2"
        )
    check_ground_truth(cfg, given, train, val, run.task)
    if run.dataset is not None:
        for split in (train, val):
            for note in evaluate.health(split):
                log.warning(f"{split.name.removeprefix('own_')}: {note}")
    if not run.eval_only:
        check_training(cfg, train, run.task)
    if solver.IMS_PER_BATCH % run.world:
        raise BadInput(
            f"SOLVER.IMS_PER_BATCH {solver.IMS_PER_BATCH} does not divide into "
            f"{run.world} processes (--num-gpus times --num-machines)"
        )
    check_values(cfg, given)
    gpus = process_group.gpus(given)
    if solver.AMP.ENABLED and solver.AMP.PRECISION == "fp16" and gpus == 0:
        raise BadInput(
            f"{AMP_PRECISION} fp16: a CPU takes a hundred times as long; bf16, or a GPU"
        )
    if run.task.keypoints and cfg.INPUT.RANDOM_FLIP == "horizontal":
        log.info(f"{train.file.name}: {sides.said(train.keypoints, train.flip)}")
    for departure in departures(cfg, run.task, train, val):
        log.warning(f"{given.path.name}: {departure}")


def check_training(cfg: CfgNode, train: Split, task: DetectionTask) -> None:
    """Raise BadInput for what can be scored, but would train wrongly."""
    if task.keypoints and cfg.INPUT.RANDOM_FLIP == "horizontal":
        check_partners(train)
    if not task.outlines:
        return
    formats = ("polygon", "bitmask")
    if cfg.INPUT.MASK_FORMAT not in formats:
        raise BadInput(
            f"{dialect.MASK_FORMAT} {cfg.INPUT.MASK_FORMAT}: {' or '.join(formats)}"
        )
    if cfg.INPUT.MASK_FORMAT == "bitmask":
        return
    count = 0
    first = ""
    for record in train.records:
        for annotation in record["annotations"]:
            if isinstance(annotation.get("segmentation"), dict):
                count += 1
                first = first or Path(record["file_name"]).name
    if count:
        raise BadInput(
            f"{train.file}: {count} objects have run-length masks (first in {first}), but polygons "
            f"are trained on; add {dialect.MASK_FORMAT} bitmask"
        )


def check_partners(train: Split) -> None:
    """Raise BadInput where a mirrored image would have keypoints of the wrong side."""
    if train.partners is not None:
        wrong = sides.contradicted(train.keypoints, train.partners)
        if wrong is not None:
            raise BadInput(
                f"{train.file}: flip_idx does not exchange '{wrong[0]}' and '{wrong[1]}', which are "
                "two sides by their names; correct flip_idx or kpt_names, or add "
                "INPUT.RANDOM_FLIP none"
            )
        return
    if train.partners_unknown:
        raise BadInput(
            f"{train.file}: neither flip_idx nor kpt_names in data.yaml tells which keypoints change "
            f"places in mirrored images; write `flip_idx: {list(range(len(train.keypoints)))}` if "
            "none do, or add INPUT.RANDOM_FLIP none"
        )
    alone = sides.unpaired(train.keypoints)
    if alone:
        raise BadInput(
            f"{train.file}: keypoint '{alone[0]}' has no partner of the other side (no "
            f"'{sides.opposite(alone[0])}') to become in mirrored images; name it so, or add "
            "INPUT.RANDOM_FLIP none"
        )


def check_values(cfg: CfgNode, given: Given) -> None:
    """Refuse numbers with which neither engine can train or test."""
    values = dialect.flat(cfg)
    for key, (least, most) in BOUNDS.items():
        value = values[key]
        numbers = list(value) if isinstance(value, list | tuple) else [value]
        if not numbers or min(numbers) < least:
            raise BadInput(f"{given.path}: {key} {value}: at least {least}")
        if max(numbers) > most:
            raise BadInput(f"{given.path}: {key} {value}: at most {most}")
    if not values["SOLVER.BASE_LR"] > 0:
        raise BadInput(
            f"{given.path}: SOLVER.BASE_LR {values['SOLVER.BASE_LR']}: above 0"
        )
    sizes = values["INPUT.MIN_SIZE_TRAIN"]
    by_range = values["INPUT.MIN_SIZE_TRAIN_SAMPLING"] == "range"
    if by_range and (len(sizes) != 2 or sizes[0] > sizes[1]):
        raise BadInput(
            f"{given.path}: INPUT.MIN_SIZE_TRAIN_SAMPLING range draws between two sizes, the smaller"
            f" first, and INPUT.MIN_SIZE_TRAIN is {sizes}; give both, as (640,800)"
        )
    for key, count in THRESHOLDS.items():
        value = list(values[key])
        if len(value) < count or value != sorted(value):
            wanted = "1 or more" if count == 1 else str(count)
            raise BadInput(
                f"{given.path}: {key} {value}: {wanted} overlaps, in rising order"
            )


def few_images(dataset: str, train: Split, val: Split, task: DetectionTask) -> str:
    """Say that the classes have few images to learn from; empty where they have enough.

    A class without an object in either list has no AP, so it does not count."""
    images_of: Counter[int] = Counter()
    for record in training_records(train, task):
        objects = [each for each in record["annotations"] if not each["iscrowd"]]
        images_of.update({each["category_id"] for each in objects})
    there = {
        each["category_id"]
        for record in (*train.records, *val.records)
        for each in record["annotations"]
    }
    median = statistics.median(images_of[label] for label in there)
    if median >= FEW_IMAGES:
        return ""
    return (
        f"{dataset}: training images a class: {median:g} in the median of {len(there)};"
        f" fewer than {FEW_IMAGES} tell little of a trunk: label more images, or leave"
        " rare classes out"
    )


def files(p: Prepared) -> None:
    """Raise BadInput for images and objects that would end training or scoring, such as an image
    that is cut off or has another size than stated.

    This takes minutes for COCO on a network disk, so it is done once, before the first iteration.
    """
    trained = training_records(p.train, p.task)
    log.info(f"checking {len(trained)} + {len(p.val.records)} images")
    looked_train = images.check_files(trained)
    looked_val = images.check_files(p.val.records)
    sizes = p.cfg.INPUT
    refuse_slivers(trained, min(sizes.MIN_SIZE_TRAIN), sizes.MAX_SIZE_TRAIN)
    refuse_slivers(p.val.records, sizes.MIN_SIZE_TEST, sizes.MAX_SIZE_TEST)
    for split, looked in ((p.train, looked_train), (p.val, looked_val)):
        turned = sum(image.turned for image in looked)
        if turned:
            log.warning(
                f"{split.folder}: {turned} of {len(looked)} images have an EXIF orientation; they are "
                "read as shown, so their boxes must be those of the image as shown"
            )
    check_shared_images(trained, looked_train, p.val, looked_val)
    if p.val.name in voc.DATASETS:
        voc_ap.rehearse(p.val)
        return
    for kind in p.task.aps:
        evaluate.rehearse(p.val, kind, p.cfg.TEST.KEYPOINT_OKS_SIGMAS)


def refuse_slivers(records: Sequence[ImageRecord], size: int, limit: int) -> None:
    """Raise BadInput for an image of which nothing is left where its longer side is `limit`."""
    for record in records:
        height, width = record["height"], record["width"]
        if min(images.shortest_edge(height, width, size, limit)) < 1:
            raise BadInput(
                f"{plain_name(record['file_name'])}: {width} x {height} pixels, of which no pixel of"
                f" the shorter side is left at {limit} of the longer; cut it, or take it out"
            )


def check_folder(base: Path, task: DetectionTask) -> tuple[Split, Split]:
    """Return the lists of a folder of boxes of one's own, to train on and to score.

    BadInput for one that `detect` would refuse."""
    train, val = own.read(base, task)
    trained = training_records(train, task)
    looked_train = images.check_files(trained)
    looked_val = images.check_files(val.records)
    check_shared_images(trained, looked_train, val, looked_val)
    return train, val


def check_shared_images(
    trained: Sequence[ImageRecord],
    looked_train: Sequence[LookedAt],
    val: Split,
    looked_val: Sequence[LookedAt],
) -> None:
    """Refuse val images that are trained on, as copies, in whatever folder and under whatever name.

    A few are only said: large public sets have some.
    """
    by_look: dict[LookedAt, list[ImageRecord]] = {}
    for record, look in zip(trained, looked_train, strict=True):
        by_look.setdefault(look, []).append(record)
    pairs = []
    for record, look in zip(val.records, looked_val, strict=True):
        for other in by_look.get(look, []):
            if images.same_bytes(record, other):
                pairs.append((record, other))
                break
    if not pairs:
        return
    scored, taught = (plain_name(record["file_name"]) for record in pairs[0])
    said = (
        f"{len(pairs)} of {len(val.records)} val images are trained on; first {scored}, the same as "
        f"{taught}"
    )
    if len(pairs) > SHARED * len(val.records):
        raise BadInput(f"{said}; take them out of one of the two")
    log.warning(said)


def check_ground_truth(
    cfg: CfgNode, given: Given, train: Split, val: Split, task: DetectionTask
) -> None:
    """Raise BadInput if the annotation files do not fit the config, or each other."""
    # 1. As many categories as the head has classes, the same in both files
    classes = cfg.MODEL.ROI_HEADS.NUM_CLASSES
    for split in (train, val):
        if len(split.categories) != classes:
            raise BadInput(
                f"{split.file}: {len(split.categories)} categories, but "
                f"MODEL.ROI_HEADS.NUM_CLASSES is {classes} ({given.path})"
            )
    if (train.categories, train.ids) != (val.categories, val.ids):
        trained = set(zip(train.ids, train.categories))
        scored = set(zip(val.ids, val.categories))
        id, name = min(trained ^ scored)
        raise BadInput(
            f"{val.file}: its categories are not those of {train.file}; "
            f"first difference: {id} '{name}'"
        )
    # 2. No image in both
    train_names = {record["file_name"] for record in train.records}
    val_names = {record["file_name"] for record in val.records}
    shared = train_names & val_names
    if shared:
        raise BadInput(
            f"{val.name} and {train.name} share {len(shared)} images, "
            f"first {Path(min(shared)).name}"
        )
    if not task.keypoints:
        return
    # 3. As many keypoints in both files as the head has, and as there are sigmas to score them by
    wanted = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS
    for split in (train, val):
        if len(split.keypoints) != wanted:
            raise BadInput(
                f"{split.file}: {len(split.keypoints)} keypoints, but "
                f"MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {wanted}"
            )
    refuse_unlike_keypoints(train, val)
    sigmas = len(cfg.TEST.KEYPOINT_OKS_SIGMAS)
    if sigmas != len(val.keypoints):
        raise BadInput(
            f"{given.path}: {sigmas} TEST.KEYPOINT_OKS_SIGMAS for {len(val.keypoints)} keypoints"
        )


def untaught(train: Split, val: Split) -> list[str]:
    """Say which classes are scored and have nothing to learn from, in a line or none."""
    taught = {a["category_id"] for r in train.records for a in r["annotations"]}
    asked = {a["category_id"] for r in val.records for a in r["annotations"]}
    names = [val.categories[label] for label in sorted(asked - taught)]
    if not names:
        return []
    learnt, scored = train.name.removeprefix("own_"), val.name.removeprefix("own_")
    return [
        f"{learnt} has no object of {', '.join(names[:5])}, of which {scored} has some: their AP will"
        " be 0"
    ]


def departures(
    cfg: CfgNode, task: DetectionTask, train: Split, val: Split
) -> list[str]:
    """List, in words, what differs from the protocol of LORAC's Table 4 and JCL's Table 2, and what
    the data lacks. Numbers of another protocol carry another name."""
    out = []
    model = cfg.MODEL
    # 1. In the protocol, batch norm is trained over all GPUs in trunk and FPN, and re-estimated at
    #    the end. Heads have none.
    if model.BACKBONE.FREEZE_AT:
        out.append(
            f"FREEZE_AT {model.BACKBONE.FREEZE_AT}: the protocol trains all layers (0)"
        )
    if any(model[head].get("NORM") for head in task.heads):
        out.append("norm in the heads: the protocol has it in trunk and FPN only")
    if backbones.is_resnet(cfg):
        if model.RESNETS.NORM not in SYNC_NORMS:
            out.append(
                f"RESNETS.NORM {model.RESNETS.NORM!r}: the protocol has SyncBN in the trunk"
            )
        if backbones.has_fpn(cfg) and model.FPN.NORM not in SYNC_NORMS:
            out.append(
                f"FPN.NORM {model.FPN.NORM!r}: the protocol has SyncBN; "
                "without it keypoint training does not converge"
            )
        if not cfg.TEST.PRECISE_BN.ENABLED:
            out.append(
                "TEST.PRECISE_BN off: the protocol re-estimates batch norm before testing"
            )
    # 2. The learning rate follows the batch. C4 has other rates, and the embedded scenes are no
    #    published protocol's data.
    rate, images = REFERENCES[cfg.SOLVER.OPTIMIZER]
    lr = cfg.SOLVER.BASE_LR
    batch = cfg.SOLVER.IMS_PER_BATCH
    wanted = rate * batch / images
    is_published = "scenes" not in train.name and not train.lists_digest
    has_published_rate = backbones.has_fpn(cfg) and is_published
    if has_published_rate and not 0.5 <= lr / wanted <= 2:
        out.append(
            f"BASE_LR {lr} for {batch} images per batch; {rate} at {images} scales to {wanted:.3g}"
        )
    # 3. The data
    out += untaught(train, val)
    if not any(r["annotations"] for r in val.records):
        out.append(f"{val.name} has no ground truth at all: every AP will be undefined")
    for split in (train, val):
        out += [f"{split.file.name}: {note}" for note in split.notes]
    return out
