"""Tests that both engines keep the promises of engine.py, in mixed precision and on a pretended GPU,
too."""

import copy
from types import SimpleNamespace

import pytest
import torch
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

from backbench.detection import process_group, train_net
from backbench.detection.data.split import training_records
from backbench.detection.engine import MixedPrecision, reestimate_batch_norm
from backbench.detection.engine_torchvision import Detector
from backbench.errors import BadInput, Preempted
from backbench.parallel import precision as precisions
from backbench.runs import seeding
from backbench.runs.state import StopFlag, load_state
from backbench.runs.step_metrics import read_metrics
from backbench.weights import archs


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, tiny_root, tmp_path_factory):
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
    monkeypatch, caplog, enabled, precision, dtype, scaled, slow
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
    with PretendedGpu() as gpu:
        for device in ("cpu", "cuda"):
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
