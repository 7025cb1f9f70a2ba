"""Boards with a known truth, written as a table: a trunk's row, and what each column holds of it.

    board_of(folder, {"a": {KNN: 80, LINEAR: [70, 71, 72]}, "b": {KNN: 60, LINEAR: 70}})

A number is a share of the same images in percent, with its predictions kept; a list has one of them
for each seed. All trunks find the same images easy, so that two points are noise and ten are not.
"""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from backbench.board.board import Board, collect
from backbench.records import store
from backbench.records.predictions import keep
from backbench.records.store import Result
from backbench.requests.measuring import measuring_request
from backbench.tasks import TASKS
from support import boards
from support.boards import Kind

IMAGES = 400
# Protocols whose recipes have other names than their tasks' usual ones
RECIPES = {
    "knn-32px-v1": "knn_cifar",
    "linear-demo-v1": "linear_demo",
    "linear-tiny-v1": "linear_tiny",
}


@dataclass(frozen=True)
class Held:
    """A number with something unusual about it."""

    value: float
    kept: bool = (
        True  # False: no predictions, as older runs and other programs leave them
    )
    converged: bool = True
    size: tuple[int, int] | None = None  # of its images: measured, trained
    list_name: str = ""  # of test images, where it is not the usual one
    seen: bool = False  # whether its trunk was trained on the test images
    command: str | None = None


def bare(value: float) -> Held:
    return Held(value, kept=False)


Entry = float | Held | list[float]


def board_of(folder: Path, table: dict[str, dict[Kind, Entry]]) -> Board:
    write(folder, table)
    return collect([folder])


def write(folder: Path, table: dict[str, dict[Kind, Entry]]) -> None:
    """Write the runs that such a table is the board of."""
    folder.mkdir(exist_ok=True)
    for name, entries in table.items():
        for kind, entry in entries.items():
            values = entry if isinstance(entry, list) else [entry]
            for seed, value in enumerate(values):
                held = value if isinstance(value, Held) else Held(value)
                _write_one(folder, name, kind, held, seed)


def command_of(name: str, kind: Kind) -> str:
    """The command of such a number, as a run records it."""
    task, dataset, _, protocol, _ = kind
    request = measuring_request(
        TASKS[task].verb,
        [Path("trunks") / f"{name}.safetensors"],
        data=Path("data"),
        out=Path("runs") / f"{name}-{task}",
        dataset=dataset,
        recipe=RECIPES.get(protocol, TASKS[task].recipe),
        percent=TASKS[task].percent,
    )
    return shlex.join(["backbench", *request.argv()])


def _write_one(folder: Path, name: str, kind: Kind, held: Held, seed: int) -> None:
    task, dataset, _, protocol, _ = kind
    run = folder / f"{task}-{dataset}-{protocol}" / name
    store.append(run, [a_row(run, name, kind, held, seed)])


def a_row(run: Path, name: str, kind: Kind, held: Held, seed: int) -> Result:
    """One number, whose predictions are kept in the folder `run`."""
    task, dataset, metric, *_ = kind
    about = boards.held_of(kind, f"{IMAGES}{held.list_name}", IMAGES)
    manifest = about.get("manifests", {}).get("test") or boards.digest_of(about["val"])
    # 1. The easiest images are right, but for a few of the trunk's and the training's own
    hard = boards.generator(f"{dataset} {task}").normal(size=IMAGES)
    own = boards.generator(f"{kind} {name} {seed}").normal(size=IMAGES)
    order = np.argsort(hard + 0.3 * own)
    hit = np.zeros(IMAGES, bool)
    hit[order[: round(held.value * IMAGES / 100)]] = True
    label = np.arange(IMAGES) % 10
    # 2. The row, and the predictions that it follows from
    arrays = boards.predictions(kind, hit, label, manifest)
    arrays["manifest"] = manifest
    provenance = {"manifest": manifest, **about}
    if held.kept:
        file = f"{metric}-{held.value:g}-{seed}"
        provenance["predictions"] = keep(run, file, **arrays)
    if held.seen:
        provenance["trained_on"] = [f"{dataset}:test"]
    if held.size:
        measured, trained = held.size
        provenance["size"] = {
            "measured": measured,
            "trained": trained,
            "from": "the recipe",
        }
    row = boards.a_row(
        kind,
        name,
        arrays,
        seed=seed,
        provenance=provenance,
        origin={"command": held.command or command_of(name, kind)},
    )
    if not held.converged:
        row = replace(row, chosen={"converged": False, "gradient": 3e-3, "l2": 1.0})
    return row
