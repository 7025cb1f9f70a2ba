"""Writes messages to standard error: the logger, and the live line of a terminal."""

import contextlib
import logging
import shutil
import sys
from collections.abc import Iterator
from typing import TextIO

log = logging.getLogger("backbench")


class _LiveLine:
    """The line of progress that is rewritten in place on a terminal."""

    stands = False  # whether it is there, without a line end


def show_live(line: str, *, last: bool) -> None:
    """Write `line` over the live one. The `last` one gets a line end."""
    # One column less than fits, as some terminals begin a new line behind the last column
    width = shutil.get_terminal_size().columns - 1
    end = "\n" if last else ""
    sys.stderr.write(f"\r\x1b[K{line[:width]}{end}")
    _LiveLine.stands = not last


def end_live_line() -> None:
    """End the live line, so that the next message begins on a line of its own."""
    if _LiveLine.stands:
        _LiveLine.stands = False
        sys.stderr.write("\n")


class _Handler(logging.StreamHandler[TextIO]):
    """Writes messages below the live line, not into it."""

    def emit(self, record: logging.LogRecord) -> None:
        end_live_line()
        super().emit(record)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep information to itself, but not warnings, while something is tried out."""
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def setup_logging(verbosity: int = 0) -> None:
    """Log plain lines to standard error. -1 (-q) shows warnings only, 1 (-v) debug messages too."""
    level = {-1: logging.WARNING, 0: logging.INFO}.get(verbosity, logging.DEBUG)
    logging.basicConfig(
        level="WARNING", format="%(message)s", handlers=[_Handler(sys.stderr)]
    )
    log.setLevel(level)
