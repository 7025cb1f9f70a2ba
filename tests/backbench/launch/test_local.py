"""Jobs as processes of this machine: N at a time, retries, stops, kills, full disks."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections import Counter

import pytest
import torch

from backbench import cli
from backbench.config import configs_dir
from backbench.launch.attempt import Attempt, Pool, Store
from backbench.launch.grid import Job


def most_at_once(lab, out):
    """The largest number of attempts that overlap in time."""
    spans = [
        (a["start"], a["end"])
        for s in Store(lab.root / out).statuses().values()
        for a in s["attempts"]
    ]
    return max(sum(start <= moment < end for start, end in spans) for moment, _ in spans)


def test_grid_runs_n_at_a_time_and_again_runs_nothing(lab):
    for name in ("d1", "d2", "d3"):
        lab.dataset(name, steps=3, step_s=0.1)
    grid = lab.grid(checkpoints=[lab.checkpoints("a", "b")], evaluate=lab.linear("d1", "d2", "d3"))
    cluster = lab.cluster("local", jobs=3)
    assert lab.run(grid, cluster, "runs") == 0
    assert most_at_once(lab, "runs") == 3
    assert set(lab.states("runs").values()) == {"done"} and len(lab.values("runs")) == 6
    attempts = lab.attempts("runs")
    assert lab.run(grid, cluster, "runs") == 0
    assert lab.attempts("runs") == attempts
    assert lab.values("runs") == lab.reference(grid)


def test_finished_runs_are_recognised_without_the_launchers_files(lab):
    grid = lab.grid(checkpoints=[lab.checkpoints("a", "b")], evaluate=lab.linear("d1", "d2"))
    assert lab.run(grid, lab.cluster("local"), "runs") == 0
    subprocess.run(["rm", "-r", str(lab.root / "runs" / ".launch")], check=True)
    assert lab.run(grid, lab.cluster("local"), "runs") == 0
    assert lab.attempts("runs") == {}


def test_pretraining_import_and_probes_in_order(lab):
    """recipe x values x seeds -> pretrain; foreign file -> import; both -> probes."""
    (lab.root / "foreign.pth").write_bytes(b"somebody else's weights")
    grid = lab.grid(
        recipes=[{"recipe": "demo_random", "vary": {"optim.lr": [0.1, 0.2]}, "seeds": [0, 1]}],
        checkpoints=[{"path": str(lab.root / "foreign.pth"), "name": "theirs"}],
        evaluate=lab.linear("d1"),
    )
    assert lab.run(grid, lab.cluster("local", jobs=4), "runs") == 0
    statuses = Store(lab.root / "runs").statuses()
    records = lab.view("runs").records
    assert (
        sorted(r.job.verb for r in records.values())
        == ["import"] + ["linear"] * 5 + ["pretrain"] * 4
    )
    for name, record in records.items():
        for need in record.job.needs:
            assert statuses[need]["attempts"][-1]["end"] <= statuses[name]["attempts"][0]["start"]
    assert len(lab.values("runs")) == 5
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.parametrize(("fault", "attempts"), [("broken", 3), ("bad", 1)])
def test_failing_job_stops_says_so_and_blocks_what_needs_it(lab, capsys, fault, attempts):
    lab.dataset("pretrain", steps=1, fault=fault)
    lab.dataset("flaky", steps=1, fault="now and then", times=2)
    grid = lab.grid(
        recipes=["demo_random"],
        checkpoints=[lab.checkpoints("a")],
        evaluate=lab.linear("d1", "flaky"),
    )
    cluster = lab.cluster("local")
    assert lab.run(grid, cluster, "runs") == 1
    states = lab.states("runs")
    (bad,) = [n for n in states if n.startswith("pretrain/")]
    (flaky,) = [n for n in states if n.startswith("a-") and "flaky" in n]
    assert states[bad] == "failed" and list(states.values()).count("blocked") == 2
    assert states[flaky] == "done" and lab.attempts("runs")[flaky] == ["failed", "failed", "done"]
    assert len(lab.attempts("runs")[bad]) == attempts
    capsys.readouterr()
    assert lab.launch("status", "runs", "--once") == 0
    text = capsys.readouterr().out
    assert "1 failed" in text and "2 blocked" in text and "2 done" in text
    if fault == "broken":
        assert re.search(
            rf"failed +{bad}  failed 3 times for the same reason: backbench: broken", text
        )
    else:
        assert re.search(rf"failed +{bad}  backbench: the fault that was ordered", text)
    assert lab.run(grid, cluster, "runs") == 0, "run leaves failed jobs to retry"
    assert len(lab.attempts("runs")[bad]) == attempts
    lab.dataset("pretrain", steps=1)
    assert lab.launch("retry", "runs") == 0
    assert set(lab.states("runs").values()) == {"done"}
    lab.dataset("flaky", steps=1)
    assert lab.values("runs") == lab.reference(grid)


def test_time_limit_saves_and_continues_until_no_progress_is_made(lab):
    lab.dataset("steady", steps=30, step_s=0.2)
    lab.dataset("stuck", steps=2, step_s=0.5)
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("steady", "stuck"))
    cluster = lab.cluster(
        "local", resources={"default": {"hours": 8 / 3600}}
    )  # told to save after 4 s
    assert lab.run(grid, cluster, "runs") == 0
    (steady,) = [n for n in lab.states("runs") if "steady" in n]
    assert (
        lab.attempts("runs")[steady][0] == "time limit"
        and lab.attempts("runs")[steady][-1] == "done"
    )
    for name in ("steady", "stuck"):
        lab.dataset(name, steps=30 if name == "steady" else 2)
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.slow
def test_job_whose_time_is_too_short_for_one_step_stops(lab):
    lab.dataset("stuck", steps=2, step_s=60)
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("stuck"))
    assert (
        lab.run(grid, lab.cluster("local", resources={"default": {"hours": 1 / 3600}}), "runs") == 1
    )
    (reason,) = [s["reason"] for s in Store(lab.root / "runs").statuses().values()]
    assert "3 time limits ended at the same point" in reason and "give it more hours" in reason


def test_stops_cleanly_and_continues(lab):
    for name in ("d1", "d2"):
        lab.dataset(name, steps=100, step_s=0.05)
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "d2"))
    cluster = lab.cluster("local")
    process = lab.background(grid, cluster, "runs")
    lab.until("runs", lambda s: len(list(lab.root.glob("runs/*/*/progress.json"))) == 2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75 and "the same command continues" in said
    assert lab.attempts("runs") and all(
        hows == ["stopped"] for hows in lab.attempts("runs").values()
    )
    assert set(lab.states("runs").values()) == {"stopped"}
    assert len(list(lab.root.glob("runs/*/*/state.json"))) == 2, "both saved"
    for name in ("d1", "d2"):
        lab.dataset(name, steps=100)
    assert lab.run(grid, cluster, "runs") == 0
    assert lab.values("runs") == lab.reference(grid)


def test_next_launcher_waits_for_what_a_killed_one_left_running(lab):
    """kill -9 while a pretraining runs: its probes come after it, and it is not started twice."""
    lab.dataset("pretrain", steps=100, step_s=0.1)
    grid = lab.grid(recipes=["demo_random"], evaluate=lab.linear("d1", "d2"))
    cluster = lab.cluster("local", jobs=2)
    process = lab.background(grid, cluster, "runs")
    lab.until("runs", lambda s: "running" in s.values())
    process.kill()
    process.wait()  # not for the job, which holds the same pipe
    assert lab.run(grid, cluster, "runs") == 0
    assert set(lab.states("runs").values()) == {"done"}
    assert all(hows == ["done"] for hows in lab.attempts("runs").values())
    assert lab.values("runs") == lab.reference(grid)


def test_gpus_asked_for_where_none_are_handed_out(lab):
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    assert lab.run(grid, lab.cluster("local", resources={"default": {"gpus": 1}}), "runs") == 0


def test_cancel_leaves_processes_of_other_machines_alone(lab, monkeypatch, caplog):
    lab.dataset("d1", steps=100, step_s=0.1)
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    process = lab.background(grid, lab.cluster("local"), "runs")
    lab.until("runs", lambda s: list(s.values()) == ["running"])
    killed = []
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        patch.setattr(os, "kill", lambda *a: killed.append(a))
        assert lab.launch("cancel", "runs") == 0
    assert not killed and "cancel it there" in caplog.text
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


@pytest.mark.slow
def test_killed_launcher_leaves_jobs_to_finish_and_starts_none_twice(lab):
    for name in ("d1", "d2", "d3"):
        lab.dataset(name, steps=40, step_s=0.05)
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "d2", "d3"))
    cluster = lab.cluster("local")
    process = lab.background(grid, cluster, "runs")
    lab.until("runs", lambda s: list(s.values()).count("running") == 2, 30)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert lab.run(grid, cluster, "runs") == 0
    assert sorted(lab.attempts("runs").values()) == [["done"]] * 3
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.slow
def test_killed_job_is_tried_again(lab):
    """kill -9 of a command and of the process above it: the first counts as a failure, the second as ended."""
    lab.dataset("d1", steps=60, step_s=0.05, save_every=5)
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    process = lab.background(grid, lab.cluster("local"), "runs")
    lab.until("runs", lambda s: list(s.values()) == ["running"], 30)
    (status,) = Store(lab.root / "runs").statuses().values()
    above = status["attempts"][-1]["pid"]
    child = int(subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(above)]))
    os.kill(child, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == 0
    (hows,) = lab.attempts("runs").values()
    assert hows == ["failed", "done"]
    (status,) = Store(lab.root / "runs").statuses().values()
    assert status["attempts"][0]["reason"] == "killed by SIGKILL (out of memory?)"
    lab.dataset("d1", steps=60)
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.slow
def test_cancel_then_run_again(lab):
    lab.dataset("d1", steps=400, step_s=0.05)
    lab.dataset("d2", steps=400, step_s=0.05)
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "d2"))
    cluster = lab.cluster("local", jobs=1)
    process = lab.background(grid, cluster, "runs")
    lab.until("runs", lambda s: sorted(s.values()) == ["queued", "running"], 30)
    assert lab.launch("cancel", "runs") == 0
    process.communicate(timeout=30)
    assert process.returncode == 1
    assert set(lab.states("runs").values()) == {"cancelled"}
    for name in ("d1", "d2"):
        lab.dataset(name, steps=400)
    assert lab.run(grid, cluster, "runs") == 0
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.slow
def test_watch_picks_up_new_checkpoints_and_running_pretrainings(lab):
    """A file that appears, and a pretraining started by hand that ends while we watch."""
    folder = lab.root / "by_hand"
    folder.mkdir()
    (folder / "run.json").write_text(
        json.dumps({"verb": "pretrain", "identity": {}, "created": "then"})
    )
    grid = lab.grid(checkpoints=[lab.checkpoints(), str(folder)], evaluate=lab.linear("d1"))
    process = lab.background(grid, lab.cluster("local"), "runs", "--watch", "--interval", "0.3")
    time.sleep(1.0)
    lab.checkpoints("a")
    lab.until("runs", lambda s: list(s.values()) == ["done"], 30)
    lab.checkpoints("b")
    (lab.root / "ck" / "b.safetensors").rename(folder / "backbone.safetensors")
    lab.until("runs", lambda s: any("by_hand" in n for n in s) and set(s.values()) == {"done"}, 30)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert "waiting for" in said and {n.split("-")[0] for n in lab.states("runs")} <= {
        "a",
        "b",
        "by_hand",
    }


@pytest.mark.slow
def test_two_launchers_of_one_folder(lab, capsys):
    lab.dataset("d1", steps=100, step_s=0.05)
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    process = lab.background(grid, lab.cluster("local"), "runs")
    lab.until("runs", lambda s: list(s.values()) == ["running"], 30)
    assert lab.run(grid, lab.cluster("local"), "runs") == 2
    assert "another launcher is running jobs here" in capsys.readouterr().err
    assert process.wait(30) == 0


def test_gpus_are_handed_out(lab):
    """Two GPUs, jobs of one GPU each, four places: two at a time, each with a GPU of its own."""
    for name in ("d1", "d2", "d3"):
        lab.dataset(name, steps=3, step_s=0.1, tell="CUDA_VISIBLE_DEVICES")
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "d2", "d3"))
    cluster = lab.cluster("local", jobs=4, gpus=2, resources={"default": {"gpus": 1}})
    assert lab.run(grid, cluster, "runs") == 0
    assert most_at_once(lab, "runs") == 2
    assert {f.read_text() for f in lab.root.glob("runs/*/*/told")} == {"0", "1"}


@pytest.mark.slow
def test_full_disk_loses_no_result(lab):
    """A 256 KiB disk: the job fails with the system's words, what was there stays, and room makes the rest finish."""
    disk = lab.root / "runs"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "lab", str(disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a small disk: {mount.stderr.strip()}")
    try:
        grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
        assert lab.run(grid, lab.cluster("local"), "runs") == 0
        before = lab.values("runs")
        (disk / "ballast").write_bytes(b"x" * 4096 * ((os.statvfs(disk).f_bavail) - 3))
        grid = lab.grid(
            checkpoints=[lab.checkpoints("a", "b", "c")], evaluate=lab.linear("d1", "d2", "d3")
        )
        assert lab.run(grid, lab.cluster("local"), "runs") != 0
        assert before.items() <= lab.values("runs").items()
        (disk / "ballast").unlink()
        lab.launch("retry", "runs")
        assert lab.run(grid, lab.cluster("local"), "runs") == 0
        assert lab.values("runs") == lab.reference(grid)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_pool_runs_any_list_of_verbs(lab):
    """What another program needs: jobs with files that show they are done, N at a time."""
    store = Store(lab.root / "runs")
    lab.checkpoints("a")
    file = str(lab.root / "ck" / "a.safetensors")

    def copy(name, *needs):
        out = str(lab.root / "runs" / name / "copy")
        argv = ("export", file, "--format", "timm", "--out", out)
        return Job(
            name=name, argv=argv, like="export", cells=(name,), needs=needs, makes=f"{name}/copy"
        )

    pool = Pool(store.runs, at_once=2)
    command = tuple(lab.command)
    for job in (copy("second", "first"), copy("first"), copy("third", "nowhere")):
        pool.add(Attempt(job=job, runs=str(store.runs), command=command))
    assert pool.run()
    assert pool.outcomes == {"first": "done", "second": "done", "third": "blocked"}


@pytest.mark.slow
def test_real_verbs_from_a_published_file_to_the_table(lab, tiny_root):
    """A published checkpoint through everything a grid can ask for, with no stand-in."""
    from support import foreign_fixtures

    published = lab.root / "published.pth"
    torch.save(foreign_fixtures.moco(foreign_fixtures.known_resnet("resnet18")), published)
    engines = ["torchvision"] + (["detectron2"] if importlib.util.find_spec("detectron2") else [])
    detection = "tiny_faster_rcnn_R_18_FPN"
    short = lab.root / "short.yaml"
    short.write_text(
        f"base: {configs_dir()}/transfer/finetune_demo\nprotocol: finetune-short-v1\n"
        'parts: {"100": {length: {epochs: 1}}}\n'
    )
    grid = lab.grid(
        data=str(tiny_root),
        checkpoints=[
            {"path": str(published), "method": "moco_v2", "epochs": 200, "name": "MoCo v2"}
        ],
        lists=str(tiny_root / "lists"),
        evaluate=[
            {"verb": "linear", "protocol": "linear_tiny", "datasets": ["digits"]},
            {"verb": "semisup", "percent": 10, "protocol": "semisup_tiny"},
            {"verb": "finetune", "protocol": str(short), "datasets": ["digits"]},
            {"verb": "analyze", "datasets": ["digits"], "args": ["--recipe", "analyze_tiny"]},
            *({"verb": "detect", "config": detection, "engine": engine} for engine in engines),
        ],
    )
    cluster = lab.cluster(
        "local", fake=False, jobs=2, resources={"default": {"accelerator": "cpu", "cpus": 1}}
    )
    assert lab.run(grid, cluster, "runs") == 0
    states = lab.states("runs")
    assert set(states.values()) == {"done"}
    verbs = Counter(record.job.verb for record in lab.view("runs").records.values())
    alone = dict.fromkeys(("import", "linear", "semisup", "finetune", "analyze", "export"), 1)
    assert verbs == {**alone, "detect": len(engines)}
    table = lab.root / "table.csv"
    assert cli.main(["leaderboard", str(lab.root / "runs"), "--csv", str(table)]) == 0
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    (row,) = rows
    filled = {key.split("/")[0] for key, value in row.items() if "/" in key and value}
    assert (
        row["name"] == "MoCo v2" and {"linear", "semi_10pct", "finetune", "faster_rcnn"} <= filled
    ), filled
    attempts = lab.attempts("runs")
    assert lab.run(grid, cluster, "runs") == 0
    assert lab.attempts("runs") == attempts
