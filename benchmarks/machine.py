"""All benchmarks share these: the line that names the machine, times in turns, and their ratios."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torchvision

Work = Callable[[], object]


def describe() -> str:
    """The first line of every output: processor, threads, GPU and versions."""
    cpu = platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if "model name" in line:
            cpu = line.partition(":")[2].strip()
            break
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    threads = torch.get_num_threads()
    return (
        f"{cpu}, {os.cpu_count()} cores, {threads} torch thread{'s' * (threads > 1)}{gpu}; "
        f"torch {torch.__version__}, torchvision {torchvision.__version__}"
    )


def in_turns(
    ways: Mapping[str, Work],
    rounds: int,
    *,
    warm: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Seconds of each way in every round, A B C A B C ..., after `warm` rounds that do not count.

    Processor time of this process by default, so other work on the machine matters less.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + warm):
        for name, work in ways.items():
            start = clock()
            work()
            if turn >= warm:
                seconds[name].append(clock() - start)
    return seconds


def least(ways: Mapping[str, Work], rounds: int, *, wall: bool = False) -> dict[str, float]:
    """Least seconds of each way, in turns; wall time also where torch has several threads."""
    clock = time.perf_counter if wall or torch.get_num_threads() > 1 else time.process_time
    return {name: min(each) for name, each in in_turns(ways, rounds, clock=clock).items()}


def print_ratios(title: str, times: Mapping[str, list[float]], images: int = 0) -> None:
    """Print the median of each way, in images per second if there are `images`, and how many times
    as fast as the first way it is."""
    print(f"\n{title}")
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    base = next(iter(medians.values()))
    for name, median in medians.items():
        shown = f"{images / median:8.1f} images/s" if images else f"{1000 * median:8.1f} ms"
        print(f"  {name:44} {shown}   {base / median:5.2f}x", flush=True)


class Clock:
    """Times work that a GPU does, or this process where there is none: `rounds` turns, each of as
    many calls as take about a fifth of a second."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = device, rounds

    def _seconds(self, work: Work, calls: int) -> float:
        began = self._now()
        for _ in range(calls):
            work()
        return (self._now() - began) / calls

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def least(self, ways: Mapping[str, Work]) -> dict[str, float]:
        """The least seconds of one call of each, in turns, after two calls of warming up."""
        calls = {}
        for name, work in ways.items():
            work()
            calls[name] = max(1, int(0.2 / max(self._seconds(work, 1), 1e-6)))
        fastest = dict.fromkeys(ways, float("inf"))
        for _ in range(self.rounds):
            for name, work in ways.items():
                number = calls[name] if self.device == "cuda" else 1
                fastest[name] = min(fastest[name], self._seconds(work, number))
        return fastest

    def forget_peak(self) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        """The GPU's peak since the last `forget_peak`; nan without one."""
        if self.device != "cuda":
            return float("nan")
        return torch.cuda.max_memory_allocated() / 2**30
