"""Seconds until `backbench VERB --help` answers, beside `import torch, torchvision`."""

import subprocess
import sys
from functools import partial

from machine import describe, least, print_ratios

from backbench import cli


def main() -> None:
    run = partial(subprocess.run, check=True, capture_output=True)
    baseline = "import torch, torchvision"
    ways = {baseline: partial(run, [sys.executable, "-c", baseline])}
    for verb in cli.VERBS:
        command = [sys.executable, "-m", "backbench", verb, "--help"]
        ways[f"backbench {verb} --help"] = partial(run, command)
    print(describe())
    print_ratios("start (goal: --help < 0.3 s)", least(ways, 5, wall=True))


if __name__ == "__main__":
    main()
