"""A task on its node, without a Slurm: what its command learns of Slurm, and what Slurm says of it."""

import pytest

from backbench.launch import slurm_client
from backbench.launch.clusters import read_cluster
from backbench.launch.expansion import Expansion
from backbench.launch.grid import read_grid
from backbench.launch.job import Job
from backbench.launch.records import Ledger
from backbench.launch.slurm_task import SlurmTask


@pytest.mark.parametrize(
    ("tasks", "rank"), [(1, "not set"), pytest.param(2, "0", id="one of two")]
)
def test_only_the_ranks_of_one_job_learn_their_rank(lab, monkeypatch, tasks, rank):
    """A command alone in its job would wait for others that are not there."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_PROCID", "0")
    lab.dataset("d1", tell="SLURM_PROCID")
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    (job,) = Expansion(read_grid(grid), lab.root / "runs", where="grid").jobs
    cluster = read_cluster(lab.slurm(tasks_per_node=tasks))
    task = SlurmTask.on(cluster, job, Ledger(lab.root / "runs"))
    assert task.run() == "done"
    assert [file.read_text() for file in lab.run_files("runs", "told")] == [rank]


@pytest.mark.parametrize(
    ("said", "standing"),
    [
        ("JobState=RUNNING Reason=None\n PreemptTime=None", "running"),
        ("JobState=RUNNING Reason=None\n PreemptTime=Unknown", "running"),
        ("JobState=RUNNING Reason=None", "running"),
        ("JobState=RUNNING Reason=None\n PreemptTime=2026-02-03T04:05:06", "preempted"),
        ("JobState=COMPLETING Reason=None\n PreemptTime=None", "ending"),
        ("JobState=PENDING Reason=BeginTime\n PreemptTime=None", "ending"),
    ],
    ids=["by None", "by Unknown", "by nothing", "by a time", "completing", "requeued"],
)
def test_how_a_running_job_stands(stand_in_slurm, said, standing):
    stand_in_slurm.says("scontrol", f"JobId=12 JobName=x\n {said}\n")
    assert slurm_client.standing("12") == standing
    assert stand_in_slurm.called("scontrol") == ["show job 12"]


def test_where_slurm_cannot_be_asked_nothing_is_said(stand_in_slurm):
    stand_in_slurm.says("scontrol", "", status=1)
    assert slurm_client.standing("12") is None


def test_a_task_knows_how_many_there_are_and_the_limit_of_the_job(lab):
    job = Job(name="a", argv=("pretrain",), like="x", cells=())
    asked = {"nodes": 3, "tasks_per_node": 2, "gpus": 2, "hours": 0.5}
    cluster = read_cluster(lab.slurm(**asked))
    task = SlurmTask.on(cluster, job, Ledger(lab.root / "runs"))
    assert (task.tasks, task.limit_s) == (6, 1800)
