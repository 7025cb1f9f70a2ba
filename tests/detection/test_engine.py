"""Tests that both engines keep the promises of engine.py, in mixed precision and on a pretended GPU,
too."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fvcore.common.config import CfgNode
from PIL import Image
from pycocotools import mask
from support.detection_loop import OneNumber, normalised_in_bfloat16
from support.detection_ranks import batch_norm_of_a_rank, compare_batch_norm
from support.detection_runs import (
    ENGINES,
    built,
    needs_detectron2,
    overrides,
    run_of_config,
)
from support.pretended_gpu import PretendedGpu

from backbench.detection import engine as engines
from backbench.detection import engine_torchvision, process_group, train_net
from backbench.detection.data.order import ImageOrder, Slots
from backbench.detection.data.split import training_records
from backbench.detection.engine import MixedPrecision, reestimate_batch_norm
from backbench.detection.engine_torchvision import Detector
from backbench.detection.task_rows import MASK_RCNN
from backbench.errors import BadInput, Preempted
from backbench.parallel import precision as precisions
from backbench.runs import seeding
from backbench.runs.state import StopFlag, load_state
from backbench.runs.step_metrics import read_metrics
from backbench.weights import archs

pytestmark = pytest.mark.usefixtures("one_trunk")


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, one_trunk, tiny_root, tmp_path_factory):
    """Build a mask detector and return it with the images that it trains on."""
    out = tmp_path_factory.mktemp("run")
    run = run_of_config("tiny_mask_rcnn_R_18_FPN", tiny_root, out, engine=request.param)
    p, engine = built(run)
    engine.model.train()
    return engine, training_records(p.train, p.task)


def losses_of(engine, iteration):
    seeding.seed_everything(engine.seed, "iteration", iteration, 0)
    return {name: float(value.detach()) for name, value in engine.losses().items()}


def test_an_iteration_does_not_depend_on_where_the_stream_was_opened(engine):
    engine, records = engine
    engine.start(records, 0, 3)
    whole = [losses_of(engine, i) for i in range(3)]
    engine.start(records, 2, 3)
    assert losses_of(engine, 2) == whole[2]
    assert whole[0] != whole[2]
    terms = ("rpn_cls", "rpn_loc", "cls", "box_reg", "mask")
    assert set(whole[0]) == {f"loss_{term}" for term in terms}


def test_a_step_moves_by_the_optimisers_rate(engine):
    engine, records = engine
    before = {k: v.clone() for k, v in engine.model.named_parameters()}
    engine.start(records, 0, 2)
    for rate, moves in ((0.0, False), (0.01, True)):
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        losses = engine.step()
        assert not any(v.requires_grad for v in losses.values())
        same = [torch.equal(before[k], v) for k, v in engine.model.named_parameters()]
        assert all(same) is not moves


def test_a_seed_draws_the_heads_behind_a_fresh_trunk(tiny_root, tmp_path):
    run = run_of_config("tiny_faster_rcnn_R_18_FPN", tiny_root, tmp_path)
    p, engine = built(run)
    seeding.seed_everything(p.seed, "detector")
    trunk = archs.build_trunk(p.checkpoint.arch)
    expected = Detector(p.cfg, trunk, p.checkpoint.pixels).state_dict()
    heads = {
        name: tensor
        for name, tensor in engine.model.state_dict().items()
        if not name.startswith("backbone.body.")
    }
    assert len(heads) > 20
    for name, tensor in heads.items():
        assert torch.equal(tensor, expected[name]), name


def test_stages_and_detections_are_those_of_the_file(engine):
    engine, records = engine
    stages = engine.stages(torch.zeros(1, 3, 64, 64))
    shapes = [(64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2)]
    assert [tuple(s.shape[1:]) for s in stages] == shapes
    # What the image should show is not read along with it
    image = engine.read(records[0])
    assert isinstance(image, torch.Tensor) or "annotations" not in image
    record = {**records[0], "annotations": []}
    found = engine.predict(record)
    engine.model.train()
    assert found
    for d in found:
        x, y, w, h = d["bbox"]
        assert d["image_id"] == record["image_id"]
        assert 0 <= d["category_id"] < 10
        assert x >= 0 and x + w <= record["width"]
        assert y >= 0 and y + h <= record["height"]
        assert d["segmentation"]["size"] == [record["height"], record["width"]]


def test_images_read_by_workers_have_the_same_detections(engine):
    engine, records = engine
    records = records[:3]
    expected = [engine.predict(record) for record in records]
    engine.model.train()
    assert len({len(str(found)) for found in expected}) > 1  # images differ
    assert list(engine.predictions(records, workers=2)) == expected
    torn = {**records[1], "file_name": str(records[1]["file_name"]) + ".gone"}
    found = engine.predictions([records[0], torn], workers=1)
    assert next(found) == expected[0]
    with pytest.raises(BadInput, match=r"\.gone"):
        next(found)


def test_batch_norm_is_estimated_again(engine):
    """Its statistics become those of every sample in these batches, as a loop over them finds."""
    engine, records = engine
    before = copy.deepcopy(engine.model.state_dict())
    # Some trunks have such a layer behind their last map.
    engine.model.unused = torch.nn.BatchNorm2d(3)
    assert compare_batch_norm(engine, records) == 28
    assert engine.model.unused.running_var.tolist() == [1, 1, 1]
    del engine.model.unused
    engine.model.load_state_dict(before)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["SyncBN", "BN"])
@pytest.mark.parametrize("engine", ENGINES)
def test_batch_norm_is_estimated_again_over_ranks(tiny_root, tmp_path, engine, norm):
    """Each rank has the statistics of the samples of both, whichever kind of layer was trained."""
    words = overrides(
        {
            "MODEL.WEIGHTS": "random",
            "MODEL.RESNETS.NORM": norm,
            "MODEL.FPN.NORM": norm,
        }
    )
    name = "tiny_faster_rcnn_R_18_FPN"
    run = run_of_config(name, tiny_root, tmp_path, words, engine=engine, world=2)
    process_group.spawn(batch_norm_of_a_rank, run)


@pytest.mark.parametrize("grouped", [True, False])
def test_a_rank_has_its_share_of_the_order_that_the_config_asks_for(
    monkeypatch, grouped
):
    monkeypatch.setattr(engines.distributed, "rank", lambda: 1)
    monkeypatch.setattr(engines.distributed, "world_size", lambda: 2)
    cfg = SimpleNamespace(
        SOLVER=SimpleNamespace(IMS_PER_BATCH=6),
        DATALOADER=SimpleNamespace(ASPECT_RATIO_GROUPING=grouped),
    )
    records = [{"width": 1 + n % 2, "height": 1} for n in range(20)]
    some = SimpleNamespace(cfg=cfg, seed=3)
    order = ImageOrder(records, 6, 3, grouped=grouped)
    wanted = Slots(order, first=2, last=5, rank=1, world=2)
    found = engines.DetectionEngine.slots(some, records, 2, 5)
    assert list(found) == list(wanted)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_several_ranks_exchange_gradients_and_no_buffers(monkeypatch, device):
    made = []
    ddp = torch.nn.parallel
    monkeypatch.setattr(
        ddp,
        "DistributedDataParallel",
        lambda model, **how: made.append((model, how)) or "parallel",
    )
    some = SimpleNamespace(model="model", parallel="model", device=torch.device(device))
    engines.DetectionEngine.spread(some)
    assert (some.parallel, made) == ("model", [])
    monkeypatch.setattr(engines.distributed, "world_size", lambda: 2)
    for _ in range(2):
        engines.DetectionEngine.spread(some)
    ids = [1] if device == "cuda:1" else None
    assert some.parallel == "parallel"
    assert made == [("model", {"device_ids": ids, "broadcast_buffers": False})]


@pytest.mark.parametrize(("cores", "workers"), [(9, 4), (3, 3)])
@pytest.mark.parametrize("mask_format", ["polygon", "bitmask"])
def test_workers_are_at_most_one_a_core(monkeypatch, cores, workers, mask_format):
    opened = []
    monkeypatch.setattr(engine_torchvision.loading, "cores", lambda world: cores)
    monkeypatch.setattr(
        engine_torchvision.loading,
        "batches",
        lambda data, keys, **how: opened.append((data, keys, how)),
    )
    some = object.__new__(engine_torchvision.TorchvisionEngine)
    some.cfg = CfgNode(
        {
            "INPUT": {
                "MASK_FORMAT": mask_format,
                "MIN_SIZE_TRAIN": (64,),
                "MAX_SIZE_TRAIN": 96,
                "RANDOM_FLIP": "horizontal",
                "MIN_SIZE_TRAIN_SAMPLING": "choice",
            },
            "SOLVER": {"IMS_PER_BATCH": 2},
            "DATALOADER": {"NUM_WORKERS": 4, "ASPECT_RATIO_GROUPING": True},
        }
    )
    some.seed, some.task, some.flip_map = 3, MASK_RCNN, [1, 0]
    some.device = torch.device("cpu")
    records = [{"width": 9, "height": 8}] * 5
    some.start(records, 1, 4)
    ((data, keys, how),) = opened
    assert how == {"workers": workers, "pin": False, "collate": list}
    assert (data.records, data.flip_map, data.task) == (records, [1, 0], MASK_RCNN)
    assert data.bitmasks is (mask_format == "bitmask")
    assert (data.augment.seed, data.augment.limit, data.augment.flip) == (3, 96, True)
    assert [iteration for ((iteration, *_), _) in keys] == [1, 2, 3]


# ---- What torchvision's engine reads and tells


def test_an_image_is_read_at_the_size_of_testing(tmp_path):
    file = tmp_path / "wide.png"
    Image.new("RGB", (60, 30)).save(file)
    some = object.__new__(engine_torchvision.TorchvisionEngine)
    record = {"file_name": str(file), "width": 60, "height": 30}
    for least, most, shape in ((40, 90, (40, 80)), (40, 70, (35, 70))):
        some.cfg = CfgNode({"INPUT": {"MIN_SIZE_TEST": least, "MAX_SIZE_TEST": most}})
        image = some.read(record)
        assert (tuple(image.shape), image.dtype) == ((3, *shape), torch.uint8)


def test_detections_are_in_pixels_of_the_file():
    """An image of 200 x 60 pixels was seen as one of 50 x 30."""
    found = {
        "boxes": torch.tensor(
            [[10.0, 5, 20, 15], [45, 10, 60, 20], [55, 0, 60, 9], [1, 20, 9, 40]]
        ),
        "labels": torch.tensor([3, 1, 2, 4]),
        "scores": torch.tensor([0.5, 0.75, 0.25, 0.125]),
        "keypoints": torch.tensor([[[2.0, 4, 0.5]]]).repeat(4, 1, 1),
        "masks": torch.ones(4, 28, 28),
    }
    found["keypoints"][3] *= 2
    record = {"width": 200, "height": 60, "image_id": 7}
    rows = engine_torchvision.to_coco(found, record, height=30, width=50)
    # The third box is empty in the file
    boxes = [[40, 10, 40, 20], [180, 20, 20, 20], [4, 40, 32, 20]]
    assert [row["bbox"] for row in rows] == boxes
    assert [row["category_id"] for row in rows] == [2, 0, 3]
    assert [row["score"] for row in rows] == [0.5, 0.75, 0.125]
    assert {row["image_id"] for row in rows} == {7}
    points = [[7.5, 7.5, 0.5], [7.5, 7.5, 0.5], [15.5, 15.5, 1.0]]
    assert [row["keypoints"] for row in rows] == points
    for row, (x, y, width, height) in zip(rows, boxes, strict=True):
        bitmap = np.zeros((60, 200), np.uint8)
        bitmap[y : y + height, x : x + width] = 1
        np.testing.assert_array_equal(mask.decode(row["segmentation"]), bitmap)


def test_without_batch_norm_nothing_is_estimated():
    class Untouched:
        model = torch.nn.Linear(2, 2)

    reestimate_batch_norm(Untouched(), [], batches=200, after=0)


PLAIN = ("MODEL.WEIGHTS", "random", "TEST.PRECISE_BN.ENABLED", "False")


def prepared(root, out, engine, precision, *more):
    """Prepare a run in this precision; return it, what it has read, and its engine."""
    words = (*PLAIN, *more)
    if precision != "fp32":
        words += ("SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", precision)
    run = run_of_config("tiny_mask_rcnn_R_18_FPN", root, out, words, engine=engine)
    p, network = built(run)
    return run, p, network


@pytest.mark.parametrize(
    ("enabled", "precision", "dtype", "scaled", "slow"),
    [
        (False, "bf16", None, False, False),
        (True, "bf16", torch.bfloat16, False, True),
        (True, "fp16", torch.float16, True, False),
    ],
)
def test_only_float16_is_scaled_and_only_bfloat16_may_be_slow(
    monkeypatch, caplog, *, enabled, precision, dtype, scaled, slow
):
    monkeypatch.setattr(precisions, "bf16_is_quick", lambda device: device != "cpu")
    precisions.warn_if_slow.cache_clear()
    solver = SimpleNamespace(AMP=SimpleNamespace(ENABLED=enabled, PRECISION=precision))
    amp = MixedPrecision(SimpleNamespace(SOLVER=solver), torch.device("cpu"))
    assert (amp.dtype, amp.scaler.is_enabled()) == (dtype, scaled)
    assert ("bf16 is slower than fp32 here" in caplog.text) is slow
    with amp.autocast():
        assert torch.is_autocast_enabled("cpu") is enabled
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (dtype or torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_near_to_float32(tiny_root, tmp_path, engine):
    losses = {}
    for precision in ("fp32", "bf16"):
        run, p, network = prepared(tiny_root, tmp_path / precision, engine, precision)
        run.out.mkdir()
        train_net.train(run, p, network, 0, StopFlag())
        losses[precision] = [row["loss"] for row in read_metrics(run.out)]
        weights = network.model.state_dict()
        assert {v.dtype for v in weights.values()} <= {torch.float32, torch.int64}
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.1)


@pytest.mark.slow
@needs_detectron2
def test_batch_norm_of_two_ranks_is_summed_in_float32(tiny_root, tmp_path):
    run = run_of_config("tiny_mask_rcnn_R_18_FPN", tiny_root, tmp_path, PLAIN, world=2)
    process_group.spawn(normalised_in_bfloat16, run)


def in_float16(root, out):
    """Prepare a run of one number whose loss is scaled."""
    words = (*PLAIN, "SOLVER.MAX_ITER", "6", "SOLVER.STEPS", "(4,)")
    run = run_of_config("tiny_faster_rcnn_R_18_FPN", root, out, words)
    p = train_net.prepare(run)
    p.cfg.SOLVER.AMP.ENABLED = True
    return run, p, OneNumber(p)


def test_the_scale_is_saved_and_goes_on(tiny_root, tmp_path):
    numbers = []
    for stops in (False, True):
        run, p, engine = in_float16(tiny_root, tmp_path / str(stops))
        run.out.mkdir()
        if stops:
            stop = StopFlag()
            stop.requested = "SIGTERM"
            with pytest.raises(Preempted):
                train_net.train(run, p, engine, 0, stop)
            assert load_state(run.out / "state.pt")["scaler"]["_growth_tracker"] == 1
            _, p, engine = in_float16(tiny_root, run.out)
        train_net.train(run, p, engine, 0, StopFlag())
        numbers.append((engine.model.weight.item(), engine.amp.scaler.state_dict()))
    assert numbers[0] == numbers[1]
    assert numbers[0][1]["_growth_tracker"] == 6


def test_an_overflow_is_no_step(tiny_root, tmp_path):
    _, _, engine = in_float16(tiny_root, tmp_path)
    engine.amp.descend(engine.model.weight.sum() * 1e306, engine.optimizer)
    assert engine.model.weight.item() == 0
    assert engine.amp.scaler.get_scale() == 2.0**15
    engine.amp.descend(engine.model.weight.sum(), engine.optimizer)
    assert engine.model.weight.item() == pytest.approx(-0.02)


def test_another_precision_is_refused(tiny_root, tmp_path):
    with pytest.raises(BadInput, match=r"SOLVER.AMP.PRECISION fp8: fp16 or bf16"):
        prepared(tiny_root, tmp_path, "torchvision", "fp8")
    with pytest.raises(BadInput, match="a CPU takes a hundred times as long"):
        prepared(tiny_root, tmp_path, "torchvision", "fp16", "MODEL.DEVICE", "cpu")


IMAGES = 4
# What a step waits for on a GPU. Once an image: NMS, and in torchvision a constant for it. Once a
# batch: 1 for boxes that are not empty, 2 for what is drawn of anchors and of proposals, 2 for the
# levels of two pools, 2 for positive proposals, 2 for masks or keypoints, and 4 for constants of
# torchvision's box coder
WAITS = 2 * IMAGES + 1 + 2 + 2 + 2 + 2 + 4


@pytest.mark.parametrize(
    "task", ["mask", pytest.param("keypoint", marks=pytest.mark.slow)]
)
def test_a_step_waits_for_what_it_must(task, tiny_root, tmp_path):
    words = overrides(
        {
            "MODEL.WEIGHTS": "random",
            "SOLVER.IMS_PER_BATCH": IMAGES,
            "INPUT.MIN_SIZE_TRAIN": "(64,)",
            "INPUT.MAX_SIZE_TRAIN": 64,
        }
    )
    run = run_of_config(f"tiny_{task}_rcnn_R_18_FPN", tiny_root, tmp_path, words)
    losses = []
    for device in ("cpu", "cuda"):
        gpu = PretendedGpu()
        # Each operation is looked at on the way to the pretended GPU alone
        with gpu if device == "cuda" else nullcontext():
            prepared, engine = built(run, device)
            engine.start(training_records(prepared.train, prepared.task), 0, 2)
            engine.model.train()
            for number in range(2):
                seeding.seed_everything(0, "iteration", number)
                gpu.take()
                terms = engine.step()
                waits = gpu.take()
        losses.append({name: getattr(v, "host", v) for name, v in terms.items()})
    assert 0 < len(waits) <= WAITS, "\n".join(waits)
    assert losses[0].keys() == losses[1].keys()
    for name, value in losses[0].items():
        torch.testing.assert_close(
            losses[1][name], value, rtol=1e-5, atol=1e-6, msg=name
        )
