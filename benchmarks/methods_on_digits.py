"""Does every method learn? Each is trained briefly on the embedded digits through `backbench
pretrain`.

Printed per method: loss of the second epoch (the first fills the queues; LORAC: of the first with
its prior) and of the last, effective rank of the test features (exp of the entropy of the
covariance's eigenvalues), accuracy from two labels per class (logistic regression, mean of ten
draws) and of 20 nearest neighbours, beside the untrained trunk. Those that do not beat it are
trained three times as long, to tell whether that is the reason. The last tables are kept in
methods_on_digits.txt. Less than an hour on two cores:

    python benchmarks/methods_on_digits.py --out runs/methods [--only simclr,lorac] [--jobs 2]

A method that is there already (same settings, same folder) is not trained again.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backbench.datasets import embedded
from backbench.recipes.config import configs_dir
from backbench.runs import atomic, seeding
from backbench.runs.folder import CHECKPOINT_FILE
from backbench.runs.step_metrics import read_metrics
from backbench.weights.checkpoint import Checkpoint

HEAD = {"hidden": 512, "dim": 128, "last_batchnorm": True}
KEYS = {"head": HEAD, "queue": 512, "momentum": 0.95, "groups": 4, "temperature": 0.2}
MOCO = {**KEYS, "query_batchnorm": "sync"}
PLAIN = {"hidden": 512, "dim": 128}
SIMSIAM = {"hidden": 512, "dim": 512, "layers": 3, "last_batchnorm": True, "last_affine": False}
# name -> (views, method settings); heads with batch norm and short memories, because the runs are
# short
METHODS: dict[str, tuple[int, dict[str, Any]]] = {
    "moco": (2, MOCO),
    "moco_m": (3, {**KEYS, "keys": 1}),
    "lorac": (3, {**KEYS, "keys": 1, "beta": 2.0}),
    "jcl": (4, {**KEYS, "lam": 1.0}),
    "mio": (2, {"head": HEAD, "l2_weight": 1.0}),
    "arb": (2, {"head": {"layers": 3, "hidden": 512, "dim": 256, "last_bias": False}, "groups": 8}),
    "cllr": (2, {"inner": {"name": "simclr", "head": HEAD, "temperature": 0.2}, "alpha": 0.01}),
    "simclr": (2, {"head": HEAD, "temperature": 0.2}),
    "dcl": (2, {"head": PLAIN}),
    "hcl": (2, {"head": PLAIN}),
    "byol": (2, {"head": PLAIN, "predictor": PLAIN, "momentum": 0.95}),
    "simsiam": (2, {"head": SIMSIAM, "predictor": {"hidden": 128, "dim": 512}}),
    "barlow_twins": (2, {"head": {"layers": 3, "hidden": 512, "dim": 256, "last_bias": False}}),
    "vicreg": (2, {"head": {"layers": 3, "hidden": 512, "dim": 256, "last_bias": False}}),
    "w_mse": (2, {"head": {"hidden": 512, "dim": 16}, "size": 64}),
    "swav": (2, {"head": HEAD, "prototypes": 60}),
    "dino": (2, {"hidden": 512, "bottleneck": 64, "dim": 256, "batchnorm": True, "momentum": 0.95}),
    "co2": (2, {**MOCO, "consistency": 0.3}),
    "ressl": (2, {**MOCO, "temperature": 0.1}),
    "cmc": (1, {"head": HEAD, "negatives": 256, "temperature": 0.2}),
    "supervised": (1, {}),
}
CROP = {"size": 32, "scale": [0.3, 1.0], "flip": 0.0, "blur_p": 0.0}
LABELS, NEIGHBOURS, DRAWS = 2, 20, 10


def recipe(name: str, epochs: int) -> dict[str, Any]:
    views, settings = METHODS.get(name, (2, {}))
    crops = [{**CROP, "count": views}]
    if name == "ressl":  # the key's view is weakly augmented (Section 3.3 of ReSSL)
        crops = [{**CROP, "count": 1}, {**CROP, "count": 1, "jitter_p": 0.0, "gray_p": 0.0}]
    return {
        "base": str(configs_dir() / "pretrain" / "demo_random.yaml"),
        "name": name,
        "method": {"name": name, **settings},
        "views": {"crops": crops},
        "optim": {"schedule": "cosine"},
        "epochs": 0 if name == "random" else epochs,
    }


def train(name: str, *, epochs: int, data: Path, out: Path) -> None:
    """`backbench pretrain`, which continues a run that was interrupted.

    A finished one is left alone.
    """
    train_recipe(recipe(name, epochs), data=data, out=out)


def train_recipe(
    recipe: dict[str, Any], *, data: Path, out: Path, options: Sequence[str] = ()
) -> None:
    """OUT/<its name>, from OUT/<its name>.yaml; `options` are further ones of `pretrain`."""
    name = recipe["name"]
    file, text = out / f"{name}.yaml", json.dumps(recipe, indent=1)  # JSON is YAML
    if (out / name / CHECKPOINT_FILE).exists() and file.read_text() == text:
        return
    atomic.write_text(file, text)
    command = [sys.executable, "-m", "backbench", "pretrain", str(file), *options]
    command += ["--data", str(data), "--out", str(out / name), "--accelerator", "cpu", "-q"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        raise SystemExit(f"{name}: exit status {done.returncode}: {said}")


def losses(name: str, run: Path, epochs: int) -> tuple[float, float]:
    """Mean loss of the second epoch (LORAC: of the first with its prior) and of the last."""
    rows = [row for row in read_metrics(run) if "loss" in row]
    first = epochs // 2 if name == "lorac" else 1

    def mean(epoch: int) -> float:
        return float(np.mean([row["loss"] for row in rows if row["epoch"] == epoch]))

    return mean(first), mean(epochs - 1)


def images(folder: Path) -> tuple[torch.Tensor, np.ndarray]:
    """All images of a class folder as (N, 3, h, w) uint8, and their classes."""
    from PIL import Image

    files = sorted(folder.glob("*/*.png"))
    pixels = np.stack([np.asarray(Image.open(f).convert("RGB")) for f in files])
    classes = np.array([int(f.parent.name) for f in files])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2), classes


@torch.no_grad()
def features(checkpoint: Checkpoint, pixels: torch.Tensor) -> np.ndarray:
    from backbench.images.preprocess import normalise

    trunk = checkpoint.backbone().eval()
    parts = [trunk(normalise(part, checkpoint.pixels)) for part in pixels.split(256)]
    return torch.cat(parts).numpy()


def score(run: Path, data: Path) -> dict[str, float]:
    checkpoint = Checkpoint.load(run / CHECKPOINT_FILE)
    return score_of(lambda pixels: features(checkpoint, pixels), data)


def score_of(network: Callable[[torch.Tensor], np.ndarray], data: Path) -> dict[str, float]:
    """`network` takes (N, 3, h, w) uint8."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.preprocessing import normalize

    (train_x, train_y), (test_x, test_y) = (images(data / "digits" / s) for s in ("train", "test"))
    a, b = network(train_x), network(test_x)
    rank = effective_rank(b)
    knn = KNeighborsClassifier(NEIGHBOURS, metric="cosine").fit(a, train_y).score(b, test_y)
    a, b = normalize(a), normalize(b)
    few = []
    for draw in range(DRAWS):
        chosen = few_labels(train_y, draw)
        probe = LogisticRegression(C=100.0, max_iter=1000).fit(a[chosen], train_y[chosen])
        few.append(probe.score(b, test_y))
    return {"rank": rank, "few": 100 * float(np.mean(few)), "knn": 100 * knn}


def effective_rank(x: np.ndarray) -> float:
    """exp of the entropy of the covariance's eigenvalues."""
    spectrum = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2
    share = spectrum / max(spectrum.sum(), 1e-30)
    return float(np.exp(-(share * np.log(share + 1e-30)).sum()))


def few_labels(labels: np.ndarray, draw: int) -> np.ndarray:
    """The places of LABELS images of each class."""
    rng = np.random.default_rng(seeding.seed_of("few labels", draw))
    places = [np.flatnonzero(labels == c) for c in range(10)]
    return np.concatenate([rng.choice(where, LABELS, replace=False) for where in places])


def table(names: list[str], out: Path, data: Path, epochs: int) -> tuple[list[str], list[str]]:
    """Lines, the untrained trunk first, and the names of those that do not beat it everywhere.

    Printed on the way.
    """
    lines, short = [], []
    base: dict[str, float] = {}
    for name in names:
        trained = name != "random"
        first = last = float("nan")
        if trained:
            first, last = losses(name, out / name, epochs)
        row = score(out / name, data)
        base = base or row
        worse = [key for key in ("few", "knn") if trained and row[key] <= base[key]]
        short += [name] if worse else []
        remarks = []
        if trained and not last < first:
            remarks.append("loss did not fall")
        if trained and not row["rank"] > 2:
            remarks.append("collapsed")
        if worse:
            # The features of all these methods fill fewer directions; of the weakest, very few
            share = f"{row['rank'] / base['rank']:.0%}"
            remarks.append(f"does not beat random: {', '.join(worse)}, with {share} of its rank")
        line = f"{name:14}{first:11.3f}{last:9.3f}{row['rank']:7.1f}{row['few']:10.1f}{row['knn']:8.1f}"
        lines.append(f"{line}  {'; '.join(remarks)}".rstrip())
        print(lines[-1], flush=True)
    return lines, short


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/methods_on_digits"))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--longer", type=int, default=60, help="epochs for those that do not beat random; 0: no"
    )
    parser.add_argument("--only", help="methods, separated by commas")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = embedded.build(args.out / "data")
    names = ["random", *(args.only.split(",") if args.only else METHODS)]
    header = f"{'method':14}{'loss first':>11}{'last':>9}{'rank':>7}{'2 labels':>10}{'kNN-20':>8}  remark"
    lines = [f"# digits, ResNet-18, torch {torch.__version__}; {args.epochs} epochs", header]
    for out, epochs in ((args.out, args.epochs), (args.out / "longer", args.longer)):
        if not epochs or len(names) == 1:
            break
        out.mkdir(exist_ok=True)
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(functools.partial(train, epochs=epochs, data=data, out=out), names))
        if epochs != args.epochs:
            lines.append(
                f"# those that do not beat random, {epochs} epochs: were they only trained too short?"
            )
            print(lines[-1])
        found, short = table(names, out, data, epochs)
        lines += found
        names = ["random", *short]
    atomic.write_text(Path(__file__).with_suffix(".txt"), "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
