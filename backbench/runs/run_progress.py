"""Shows how far a run is: on a terminal, every 10 s in a log, and in RUN/progress.json."""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from backbench.runs import atomic, price
from backbench.runs.folder import PROGRESS_FILE
from backbench.runs.terminal import log, show_live
from backbench.untrusted import jsons, printable

# The least time between two lines on a terminal, two lines of a log, two writes of progress.json
TERMINAL_SECONDS = 0.2
LOG_SECONDS = 10.0
FILE_SECONDS = 1.0
QUIET_SECONDS = 3.0  # looking at data for less than this shows no line


class Progress:
    """Counts steps out of `total` and shows them with their rate and the time left. A continued run
    starts at `done`, and the rate is that of the steps since then. Work that is over within `after`
    seconds shows no line at all."""

    def __init__(
        self,
        run: str | Path | None,
        total: int,
        what: str,
        *,
        unit: str = "step",
        done: int = 0,
        after: float = 0.0,
    ) -> None:
        self.run = run
        self.total = total
        self.what = what
        self.unit = unit
        self.after = after
        self.first = done
        self.done = done
        self.meter = None if run is None else price.Meter(unit, done)
        self.start = time.monotonic()
        self._shown = 0.0  # when the last line was
        self._written = 0.0  # when progress.json was
        self._tty = sys.stderr.isatty()

    @property
    def eta(self) -> float:
        """Seconds left; inf while nothing is known."""
        made = self.done - self.first
        left = self.total - self.done
        if made:
            return left * (time.monotonic() - self.start) / made
        return math.inf if left else 0.0

    def advance(self, count: int = 1, **info: float | str) -> None:
        """Count `count` more steps. `info` is shown behind the rate."""
        self.done += count
        if self.meter is not None:
            self.meter.count(count)
        now = time.monotonic()
        last = self.done >= self.total
        pause = TERMINAL_SECONDS if self._tty else LOG_SECONDS
        due = last or now - self._shown > pause
        if due and now - self.start >= self.after:
            self._shown = now
            self._print(info, last)
        if self.run is not None and (last or now - self._written > FILE_SECONDS):
            self._written = now
            # A full disk must not end the run for this file
            with contextlib.suppress(OSError):
                atomic.write_json(Path(self.run) / PROGRESS_FILE, self._note())

    def _note(self) -> "ProgressNote":
        eta = self.eta
        return ProgressNote(
            what=self.what,
            done=self.done,
            total=self.total,
            unit=self.unit,
            eta_s=None if eta == math.inf else round(eta, 1),
            time=time.time(),
        )

    def _print(self, info: Mapping[str, float | str], last: bool) -> None:
        if log.level > logging.INFO:
            return
        took = time.monotonic() - self.start
        rate = (self.done - self.first) / took if took else 0.0
        end = f"took {seconds(took)}" if last else f"ETA {seconds(self.eta)}"
        line = (
            f"{self.what}: {self.done}/{self.total} {self.unit}s  {rate:.3g}/s  {end}"
        )
        for name, value in info.items():
            shown = f"{value:.4g}" if isinstance(value, float) else value
            line += f"  {name} {shown}"
        if self._tty:
            show_live(line, last=last)
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()


class ProgressNote(TypedDict):
    """These are the keys of RUN/progress.json."""

    what: str
    done: int
    total: int
    unit: str
    eta_s: float | None  # seconds left at `time`; None while nothing is known
    time: float  # seconds since 1970


def read_progress(run: str | Path) -> ProgressNote | None:
    """Read RUN/progress.json. Return None where there is none, or none that makes sense."""
    try:
        note = jsons.read(Path(run) / PROGRESS_FILE)
        left = note["eta_s"]
        out = ProgressNote(
            what=printable.shown(str(note["what"])),
            done=int(note["done"]),
            total=int(note["total"]),
            unit=printable.shown(str(note["unit"])),
            eta_s=None if left is None else float(left),
            time=float(note["time"]),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    # A NaN or an absurd count would spread to every sum that it is part of
    if not (0 <= out["done"] < 1 << 62 and 0 <= out["total"] < 1 << 62):
        return None
    if not math.isfinite(out["time"]) or math.isnan(out["eta_s"] or 0.0):
        return None
    return out


def seconds(value: float) -> str:
    """Spell a time: 75.2 is 1:15, 0.42 is 0.4 s, and inf is a question mark."""
    if value == math.inf:
        return "?"
    if value < 10:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"
