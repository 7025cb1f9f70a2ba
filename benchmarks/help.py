"""Seconds until `backbench VERB --help` answers, against `import torch, torchvision` in the same
run."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from backbench import cli

ROUNDS = 5


def took(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    python = sys.executable
    commands = {
        f"backbench {v} --help": [python, "-m", "backbench", v, "--help"] for v in cli.VERBS
    }
    baseline = "import torch, torchvision"
    commands[baseline] = [python, "-c", baseline]
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):  # interleaved, so that a slow minute slows all of them
        for name, command in commands.items():
            times[name].append(took(command))
    base = statistics.median(times.pop(baseline))
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:30} {median:.3f} s   {median / base:6.1%} of `{baseline}` ({base:.2f} s)")
    worst = max(statistics.median(v) for v in times.values())
    print(f"slowest {worst:.3f} s; goal < 0.3 s, or < 4% of the import")


if __name__ == "__main__":
    main()
