"""RUNS/.launch as files: old ones read, locks that a look leaves free."""

from __future__ import annotations

import json
import threading
import time

import pytest

from backbench.errors import BadInput
from backbench.launch.job import Job
from backbench.launch.records import Ledger, Submission

# As version 0.1 wrote them
OLD_SUBMISSION = {
    "uid": "0123456789ab",
    "grid": "probes",
    "cluster": "/configs/clusters/slurm.yaml",
    "cluster_overrides": ["jobs=2"],
    "kind": "slurm",
    "time": 1700000000.5,
    "jobs": [
        {
            "name": f"a-12345678/linear-lorac-{dataset}",
            "argv": ["linear", "a.safetensors", "--datasets", dataset],
            "like": f"linear-lorac-{dataset}",
            "cells": [f"a-12345678/linear-lorac-{dataset}"],
            "needs": [],
            "after": [],
            "makes": None,
            "expects": 1,
            "resources": {"gpus": 1},
        }
        for dataset in ("d1", "d2")
    ],
    "ids": ["7_0", "7_1"],
}


def job(name="x/y"):
    return Job(name=name, argv=("linear",), like="linear", cells=(name,))


def test_submission_of_version_0_1_is_read_and_written_as_it_was(tmp_path):
    ledger = Ledger(tmp_path)
    file = ledger.root / "submissions" / "0123456789ab.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(OLD_SUBMISSION) + "\n")
    records = ledger.records()
    assert {name: record.id for name, record in records.items()} == {
        "a-12345678/linear-lorac-d1": "7_0",
        "a-12345678/linear-lorac-d2": "7_1",
    }
    record = records["a-12345678/linear-lorac-d1"]
    assert record.job.resources == {"gpus": 1} and record.submission.cluster_overrides == (
        "jobs=2",
    )
    before = file.read_text()
    ledger.write_submission(record.submission)
    assert file.read_text() == before


def test_latest_submission_of_a_job_counts(tmp_path):
    ledger = Ledger(tmp_path)
    about = {"grid": "g", "cluster": "c", "cluster_overrides": (), "kind": "slurm"}
    for uid, moment, ids in (("b", 1.0, ("5",)), ("a", 2.0, ()), ("c", 0.0, ("4",))):
        submission = Submission(uid=uid, time=moment, jobs=(job(),), ids=ids, **about)
        ledger.write_submission(submission)
    assert ledger.records()["x/y"].submission.uid == "a" and ledger.records()["x/y"].id is None


def test_retry_forgets_failures_and_keeps_them_on_record(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.forgive(job())
    assert not (ledger.root / "status").exists(), "a job that never started has nothing to forget"
    attempts = [{"start": 0.0, "end": 1.0, "how": "failed", "reason": "why"}]
    failed = {"name": "x/y", "state": "failed", "reason": "why", "attempts": attempts}
    ledger.write_status(job(), failed)
    ledger.mark_cancelled(job(), on=True)
    ledger.forgive(job())
    assert not ledger.cancelled(job())
    again = {**failed, "state": "queued", "reason": None, "forgiven": 1}
    assert ledger.status(job()) == again == ledger.statuses()["x/y"]


def test_locks_tell_who_is_at_work(tmp_path):
    ledger = Ledger(tmp_path)
    assert ledger.pool() is None and not ledger.running(job()) and not ledger.root.exists()
    with ledger.running_pool("p1"), ledger.alone(job()):
        assert ledger.pool() == "p1" and ledger.running(job())
        with pytest.raises(BadInput, match="another launcher is running jobs here"):
            ledger.running_pool("p2").__enter__()
        assert ledger.pool() == "p1"
    assert ledger.pool() is None and not ledger.running(job())


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
