"""Makes fifty steps of methods by their recipes, in small. Later versions are held to the losses.

PYTHONPATH=.:tests .venv/bin/python -m support.traces cpu (or cuda: `make gpu`) writes
tests/traces/<device>.json anew, after a method, schedule or seed was changed on purpose.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from backbench.parallel import precision
from backbench.pretrain import optim
from backbench.pretrain.method import Batch, Setup, build_method
from backbench.pretrain.recipe import PretrainConfig
from backbench.recipes import config as recipes
from backbench.runs import seeding
from support.methods import TinyTrunk, moved

FOLDER = Path(__file__).parents[1] / "traces"
STEPS = 50
EPOCHS = 10
BATCH = 16
IMAGES = 80


class Traced(NamedTuple):
    recipe: str
    small: tuple[str, ...]  # of the recipe's widths
    sizes: tuple[int, ...]  # of the views


WIDTHS = ("method.head.hidden=12", "method.head.dim=6")
GROUPS = ("method.head.hidden=12", "method.head.dim=12", "method.groups=2")
INNER = ("method.inner.head.hidden=12", "method.inner.head.dim=6", "method.kept=6")
PAPERS = {
    "lorac": Traced(
        "lorac/lorac_imagenet", ("method.queue=64", *WIDTHS), (8, 8, 8, 6, 6)
    ),
    "jcl": Traced("jcl/jcl_imagenet", ("method.queue=64", *WIDTHS), (8, 8, 8, 8, 8, 8)),
    "mio": Traced("mio/mio_a_cifar10", WIDTHS, (8, 8)),
    "arb": Traced("arb/arb_imagenet_2048", GROUPS, (8, 8)),
    "cllr": Traced("cllr/cllr_nuclear_cifar10_256_400ep", INNER, (8, 8)),
}
# Those whose state moves by a schedule; only a CPU is held to them
START = "optim.warmup_epochs=0"
PREDICTOR = (
    "method.predictor.hidden=12",
    "method.predictor.dim=6",
    "method.momentum=0.9",
)
DINO = (
    "method.hidden=12",
    "method.bottleneck=6",
    "method.dim=9",
    "method.warmup_epochs=5",
)
BASELINES = {
    "moco": Traced("arb/moco_v2_cifar10", ("method.queue=64", *WIDTHS, START), (8, 8)),
    "byol": Traced("arb/byol_cifar10", (*WIDTHS, *PREDICTOR, START), (8, 8)),
    "dino": Traced("arb/dino_cifar10", (*DINO, "method.momentum=0.9", START), (8, 8)),
    "swav": Traced(
        "arb/swav_cifar10", ("method.prototypes=10", *WIDTHS, START), (8, 8)
    ),
    "barlow_twins": Traced("arb/barlow_twins_cifar10_256", (*WIDTHS, START), (8, 8)),
}
TRACED = PAPERS | BASELINES
DTYPES = {"float64": torch.float64, "float32": torch.float32}
# Relative to a trace's largest loss. What is left between two machines is rounding, and what fifty
# steps make of it: of 1e-16 in float64, of 1e-7 in float32.
TOLERANCE = {"float64": 1e-8, "float32": 2e-3}


def trace(paper: str, dtype: str, device: str = "cpu") -> list[float]:
    """Return the loss of each step."""
    traced = TRACED[paper]
    words = [f"epochs={EPOCHS}", f"batch_size={BATCH}", *traced.small]
    config = recipes.load(PretrainConfig, traced.recipe, words, kind="pretrain")
    torch.manual_seed(0)
    setup = Setup(
        batch_size=BATCH, views=len(traced.sizes), seed=0, images=IMAGES, classes=5
    )
    method = build_method(config.method, TinyTrunk(), setup).to(device, DTYPES[dtype])
    optimizer = optim.of_recipe(config, method)
    rates = optim.LearningRates(optimizer, config, STEPS // EPOCHS)
    losses = []
    for step in range(STEPS):
        rates.set(step)
        seeding.seed_everything(0, "step", step)
        loss = method(_batch(traced, step, dtype, device))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        method.after_step((step + 1) / STEPS)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def _batch(traced: Traced, step: int, dtype: str, device: str) -> Batch:
    generator = torch.Generator().manual_seed(step)
    views = []
    for size in traced.sizes:
        view = torch.randn(
            BATCH, 3, size, size, dtype=torch.float64, generator=generator
        )
        views.append(view.to(DTYPES[dtype]))
    first = step % (IMAGES // BATCH) * BATCH
    batch = Batch(
        views=views,
        labels=torch.randint(5, (BATCH,), generator=generator),
        index=torch.arange(first, first + BATCH),
        step=step,
        epoch=step // (STEPS // EPOCHS),
        epochs=EPOCHS,
        progress=step / STEPS,
    )
    return moved(batch, device)


def far(found: list[float], kept: list[float]) -> float:
    """Return the largest difference, relative to the largest loss that was kept."""
    assert len(found) == len(kept)
    difference = max(abs(a - b) for a, b in zip(found, kept))
    return difference / max(map(abs, kept))


def file_of(device: str) -> Path:
    return FOLDER / f"{device}.json"


def kept(device: str) -> dict[str, dict[str, list[float]]]:
    return json.loads(file_of(device).read_text())["losses"]


def write(device: str) -> None:
    precision.use("fp32")
    losses = {}
    for paper in TRACED:
        losses[paper] = {dtype: trace(paper, dtype, device) for dtype in DTYPES}
    found = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "losses": losses,
    }
    file_of(device).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    write(sys.argv[1])
