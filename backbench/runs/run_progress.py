"""How far a run is: a live line on a terminal, a line every 10 s in a log, and RUN/progress.json."""

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
TERMINAL_SECONDS, LOG_SECONDS, FILE_SECONDS = 0.2, 10.0, 1.0
QUIET_SECONDS = 3.0  # looking at data for less than this shows no line


class Progress:
    """Counts steps of `total` and shows them with rate and ETA. `done` at construction is where a
    continued run starts; the rate counts only the steps since then. Work that is over within
    `after` seconds shows no line at all."""

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
        self.run, self.total, self.what, self.unit = run, total, what, unit
        self.after = after
        self.first = self.done = done
        self.meter = None if run is None else price.Meter(unit, done)
        self.start = time.monotonic()
        self._shown = self._written = 0.0
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
        """Count `count` more steps; `info` is shown behind the rate."""
        self.done += count
        if self.meter is not None:
            self.meter.count(count)
        now = time.monotonic()
        last = self.done >= self.total
        due = last or now - self._shown > (
            TERMINAL_SECONDS if self._tty else LOG_SECONDS
        )
        if due and now - self.start >= self.after:
            self._shown = now
            self._print(info, last)
        if self.run is not None and (last or now - self._written > FILE_SECONDS):
            self._written, eta = now, self.eta
            note = ProgressNote(
                what=self.what,
                done=self.done,
                total=self.total,
                unit=self.unit,
                eta_s=None if eta == math.inf else round(eta, 1),
                time=time.time(),
            )
            with contextlib.suppress(
                OSError
            ):  # a full disk must not end the run for this file
                atomic.write_json(Path(self.run) / PROGRESS_FILE, note)

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
    """RUN/progress.json."""

    what: str
    done: int
    total: int
    unit: str
    eta_s: float | None  # seconds left at `time`; None while nothing is known
    time: float  # seconds since 1970


def read_progress(run: str | Path) -> ProgressNote | None:
    """Read RUN/progress.json; None where there is none, or none that makes sense."""
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
    counts = 0 <= out["done"] < 1 << 62 and 0 <= out["total"] < 1 << 62
    times = math.isfinite(out["time"]) and not math.isnan(out["eta_s"] or 0.0)
    return out if counts and times else None


def seconds(value: float) -> str:
    """75.2 -> 1:15; 0.42 -> 0.4 s."""
    if value == math.inf:
        return "?"
    if value < 10:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
