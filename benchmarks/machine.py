"""The line that every benchmark prints first, which names the machine; and times in turns."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torchvision


def describe() -> str:
    cpu = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if "model name" in line
        ]
        cpu = names[0] if names else cpu
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    threads = torch.get_num_threads()
    return (
        f"{cpu}, {os.cpu_count()} cores, {threads} torch thread{'s' * (threads > 1)}{gpu}; "
        f"torch {torch.__version__}, torchvision {torchvision.__version__}"
    )


def in_turns(
    ways: Mapping[str, Callable[[], object]],
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
