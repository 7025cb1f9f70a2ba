"""Mixed precision in both engines: near to float32, continued bit by bit, named in the protocol."""

import pytest
import torch
from support.detection_loop import OneNumber, normalised_in_bfloat16
from support.detection_runs import ENGINES, built, needs_detectron2, run_of_config

from backbench.errors import BadInput, Preempted
from backbench.runs.state import StopFlag, load_state
from backbench.runs.step_metrics import read_metrics
from detection import process_group, train_net

PLAIN = ("MODEL.WEIGHTS", "random", "TEST.PRECISE_BN.ENABLED", "False")


def prepared(root, out, engine, precision, *more):
    words = () if precision == "fp32" else ("SOLVER.AMP.ENABLED", "True")
    words += () if precision == "fp32" else ("SOLVER.AMP.PRECISION", precision)
    name = "tiny_mask_rcnn_R_18_FPN"
    run = run_of_config(name, root, out, (*PLAIN, *words, *more), engine=engine)
    return run, *built(run)


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
    """A run of one number whose loss is scaled."""
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
