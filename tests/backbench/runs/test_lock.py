"""One run folder, one writer: who else wants it is told who is there, and the dead hold nothing."""

import errno
import json
import os
import subprocess
import sys
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


def named(folder, *, machine="another", system="another", pid=41):
    """Write the name of a process of another machine or container, there or dead."""
    name = {
        "host": "n7",
        "machine": machine,
        "system": system,
        "pid": pid,
        "since": "2026-01-02 03:04",
    }
    (folder / lock.LOCK_FILE).write_text(json.dumps(name))


def on_another_machine(folder):
    named(folder)


def in_another_container(folder):
    """Its mount of the folder is its own, so that this kernel tells us of no lock."""
    named(folder, machine=lock._machine(), pid=os.getpid())


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


HOLD = """
import sys
from pathlib import Path
from backbench.runs import lock

with lock.held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_of_one_process_leaves_the_first_its_lock(tmp_path):
    with lock.held(tmp_path):
        with pytest.raises(BadInput, match="already"), lock.held(tmp_path):
            pass
        other = subprocess.run(
            [sys.executable, "-c", HOLD, str(tmp_path)],
            input="",
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"process {os.getpid()} on" in other.stderr
    with lock.held(tmp_path):
        pass


def test_a_living_process_that_has_our_number_in_its_container_is_refused(tmp_path):
    first = holder(tmp_path)
    in_another_container(tmp_path)
    with pytest.raises(BadInput, match="is at work"), lock.held(tmp_path):
        pass
    first.kill()
    first.wait()
    with lock.held(tmp_path):
        pass


# A new process namespace, in which the command is number 1, as in a container
UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


def test_of_two_containers_whose_first_process_runs_the_second_is_refused(tmp_path):
    try:
        subprocess.run([*UNSHARE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine does not let us make namespaces")
    command = [*UNSHARE, sys.executable, "-c", HOLD, str(tmp_path)]
    first = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout.readline() == "held\n"
    second = subprocess.run(
        command, input="", capture_output=True, text=True, check=False
    )
    assert second.stdout == "" and "process 1 on" in second.stderr
    assert (tmp_path / lock.LOCK_FILE).exists(), "the second took the first one's file"
    first.communicate("")
    third = subprocess.run(
        command, input="", capture_output=True, text=True, check=False
    )
    assert third.stdout == "held\n"


@pytest.mark.parametrize("left_by", [on_another_machine, in_another_container])
def test_a_dead_machine_or_container_does_not_block_for_ever(tmp_path, left_by):
    left_by(tmp_path)
    with lock.held(tmp_path):
        assert str(os.getpid()) in (tmp_path / lock.LOCK_FILE).read_text()


def beat(file):
    os.utime(file)


def end(file):
    file.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("left_by", "error"),
    [(on_another_machine, Failed), (in_another_container, BadInput)],
)
@pytest.mark.parametrize("sign", [beat, end])
def test_one_whose_heart_beats_or_that_just_ends_is_left_alone(
    tmp_path, monkeypatch, sign, left_by, error
):
    left_by(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda _: sign(tmp_path / lock.LOCK_FILE))
    told = r"process \d+ on n7 \(since 2026-01-02 03:04\) is at"
    with pytest.raises(error, match=told), lock.held(tmp_path):
        pass


def test_the_heart_beats_while_the_folder_is_held(tmp_path):
    with lock.held(tmp_path):
        before = (tmp_path / lock.LOCK_FILE).stat().st_mtime_ns
        while (tmp_path / lock.LOCK_FILE).stat().st_mtime_ns == before:
            time.sleep(0.01)  # until the test's own time is up


def test_without_locks_of_the_file_system_the_heart_is_listened_to(
    tmp_path, monkeypatch
):
    none = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    first = holder(tmp_path)
    monkeypatch.setattr(lock.fcntl, "lockf", none)
    with monkeypatch.context() as living:
        living.setattr(time, "sleep", lambda _: beat(tmp_path / lock.LOCK_FILE))
        with pytest.raises(BadInput, match=str(first.pid)), lock.held(tmp_path):
            pass
    first.kill()
    first.wait()
    with lock.held(tmp_path):
        pass
