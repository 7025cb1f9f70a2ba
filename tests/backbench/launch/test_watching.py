"""Who watches jobs, submits them again or ends them, beside a Slurm that says what a test wants."""

import io
import logging
import os
import re
import signal
import socket
import subprocess
import time
from types import SimpleNamespace

import pytest

from backbench.cli import launch
from backbench.launch.clusters import read_cluster
from backbench.launch.expansion import Expansion
from backbench.launch.grid import read_grid
from backbench.launch.records import Ledger, Submission


class Trial:
    """A grid of two jobs that a stand-in Slurm takes as 9_0 and 9_1, and what happens to them.

    `story` is what happens between two looks, step by step; after the last one a signal comes.
    """

    def __init__(self, lab, slurm, caplog) -> None:
        self.lab = lab
        self.slurm = slurm
        self.caplog = caplog
        self.story = []
        checkpoints = [lab.checkpoints("a", "b")]
        self.grid = lab.grid(checkpoints=checkpoints, evaluate=lab.linear("d1"))
        self.cluster = lab.slurm()
        self.takes_all()

    def takes_all(self) -> None:
        self.slurm.sbatch('echo "Submitted batch job 9"')

    def run(self, *more: str) -> int:
        return self.lab.run(self.grid, self.cluster, "runs", *more)

    def watch(self) -> int:
        return self.run("--watch", "--interval", "5")

    def sleep(self, stop, seconds) -> bool:
        if not self.story:
            return True
        self.story.pop(0)()
        return False

    def stand(self, queued: str = "", *ends: str):
        """A step: all jobs stand so in Slurm's queue, and have come to these ends."""

        def step() -> None:
            ledger = Ledger(self.lab.root / "runs")
            records = list(ledger.records().values())
            if queued:
                rows = [(r.id, queued, "None", r.submission.uid) for r in records]
                self.slurm.queue(*rows)
            for record, state in zip(records, ends):
                attempts = [{"start": 1.0, "end": 2.0, "how": state}]
                name = record.job.name
                status = {"name": name, "state": state, "attempts": attempts}
                ledger.write_status(record.job, status)

        return step

    def goes_on(self) -> None:
        """The step that shall not come."""
        pytest.fail("it went on")

    def said(self) -> str:
        return self.caplog.text


@pytest.fixture
def trial(lab, stand_in_slurm, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "backbench")
    ours = Trial(lab, stand_in_slurm, caplog)
    monkeypatch.setattr(launch, "_sleep", ours.sleep)
    return ours


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def status_on_a_terminal(trial, monkeypatch) -> list[str]:
    """Run `launch status`, and return its screens."""
    terminal = Terminal()
    size = os.terminal_size((30, 9))
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: size)
    monkeypatch.setattr("sys.stdout", terminal)
    assert trial.lab.launch("status", "runs") == 0
    return terminal.getvalue().split(launch.CLEAR)[1:]


@pytest.mark.parametrize(
    ("ends", "status", "said"),
    [
        (("done", "done"), 0, "all is done"),
        (("done", "failed"), 1, "nothing is left to happen by itself"),
    ],
)
def test_a_watch_ends_with_the_last_job(trial, capsys, ends, status, said):
    steps = [("PENDING",), ("RUNNING",), ("RUNNING", "done"), ("COMPLETED", *ends)]
    trial.story = [trial.stand(*step) for step in steps] + [trial.goes_on]
    assert trial.watch() == status
    out = capsys.readouterr().out
    looks = re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (.*)$", out, re.MULTILINE)
    assert looks[1:4] == ["2 queued", "2 running", "1 running  1 done"]
    assert len(looks) == 5
    assert said in trial.said()
    assert len(trial.slurm.called("sbatch")) == 1


def test_a_watch_lives_on_while_slurm_does_not_answer(trial, capsys):
    def is_down():
        trial.slurm.says("squeue", "slurmctld is down", status=1)

    def is_up():
        trial.slurm.says("squeue", "")
        trial.stand("", "done", "done")()

    trial.story = [trial.stand("RUNNING"), is_down, is_up, trial.goes_on]
    assert trial.watch() == 0
    assert "slurmctld is down" in capsys.readouterr().out
    assert len(trial.slurm.called("sbatch")) == 1


def test_a_watch_tries_again_what_slurm_refused(trial):
    trial.slurm.sbatch('echo "QOSMaxSubmitJobPerUserLimit" >&2; exit 1')
    trial.story = [trial.takes_all, trial.stand("RUNNING", "done", "done")]
    assert trial.watch() == 0
    assert "looking again in 5 s" in trial.said()


def test_what_is_wrong_with_the_command_ends_the_watch_at_once(trial, capsys):
    trial.story = [trial.goes_on]
    trial.cluster = trial.lab.slurm(partition="nowhere")
    assert trial.watch() == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_signal_ends_the_watch_alone(trial):
    trial.story = [trial.stand("RUNNING")]
    assert trial.watch() == 0
    assert "stopped watching; the jobs go on" in trial.said()
    assert trial.slurm.called("scancel") == []


def test_a_wait_ends_in_time_or_at_a_signal():
    began = time.monotonic()
    assert launch._sleep(SimpleNamespace(requested=None), 0.01) is False
    assert launch._sleep(SimpleNamespace(requested="SIGTERM"), 600.0) is True
    assert time.monotonic() - began < 300


def test_the_status_on_a_terminal_is_shown_until_nothing_is_active(trial, monkeypatch):
    assert trial.run() == 0
    trial.stand("RUNNING")()
    trial.story = [trial.stand("RUNNING", "done"), trial.stand("", "done", "failed")]
    trial.story.append(trial.goes_on)
    screens = status_on_a_terminal(trial, monkeypatch)
    firsts = [screen.splitlines()[0] for screen in screens]
    assert firsts == ["2 running", "1 running  1 done", "1 failed  1 done"]
    assert max(len(line) for line in screens[0].splitlines()) == 30


def test_a_signal_ends_the_status_on_a_terminal(trial, monkeypatch):
    assert trial.run() == 0
    trial.stand("RUNNING")()
    assert len(status_on_a_terminal(trial, monkeypatch)) == 1


def test_a_retry_submits_what_failed_with_a_clean_slate(trial):
    lab = trial.lab
    assert trial.run() == 0
    trial.stand("COMPLETED", "done", "failed")()
    (name,) = [name for name, state in lab.states("runs").items() if state == "failed"]
    again = ("retry", "runs", "--cluster", trial.cluster)
    assert lab.launch(*again) == 0
    assert "1 jobs submitted again in 1 arrays" in trial.said()
    assert len(trial.slurm.called("sbatch")) == 2
    status = lab.statuses("runs")[name]
    assert (status["state"], status["forgiven"]) == ("queued", 1)
    record = Ledger(lab.root / "runs").records()[name]
    trial.slurm.queue((record.id, "RUNNING", "None", record.submission.uid))
    assert lab.states("runs")[name] == "running"
    assert lab.launch(*again) == 0
    assert "no job failed, was lost or was cancelled" in trial.said()
    assert len(trial.slurm.called("sbatch")) == 2
    # Of jobs that are named, nothing is said of the others
    assert lab.launch(*again[:2], name, *again[2:]) == 0
    assert f"no job of {name} failed" in trial.said()


def test_a_grid_whose_checkpoint_is_not_there_yet_says_what_it_waits_for(trial):
    folder = trial.lab.root / "by_hand"
    folder.mkdir()
    about = '{"verb": "pretrain", "identity": {}, "created": "then"}'
    (folder / "run.json").write_text(about)
    evaluate = trial.lab.linear("d1")
    trial.grid = trial.lab.grid(checkpoints=[str(folder)], evaluate=evaluate)
    assert trial.run() == 0
    assert f"waiting for {folder}: no {folder}/backbone.safetensors yet" in trial.said()
    assert not trial.slurm.called("sbatch")


@pytest.mark.parametrize(
    ("where", "ends", "said"),
    [
        ({}, True, "1 jobs cancelled"),
        ({"host": "elsewhere"}, False, "runs on elsewhere: cancel it there"),
        ({"pid": os.getpid()}, False, f"process {os.getpid()} does not run it"),
    ],
    ids=["here", "another machine", "another process"],
)
def test_a_job_of_this_machine_is_told_to_end(lab, caplog, where, ends, said):
    caplog.set_level(logging.INFO, "backbench")
    grid = read_grid(
        lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    )
    ledger = Ledger(lab.root / "runs")
    (job,) = Expansion(grid, ledger.runs, where="grid").jobs
    local = read_cluster(lab.cluster("local"))
    ledger.write_submission(Submission.to(local, "lab", "u1", [job]))
    with ledger.alone(job) as lock:
        child = subprocess.Popen(["sleep", "600"], pass_fds=(lock,))
    try:
        attempt = {"start": 1.0, "end": None, "pid": child.pid}
        attempt |= {"host": socket.gethostname()} | where
        status = {"name": job.name, "state": "running", "attempts": [attempt]}
        ledger.write_status(job, status)
        assert lab.states("runs") == {job.name: "running"}
        assert lab.launch("cancel", "runs") == 0
        assert said in caplog.text
        if ends:
            assert child.wait(60) == -signal.SIGTERM
            assert lab.states("runs") == {job.name: "cancelled"}
        else:
            assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_a_dry_run_shows_what_a_watch_would_wait_for(trial, capsys):
    folder = trial.lab.root / "by_hand"
    folder.mkdir()
    about = '{"verb": "pretrain", "identity": {}, "created": "then"}'
    (folder / "run.json").write_text(about)
    given = [trial.lab.checkpoints("a"), str(folder)]
    trial.grid = trial.lab.grid(checkpoints=given, evaluate=trial.lab.linear("d1"))
    assert trial.run("--dry-run") == 0
    said = capsys.readouterr().out
    assert f"waiting for a checkpoint: {folder}" in said
    assert "2 jobs, 0 skipped as done, 0 others" in said
    assert not trial.slurm.called("sbatch")
    assert not (trial.lab.root / "runs").exists()


def test_a_dry_run_of_names_that_match_nothing_says_so(trial, capsys):
    given = [str(trial.lab.root / "nowhere" / "*.safetensors")]
    trial.grid = trial.lab.grid(checkpoints=given, evaluate=trial.lab.linear("d1"))
    trial.run("--dry-run")
    said = capsys.readouterr()
    assert "nowhere" in said.out + said.err
