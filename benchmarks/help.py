"""Seconds until `backbench VERB --help` answers, beside `import torch, torchvision`."""

import subprocess
import sys
from functools import partial

from machine import least

from backbench import cli


def main() -> None:
    run = partial(subprocess.run, check=True, capture_output=True)
    baseline = "import torch, torchvision"
    ways = {baseline: partial(run, [sys.executable, "-c", baseline])}
    for verb in cli.VERBS:
        command = [sys.executable, "-m", "backbench", verb, "--help"]
        ways[f"backbench {verb} --help"] = partial(run, command)
    seconds = least(ways, 5, wall=True)
    base = seconds.pop(baseline)
    for name, each in seconds.items():
        print(f"{name:30} {each:.3f} s   {each / base:6.1%} of `{baseline}` ({base:.2f} s)")
    print(f"slowest {max(seconds.values()):.3f} s; goal < 0.3 s, or < 4% of the import")


if __name__ == "__main__":
    main()
