"""One run folder, one writer: RUN/run.lock names the process that is at work in RUN.

Two things hold it, because neither is enough:

    a kernel lock    on the file, let go of by the kernel whenever the process ends; between
                     machines only where the file system carries such locks (NFS does, some
                     clusters mount it without)
    a heartbeat      the file's time of change, moved every few seconds while the process lives;
                     it crosses machines on every file system

From state to state, for who wants the folder:

    nobody named                         -> it is ours
    a process of this machine is named   -> the kernel knows: refused where it lives, ours where not
    one of another machine               -> refused as soon as its heart is seen to beat; ours when
                                            it has not for QUIET_SECONDS

Beats are compared with each other and never with a clock of this machine, which may be wrong.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from backbench.errors import BadInput
from backbench.runs import failures

log = logging.getLogger("backbench")
LOCK_FILE = "run.lock"
BEAT_SECONDS = 5.0
QUIET_SECONDS = 30.0
# What a file system without such locks answers
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Holder(TypedDict):
    """Who is at work, as the file says it."""

    host: str
    machine: str  # changes with every start of the machine
    pid: int
    started: str  # of the process; tells it from a later one of the same number
    since: str  # local time, for people


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Alone in `folder`, which is there; BadInput names whoever else is at work in it."""
    file = folder / LOCK_FILE
    descriptor = _take(file)
    ended = threading.Event()
    heart = threading.Thread(target=_beat, args=(descriptor, ended), daemon=True)
    heart.start()
    try:
        yield
    finally:
        ended.set()
        heart.join()
        # First the name, then the lock: who has the file open by now sees that it is gone
        with contextlib.suppress(OSError):
            if _is(descriptor, file):
                file.unlink()
        os.close(descriptor)


def _take(file: Path) -> int:
    """The descriptor of `file`, locked, with this process's name in it."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            free = _lock(descriptor)
            ours = False
            if _is(descriptor, file):  # else its owner went away with it in between
                there = _read(descriptor)
                _refuse_the_living(file, there, free)
                if there is None or there["machine"] == _machine():
                    ours = True
                    with failures.naming(file):
                        _write(descriptor)
                elif _is(descriptor, file):
                    # A machine that is gone. Its lock may be there until the server notices, and a
                    # look at the heart has cost us ours: a new file has no locks
                    file.unlink()
        except BaseException:
            os.close(descriptor)
            raise
        if ours:
            return descriptor
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether the kernel's lock is ours now; None where the file system has none."""
    # Not flock: that one passes to forked loader workers, and outlives a parent that was killed
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _refuse_the_living(file: Path, there: Holder | None, free: bool | None) -> None:
    """BadInput unless who is named in `file` is known to be gone."""
    if there is None:
        alive = free is False  # it is about to write its name
    elif there["machine"] != _machine():
        log.info(f"{file.parent}: looking whether {_named(there)} is still at work here ...")
        alive = _beats(file)
    elif free is None or there["pid"] == os.getpid():
        alive = _started(there["pid"]) == there["started"]
    else:
        alive = not free
    if alive:
        who = "another run" if there is None else _named(there)
        raise BadInput(
            f"{file.parent}: {who} is at work here; wait for it, or choose another --out"
        )


def _named(there: Holder) -> str:
    return f"process {there['pid']} on {there['host']} (since {there['since']})"


def _beats(file: Path) -> bool:
    """Whether the heart of `file` beats within QUIET_SECONDS."""
    first = _time_of(file)
    deadline = time.monotonic() + QUIET_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, QUIET_SECONDS / 4))
        if _time_of(file) != first:
            return True
    return False


def _time_of(file: Path) -> int | None:
    # Opened anew each time: that is when NFS asks the server
    try:
        with file.open("rb") as opened:
            return os.fstat(opened.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _beat(descriptor: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        # A file system that is full or away for a moment is no reason to end a run
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def _write(descriptor: int) -> None:
    text = json.dumps(_me()).encode()
    os.pwrite(descriptor, text, 0)
    os.ftruncate(descriptor, len(text))


def _is(descriptor: int, file: Path) -> bool:
    """Whether `file` is the file behind the descriptor, and not one of the same name."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> Holder | None:
    """Who is named; None where nobody is, or who was killed in the middle of it."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        return Holder(
            host=found["host"],
            machine=found["machine"],
            pid=found["pid"],
            started=found["started"],
            since=found["since"],
        )
    except (ValueError, KeyError, TypeError):
        return None


def _me() -> Holder:
    return Holder(
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        started=_started(os.getpid()) or "",
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def _machine() -> str:
    """This machine since its last start: names like `localhost` are many machines'."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux
        return platform.node()


def _started(pid: int) -> str | None:
    """When process `pid` of this machine began, in the kernel's words; None where there is none."""
    try:
        about = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in brackets, may hold blanks; the start is the 22nd word, the name the second
    return about.rpartition(")")[2].split()[19]
