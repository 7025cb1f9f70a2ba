"""The loop on a narrow ResNet-18: what it leaves, what it refuses, and exact continuation."""

import dataclasses
import json
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from support import tiny_pretraining
from support.tiny_pretraining import digest, refused

from backbench.cli import program
from backbench.datasets import catalog
from backbench.errors import EXIT_FAILED, EXIT_PREEMPTED, Failed
from backbench.images.crops import Crops
from backbench.pretrain import monitor
from backbench.pretrain.methods import simclr
from backbench.pretrain.monitor import RecentTerms
from backbench.pretrain.recipe import ViewsConfig
from backbench.pretrain.train import SavedState, Training
from backbench.runs.folder import CHECKPOINT_FILE, STATE_FILE
from backbench.runs.state import load_state
from backbench.runs.step_metrics import read_metrics
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families.resnet_trunk import build_backbone

pytestmark = pytest.mark.usefixtures("no_curves")

MOCO = [tiny_pretraining.MOCO]
LARGER = ["views.crops=[{count: 2, size: 32}]"]


@pytest.fixture(scope="module")
def root(shapes):
    """24 pictures in three classes: six steps of eight in two epochs."""
    root = shapes()
    (root / "tiny.yaml").write_text(tiny_pretraining.recipe())
    return root


@pytest.fixture
def pretrain(root, capsys, caplog):
    """pretrain(out, *overrides) -> (exit status, what it said), by the command line."""

    def run(out, *overrides, recipe="tiny.yaml", options=()):
        command = ["pretrain", str(root / recipe), *overrides, "--data", str(root)]
        command += ["--out", str(out), *options]
        caplog.clear()
        status = program.main(command)
        return status, capsys.readouterr().err + caplog.text

    return run


def weights(out):
    return Checkpoint.load(out / CHECKPOINT_FILE).state_dict


def test_a_run_leaves_a_checkpoint_with_its_history(pretrain, tmp_path, with_curves):
    out = tmp_path / "run"
    status, said = pretrain(out, "knn_every=1")
    assert status == 0, said
    assert {p.name for p in out.iterdir()} == {
        "backbone.safetensors",
        "curves.png",
        "curves.svg",
        "metrics.jsonl",
        "progress.json",
        "recipe.yaml",
        "run.json",
        "state.pt",
    }
    checkpoint = Checkpoint.load(out / CHECKPOINT_FILE)
    about = (checkpoint.arch, checkpoint.method, checkpoint.epochs, checkpoint.name)
    assert about == (tiny_pretraining.ARCH, "simclr", 2, "tiny")
    assert checkpoint.provenance["recipe"]["optim"]["lr"] == 0.05
    assert checkpoint.provenance["data"]["images"] == 24
    assert len(checkpoint.provenance["data"]["fingerprint"]) == 12
    assert checkpoint.provenance["versions"]["torch"] == torch.__version__
    assert any(name.startswith("projector.") for name in checkpoint.heads)
    rows = read_metrics(out)
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(6))
    for name in (
        "lr",
        "feature_std",
        "effective_rank",
        "images_per_s",
        "waiting",
        "memory_gib",
    ):
        assert all(name in row for row in steps), name
    assert all(0 <= row["waiting"] <= 1 for row in steps)
    assert [row["epoch"] for row in rows if "knn" in row] == [0, 1]
    assert json.loads((out / "progress.json").read_text())["done"] == 6
    assert "6/6 steps" in said
    assert "img/s" in said
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    status, said = pretrain(out, "knn_every=1")
    assert status == 0
    assert "already finished" in said
    assert {p.name: p.stat().st_mtime_ns for p in out.iterdir()} == before


def test_a_checkpoint_that_no_run_made_is_not_its_result(pretrain, trunk, tmp_path):
    out = tmp_path / "x"
    out.mkdir()
    shutil.copy(trunk, out / CHECKPOINT_FILE)
    refused(pretrain(out), "has no run.json; choose another --out")
    assert [file.name for file in out.iterdir()] == [CHECKPOINT_FILE]


def test_no_epochs_save_the_trunk_that_every_method_starts_from(
    pretrain, tmp_path, root
):
    (root / "without.yaml").write_text(tiny_pretraining.recipe(method=None))
    random = ["method={name: random}"]
    starts = {"random": random, "moco": MOCO, "other": [*random, "seed=1"]}
    for name, overrides in starts.items():
        out = tmp_path / name
        assert pretrain(out, *overrides, "epochs=0", recipe="without.yaml")[0] == 0
    assert digest(tmp_path / "random") == digest(tmp_path / "moco")
    # Where each process is a group of batch norm, their number names the run
    processes = {}
    for name in starts:
        about = json.loads((tmp_path / name / "run.json").read_text())
        processes[name] = about["identity"].get("processes")
    assert processes == {"random": None, "moco": 1, "other": None}
    assert digest(tmp_path / "other") != digest(tmp_path / "random")
    still = weights(tmp_path / "random")
    assert pretrain(tmp_path / "trained")[0] == 0
    moved = weights(tmp_path / "trained")
    for key in ("conv1.weight", "layer4.1.conv2.weight"):
        assert not torch.equal(still[key], moved[key])


def test_a_signal_saves_and_the_same_command_continues_exactly(
    pretrain, kill_at_step, tmp_path
):
    # A row spans a restart, and a score waits for it
    rows = ("log_every=4", "knn_every=1")
    assert pretrain(tmp_path / "whole", *rows)[0] == 0
    out = tmp_path / "parts"
    kill_at_step(2, signal.SIGUSR2)
    status, said = pretrain(out, *rows)
    assert status == EXIT_PREEMPTED
    assert "stopped by SIGUSR2 at step 3 of 6, state saved" in said
    assert not (out / CHECKPOINT_FILE).exists()
    kill_at_step(4, signal.SIGTERM)
    assert pretrain(out, *rows, options=["--workers", "1"])[0] == EXIT_PREEMPTED
    kill_at_step(5, signal.SIGTERM)  # the last: nothing is left to stop
    status, said = pretrain(out, *rows, "data.workers=2")
    assert status == 0
    assert "continuing at step 5 of 6" in said
    assert digest(out) == digest(tmp_path / "whole")

    def numbers(run):
        rows = read_metrics(run)
        for row in rows:
            for timing in ("images_per_s", "waiting", "memory_gib"):
                row.pop(timing, None)
        return rows

    assert numbers(out) == numbers(tmp_path / "whole")
    assert [row["step"] for row in numbers(out)] == [2, 3, 5, 5]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*MOCO, "method.groups=4", "accumulate=4"],
            "4 batch norm groups do not divide the 2 images",
        ),
        (
            ["batch_size=32"],
            "24 images are fewer than one batch of 32; set batch_size to at most",
        ),
        (
            [*MOCO, "method.queue=60"],
            "a queue of 60 keys is no multiple of the batch size 8",
        ),
        (
            ["accumulate=3"],
            "batch_size 8 does not divide over 1 processes x 3 accumulation steps",
        ),
        (["--devices=3"], "batch_size 8 does not divide over 3 processes"),
        (
            [
                *MOCO,
                "method.groups=4",
                "method.queue=72",
                "batch_size=12",
                "--devices=3",
            ],
            "do not nest",
        ),
        (
            ["accumulate=2"],
            "accumulate 2: the loss of 'simclr' compares the samples of the whole batch",
        ),
        (["method.name=simclrr"], "did you mean 'simclr'"),
        (["arch=resnet19"], "did you mean 'resnet18'"),
        (["data.dataset=shape"], "did you mean 'shapes'"),
        (["batch_size=0"], "'batch_size' must be greater than or equal to 1, not 0"),
        (
            ["stop_after_epochs=0"],
            "'stop_after_epochs' must be greater than or equal to 1, not 0",
        ),
        (
            ["optim.reference_batch=0"],
            "'optim.reference_batch' must be greater than or equal to 1",
        ),
        (["seed=99999999999999999999"], "'seed' must be less than or equal to"),
        (["seed=1.0"], "'seed' must be a whole number"),
        (["epochs=1000000000"], "'epochs' must be less than or equal to 1000000"),
        (["batch_size=1000000000"], "'batch_size' must be less than or equal to"),
        (["data.workers=100000"], "'data.workers' must be less than or equal to 1024"),
        (["views.crops=[{size: 1000000}]"], "size at most 4096"),
        (["epochs=-1"], "'epochs' must be greater than or equal to 0, not -1"),
        (["optim.betas=[0.9, 1]"], "'optim.betas[1]' must be less than 1, not 1"),
        (["optim.lr=-1"], "'optim.lr' must be greater than or equal to 0, not -1"),
        (
            ["data.workers=-1"],
            "'data.workers' must be greater than or equal to 0, not -1",
        ),
        (["--workers=-1"], "--workers -1: from 0 to 1024"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    pretrain, tmp_path, overrides, message
):
    said = refused(pretrain(tmp_path / "run", *overrides), message)
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_convolutions_of_a_gpu_round_as_the_recipe_says(
    pretrain, tmp_path, monkeypatch, precision
):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "fp32")
    assert pretrain(tmp_path, f"precision={precision}", "epochs=0")[0] == 0
    assert torch.backends.cudnn.allow_tf32 is (precision == "tf32")


def test_images_without_labels_are_no_classes(pretrain, root, tmp_path, monkeypatch):
    """STL-10's `train+unlabeled` has ten classes, and images of none."""
    found = catalog.open_split(root, "shapes", "train")
    found = dataclasses.replace(found, labels=(*found.labels[:-1], -1))
    monkeypatch.setattr(catalog, "open_split", lambda *_: found)
    one_view = {
        "method": {"name": "supervised"},
        "views": tiny_pretraining.crops(count=1),
    }
    (root / "one.yaml").write_text(tiny_pretraining.recipe(**one_view))
    refused(
        pretrain(tmp_path / "run", recipe="one.yaml"),
        "needs labels of at least two classes",
    )


def test_more_gpus_than_there_are_or_no_processes(pretrain, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    out = tmp_path / "run"
    refused(pretrain(out, options=["--accelerator", "cuda"]), "torch finds no GPU")
    said = "--devices 0: from 1 to 4096"
    refused(pretrain(out, options=["--devices", "0"]), said)
    assert not out.exists()


def test_another_runs_folder_is_refused_and_a_damaged_state_named(
    pretrain, kill_at_step, tmp_path
):
    out = tmp_path / "run"
    other = tmp_path / "other"
    kill_at_step(2, signal.SIGTERM)
    assert pretrain(out)[0] == EXIT_PREEMPTED
    refused(pretrain(out, "optim.lr=0.07"), "recipe.optim.lr (0.05 there, 0.07 now)")
    state = out / STATE_FILE
    assert pretrain(other, "optim.lr=0.07", "epochs=1", "stop_after_epochs=1")[0] == 0
    data = bytearray(state.read_bytes())
    shutil.copy(other / STATE_FILE, state)
    refused(pretrain(out), f"{state}: the state of another recipe")
    data[len(data) // 2] ^= 255
    state.write_bytes(data)
    refused(pretrain(out), f"{state}: the state is damaged")
    assert not (out / CHECKPOINT_FILE).exists()


def test_a_loss_that_is_not_finite_stops_the_run(pretrain, kill_at_step, tmp_path):
    out = tmp_path / "run"
    overrides = ["optim.lr=1e30", "optim.schedule=constant", "optim.warmup_epochs=1"]
    kill_at_step(1, signal.SIGTERM)
    assert pretrain(out, *overrides)[0] in (EXIT_PREEMPTED, EXIT_FAILED)
    status, said = pretrain(out, *overrides)
    assert status == EXIT_FAILED
    assert "the loss is nan at step" in said
    assert "(lr " in said
    assert "the last good state is" in said or "no state was saved" in said
    assert not (out / CHECKPOINT_FILE).exists()
    if (out / STATE_FILE).exists():
        for tensor in load_state(out / STATE_FILE)["method"].values():
            assert tensor.isfinite().all()


def test_a_method_that_breaks_a_rule_is_told_in_the_first_step(
    pretrain, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        simclr.Method, "after_step", lambda method, _: setattr(method, "made", 1)
    )
    status, said = pretrain(tmp_path / "run")
    assert status == EXIT_FAILED
    assert (
        "'simclr' breaks a rule of pretrain/method.py: attribute made has changed"
        in said
    )
    assert not (tmp_path / "run" / STATE_FILE).exists()


def test_a_corrupt_image_ends_the_run_by_name_or_is_left_out(pretrain, root, tmp_path):
    copy = tmp_path / "data"
    shutil.copytree(root / "shapes", copy / "shapes")
    bad = copy / "shapes" / "train" / "b" / "01.png"
    bad.write_bytes(bad.read_bytes()[:50])
    options = ["--data", str(copy), "--workers", "1"]
    refused(pretrain(tmp_path / "run", options=options[:2]), str(bad))
    status, said = pretrain(
        tmp_path / "skip", "data.skip_corrupt=true", options=options
    )
    assert status == 0
    assert said.count(f"left out: {bad}") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        # 32 px: torch's bf16 convolution on a CPU can leave its gradient unset behind a 1 x 1 map
        [*MOCO, "accumulate=2", "precision=bf16", *LARGER],
        ["precision=fp16", "optim.clip_norm=1.0", *LARGER],
        ["channels_last=false", "views.pipeline=reference"],
        [
            "optim={name: lars, lr: 1.8, decay_1d: false, adapt_1d: false, warmup_epochs: 1}"
        ],
        ["compile=true", "optim={name: adamw, lr: 0.001, reference_batch: 256}"],
        ["stop_after_epochs=1"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_way_to_train_continues_exactly(
    pretrain, kill_at_step, tmp_path, overrides
):
    assert pretrain(tmp_path / "whole", *overrides)[0] == 0
    kill_at_step(1, signal.SIGTERM)
    assert pretrain(tmp_path / "parts", *overrides)[0] == EXIT_PREEMPTED
    assert pretrain(tmp_path / "parts", *overrides)[0] == 0
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")
    expected = 1 if overrides[0].startswith("stop") else 2
    assert Checkpoint.load(tmp_path / "parts" / CHECKPOINT_FILE).epochs == expected


@pytest.mark.slow
def test_micro_batches_add_up_to_the_batch(pretrain, tmp_path):
    """One batch of 8 in two groups is two micro-batches of 4, but for the shuffle of the keys."""
    optim = "optim={name: sgd, lr: 0.05, momentum: 0.0, weight_decay: 0.0}"
    # A narrow trunk's few numbers move with the shuffle
    common = [*MOCO, optim, "epochs=1", "arch=resnet18"]
    assert pretrain(tmp_path / "a", *common, "method.groups=2")[0] == 0
    assert pretrain(tmp_path / "b", *common, "method.groups=1", "accumulate=2")[0] == 0
    a, b = (read_metrics(tmp_path / n)[0]["loss"] for n in "ab")
    # The shuffle of the keys spans the batch in one, the micro-batch in the other
    assert a == pytest.approx(b, rel=1e-2)


def test_feature_statistics_know_collapse(caplog):
    torch.manual_seed(0)
    healthy = monitor.feature_statistics(torch.randn(256, 64))
    assert healthy["feature_std"] == pytest.approx(1, abs=0.05)
    assert healthy["effective_rank"] > 50
    constant = monitor.feature_statistics(
        torch.ones(64, 128) + 1e-6 * torch.randn(64, 128)
    )
    along = torch.randn(64, 1) * torch.randn(128)
    line = monitor.feature_statistics(torch.ones(64, 128) + 0.1 * along)
    assert constant["feature_std"] < 1e-5
    assert line["effective_rank"] < 1.5
    basis = torch.linalg.qr(torch.randn(64, 5))[0]
    rank_five = monitor.feature_statistics(torch.randn(512, 5) @ basis.T)
    assert rank_five["effective_rank"] == pytest.approx(5, abs=0.1)
    with caplog.at_level("WARNING", logger="backbench"):
        monitor.warn_if_collapsed(healthy, 1)
        monitor.warn_if_collapsed(rank_five, 1)
        assert not caplog.records
        monitor.warn_if_collapsed(constant, 2)
        monitor.warn_if_collapsed(line, 3)
    assert len(caplog.records) == 2
    assert "step 2: the representation collapses" in caplog.records[0].getMessage()


def test_the_knn_score_leaves_the_backbone_alone(root):
    found = catalog.open_split(root, "shapes", "train")
    backbone = build_backbone("resnet18")
    before = {k: v.clone() for k, v in backbone.state_dict().items()}
    views, cpu = ViewsConfig(crops=(Crops(size=16),)), torch.device("cpu")

    def score_on(images, backbone=backbone, stop=None):
        return monitor.KnnScore(images, views, cpu)(backbone, stop)

    score = score_on(found)
    assert score is not None
    assert 0 <= score <= 100
    assert backbone.training
    assert all(torch.equal(before[k], v) for k, v in backbone.state_dict().items())
    paths = (found.paths[0] + ".gone", *found.paths[1:])
    broken = type(found)(found.root, paths, found.labels, found.classes)
    assert score_on(broken) is not None
    unlabelled = type(found)(found.root, found.paths, (-1,) * 24, ())
    assert score_on(unlabelled) is None
    assert score_on(found, backbone.double()) is not None
    stopped = SimpleNamespace(requested="SIGTERM")
    assert score_on(found, stop=stopped) is None


def test_a_loss_that_is_read_late_is_named_by_the_step_that_had_it():
    """On a GPU the losses are read when a row is due."""
    recent = RecentTerms()
    for loss in (1.0, torch.inf, torch.nan):
        recent.add([{"loss": torch.tensor(loss)}], torch.device("cpu"))
    training = SimpleNamespace(recent=recent, rates=SimpleNamespace(at=float))
    training.state = SimpleNamespace(last_good=lambda: "nothing is kept")
    error = Training.loss_failure(training, recent.first_not_finite(), step=9)
    assert "the loss is inf at step 8 (lr 8); nothing is kept" in str(error)


def test_a_queue_that_is_not_finite_replaces_no_state(tmp_path):
    method = torch.nn.Linear(2, 2)
    method.register_buffer("queue", torch.zeros(3, 2))
    strategy = SimpleNamespace(precision=SimpleNamespace(state_dict=dict))
    fabric = SimpleNamespace(global_rank=0, strategy=strategy)
    optimizer = torch.optim.SGD(method.parameters(), 0.1)
    state = SavedState(tmp_path, "recipe", fabric, method, optimizer)
    state.save(1, RecentTerms())
    method.queue[1, 1] = torch.nan
    with pytest.raises(
        Failed, match=r"after step 2 .* not finite; the last good state .* step 1"
    ):
        state.save(2, RecentTerms())
    assert load_state(tmp_path / STATE_FILE)["method"]["queue"].isfinite().all()
