"""Says what a run will do before it starts, and after a few timed steps how long that takes here.

A verb announces the units of work that are left (steps, images, fits); Progress counts them down.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from backbench.runs.terminal import log

MINUTE = 60.0
HOUR = 60 * MINUTE
DAY = 24 * HOUR
# Work below LEAST_TOLD_SECONDS is not worth a word; above DEAR_SECONDS a cheaper way is named
LEAST_TOLD_SECONDS = 60.0
DEAR_SECONDS = 3600.0
# A rate is believed after LEAST_UNITS that took LEAST_TIMED_SECONDS, or after ENOUGH_SECONDS alone
LEAST_UNITS = 10
LEAST_TIMED_SECONDS = 5.0
ENOUGH_SECONDS = 30.0


@dataclass
class _Announced:
    """The work that this process's run has left, by unit, and what would cost less."""

    left: dict[str, float] = field(default_factory=dict)
    cheaper: str = ""


_run = _Announced()


def announce(
    what: str, *parts: str, work: Mapping[str, float], cheaper: str = ""
) -> None:
    """Log what will be done: `what`, its `parts`, and the counts of `work` by unit. `cheaper` names
    a cheaper way, for a run on a CPU."""
    counts = [plural(count, unit) for unit, count in work.items() if count]
    said = [part for part in (*parts, ", ".join(counts)) if part]
    log.info(f"{what}: {'; '.join(said)}")
    _run.left = dict(work)
    _run.cheaper = cheaper


def skip(unit: str, count: float) -> None:
    """Note that `count` of the announced units are there already."""
    if unit in _run.left:
        _run.left[unit] -= count


class Meter:
    """Times one unit of work until its price can be said."""

    def __init__(self, unit: str, done: int) -> None:
        self.unit = unit
        self.began = time.monotonic()
        # The first units start the machine up, so the rate is measured from their end on
        self.warm: float | None = None
        self.counted = 0
        skip(unit, done)

    def count(self, units: int) -> None:
        """Count units that are done. Say once for each kind of unit how long the rest will take."""
        skip(self.unit, units)
        now = time.monotonic()
        if self.warm is None:
            self.warm = now
            made = units
            took = now - self.began
            known = False
        else:
            self.counted += units
            made = self.counted
            took = now - self.warm
            known = made >= LEAST_UNITS and took >= LEAST_TIMED_SECONDS
        if self.unit not in _run.left or not (known or took >= ENOUGH_SECONDS):
            return
        left = _run.left.pop(self.unit)
        needed = left * took / made
        if needed < LEAST_TOLD_SECONDS:
            return
        cheaper = ""
        if needed > DEAR_SECONDS and _run.cheaper:
            cheaper = f"; {_run.cheaper}"
        log.info(
            f"about {spelled(needed)} here for {left:,.0f} more {self.unit}s,"
            f" at {made / took:.3g} a second{cheaper}"
        )


def plural(count: float, unit: str) -> str:
    """Spell a count: 1 checkpoint, 30,000 steps."""
    ending = "" if count == 1 else "s"
    return f"{count:,.0f} {unit}{ending}"


def spelled(seconds: float) -> str:
    """Spell a time: 10 is 10 seconds, 90 is 2 minutes, 5400 is 1.5 hours, 3.2e6 is 37 days."""
    if seconds < MINUTE:
        return plural(max(1, round(seconds)), "second")
    if seconds < HOUR:
        return plural(round(seconds / MINUTE), "minute")
    if seconds < 2 * DAY:
        hours = seconds / HOUR
        return f"{hours:.1f} hours" if hours < 10 else f"{hours:.0f} hours"
    days = seconds / DAY
    return f"{days:.1f} days" if days < 10 else f"{days:,.0f} days"
