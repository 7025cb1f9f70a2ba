"""Runs the command as a user does: results, kill -9 and signals, refusals, several processes."""

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
    overrides,
    run_of_config,
    weights,
)
from support.slurm_cluster import free_ports

from backbench.cli import program
from backbench.detection import measure, process_group, train_net
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
TWO = ("SOLVER.MAX_ITER", "2", "SOLVER.STEPS", "(1,)")
SMALL_IMAGES = overrides({"INPUT.MIN_SIZE_TRAIN": "(64,)", "INPUT.MIN_SIZE_TEST": 64})
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def x(tmp_path_factory):
    """Write a ResNet-18 checkpoint."""
    torch.manual_seed(1)
    file = tmp_path_factory.mktemp("checkpoint") / "x.safetensors"
    checkpoint = Checkpoint(
        arch="resnet18",
        method="test",
        state_dict=build_backbone("resnet18").state_dict(),
        provenance={"recipe": {"precision": "bf16"}},
    )
    checkpoint.save(file)
    return file


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Write a checkpoint of the trunk of each config for other kinds of trunks."""
    files = {}
    for config, arch in OTHER_TRUNKS.items():
        torch.manual_seed(1)
        state = archs.build_trunk(arch).state_dict()
        files[config] = tmp_path_factory.mktemp("checkpoint") / "other.safetensors"
        Checkpoint(arch=arch, method="test", state_dict=state).save(files[config])
    return files


def words_of(config, data, out, *more):
    """Return the command's words behind its name."""
    words = ["--config-file", config, "--data", data, "--out", out, *more]
    return [str(word) for word in words]


def command(config, data, out, *more):
    """Return the command as a process of its own."""
    train_net = str(ROOT / "detection" / "train_net.py")
    return [sys.executable, train_net, *words_of(config, data, out, *more)]


def detect(config, data, out, *more):
    """Run the command in a process of its own."""
    return subprocess.run(
        command(config, data, out, *more),
        capture_output=True,
        text=True,
        env=ENV,
        timeout=1200,
        check=False,
    )


def detect_here(config, data, out, *more):
    """Run the command in this process, which has torch already, on one thread, as the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return program.main(["detect", *words_of(config, data, out, *more)])
    finally:
        torch.set_num_threads(threads)


def interrupted(number, rows, config, data, out, *more):
    """Start the command and send signal `number` once metrics.jsonl has `rows` rows.

    Returns the exit status.
    """
    process = subprocess.Popen(
        command(config, data, out, *more),
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = Path(out) / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= rows:
            process.send_signal(number)
            break
        time.sleep(0.01)
    process.wait(60)
    ended_before = (Path(out) / "model_final.pth").exists()
    assert not ended_before, "the run ended before the signal"
    return process.returncode


def assert_same_run(a, b):
    for key, value in weights(a).items():
        assert torch.equal(value, weights(b)[key]), key
    assert (a / "metrics.jsonl").read_text() == (b / "metrics.jsonl").read_text()
    assert numbers(a) == numbers(b)


@pytest.mark.usefixtures("one_trunk")
def test_faster_rcnn_from_start_to_end(tiny_root, x, tmp_path, caplog, capsys):
    config = "tiny_faster_rcnn_R_18_FPN"
    whole = tmp_path / "whole"
    engine = ("--engine", "torchvision")
    assert detect_here(config, tiny_root, whole, *engine, "--checkpoint", x, *TWO) == 0
    rows, _ = store.read(whole / "results.jsonl")
    first = rows[0]
    assert first.checkpoint == Checkpoint.load(x).digest
    columns = (first.task, first.dataset, first.split, first.engine)
    assert columns == ("faster_rcnn", "scenes", "val", "torchvision")
    metrics = ("AP", "AP50", "AP75", "APs", "APm", "APl")
    assert {r.metric for r in rows} == {f"bbox_{metric}" for metric in metrics}
    # No shipped protocol has two iterations.
    assert first.protocol.startswith("detection-")
    assert not first.protocol.endswith("-v1")
    assert len(list((whole / "pictures").glob("*.png"))) == 2
    assert (whole / first.provenance["predictions"]).is_file()
    assert all(r.provenance["pretraining"] == {"precision": "bf16"} for r in rows)
    # A ResNet-18 has 1.814 GFLOPs at 224 x 224, without its classifier.
    cost = first.provenance["trunk"]
    assert (cost["parameters"], cost["sides"]) == (11_176_512, [128, 192])
    assert cost["gflops"] == pytest.approx(1.814 * 128 * 192 / 224**2, rel=1e-3)
    assert first.origin["images_per_second"] > 0
    assert json.loads((whole / "progress.json").read_text())["done"] == 2
    per_category = json.loads((whole / "per_category.json").read_text())
    assert set(per_category["bbox"]) == set("0123456789")
    # The same command again prints the numbers and adds none.
    before = (whole / "results.jsonl").read_bytes()
    caplog.clear()
    assert detect_here(config, tiny_root, whole, *engine, "--checkpoint", x, *TWO) == 0
    assert "bbox_AP50" in caplog.text
    assert (whole / "results.jsonl").read_bytes() == before
    # Another experiment does not continue this one.
    capsys.readouterr()
    other = (*engine, "--checkpoint", x, *TWO, "SOLVER.BASE_LR", "0.5")
    assert detect_here(config, tiny_root, whole, *other) == 2
    said = capsys.readouterr().err
    assert "SOLVER.BASE_LR" in said and said.count("\n") == 1


VIT = "tiny_faster_rcnn_ViT_SFP"  # it has AdamW's state, and a rate for each layer


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "config", ["tiny_mask_rcnn_R_18_FPN", "tiny_keypoint_rcnn_R_18_FPN", VIT]
)
def test_killed_and_resumed(tiny_root, x, others, tmp_path, *, config, engine):
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    file = others.get(config, x)
    more = ("--engine", engine, "--checkpoint", file, "--resume", *SIX)
    if config == VIT:
        more += ("MODEL.TRUNK.DROP_PATH", "0.3")
    # This run, too, is a process of its own, as those that follow.
    done = detect(config, tiny_root, whole, *more)
    assert done.returncode == 0, done.stderr
    assert interrupted(signal.SIGTERM, 1, config, tiny_root, broken, *more) == 75
    assert interrupted(signal.SIGKILL, 4, config, tiny_root, broken, *more) == -9
    done = detect(config, tiny_root, broken, *more)
    assert done.returncode == 0, done.stderr
    assert_same_run(whole, broken)
    rows, _ = store.read(whole / "results.jsonl")
    assert {(r.arch, r.engine) for r in rows} == {(Checkpoint.load(file).arch, engine)}
    # Without some of its rows the run is not done, and adds those without training again.
    before = numbers(whole)
    results = whole / "results.jsonl"
    cut = results.read_bytes().splitlines(keepends=True)[:2]
    results.write_bytes(b"".join(cut))
    again = detect(config, tiny_root, whole, *more)
    assert again.returncode == 0, again.stderr
    lines = results.read_bytes().splitlines(keepends=True)
    assert lines[:2] == cut
    assert len(lines) == len(before)
    assert numbers(whole) == before


@pytest.mark.usefixtures("one_trunk")
@pytest.mark.parametrize("gpus", [1, 2])
def test_as_many_ranks_are_started_as_gpus_are_asked_for(
    tiny_root, x, tmp_path, gpus, monkeypatch
):
    """One rank is the command's own process. Ranks find no detections of a killed run."""
    out = tmp_path / "run"
    started = []

    def work_alone(run, p, engine):
        started.append("here")

    def start_ranks(run, p):
        left = list(out.glob(measure.SHARE.format("*")))
        started.append((run.world, left))
        (out / measure.SHARE.format(1)).touch()

    monkeypatch.setattr(train_net, "work", work_alone)
    monkeypatch.setattr(train_net, "start_ranks", start_ranks)
    words = ["--engine", "torchvision", "--num-gpus", str(gpus), "--checkpoint", x]
    for _ in range(2):
        more = (*words, *SIX, *SMALL_IMAGES)
        detect_here("tiny_faster_rcnn_R_18_FPN", tiny_root, out, *more)
    assert started == 2 * (["here"] if gpus == 1 else [(gpus, [])])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes(tiny_root, x, tmp_path, engine):
    """A user's command is stopped by a signal and continued; test_two_ranks.py looks at numbers."""
    config = "tiny_mask_rcnn_R_18_FPN"
    out = tmp_path / "run"
    more = ("--engine", engine, "--num-gpus", "2", "--checkpoint", x, *SMALL_IMAGES)
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
    out = tmp_path / "run"
    short = overrides(
        {
            "MODEL.WEIGHTS": "random",
            "SOLVER.MAX_ITER": 60,
            "SOLVER.STEPS": "(50,)",
            "DATASETS.TEST": "('keypoints_scenes_val_8',)",
        }
    )
    done = detect("demo_keypoint_rcnn_R_18_FPN", data, out, "--engine", engine, *short)
    assert done.returncode == 0, done.stderr
    losses = [row["loss"] for row in read_metrics(out)]
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])
    rows, _ = store.read(out / "results.jsonl")
    value = {row.metric: row.value for row in rows}
    assert value["bbox_AP"] > 1
    assert value["keypoints_AP"] > 1


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
    config = "tiny_faster_rcnn_R_18_FPN"
    data = tmp_path / "data"
    out = tmp_path / "run"
    shutil.copytree(tiny_root / "scenes", data / "scenes")
    flags = ("--checkpoint", x)
    # 1. Before there is a detector
    done = detect(config, data, out, "--eval-only", *flags)
    assert done.returncode == 2
    assert "no trained detector to evaluate" in done.stderr
    assert not out.exists()
    assert detect(config, data, out, *flags).returncode == 0
    first = (out / "results.jsonl").read_bytes()
    # 2. On other images; the second time it is finished, and adds nothing.
    other = ("--eval-only", *flags, "DATASETS.TEST", "('scenes_val_3',)")
    for _ in range(2):
        done = detect(config, data, out, *other)
        assert done.returncode == 0, done.stderr
    # 3. On other annotations
    file = data / "scenes" / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    content["annotations"].pop()
    file.write_text(json.dumps(content))
    done = detect(config, data, out, "--eval-only", *flags)
    assert done.returncode == 0, done.stderr
    # 4. Each is a run of its own below the trained one, whose rows stay.
    assert (out / "results.jsonl").read_bytes() == first
    files = sorted((out / "evaluations").glob("*/results.jsonl"))
    first_rows = [store.read(file)[0][0] for file in files]
    scored_on = sorted(row.provenance["val"].split(":")[0] for row in first_rows)
    assert scored_on == ["scenes_val_2", "scenes_val_3"]
    assert {row.checkpoint for row in first_rows} == {Checkpoint.load(x).digest}
    # 5. Another training's detector is refused.
    changed = ("--eval-only", *flags, "SOLVER.BASE_LR", "0.5")
    done = detect(config, data, out, *changed)
    assert done.returncode == 2
    assert "SOLVER.BASE_LR" in done.stderr


def on_two_nodes(config, root, out, nodes, *more):
    """Run a command on two machines, which both are this one.

    `nodes` are the words and the environment of each. Returns their outputs and exit statuses.
    """
    running = []
    for own_words, own_environment in nodes:
        process = subprocess.Popen(
            command(config, root, out, *own_words, *more),
            env={**ENV, **own_environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.append(process)
    outputs = [process.communicate(timeout=300)[0] for process in running]
    return outputs, [process.returncode for process in running]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_nodes_by_hand_and_by_slurm_are_two_processes(
    tiny_root, x, tmp_path, engine
):
    """They are so bit by bit; test_two_ranks.py compares two processes with one."""
    config = "tiny_mask_rcnn_R_18_FPN"
    more = ("--engine", engine, "--checkpoint", x, *SMALL_IMAGES)
    more += ("MODEL.DEVICE", "cpu")
    one = tmp_path / "one"
    assert detect(config, tiny_root, one, "--num-gpus", "2", *more).returncode == 0
    # 1. By hand, and by Slurm
    meeting = f"tcp://127.0.0.1:{free_ports()[0]}"
    by_hand = []
    for rank in ("0", "1"):
        words = ["--num-machines", "2", "--machine-rank", rank, "--dist-url", meeting]
        by_hand.append((words, {}))
    port = str(free_ports()[0])
    by_slurm = []
    for rank in ("0", "1"):
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": "0",
        }
        by_slurm.append((["--num-machines", "2"], environment))
    for name, nodes in (("hand", by_hand), ("slurm", by_slurm)):
        out = tmp_path / name
        outputs, statuses = on_two_nodes(config, tiny_root, out, nodes, *more)
        assert statuses == [0, 0], outputs
        trained = weights(out)
        for key, value in weights(one).items():
            assert torch.equal(value, trained[key]), key
        assert numbers(out) == numbers(one)
        assert not [*out.glob(".splits*"), *out.glob(".predictions*")]
    # 2. The same again is finished already.
    hand = tmp_path / "hand"
    outputs, statuses = on_two_nodes(config, tiny_root, hand, by_hand, *more)
    assert statuses == [0, 0], outputs
    assert "already finished" in outputs[0]
    # 3. Scoring again
    scoring = [([*words, "--eval-only"], env) for words, env in by_hand]
    more += ("TEST.DETECTIONS_PER_IMAGE", "5")
    outputs, statuses = on_two_nodes(config, tiny_root, hand, scoring, *more)
    assert statuses == [0, 0], outputs
    assert list((hand / "evaluations").glob("*/results.jsonl"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-machines 2", "--dist-url tcp://HOST:PORT"),
        ("--num-machines 2 --machine-rank 2", "from 0 to --num-machines 2 - 1"),
        ("--dist-url auto", "give tcp://HOST:PORT"),
        ("--num-machines 2 --dist-url tcp://127.0.0.1:99999", "give tcp://HOST:PORT"),
    ],
)
def test_flags_of_several_machines_are_checked(
    tiny_root, x, tmp_path, capsys, *, words, said
):
    config = "tiny_mask_rcnn_R_18_FPN"
    more = ("--checkpoint", x, *words.split())
    assert detect_here(config, tiny_root, tmp_path, *more) == 2
    assert said in capsys.readouterr().err


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
    # 1. The converter prints the detector's words.
    file = tmp_path / "x.safetensors"
    checkpoint = Checkpoint(
        arch="resnet18",
        method="test",
        state_dict=build_backbone("resnet18").state_dict(),
        provenance={"expected": [key]},
    )
    checkpoint.save(file)
    tool = str(ROOT / "tools" / "convert_to_d2.py")
    converting = [sys.executable, tool, str(file), str(tmp_path / "x.pkl")]
    converted = subprocess.run(
        converting, capture_output=True, text=True, env=ENV, check=True
    )
    said = converted.stdout
    assert "--engine detectron2" in said
    words = said[said.index("MODEL.WEIGHTS") :].split("\n")[0].split()
    # 2. The detector
    out = tmp_path / "run"
    assert detect_here("tiny_faster_rcnn_R_18_FPN", tiny_root, out, *words) == 0
    board = collect([out])
    assert {column.engine for column in board.columns} == {"detectron2"}
    assert {row.checkpoint for row in board.rows} == {Checkpoint.load(file).digest}
    # 3. But for the set and the schedule, its columns are the judge's.
    printed = [n for n in published.lookup(key) if n.task == "faster_rcnn"]
    wanted = {judging_rules.column_of(n) for n in printed}
    measured = set()
    for column in board.columns:
        for split in {w.split for w in wanted}:
            as_published = dataclasses.replace(
                column, dataset="coco2017", protocol="detection-1x-v1", split=split
            )
            measured.add(as_published)
    assert wanted <= measured


CONFIG = "tiny_faster_rcnn_R_18_FPN"


@pytest.fixture
def packed(tiny_root, tmp_path):
    """Write the scenes with train in a zip file and val in a tar file."""
    base = tmp_path / "packed" / "scenes"
    shutil.copytree(tiny_root / "scenes" / "annotations", base / "annotations")
    with zipfile.ZipFile(base / "train2017.zip", "w") as out:
        for file in (tiny_root / "scenes" / "train2017").iterdir():
            out.write(file, f"train2017/{file.name}")
    with tarfile.open(base / "val2017.tar", "w") as out:
        out.add(tiny_root / "scenes" / "val2017", "val2017")
    return tmp_path / "packed"


@pytest.mark.usefixtures("one_trunk")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_detector_does_not_see_where_its_images_lie(
    tiny_root, packed, tmp_path, engine
):
    config = "tiny_faster_rcnn_ConvNeXt_FPN"
    short = overrides(
        {
            "MODEL.WEIGHTS": "random",
            "MODEL.TRUNK.ARCH": OTHER_TRUNKS[config],
            "SOLVER.MAX_ITER": 2,
            "SOLVER.STEPS": "()",
            "SOLVER.CHECKPOINT_PERIOD": 2,
            "INPUT.MIN_SIZE_TRAIN": "(64,)",
            "INPUT.MIN_SIZE_TEST": 64,
        }
    )
    rows = []
    metrics = []
    for root, containers in (
        (tiny_root, {}),
        (packed, {"train": "zip", "val": "tar"}),
    ):
        out = tmp_path / f"of {root.name}"
        words = words_of(config, root, out, "--engine", engine, *short)
        assert program.main(["detect", *words]) == 0
        metrics.append((out / "metrics.jsonl").read_text())
        found, problems = store.read(out / RESULTS_FILE)
        assert found
        assert not problems
        for row in found:
            held = row.provenance.pop("container", {})
            kinds = {split: about["kind"] for split, about in held.items()}
            assert kinds == containers
        rows.append([dataclasses.replace(row, origin={}) for row in found])
    assert metrics[0] == metrics[1]
    assert rows[0] == rows[1]


def test_what_names_the_images_is_the_same(tiny_root, packed, tmp_path, capsys):
    folder = train_net.prepare(run_of_config(CONFIG, tiny_root, tmp_path / "x"))
    archive = train_net.prepare(run_of_config(CONFIG, packed, tmp_path / "x"))
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
