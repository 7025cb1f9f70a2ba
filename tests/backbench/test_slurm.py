"""The launcher on a real Slurm: Debian's packages, one node on loopback, started by a fixture."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from backbench import launch
from backbench.jobs import Store

pytestmark = pytest.mark.usefixtures("slurm")


def ids(lab, out):
    return {name: record.id for name, record in lab.view(out).records.items()}


def one(names, text):
    (found,) = [n for n in names if text in n]
    return found


def test_twelve_jobs_run_as_one_array_and_again_submits_nothing(lab, shell):
    grid = lab.grid(checkpoints=[lab.checkpoints("a", "b", "c")], evaluate=lab.linear("d1", "d2", "d3", "d4"))
    cluster = lab.slurm()
    assert lab.run(grid, cluster, "runs") == 0
    submitted = ids(lab, "runs")
    assert len(submitted) == 12 and len({i.split("_")[0] for i in submitted.values()}) == 1
    assert lab.run(grid, cluster, "runs") == 0  # while they run
    lab.until_done("runs")
    assert lab.run(grid, cluster, "runs") == 0  # when they are done
    assert ids(lab, "runs") == submitted
    assert lab.values("runs") == lab.reference(grid)


def test_preempted_and_requeued_jobs_end_with_the_same_numbers(lab, shell):
    slow = {"steps": 40, "step_s": 0.1, "save_every": 5}
    for name in ("preempted", "requeued"):
        lab.dataset(name, **slow)
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("preempted", "requeued"))
    assert lab.run(grid, lab.slurm(), "runs") == 0
    lab.until("runs", lambda s: list(s.values()) == ["running"] * 2)
    lab.until("runs", lambda s: len(list(lab.root.glob("runs/*/*/state.json"))) == 2)
    known = ids(lab, "runs")
    first = known[one(known, "preempted")]
    shell(f"scancel --signal TERM {first}")  # what Slurm sends at preemption: a warning, then the user's signal
    shell(f"scancel --signal USR2 {first}")
    shell(f"scontrol requeue {known[one(known, 'requeued')]}")
    lab.until_done("runs", 90)
    for name, hows in lab.attempts("runs").items():
        assert len(hows) == 2 and hows[-1] == "done", (name, hows)
    for name in ("preempted", "requeued"):
        lab.dataset(name, **{**slow, "step_s": 0})
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.slow
def test_launcher_that_dies_during_sbatch_loses_nothing(lab, monkeypatch):
    """Slurm has the array, the launcher has not written its number, and submitit not yet the jobs' files."""
    import submitit

    grid = lab.grid(checkpoints=[lab.checkpoints("a", "b")], evaluate=lab.linear("d1", "d2"))
    cluster = lab.slurm()

    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(submitit.core.utils.JobPaths, "move_temporary_file", die)
        assert lab.run(grid, cluster, "runs") == 130
    assert [r.id for r in launch.read_records(Store(lab.root / "runs")).values()] == [None] * 4
    arrays = len(launch.queue())
    assert lab.run(grid, cluster, "runs") == 0
    assert len(launch.queue()) == arrays, "submitted a second time"
    lab.until_done("runs")
    assert {len(hows) for hows in lab.attempts("runs").values()} == {1}
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.slow
def test_killed_launcher(lab):
    """kill -9 as soon as the first array is on record; the next launcher brings the whole grid to its end."""
    grid = lab.grid(checkpoints=[lab.checkpoints("a", "b", "c")], evaluate=lab.linear("d1", "d2"), recipes=[])
    cluster = lab.slurm()
    process = lab.background(grid, cluster, "runs", "--watch")
    end = time.monotonic() + 30
    while not list(lab.root.glob("runs/.launch/submissions/*.json")) and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    time.sleep(1.0)
    assert lab.run(grid, cluster, "runs") == 0
    lab.until_done("runs")
    assert len(lab.values("runs")) == 6
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.slow
def test_cancelled_job_is_seen_as_cancelled_without_slurmdbd(lab, shell):
    lab.dataset("long", steps=600, step_s=0.1)
    lab.dataset("short", steps=1)
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("long", "short"))
    cluster = lab.slurm()
    assert lab.run(grid, cluster, "runs") == 0
    lab.until("runs", lambda s: sorted(s.values()) == ["done", "running"])
    known = ids(lab, "runs")
    long = one(known, "long")
    shell(f"scancel {known[long]}")
    lab.until("runs", lambda s: s[long] == "cancelled", 20)
    status = json.loads(
        (lab.root / "runs" / ".launch" / "status" / f"{lab.view('runs').records[long].job.key}.json").read_text()
    )
    assert status["state"] == "cancelled", "Slurm forgets after minutes; the file does not"
    lab.dataset("long", steps=600, step_s=0)
    assert lab.launch("retry", "runs") == 0
    lab.until_done("runs")
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.slow
def test_cancel_and_blocked(lab):
    lab.dataset("pretrain", steps=600, step_s=0.1)
    grid = lab.grid(recipes=["demo_random"], evaluate=lab.linear("d1", "d2"))
    cluster = lab.slurm()
    assert lab.run(grid, cluster, "runs") == 0
    lab.until("runs", lambda s: sorted(s.values()) == ["running", "waiting", "waiting"])
    assert lab.launch("cancel", "runs", "pretrain") == 0
    lab.until("runs", lambda s: sorted(s.values()) == ["blocked", "blocked", "cancelled"], 30)
    lab.dataset("pretrain", steps=600, step_s=0)
    assert lab.run(grid, cluster, "runs") == 0
    lab.until_done("runs")
    assert lab.values("runs") == lab.reference(grid)


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ({"partition": "mian"}, r"partition 'mian'; did you mean 'main'"),
        ({"gpus": 3}, r"gpus 3; partition 'main' has at most 2"),
        ({"cpus": 64}, r"cpus x tasks_per_node 64; partition 'main' has at most 4"),
        ({"memory_gb": 100}, r"memory_gb 100; partition 'main' has at most 7.8"),
        ({"hours": 3}, r"hours 3; partition 'main' has at most 2"),
        ({"constraint": "lop"}, r"constraint 'lop' in partition 'main'; did you mean 'loop'"),
        ({"nodes": 2}, r"nodes 2; partition 'main' has at most 1"),
    ],
)
def test_resources_that_no_partition_has_are_refused(lab, capsys, resources, says):
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    before = launch.queue()
    assert lab.run(grid, lab.slurm(**resources), "runs") == 2
    message = capsys.readouterr().err
    assert len(message.strip().splitlines()) == 1 and says in message.replace("\\", "")
    assert launch.queue().keys() == before.keys() and not (lab.root / "runs" / ".launch" / "submissions").exists()
