"""The benchmarks' shared parts: the line that names the machine, and times in turns."""

import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torchvision

Work = Callable[[], object]
TURN_S = 0.2  # how long a turn on a GPU takes


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


def least(
    ways: Mapping[str, Work], rounds: int, *, wall: bool = False, device: str = "cpu"
) -> dict[str, float]:
    """The least seconds of one call of each way, in turns A B C A B C ..., after a call of each
    that does not count. Seconds are this process's on one thread, so other work on the machine
    matters less; else they are wall time. A turn on a GPU is as many calls as take about TURN_S."""
    clock = time.perf_counter if wall or torch.get_num_threads() > 1 else time.process_time
    if device == "cuda":
        clock = _after_the_gpu
    calls = {}
    for name, work in ways.items():
        work()
        once = _seconds(work, 1, clock) if device == "cuda" else TURN_S
        calls[name] = max(1, int(TURN_S / max(once, 1e-6)))
    fastest = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, work in ways.items():
            fastest[name] = min(fastest[name], _seconds(work, calls[name], clock))
    return fastest


def _seconds(work: Work, calls: int, clock: Callable[[], float]) -> float:
    began = clock()
    for _ in range(calls):
        work()
    return (clock() - began) / calls


def _after_the_gpu() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def print_ratios(title: str, seconds: Mapping[str, float], images: int = 0) -> None:
    """Print the time of each way, in images per second if there are `images`, and how many times as
    fast as the first way it is."""
    print(f"\n{title}")
    base = next(iter(seconds.values()))
    for name, each in seconds.items():
        shown = f"{images / each:8.1f} images/s" if images else f"{1000 * each:8.1f} ms"
        print(f"  {name:44} {shown}   {base / each:5.2f}x", flush=True)
