"""One run folder, one writer: who else wants it is told who is there, and the dead hold nothing."""

import errno
import json
import os
import time
from unittest import mock

import pytest
from support.holding import holder

from backbench.errors import BadInput, Failed
from backbench.runs import lock
from backbench.runs.folder import open_run


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "QUIET_SECONDS", 0.4)


def on_another_machine(folder):
    """What a process on another machine leaves, there or dead."""
    me = {
        "host": "n7",
        "machine": "another",
        "pid": 41,
        "started": "9",
        "since": "2026-01-02 03:04",
    }
    (folder / lock.LOCK_FILE).write_text(json.dumps(me))


def test_the_second_is_told_who_is_there_and_the_dead_hold_nothing(tmp_path):
    first = holder(tmp_path)
    told = f"process {first.pid} on .* is at work; wait for it"
    with pytest.raises(BadInput, match=told), lock.held(tmp_path):
        pass
    first.kill()  # its forked child lives on
    first.wait()
    run = {"verb": "linear", "identity": {}}
    with open_run(tmp_path, **run):
        assert str(os.getpid()) in (tmp_path / lock.LOCK_FILE).read_text()
        with pytest.raises(BadInput, match=str(os.getpid())), open_run(tmp_path, **run):
            pass
    assert not (tmp_path / lock.LOCK_FILE).exists()


def test_a_dead_machine_does_not_block_for_ever(tmp_path):
    on_another_machine(tmp_path)
    with lock.held(tmp_path):
        assert str(os.getpid()) in (tmp_path / lock.LOCK_FILE).read_text()


def beat(file):
    os.utime(file)


def end(file):
    file.unlink(missing_ok=True)


@pytest.mark.parametrize("sign", [beat, end])
def test_a_machine_whose_heart_beats_or_that_just_ends_is_left_alone(
    tmp_path, monkeypatch, sign
):
    on_another_machine(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda _: sign(tmp_path / lock.LOCK_FILE))
    told = r"process 41 on n7 \(since 2026-01-02 03:04\) is at"
    with pytest.raises(Failed, match=told), lock.held(tmp_path):
        pass


def test_the_heart_beats_while_the_folder_is_held(tmp_path):
    with lock.held(tmp_path):
        before = (tmp_path / lock.LOCK_FILE).stat().st_mtime_ns
        time.sleep(0.2)
        assert (tmp_path / lock.LOCK_FILE).stat().st_mtime_ns > before


def test_without_locks_of_the_file_system_the_process_is_looked_for(
    tmp_path, monkeypatch
):
    none = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    first = holder(tmp_path)
    monkeypatch.setattr(lock.fcntl, "lockf", none)
    with pytest.raises(BadInput, match=str(first.pid)), lock.held(tmp_path):
        pass
    first.kill()
    first.wait()
    with lock.held(tmp_path):
        pass
