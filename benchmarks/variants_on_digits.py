"""Readings that a paper leaves open, beside each other on the embedded digits, one seed.

ARB with one and eight groups, and MIO as printed and as released, trained and scored as
methods_on_digits.py does it (MIO for fewer epochs, and on pictures of 12 pixels in training and
scoring: its stem has no stride). CLLR, trained by SGD with its L from the identity (512 x 512): alpha as
printed and that of the `_alive` recipes, by epoch the effective rank of L and the share of phi's squared
length that L^T L phi gives back, and what phi and L phi (32 kept columns) are worth apart. Last, which
alpha leaves what: the L that Eq. 7 is least for, on the features of the SimCLR run as they are, with the
count of its singular values that are alive. Kept in variants_on_digits.txt; about ten minutes on two
cores:

    python benchmarks/variants_on_digits.py --out runs/variants [--jobs 2]

A run that is there already (same settings, same folder) is not trained again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import methods_on_digits as digits
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.datasets import embedded
from backbench.runs import atomic
from backbench.runs.folder import CHECKPOINT_FILE
from backbench.runs.step_metrics import read_metrics
from backbench.weights.checkpoint import Checkpoint
from pretrain.methods.cllr import LPHI, alive, kept_projection

SIMCLR = {"name": "simclr", "head": digits.HEAD, "temperature": 0.2}
ARB_HEAD = {"layers": 3, "hidden": 512, "dim": 2048, "last_bias": False}
MIO_HEAD = {"layers": 3, "hidden": 512, "dim": 128}
SIDE = 12  # pixels, of MIO's views
SMALL = {"crops": [{**digits.CROP, "size": SIDE, "count": 2}]}
KEPT = 32
CLLR = {"name": "cllr", "inner": SIMCLR, "kept": KEPT}
# CLLR 2.3 and A.5: SGD at 5e-3. Adam at the demo's rate would leave L's singular values within 0.1
# of the identity's in so few steps, whatever alpha is.
SGD = {"name": "sgd", "lr": 5e-3, "momentum": 0.9, "schedule": "constant"}
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
    "cllr-alpha-10": {"method": {**CLLR, "alpha": 10.0}, "optim": SGD},
    "cllr-alpha-0.01": {"method": {**CLLR, "alpha": 0.01}, "optim": SGD},
}
ALPHAS = (10.0, 1.0, 0.1, 0.01, 0.001, 0.0001)


def best_l(phi: Tensor, alpha: float) -> Tensor:
    """The L that minimises Eq. 7 for these phi (N, H).

    In the eigenvectors u_i of phi's second moment, with mean squares v_i, L = diag(s) U^T, and each s_i
    alone minimises v_i (1 - s^2)^2 + alpha s: 0 unless v_i is above about 0.92 alpha.
    """
    values, vectors = torch.linalg.eigh(phi.T.double() @ phi.double() / len(phi))
    s = torch.linspace(0, 1, 2001, dtype=torch.float64)
    costs = values.clamp_min(0)[:, None] * (1 - s.square()).square() + alpha * s
    return (s[costs.argmin(1)][:, None] * vectors.T).float()


def row(name: str, out: Path, data: Path) -> str:
    last = [r for r in read_metrics(out / name) if "loss" in r][-1]
    checkpoint = Checkpoint.load(out / name / CHECKPOINT_FILE)
    found = digits.score_of(phi_of(checkpoint, SIDE if name.startswith("mio") else None), data)
    return f"{name:16}{last['loss']:9.3f}{scores(found)}"


def scores(found: dict[str, float]) -> str:
    return f"{found['rank']:8.1f}{found['few']:8.1f}{found['knn']:8.1f}"


def phi_of(checkpoint: Checkpoint, side: int | None = None) -> Callable[[Tensor], np.ndarray]:
    """The trunk's features, of pictures of `side` pixels."""

    def network(pixels: Tensor) -> np.ndarray:
        if side is not None:
            small = F.interpolate(pixels.float(), size=side, mode="bilinear", antialias=True)
            pixels = small.round().clamp(0, 255).to(torch.uint8)
        return digits.features(checkpoint, pixels)

    return network


def l_phi(checkpoint: Checkpoint, kept: Tensor) -> Callable[[Tensor], np.ndarray]:
    """L phi, by L's kept columns (KEPT, 512)."""
    columns = kept.double().numpy()
    return lambda pixels: digits.features(checkpoint, pixels) @ columns.T


def trained_with_l(name: str, out: Path, data: Path) -> list[str]:
    """What is left of L after each epoch, and phi's and L phi's scores at the end."""
    steps = [r for r in read_metrics(out / name) if "rank_L" in r]
    ends = {int(r["epoch"]): r for r in steps}  # the last of each epoch
    rank = " ".join(f"{r['rank_L']:7.1f}" for r in ends.values())
    kept = " ".join(f"{r['kept_L']:7.3f}" for r in ends.values())
    checkpoint = Checkpoint.load(out / name / CHECKPOINT_FILE)
    found = digits.score_of(l_phi(checkpoint, checkpoint.heads[f"{LPHI}.0.weight"]), data)
    return [
        f"{name:16} rank_L {rank}",
        f"{'':16} kept_L {kept}",
        f"{name + ' L phi':25}{scores(found)}",
    ]


def of_l(out: Path, data: Path) -> list[str]:
    """What alpha leaves of L, and L phi's scores beside phi's."""
    checkpoint = Checkpoint.load(out / "simclr" / CHECKPOINT_FILE)
    pixels, _ = digits.images(data / "digits" / "train")
    phi = torch.from_numpy(digits.features(checkpoint, pixels))
    lines = []
    for alpha in ALPHAS:
        projection = best_l(phi, alpha)
        left = alive(phi, projection, scaled=False)
        alive_rows = int((projection.norm(dim=1) > 0).sum())
        line = f"{alpha:8g}{alive_rows:8}{float(left['rank_L']):9.1f}{float(left['kept_L']):9.3f}"
        found = digits.score_of(l_phi(checkpoint, kept_projection(projection, KEPT)), data)
        lines.append(line + scores(found))
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/variants_on_digits"))
    parser.add_argument("--epochs", type=int, default=6)
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
    lines.append(
        "# CLLR, nuclear: L at the end of each epoch, and L phi (the rows above are phi's)"
    )
    for name in VARIANTS:
        if name.startswith("cllr"):
            lines += trained_with_l(name, args.out, data)
    print("\n".join(lines), flush=True)
    lines += [
        "# CLLR, nuclear: the best L for simclr's phi, and L phi",
        f"{'alpha':>8}{'alive':>8}",
    ]
    lines[-1] += f"{'rank_L':>9}{'kept_L':>9}{'rank':>8}{'few':>8}{'kNN-20':>8}"
    lines += of_l(args.out, data)
    atomic.write_text(Path(__file__).with_suffix(".txt"), "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
