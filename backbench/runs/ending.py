"""Ends a command: signals and errors become an exit status and one line."""

import os
import select
import sys
from collections.abc import Callable

from backbench.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_PIPE_CLOSED,
    EXIT_PREEMPTED,
    BadInput,
    Failed,
    Preempted,
    Stopped,
)
from backbench.runs import failures
from backbench.runs.state import stops_at_once
from backbench.runs.terminal import end_live_line, setup_logging


def guarded(
    action: Callable[[], int | None], *, verbosity: int = 0, debug: bool = False
) -> int:
    """Return a verb's exit status. An error is one line on stderr; with `debug` it is raised, and
    Python shows its traceback. `verbosity` is -1 for warnings only, 1 for more output."""
    setup_logging(verbosity)
    stopped_by: list[str] = []
    try:
        with stops_at_once() as stopped_by:
            status = action() or 0
            sys.stdout.flush()  # here, where a closed pipe is no fault
            return status
    except (Stopped, KeyboardInterrupt) as signal:
        # A second Ctrl-C is a KeyboardInterrupt, which has no words
        return _say_stopped(str(signal) or "SIGINT")
    except (Exception, SystemExit) as error:
        if isinstance(error, BrokenPipeError) and _pipe_is_closed():
            return EXIT_PIPE_CLOSED
        # torch and safetensors take an exception that a signal raises inside them for one of theirs
        if stopped_by:
            return _say_stopped(stopped_by[0])
        # A verb that exits by itself has said why
        if isinstance(error, SystemExit) and (
            error.code is None or isinstance(error.code, int)
        ):
            return error.code or 0
        if debug:
            raise
        line = " ".join(str(error).split())
        status = EXIT_FAILED
        if (plain := failures.explain(error)) is not None:
            line, status = plain
        elif isinstance(error, BadInput):
            status = EXIT_BAD_INPUT
        elif isinstance(error, Preempted):
            status = EXIT_PREEMPTED
        elif not isinstance(error, Failed):
            # Neither the user, nor a signal, nor the machine: the program itself
            kind = type(error).__name__
            line = f"{kind}: {line} (this is a fault of backbench: --debug shows where)"
        _say(line)
        return status


def _pipe_is_closed() -> bool:
    """Return True if nobody reads our output, as behind `| head`; the rest of it is then
    discarded."""
    closed = False
    for descriptor in (1, 2):
        writing = select.poll()
        writing.register(descriptor, select.POLLOUT)
        if any(
            event & (select.POLLERR | select.POLLHUP) for _, event in writing.poll(0)
        ):
            closed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return closed


def _say_stopped(by: str) -> int:
    _say(f"stopped by {by}; the same command continues")
    return EXIT_PREEMPTED


def _say(line: str) -> None:
    end_live_line()
    print(f"backbench: {line}", file=sys.stderr)
