"""States each failure of the machine (disk, worker, neighbour) in a line; other errors are bugs."""

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
# errno -> (what is wrong, what to do, exit status). A fault that was there from the start is bad
# input: trying again, as a launcher would, does not help
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
}
# Libraries that write by themselves give the number in their text only
_CODE = re.compile(r"(?:os error |\bcode: |\[Errno )(\d+)")
_NO_ROOM = re.compile(
    r"No space left on device|StorageFull|PytorchStreamWriter failed writing"
)
_WORKER = re.compile(
    r"DataLoader worker \(pid.{0,80}\) (is killed by signal|exited unexpectedly)"
)
_SHARED_MEMORY = re.compile(r"shared memory|Bus error")
_NEIGHBOUR = re.compile(
    r"[Cc]onnection (?:closed|reset) by peer|Broken pipe|Socket closed|remote process exited"
    r"|failed to connect to|Timed out waiting \d+ms for"
)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Make an OSError inside that names no file name `path`, and a library's error of that kind, too."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    except Exception as error:
        code = _CODE.search(str(error))
        number = int(code.group(1)) if code else None
        if _NO_ROOM.search(str(error)):
            number = errno.ENOSPC
        if number not in _DISK:
            raise
        raise OSError(number, str(error), str(path)) from error


def explain(error: BaseException) -> tuple[str, int] | None:
    """(the line, the exit status); None where the machine is not to blame."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        if "No usable temporary directory" in text:
            why = "no folder for temporary files can be written to; set TMPDIR"
            return f"{why}; {AGAIN}", EXIT_FAILED
        if error.errno not in _DISK:
            return None
        what, remedy, status = _DISK[error.errno]
        where = error.filename2 or error.filename
        return f"{where}: {what}; {remedy}" if where else f"{what}; {remedy}", status
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        less = f"use a smaller batch or fewer {WORKERS}"
        return (
            f"out of memory ({text[:100] or 'of the machine'}); {less}; {AGAIN}",
            EXIT_FAILED,
        )
    if _WORKER.search(text) and _SHARED_MEMORY.search(text):
        less = f"make /dev/shm larger, or take 0 {WORKERS}"
        return f"a loader worker found no shared memory; {less}; {AGAIN}", EXIT_FAILED
    if _WORKER.search(text):
        fewer = f"try fewer {WORKERS}"
        return (
            f"a loader worker was killed, perhaps for memory: {fewer}; {AGAIN}",
            EXIT_FAILED,
        )
    if isinstance(error, RuntimeError) and _NEIGHBOUR.search(text):
        gone = "another process of this run is gone; where it has one, its own line says why"
        return f"{gone}; {AGAIN}", EXIT_FAILED
    return None
