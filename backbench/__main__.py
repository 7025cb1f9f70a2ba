"""The program `backbench` (also `python -m backbench`) runs `cli.main` and handles stop signals
from the first line to the last.

    during imports   one line, exit 75: nothing was begun
    in the verb      `cli.guarded` and the verb's own loops act
    after the verb   ignored: the status is known, and Python would only print where it stood
"""

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from backbench.errors import EXIT_PREEMPTED, STOP_SIGNALS, Stopped

NUMBERS = tuple(getattr(signal, name) for name in STOP_SIGNALS)


def program(argv: Sequence[str] | None = None) -> int:
    """The exit status of the command line `argv` (default: this process's own)."""
    listen()
    from backbench.cli import main

    try:
        status = main(argv)
    finally:
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)
    if "MASTER_PORT" in os.environ:  # one of several processes
        end(status)
    return status


def end(status: int) -> NoReturn:
    """End this process before Python takes itself down: a thread of gloo that drops its last tensor
    meanwhile would abort it, and Fabric kills rank 0 for that."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


def listen() -> None:
    """From here on a stop signal ends this process plainly."""
    for number in NUMBERS:
        signal.signal(number, _leave)
    sys.unraisablehook = _unraisable


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    name = signal.Signals(number).name
    os.write(2, f"backbench: stopped by {name}; the same command continues\n".encode())
    os._exit(EXIT_PREEMPTED)


def _unraisable(what: "sys.UnraisableHookArgs") -> None:
    """A signal that came while a destructor ran: Python would print where and go on."""
    if issubclass(what.exc_type, Stopped | KeyboardInterrupt):
        name = str(what.exc_value) or "SIGINT"  # a second Ctrl-C has no words
        _leave(signal.Signals[name], None)
    sys.__unraisablehook__(what)


if __name__ == "__main__":
    raise SystemExit(program())
