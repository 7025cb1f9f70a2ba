"""The program `backbench` (also `python -m backbench`) runs `cli.program.main` and handles stop signals
from the first line to the last.

    during imports   one line, exit 75: nothing was begun
    in the verb      `runs.ending.guarded` and the verb's own loops act
    after the verb   ignored: the status is known, and Python would only print where it stood
"""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

if sys.platform == "win32":
    # Files are locked and signals are handled as POSIX does; the imports below would fail
    sys.stderr.write(
        "backbench: it runs on Linux and macOS; on Windows use WSL (`wsl --install`)\n"
    )
    raise SystemExit(2)

from backbench.runs.stopping import NUMBERS, listen


def program(argv: Sequence[str] | None = None) -> int:
    """Return the exit status of the command line `argv` (default: this process's own)."""
    listen()
    wait_without_spinning()
    keep_freed_memory()
    from backbench.cli.program import main

    try:
        status = main(argv)
    finally:
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)
    if "MASTER_PORT" in os.environ:  # one of several processes
        end(status)
    return status


def wait_without_spinning() -> None:
    """Let the threads of small tensor operations sleep while they wait for one another, unless the
    user says otherwise. libgomp reads this when torch is loaded. Spinning threads keep cores that
    the others need: 45 fits of logistic regression took 60 s on two cores, and 9 s so."""
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


# Numbers of <malloc.h>
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# Bytes at most that are free and kept: the largest number that mallopt takes
KEPT = 2**31 - 1
# Bytes at most of a piece that is cut from kept memory; larger ones come and go as before
LARGEST = 2**30


def keep_freed_memory() -> None:
    """Let glibc keep the memory that is freed, for what is allocated next, unless the user has set
    its allocator.

    A trunk makes and drops tensors of some 100 MB at every layer. By default each goes back to the
    kernel, which hands out empty pages for the next one: of a frozen EfficientNet-Lite0's time that
    was more than half, and of a ResNet-50's a third."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    # Other systems' libraries have no mallopt
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT)


def end(status: int) -> NoReturn:
    """End this process before Python takes itself down: a thread of gloo that drops its last tensor
    meanwhile would abort it, and Fabric kills rank 0 for that."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    raise SystemExit(program())
