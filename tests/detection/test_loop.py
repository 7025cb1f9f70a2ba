"""The training loop with an engine of a single number: rates, order, states, stops."""

import dataclasses
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from support.detection_loop import OneNumber, long_scored, stays, stopped_while_saving
from support.detection_runs import overrides, run_of_config

from backbench.detection import measure, process_group, train_net
from backbench.detection.data.order import ImageOrder, Slots
from backbench.errors import Failed, Preempted
from backbench.records import store
from backbench.runs.state import StopFlag, load_state
from backbench.runs.step_metrics import read_metrics

SHORT = overrides(
    {
        "SOLVER.MAX_ITER": 12,
        "SOLVER.STEPS": "(8,)",
        "TEST.PRECISE_BN.ENABLED": False,
    }
)


@pytest.fixture
def prepared(tiny_root, tmp_path):
    def prepare(*opts):
        words = ("MODEL.WEIGHTS", "random", *SHORT, *opts)
        run = run_of_config("tiny_faster_rcnn_R_18_FPN", tiny_root, tmp_path, words)
        return run, train_net.prepare(run)

    return prepare


def stop_in(iteration):
    """Return a flag, and an action of OneNumber's that raises it in this iteration."""
    stop = StopFlag()

    def at(now):
        if now == iteration:
            stop.requested = "SIGTERM"

    return stop, at


def test_rates_warm_up_and_drop(prepared):
    run, p = prepared("SOLVER.WARMUP_ITERS", "4", "SOLVER.BASE_LR", "0.08")
    engine = OneNumber(p)
    train_net.train(run, p, engine, 0, StopFlag())
    factor = p.cfg.SOLVER.WARMUP_FACTOR
    assert engine.rates[0] == pytest.approx(0.08 * factor)
    assert engine.rates[2] == pytest.approx(0.08 * (factor + 1) / 2)
    assert [engine.rates[i] for i in (4, 7, 8, 11)] == pytest.approx(
        [0.08, 0.08, 0.008, 0.008]
    )
    assert [row["lr"] for row in read_metrics(run.out)] == list(engine.rates.values())


def test_a_group_keeps_its_own_base_rate(prepared):
    """Biases have another one where BIAS_LR_FACTOR says so. A continued run keeps it, too."""

    class TwoGroups(OneNumber):
        def build_optimizer(self):
            twice = torch.nn.Parameter(torch.zeros(1))
            groups = [
                {"params": [twice], "lr": 0.16},
                {"params": self.model.parameters()},
            ]
            return torch.optim.SGD(groups, lr=0.08, momentum=0.9)

    run, p = prepared("SOLVER.WARMUP_ITERS", "0", "SOLVER.BASE_LR", "0.08")
    seen = {}
    stop = StopFlag()

    def at(iteration):
        seen[iteration] = [group["lr"] for group in engine.optimizer.param_groups]
        if iteration == 9:
            stop.requested = "SIGTERM"

    engine = TwoGroups(p, at)
    with pytest.raises(Preempted):
        train_net.train(run, p, engine, 0, stop)
    engine = TwoGroups(p, at)
    train_net.train(run, p, engine, 0, StopFlag())
    assert [seen[i] for i in (0, 7)] == [pytest.approx([0.16, 0.08])] * 2
    assert [seen[i] for i in (8, 9, 10, 11)] == [pytest.approx([0.016, 0.008])] * 4


def test_stopped_and_continued_is_the_same_run(prepared):
    run, p = prepared()
    whole = OneNumber(p)
    train_net.train(run, p, whole, 0, StopFlag())
    rows = read_metrics(run.out)
    train_net.load_final(run.out / "model_final.pth")
    (run.out / "model_final.pth").unlink()
    for last in (3, 7):
        stop, at = stop_in(last)
        with pytest.raises(
            Preempted, match=f"stopped by SIGTERM after iteration {last + 1}"
        ):
            train_net.train(run, p, OneNumber(p, at), 0, stop)
    engine = OneNumber(p)
    train_net.train(run, p, engine, 0, StopFlag())
    assert min(engine.rates) == 8
    assert torch.equal(engine.model.weight, whole.model.weight)
    assert read_metrics(run.out) == rows
    assert not (run.out / "state.pt").exists()


def test_a_long_run_continues_between_two_logged_iterations(prepared):
    """A run of 18,000 iterations logs every fourth of them. It may be saved after any of them."""
    run, p = prepared("SOLVER.MAX_ITER", "18000")
    for last in (6, 8, 13):
        stop, at = stop_in(last)
        with pytest.raises(Preempted):
            train_net.train(run, p, OneNumber(p, at), 0, stop)
    assert [row["step"] for row in read_metrics(run.out)] == [0, 4, 8, 12]


def test_a_signal_in_the_last_iteration_changes_nothing(prepared):
    run, p = prepared()
    stop, at = stop_in(11)
    train_net.train(run, p, OneNumber(p, at), 0, stop)
    assert (run.out / "model_final.pth").exists()


def test_a_loss_that_is_not_finite_ends_the_run(prepared):
    run, p = prepared()

    def at(iteration):
        return float("nan") if iteration == 5 else None

    with pytest.raises(
        Failed, match=r"the loss is nan at iteration 5 .*lower SOLVER.BASE_LR"
    ):
        train_net.train(run, p, OneNumber(p, at), 0, StopFlag())


def test_weights_that_are_not_finite_replace_no_state(prepared):
    """A long run reads its loss in few iterations, so saving between two of them must find out."""
    run, p = prepared("SOLVER.CHECKPOINT_PERIOD", "3")

    def at(iteration):
        if iteration == 4:
            with torch.no_grad():
                engine.model.weight.fill_(float("nan"))

    engine = OneNumber(p, at)
    engine.losses = lambda: {"loss_square": engine.model.weight.nan_to_num().sum()}
    with pytest.raises(
        Failed, match=r"not finite after iteration 6; the last good state is .*pt;"
    ):
        train_net.train(run, p, engine, 0, StopFlag())
    assert load_state(run.out / "state.pt")["iteration"] == 3


def test_a_state_is_saved_every_few_minutes(prepared, monkeypatch):
    run, p = prepared("SOLVER.CHECKPOINT_PERIOD", "100")
    state = run.out / "state.pt"
    seen = []

    def at(iteration):
        if state.exists():
            seen.append(load_state(state)["iteration"])
        if iteration == 3:
            raise KeyboardInterrupt

    for seconds, saved in ((train_net.SAVE_SECONDS, []), (-1, [1, 2, 3])):
        monkeypatch.setattr(train_net, "SAVE_SECONDS", seconds)
        with pytest.raises(KeyboardInterrupt):
            train_net.train(run, p, OneNumber(p, at), 0, StopFlag())
        assert seen == saved


@pytest.mark.slow
def test_no_rank_is_killed_while_another_saves(prepared):
    """Saving takes longer than ranks are given to end once another has ended."""
    run, _ = prepared("SOLVER.IMS_PER_BATCH", "2")
    run = dataclasses.replace(run, world=2)
    with pytest.raises(SystemExit) as ended:
        process_group.spawn(stopped_while_saving, run)
    assert ended.value.code == 75
    assert load_state(run.out / "state.pt")["iteration"] == 4


def test_a_stop_comes_before_a_look_on_the_way(prepared, monkeypatch):
    """Scoring on the way takes minutes, so a stopped run saves first and scores when it continues."""
    run, p = prepared("TEST.EVAL_PERIOD", "4")
    looked = []

    def look(run, p, engine, rank, step):
        looked.append((step, int(engine.iteration)))
        if len(looked) == 2:
            raise KeyboardInterrupt  # as good as killed
        (run.out / measure.EVALUATIONS_FILE).write_text(f'{{"step": {step}}}\n')

    monkeypatch.setattr(measure, "on_the_way", look)
    stop, at = stop_in(3)
    with pytest.raises(Preempted, match="after iteration 4"):
        train_net.train(run, p, OneNumber(p, at), 0, stop)
    assert not looked
    with pytest.raises(KeyboardInterrupt):
        train_net.train(run, p, OneNumber(p), 0, StopFlag())
    train_net.train(run, p, OneNumber(p), 0, StopFlag())
    assert looked == [(4, 4), (8, 8), (8, 8)]


def test_a_look_on_the_way_ends_when_the_first_rank_has_scored(prepared, monkeypatch):
    run, p = prepared()
    share = run.out / measure.SHARE.format(1)
    share.touch()
    waited = []

    def wait_until(over):
        before = over()
        share.unlink()
        waited.append((before, over()))

    monkeypatch.setattr(measure, "predict", lambda *_: [])
    monkeypatch.setattr(measure, "wait_until", wait_until)
    measure.on_the_way(run, p, OneNumber(p), 1, 4)
    assert waited == [(False, True)]
    share.touch()
    measure.on_the_way(run, p, OneNumber(p), 0, 4)
    assert not share.exists() and len(waited) == 1


@pytest.mark.slow
def test_ranks_wait_as_long_as_scoring_takes(prepared):
    """Scoring takes longer than a collective waits; a killed run's detections are not taken."""
    run, _ = prepared("SOLVER.IMS_PER_BATCH", "2", "TEST.EVAL_PERIOD", "6")
    run = dataclasses.replace(run, world=2)
    # The killed run had three ranks.
    for rank in (1, 2):
        (run.out / f".predictions.{rank}.json").write_text("[[1]]")
    measure.clear(run)
    process_group.spawn(long_scored, run)
    assert store.complete(run.out)
    assert not list(run.out.glob(".predictions*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "to_ranks", [False, True], ids=["to the process", "to its ranks"]
)
@pytest.mark.parametrize("after_s", [0.05, 1.0])
def test_a_signal_while_the_ranks_import(prepared, capfd, to_ranks, after_s):
    run, _ = prepared("SOLVER.IMS_PER_BATCH", "2")
    run = dataclasses.replace(run, world=2)

    def send():
        time.sleep(after_s)
        receivers = [os.getpid()]
        if to_ranks:
            receivers = [child.pid for child in multiprocessing.active_children()]
        for pid in receivers:
            os.kill(pid, signal.SIGTERM)

    sender = threading.Thread(target=send)
    with pytest.raises(SystemExit) as ended:
        sender.start()
        process_group.spawn(stays, run)
    sender.join()
    assert ended.value.code == 75
    said = capfd.readouterr().err
    assert "stopped by SIGTERM; the same command continues" in said
    assert "Traceback" not in said


def test_order_is_a_function_of_its_position():
    sizes = [(1, 1), (2, 2), (2, 1)]  # only the third is wide
    records = []
    for i in range(23):
        width, height = sizes[i % 3]
        records.append({"width": width, "height": height})
    order = ImageOrder(records, 8, seed=4)
    stream = order.batches()
    whole = [next(stream) for _ in range(20)]
    later = order.batches(13)
    assert [next(later) for _ in range(7)] == whole[13:]
    for batch in whole:
        for group in (batch[:4], batch[4:]):
            assert len({order.wide[i] for i in group}) == 1
    seen = [i for batch in whole for i in batch]
    assert set(seen[:46]) == set(range(23))
    # Rank 0 has the first half of each batch, rank 1 the second.
    first_half = Slots(order, first=3, last=6, rank=0, world=2)
    second_half = Slots(order, first=3, last=6, rank=1, world=2)
    joined = []
    for a, b in zip(first_half, second_half, strict=True):
        joined.append([index for _, _, index in a + b])
    assert joined == whole[3:6]
