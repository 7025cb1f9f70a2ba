"""Processes of this machine side by side: their order, their GPUs, their end."""

from __future__ import annotations

import subprocess
import time

import pytest

from backbench.launch.attempt import Attempt
from backbench.launch.job import Job
from backbench.launch.pool import JobPool, ProcessPool


def test_gpus_asked_for_where_none_are_handed_out(lab):
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    assert lab.run(grid, lab.cluster("local", resources={"default": {"gpus": 1}}), "runs") == 0


def test_gpus_are_handed_out(lab):
    """Two GPUs, jobs of one GPU each, four places: two at a time, each with a GPU of its own."""
    for name in ("d1", "d2", "d3"):
        lab.dataset(name, steps=3, step_s=0.1, tell="CUDA_VISIBLE_DEVICES")
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "d2", "d3"))
    cluster = lab.cluster("local", jobs=4, gpus=2, resources={"default": {"gpus": 1}})
    assert lab.run(grid, cluster, "runs") == 0
    assert lab.most_at_once("runs") == 2
    assert {f.read_text() for f in lab.root.glob("runs/*/*/told")} == {"0", "1"}


def test_pool_runs_any_list_of_verbs(lab):
    """What another program needs: jobs with files that show they are done, N at a time."""
    runs = lab.root / "runs"
    lab.checkpoints("a")
    file = str(lab.root / "ck" / "a.safetensors")

    def copy(name, *needs):
        out = str(runs / name / "copy")
        argv = ("export", file, "--format", "timm", "--out", out)
        return Job(
            name=name, argv=argv, like="export", cells=(name,), needs=needs, makes=f"{name}/copy"
        )

    pool = JobPool(runs, at_once=2)
    command = tuple(lab.command)
    for job in (copy("second", "first"), copy("first"), copy("third", "nowhere")):
        pool.add(Attempt(job=job, runs=str(runs), command=command))
    assert pool.run()
    assert pool.outcomes == {"first": "done", "second": "done", "third": "blocked"}


def sleep(seconds, status=0):
    return subprocess.Popen(["sh", "-c", f"sleep {seconds}; exit {status}"])


def run_all(pool, start):
    """Start whatever may start until nothing is left; the order in which names began and ended."""
    began, over = [], {}
    while len(pool):
        for name in pool.ready():
            began.append(name)
            pool.start(name, start(name))
        over.update(pool.ended())
        over.update(pool.blocked())
        time.sleep(0.01)
    return began, over


def test_order_of_processes():
    """Added first, started first; needs must end well, after must end; who cannot start says
    why."""
    pool = ProcessPool(1, done=["earlier"])
    pool.add("last", after=["bad", "good"])
    pool.add("user", needs=["bad"])
    pool.add("user's user", needs=["user"])
    pool.add("bad", needs=["earlier"])
    pool.add("good")
    began, over = run_all(pool, lambda name: sleep(0, 7 if name == "bad" else 0))
    assert began == ["bad", "good", "last"]
    assert over == {"bad": 7, "good": 0, "last": 0, "user": "bad", "user's user": "user"}


@pytest.mark.parametrize("kill", [True, False])
def test_end_waits_and_then_kills_or_leaves(kill):
    """One process ends when it is told to, one would not."""
    pool = ProcessPool(2)
    polite = sleep(60)
    deaf = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo; exec sleep 60"], stdout=subprocess.PIPE
    )
    deaf.stdout.readline()
    for name, process in (("polite", polite), ("deaf", deaf)):
        pool.add(name)
        pool.start(name, process)
    pool.end(0.5, kill=kill)
    assert len(pool) == 0 and polite.poll() is not None
    assert (deaf.poll() is not None) == kill
    deaf.kill()
    deaf.wait()
