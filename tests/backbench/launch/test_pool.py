"""Processes of this machine side by side: their order, their GPUs, their end."""

import subprocess
from dataclasses import replace

import pytest

from backbench.launch import local
from backbench.launch.attempt import Attempt
from backbench.launch.job import Job
from backbench.launch.local import JobPool
from backbench.launch.records import Ledger


def test_a_job_that_asks_for_gpus_runs_where_none_are_handed_out(lab):
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    cluster = lab.cluster("local", resources={"default": {"gpus": 1}})
    assert lab.run(grid, cluster, "runs") == 0


def test_each_running_job_has_a_gpu_of_its_own(lab):
    lab.dataset("d1", "d2", "d3", steps=3, step_s=0.1, tell="CUDA_VISIBLE_DEVICES")
    grid = lab.grid(
        checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "d2", "d3")
    )
    cluster = lab.cluster("local", jobs=4, gpus=2, resources={"default": {"gpus": 1}})
    assert lab.run(grid, cluster, "runs") == 0
    assert lab.most_at_once("runs") == 2
    told = {file.read_text() for file in lab.run_files("runs", "told")}
    assert told == {"0", "1"}


def test_order_of_jobs(lab):
    """First added, first started; what `needs` names must end well, what `after` names must end."""
    runs = lab.root / "runs"
    lab.dataset("bad", fault="bad")
    lab.checkpoints("a")
    file = str(lab.root / "ck" / "a.safetensors")

    def probe(name, dataset="d1", **more):
        argv = ("linear", file, "--datasets", dataset, "--data", str(lab.data))
        argv += ("--protocol", "lorac", "--out", str(runs / name))
        return Job(name=name, argv=argv, like="linear", cells=(name,), **more)

    pool = JobPool(runs, at_once=1)
    for job in (
        probe("last", after=("bad", "good")),
        probe("user", needs=("bad",)),
        probe("user's user", needs=("user",)),
        probe("nobody's user", needs=("nowhere",)),
        probe("bad", "bad"),
        probe("good"),
    ):
        pool.add(Attempt(job=job, ledger=pool.ledger, command=tuple(lab.command)))
    assert pool.run()
    assert pool.outcomes == {
        "last": "done",
        "user": "blocked",
        "user's user": "blocked",
        "nobody's user": "blocked",
        "bad": "failed",
        "good": "done",
    }
    starts = {}
    for name, status in lab.statuses("runs").items():
        starts[name] = status["attempts"][0]["start"]
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
    assert not pool.running
    assert polite.poll() is not None
    assert deaf.poll() is None
    deaf.kill()
    deaf.wait()


class Orphan:
    """A job whose launcher is gone: a process holds its lock, and its status says what it does."""

    def __init__(self, runs, *, gpu_ids=""):
        self.ledger = Ledger(runs)
        self.job = Job(
            name="x/one", argv=("linear",), like="x", cells=("one",), needs=("gone",)
        )
        with self.ledger.alone(self.job) as lock:
            self.process = subprocess.Popen(["sleep", "600"], pass_fds=(lock,))
        self.says("running", gpu_ids=gpu_ids)

    def says(self, state, **note):
        attempt = {"start": 1.0, "end": None, "how": state, **note}
        status = {"name": self.job.name, "state": state, "attempts": [attempt]}
        self.ledger.write_status(self.job, status)

    def ends(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def orphan(tmp_path):
    made = []

    def make(**more):
        made.append(Orphan(tmp_path / "runs", **more))
        return made[0]

    yield make
    for one in made:
        one.ends()


@pytest.mark.parametrize(
    ("state", "outcome"),
    [("done", "done"), ("failed", "failed"), ("cancelled", "cancelled")],
)
def test_a_job_that_runs_already_is_waited_for(tmp_path, orphan, state, outcome):
    """It writes how it ended; nobody can ask how its process exits."""
    ours = orphan()
    pool = JobPool(tmp_path / "runs", at_once=1)
    attempt = Attempt(job=ours.job, ledger=pool.ledger)
    assert pool.adopt(attempt)
    steps = iter([lambda: None, lambda: None, lambda: ours.says(state), ours.ends])

    def refill():
        step = next(steps, None)
        if step is not None:
            assert list(pool.running) == ["x/one"]
            step()
        return False

    assert pool.run(refill=refill)
    assert pool.outcomes == {"x/one": outcome}
    assert next(steps, None) is None


def test_a_job_that_does_not_run_is_not_adopted(tmp_path, orphan):
    ours = orphan()
    ours.ends()
    pool = JobPool(tmp_path / "runs", at_once=1)
    assert not pool.adopt(Attempt(job=ours.job, ledger=pool.ledger))
    assert not pool.running


def test_a_job_that_runs_already_keeps_its_gpus(tmp_path, orphan):
    ours = orphan(gpu_ids="1,GPU-8a3f")
    pool = JobPool(tmp_path / "runs", at_once=4, gpus=3)
    assert pool.adopt(Attempt(job=ours.job, ledger=pool.ledger))
    assert pool._free_gpus == {0, 2}
    ours.says("done")
    ours.ends()
    assert pool.run()
    assert pool._free_gpus == {0, 1, 2}


def test_an_adopted_job_that_was_preempted_starts_again(tmp_path, orphan, monkeypatch):
    ours = orphan()
    pool = JobPool(tmp_path / "runs", at_once=1)
    started = []
    monkeypatch.setattr(
        pool, "_start", lambda attempt: started.append(attempt) or pool._waiting.clear()
    )
    attempt = Attempt(job=replace(ours.job, needs=()), ledger=pool.ledger)
    assert pool.adopt(attempt)
    ours.says("queued")
    ours.ends()
    assert pool.run()
    assert started == [attempt]
    assert pool.outcomes == {}
