"""Seconds of a training iteration of Faster, Mask and Keypoint R-CNN at 800 pixels: both engines of
the suite beside plain Detectron2 and torchvision. A part of gpu.py.

The images are the embedded scenes, enlarged to the recipes' sizes; each engine decodes and resizes
its own, as it does in training, so its loader workers take part. Plain torchvision is given
tensors.
"""

from __future__ import annotations

import gc
import importlib.util
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import detectors
import torch
from machine import Clock
from torch import nn

from backbench.datasets import embedded

TASKS = ("faster", "mask", "keypoint")
IMAGES = 4  # of an iteration
AMP = ("SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "bf16")


def words_of(task: str, *, small: bool) -> tuple[str, tuple[str, ...]]:
    """The recipe, and what changes in it: the data that are at hand, random weights."""
    points = "keypoints_" * (task == "keypoint")
    data = ("DATASETS.TRAIN", f"('{points}scenes_train_2',)", "MODEL.WEIGHTS", "random")
    data = (*data, "DATASETS.TEST", f"('{points}scenes_val_2',)")
    if small:
        return f"tiny_{task}_rcnn_R_18_FPN", data
    classes = "1" if points else "10"
    data = (*data, "SOLVER.IMS_PER_BATCH", str(IMAGES), "MODEL.ROI_HEADS.NUM_CLASSES", classes)
    if points:
        sigmas = "[0.107, 0.107, 0.107, 0.107, 0.107]"
        points_of = ("MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS", "5")
        data = (*data, *points_of, "TEST.KEYPOINT_OKS_SIGMAS", sigmas)
    return f"{task}_rcnn_R_50_FPN_1x", data


def plain_torchvision(task: str, device: str, *, bf16: bool, small: bool) -> Callable[[], object]:
    """torchvision's own detector on images of one size that are there already."""
    from torchvision.models import detection as theirs

    make = {
        "faster": theirs.fasterrcnn_resnet50_fpn,
        "mask": theirs.maskrcnn_resnet50_fpn,
        "keypoint": theirs.keypointrcnn_resnet50_fpn,
    }[task]
    side = 64 if small else 800
    count = 1 if small else IMAGES
    batch_norm = nn.BatchNorm2d  # trained, as in the papers' recipes
    model = make(
        weights=None,
        weights_backbone=None,
        num_classes=2 if task == "keypoint" else 11,
        trainable_backbone_layers=5,
        norm_layer=batch_norm,
        min_size=side,
        max_size=side,
        box_batch_size_per_image=16 if small else 512,
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=detectors.RATE, momentum=0.9)
    images = [torch.rand(3, side, side, device=device) for _ in range(count)]
    box = torch.tensor([[0.1, 0.1, 0.6, 0.6], [0.4, 0.3, 0.9, 0.8]], device=device) * side
    target = {"boxes": box, "labels": torch.ones(2, dtype=torch.int64, device=device)}
    if task == "mask":
        target["masks"] = torch.ones(2, side, side, dtype=torch.uint8, device=device)
    if task == "keypoint":
        middle = (box[:, None, :2] + box[:, None, 2:]) / 2
        seen = torch.ones(2, 17, 1, device=device)
        target["keypoints"] = torch.cat([middle.expand(2, 17, 2), seen], 2)

    def iteration() -> None:
        model.train()
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            losses = model(images, [dict(target) for _ in images])
        torch.stack([loss.float() for loss in losses.values()]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return iteration


def table(clock: Clock, *, small: bool) -> None:
    warnings.simplefilter("ignore")
    there = importlib.util.find_spec("detectron2") is not None
    engines = ("torchvision", "detectron2") if there else ("torchvision",)
    print(f"\ndetection, iterations of {IMAGES} images: seconds")
    if not there:
        print("  Detectron2 is not installed: `make detectron2`")
    with tempfile.TemporaryDirectory() as folder:
        root = embedded.build(Path(folder), size="tiny")
        for task in TASKS:
            for bf16 in (False, True):
                timed, kept = {}, None
                for engine in engines:
                    name, words = words_of(task, small=small)
                    words += AMP if bf16 else ()
                    kept = detectors.built(
                        root, engine, name=name, words=words, device=clock.device
                    )
                    timed[f"backbench, {engine}"], _ = detectors.ours(*kept)
                if not (small and bf16):
                    plain = plain_torchvision(task, clock.device, bf16=bf16, small=small)
                    timed["plain torchvision"] = plain
                # Its recipe has masks; its trainer computes in float32
                if there and kept is not None and task == "mask" and not bf16:
                    timed["plain Detectron2"], _ = detectors.plain_detectron2(*kept)
                found = clock.least(timed)
                for name, each in found.items():
                    way = "bf16" if bf16 else "fp32"
                    print(f"  {task:10}{way:6}{name:26}{each:9.4f}", flush=True)
                del timed, kept
                gc.collect()
