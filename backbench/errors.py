"""The ways in which a run ends early, their exit statuses, and the words for a wrong name."""

import difflib
from collections.abc import Iterable
from pathlib import Path

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
# EX_TEMPFAIL of sysexits.h: the state is saved, and the same command continues
EXIT_PREEMPTED = 75
# 128 + SIGPIPE, as any program exits whose output goes to a `head` that has read enough
EXIT_PIPE_CLOSED = 141
# These ask a run to stop. They come from Slurm and `kill`, from users (two signals), and from Ctrl-C
STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")


class BadInput(Exception):
    """The input cannot be used. One line says what came, what was allowed, what to do next."""


class Preempted(Exception):
    """A signal stopped the run and its state is saved; the same command continues."""


class Stopped(BaseException):
    """A signal came where no loop was asking for one; the same command continues from what was saved.

    It is a BaseException, so that no `except Exception` takes it for something else."""


class Failed(Exception):
    """The run itself went wrong (a NaN loss, say); the message is one line with what to look at."""


def no_folder(path: Path) -> str:
    """Say what a path is that is no folder."""
    return "is a file, no folder" if path.exists() else "no such folder"


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return the end of an error message: the allowed name nearest to `name`, or all of them.

    Names may have folders, of which `name` may leave out its own."""
    names = sorted(allowed)
    by_end: dict[str, str] = {}
    for each in names:
        by_end.setdefault(each.rpartition("/")[2], each)
    end = name.rpartition("/")[2]
    if end in by_end:
        return f"did you mean '{by_end[end]}'?"
    close = difflib.get_close_matches(name, names, n=1)
    if not close:
        close = [by_end[each] for each in difflib.get_close_matches(end, by_end, n=1)]
    if close:
        return f"did you mean '{close[0]}'?"
    return f"allowed: {', '.join(names)}"
