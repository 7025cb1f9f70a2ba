"""Processes of this machine side by side: their order, their GPUs, their end."""

import subprocess

from backbench.launch import local
from backbench.launch.attempt import Attempt
from backbench.launch.job import Job
from backbench.launch.local import JobPool


def test_gpus_asked_for_where_none_are_handed_out(lab):
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    assert (
        lab.run(grid, lab.cluster("local", resources={"default": {"gpus": 1}}), "runs")
        == 0
    )


def test_gpus_are_handed_out(lab):
    lab.dataset("d1", "d2", "d3", steps=3, step_s=0.1, tell="CUDA_VISIBLE_DEVICES")
    grid = lab.grid(
        checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "d2", "d3")
    )
    cluster = lab.cluster("local", jobs=4, gpus=2, resources={"default": {"gpus": 1}})
    assert lab.run(grid, cluster, "runs") == 0
    assert lab.most_at_once("runs") == 2
    assert {f.read_text() for f in lab.root.glob("runs/*/*/told")} == {"0", "1"}


def test_order_of_jobs(lab):
    """First added, first started; what `needs` names must end well, what `after` names must end."""
    runs = lab.root / "runs"
    lab.dataset("bad", fault="bad")

    def probe(name, dataset="d1", **more):
        argv = ("linear", file, "--datasets", dataset, "--data", str(lab.data))
        argv += ("--protocol", "lorac", "--out", str(runs / name))
        return Job(name=name, argv=argv, like="linear", cells=(name,), **more)

    lab.checkpoints("a")
    file = str(lab.root / "ck" / "a.safetensors")
    pool = JobPool(runs, at_once=1)
    jobs = [probe("last", after=("bad", "good")), probe("user", needs=("bad",))]
    jobs += [
        probe("user's user", needs=("user",)),
        probe("nobody's user", needs=("nowhere",)),
    ]
    for job in (*jobs, probe("bad", "bad"), probe("good")):
        pool.add(Attempt(job=job, ledger=pool.ledger, command=tuple(lab.command)))
    assert pool.run()
    users = dict.fromkeys(("user", "user's user", "nobody's user"), "blocked")
    assert pool.outcomes == {**users, "bad": "failed", "good": "done", "last": "done"}
    starts = {
        name: s["attempts"][0]["start"] for name, s in lab.statuses("runs").items()
    }
    assert sorted(starts, key=starts.get) == ["bad", "good", "last"]


def test_a_stopped_pool_waits_and_leaves_the_deaf_to_end_by_themselves(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(local, "PATIENCE_S", 0.5)
    pool = JobPool(tmp_path, at_once=2)
    polite = subprocess.Popen(["sleep", "60"])
    command = ["sh", "-c", "trap '' TERM; echo; exec sleep 60"]
    deaf = subprocess.Popen(command, stdout=subprocess.PIPE)
    deaf.stdout.readline()
    for name, process in (("polite", polite), ("deaf", deaf)):
        pool.running[name] = local.Running(None, process, set())
    assert not pool.run(stopped=lambda: True)
    assert not pool.running and polite.poll() is not None and deaf.poll() is None
    deaf.kill()
    deaf.wait()
