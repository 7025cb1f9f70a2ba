"""Both engines over two ranks; all configs of one share a pair of processes, whose start costs."""

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
from support.detection_runs import built, run_of_config

VIT = "timm:vit_tiny_patch16_224,depth=2,embed_dim=32,img_size=56,num_heads=2,patch_size=14,pos=aa"
# Configs for trunks of any kind
OTHER_TRUNKS = {"tiny_faster_rcnn_ConvNeXt_FPN": "timm:test_convnext"}
OTHER_TRUNKS["tiny_faster_rcnn_ViT_SFP"] = VIT
R_18 = tuple(f"tiny_{task}_rcnn_R_18_FPN" for task in ("faster", "mask", "keypoint"))
CONFIGS = {"detectron2": (*R_18, "tiny_faster_rcnn_R_50_C4", *OTHER_TRUNKS)}
CONFIGS["torchvision"] = ("tiny_mask_rcnn_R_18_FPN", *OTHER_TRUNKS)
# Every anchor and every proposal is taken, so that nothing is drawn; small, as are the images
EVERY = "MODEL.RPN.BATCH_SIZE_PER_IMAGE 20000 MODEL.RPN.POSITIVE_FRACTION 1.0"
EVERY += " INPUT.MIN_SIZE_TEST 64 MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 200"
EVERY += " MODEL.ROI_HEADS.POSITIVE_FRACTION 1.0 MODEL.RPN.POST_NMS_TOPK_TRAIN 8 INPUT.MIN_SIZE_TRAIN (64,)"


def run_of(engine: str, name: str, root: Path, out: Path, world: int) -> DetectionRun:
    out.mkdir(parents=True, exist_ok=True)
    words = ("MODEL.WEIGHTS", "random")
    if engine == "detectron2":  # whose losses are per process
        words += tuple(EVERY.split())
    if "C4" in name:  # it sends every box through a stage of its trunk
        words += ("MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", "4")
    if name in OTHER_TRUNKS:
        words += ("MODEL.TRUNK.ARCH", OTHER_TRUNKS[name])
        words += ("MODEL.TRUNK.DROP_PATH", "0.5") if engine == "torchvision" else ()
    return run_of_config(name, root, out, words, engine=engine, world=world)


@contextlib.contextmanager
def precise(engine: str) -> Iterator[None]:
    """torchvision's engine in float64: in float32, rounding on two ranks may swap two proposals."""
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
    """One iteration; its state is saved."""
    p, engine = built_precisely(run)
    stop = StopFlag()
    stop.requested = "SIGTERM"
    with pytest.raises(Preempted):
        train_net.train(run, p, engine, rank, stop)


def two_ranks(run: DetectionRun, seat: process_group.Seat) -> int:
    """Make two/, two_two/ (stopped and continued) and two_one/ (stopped); continue one_two/."""
    torch.use_deterministic_algorithms(True)
    with process_group.joined(run, seat), precise(run.engine):
        for name in CONFIGS[run.engine]:
            outs = [run.out / kind / name for kind in ("two", "two_two", "one_two")]
            runs = [run_of(run.engine, name, run.root, out, 2) for out in outs]
            two, two_two, one_two = runs
            whole(two, seat.rank)
            stopped(two_two, seat.rank)
            if seat.rank == 0:
                shutil.copytree(two_two.out, run.out / "two_one" / name)
            process_group.barrier()
            whole(two_two, seat.rank)
            whole(one_two, seat.rank)
    return 0


def all_runs(engine: str, root: Path, out: Path) -> None:
    """Make what takes one process of one/, one_two/ and two_one/<config>; two ranks the rest."""
    torch.use_deterministic_algorithms(True)
    with precise(engine):
        for name in CONFIGS[engine]:
            whole(run_of(engine, name, root, out / "one" / name, 1))
            stopped(run_of(engine, name, root, out / "one_two" / name, 1))
        process_group.spawn(two_ranks, run_of(engine, CONFIGS[engine][0], root, out, 2))
        for name in CONFIGS[engine]:
            whole(run_of(engine, name, root, out / "two_one" / name, 1))


def compare_batch_norm(engine, records):
    """Batch norm's statistics, estimated again, against a loop over the samples of all ranks; how
    many layers saw any."""
    layers = {}
    for layer in engine.model.modules():
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
            layers[layer] = []
            layer.register_forward_pre_hook(
                lambda layer, inputs: layers[layer].append(
                    inputs[0].transpose(0, 1).flatten(1)
                )
            )
    reestimate_batch_norm(engine, records, batches=2, after=5)
    used = {layer: torch.cat(seen, 1) for layer, seen in layers.items() if seen}
    for layer, mine in used.items():
        x = distributed.gather(mine.double().T)
        mean, variance = layer.running_mean.double(), layer.running_var.double()
        torch.testing.assert_close(mean, x.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            variance, x.var(0, correction=0), rtol=1e-3, atol=1e-5
        )
    return len(used)


def batch_norm_of_a_rank(run, seat):
    """For process_group.spawn."""
    with process_group.joined(run, seat):
        p, engine = built(run)
        assert compare_batch_norm(engine, training_records(p.train, p.task)) > 20
    return 0
