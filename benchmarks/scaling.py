"""The same recipe in 1, 2 and 4 CPU processes at one global batch: images per second, and how far the results agree.

    python benchmarks/scaling.py [--processes 1 2 4]

SimCLR (synchronised batch norm), and LORAC with the keys' batch norm in four groups, ResNet-18, batch 32. In float32 an
untrained ResNet amplifies rounding (a ReLU that changes sides, torch's batch norm in channels_last, which adds up in
float32), so a line shows how far one process is from itself in another memory layout; float64 shows what is left. With fewer cores than processes the rate says nothing; the agreement always does. The last output is kept in
scaling.txt.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from machine import describe

from backbench import embedded, runlog
from backbench.checkpoint import Checkpoint

VIEWS_96 = "views.crops=[{count: 2, size: 96, scale: [0.3, 1.0], flip: 0.0, blur_p: 0.0}]"
RECIPES = {
    "SimCLR, 32 px, float32": ("tiny_simclr", []),
    "SimCLR, 32 px, float64": ("tiny_simclr", ["precision=fp64"]),
    "SimCLR, 96 px, float32": ("tiny_simclr", [VIEWS_96]),
    "LORAC, 32 px, float32": ("tiny_lorac", ["method.groups=4"]),
    "LORAC, 32 px, float64": ("tiny_lorac", ["method.groups=4", "precision=fp64"]),
}


def pretrain(recipe: str, overrides: list[str], data: Path, out: Path, processes: int) -> tuple[Checkpoint, float]:
    """One run; its checkpoint and the median images per second of its steps."""
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
    rates = [row["images_per_s"] for row in runlog.read_metrics(out) if "images_per_s" in row]
    return Checkpoint.load(out / "backbone.safetensors"), statistics.median(rates)


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
        for number, (title, (recipe, overrides)) in enumerate(RECIPES.items()):
            print(f"\n{title}, SGD, one epoch")
            first: Checkpoint | None = None
            runs: list[tuple[int, list[str]]] = [(p, []) for p in args.processes]
            if "float32" in title:
                runs.append((1, ["channels_last=false"]))
            for turn, (processes, layout) in enumerate(runs):
                # SGD: Adam turns a rounding error where the gradient is nearly zero into a step of full length
                extra = ["epochs=1", "log_every=1", "optim={name: sgd, lr: 0.03, weight_decay: 0.0}", *layout]
                out = Path(folder) / f"{number}-{turn}"
                checkpoint, rate = pretrain(recipe, [*overrides, *extra], data, out, processes)
                first = first or checkpoint
                total, worst = apart(first, checkpoint)
                name = f"{processes} process{'es' if processes > 1 else ''}{', plain layout' if layout else ''}"
                print(
                    f"  {name:24} {rate:7.1f} images/s   weights apart from the first row: {total:.1e} together, "
                    f"{worst:.1e} in the worst tensor",
                    flush=True,
                )


if __name__ == "__main__":
    main()
