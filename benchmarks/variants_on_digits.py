"""Readings that a paper leaves open, beside each other on the embedded digits, one seed.

ARB with one and eight groups, and MIO as printed and as released, trained and scored as
methods_on_digits.py does it (MIO for fewer epochs and on smaller views: its stem has no stride). CLLR's
alpha: L alone is trained by its regulariser on the features of the SimCLR run, from the identity, until
it stands still; what is left of it (rank_L, its effective rank of 512; kept_L, the share of phi's squared
length that L^T L phi gives back), and what phi and L phi (32 kept columns) are worth apart. The last
table is kept in variants_on_digits.txt:

    python benchmarks/variants_on_digits.py --out runs/variants [--jobs 2]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, get_args

import methods_on_digits as digits
import numpy as np
import torch
from torch import Tensor

from backbench.datasets import embedded
from backbench.runs import atomic
from backbench.runs.folder import CHECKPOINT_FILE, read_metrics
from backbench.weights.checkpoint import Checkpoint
from pretrain.methods.cllr import alive, cllr_regularizer, kept_projection

Norm = Literal["nuclear", "l21"]
SIMCLR = {"name": "simclr", "head": digits.HEAD, "temperature": 0.2}
ARB_HEAD = {"layers": 3, "hidden": 512, "dim": 2048, "last_bias": False}
MIO_HEAD = {"layers": 3, "hidden": 512, "dim": 128}
SMALL = {"crops": [{**digits.CROP, "size": 12, "count": 2}]}
VARIANTS: dict[str, dict[str, Any]] = {
    "simclr": {"method": SIMCLR},
    "arb-1": {"method": {"name": "arb", "head": ARB_HEAD, "groups": 1}},
    "arb-8": {"method": {"name": "arb", "head": ARB_HEAD, "groups": 8}},
    "mio": {
        "method": {"name": "mio", "head": {**MIO_HEAD, "last_batchnorm": False}},
        "stem": "conv3",
        "views": SMALL,
        "epochs": 3,
    },
    "mio-code": {
        "method": {"name": "mio", "head": {**MIO_HEAD, "last_batchnorm": True}},
        "data": {"dataset": "digits", "hold_out": 0.2},
        "stem": "conv3_p0",
        "views": SMALL,
        "epochs": 3,
    },
}
ALPHAS = (10.0, 1.0, 0.1, 0.01, 0.001)
KEPT = 32


def trained_l(phi: Tensor, alpha: float, norm: Norm, *, steps: int) -> Tensor:
    """L after `steps` of Adam on all of phi (N, H), lr 0.02 going to 0: far enough for its singular
    values to go from 1 to 0 several times over."""
    projection = torch.eye(phi.shape[1], requires_grad=True)
    optimizer = torch.optim.Adam([projection], lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        loss = cllr_regularizer(phi, projection, alpha=alpha, norm=norm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return projection.detach()


def row(name: str, out: Path, data: Path) -> str:
    last = [r for r in read_metrics(out / name) if "loss" in r][-1]
    return f"{name:16}{last['loss']:9.3f}{scores(digits.score(out / name, data))}"


def scores(found: dict[str, float]) -> str:
    return f"{found['rank']:8.1f}{found['few']:8.1f}{found['knn']:8.1f}"


def l_phi(checkpoint: Checkpoint, projection: Tensor) -> Callable[[Tensor], np.ndarray]:
    kept = kept_projection(projection, KEPT).double().numpy()
    return lambda pixels: digits.features(checkpoint, pixels) @ kept.T


def of_l(out: Path, data: Path, *, steps: int) -> list[str]:
    """What alpha leaves of L, and L phi's scores beside phi's."""
    checkpoint = Checkpoint.load(out / "simclr" / CHECKPOINT_FILE)
    pixels, _ = digits.images(data / "digits" / "train")
    phi = torch.from_numpy(digits.features(checkpoint, pixels))
    values = torch.linalg.eigvalsh(phi.T.double() @ phi.double() / len(phi)).flip(0)
    chosen = ", ".join(f"{values[i]:.2g}" for i in (0, 1, 7, 31, 127, 255))
    lines = [f"# mean square of phi along its directions 1, 2, 8, 32, 128, 256: {chosen}"]
    for norm in get_args(Norm):
        for alpha in ALPHAS:
            projection = trained_l(phi, alpha, norm, steps=steps)
            left = alive(phi, projection, scaled=False)
            found = digits.score_of(l_phi(checkpoint, projection), data)
            line = f"{norm:8}{alpha:8g}{float(left['rank_L']):9.1f}{float(left['kept_L']):9.3f}"
            lines.append(line + scores(found))
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/variants_on_digits"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=300, help="of L")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = embedded.build(args.out / "data")

    def train(name: str) -> None:
        recipe = {**digits.recipe("simclr", args.epochs), "name": name, **VARIANTS[name]}
        digits.train_recipe(recipe, data=data, out=args.out)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(train, VARIANTS))
    lines = [
        f"# digits, ResNet-18, torch {torch.__version__}; {args.epochs} epochs (MIO 3), one seed",
        f"{'variant':16}{'loss':>9}{'rank':>8}{'few':>8}{'kNN-20':>8}",
    ]
    lines += [row(name, args.out, data) for name in VARIANTS]
    print("\n".join(lines), flush=True)
    lines += ["# CLLR: L on simclr's phi, and L phi", f"{'norm':8}{'alpha':>8}{'rank_L':>9}"]
    lines[-1] += f"{'kept_L':>9}{'rank':>8}{'few':>8}{'kNN-20':>8}"
    lines += of_l(args.out, data, steps=args.steps)
    atomic.write_text(Path(__file__).with_suffix(".txt"), "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
