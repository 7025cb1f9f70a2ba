"""Processes that a run starts for itself end with it."""

import contextlib
import ctypes
import signal

PR_SET_PDEATHSIG = 1  # of Linux's prctl


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """From here on this process gets signal `number` when its parent ends; on Linux, elsewhere
    nothing happens. Where the parent has ended before this line, it is another by now."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
