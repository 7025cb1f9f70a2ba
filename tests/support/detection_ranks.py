"""Runs both engines over two ranks. All configs of an engine share one pair of processes, because a
process takes seconds to start."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from backbench.detection import process_group, train_net
from backbench.detection.data.split import training_records
from backbench.detection.engine import DetectionEngine, reestimate_batch_norm
from backbench.detection.run import DetectionRun, Prepared
from backbench.errors import Preempted
from backbench.parallel import distributed
from backbench.runs.state import StopFlag
from support.detection_runs import built, overrides, run_of_config

VIT = "timm:vit_tiny_patch16_224,depth=2,embed_dim=32,img_size=56,num_heads=2,patch_size=14,pos=aa"
# Configs for trunks of any kind, and their trunks
OTHER_TRUNKS = {
    "tiny_faster_rcnn_ConvNeXt_FPN": "timm:test_convnext",
    "tiny_faster_rcnn_ViT_SFP": VIT,
}
CONFIGS = {
    "detectron2": (
        "tiny_faster_rcnn_R_18_FPN",
        "tiny_mask_rcnn_R_18_FPN",
        "tiny_keypoint_rcnn_R_18_FPN",
        "tiny_faster_rcnn_R_50_C4",
        *OTHER_TRUNKS,
    ),
    "torchvision": ("tiny_mask_rcnn_R_18_FPN", *OTHER_TRUNKS),
}
# Every anchor and every proposal is taken, so that nothing is drawn. Few proposals and small images
# keep this fast.
EVERY = {
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE": 20000,
    "MODEL.RPN.POSITIVE_FRACTION": 1.0,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 200,
    "MODEL.ROI_HEADS.POSITIVE_FRACTION": 1.0,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 8,
    "INPUT.MIN_SIZE_TRAIN": "(64,)",
    "INPUT.MIN_SIZE_TEST": 64,
}


def run_of(engine: str, name: str, root: Path, out: Path, world: int) -> DetectionRun:
    out.mkdir(parents=True, exist_ok=True)
    values: dict[str, object] = {"MODEL.WEIGHTS": "random"}
    if engine == "detectron2":
        # It draws samples, and normalises losses, per process.
        values |= EVERY
    if "C4" in name:
        # It sends every box through a stage of its trunk.
        values["MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION"] = 4
    if name in OTHER_TRUNKS:
        values["MODEL.TRUNK.ARCH"] = OTHER_TRUNKS[name]
        if engine == "torchvision":
            values["MODEL.TRUNK.DROP_PATH"] = 0.5
    words = overrides(values)
    return run_of_config(name, root, out, words, engine=engine, world=world)


@contextlib.contextmanager
def precise(engine: str) -> Iterator[None]:
    """Let torchvision's engine compute in float64 while inside.

    In float32, rounding on two ranks may swap two proposals.
    """
    if engine == "detectron2":
        yield
        return
    single = torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.Tensor.float = single


def built_precisely(run: DetectionRun) -> tuple[Prepared, DetectionEngine]:
    p, engine = built(run)
    if run.engine == "torchvision":
        engine.model.double()
    return p, engine


def whole(run: DetectionRun, rank: int = 0) -> None:
    """Train, from the saved state if there is one, and score."""
    p, engine = built_precisely(run)
    train_net.work(run, p, engine, rank)


def stopped(run: DetectionRun, rank: int = 0) -> None:
    """Train one iteration, after which a signal stops the run and its state is saved."""
    p, engine = built_precisely(run)
    stop = StopFlag()
    stop.requested = "SIGTERM"
    with pytest.raises(Preempted):
        train_net.train(run, p, engine, rank, stop)


def two_ranks(run: DetectionRun, seat: process_group.Seat) -> int:
    """Do the part of two ranks in `all_runs`."""
    torch.use_deterministic_algorithms(True)

    def run_in(kind: str, name: str) -> DetectionRun:
        return run_of(run.engine, name, run.root, run.out / kind / name, 2)

    with process_group.joined(run, seat), precise(run.engine):
        for name in CONFIGS[run.engine]:
            whole(run_in("two", name), seat.rank)
            continued = run_in("two_two", name)
            stopped(continued, seat.rank)
            if seat.rank == 0:
                shutil.copytree(continued.out, run.out / "two_one" / name)
            process_group.barrier()
            whole(continued, seat.rank)
            whole(run_in("one_two", name), seat.rank)
    return 0


def all_runs(engine: str, root: Path, out: Path) -> None:
    """Run every config in OUT/<kind>/<config>, by one process and by two ranks.

    The kinds one and two are not interrupted. The others are stopped after an iteration and
    continued: two_two by two ranks each time, one_two first by one process and then by two ranks,
    two_one the other way round.
    """
    torch.use_deterministic_algorithms(True)
    with precise(engine):
        for name in CONFIGS[engine]:
            whole(run_of(engine, name, root, out / "one" / name, 1))
            stopped(run_of(engine, name, root, out / "one_two" / name, 1))
        process_group.spawn(two_ranks, run_of(engine, CONFIGS[engine][0], root, out, 2))
        for name in CONFIGS[engine]:
            whole(run_of(engine, name, root, out / "two_one" / name, 1))


def compare_batch_norm(engine, records):
    """Compare batch norm's statistics, estimated again, with those of the samples of all ranks.

    Returns how many layers saw samples.
    """
    samples = {}  # layer -> its inputs, each (channels, n)

    def keep(layer, inputs):
        samples[layer].append(inputs[0].transpose(0, 1).flatten(1))

    for layer in engine.model.modules():
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
            samples[layer] = []
            layer.register_forward_pre_hook(keep)
    reestimate_batch_norm(engine, records, batches=2, after=5)
    used = {layer: torch.cat(seen, 1) for layer, seen in samples.items() if seen}
    for layer, mine in used.items():
        x = distributed.gather(mine.double().T)
        mean = layer.running_mean.double()
        variance = layer.running_var.double()
        torch.testing.assert_close(mean, x.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            variance, x.var(0, correction=0), rtol=1e-3, atol=1e-5
        )
    return len(used)


def batch_norm_of_a_rank(run, seat):
    """Compare batch norm's statistics as a rank."""
    with process_group.joined(run, seat):
        p, engine = built(run)
        assert compare_batch_norm(engine, training_records(p.train, p.task)) > 20
    return 0
