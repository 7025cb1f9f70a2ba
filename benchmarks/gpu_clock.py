"""Times of work that a GPU does, or of this process where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

Timed = Mapping[str, Callable[[], object]]


class Clock:
    """`rounds` turns, each of as many calls as take about a fifth of a second."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = device, rounds

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def _seconds(self, work: Callable[[], object], calls: int) -> float:
        began = self._now()
        for _ in range(calls):
            work()
        return (self._now() - began) / calls

    def least(self, timed: Timed, enough: float = 0.2) -> dict[str, float]:
        """The least seconds of one call of each, in turns, after two calls of warming up."""
        calls = {}
        for name, work in timed.items():
            work()
            calls[name] = max(1, int(enough / max(self._seconds(work, 1), 1e-6)))
        found = dict.fromkeys(timed, float("inf"))
        for _ in range(self.rounds):
            for name, work in timed.items():
                number = calls[name] if self.device == "cuda" else 1
                found[name] = min(found[name], self._seconds(work, number))
        return found

    def forget_peak(self) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        """The GPU's peak since the last `forget_peak`; nan without one."""
        if self.device != "cuda":
            return float("nan")
        return torch.cuda.max_memory_allocated() / 2**30
