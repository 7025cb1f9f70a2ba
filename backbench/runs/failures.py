"""Explains each failure of the machine (disk, worker, neighbour) in a line."""

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path

from backbench.errors import EXIT_BAD_INPUT, EXIT_FAILED

AGAIN = "the same command continues"
FULL = f"make room (`backbench clean RUNS` lists what can go); {AGAIN} then"
WORKERS = "loader workers (--workers; in `detect` DATALOADER.NUM_WORKERS)"
ELSEWHERE = "choose a place that can be written to"
# errno -> (what is wrong, what to do, exit status). A fault that was there from the start counts as
# bad input, so that no launcher tries again
_DISK: dict[int | None, tuple[str, str, int]] = {
    errno.ENOSPC: ("the disk is full", FULL, EXIT_FAILED),
    errno.EDQUOT: ("your quota of this disk is used up", FULL, EXIT_FAILED),
    errno.EFBIG: (
        "files this large are not allowed here (`ulimit -f`)",
        ELSEWHERE,
        EXIT_FAILED,
    ),
    errno.EIO: (
        "the disk fails",
        f"look at it, or move to another; {AGAIN}",
        EXIT_FAILED,
    ),
    errno.ESTALE: ("the file server lost it", AGAIN, EXIT_FAILED),
    errno.EROFS: ("the disk is read-only", ELSEWHERE, EXIT_BAD_INPUT),
    errno.EACCES: ("permission denied", ELSEWHERE, EXIT_BAD_INPUT),
    errno.EPERM: ("not permitted", ELSEWHERE, EXIT_BAD_INPUT),
    errno.EISDIR: ("a folder is there", "choose a file's name", EXIT_BAD_INPUT),
    errno.EEXIST: ("a file is there", "choose another path", EXIT_BAD_INPUT),
    errno.ENOTDIR: (
        "a part of this path is a file",
        "choose another path",
        EXIT_BAD_INPUT,
    ),
    errno.ENAMETOOLONG: (
        "the name is too long",
        "choose a shorter one",
        EXIT_BAD_INPUT,
    ),
    errno.EMFILE: ("too many open files", f"raise `ulimit -n`; {AGAIN}", EXIT_FAILED),
    errno.ENFILE: (
        "too many files are open on this machine",
        f"end other programs; {AGAIN}",
        EXIT_FAILED,
    ),
    errno.ENOMEM: (
        "out of memory",
        f"use a smaller batch or fewer {WORKERS}; {AGAIN}",
        EXIT_FAILED,
    ),
}
# The file that could not be opened or read is not to blame for these
OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)
# Libraries that write by themselves give the errno in their text only
_CODE = re.compile(r"(?:os error |\bcode: |\[Errno )(\d+)")
_NO_ROOM = re.compile(
    r"No space left on device|StorageFull|PytorchStreamWriter failed writing"
)
_WORKER = re.compile(
    r"DataLoader worker \(pid.{0,80}\) (is killed by signal|exited unexpectedly)"
)
# By these a worker ends itself. The kernel and people kill with others, for memory or time
_CRASH = re.compile(
    r"signal: (Segmentation fault|Aborted|Illegal instruction|Floating point exception)"
)
# What torch says where the main process has no file left to receive a batch by
_NO_FILES = re.compile(r"Too many open files|received 0 items of ancdata")
_SHARED_MEMORY = re.compile(r"shared memory|Bus error")
_NO_SHARED_MEMORY = re.compile(
    r"unable to (allocate|open|mmap) (shared memory|\d+ bytes)"
)
# What torch says where malloc finds none
_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory")
_NEIGHBOUR = re.compile(
    r"[Cc]onnection (?:closed|reset) by peer|Broken pipe|Socket closed|remote process exited"
    r"|failed to connect to|Timed out waiting \d+ms for"
)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to an OSError inside that names no file. A library's error whose text gives such an
    error's number becomes an OSError, too."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    except Exception as error:
        number = None
        if code := _CODE.search(str(error)):
            number = int(code.group(1))
        if _NO_ROOM.search(str(error)):
            number = errno.ENOSPC
        if number not in _DISK:
            raise
        raise OSError(number, str(error), str(path)) from error


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, where they are not there.

    Raises PermissionError, with the folder's name, where the system says that there is no such file,
    as in /proc. It stays an OSError: whoever can do without the folder passes over it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        raise PermissionError(errno.EPERM, error.strerror, str(folder)) from None


def explain(error: BaseException) -> tuple[str, int] | None:
    """Return the line to say and the exit status; None where the machine is not to blame."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        if "No usable temporary directory" in text:
            line = "no folder for temporary files can be written to; set TMPDIR"
            return f"{line}; {AGAIN}", EXIT_FAILED
        if error.errno not in _DISK:
            return None
        what, remedy, status = _DISK[error.errno]
        line = f"{what}; {remedy}"
        if where := error.filename2 or error.filename:
            line = f"{where}: {line}"
        return line, status
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or _NO_MEMORY.search(text)
    ):
        line = (
            f"out of memory ({text[:100] or 'of the machine'});"
            f" use a smaller batch or fewer {WORKERS}"
        )
    elif isinstance(error, RuntimeError) and _NO_FILES.search(text):
        # Shared memory is opened as a file, too, so this comes before the lack of it
        line = "too many open files; raise `ulimit -n`"
    elif _NO_SHARED_MEMORY.search(text) or (
        _WORKER.search(text) and _SHARED_MEMORY.search(text)
    ):
        line = (
            "a loader worker found no shared memory; make /dev/shm larger"
            f" (docker and podman: --shm-size=2g), or take 0 {WORKERS}"
        )
    elif _WORKER.search(text) and (crash := _CRASH.search(text)):
        line = (
            f"a loader worker crashed ({crash.group(1)}), in a library or at a damaged"
            f" image; to see where, take 0 {WORKERS} and PYTHONFAULTHANDLER=1"
        )
    elif _WORKER.search(text):
        line = f"a loader worker was killed, perhaps for memory: try fewer {WORKERS}"
    elif isinstance(error, RuntimeError) and _NEIGHBOUR.search(text):
        line = (
            "another process of this run is gone;"
            " where it has one, its own line says why"
        )
    else:
        return None
    return f"{line}; {AGAIN}", EXIT_FAILED
