"""The program `backbench` (also `python -m backbench`) runs `cli.program.main` and handles stop signals
from the first line to the last.

    during imports   one line, exit 75: nothing was begun
    in the verb      `runs.ending.guarded` and the verb's own loops act
    after the verb   ignored: the status is known, and Python would only print where it stood
"""

import atexit
import contextlib
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
    """The exit status of the command line `argv` (default: this process's own)."""
    listen()
    wait_without_spinning()
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
