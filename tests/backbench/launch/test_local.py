"""The launcher on this machine: N jobs at a time, stopped, killed, cancelled, watching."""

import importlib.util
import json
import os
import re
import shutil
import signal
import time
from collections import Counter

import pytest
import torch

from backbench.recipes.config import configs_dir
from backbench.records import store


def test_grid_runs_n_at_a_time_and_again_runs_nothing(lab):
    lab.dataset("d1", "d2", steps=3, step_s=0.1)
    grid = lab.grid(
        checkpoints=[lab.checkpoints("a", "b")], evaluate=lab.linear("d1", "d2")
    )
    cluster = lab.cluster("local", jobs=3)
    assert lab.run(grid, cluster, "runs") == 0
    assert lab.most_at_once("runs") == 3
    assert set(lab.states("runs").values()) == {"done"}
    assert len(lab.values("runs")) == 4
    attempts = lab.attempts("runs")
    assert lab.run(grid, cluster, "runs") == 0
    assert lab.attempts("runs") == attempts
    assert lab.values("runs") == lab.reference(grid)
    # Without the launcher's own files the results are proof enough
    shutil.rmtree(lab.root / "runs" / ".launch")
    assert lab.run(grid, cluster, "runs") == 0
    assert lab.attempts("runs") == {}
    assert len(lab.values("runs")) == 4


def test_a_run_that_lost_rows_is_not_done_and_gets_them_back(lab):
    """10 of 30 rows are there, as after a restored backup: submitted again, 20 appended."""
    lab.dataset("d1", rows=15)
    grid = lab.grid(
        checkpoints=[lab.checkpoints("a", "b")], evaluate=lab.linear("d1", pack=2)
    )
    cluster = lab.cluster("local")
    assert lab.run(grid, cluster, "runs") == 0
    before = lab.values("runs")
    assert len(before) == 30
    (file,) = lab.root.glob("runs/packs/*/results.jsonl")
    kept = "".join(file.read_text().splitlines(keepends=True)[5:15])
    file.write_text(kept)
    assert lab.run(grid, cluster, "runs") == 0
    assert file.read_text().startswith(kept)
    assert lab.values("runs") == before
    attempts = lab.attempts("runs")
    assert [len(hows) for hows in attempts.values()] == [2]
    assert lab.run(grid, cluster, "runs") == 0
    assert lab.attempts("runs") == attempts


@pytest.mark.slow
def test_pretraining_import_and_probes_in_order(lab):
    """A recipe is pretrained, a foreign file is imported, and both are probed after that."""
    foreign = lab.root / "foreign.pth"
    foreign.write_bytes(b"somebody else's weights")
    rates = {"optim.lr": [0.1, 0.2]}
    grid = lab.grid(
        recipes=[{"recipe": "demo_random", "vary": rates, "seeds": [0, 1]}],
        checkpoints=[{"path": str(foreign), "name": "theirs"}],
        evaluate=lab.linear("d1"),
    )
    assert lab.run(grid, lab.cluster("local", jobs=4), "runs") == 0
    statuses = lab.statuses("runs")
    records = lab.look("runs").records
    verbs = Counter(record.job.verb for record in records.values())
    assert verbs == {"import": 1, "linear": 5, "pretrain": 4}
    for name, record in records.items():
        start = statuses[name]["attempts"][0]["start"]
        for need in record.job.needs:
            assert statuses[need]["attempts"][-1]["end"] <= start
    assert len(lab.values("runs")) == 5
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.parametrize(
    ("kind", "number", "states"),
    [
        ("local", "SIGINT", ["stopped", "stopped"]),
        ("debug", "SIGTERM", ["lost", "stopped"]),  # the second never started
    ],
)
def test_stops_cleanly_and_continues(lab, kind, number, states):
    lab.dataset("d1", "d2", steps=100, step_s=0.05)
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "d2"))
    cluster = lab.cluster(kind)
    count = states.count("stopped")
    process = lab.background(grid, cluster, "runs")
    lab.until("runs", lambda _: len(lab.run_files("runs", "progress.json")) == count)
    process.send_signal(signal.Signals[number])
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75
    assert f"stopped by {number}" in said
    assert "the same command continues" in said
    assert list(lab.attempts("runs").values()) == [["stopped"]] * count
    assert sorted(lab.states("runs").values()) == states
    assert len(lab.run_files("runs", "state.json")) == count, "what ran has saved"
    lab.dataset("d1", "d2", steps=100)
    assert lab.run(grid, cluster, "runs") == 0
    assert lab.values("runs") == lab.reference(grid)


def test_the_first_failure_ends_debug(lab):
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "d2"))
    assert lab.run(grid, lab.cluster("debug", fake=False, command="false"), "runs") == 1
    assert list(lab.attempts("runs").values()) == [["failed"]]


def kill_launcher(lab, grid, cluster):
    """kill -9 for a launcher whose first job runs.

    The process is returned, as its job still writes to its pipe, which must stay open.
    """
    process = lab.background(grid, cluster, "runs")
    lab.until("runs", lambda states: "running" in states.values(), 30)
    process.kill()
    assert process.wait() < 0
    return process


@pytest.mark.slow
@pytest.mark.parametrize(("then", "at_once"), [("local", 2), ("debug", 1)])
@pytest.mark.parametrize("first", ["local", "debug"])
def test_killed_launcher_leaves_jobs_to_finish_and_starts_none_twice(
    lab, first, then, at_once
):
    """A pretraining runs: it finishes on its GPU, others run beside it, its probe comes after."""
    lab.dataset("pretrain", steps=40, step_s=0.1)
    lab.dataset("d1", tell="CUDA_VISIBLE_DEVICES")
    named = [lab.checkpoints("a")]
    grid = lab.grid(
        recipes=["demo_random"], checkpoints=named, evaluate=lab.linear("d1")
    )
    gpus = {"gpus": 2, "resources": {"default": {"gpus": 1}}}
    killed = kill_launcher(lab, grid, lab.cluster(first, jobs=1, **gpus))
    assert lab.run(grid, lab.cluster(then, **gpus), "runs") == 0
    killed.stderr.close()
    assert list(lab.attempts("runs").values()) == [["done"]] * 3
    told = {file.read_text() for file in lab.run_files("runs", "told")}
    assert lab.most_at_once("runs") == len(told) == at_once
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "hows"),
    [
        ("local", 0, [["killed", "done"], ["done"]]),
        ("debug", 1, [[None]]),
    ],
)
def test_a_job_outlives_the_process_above_it(lab, kind, code, hows):
    """kill -9 for that one: no other job starts, and the launcher does not end, before the job."""
    lab.dataset("d1", "d2", steps=40, step_s=0.05)
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "d2"))
    process = lab.background(grid, lab.cluster(kind, jobs=1), "runs")
    lab.until("runs", lambda _: lab.run_files("runs", "progress.json"), 30)
    (status,) = lab.statuses("runs").values()
    os.kill(status["attempts"][-1]["pid"], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code and re.search(r"a-\S+: killed", said)
    assert sorted(lab.attempts("runs").values(), key=len, reverse=True) == hows
    assert len(lab.values("runs")) == len(hows)
    assert kind == "debug" or lab.most_at_once("runs") == 1


@pytest.mark.slow
def test_a_job_that_fails_after_its_launcher_was_killed_is_said(lab, caplog):
    caplog.set_level("INFO")
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    cluster = lab.cluster(
        "local", fake=False, command="sh -c 'sleep 5; echo no luck; exit 2'"
    )
    killed = kill_launcher(lab, grid, cluster)
    assert lab.run(grid, cluster, "runs") == 1
    killed.stderr.close()
    assert list(lab.attempts("runs").values()) == [["bad input"]]
    assert re.search(r"failed a-\S+: no luck", caplog.text)


@pytest.mark.slow
def test_cancel_then_run_again(lab):
    lab.dataset("d1", "d2", steps=400, step_s=0.05)
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "d2"))
    cluster = lab.cluster("local", jobs=1)
    process = lab.background(grid, cluster, "runs")
    lab.until(
        "runs", lambda states: sorted(states.values()) == ["queued", "running"], 30
    )
    assert lab.launch("cancel", "runs") == 0
    process.communicate(timeout=30)
    assert process.returncode == 1
    assert set(lab.states("runs").values()) == {"cancelled"}
    lab.dataset("d1", "d2", steps=400)
    assert lab.run(grid, cluster, "runs") == 0
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.slow
def test_watch_picks_up_new_checkpoints_and_running_pretrainings(lab):
    """A file that appears, and a pretraining started by hand that ends while we watch."""
    folder = lab.root / "by_hand"
    folder.mkdir()
    about = {"verb": "pretrain", "identity": {}, "created": "then"}
    (folder / "run.json").write_text(json.dumps(about))
    grid = lab.grid(
        checkpoints=[lab.checkpoints(), str(folder)], evaluate=lab.linear("d1")
    )
    process = lab.background(
        grid, lab.cluster("local"), "runs", "--watch", "--interval", "0.3"
    )
    # 1. A file appears
    time.sleep(1.0)
    lab.checkpoints("a")
    lab.until("runs", lambda states: list(states.values()) == ["done"], 30)

    # 2. The pretraining ends
    def is_by_hand_done(states):
        is_there = any("by_hand" in name for name in states)
        return is_there and set(states.values()) == {"done"}

    lab.checkpoints("b")
    (lab.root / "ck" / "b.safetensors").rename(folder / "backbone.safetensors")
    lab.until("runs", is_by_hand_done, 30)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert "waiting for" in said
    names = {name.split("-")[0] for name in lab.states("runs")}
    assert names <= {"a", "b", "by_hand"}


@pytest.mark.slow
def test_real_verbs_from_a_published_file_to_the_table(lab, tiny_root):
    from support import foreign_fixtures

    file = lab.root / "published.pth"
    torch.save(foreign_fixtures.moco(foreign_fixtures.known_resnet("resnet18")), file)
    short = lab.root / "short.yaml"
    short.write_text(
        f"base: {configs_dir()}/transfer/finetune_demo\nprotocol: finetune-short-v1\n"
        'parts: {"100": {length: {epochs: 1}}}\n'
    )
    published = {
        "path": str(file),
        "method": "moco_v2",
        "epochs": 200,
        "name": "MoCo v2",
    }
    evaluate = [
        {"verb": "linear", "protocol": "linear_tiny", "datasets": ["digits"]},
        {"verb": "semisup", "percent": 10, "protocol": "semisup_tiny"},
        {"verb": "finetune", "protocol": str(short), "datasets": ["digits"]},
        {
            "verb": "analyze",
            "datasets": ["digits"],
            "args": ["--recipe", "analyze_tiny"],
        },
    ]
    engines = ["torchvision"]
    if importlib.util.find_spec("detectron2"):
        engines.append("detectron2")
    for engine in engines:
        detection = {"config": "tiny_faster_rcnn_R_18_FPN", "engine": engine}
        evaluate.append({"verb": "detect", **detection})
    grid = lab.grid(
        data=str(tiny_root),
        checkpoints=[published],
        lists=str(tiny_root / "lists"),
        evaluate=evaluate,
    )
    resources = {"default": {"accelerator": "cpu", "cpus": 1}}
    cluster = lab.cluster("local", fake=False, jobs=2, resources=resources)
    assert lab.run(grid, cluster, "runs") == 0
    assert set(lab.states("runs").values()) == {"done"}
    verbs = Counter(record.job.verb for record in lab.look("runs").records.values())
    # No export: Detectron2 takes the checkpoint itself
    assert verbs == {
        "import": 1,
        "linear": 1,
        "semisup": 1,
        "finetune": 1,
        "analyze": 1,
        "detect": len(engines),
    }
    rows, problems = store.read(lab.root / "runs")
    assert not problems
    assert {row.name for row in rows} == {"MoCo v2"}
    wanted = {"linear", "semi_10pct", "finetune", "analyze", "faster_rcnn"}
    assert {row.task for row in rows} == wanted
    attempts = lab.attempts("runs")
    assert lab.run(grid, cluster, "runs") == 0
    assert lab.attempts("runs") == attempts
