"""Locks that tell who is at work in RUNS: held by a live process, and freed by its death.

These are kernel locks (flock) on files of RUNS/.launch. The kernel frees one when the last process
that has the file open ends, however it ends. A child that inherits the open file holds the lock as
well: a job's command keeps its lock when the process above it is killed. (`runs.lock`, by which a
run guards its own folder, wants the opposite, and is another kind of lock.)

The lock is the truth. The text in the file only says whose it is, and a killed launcher leaves it
behind.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from backbench.runs import failures

# Whoever looks at a lock (`holder`) holds it for microseconds. Whoever wants it tries for this long.
LOOK_S = 0.5


def holder(path: Path) -> str | None:
    """Return what the process that holds this lock wrote into it; None when nobody holds it."""
    # A look takes a shared lock: it changes nothing, works on NFS, and two processes that look at
    # the same time do not take each other for holders.
    try:
        with path.open() as file:
            if _try_lock(file, fcntl.LOCK_SH, without_locks=True):
                return None
            return file.read().strip() or "?"
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def hold(
    path: Path,
    refusal: Exception,
    patience_s: float = LOOK_S,
    *,
    text: str = "",
    without_locks: bool = False,
) -> Iterator[int]:
    """Hold a lock, with `text` in its file; gives the open file's descriptor.

    Raises `refusal` where another process still holds it after `patience_s`. `without_locks` says
    what happens on a file system that has no locks: True goes on, False refuses.
    """
    end = time.monotonic() + patience_s
    with contextlib.ExitStack() as stack:
        while True:
            file = stack.enter_context(_made(path))
            while not _try_lock(file, fcntl.LOCK_EX, without_locks=without_locks):
                if time.monotonic() > end:
                    raise refusal
                time.sleep(min(0.2, patience_s / 25))
            if _is_file_at(path, file):
                break
            stack.close()  # its last holder took the file away: the next one makes another
        file.truncate(0)
        file.write(text)
        file.flush()
        yield file.fileno()


def _made(path: Path) -> IO[str]:
    """Open the file, and make it where it is not there."""
    while True:
        failures.make_folder(path.parent)
        # Whoever leaves may take an empty folder away between these two lines
        with contextlib.suppress(FileNotFoundError):
            return path.open("a+")


def _is_file_at(path: Path, file: IO[str]) -> bool:
    """Say whether the open file is still the one that others find there."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _try_lock(file: IO[str], kind: int, *, without_locks: bool) -> bool:
    """Say whether the lock is ours now; `without_locks` is the answer where there are none."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        return without_locks
    return True
