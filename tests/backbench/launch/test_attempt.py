"""One attempt at a job: failures, time limits, kills, full disks, and what follows from them."""

import io
import os
import pickle
import re
import signal
import socket
import time
from types import SimpleNamespace

import pytest
from support.weather import disk

from backbench.errors import EXIT_PREEMPTED, Failed
from backbench.launch.attempt import Attempt, Ending, decide, main, since_progress
from backbench.launch.expansion import Expansion
from backbench.launch.grid import read_grid
from backbench.launch.job import Job
from backbench.launch.records import Ledger
from backbench.runs.run_progress import Progress


@pytest.mark.parametrize(
    ("fault", "attempts"),
    [("broken", 3), pytest.param("bad", 1, marks=pytest.mark.slow)],
)
def test_a_failing_job_ends_says_why_and_blocks_what_needs_it(
    lab, capsys, fault, attempts
):
    lab.dataset("pretrain", steps=1, fault=fault)
    lab.dataset("flaky", steps=1, fault="now and then", times=2)
    evaluate = lab.linear("d1", "flaky")
    grid = lab.grid(
        recipes=["demo_random"], checkpoints=[lab.checkpoints("a")], evaluate=evaluate
    )
    cluster = lab.cluster("local")
    assert lab.run(grid, cluster, "runs") == 1
    # 1. How the jobs ended
    states = lab.states("runs")
    (bad,) = [name for name in states if name.startswith("pretrain/")]
    (flaky,) = [name for name in states if name.startswith("a-") and "flaky" in name]
    assert states[bad] == "failed"
    assert states[flaky] == "done"
    assert list(states.values()).count("blocked") == 2
    assert lab.attempts("runs")[flaky] == ["failed", "failed", "done"]
    assert len(lab.attempts("runs")[bad]) == attempts
    # 2. What `status` says of it
    capsys.readouterr()
    assert lab.launch("status", "runs", "--once") == 0
    text = capsys.readouterr().out
    assert "1 failed" in text
    assert "2 blocked" in text
    assert "2 done" in text
    why = "backbench: the fault that was ordered"
    if fault == "broken":
        why = "failed 3 times for the same reason: backbench: broken"
    assert re.search(rf"failed +{bad}  {why}", text)
    # 3. `run` leaves it alone, `retry` does not
    assert lab.run(grid, cluster, "runs") == 0
    assert len(lab.attempts("runs")[bad]) == attempts
    lab.dataset("pretrain", steps=1)
    assert lab.launch("retry", "runs", "--cluster", cluster) == 0
    assert set(lab.states("runs").values()) == {"done"}
    lab.dataset("flaky", steps=1)
    assert lab.values("runs") == lab.reference(grid)


def test_three_kills_with_progress_between_them_end_no_job(lab):
    """At steps 9, 16, 25 and 33 of 40: each is an accident of its own."""
    walk = {"steps": 40, "step_s": 0.01, "save_every": 1}
    lab.dataset("d1", **walk, die_at=[9, 16, 25, 33])
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    assert lab.run(grid, lab.cluster("local"), "runs") == 0
    (hows,) = lab.attempts("runs").values()
    assert hows == ["failed"] * 4 + ["done"]
    (status,) = lab.statuses("runs").values()
    assert status["attempts"][0]["reason"] == "killed by SIGKILL (out of memory?)"
    lab.dataset("d1", **walk)
    assert lab.values("runs") == lab.reference(grid)


def attempt(how, at=None, reason="broken"):
    return {"start": 0.0, "end": 1.0, "how": how, "reason": reason, "at": at}


@pytest.mark.parametrize(
    ("attempts", "outcome"),
    [
        # Three times at one place: a fault of the job
        ([attempt("failed", "walk 9/40")] * 3, "failed"),
        ([attempt("failed")] * 3, "failed"),
        # Farther each time; and what came before the progress counts no more
        (
            [
                attempt("failed", f"walk {step}/40")
                for step in (9, 16, 25, 26, 27, 28, 29)
            ],
            "again",
        ),
        (
            [attempt("failed", "walk 9/40")] * 2
            + [attempt("failed", "walk 10/40")] * 2,
            "again",
        ),
        (
            [attempt("failed", "walk 9/40")] * 2
            + [attempt("failed", "walk 10/40")] * 3,
            "failed",
        ),
        # Another part of the run is farther, too. Fewer steps of the same part are not.
        (
            [attempt("failed", "rate 9/40")] * 2
            + [attempt("failed", "final 1/40")] * 2,
            "again",
        ),
        ([attempt("failed", f"walk {step}/40") for step in (9, 1, 3)], "failed"),
        # For other reasons each time, six in one place
        ([attempt("failed", "walk 9/40", reason) for reason in ("abcdef")], "failed"),
        ([attempt("failed", "walk 9/40", reason) for reason in ("abcde")], "again"),
        # Preemptions between them are neither failures nor progress
        ([attempt("failed"), attempt("preempted")] * 2 + [attempt("failed")], "failed"),
        ([attempt("preempted", "walk 9/40")] * 20, "again"),
        ([attempt("time limit", "walk 9/40")] * 3, "failed"),
        ([attempt("time limit", f"walk {step}/40") for step in (9, 10, 11)], "again"),
        # A lost peer is no failure of the job, unless they never find each other
        (
            [attempt("lost peer", "walk 9/40")] * 3
            + [attempt("failed", "walk 9/40")] * 2,
            "again",
        ),
        ([attempt("lost peer", "walk 9/40")] * 5, "again"),
        ([attempt("lost peer")] * 6, "failed"),
        ([attempt("lost peer", f"walk {step}/40") for step in range(1, 9)], "again"),
    ],
)
def test_what_follows_from_how_the_attempts_ended(attempts, outcome):
    last = Ending(attempts[-1]["how"], attempts[-1]["reason"])
    assert decide(last, attempts, cancelled=False)[0] == outcome


@pytest.mark.parametrize(
    ("how", "count", "cancelled", "outcome", "why"),
    [
        ("done", 9, True, "done", None),
        ("stopped", 9, True, "cancelled", None),
        ("stopped", 9, False, "stopped", "a 1"),
        ("preempted", 9, True, "cancelled", None),
        ("preempted", 9, False, "again", "a 1"),
        ("bad input", 1, False, "failed", "a 1"),
        ("failed", 2, False, "again", "a 1"),
        ("failed", 3, False, "failed", "failed 3 times for the same reason: a 1"),
        ("lost peer", 5, False, "again", "a 1"),
        ("time limit", 2, False, "again", "a 1"),
    ],
)
def test_what_is_said_of_an_end(how, count, cancelled, outcome, why):
    attempts = [attempt(how, reason=f"a {n}") for n in range(count)]
    assert decide(Ending(how, "a 1"), attempts, cancelled=cancelled) == (outcome, why)


def test_six_failures_of_several_reasons_are_counted():
    attempts = [attempt("failed", "walk 9/40", reason) for reason in "abcdef"]
    outcome, why = decide(Ending("failed", "f"), attempts, cancelled=False)
    assert (outcome, why) == ("failed", "failed 6 times, at last: f")
    lost = [attempt("lost peer", reason="gone")] * 6
    _, why = decide(Ending("lost peer", "gone"), lost, cancelled=False)
    assert why == (
        "its tasks lost each other 6 times at the same point (see NCCL_SOCKET_IFNAME and"
        " GLOO_SOCKET_IFNAME): gone"
    )


@pytest.mark.parametrize(
    ("places", "kept"),
    [
        ([], []),
        ([None, None], [None, None]),
        (["a 1/9", "a 1/9", "a 2/9", "a 2/9", "a 1/9"], ["a 2/9", "a 2/9", "a 1/9"]),
        (["a 5/9", "b 1/9", "a 5/9"], ["b 1/9", "a 5/9"]),
        (["a 5/9", None, "a 6/9"], ["a 6/9"]),
        (["a 0/9", "a 0/9"], ["a 0/9", "a 0/9"]),
        (["two words 3/9", "two words 3/9"], ["two words 3/9"] * 2),
    ],
)
def test_what_counts_begins_with_the_last_progress(places, kept):
    attempts = [attempt("failed", place) for place in places]
    assert [one["at"] for one in since_progress(attempts)] == kept


def test_too_short_a_time_is_said():
    attempts = [attempt("time limit", "walk 9/40")] * 3
    _, why = decide(Ending("time limit", None), attempts, cancelled=False)
    assert (
        why == "3 time limits ended at the same point (walk 9/40): give it more hours"
    )


@pytest.mark.parametrize(
    ("exit_code", "outcome"), [(1, "failed"), (EXIT_PREEMPTED, "again")]
)
def test_a_failure_that_cannot_be_noted_is_not_tried_again(
    lab, monkeypatch, exit_code, outcome
):
    """Without a record, counting to three would never end; preemptions are not counted anyway."""
    lab.dataset("d1", steps=1, fault="broken")
    grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
    (job,) = Expansion(read_grid(grid), lab.root / "runs", where="grid").jobs
    ledger = Ledger(lab.root / "runs")
    attempt = Attempt(job=job, ledger=ledger, command=tuple(lab.command))
    meaning = attempt._meaning
    monkeypatch.setattr(attempt, "_meaning", lambda _: meaning(exit_code))
    monkeypatch.setattr(Ledger, "write_status", lambda *_: False)
    assert attempt.run() == outcome


MAKES = "pretrain/a/checkpoint.safetensors"
DONE = 'mkdir -p "$(dirname "$MADE")"; touch "$MADE"'


@pytest.fixture
def shell(tmp_path):
    """shell(script): an attempt at a pretraining that is these shell lines; MADE proves it done."""
    ledger = Ledger(tmp_path / "runs")
    made = str(ledger.runs / MAKES)
    argv = ("pretrain", "demo_random", "--out", made)
    job = Job(name="pretrain/a", argv=argv, like="x", cells=(), makes=MAKES)

    def attempt_at(script, **more):
        given = {"command": ("sh", "-c", script), "env": {"MADE": made}} | more
        return Attempt(job=job, ledger=ledger, **given)

    return attempt_at


@pytest.mark.parametrize(
    ("script", "outcome", "how", "why"),
    [
        (DONE, "done", "done", None),
        ("exit 0", "again", "failed", f"exit 0, but {MAKES} does not hold what was"),
        ("exit 75", "again", "preempted", None),
        ("echo no such file; exit 2", "failed", "bad input", "no such file"),
        ("echo first; echo; echo last; exit 1", "again", "failed", "last"),
        ("exit 7", "again", "failed", "exit 7"),
        ("kill -KILL $$", "again", "failed", r"killed by SIGKILL \(out of memory\?\)"),
        ("kill -SEGV $$", "again", "failed", "killed by SIGSEGV$"),
        ("kill -TERM $$", "again", "preempted", "stopped before it could save"),
    ],
)
def test_how_a_command_ended_and_what_follows(shell, script, outcome, how, why):
    attempt = shell(script)
    assert attempt.run() == outcome
    (status,) = attempt.ledger.statuses().values()
    assert status["state"] == ("queued" if outcome == "again" else outcome)
    (note,) = status["attempts"]
    assert note["how"] == how
    if why is None:
        assert note["reason"] is None
    else:
        assert re.match(why, note["reason"])
    assert note["start"] <= note["end"]
    assert (note["pid"], note["host"]) == (os.getpid(), socket.gethostname())


def test_a_command_that_cannot_start_has_failed(shell):
    attempt = shell("", command=("/nowhere/python",))
    assert attempt.run() == "again"
    (note,) = attempt.ledger.status(attempt.job)["attempts"]
    assert note["how"] == "failed"
    assert re.match("not started: .*/nowhere/python", note["reason"])


def test_an_attempt_that_was_killed_is_noted_by_the_next_one(shell):
    attempt = shell(DONE)
    progress = Progress(attempt.ledger.runs / attempt.job.name, 40, "walking", done=9)
    progress.advance()
    notes = [{"start": 1.0, "end": None}]
    status = {"name": attempt.job.name, "state": "running", "attempts": notes}
    attempt.ledger.write_status(attempt.job, status)
    assert attempt.run() == "done"
    killed, done = attempt.ledger.status(attempt.job)["attempts"]
    assert (killed["how"], done["how"]) == ("killed", "done")
    assert killed["reason"] == "ended without a word"
    assert killed["at"] == "walking 10/40"
    # Its last note of progress is the nearest to its end that anybody wrote
    assert time.time() - 600 < killed["end"] <= done["start"]


def test_a_job_that_has_ended_well_does_not_run_again(shell):
    assert shell(DONE).run() == "done"
    again = shell('touch "$MADE.again"')
    assert again.run() == "done"
    assert len(again.ledger.status(again.job)["attempts"]) == 1
    assert not (again.ledger.runs / f"{MAKES}.again").exists()
    # Unless its file has gone
    (again.ledger.runs / MAKES).unlink()
    assert again.run() == "again"


def test_a_marked_job_does_not_run(shell):
    attempt = shell(DONE)
    attempt.ledger.mark_cancelled(attempt.job)
    assert attempt.run() == "cancelled"
    assert attempt.ledger.status(attempt.job)["state"] == "cancelled"
    assert not (attempt.ledger.runs / MAKES).exists()


def test_a_command_that_does_not_save_in_time_is_killed(shell):
    """The child inherits that the signal is ignored."""
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        attempt = shell("exec sleep 600", grace_s=0.2)
        attempt.ask_to_stop("time limit")
        attempt.ask_to_stop("stopped")  # the first reason counts
        assert attempt.run() == "again"
    finally:
        signal.signal(signal.SIGUSR2, before)
    (note,) = attempt.ledger.status(attempt.job)["attempts"]
    assert note["how"] == "time limit"
    assert note["reason"] == "did not save within 0 s"


def test_a_signal_that_came_before_the_command_reaches_it(shell):
    attempt = shell("exec sleep 20", grace_s=20)
    attempt.ask_to_stop("preempted")
    began = time.monotonic()
    assert attempt.run() == "again"
    assert time.monotonic() - began < 15
    (note,) = attempt.ledger.status(attempt.job)["attempts"]
    assert (note["how"], note["reason"]) == (
        "preempted",
        "stopped before it could save",
    )


def test_a_rank_waits_for_the_words_of_the_one_that_is_gone(shell, monkeypatch):
    attempt = shell("", tasks=2)
    words = Ending("failed", "rank 1: out of memory")
    said = [None, None, words]
    monkeypatch.setattr(attempt, "_sibling_failure", lambda: said.pop(0))
    assert attempt._peers_words() == words
    assert said == []
    monkeypatch.setattr("backbench.launch.attempt.PEER_S", 0.0)
    assert attempt._peers_words() is None


def test_a_command_learns_nothing_of_slurm_but_where_its_configuration_is(
    shell, monkeypatch
):
    for key in ("SLURM_PROCID", "SUBMITIT_EXECUTOR", "PMI_RANK", "SLURM_CONF", "OTHER"):
        monkeypatch.setenv(key, "theirs")
    attempt = shell(f'env > "$TOLD"; {DONE}')
    told = attempt.ledger.runs / "told"
    attempt.env |= {"TOLD": str(told), "OTHER": "ours"}
    assert attempt.run() == "done"
    seen = dict(line.split("=", 1) for line in told.read_text().splitlines())
    assert not {"SLURM_PROCID", "SUBMITIT_EXECUTOR", "PMI_RANK"} & seen.keys()
    assert (seen["SLURM_CONF"], seen["OTHER"]) == ("theirs", "ours")
    assert seen["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize(
    ("outcome", "status"),
    [("done", 0), ("failed", 1), ("again", 75), ("stopped", 75), ("cancelled", 3)],
)
def test_the_exit_status_by_which_a_pool_learns_the_outcome(
    shell, monkeypatch, outcome, status
):
    pickled = pickle.dumps(shell(DONE))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(pickled)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(Attempt, "run", lambda _: outcome)
    assert main() == status


def test_a_job_that_somebody_else_runs_is_said_in_a_line(shell, monkeypatch, capsys):
    pickled = pickle.dumps(shell(DONE))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(pickled)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(_):
        raise Failed("pretrain/a: another process has run it")

    monkeypatch.setattr(Attempt, "run", run)
    assert main() == 1
    said = capsys.readouterr().err
    assert said == "backbench: pretrain/a: another process has run it\n"


@pytest.mark.slow
def test_full_disk_loses_no_result(lab):
    with disk(lab.root / "runs", "256k") as small:
        grid = lab.grid(checkpoints=[lab.checkpoints("a")], evaluate=lab.linear("d1"))
        assert lab.run(grid, lab.cluster("local"), "runs") == 0
        before = lab.values("runs")
        free_blocks = os.statvfs(small).f_bavail
        (small / "ballast").write_bytes(b"x" * 4096 * (free_blocks - 3))
        more = lab.checkpoints("a", "b", "c")
        grid = lab.grid(checkpoints=[more], evaluate=lab.linear("d1", "d2", "d3"))
        assert lab.run(grid, lab.cluster("local"), "runs") != 0
        assert before.items() <= lab.values("runs").items()
        (small / "ballast").unlink()
        lab.launch("retry", "runs", "--cluster", lab.cluster("local"))
        assert lab.run(grid, lab.cluster("local"), "runs") == 0
        assert lab.values("runs") == lab.reference(grid)
