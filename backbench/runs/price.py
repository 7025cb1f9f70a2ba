"""Says what a run will do before it starts, and after a few timed steps what that costs here. A
verb announces the units of work left (steps, images, fits); Progress works them off."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from backbench.runs.terminal import log

LONG, DEAR = (
    60.0,
    3600.0,
)  # seconds: less is not worth a word; above, a cheaper way is named
# A rate is believed after so many units and seconds, or after so many seconds alone
UNITS, SECONDS, ENOUGH_SECONDS = 10, 5.0, 30.0


@dataclass
class _Announced:
    """The work of this process's run that is left, by unit, and what would cost less."""

    left: dict[str, float] = field(default_factory=dict)
    cheaper: str = ""


_run = _Announced()


def announce(
    what: str, *parts: str, work: Mapping[str, float], cheaper: str = ""
) -> None:
    """Log what will be done. `work`: each unit's count; `cheaper`: a cheaper way on a CPU."""
    counts = [plural(count, unit) for unit, count in work.items() if count]
    log.info(f"{what}: {'; '.join(filter(None, (*parts, ', '.join(counts))))}")
    _run.left, _run.cheaper = dict(work), cheaper


def skip(unit: str, count: float) -> None:
    """Note that `count` of the announced units are there already."""
    if unit in _run.left:
        _run.left[unit] -= count


class Meter:
    """Times one unit of work until its price can be said."""

    def __init__(self, unit: str, done: int) -> None:
        self.unit = unit
        self.began = time.monotonic()
        self.warm: float | None = (
            None  # when the first units were done: they start the machine up
        )
        self.counted = 0
        skip(unit, done)

    def count(self, units: int) -> None:
        """Count units that are done; says once for each kind what the rest will take."""
        skip(self.unit, units)
        now = time.monotonic()
        if self.warm is None:
            self.warm, start, made = now, self.began, units
        else:
            self.counted += units
            start, made = self.warm, self.counted
        took = now - start
        known = made >= UNITS and self.counted and took >= SECONDS
        if self.unit not in _run.left or not (known or took >= ENOUGH_SECONDS):
            return
        left = _run.left.pop(self.unit)
        needed = left * took / made
        if needed < LONG:
            return
        cheaper = f"; {_run.cheaper}" if needed > DEAR and _run.cheaper else ""
        rate = f"at {made / took:.3g} a second{cheaper}"
        log.info(
            f"about {spelled(needed)} here for {left:,.0f} more {self.unit}s, {rate}"
        )


def plural(count: float, unit: str) -> str:
    """1 checkpoint, 30,000 steps."""
    return f"{count:,.0f} {unit}{'' if count == 1 else 's'}"


def spelled(seconds: float) -> str:
    """90 -> 2 minutes; 5400 -> 1.5 hours; 3.2e6 -> 899 hours."""
    if seconds < 3600:
        return plural(max(1, round(seconds / 60)), "minute")
    hours = seconds / 3600
    return f"{hours:.1f} hours" if hours < 10 else f"{hours:,.0f} hours"
