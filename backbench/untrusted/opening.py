"""Opens files that may be no files: FIFOs, devices, or files far larger than their kind ever is."""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MEGABYTE = 1 << 20
GIGABYTE = 1 << 30


def open_regular(path: str | Path, *, most: int | None = None) -> BinaryIO:
    """Open a file for reading. OSError as from `open`, and also for what is no regular file (opening
    a FIFO would wait for its writer) and for a file of more than `most` bytes."""
    descriptor = _opened(path, most)
    try:
        _refuse(os.fstat(descriptor), path, most)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        # If a stop came behind fdopen, the file has closed the descriptor already, and EBADF would
        # hide the stop.
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise


def read_bytes(path: str | Path, *, most: int) -> bytes:
    """Return the whole content of a regular file of at most `most` bytes; OSError otherwise."""
    with open_regular(path, most=most) as file:
        return file.read(most + 1)[:most]


def ends(path: str, size: int) -> bytes:
    """Return the first and the last `size` bytes of a regular file, without reading the rest."""
    descriptor = _opened(path, None)
    try:
        about = os.fstat(descriptor)
        _refuse(about, path, None)
        # A million files: a Python file object for each would take twice as long
        first = os.pread(descriptor, size, 0)
        return first + os.pread(descriptor, size, max(0, about.st_size - size))
    finally:
        os.close(descriptor)


def _opened(path: str | Path, most: int | None) -> int:
    """Open a file, and return its descriptor.

    Check before opening, since a device may act when it is opened. Whoever calls this must check
    again what was opened, since the file may have been exchanged in between."""
    _refuse(os.stat(path), path, most)  # noqa: PTH116 - thousands: twice as fast
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _refuse(about: os.stat_result, path: str | Path, most: int | None) -> None:
    """Raise OSError for a folder, for what is no regular file, and for more than `most` bytes."""
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if most is not None and about.st_size > most:
        said = f"{about.st_size} bytes, more than any such file has ({most})"
        raise OSError(errno.EFBIG, said, str(path))
