"""Ends a process plainly at a stop signal, where there is nothing to save yet."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from backbench.errors import EXIT_PREEMPTED, STOP_SIGNALS, Stopped

NUMBERS = tuple(getattr(signal, name) for name in STOP_SIGNALS)


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
    """Note a signal that came while a destructor ran: Python would print where and go on."""
    if issubclass(what.exc_type, Stopped | KeyboardInterrupt):
        name = str(what.exc_value) or "SIGINT"  # a second Ctrl-C has no words
        _leave(signal.Signals[name], None)
    sys.__unraisablehook__(what)
