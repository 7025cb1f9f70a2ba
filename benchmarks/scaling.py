"""The same recipe in 1, 2 and 4 CPU processes at one global batch: images per second, and how far the results agree.

    python benchmarks/scaling.py [--processes 1 2 4]

SimCLR (synchronised batch norm), and LORAC with the keys' batch norm in four groups, on the embedded digits. With fewer
cores than processes the rate says nothing; the agreement always does. The last output is kept in scaling.txt.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from machine import describe

from backbench import embedded, runlog
from backbench.checkpoint import Checkpoint

RECIPES = {"tiny_simclr": [], "tiny_lorac": ["method.groups=4"]}


def pretrain(recipe: str, overrides: list[str], data: Path, out: Path, processes: int) -> tuple[Checkpoint, float]:
    """One run; its checkpoint and the images per second of its rows, the first left out."""
    command = [
        sys.executable,
        "-m",
        "backbench",
        "pretrain",
        recipe,
        *overrides,
        "--data",
        str(data),
        "--out",
        str(out),
    ]
    command += ["--devices", str(processes), "--accelerator", "cpu", "-q"]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    rates = [row["images_per_s"] for row in runlog.read_metrics(out)[1:] if "images_per_s" in row]
    return Checkpoint.load(out / "backbone.safetensors"), sum(rates) / len(rates)


def apart(a: Checkpoint, b: Checkpoint) -> tuple[float, float]:
    """Relative difference of all weights, as one vector, and of the tensor that differs most."""
    floats = [k for k, v in a.state_dict.items() if v.is_floating_point()]
    x, y = (torch.cat([c.state_dict[k].flatten().double() for k in floats]) for c in (a, b))
    worst = max(
        float((a.state_dict[k] - b.state_dict[k]).double().norm() / a.state_dict[k].double().norm()) for k in floats
    )
    return float((x - y).norm() / x.norm()), worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        data = embedded.build(Path(folder) / "data", size="tiny")
        for recipe, overrides in RECIPES.items():
            print(f"\n{recipe} {' '.join(overrides)}, epoch 1, SGD")
            first: Checkpoint | None = None
            for processes in args.processes:
                out = Path(folder) / f"{recipe}-{processes}"
                # SGD: Adam turns a rounding error where the gradient is nearly zero into a step of full length
                extra = ["epochs=1", "log_every=4", "optim={name: sgd, lr: 0.03, weight_decay: 0.0}"]
                checkpoint, rate = pretrain(recipe, [*overrides, *extra], data, out, processes)
                first = first or checkpoint
                total, worst = apart(first, checkpoint)
                print(
                    f"  {processes} process{'es' if processes > 1 else '  '} {rate:7.1f} images/s   weights apart from "
                    f"one process: {total:.1e} together, {worst:.1e} in the worst tensor"
                )


if __name__ == "__main__":
    main()
