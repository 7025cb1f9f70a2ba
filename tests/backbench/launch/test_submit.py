"""Arrays that sbatch takes, refuses, or takes and says that it refused."""

import os

import pytest
from support import slurm_cluster

from backbench.cli import launch
from backbench.launch.clusters import read_cluster
from backbench.launch.grid import read_grid
from backbench.launch.plan import CommandCheck
from backbench.launch.records import Ledger
from backbench.launch.slurm import outside_of_any_job

# Shell lines for the stand-in sbatch: what it does, and what it says of that
TIMED_OUT = (
    'echo "sbatch: error: Batch job submission failed: Socket timed out" >&2; exit 1'
)
LIMIT = 'echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1'
TAKEN = 'for i in 0 1; do echo "9_$i|RUNNING|None|$uid" >> squeue.out; done'


def ids(lab):
    return [record.id for record in Ledger(lab.root / "runs").records().values()]


@pytest.fixture
def two(lab):
    """A grid of two jobs, and a cluster file for Slurm that runs one of them at a time."""
    grid = lab.grid(checkpoints=[lab.checkpoints("a", "b")], evaluate=lab.linear("d1"))
    return grid, lab.slurm(jobs=1)


def test_an_array_that_was_taken_although_sbatch_failed(lab, stand_in_slurm, two):
    stand_in_slurm.sbatch(f'cp "$file" sent\n{TAKEN}\n{TIMED_OUT}')
    assert lab.run(*two, "runs") == 0
    assert "--array=0-1%1\n" in (stand_in_slurm.folder / "sent").read_text()
    assert ids(lab) == ["9_0", "9_1"]
    assert len(list(lab.root.glob("runs/.launch/submitit/*/9_?_submitted.pkl"))) == 2
    assert lab.run(*two, "runs") == 0
    assert len(stand_in_slurm.called("sbatch")) == 1, "submitted twice"


def test_an_array_that_shows_up_in_the_queue_later(lab, stand_in_slurm, two, capsys):
    """Nobody could tell at the time: its record stays, and the next launcher knows it by that."""
    stand_in_slurm.sbatch(f'echo "$uid" > uid\n{TIMED_OUT}')
    assert lab.run(*two, "runs") == 1
    assert "sbatch refused linear-lorac-d1: " in capsys.readouterr().err
    assert ids(lab) == [None, None]
    uid = (stand_in_slurm.folder / "uid").read_text().strip()
    jobs = [(f"9_{i}", "PENDING", "Resources", uid) for i in range(2)]
    stand_in_slurm.queue(*jobs)
    assert lab.run(*two, "runs") == 0
    assert ids(lab) == ["9_0", "9_1"]
    assert len(stand_in_slurm.called("sbatch")) == 1


def test_what_was_refused_leaves_no_record_and_is_told_in_a_line(
    lab, stand_in_slurm, two, capsys
):
    answer = "sbatch: error: Batch job submission failed: Invalid qos"
    stand_in_slurm.sbatch(f'echo "{answer}" >&2; exit 1')
    assert lab.run(*two, "runs") == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said == f"backbench: sbatch refused linear-lorac-d1: {answer}"
    assert ids(lab) == []


def test_refused_partway_says_how_many_went(lab, stand_in_slurm, capsys):
    stand_in_slurm.sbatch(
        f'if [ $n -gt 2 ]; then {LIMIT}; fi; echo "Submitted batch job $n"'
    )
    grid = lab.grid(
        checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1", "d2", "d3", "d4")
    )
    cluster = lab.cluster("slurm", max_array=1, resources={"default": {"hours": 0.1}})
    assert lab.run(grid, cluster, "runs") == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "QOSMaxSubmitJobPerUserLimit; 2 of 4 jobs went: run this again later" in said
    assert sorted(ids(lab)) == ["1", "2"]
    jobs = []
    for record in Ledger(lab.root / "runs").records().values():
        jobs.append((record.id, "RUNNING", "None", record.submission.uid))
    stand_in_slurm.queue(*jobs)
    assert lab.run(grid, cluster, "runs") == 1
    assert "0 of 2 jobs went: run this again" in capsys.readouterr().err


@pytest.mark.parametrize(
    "case",
    [
        (
            "MaxArraySize = 1001\nMaxJobCount = 1",
            "at most 1 (MaxJobCount); lower max_array",
            2,
        ),
        (
            "MaxArraySize = 2\nMaxJobCount = 9",
            "at most 1 (MaxArraySize); lower max_array",
            2,
        ),
        (
            "MaxArraySize = 1001\nMaxJobCount = 4",
            "room for 1 jobs; 0 of 2 jobs went: run this",
            1,
        ),
    ],
)
def test_an_array_that_slurm_cannot_hold_is_said_at_once(
    lab, stand_in_slurm, two, capsys, case
):
    limits, says, status = case
    stand_in_slurm.says("scontrol", limits)
    stand_in_slurm.says("squeue", "1\n2\n3\n")
    stand_in_slurm.sbatch("exit 1")
    assert lab.run(*two, "runs") == status
    assert says in capsys.readouterr().err.strip().splitlines()[-1]
    assert not stand_in_slurm.called("sbatch")
    assert ids(lab) == []


def test_watch_submits_again_what_waited_for_a_job_that_goes_on(lab, stand_in_slurm):
    """The pretraining ran out of time; Slurm cancels its probe at once or after the next look."""
    stand_in_slurm.sbatch('cp "$file" sent$n; echo "Submitted batch job 1$n"')
    path = lab.grid(recipes=["demo_random"], evaluate=lab.linear("d1"))
    cluster = read_cluster(lab.slurm())
    ledger = Ledger(lab.root / "runs")
    commands = CommandCheck(None, None)
    watcher = launch.GridRun(
        ledger, read_grid(path), cluster, "grid", None, 1.0, commands
    )

    def standing(record, state, reason="None"):
        return (record.id, state, reason, record.submission.uid)

    def submitted():
        return len(stand_in_slurm.called("sbatch"))

    # 1. The first look submits both.
    watcher.submit_missing()
    by_verb = {record.job.verb: record for record in ledger.records().values()}
    pretraining = by_verb["pretrain"]
    probe = by_verb["linear"]
    assert submitted() == 2
    # 2. The pretraining ran out of time where nothing could requeue it: it goes on.
    attempts = [{"start": 1.0, "end": 2.0, "how": "time limit"}]
    status = {"name": pretraining.job.name, "state": "queued", "attempts": attempts}
    ledger.write_status(pretraining.job, status)
    stand_in_slurm.queue(standing(probe, "PENDING", "Dependency"))
    watcher.submit_missing()
    assert submitted() == 3
    again = ledger.records()[pretraining.job.name]
    # 3. Its probe waits for the old number. Once Slurm has cancelled it for that, it goes on, too.
    for state in ("PENDING", "CANCELLED"):
        stand_in_slurm.queue(
            standing(again, "RUNNING"), standing(probe, state, "Dependency")
        )
        watcher.submit_missing()
    assert submitted() == 4
    once_more = ledger.records()[probe.job.name]
    sent = (stand_in_slurm.folder / "sent4").read_text()
    assert f"--dependency=afterok:{again.id}\n" in sent
    # 4. What somebody else cancelled stays cancelled.
    stand_in_slurm.queue(standing(again, "RUNNING"), standing(once_more, "CANCELLED"))
    watcher.submit_missing()
    assert submitted() == 4


@pytest.mark.slow
def test_watch_lives_on_where_slurm_is_full_and_ends_when_all_is_done(lab):
    grid = lab.grid(
        checkpoints=[lab.checkpoints("a", "b")], evaluate=lab.linear("d1", "d2", "d3")
    )
    with slurm_cluster.running_slurm(max_jobs=4, min_job_age=2):
        resources = {"default": {"cpus": 1, "memory_gb": 0.5, "hours": 0.2}}
        cluster = lab.cluster("slurm", max_array=2, resources=resources)
        process = lab.background(grid, cluster, "runs", "--watch", "--interval", "2")
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    assert "jobs went: run this again later" in said
    assert "all is done" in said
    assert {len(hows) for hows in lab.attempts("runs").values()} == {1}
    assert lab.values("runs") == lab.reference(grid)


def test_sbatch_is_called_outside_of_the_job_that_submits(monkeypatch):
    inherited = {
        "SLURM_JOB_ID": "12",
        "SLURM_ARRAY_JOB_ID": "12",
        "SLURM_MEM_PER_CPU": "100",
        "SUBMITIT_EXECUTOR": "slurm",
    }
    kept = {"SLURM_CONF": "slurm.conf", "SBATCH_ACCOUNT": "mine"}
    for key, value in (inherited | kept).items():
        monkeypatch.setenv(key, value)
    with outside_of_any_job():
        assert not inherited.keys() & os.environ.keys()
        assert kept.items() <= os.environ.items()
    assert inherited.items() <= os.environ.items()
