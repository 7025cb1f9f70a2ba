"""Is what `--fast` trains as good? SimCLR on the embedded digits, with the papers' pipeline
(`reference` views, fp32) and by `backbench pretrain --fast`, the same seeds of each.

Trained and scored as methods_on_digits.py does it; printed per run, and per column the mean of fast
minus reference with its standard error over the seeds. Two seeds see only a large difference: give
more where there is time. A few minutes of one core; kept in fast_on_digits.txt:

    python benchmarks/fast_on_digits.py --out runs/fast [--seeds 2] [--epochs 3]

A run that is there already (same settings, same folder) is not trained again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import methods_on_digits as digits
import numpy as np
import torch
from machine import describe

from backbench.datasets import embedded
from backbench.runs import atomic

WAYS = {"reference": (), "fast": ("--fast",)}
COLUMNS = ("loss", "rank", "few", "knn")


def run(way: str, seed: int, epochs: int, data: Path, out: Path) -> list[float]:
    """Loss of the last epoch, effective rank, accuracies, of one training."""
    recipe = digits.recipe("simclr", epochs)
    recipe = {**recipe, "name": f"{way}-{seed}", "seed": seed}
    recipe["views"] = {**recipe["views"], "pipeline": "reference"}
    digits.train_recipe(recipe, data=data, out=out, options=WAYS[way])
    _, loss = digits.losses("simclr", out / recipe["name"], epochs)
    scores = digits.score(out / recipe["name"], data)
    return [loss, *(scores[name] for name in COLUMNS[1:])]


def line(name: str, values: np.ndarray) -> str:
    return f"{name:24}" + "".join(f"{value:9.3f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/fast_on_digits"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = embedded.build(args.out / "data")
    lines = [describe(), f"# SimCLR, digits, ResNet-18, {args.epochs} epochs"]
    lines.append(f"{'':24}" + "".join(f"{name:>9}" for name in COLUMNS))
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for seed in range(args.seeds):
        for way, rows in found.items():
            rows.append(run(way, seed, args.epochs, data, args.out))
            lines.append(line(f"{way}, seed {seed}", np.array(rows[-1])))
            print(lines[-1], flush=True)
    apart = np.array(found["fast"]) - np.array(found["reference"])
    lines.append(line("fast minus reference", apart.mean(0)))
    lines.append(line("its standard error", apart.std(0, ddof=1) / args.seeds**0.5))
    print("\n".join(lines[-2:]))
    atomic.write_text(Path(__file__).with_suffix(".txt"), "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
