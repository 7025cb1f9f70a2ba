"""The benchmarks' shared parts: the machine's name, times in turns, ratios on screen and in a file."""

import datetime
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torchvision

Work = Callable[[], object]
TURN_S = 0.2  # how long a turn on a GPU takes


class Ratio(NamedTuple):
    """A line of ratios.csv: one way's time against that of another, on one machine."""

    work: str
    way: str
    against: str
    machine: str
    date: str
    ratio: str  # times as fast
    note: str


SEEN: list[Ratio] = []  # of this process


def describe() -> str:
    """The first line of every output: processor, threads, GPU and versions."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    threads = torch.get_num_threads()
    return (
        f"{processor()}, {os.cpu_count()} cores, {threads} torch thread{'s' * (threads > 1)}{gpu}; "
        f"torch {torch.__version__}, torchvision {torchvision.__version__}"
    )


def processor() -> str:
    """Its name, and what its libraries may use of it where that is limited."""
    cpu = platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if "model name" in line:
            cpu = (
                line.partition(":")[2]
                .replace("(R)", "")
                .replace(" Processor", "")
                .strip()
            )
            break
    limit = os.environ.get("ATEN_CPU_CAPABILITY")
    return f"{cpu}, {limit.upper()} alone" if limit else cpu


def least(
    ways: Mapping[str, Work], rounds: int, *, wall: bool = False, device: str = "cpu"
) -> dict[str, float]:
    """The least seconds of one call of each way, in turns A B C A B C ..., after a call of each
    that does not count. Seconds are this process's on one thread, so other work on the machine
    matters less; else they are wall time. A turn on a GPU is as many calls as take about TURN_S."""
    clock = (
        time.perf_counter if wall or torch.get_num_threads() > 1 else time.process_time
    )
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


def print_ratios(
    title: str, seconds: Mapping[str, float], images: int = 0, note: str = ""
) -> None:
    """Print the time of each way, in images per second if there are `images`, and how many times as
    fast as the first way it is; keep the ratios in SEEN, but for those of ways called "limit"."""
    print(f"\n{title}")
    against, base = next(iter(seconds.items()))
    today = datetime.date.today().isoformat()
    for way, each in seconds.items():
        shown = f"{images / each:8.1f} images/s" if images else f"{1000 * each:8.1f} ms"
        print(f"  {way:44} {shown}   {base / each:5.2f}x", flush=True)
        if way != against and not way.startswith("limit"):
            ratio = f"{base / each:.3g}"
            SEEN.append(Ratio(title, way, against, processor(), today, ratio, note))
    if note:
        print(f"  {note}", flush=True)
