"""One run folder, one writer: RUN/run.lock names the process that is at work in RUN.

Two things hold it, because neither is enough:

    a kernel lock    on the file, released by the kernel when the process ends; between machines
                     only where the file system carries such locks (some mount NFS without)
    a heartbeat      the file's time of change, moved every few seconds while the process lives;
                     it crosses machines on every file system

Who wants the folder decides by the name in the file:

    nobody                       -> it is ours
    a process of this machine    -> the kernel knows: refused where it lives, ours where not
    one of another machine       -> refused at the first beat; ours after QUIET_SECONDS without one

Beats are compared with each other, never with this machine's clock, which may be wrong. filelock,
which torch brings, is not used: forked loader workers inherit its flock, which outlives a killed
parent; it knows no other machine and names no holder.
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from backbench.errors import BadInput, Failed
from backbench.runs import failures
from backbench.runs.terminal import log

LOCK_FILE = "run.lock"
BEAT_SECONDS = 5.0
QUIET_SECONDS = 30.0
# The answers of a file system without such locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Holder(TypedDict):
    """The process that is at work, as the file names it."""

    host: str
    machine: str  # changes with every start of the machine
    pid: int
    started: str  # of the process; tells it from a later one of the same number
    since: str  # local time, for people


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Work alone in an existing `folder`; an error names another process that is at work in it."""
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
            if _is_file(descriptor, file):
                file.unlink()
        os.close(descriptor)


def _take(file: Path) -> int:
    """The descriptor of `file`, locked, with this process's name in it."""
    while True:
        with contextlib.ExitStack() as stack:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, descriptor)
            if _claim(descriptor, file):
                stack.pop_all()
                return descriptor


def _claim(descriptor: int, file: Path) -> bool:
    """Write our name into the open file; False where the file must be opened anew."""
    locked = _lock(descriptor)
    if not _is_file(descriptor, file):  # its owner ended in between, and removed it
        return False
    holder = _read(descriptor)
    _refuse_living(file, holder, locked)
    if holder is not None and holder["machine"] != _machine():
        # A machine that is gone. Its lock may stay until the server notices, and looking for its
        # heartbeat has cost us ours: a new file has no locks
        if _is_file(descriptor, file):
            file.unlink()
        return False
    holder = Holder(
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        started=_started(os.getpid()) or "",
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
    )
    text = json.dumps(holder).encode()
    with failures.naming(file):
        os.pwrite(descriptor, text, 0)
        os.ftruncate(descriptor, len(text))
    return True


def _lock(descriptor: int) -> bool | None:
    """Take the kernel's lock: True if it is ours now; None where the file system has none."""
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


def _refuse_living(file: Path, holder: Holder | None, locked: bool | None) -> None:
    """BadInput, or Failed of another machine, unless the holder in `file` is known to be gone."""
    who = "another run"
    if holder is not None:
        who = f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
    if holder is None:
        alive = locked is False  # it is about to write its name
    elif holder["machine"] != _machine():
        log.info(f"{file.parent}: looking whether {who} is still at work here ...")
        alive = _beats(file)
    elif locked is None or holder["pid"] == os.getpid():
        alive = _started(holder["pid"]) == holder["started"]
    else:
        alive = not locked
    if alive:
        # A process on a machine that Slurm gave up ends soon: the next attempt finds it gone
        kind = BadInput if holder is None or holder["machine"] == _machine() else Failed
        raise kind(
            f"{file.parent}: {who} is at work; wait for it, or choose another --out"
        )


def _beats(file: Path) -> bool:
    """True if the file's time of change moves within QUIET_SECONDS."""
    times: set[int | None] = set()
    deadline = time.monotonic() + QUIET_SECONDS
    while len(times) < 2 and time.monotonic() < deadline:
        # Opened anew each time: that is when NFS asks the server
        try:
            with file.open("rb") as opened:
                times.add(os.fstat(opened.fileno()).st_mtime_ns)
        except FileNotFoundError:
            times.add(None)
        time.sleep(min(1.0, QUIET_SECONDS / 4))
    return len(times) > 1


def _beat(descriptor: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        # A file system that is full or away for a moment is no reason to end a run
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def _is_file(descriptor: int, file: Path) -> bool:
    """True if `file` is the file behind the descriptor, and not one of the same name."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> Holder | None:
    """The holder that is named; None where nobody is, or who was killed while writing it."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        return Holder(**{key: found[key] for key in Holder.__annotations__})  # type: ignore[typeddict-item]
    except (ValueError, KeyError, TypeError):
        return None


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
