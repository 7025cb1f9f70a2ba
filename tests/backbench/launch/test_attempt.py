"""One attempt at a job: failures, time limits, kills, full disks, and what follows from them."""

import os
import re

import pytest
from support.weather import disk

from backbench.errors import EXIT_PREEMPTED
from backbench.launch.attempt import Attempt, Ending, decide
from backbench.launch.expansion import Expansion
from backbench.launch.grid import read_grid
from backbench.launch.records import Ledger


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
