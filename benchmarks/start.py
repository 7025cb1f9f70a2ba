"""Seconds until a command answers, against `import torch, torchvision`, by the clock."""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from machine import least, print_ratios

from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint

HOME = Path(__file__).parent.parent


def run(quick: bool) -> None:
    call = partial(subprocess.run, check=True, capture_output=True, cwd=HOME)
    with tempfile.TemporaryDirectory() as folder:
        file, board = Path(folder, "trunk.safetensors"), ["--csv", f"{folder}/board.csv"]
        state = build_trunk("resnet50").state_dict()
        Checkpoint(arch="resnet50", method="random", state_dict=state).save(file)
        commands = [
            ["data", "list"],
            ["verify", "docs/demo/records"],
            ["leaderboard", "docs/demo/records", *board],
            ["paper"],
            ["inspect", str(file)],
        ]
        baseline = "import torch, torchvision"
        ways = {baseline: partial(call, [sys.executable, "-c", baseline])}
        ways["limit: import torch"] = partial(call, [sys.executable, "-c", "import torch"])
        for words in [*commands, ["--help"], ["linear", "--help"]]:
            shown = (
                words if words[-1] == "--help" else words[:2] if words[0] == "data" else words[:1]
            )
            command = [sys.executable, "-m", "backbench", *words]
            ways[" ".join(["backbench", *shown])] = partial(call, command)
        print_ratios("start", least(ways, 1 if quick else 3, wall=True))
