"""RUNS/.launch as files: read as they were written, locks that a look leaves free."""

import errno
import fcntl
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from backbench.errors import BadInput
from backbench.launch.job import Job
from backbench.launch.records import Ledger, Submission, spent_seconds


def make_job(name="x/y", **more):
    return Job(name=name, argv=("linear",), like="linear", cells=(name,), **more)


def make_submission(uid, moment, *jobs, ids=()):
    return Submission(
        uid=uid,
        grid="g",
        cluster="c",
        cluster_overrides=("jobs=2",),
        kind="slurm",
        time=moment,
        jobs=jobs,
        ids=ids,
    )


def test_a_submission_is_read_as_it_was_written(tmp_path):
    ledger = Ledger(tmp_path)
    jobs = (
        make_job("x/one"),
        make_job(
            "x/two",
            needs=("x/one",),
            after=("x/one",),
            makes="x/two/file",
            resources={"gpus": 1},
        ),
    )
    submission = make_submission("u1", 1.5, *jobs, ids=("7_0", "7_1"))
    ledger.write_submission(submission)
    records = ledger.records()
    assert [records[one.name].job for one in jobs] == list(jobs)
    assert [records[one.name].id for one in jobs] == ["7_0", "7_1"]
    assert records["x/two"].submission == submission


def test_a_record_of_an_earlier_version_is_read(tmp_path):
    """Its jobs have keys that this version does not know."""
    ledger = Ledger(tmp_path)
    submission = make_submission("u1", 1.0, make_job())
    ledger.write_submission(submission)
    file = ledger.submission_file(submission)
    data = json.loads(file.read_text())
    data["jobs"][0] |= {"arch": "resnet50", "units": 100.0}
    file.write_text(json.dumps(data))
    assert ledger.records()["x/y"].job == make_job()


def test_latest_submission_of_a_job_counts(tmp_path):
    ledger = Ledger(tmp_path)
    for uid, moment, ids in (("b", 1.0, ("5",)), ("a", 2.0, ()), ("c", 0.0, ("4",))):
        ledger.write_submission(make_submission(uid, moment, make_job(), ids=ids))
    record = ledger.records()["x/y"]
    assert record.submission.uid == "a"
    assert record.id is None


def test_retry_forgets_failures_and_keeps_them_on_record(tmp_path):
    ledger = Ledger(tmp_path)
    job = make_job()
    ledger.forgive(job)
    assert not (ledger.root / "status").exists(), (
        "a job that never started has nothing to forget"
    )
    attempts = [{"start": 0.0, "end": 1.0, "how": "failed", "reason": "why"}]
    failed = {"name": "x/y", "state": "failed", "reason": "why", "attempts": attempts}
    ledger.write_status(job, failed)
    ledger.mark_cancelled(job)
    ledger.forgive(job)
    assert not ledger.cancelled(job)
    again = {**failed, "state": "queued", "reason": None, "forgiven": 1}
    assert ledger.status(job) == again
    assert ledger.statuses() == {"x/y": again}


def test_time_spent_is_that_of_all_attempts_whose_end_is_known():
    killed = {"start": 10.0, "end": None}
    whole = {"start": 100.0, "end": 130.0}
    status = {"name": "x", "state": "done", "attempts": [killed, whole, whole]}
    assert spent_seconds(status) == 60.0
    goes_on = {"start": time.time() - 5.0, "end": None}
    status = {"name": "x", "state": "running", "attempts": [whole, goes_on]}
    assert spent_seconds(status) == pytest.approx(35.0, abs=1.0)


def test_locks_tell_who_is_at_work(tmp_path):
    ledger = Ledger(tmp_path)
    job = make_job()
    assert ledger.pool() is None
    assert not ledger.running(job)
    assert not ledger.root.exists(), "a look makes no folder"
    with ledger.running_pool("p1"), ledger.alone(job):
        assert ledger.pool() == "p1"
        assert ledger.running(job)
        with pytest.raises(BadInput, match="another launcher is running jobs here"):
            ledger.running_pool("p2").__enter__()
        assert ledger.pool() == "p1"
    assert ledger.pool() is None
    assert not ledger.running(job)


def test_where_no_lock_can_be_held_jobs_run_and_launchers_do_not(tmp_path, monkeypatch):
    none = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(fcntl, "flock", none)
    ledger = Ledger(tmp_path)
    with ledger.alone(make_job(), patience_s=0.1):
        assert not ledger.running(make_job())
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


def test_who_puts_nothing_on_record_leaves_nothing(tmp_path):
    """A refused command left a lock, and so a folder of runs in which nothing had run."""
    runs = tmp_path / "new" / "runs"
    with pytest.raises(BadInput, match="no such grid"), Ledger(runs).submitting():
        raise BadInput("no such grid")
    assert not (tmp_path / "new").exists()
    with Ledger(runs).running_pool("7"):
        assert Ledger(runs).pool() == "7"
    assert not (tmp_path / "new").exists()
    with Ledger(runs).submitting():
        Ledger(runs).write_submission(make_submission("u1", 1.0, make_job()))
    assert list(Ledger(runs).records()) == ["x/y"]


def test_a_lock_whose_file_was_taken_away_is_asked_for_again(tmp_path):
    """Whoever waits for a lock may get that of a file which is no longer the one that others find."""
    waiting, got = threading.Event(), threading.Event()
    ledger = Ledger(tmp_path)

    def wait():
        waiting.set()
        with ledger.submitting():
            got.set()
            # A third one finds the lock that this one holds
            with pytest.raises(BadInput, match="is submitting"), ledger.submitting():
                pass

    with ThreadPoolExecutor() as others:
        with ledger.submitting():
            other = others.submit(wait)
            waiting.wait(10)
            time.sleep(0.1)  # it has the file open by now
        other.result(30)
    assert got.is_set()
