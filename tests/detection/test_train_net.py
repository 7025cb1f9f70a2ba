"""The command as a user runs it: results, kill -9 and signals, refusals, several processes."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
import torch
from support.detection_ranks import OTHER_TRUNKS
from support.detection_runs import (
    ENGINES,
    needs_detectron2,
    numbers,
    run_of_config,
    weights,
)
from support.slurm_cluster import free_ports

from backbench.cli import program
from backbench.detection import process_group, train_net
from backbench.errors import BadInput
from backbench.images import contents
from backbench.records import store
from backbench.runs.folder import RESULTS_FILE
from backbench.runs.step_metrics import read_metrics
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families.resnet_trunk import build_backbone

ROOT = Path(__file__).parent.parent.parent
SIX = ("SOLVER.MAX_ITER", "6", "SOLVER.STEPS", "(4,)")
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def x(tmp_path_factory):
    """A ResNet-18 checkpoint."""
    torch.manual_seed(1)
    file = tmp_path_factory.mktemp("checkpoint") / "x.safetensors"
    state = build_backbone("resnet18").state_dict()
    provenance = {"recipe": {"precision": "bf16"}}
    Checkpoint(
        arch="resnet18", method="test", state_dict=state, provenance=provenance
    ).save(file)
    return file


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Config -> a checkpoint of another kind of trunk."""
    files = {}
    for config, arch in OTHER_TRUNKS.items():
        torch.manual_seed(1)
        state = archs.build_trunk(arch).state_dict()
        files[config] = tmp_path_factory.mktemp("checkpoint") / "other.safetensors"
        Checkpoint(arch=arch, method="test", state_dict=state).save(files[config])
    return files


def command(config, data, out, *more):
    train_net = str(ROOT / "detection" / "train_net.py")
    return [
        sys.executable,
        train_net,
        "--config-file",
        config,
        "--data",
        data,
        "--out",
        out,
        *more,
    ]


def detect(config, data, out, *more):
    args = [str(a) for a in command(config, data, out, *more)]
    return subprocess.run(
        args, capture_output=True, text=True, env=ENV, timeout=1200, check=False
    )


def detect_here(config, data, out, *more):
    """The same in this process, which has torch already; on one thread, as the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        words = ["--config-file", config, "--data", data, "--out", out, *more]
        return program.main(["detect", *map(str, words)])
    finally:
        torch.set_num_threads(threads)


def interrupted(number, rows, config, data, out, *more):
    """Start, send signal `number` once metrics.jsonl has `rows` rows; the exit status."""
    args = [str(a) for a in command(config, data, out, *more)]
    process = subprocess.Popen(
        args, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    metrics = Path(out) / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= rows:
            process.send_signal(number)
            break
        time.sleep(0.01)
    process.wait(60)
    assert not (Path(out) / "model_final.pth").exists(), (
        "the run ended before the signal"
    )
    return process.returncode


def assert_same_run(a, b):
    for key, value in weights(a).items():
        assert torch.equal(value, weights(b)[key]), key
    assert (Path(a) / "metrics.jsonl").read_text() == (
        Path(b) / "metrics.jsonl"
    ).read_text()
    assert numbers(a) == numbers(b)


def test_faster_rcnn_from_start_to_end(tiny_root, x, tmp_path, caplog, capsys):
    config = "tiny_faster_rcnn_R_18_FPN"
    whole = tmp_path / "whole"
    engine = ("--engine", "torchvision")
    assert detect_here(config, tiny_root, whole, *engine, "--checkpoint", x, *SIX) == 0
    rows, _ = store.read(whole / "results.jsonl")
    first = rows[0]
    assert first.checkpoint == Checkpoint.load(x).digest
    columns = (first.task, first.dataset, first.split, first.engine)
    assert columns == ("faster_rcnn", "scenes", "val", "torchvision")
    metrics = ("AP", "AP50", "AP75", "APs", "APm", "APl")
    assert {r.metric for r in rows} == {f"bbox_{metric}" for metric in metrics}
    # SIX is no protocol's
    assert first.protocol.startswith("detection-") and not first.protocol.endswith(
        "-v1"
    )
    assert len(list((whole / "pictures").glob("*.png"))) == 2
    assert (whole / first.provenance["predictions"]).is_file()
    assert all(r.provenance["pretraining"] == {"precision": "bf16"} for r in rows)
    # A ResNet-18 has 1.814 billion at 224 x 224, without its classifier
    cost = first.provenance["trunk"]
    assert (cost["parameters"], cost["sides"]) == (11_176_512, [128, 192])
    assert cost["gflops"] == pytest.approx(1.814 * 128 * 192 / 224**2, rel=1e-3)
    assert first.origin["images_per_second"] > 0
    assert json.loads((whole / "progress.json").read_text())["done"] == 2
    assert set(json.loads((whole / "per_category.json").read_text())["bbox"]) == set(
        "0123456789"
    )
    # The same command again prints the numbers and adds none.
    before = (whole / "results.jsonl").read_bytes()
    caplog.clear()
    assert detect_here(config, tiny_root, whole, *engine, "--checkpoint", x, *SIX) == 0
    assert "bbox_AP50" in caplog.text
    assert (whole / "results.jsonl").read_bytes() == before
    # Another experiment does not continue this one.
    capsys.readouterr()
    other = (*engine, "--checkpoint", x, *SIX, "SOLVER.BASE_LR", "0.5")
    assert detect_here(config, tiny_root, whole, *other) == 2
    said = capsys.readouterr().err
    assert "SOLVER.BASE_LR" in said and said.count("\n") == 1


VIT = "tiny_faster_rcnn_ViT_SFP"  # AdamW's state, a rate for each layer


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "config", [f"tiny_{t}_rcnn_R_18_FPN" for t in ("mask", "keypoint")] + [VIT]
)
def test_killed_and_resumed(tiny_root, x, others, tmp_path, *, config, engine):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    file = others.get(config, x)
    more = ("--engine", engine, "--checkpoint", file, "--resume", *SIX)
    more += ("MODEL.TRUNK.DROP_PATH", "0.3") if config == VIT else ()
    done = detect(config, tiny_root, whole, *more)  # a process as those that follow
    assert done.returncode == 0, done.stderr
    assert interrupted(signal.SIGTERM, 1, config, tiny_root, broken, *more) == 75
    assert interrupted(signal.SIGKILL, 4, config, tiny_root, broken, *more) == -9
    done = detect(config, tiny_root, broken, *more)
    assert done.returncode == 0, done.stderr
    assert_same_run(whole, broken)
    rows, _ = store.read(whole / "results.jsonl")
    assert {(r.arch, r.engine) for r in rows} == {(Checkpoint.load(file).arch, engine)}
    # Without some of its rows the run is not done, and adds those without training again
    before = numbers(whole)
    cut = (whole / "results.jsonl").read_bytes().splitlines(keepends=True)[:2]
    (whole / "results.jsonl").write_bytes(b"".join(cut))
    again = detect(config, tiny_root, whole, *more)
    assert again.returncode == 0, again.stderr
    lines = (whole / "results.jsonl").read_bytes().splitlines(keepends=True)
    assert lines[:2] == cut and len(lines) == len(before) and numbers(whole) == before


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes(tiny_root, x, tmp_path, engine):
    """By a user's command, stopped by a signal and continued (numbers: test_two_ranks.py)."""
    config, out = "tiny_mask_rcnn_R_18_FPN", tmp_path / "run"
    more = ("--engine", engine, "--num-gpus", "2", "--checkpoint", x)
    more += ("INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MIN_SIZE_TEST", "64")
    assert interrupted(signal.SIGTERM, 1, config, tiny_root, out, *more) == 75
    done = detect(config, tiny_root, out, *more)
    assert done.returncode == 0, done.stderr
    assert len(read_metrics(out)) == 3
    assert {row.engine for row in store.read(out / "results.jsonl")[0]} == {engine}
    assert not [*out.glob(".splits*"), *out.glob(".predictions*")]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_losses_fall_and_ap_rises(tmp_path, engine):
    from backbench.datasets import embedded

    data = embedded.build(tmp_path / "data")
    short = ("SOLVER.MAX_ITER", "60", "SOLVER.STEPS", "(50,)")
    short += ("DATASETS.TEST", "('keypoints_scenes_val_8',)")
    flags = ("--engine", engine, "MODEL.WEIGHTS", "random", *short)
    done = detect("demo_keypoint_rcnn_R_18_FPN", data, tmp_path / "run", *flags)
    assert done.returncode == 0, done.stderr
    losses = [row["loss"] for row in read_metrics(tmp_path / "run")]
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])
    value = {
        r.metric: r.value for r in store.read(tmp_path / "run" / "results.jsonl")[0]
    }
    assert value["bbox_AP"] > 1 and value["keypoints_AP"] > 1


@pytest.mark.slow
def test_seeds_are_runs_of_their_own(tiny_root, x, tmp_path, capsys):
    more = ("--checkpoint", x, "--seeds", "2", "SOLVER.MAX_ITER", "1")
    config = "tiny_faster_rcnn_R_18_FPN"
    assert detect_here(config, tiny_root, tmp_path, *more) == 0
    rows, _ = store.read(tmp_path)
    assert {row.seed for row in rows} == {0, 1}
    assert len({row.column for row in rows}) * 2 == len(rows)
    assert detect_here(config, tiny_root, tmp_path, *more, "SEED", "3") == 2
    assert "--seed (or --seeds) and SEED: give one of them" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trained_detector_is_scored_again(tiny_root, x, tmp_path):
    import shutil

    config = "tiny_faster_rcnn_R_18_FPN"
    data, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(tiny_root / "scenes", data / "scenes")
    flags = ("--checkpoint", x)
    done = detect(config, data, out, "--eval-only", *flags)
    assert done.returncode == 2 and "no trained detector to evaluate" in done.stderr
    assert not out.exists()
    assert detect(config, data, out, *flags).returncode == 0
    first = (out / "results.jsonl").read_bytes()
    other = ("--eval-only", *flags, "DATASETS.TEST", "('scenes_val_3',)")
    for _ in range(2):  # again: it is finished, and adds nothing
        done = detect(config, data, out, *other)
        assert done.returncode == 0, done.stderr
    file = data / "scenes" / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    content["annotations"].pop()
    file.write_text(json.dumps(content))
    done = detect(config, data, out, "--eval-only", *flags)
    assert done.returncode == 0, done.stderr
    assert (out / "results.jsonl").read_bytes() == first
    found = [
        store.read(f)[0] for f in sorted((out / "evaluations").glob("*/results.jsonl"))
    ]
    scored_on = sorted(rows[0].provenance["val"].split(":")[0] for rows in found)
    assert scored_on == ["scenes_val_2", "scenes_val_3"]
    assert {rows[0].checkpoint for rows in found} == {Checkpoint.load(x).digest}
    changed = ("--eval-only", *flags, "SOLVER.BASE_LR", "0.5")
    done = detect(config, data, out, *changed)
    assert done.returncode == 2 and "SOLVER.BASE_LR" in done.stderr


def on_two_nodes(config, root, out, ways, *more):
    """One command on two machines, both this one; `ways`: the words and environment of each."""
    words = ["--config-file", config, "--data", root, "--out", out, *more]
    running = []
    for own, env in ways:
        command = [sys.executable, ROOT / "detection" / "train_net.py", *own, *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        running.append(
            subprocess.Popen(
                [str(w) for w in command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return [
        (process.communicate(timeout=300)[0], process.returncode) for process in running
    ]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_nodes_by_hand_and_by_slurm_are_two_processes(
    tiny_root, x, tmp_path, engine
):
    """Bit by bit; test_two_ranks.py compares those with one process."""
    config = "tiny_mask_rcnn_R_18_FPN"
    more = (
        "--engine",
        engine,
        "--checkpoint",
        x,
        "INPUT.MIN_SIZE_TRAIN",
        "(64,)",
        "INPUT.MIN_SIZE_TEST",
        "64",
        "MODEL.DEVICE",
        "cpu",
    )
    assert (
        detect(config, tiny_root, tmp_path / "one", "--num-gpus", "2", *more).returncode
        == 0
    )
    port = free_ports()[0]
    hand = []
    for rank in "01":
        words = ["--num-machines", "2", "--machine-rank", rank]
        hand.append(([*words, "--dist-url", f"tcp://127.0.0.1:{port}"], {}))
    port = free_ports()[0]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SLURM_NTASKS": "2"}
    two = ["--num-machines", "2"]
    slurm = [(two, {**meet, "SLURM_PROCID": r, "SLURM_LOCALID": "0"}) for r in "01"]
    for name, ways in (("hand", hand), ("slurm", slurm)):
        out = tmp_path / name
        for said, status in on_two_nodes(config, tiny_root, out, ways, *more):
            assert status == 0, said
        a, b = (
            torch.load(f / "model_final.pth")["model"] for f in (tmp_path / "one", out)
        )
        assert all(torch.equal(a[key], b[key]) for key in a)
        assert numbers(out) == numbers(tmp_path / "one")
        assert not [*out.glob(".splits*"), *out.glob(".predictions*")]
    again = on_two_nodes(config, tiny_root, tmp_path / "hand", hand, *more)
    assert [status for _, status in again] == [0, 0] and "already finished" in again[0][
        0
    ]
    scored = (*more, "TEST.DETECTIONS_PER_IMAGE", "5")
    flagged = [([*words, "--eval-only"], env) for words, env in hand]
    again = on_two_nodes(config, tiny_root, tmp_path / "hand", flagged, *scored)
    assert [status for _, status in again] == [0, 0], again
    assert [*(tmp_path / "hand" / "evaluations").glob("*/results.jsonl")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num-machines", "2"], "--dist-url tcp://HOST:PORT"),
        (
            ["--num-machines", "2", "--machine-rank", "2"],
            "from 0 to --num-machines 2 - 1",
        ),
        (["--dist-url", "auto"], "give tcp://HOST:PORT"),
        (
            ["--num-machines", "2", "--dist-url", "tcp://127.0.0.1:99999"],
            "give tcp://HOST:PORT",
        ),
    ],
)
def test_flags_of_several_machines_are_checked(
    tiny_root, x, tmp_path, capsys, *, words, said
):
    status = detect_here(
        "tiny_mask_rcnn_R_18_FPN", tiny_root, tmp_path, "--checkpoint", x, *words
    )
    assert status == 2 and said in capsys.readouterr().err


def test_a_task_of_slurms_keeps_its_cpus(tiny_root, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = ("MODEL.WEIGHTS", "random", "MODEL.DEVICE", "cpu")
    run = run_of_config("tiny_mask_rcnn_R_18_FPN", tiny_root, tmp_path, words)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        process_group.seat_of_task(dataclasses.replace(run, task_rank=1, local_rank=0))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("installed", [True, False])
def test_auto_is_detectron2_where_it_is_installed(
    tmp_path, monkeypatch, caplog, *, installed
):
    if installed:
        pytest.importorskip(
            "detectron2", reason="Detectron2 is not installed: `make detectron2`"
        )
    else:
        monkeypatch.setattr(train_net.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level("INFO", logger="backbench"):
        run = run_of_config(
            "tiny_mask_rcnn_R_18_FPN", tmp_path, tmp_path, engine="auto"
        )
    assert run.engine == ("detectron2" if installed else "torchvision")
    assert ("Detectron2 is not installed" in caplog.text) != installed


@pytest.mark.slow
@needs_detectron2
def test_the_converter_and_the_detector_give_a_row_that_the_judge_takes(
    tiny_root, tmp_path
):
    """As typed, without --engine: the converter's line, then the detector with the keys in it."""
    from backbench.board.board import collect
    from backbench.published import judging_rules, published

    torch.manual_seed(1)
    key = next(n.key for n in published.rows() if n.key.startswith("lorac:4:lorac:"))
    file, pkl, out = tmp_path / "x.safetensors", tmp_path / "x.pkl", tmp_path / "run"
    Checkpoint(
        arch="resnet18",
        method="test",
        state_dict=build_backbone("resnet18").state_dict(),
        provenance={"expected": [key]},
    ).save(file)
    tool = [
        sys.executable,
        str(ROOT / "tools" / "convert_to_d2.py"),
        str(file),
        str(pkl),
    ]
    made = subprocess.run(
        tool, capture_output=True, text=True, env=ENV, check=True
    ).stdout
    assert "--engine detectron2" in made
    words = made[made.index("MODEL.WEIGHTS") :].split("\n")[0].split()
    assert detect_here("tiny_faster_rcnn_R_18_FPN", tiny_root, out, *words) == 0
    board = collect([out])
    assert {column.engine for column in board.columns} == {"detectron2"}
    assert {row.checkpoint for row in board.rows} == {Checkpoint.load(file).digest}
    numbers = [n for n in published.lookup(key) if n.task == "faster_rcnn"]
    wanted = {judging_rules.column_of(n) for n in numbers}
    measured = {
        dataclasses.replace(
            c, dataset="coco2017", protocol="detection-1x-v1", split=w.split
        )
        for c in board.columns
        for w in wanted
    }
    assert wanted <= measured, (
        "but for the set and the schedule it is the judge's column"
    )


CONFIG = "tiny_faster_rcnn_R_18_FPN"


@pytest.fixture
def packed(tiny_root, tmp_path):
    """The scenes with train in a zip file and val in a tar file."""
    base = tmp_path / "packed" / "scenes"
    shutil.copytree(tiny_root / "scenes" / "annotations", base / "annotations")
    with zipfile.ZipFile(base / "train2017.zip", "w") as out:
        for file in (tiny_root / "scenes" / "train2017").iterdir():
            out.write(file, f"train2017/{file.name}")
    with tarfile.open(base / "val2017.tar", "w") as out:
        out.add(tiny_root / "scenes" / "val2017", "val2017")
    return tmp_path / "packed"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_detector_does_not_see_where_its_images_lie(
    tiny_root, packed, tmp_path, engine
):
    rows, metrics = [], []
    for root in (tiny_root, packed):
        out = tmp_path / f"of {root.name}"
        words = [
            "--config-file",
            CONFIG,
            "--engine",
            engine,
            "--data",
            root,
            "--out",
            out,
        ]
        short = [
            "MODEL.WEIGHTS",
            "random",
            "SOLVER.MAX_ITER",
            "2",
            "SOLVER.STEPS",
            "()",
        ]
        assert program.main(["detect", *map(str, words), *short]) == 0
        metrics.append((out / "metrics.jsonl").read_text())
        found, problems = store.read(out / RESULTS_FILE)
        assert found and not problems
        for row in found:
            held = row.provenance.pop("container", {})
            kinds = {split: about["kind"] for split, about in held.items()}
            assert kinds == (
                {} if root == tiny_root else {"train": "zip", "val": "tar"}
            )
        rows.append([dataclasses.replace(row, origin={}) for row in found])
    assert metrics[0] == metrics[1] and rows[0] == rows[1]


def test_what_names_the_images_is_the_same(tiny_root, packed, tmp_path, capsys):
    runs = [run_of_config(CONFIG, root, tmp_path / "x") for root in (tiny_root, packed)]
    folder, archive = map(train_net.prepare, runs)
    for a, b in ((folder.train, archive.train), (folder.val, archive.val)):
        assert (a.fingerprint, a.contents) == (b.fingerprint, b.contents)
        assert contents.whole(a.images) == contents.whole(b.images)
    (packed / "coco").symlink_to(packed / "scenes")
    assert program.main(["data", "check", "coco", "--data", str(packed)]) == 0
    file = packed / "scenes" / "annotations" / "instances_val2017.json"
    about = json.loads(file.read_text())
    about["images"][0]["file_name"] = "../train2017/1.jpg"
    file.write_text(json.dumps(about))
    with pytest.raises(
        BadInput, match=r"val2017\.tar: 1 of \d+ images are missing, first \.\./"
    ):
        train_net.prepare(run_of_config(CONFIG, packed, tmp_path / "y"))
    assert program.main(["data", "check", "coco", "--data", str(packed)]) == 1
    assert "1 of" in capsys.readouterr().out
