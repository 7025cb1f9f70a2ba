"""kill -9 of a loader worker: one plain line and exit 1, or it goes on; then the same numbers."""

import contextlib
import faulthandler
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from multiprocessing import resource_sharer
from pathlib import Path
from unittest import mock

import pytest
import torch
from support import failing_workers
from support.weather import VERBS, command, numbers, warm

from backbench.images import decoding
from backbench.parallel import loading
from backbench.runs import failures
from backbench.runs.ending import guarded

TRIES = 3  # of each verb
ENDS_WITHIN_S = 120  # ten seconds, where nothing else runs


class Killing(torch.utils.data.Dataset):
    """Number 5 kills its worker, once `file` is there; others may be asked for meanwhile."""

    def __init__(self, file):
        self.file = file

    def __getitem__(self, key):
        if key == 5 and self.file.exists():
            self.file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([key])


def numbers_of(items, workers):
    out = []
    for batch in loading.batches(
        items, [[i, i + 1] for i in range(0, 20, 2)], workers=workers
    ):
        out += batch.flatten().tolist()
    return out


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_is_a_plain_line(workers, tmp_path, capsys):
    items = Killing(tmp_path / "kill")
    items.file.touch()

    def run():
        assert numbers_of(items, workers) == list(range(20))

    assert guarded(run) == 1
    said = capsys.readouterr().err
    assert (
        said.startswith("backbench: a loader worker was killed")
        and said.count("\n") == 1
    )
    assert "the same command continues" in said
    assert guarded(run) == 0


class KilledHolding(torch.utils.data.Dataset):
    """Number 5 kills its worker while that holds the locks that a loader's processes share."""

    def __getitem__(self, key):
        if key == 5:
            frame = sys._getframe()
            while frame.f_code.co_name != "_worker_loop":
                frame = frame.f_back
            frame.f_locals["data_queue"]._wlock.acquire()
            event = frame.f_locals["done_event"]
            if hasattr(event, "_cond"):  # multiprocessing's, which has a lock
                event._cond.acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([key])


@pytest.mark.timeout(60)
def test_one_that_is_killed_with_locks_in_hand_lets_the_run_end():
    before = set(multiprocessing.active_children())
    with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
        numbers_of(KilledHolding(), workers=2)
    assert set(multiprocessing.active_children()) <= before


class Odd(Exception):
    """An error that cannot be sent to another process."""

    def __init__(self):
        super().__init__("odd")
        self.lock = threading.Lock()


class Failing(torch.utils.data.Dataset):
    """Number 5 fails in its worker as a machine without memory, files or disk does."""

    def __init__(self, error):
        self.error = error

    def __getitem__(self, key):
        if key == 5:
            raise self.error
        return torch.tensor([key])


FAILURES = [
    (MemoryError("x"), "out of memory"),
    (
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"),
        "out of memory",
    ),
    (OSError(24, "Too many open files"), "ulimit -n"),
    (OSError(28, "No space left on device"), "the disk is full"),
    (
        RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1>: No space left"
        ),
        "--shm-size",
    ),
    (RuntimeError("odd"), "fault of backbench"),
    (OSError(23, "Too many open files in system"), "end other programs"),
    (OSError(12, "Cannot allocate memory"), "out of memory"),
    (Odd(), "Odd: odd (this is a fault of backbench"),
    (SystemExit(3), "SystemExit: 3 (this is a fault of backbench"),
    (KeyboardInterrupt(), "KeyboardInterrupt: (this is a fault of backbench"),
    (ConnectionResetError("odd"), "ConnectionResetError: odd"),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("error", "words"), FAILURES, ids=lambda v: str(v)[:12])
def test_an_error_in_a_worker_ends_the_run_with_its_line(error, words, capsys):
    """It is the worker's own error that is explained, and no worker is left to wait for."""
    before = set(multiprocessing.active_children())
    assert guarded(lambda: numbers_of(Failing(error), workers=2)) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and words.lower() in said.lower(), said
    assert set(multiprocessing.active_children()) <= before


class Leaving(torch.utils.data.Dataset):
    """Number 1 does in its worker what Python does first at its end: it removes the socket from
    which number 0 is to be had. The worker is still there."""

    def __init__(self, mark):
        self.mark = mark

    def __getitem__(self, key):
        if key == 1:
            sharer = resource_sharer._resource_sharer
            while sharer._address is None:
                time.sleep(0.01)
            Path(sharer._address).unlink()
            self.mark.touch()
            time.sleep(100_000)
        return torch.ones(1000)


@pytest.mark.timeout(60)
def test_a_batch_whose_worker_is_leaving_is_no_missing_file(tmp_path):
    batches = loading.batches(Leaving(tmp_path / "left"), [[0], [1]], workers=1)
    while not (tmp_path / "left").exists():
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(batches)


class Ending(torch.utils.data.Dataset):
    """At number 5 the worker does what `action` does."""

    def __init__(self, action):
        self.action = action

    def __getitem__(self, key):
        if key == 5:
            self.action()
        return torch.tensor([key])


def crash():
    faulthandler.disable()  # pytest's own
    os.kill(os.getpid(), signal.SIGABRT)


ENDS = [
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed, perhaps for memory"),
    (crash, "crashed (Aborted), in a library"),
    (lambda: os._exit(0), "killed"),
    (lambda: os._exit(3), "killed"),
    # A batch is there, and cannot be handed over
    (failing_workers.no_files_left, "ulimit -n"),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("action", "words"), ENDS)
def test_the_end_of_a_worker_is_said_with_what_can_be_done(action, words, capfd):
    before = set(multiprocessing.active_children())
    assert guarded(lambda: numbers_of(Ending(action), workers=2)) == 1
    # A worker without files may say that it could not clear up
    line = capfd.readouterr().err.splitlines()[-1]
    assert words in line and line.endswith("; the same command continues")
    assert set(multiprocessing.active_children()) <= before


def test_shared_memory_that_no_file_opens_wants_more_files():
    error = RuntimeError(
        "unable to open shared memory object </torch_7_8_9> in read-write mode: Too many"
        " open files (24)"
    )
    line, status = failures.explain(error)
    assert status == 1
    assert line.startswith("too many open files; raise `ulimit -n`")


FEW_FILES = """
import resource
import sys

from support import failing_workers
import torch
from backbench.parallel import loading
from backbench.runs.ending import guarded

class Ones(torch.utils.data.Dataset):
    def __getitem__(self, key):
        return torch.ones(1)

def run():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    batches = loading.batches(Ones(), [[i] for i in range(50)], workers=2)
    failing_workers.no_files_left()
    if sys.argv[1] == "to receive by":
        list(batches)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    failing_workers.no_files_left(but=8)
    loading.batches(Ones(), [[0]], workers=2)

raise SystemExit(guarded(run))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("files", ["to receive by", "to start by"])
def test_few_files_of_the_command_itself_are_a_plain_line(files, python):
    status, _, said = python.run(FEW_FILES, files)
    assert status == 1
    assert said == (
        "backbench: too many open files; raise `ulimit -n`; the same command continues\n"
    )


ASLEEP = """
import sys
import time

import torch
from backbench.parallel import loading
from backbench.runs.ending import guarded
from backbench.runs.state import StopFlag

loading.STOP_PATIENCE_S = 0.1

class Asleep(torch.utils.data.Dataset):
    def __getitem__(self, key):
        print("asleep", flush=True)
        time.sleep(100_000)

def run():
    batches = loading.batches(Asleep(), [[0], [1]], workers=1)
    if sys.argv[1] == "in a loop":
        with StopFlag():
            next(batches)
    elif sys.argv[1] == "outside of a loop":
        next(batches)
    else:  # the wait is not for a batch, and nobody closes the loader
        time.sleep(100_000)

raise SystemExit(guarded(run))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", ["in a loop", "outside of a loop", "elsewhere"])
def test_a_worker_that_never_ends_does_not_keep_a_signal_from_the_command(
    where, python
):
    command = python.start(ASLEEP, where)
    assert command.stdout.readline() == "asleep\n"
    command.terminate()
    # The end of both pipes: no worker is left that has them open
    status, _, said = command.end()
    assert said == "backbench: stopped by SIGTERM; the same command continues\n"
    assert status == 75


class Large(torch.utils.data.Dataset):
    def __getitem__(self, key):
        return torch.full((200, 200), key).T, {"beside": [key]}


def large_batches():
    """What comes out of two workers: tensors, their strides, and if they are in shared memory."""
    found = []
    order = [[i, i + 1] for i in range(0, 8, 2)]
    for batch in loading.batches(Large(), order, workers=2, collate=list):
        for tensor, beside in batch:
            about = (tensor.stride(), tensor[0, 0].item(), beside["beside"])
            found.append((*about, tensor.is_shared()))
    return found


def test_batches_travel_by_pipe_where_there_is_little_shared_memory(monkeypatch):
    expected = [((1, 200), i, [i]) for i in range(8)]
    assert large_batches() == [(*about, True) for about in expected]
    monkeypatch.setattr(loading, "_free_shared_memory", lambda: 1 << 20)
    assert large_batches() == [(*about, False) for about in expected]


def test_no_shared_memory_at_all_is_said_before_a_worker_starts(monkeypatch, capsys):
    before = set(multiprocessing.active_children())
    monkeypatch.setattr(loading, "_free_shared_memory", lambda: 4096)
    assert guarded(lambda: large_batches() and 0) == 1
    said = capsys.readouterr().err
    assert "--shm-size" in said and "--workers" in said
    assert set(multiprocessing.active_children()) <= before


def test_an_image_that_no_descriptor_is_left_for_is_not_a_bad_image(monkeypatch):
    full = mock.Mock(side_effect=OSError(24, "Too many open files", "x.png"))
    monkeypatch.setattr(decoding.opening, "open_regular", full)
    with pytest.raises(OSError, match="Too many open files"):
        decoding.decode("x.png")


HELD = """
import torch
from backbench.parallel import loading
from backbench.runs.ending import guarded

class Ones(torch.utils.data.Dataset):
    def __getitem__(self, key):
        return torch.ones(1)

kept = []

def run():
    batches = loading.batches(Ones(), [[i] for i in range(50)], workers=2)
    next(batches)
    kept.append(batches)  # as a traceback can hold it until Python ends
    raise ValueError("odd")

raise SystemExit(guarded(run))
"""


@pytest.mark.timeout(120)
def test_workers_that_something_still_holds_do_not_keep_the_command(python):
    status, _, said = python.run(HELD)
    assert status == 1 and "odd" in said


def test_it_is_raised_where_a_batch_is_asked_for_and_nowhere_else(tmp_path):
    before = set(multiprocessing.active_children())
    batches = loading.batches(Killing(tmp_path), [[i] for i in range(200)], workers=1)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.5)  # where torch's own handler would raise
    # Which of torch's two messages comes first depends on the machine's load
    with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
        next(batches)
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with warm(tmp_path_factory.mktemp("warm")) as runs:
        yield runs


def children(pid):
    """The processes that `pid` has forked."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread ends while its list is read
            found += [int(child) for child in task.read_text().split()]
    return found


def kill_a_worker(pid, draw, within_s):
    """As soon as there is one, and up to `within_s` later; whether there was one by then."""
    end = time.monotonic() + 60
    while not children(pid):
        if time.monotonic() > end or not Path(f"/proc/{pid}/fd").exists():
            return False
        time.sleep(0.002)
    time.sleep(draw.uniform(0, within_s))
    try:
        os.kill(draw.choice(children(pid)), signal.SIGKILL)
    except (IndexError, ProcessLookupError, FileNotFoundError):
        return False
    return True


LOADING = ("linear", "knn", "finetune", "pretrain", "detect", "detectron2")
LOADING += ("evaluate", "analyze")


def processes_of(group):
    """The living processes of a process group."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = file.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(int(file.parent.name))
    return found


@pytest.fixture
def failing(runs, tiny_root, trunk, tmp_path):
    """Start a verb on its own copy of the data, whose workers fail; returns the run and the data."""

    def start(verb, way):
        root = shutil.copytree(tiny_root, tmp_path / "data")
        run = runs.start(
            command(verb, root, trunk, tmp_path / "run"),
            failing=(way, str(root)),
            BACKBENCH_CACHE=str(tmp_path / "cache"),
        )
        return run, root

    return start


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", failing_workers.WAYS)
@pytest.mark.parametrize("verb", LOADING)
def test_however_workers_fail_the_command_ends(verb, way, failing):
    if verb == "detectron2":
        pytest.importorskip("detectron2")
    if way.startswith("shm") and os.geteuid() != 0:
        pytest.skip("only root can mount a small /dev/shm")
    run, root = failing(verb, way)
    failed = root / failing_workers.MARK
    if way == "asleep":
        while not failed.exists():
            time.sleep(0.05)  # until the test's own time is up
        failed.touch()
        os.kill(run.pid, signal.SIGTERM)
    status, said = run.wait()
    took = 0.0  # where no worker came to an item
    if failed.exists():
        took = time.time() - failed.stat().st_mtime
    # torch's own word of a crash ends with a zero
    last_line = (said.replace("\0", "").splitlines() or [""])[-1]
    print(f"{verb} | {way} | {took:.1f} s | exit {status} | {last_line}")
    _, statuses, words = failing_workers.WAYS[way]
    assert status in statuses, said
    assert words in said and "Traceback" not in said, said
    if status == 1:
        assert last_line.startswith("backbench: ")
        ends = ("the same command continues", "continues then", "shows where)")
        assert last_line.endswith(ends)
    if status:
        assert took < ENDS_WITHIN_S
    if way == "shm 64k" and status == 1:
        assert "--shm-size" in said and "--workers" in said
    while processes_of(run.pid):
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("verb", VERBS)
def test_killed_workers_of_every_verb(verb, runs, tiny_root, trunk, tmp_path):
    draw = random.Random(verb)
    began = time.monotonic()
    status, said = runs(command(verb, tiny_root, trunk, tmp_path / "alone"))
    took = time.monotonic() - began
    assert status == 0, said
    expected = numbers(tmp_path / "alone")
    killed = ended = 0
    for n in range(TRIES):
        out, cache = tmp_path / f"run-{n}", str(tmp_path / f"cache-{n}")
        run = runs.start(command(verb, tiny_root, trunk, out), BACKBENCH_CACHE=cache)
        # The first one before it has given anything, which no run can do without
        killed += kill_a_worker(run.pid, draw, 0.3 * took if n else 0.0)
        status, said = run.wait()
        assert "Traceback" not in said and "fault of backbench" not in said, said
        assert status in (0, 1), said
        if status == 1:
            ended += 1
            assert said.splitlines()[-1].startswith(
                "backbench: a loader worker was killed"
            ), said
            status, said = runs(
                command(verb, tiny_root, trunk, out), BACKBENCH_CACHE=cache
            )
            assert status == 0, said
        assert numbers(out) == expected
    print(f"{verb}: {killed} workers killed, {ended} runs ended by it and continued")
    assert ended
