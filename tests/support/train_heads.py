"""One rank of a training of linear heads, for test_linear.py: train_heads.py ROOT TRUNK OUT RANK WORLD PORT."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from backbench.datasets import catalog
from backbench.runs.state import StopFlag
from backbench.weights.checkpoint import Checkpoint
from transfer.config import Augment, Geometry, Length, Sgd
from transfer.features import Frozen
from transfer.linear import Heads, Training
from transfer.machine import Machine

RATES = (0.1, 0.316, 1.0, 3.16, 10.0, 31.6, 100.0)
PROTOCOL = Sgd(
    kind="sgd",
    protocol="linear-test-v1",
    lr=RATES,
    batch_size=8,
    reference_batch=256,
    length={"default": Length(iterations=15)},
    augment=Augment(size=32, scale=(0.5, 1.0)),
    geometry=Geometry(resize=32, crop=32),
)


def train(root, trunk, run, rates, machine, *, stop=None, protocol=PROTOCOL):
    """The trained heads of one trunk on ROOT/classes."""
    found = catalog.load("classes", Path(root))
    frozen = Frozen.build(Checkpoint.load(trunk), device=machine.device)
    heads = Heads(
        len(rates),
        len(found.train.classes),
        frozen.dim,
        std=protocol.init_std,
        seed=0,
        device=machine.device,
    )
    Training(
        name="select",
        protocol=protocol,
        trunks=[frozen],
        heads=[heads],
        rates=[torch.tensor([protocol.used(lr) for lr in rates])],
        images=found.train,
        features=None,
        watch=None,
        seed=0,
        machine=machine,
        stop=stop or StopFlag(),
        file=Path(run) / "state",
        run=Path(run),
        dataset="classes",
    )()
    return heads


if __name__ == "__main__":
    root, trunk, out, rank, world, port = sys.argv[1:]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=int(rank), world_size=int(world))
    run = Path(out).parent
    heads = train(root, trunk, run, RATES, Machine(torch.device("cpu"), int(rank), int(world), 0))
    if int(rank) == 0:
        torch.save(heads.state(), out)
    dist.destroy_process_group()
