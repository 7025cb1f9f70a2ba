"""Readings that a paper leaves open, beside each other on the embedded digits, one seed.

CLLR's alpha: what is left of L (rank_L, its effective rank of 512; kept_L, the share of phi's squared
length that L^T L phi gives back) and what phi and L phi (32 kept columns) are worth apart; ARB with
one and eight groups; MIO as printed and as released. Trained and scored as methods_on_digits.py does.
The last table is kept in variants_on_digits.txt:

    python benchmarks/variants_on_digits.py --out runs/variants [--jobs 2]
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import methods_on_digits as digits
import numpy as np
import torch

from backbench.datasets import embedded
from backbench.runs import atomic
from backbench.runs.folder import CHECKPOINT_FILE, read_metrics
from backbench.weights.checkpoint import Checkpoint

SIMCLR = {"name": "simclr", "head": digits.HEAD, "temperature": 0.2}
ARB_HEAD = {"layers": 3, "hidden": 512, "dim": 2048, "last_bias": False}
MIO_HEAD = {"layers": 3, "hidden": 512, "dim": 128}
SMALL = {"crops": [{**digits.CROP, "size": 12, "count": 2}]}  # a stem without stride costs
ALPHAS = (10.0, 0.1, 0.01, 0.001)
VARIANTS: dict[str, dict[str, Any]] = {
    "simclr": {"method": SIMCLR},
    "arb-1": {"method": {"name": "arb", "head": ARB_HEAD, "groups": 1}},
    "arb-8": {"method": {"name": "arb", "head": ARB_HEAD, "groups": 8}},
}
for norm in ("nuclear", "l21"):
    for alpha in ALPHAS:
        VARIANTS[f"cllr-{norm}-{alpha:g}"] = {
            "method": {"name": "cllr", "inner": SIMCLR, "alpha": alpha, "norm": norm, "kept": 32}
        }
VARIANTS |= {
    "mio": {
        "method": {"name": "mio", "head": {**MIO_HEAD, "last_batchnorm": False}},
        "stem": "conv3",
        "views": SMALL,
    },
    "mio-code": {
        "method": {"name": "mio", "head": {**MIO_HEAD, "last_batchnorm": True}},
        "data": {"dataset": "digits", "hold_out": 0.2},
        "stem": "conv3_p0",
        "views": SMALL,
    },
}


def lphi(run: Path, data: Path) -> dict[str, float]:
    """The same scores as of phi, of L phi."""
    checkpoint = Checkpoint.load(run / CHECKPOINT_FILE)
    kept = checkpoint.heads["lphi.0.weight"].double().numpy()
    return digits.score_of(lambda pixels: digits.features(checkpoint, pixels) @ kept.T, data)


def row(name: str, out: Path, data: Path) -> str:
    last = [r for r in read_metrics(out / name) if "loss" in r][-1]
    scored = digits.score(out / name, data)
    line = f"{name:20}{last['loss']:9.3f}"
    line += f"{scored['rank']:8.1f}{scored['few']:8.1f}{scored['knn']:8.1f}"
    if "rank_L" not in last:
        return line
    of_l = lphi(out / name, data)
    line += f"{of_l['rank']:10.1f}{of_l['few']:8.1f}{of_l['knn']:8.1f}"
    return f"{line}{last['rank_L']:9.1f}{last['kept_L']:8.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/variants_on_digits"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    np.random.seed(0)
    data = embedded.build(args.out / "data")

    def train(name: str) -> None:
        recipe = {**digits.recipe("simclr", args.epochs), "name": name, **VARIANTS[name]}
        digits.train_recipe(recipe, data=data, out=args.out)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(train, VARIANTS))
    lines = [
        f"# digits, ResNet-18, torch {torch.__version__}; {args.epochs} epochs, one seed",
        f"{'':29}{'phi':>24}{'L phi':>26}{'L':>17}",
        f"{'variant':20}{'loss':>9}{'rank':>8}{'few':>8}{'kNN-20':>8}"
        f"{'rank':>10}{'few':>8}{'kNN-20':>8}{'rank_L':>9}{'kept_L':>8}",
    ]
    for name in VARIANTS:
        lines.append(row(name, args.out, data))
    print("\n".join(lines))
    atomic.write_text(Path(__file__).with_suffix(".txt"), "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
