"""Detectron2's engine over two ranks, all configs in one pair of processes: starting one costs more
than three iterations."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backbench.errors import Preempted
from backbench.runs.state import StopFlag
from detection import process_group, train_net
from detection.run import DetectionRun
from support.detection_runs import asked, built

CONFIGS = (
    "tiny_faster_rcnn_R_18_FPN",
    "tiny_mask_rcnn_R_18_FPN",
    "tiny_keypoint_rcnn_R_18_FPN",
    "tiny_faster_rcnn_R_50_C4",
    "tiny_faster_rcnn_ConvNeXt_FPN",
    "tiny_faster_rcnn_ViT_SFP",
)
# Of configs for trunks of any kind
OTHER_TRUNKS = {
    "tiny_faster_rcnn_ConvNeXt_FPN": "timm:test_convnext",
    "tiny_faster_rcnn_ViT_SFP": "timm:vit_tiny_patch16_224,depth=2,embed_dim=32,img_size=56,"
    "num_heads=2,patch_size=14,pos=aa",
}
# Every anchor and every proposal is taken, so that nothing is drawn; small, as are the images
EVERY = (
    *("MODEL.RPN.BATCH_SIZE_PER_IMAGE", "20000", "MODEL.RPN.POSITIVE_FRACTION", "1.0"),
    *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "200", "MODEL.ROI_HEADS.POSITIVE_FRACTION", "1.0"),
    *("MODEL.RPN.POST_NMS_TOPK_TRAIN", "8", "INPUT.MIN_SIZE_TRAIN", "(64,)"),
    *("INPUT.MIN_SIZE_TEST", "64", "MODEL.WEIGHTS", "random"),
)


def run_of(name: str, root: Path, out: Path, world: int) -> DetectionRun:
    out.mkdir(parents=True, exist_ok=True)
    # C4 sends every box through a stage of its trunk
    small = ("MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", "4") if "C4" in name else ()
    if name in OTHER_TRUNKS:
        small = ("MODEL.TRUNK.ARCH", OTHER_TRUNKS[name])
    return asked(name, root, out, (*EVERY, *small), engine="detectron2", world=world)


def whole(run: DetectionRun, rank: int = 0) -> None:
    """Train, from the saved state if there is one, and score."""
    p, engine = built(run)
    train_net.work(run, p, engine, rank)


def stopped(run: DetectionRun, rank: int = 0) -> None:
    """One iteration; its state is saved."""
    p, engine = built(run)
    stop = StopFlag()
    stop.requested = "SIGTERM"
    with pytest.raises(Preempted):
        train_net.train(run, p, engine, rank, stop)


def two_ranks(run: DetectionRun, seat: process_group.Seat) -> int:
    """For ranks.spawn. Below `run.out` there is one_two/<config>, stopped by one process, to be
    continued; there will be

    two/<config>: never stopped; two_two/: stopped, continued; two_one/: stopped.
    """
    torch.use_deterministic_algorithms(True)
    with process_group.joined(run, seat):
        for name in sorted(folder.name for folder in (run.out / "one_two").iterdir()):
            at = {k: run.out / k / name for k in ("two", "two_two", "two_one", "one_two")}
            runs = {k: run_of(name, run.root, out, 2) for k, out in at.items()}
            whole(runs["two"], seat.rank)
            stopped(runs["two_two"], seat.rank)
            if seat.rank == 0:
                shutil.copytree(at["two_two"], at["two_one"], dirs_exist_ok=True)
            process_group.barrier()
            whole(runs["two_two"], seat.rank)
            whole(runs["one_two"], seat.rank)
    return 0


def all_runs(root: Path, out: Path, configs: Sequence[str] = CONFIGS) -> None:
    """one/ and what is to be done of the others by one process, by this; the rest by two ranks."""
    torch.use_deterministic_algorithms(True)
    for name in configs:
        whole(run_of(name, root, out / "one" / name, 1))
        stopped(run_of(name, root, out / "one_two" / name, 1))
    first = run_of(configs[0], root, out, 2)
    process_group.spawn(two_ranks, replace(first, out=out))
    for name in configs:
        whole(run_of(name, root, out / "two_one" / name, 1))
