"""From the words of `detect` to a run, and what becomes of its weights."""

import logging
from types import SimpleNamespace

import pytest
import torch

from backbench.detection import process_group, train_net
from backbench.detection.protocol import stated
from backbench.detection.run import FINAL_FILE
from backbench.errors import BadInput, Failed
from backbench.requests.detect import DetectRequest
from backbench.runs.folder import STATE_FILE
from backbench.runs.state import save_state

CONFIG = "tiny_faster_rcnn_R_18_FPN"


@pytest.fixture
def words(tiny_root, tmp_path):
    """words(opts, **options): the run that these words mean."""

    def run(*opts, **more):
        given = {"config_file": CONFIG, "engine": "torchvision", "data": tiny_root}
        given |= {"out": tmp_path / "run"} | more
        request = DetectRequest(opts=("MODEL.WEIGHTS", "random", *opts), **given)
        return train_net.from_arguments(request)

    return run


def test_a_run_is_what_the_words_say(words, tiny_root, tmp_path):
    run = words(seed=4, eval_only=True, dataset="mine", num_gpus=2)
    assert run.given.get("SEED") == 4
    assert (run.engine, run.root, run.out) == (
        "torchvision",
        tiny_root,
        tmp_path / "run",
    )
    assert (run.eval_only, run.dataset, run.world) == (True, "mine", 2)
    assert run.task.name == "faster_rcnn"
    assert run.leads


def test_the_folder_may_stand_in_the_config(words, tmp_path):
    run = words("OUTPUT_DIR", str(tmp_path / "other"), out=None)
    assert run.out == tmp_path / "other"
    with pytest.raises(BadInput, match="OUTPUT_DIR 2024: must be a text"):
        words("OUTPUT_DIR", "2024", out=None)
    with pytest.raises(BadInput, match="no run folder: give --out RUN"):
        words(out=None)


def test_two_seeds_are_one_too_many(words):
    assert words("SEED", "3").given.get("SEED") == 3
    with pytest.raises(
        BadInput, match=r"--seed \(or --seeds\) and SEED: give one of them"
    ):
        words("SEED", "3", seed=3)


@pytest.mark.parametrize(
    ("here", "asked", "wrong"), [(2, 2, False), (2, 3, True), (0, 3, False)]
)
def test_there_are_as_many_gpus_as_are_asked_for(
    words, monkeypatch, here, asked, wrong
):
    """On the CPU there are as many processes as one likes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)
    if wrong:
        with pytest.raises(
            BadInput, match=f"--num-gpus {asked}: this machine has {here} GPUs"
        ):
            words(num_gpus=asked)
        assert words("MODEL.DEVICE", "cpu", num_gpus=asked).world == asked
    else:
        assert words(num_gpus=asked).world == asked


# Who does the work


@pytest.fixture
def worked(monkeypatch):
    """What was called, in order."""
    calls = []
    monkeypatch.setattr(train_net, "prepare", lambda run: f"prepared {run.splits}")
    monkeypatch.setattr(
        train_net, "build_engine", lambda run, p, device: f"engine on {device}"
    )
    monkeypatch.setattr(train_net, "work", lambda *words: calls.append(words[1:]))

    class Joined:
        def __init__(self, run, seat):
            calls.append(("joined", seat.rank))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            calls.append("left")

    monkeypatch.setattr(process_group, "joined", Joined)
    monkeypatch.setattr(process_group, "handed_over", lambda run: ("train", "val"))
    return calls


def a_seat(rank=3, local=1, log_level=logging.INFO):
    return process_group.Seat(
        rank=rank, local=local, url="tcp://a:1", parent=1, log_level=log_level
    )


def test_a_rank_takes_the_splits_that_were_read_and_does_its_share(words, worked):
    assert train_net.take_part(words(num_gpus=4), a_seat()) == 0
    prepared = "prepared ('train', 'val')"
    assert worked == [("joined", 3), (prepared, "engine on cpu", 3), "left"]


def test_a_task_of_slurms_does_its_share_in_this_process(words, worked, monkeypatch):
    for key, value in (("NTASKS", "4"), ("PROCID", "2"), ("LOCALID", "0")):
        monkeypatch.setenv(f"SLURM_{key}", value)
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "1")
    run = words(num_gpus=4)
    train_net.start_ranks(run, "prepared")
    assert worked == [("joined", 2), ("prepared", "engine on cpu", 2), "left"]


@pytest.mark.parametrize(
    ("level", "verbosity"),
    [(logging.WARNING, -1), (logging.INFO, 0), (logging.DEBUG, 1)],
)
def test_a_rank_says_as_much_as_the_command_was_asked_to(
    words, monkeypatch, level, verbosity
):
    given = []
    monkeypatch.setattr(
        "backbench.runs.ending.guarded",
        lambda action, *, verbosity: given.append(verbosity) or 75,
    )
    assert train_net.take_part(words(), a_seat(log_level=level)) == 75
    assert given == [verbosity]


# Weights


@pytest.fixture
def engine():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return SimpleNamespace(model=model, optimizer=optimizer)


def test_weights_that_are_not_finite_replace_no_good_state(words, engine):
    run = words()
    train_net.refuse_not_finite(run, engine, 7)
    with torch.no_grad():
        engine.model.bias[1] = torch.inf
    says = (
        "the weights are not finite after iteration 7; no state was saved before; lower"
    )
    with pytest.raises(Failed, match=says):
        train_net.refuse_not_finite(run, engine, 7)
    run.out.mkdir(parents=True)
    (run.out / STATE_FILE).touch()
    with pytest.raises(
        Failed, match=f"the last good state is {run.out / STATE_FILE}; lower"
    ):
        train_net.refuse_not_finite(run, engine, 7)


def test_a_final_detector_is_kept_with_what_it_came_from(words, engine, tmp_path):
    run = words()
    run.out.mkdir(parents=True)
    (run.out / STATE_FILE).touch()
    checkpoint = SimpleNamespace(
        digest="d" * 64, name="x", method="m", arch="resnet18", epochs=3
    )
    schedule = SimpleNamespace(iterations=9)
    p = SimpleNamespace(checkpoint=checkpoint, schedule=schedule, task=run.task)
    train_net.keep_final(run, p, engine)
    assert [file.name for file in run.out.iterdir()] == [FINAL_FILE]
    kept = torch.load(run.final, weights_only=True)["backbench"]
    assert (kept["checkpoint"], kept["name"], kept["epochs"]) == ("d" * 64, "x", 3)
    assert (kept["method"], kept["arch"]) == ("m", "resnet18")
    assert (kept["task"], kept["engine"]) == ("faster_rcnn", "torchvision")
    state = train_net.load_final(run.final)
    torch.testing.assert_close(state, dict(engine.model.state_dict()))


@pytest.mark.parametrize("content", [b"no pickle", None])
def test_a_file_that_is_no_detector_of_ours_is_said(tmp_path, content):
    file = tmp_path / FINAL_FILE
    if content is None:
        torch.save({"model": {}}, file)
    else:
        file.write_bytes(content)
    with pytest.raises(BadInput, match=f"{file}: not a detector of this suite"):
        train_net.load_final(file)


def test_a_saved_state_is_continued(words, engine):
    run = words()
    assert train_net.continue_from(run, engine) == 0
    engine.model(torch.ones(1, 2)).sum().backward()
    engine.optimizer.step()
    run.out.mkdir(parents=True)
    state = {
        "model": engine.model.state_dict(),
        "optimizer": engine.optimizer.state_dict(),
    }
    save_state(run.out / STATE_FILE, state | {"iteration": 5})
    other = torch.nn.Linear(2, 2)
    again = SimpleNamespace(
        model=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    )
    assert train_net.continue_from(run, again) == 5
    torch.testing.assert_close(
        dict(other.state_dict()), dict(engine.model.state_dict())
    )
    assert again.optimizer.param_groups[0]["lr"] == 0.5
    assert again.optimizer.state_dict()["state"].keys() == {0, 1}


@pytest.mark.parametrize(("device", "exact"), [("cpu", True), ("cuda", False)])
def test_kernels_are_deterministic_where_all_are(
    words, engine, monkeypatch, device, exact
):
    run = words()
    run.out.mkdir(parents=True)
    run.final.touch()
    engine.device = torch.device(device)
    engine.images_per_second = 7.0
    seen = []
    monkeypatch.setattr(train_net, "load_final", lambda file: engine.model.state_dict())
    measure = train_net.measure
    monkeypatch.setattr(
        measure,
        "predict",
        lambda *_: seen.append(torch.are_deterministic_algorithms_enabled()),
    )
    monkeypatch.setattr(measure, "record", lambda *given: seen.append(given[-1]))
    monkeypatch.setattr(measure, "scored", lambda run, rank: seen.append(rank))
    before = torch.are_deterministic_algorithms_enabled()
    try:
        train_net.work(run, None, engine)
        train_net.work(run, None, engine, rank=2)
    finally:
        torch.use_deterministic_algorithms(before)
    assert seen == [exact, 7.0, 0, exact, 2], "rank 0 alone records"


# What is said and proven before


def a_request(tiny_root, out, **more):
    given = {"config_file": CONFIG, "engine": "torchvision", "data": tiny_root}
    return DetectRequest(opts=("MODEL.WEIGHTS", "random"), out=out, **given, **more)


def test_another_machine_starts_its_ranks_and_opens_no_folder(
    tiny_root, tmp_path, monkeypatch
):
    started = []
    monkeypatch.setattr(train_net, "prepare", lambda run: "prepared")
    monkeypatch.setattr(train_net, "identity", lambda run, p: {})
    monkeypatch.setattr(
        train_net, "start_ranks", lambda run, p: started.append((run.machine, p))
    )
    out = tmp_path / "run"
    machines = {"num_machines": 2, "machine_rank": 1, "dist_url": "tcp://a:4711"}
    request = a_request(tiny_root, out, **machines)
    assert train_net.run(request) is None
    assert started == [(1, "prepared")]
    assert not out.exists()
    # Not where all is done
    monkeypatch.setattr(train_net.store, "complete", lambda folder: folder == out)
    assert train_net.run(request) is None
    assert len(started) == 1


@pytest.mark.parametrize(("gpus", "device"), [(1, "cuda:0"), (2, "cpu")])
def test_weights_are_proven_where_this_process_may_compute(
    words, monkeypatch, caplog, gpus, device
):
    """With several ranks the GPUs are theirs. A trained detector is proven already."""
    caplog.set_level("INFO", "backbench")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    looked = []

    def check_features(checkpoint, trunk, engine, sides):
        looked.append((trunk, engine, sides))
        return 2.5e-7

    monkeypatch.setattr(train_net, "build_engine", lambda run, p, where: str(where))
    monkeypatch.setattr(train_net.backbones, "check_features", check_features)
    run = words(num_gpus=gpus)
    checkpoint = SimpleNamespace(name="x", backbone=lambda: "trunk")
    p = SimpleNamespace(cfg=run.cfg, checkpoint=checkpoint)
    assert train_net.ready(run, p) == device
    assert looked == [("trunk", device, (128, 192))]
    assert "torchvision: the maps equal those of x to 2.5e-07" in caplog.text
    run.out.mkdir(parents=True)
    run.final.touch()
    assert train_net.ready(run, p) == device
    assert len(looked) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_work_and_its_price_are_told(words, engine, monkeypatch, caplog, device):
    said = []
    monkeypatch.setattr(
        train_net.price, "announce", lambda *words, **more: said.append((words, more))
    )
    monkeypatch.setattr(
        train_net.lint, "few_images", lambda *lists: f"few of {lists[0]}"
    )
    run = words()
    engine.device = torch.device(device)
    p = SimpleNamespace(
        cfg=run.cfg,
        task=run.task,
        train=SimpleNamespace(records=[1]),
        val=SimpleNamespace(records=[1, 2]),
        schedule=SimpleNamespace(iterations=9),
    )
    train_net.announce(run, p, engine)
    batch = run.cfg.SOLVER.IMS_PER_BATCH
    cheaper = "`SOLVER.MAX_ITER N` trains for less" if device == "cpu" else ""
    words_said = ("faster_rcnn by torchvision", f"1 image to train on, {batch} a step")
    work = {"iteration": 9, "image": 2}
    assert said == [(words_said, {"work": work, "cheaper": cheaper})]
    assert caplog.text == ""
    # What counts in epochs is refused iterations
    p.cfg.SOLVER.EPOCHS = 8
    train_net.announce(words(dataset="mine"), p, engine)
    assert said[1][1]["cheaper"] == cheaper.replace("MAX_ITER", "EPOCHS")
    assert "few of mine" in caplog.text


def test_what_decides_the_numbers_names_the_run(words):
    run = words("SOLVER.BASE_LR", "0.5", "SEED", "3")
    p = SimpleNamespace(
        cfg=run.cfg,
        seed=3,
        checkpoint=SimpleNamespace(digest="d"),
        train=SimpleNamespace(fingerprint="t", contents="t1"),
        val=SimpleNamespace(fingerprint="v", contents="v1"),
    )
    about = train_net.identity(run, p)
    config = about.pop("config")
    assert about == {
        "seed": 3,
        "engine": "torchvision",
        "checkpoint": "d",
        "train": "t",
        "val": "v",
        "train_images": "t1",
        "val_images": "v1",
    }
    # The depth is the trunk's to say, and yet another run
    assert "MODEL.RESNETS.DEPTH" not in stated(run.given)
    assert config == stated(run.given) | {"MODEL.RESNETS.DEPTH": 18}
    assert config["SOLVER.BASE_LR"] == 0.5
