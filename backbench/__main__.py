"""The program `backbench` (and `python -m backbench`): the process around `cli.main`, which handles
a stop signal from its first line to its last.

    imports     -- a signal -->  one line, exit 75: nothing was begun
    the verb    -- a signal -->  what `cli.guarded` and the verb's own loops make of it
    behind it   -- a signal -->  not heard: the status is known, and only the interpreter is at work,
                                 which would say where it stood
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from backbench.errors import EXIT_PREEMPTED, STOP_SIGNALS, Stopped

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

NUMBERS = tuple(getattr(signal, name) for name in STOP_SIGNALS)


def program(argv: Sequence[str] | None = None) -> int:
    """The exit status of the command line `argv` (default: this process's own)."""
    listen()
    from backbench.cli import main

    try:
        return main(argv)
    finally:
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)


def listen() -> None:
    """From here on a stop signal ends this process plainly."""
    for number in NUMBERS:
        signal.signal(number, _leave)
    sys.unraisablehook = _unraisable


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    name = signal.Signals(number).name
    os.write(2, f"backbench: stopped by {name}; the same command continues\n".encode())
    os._exit(EXIT_PREEMPTED)


def _unraisable(what: UnraisableHookArgs) -> None:
    """A signal that came while a destructor ran: Python would print where and go on."""
    if issubclass(what.exc_type, Stopped | KeyboardInterrupt):
        name = str(what.exc_value) or "SIGINT"  # a second Ctrl-C has no words
        _leave(signal.Signals[name], None)
    sys.__unraisablehook__(what)


if __name__ == "__main__":
    raise SystemExit(program())
