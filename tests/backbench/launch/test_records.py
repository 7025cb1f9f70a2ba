"""RUNS/.launch as files: read as they were written, locks that a look leaves free."""

import errno
import fcntl
import threading
import time
from unittest import mock

import pytest

from backbench.errors import BadInput
from backbench.launch.job import Job
from backbench.launch.records import Ledger, Submission


def job(name="x/y"):
    return Job(name=name, argv=("linear",), like="linear", cells=(name,))


def test_a_submission_is_read_as_it_was_written(tmp_path):
    ledger = Ledger(tmp_path)
    jobs = (
        job("x/one"),
        Job(**{**vars(job("x/two")), "resources": {"gpus": 1}, "arch": "vit"}),
    )
    about = {
        "grid": "g",
        "cluster": "c",
        "cluster_overrides": ("jobs=2",),
        "kind": "slurm",
    }
    submission = Submission(uid="u1", time=1.5, jobs=jobs, ids=("7_0", "7_1"), **about)
    ledger.write_submission(submission)
    records = ledger.records()
    assert [records[one.name].job for one in jobs] == list(jobs)
    assert [records[one.name].id for one in jobs] == ["7_0", "7_1"]
    assert records["x/two"].submission == submission


def test_latest_submission_of_a_job_counts(tmp_path):
    ledger = Ledger(tmp_path)
    about = {"grid": "g", "cluster": "c", "cluster_overrides": (), "kind": "slurm"}
    for uid, moment, ids in (("b", 1.0, ("5",)), ("a", 2.0, ()), ("c", 0.0, ("4",))):
        submission = Submission(uid=uid, time=moment, jobs=(job(),), ids=ids, **about)
        ledger.write_submission(submission)
    assert (
        ledger.records()["x/y"].submission.uid == "a"
        and ledger.records()["x/y"].id is None
    )


def test_retry_forgets_failures_and_keeps_them_on_record(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.forgive(job())
    assert not (ledger.root / "status").exists(), (
        "a job that never started has nothing to forget"
    )
    attempts = [{"start": 0.0, "end": 1.0, "how": "failed", "reason": "why"}]
    failed = {"name": "x/y", "state": "failed", "reason": "why", "attempts": attempts}
    ledger.write_status(job(), failed)
    ledger.mark_cancelled(job())
    ledger.forgive(job())
    assert not ledger.cancelled(job())
    again = {**failed, "state": "queued", "reason": None, "forgiven": 1}
    assert ledger.status(job()) == again == ledger.statuses()["x/y"]


def test_locks_tell_who_is_at_work(tmp_path):
    ledger = Ledger(tmp_path)
    assert (
        ledger.pool() is None and not ledger.running(job()) and not ledger.root.exists()
    )
    with ledger.running_pool("p1"), ledger.alone(job()):
        assert ledger.pool() == "p1" and ledger.running(job())
        with pytest.raises(BadInput, match="another launcher is running jobs here"):
            ledger.running_pool("p2").__enter__()
        assert ledger.pool() == "p1"
    assert ledger.pool() is None and not ledger.running(job())


def test_where_no_lock_can_be_held_jobs_run_and_launchers_do_not(tmp_path, monkeypatch):
    none = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(fcntl, "flock", none)
    ledger = Ledger(tmp_path)
    with ledger.alone(job(), patience_s=0.1):
        assert not ledger.running(job())
    with (
        pytest.raises(BadInput, match="another launcher is submitting"),
        ledger.submitting(),
    ):
        pass


def test_looking_all_the_time_keeps_no_launcher_out(tmp_path):
    """A look asks by a lock of its own, for microseconds."""
    ledger = Ledger(tmp_path)
    with ledger.running_pool("first"):
        pass
    over = threading.Event()

    def look():
        while not over.is_set():
            ledger.pool()

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            with ledger.running_pool("second"):
                assert ledger.pool() == "second"
    finally:
        over.set()
        for looker in lookers:
            looker.join()
