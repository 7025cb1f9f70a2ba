"""Seconds until `backbench VERB --help` answers, against `import torch, torchvision` in the same
run."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from functools import partial

from machine import in_turns

from backbench import cli


def main() -> None:
    run = partial(subprocess.run, check=True, capture_output=True)
    baseline = "import torch, torchvision"
    ways = {baseline: partial(run, [sys.executable, "-c", baseline])}
    for verb in cli.VERBS:
        command = [sys.executable, "-m", "backbench", verb, "--help"]
        ways[f"backbench {verb} --help"] = partial(run, command)
    times = in_turns(ways, 5, warm=0, clock=time.perf_counter)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    base = medians.pop(baseline)
    for name, median in medians.items():
        print(f"{name:30} {median:.3f} s   {median / base:6.1%} of `{baseline}` ({base:.2f} s)")
    print(f"slowest {max(medians.values()):.3f} s; goal < 0.3 s, or < 4% of the import")


if __name__ == "__main__":
    main()
