"""Messages on standard error: the logger, and the live line of a terminal."""

import logging
import shutil
import sys
from typing import TextIO

log = logging.getLogger("backbench")


class _LiveLine:
    """A line of progress that stands on the terminal without an end yet."""

    stands = False


def show_live(line: str, *, last: bool) -> None:
    """Write `line` over the live one; the `last` one ends with a new line."""
    # One column less than fits: some terminals begin a new line behind the last column
    width = shutil.get_terminal_size().columns - 1
    sys.stderr.write(f"\r\x1b[K{line[:width]}" + ("\n" if last else ""))
    _LiveLine.stands = not last


def end_live_line() -> None:
    """End the live line, so that the next message begins on a line of its own."""
    if _LiveLine.stands:
        _LiveLine.stands = False
        sys.stderr.write("\n")


class _Handler(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        end_live_line()
        super().emit(record)


def setup_logging(verbosity: int = 0) -> None:
    """Plain lines on standard error: -1 (-q) shows warnings only, 1 (-v) debug messages too."""
    level = {-1: logging.WARNING, 0: logging.INFO}.get(verbosity, logging.DEBUG)
    logging.basicConfig(
        level="WARNING", format="%(message)s", handlers=[_Handler(sys.stderr)]
    )
    log.setLevel(level)
