"""The two ways a run ends early, and the words for a wrong name."""

import difflib
from collections.abc import Iterable

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_PREEMPTED = (
    75  # EX_TEMPFAIL of sysexits.h: the state is saved, the same command continues
)
EXIT_PIPE_CLOSED = (
    141  # 128 + SIGPIPE, as of any program behind which `head` has read enough
)
# What asks a run to stop: Slurm and `kill`, its users' two signals, Ctrl-C
STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")


class BadInput(Exception):
    """The input cannot be used. One line says what came, what was allowed, what to do next."""


class Preempted(Exception):
    """A signal stopped the run and its state is saved; the same command continues."""


class Stopped(BaseException):
    """A signal came where no loop was asking for one. What was saved before is what the same
    command continues from; no `except Exception` may take it for something else."""


class Failed(Exception):
    """The run itself went wrong (a NaN loss, say); the message is one line with what to look at."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """End an error message: the nearest allowed name (its folder may be left out), or all names."""
    names = sorted(allowed)
    by_end: dict[str, str] = {}
    for each in names:
        by_end.setdefault(each.rpartition("/")[2], each)
    end = name.rpartition("/")[2]
    close = (
        [by_end[end]] if end in by_end else difflib.get_close_matches(name, names, n=1)
    )
    if not close:
        close = [by_end[each] for each in difflib.get_close_matches(end, by_end, n=1)]
    return f"did you mean '{close[0]}'?" if close else f"allowed: {', '.join(names)}"
