"""The rules for what follows an attempt at a job: done, again, failed, stopped or cancelled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from backbench.launch.records import AttemptNote

SAME_REASON = 3  # a job that fails this often for the same reason, without progress, stops
ANY_REASON = 6  # and so does one that fails this often without progress at all

Outcome = Literal["done", "failed", "again", "stopped", "cancelled"]


class Ending(NamedTuple):
    """How an attempt ended: a code that `decide` uses, and a reason for people."""

    how: str  # done, failed, bad input, preempted, time limit, stopped, lost peer
    reason: str | None


def decide(
    ending: Ending, attempts: Sequence[AttemptNote], *, cancelled: bool
) -> tuple[Outcome, str | None]:
    """Return the outcome and its reason. `attempts` are those that count, this one last."""
    how, reason = ending
    # 1. It is over, well or by somebody's wish. A cancelled job ends like one that was stopped or
    #    preempted, so the mark is asked for before those.
    if how == "done":
        return "done", None
    if cancelled:
        return "cancelled", None
    if how == "stopped":
        return "stopped", reason
    # 2. It failed in a way that the next attempt would repeat.
    if how == "bad input":
        return "failed", reason
    # 3. It came to the same end often enough and got nowhere in between.
    if (verdict := _often_enough(ending, since_progress(attempts))) is not None:
        return "failed", verdict
    # 4. Failed but not often, or with progress; a node lost; preempted however often.
    return "again", reason


def since_progress(attempts: Sequence[AttemptNote]) -> Sequence[AttemptNote]:
    """Return the last attempt that got farther than all before it, and those after it.

    Earlier failures no longer count: three kills in three places are three accidents, three at one
    place are a defect of the job.
    """
    farthest: dict[str, int] = {}  # of each part of the run: the most steps that were done
    first = 0
    for number, attempt in enumerate(attempts):
        place = re.fullmatch(r"(.*) (\d{1,18})/\d+", attempt.get("at") or "", re.DOTALL)
        if place is None:
            continue
        part, step = place[1], int(place[2])
        if step > farthest.get(part, 0):
            farthest[part], first = step, number
    return attempts[first:]


def _often_enough(ending: Ending, attempts: Sequence[AttemptNote]) -> str | None:
    """Say why the job ends here; None while it may try again. `attempts`: those since progress."""
    how, reason = ending
    same = [attempt for attempt in attempts if attempt.get("how") == how]
    if how == "failed":
        shapes = {_shape(attempt.get("reason")) for attempt in same[-SAME_REASON:]}
        if len(same) >= SAME_REASON and len(shapes) == 1:
            return f"failed {len(same)} times for the same reason: {reason}"
        if len(same) >= ANY_REASON:
            return f"failed {len(same)} times, at last: {reason}"
    # A lost node is not the job's failure; nodes that never find each other are a wrong setting
    if how == "lost peer" and len(same) >= ANY_REASON:
        return (
            f"its tasks lost each other {len(same)} times at the same point (see"
            f" NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME): {reason}"
        )
    # Its time is too short for one step: each attempt ends where the one before it began
    if how == "time limit" and len(same) >= SAME_REASON:
        at = attempts[-1].get("at")
        return f"{len(same)} time limits ended at the same point ({at}): give it more hours"
    return None


def _shape(reason: str | None) -> str:
    """Remove numbers from a reason: `tried to allocate 2.1 GiB` and 2.4 GiB are one failure."""
    return re.sub(r"\d+", "#", reason or "")
