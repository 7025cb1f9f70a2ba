"""Lets only one process write in a run's folder: RUN/run.lock names the one that is at work there.

The process holds the file in two ways, because neither is enough:

    a kernel lock    The kernel releases it when the process ends. Other machines see it only where
                     the file system carries such locks (some mount NFS without).
    a heartbeat      The process moves the file's time of change every few seconds while it lives.
                     It is seen from all machines, on every file system.

A process that wants the folder decides by the name in the file:

    nobody                     -> it is ours
    this very process          -> refused
    one of this machine whose
    lock the kernel has        -> refused
    one of this system         -> ours, as the kernel has no lock of it
    any other                  -> refused at the first beat; ours after QUIET_SECONDS without one

A system is what sees the same processes and the same disks: a machine, or a container on it. Two
containers of a machine have one kernel, but each may have mounted the folder by itself, and then a
kernel does not show one's locks to the other. A process number says nothing: in a container the
first process is number 1, whoever it is.

Beats are compared with each other, never with this machine's clock, which may be wrong.

filelock, which torch brings, is not used: it knows no other machine, it names no holder, and forked
loader workers inherit its flock, which then outlives a killed parent.
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
BEAT_SECONDS = 5.0  # between two beats of a living process
QUIET_SECONDS = 30.0  # without a beat; then the process counts as gone
# What a file system answers that has no locks
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Holder(TypedDict):
    """The process that is at work, as the file names it."""

    host: str
    machine: str  # changes with every start of the machine
    system: str  # the container on it, or the machine itself
    pid: int  # for people: two containers can have the same
    since: str  # local time, for people


# The files that this process holds. The kernel gives a process the lock that it has already, and
# takes it away when the process closes the file a second time
_OURS: set[Path] = set()
# A forked child inherits the set, but no lock
os.register_at_fork(after_in_child=_OURS.clear)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Work alone in an existing `folder` until the block ends. An error names another process that
    is at work in it."""
    file = folder / LOCK_FILE
    ours = file.resolve()
    if ours in _OURS:
        raise BadInput(
            f"{folder}: this process ({os.getpid()}) is at work here already;"
            " choose another --out"
        )
    _OURS.add(ours)
    try:
        with _held_by_us(file):
            yield
    finally:
        _OURS.discard(ours)


@contextlib.contextmanager
def _held_by_us(file: Path) -> Iterator[None]:
    descriptor = _take(file)
    ended = threading.Event()
    heart = threading.Thread(target=_beat, args=(descriptor, ended), daemon=True)
    heart.start()
    try:
        yield
    finally:
        ended.set()
        heart.join()
        # The file goes before the lock, so that whoever has it open by now sees that it is gone
        with contextlib.suppress(OSError):
            if _is_file(descriptor, file):
                file.unlink()
        os.close(descriptor)


def _take(file: Path) -> int:
    """Return the descriptor of `file`, locked, with this process's name in it."""
    while True:
        with contextlib.ExitStack() as stack:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, descriptor)
            if _claim(descriptor, file):
                stack.pop_all()  # it stays open
                return descriptor


def _claim(descriptor: int, file: Path) -> bool:
    """Write our name into the open file. Return False where the file must be opened anew."""
    locked = _lock(descriptor)
    if not _is_file(descriptor, file):  # its owner has ended since, and removed it
        return False
    holder = _read(descriptor)
    who = "another run"
    if holder is not None:
        who = f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
    refusal = f"{file.parent}: {who} is at work; wait for it, or choose another --out"
    here = holder is None or holder["machine"] == _machine()
    # 1. The kernel's word. Where nobody is named, the process is about to write its name
    if here and locked is False:
        raise BadInput(refusal)
    # 2. The heart, of whom this kernel may not know
    known = locked and here and (holder is None or holder["system"] == _system())
    if holder is not None and not known:
        log.info(f"{file.parent}: looking whether {who} is still at work here ...")
        if _beats(file):
            if here:
                raise BadInput(refusal)
            # A launcher tries again after Failed: a process on a machine that Slurm gave up ends
            # soon, and the next attempt finds it gone
            raise Failed(refusal)
        # That process is gone, but its lock may stay until the server notices. Our own lock is lost
        # as well, since `_beats` has opened and closed the file. A new file has no locks
        if _is_file(descriptor, file):
            file.unlink()
        return False
    # 3. Nobody is at work
    holder = Holder(
        host=socket.gethostname(),
        machine=_machine(),
        system=_system(),
        pid=os.getpid(),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
    )
    text = json.dumps(holder).encode()
    with failures.naming(file):
        os.pwrite(descriptor, text, 0)
        os.ftruncate(descriptor, len(text))
    return True


def _lock(descriptor: int) -> bool | None:
    """Take the kernel's lock. Return True if it is ours now, False if another process has it, None
    where the file system has no locks."""
    # flock would pass to forked loader workers, and outlive a parent that was killed
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _beats(file: Path) -> bool:
    """Return True if the file's time of change moves within QUIET_SECONDS."""
    times: set[int | None] = set()
    deadline = time.monotonic() + QUIET_SECONDS
    while len(times) < 2 and time.monotonic() < deadline:
        # The file is opened anew each time, as that is when NFS asks the server
        try:
            with file.open("rb") as opened:
                times.add(os.fstat(opened.fileno()).st_mtime_ns)
        except FileNotFoundError:
            # No file counts as a time of its own: that it came or went is a change.
            times.add(None)
        time.sleep(min(1.0, QUIET_SECONDS / 4))
    return len(times) > 1


def _beat(descriptor: int, ended: threading.Event) -> None:
    """Move the file's time of change every few seconds, until `ended` is set."""
    while not ended.wait(BEAT_SECONDS):
        # A file system that is full or away for a moment is no reason to end a run
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def _is_file(descriptor: int, file: Path) -> bool:
    """Return True if `file` is the file behind the descriptor, not a new one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> Holder | None:
    """Return the holder that is named; None where nobody is, or only half a name was written."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        found.setdefault("system", "")  # which version 0.1.0 did not write at first
        return Holder(**{key: found[key] for key in Holder.__annotations__})  # type: ignore[typeddict-item]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _machine() -> str:
    """Identify this machine since its last start. Many machines share a name like `localhost`."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux
        return platform.node()


def _system() -> str:
    """Identify the processes that this one can see: those of its container, or of the machine."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # no Linux
        return ""
