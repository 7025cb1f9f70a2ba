"""The same recipe in 1, 2 and 4 CPU processes at one global batch: images per second, and how far
the results agree.

    python benchmarks/scaling.py [--processes 1 2 4]

SimCLR (synchronised batch norm), and LORAC with the keys' batch norm in four groups, ResNet-18, two
steps of batch 32. Distances are from one process in float64. In float32 every run, one process
included, lies about as far from it: an untrained ResNet amplifies rounding (a ReLU that changes
sides). In float64 the numbers of processes agree. With fewer cores than processes the rate says
nothing; the agreement always does. The last output is kept in scaling.txt.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from machine import describe

from backbench.datasets import embedded
from backbench.runs.folder import CHECKPOINT_FILE
from backbench.runs.step_metrics import read_metrics
from backbench.weights.checkpoint import Checkpoint

# SGD: Adam turns a rounding error where the gradient is nearly zero into a step of full length
TRAINED = ["epochs=1", "log_every=1", "optim={name: sgd, lr: 0.03, weight_decay: 0.0}"]
VIEWS_96 = "views.crops=[{count: 2, size: 96, scale: [0.3, 1.0], flip: 0.0, blur_p: 0.0}]"
RECIPES = {
    "SimCLR, 32 px": ("tiny_simclr", []),
    "SimCLR, 96 px": ("tiny_simclr", [VIEWS_96]),
    "LORAC, 32 px": ("tiny_lorac", ["method.groups=4"]),
}


def pretrain(
    recipe: str, overrides: list[str], data: Path, out: Path, processes: int
) -> tuple[Checkpoint, float]:
    """One run; its checkpoint and the median images per second of its steps."""
    command = [sys.executable, "-m", "backbench", "pretrain", recipe, *overrides]
    command += ["--data", str(data), "--out", str(out)]
    command += ["--devices", str(processes), "--accelerator", "cpu", "-q"]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    rates = [row["images_per_s"] for row in read_metrics(out) if "images_per_s" in row]
    return Checkpoint.load(out / CHECKPOINT_FILE), statistics.median(rates)


def apart(a: Checkpoint, b: Checkpoint) -> float:
    """Relative difference of all weights, as one vector."""
    vectors = []
    for checkpoint in (a, b):
        floats = [v for v in checkpoint.state_dict.values() if v.is_floating_point()]
        vectors.append(torch.cat([v.flatten().double() for v in floats]))
    x, y = vectors
    return float((x - y).norm() / x.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        data = embedded.build(Path(folder) / "data", size="tiny")
        for number, (title, (recipe, overrides)) in enumerate(RECIPES.items()):
            print(f"\n{title}, SGD, one epoch")
            exact: Checkpoint | None = None
            for precision, processes in itertools.product(("fp64", "fp32"), args.processes):
                out = Path(folder) / f"{number}-{precision}-{processes}"
                settings = [*overrides, *TRAINED, f"precision={precision}"]
                checkpoint, rate = pretrain(recipe, settings, data, out, processes)
                exact = exact or checkpoint
                name = f"{precision}, {processes} process{'es' if processes > 1 else ''}"
                distance = f"{apart(exact, checkpoint):.1e}"
                print(f"  {name:20} {rate:7.1f} images/s   weights {distance} apart", flush=True)


if __name__ == "__main__":
    main()
