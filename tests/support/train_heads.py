"""Trains linear heads, in one process or as one of two."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from backbench.datasets import catalog
from backbench.runs.state import StopFlag
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.frozen import FrozenTrunk
from backbench.transfer.heads import LinearHeads
from backbench.transfer.probes.sgd import ProbeTraining, Sgd
from backbench.transfer.protocol import CropAugment, Geometry, Length
from backbench.weights.checkpoint import Checkpoint

RATES = (0.1, 0.316, 1.0, 3.16, 10.0, 31.6, 100.0)
PROTOCOL = Sgd(
    kind="sgd",
    protocol="linear-test-v1",
    lr=RATES,
    batch_size=8,
    reference_batch=256,
    weight_decay=0.001,
    augment=CropAugment(size=32, scale=(0.5, 1.0)),
    geometry=Geometry(resize=32, crop=32),
    length={"default": Length(iterations=15)},
)


def train(root, trunk, run, rates, machine, *, stop=None, protocol=PROTOCOL):
    """The trained heads of one trunk on ROOT/classes."""
    found = catalog.load("classes", Path(root))
    checkpoint = Checkpoint.load(trunk)
    frozen = FrozenTrunk.build(checkpoint, device=machine.device)
    heads = LinearHeads(
        len(rates),
        len(found.train.classes),
        frozen.dim,
        std=protocol.init_std,
        seed=0,
        device=machine.device,
    )
    task = Assignment(
        run=Path(run),
        task="linear",
        dataset=catalog.find("classes"),
        splits=found,
        protocol=protocol,
        seed=0,
        checkpoints=(checkpoint,),
    )
    ProbeTraining(
        phase="select",
        task=task,
        trunks=[frozen],
        heads=[heads],
        rates=[torch.tensor([protocol.used(lr) for lr in rates])],
        images=found.train,
        features=None,
        watched=None,
        machine=machine,
        stop=stop or StopFlag(),
    ).run()
    return heads


def one_of_two(rank, root, trunk, out, port):
    """Be one of a training's two processes, and write OUT/<rank>.pt: the heads, and what it hears of a
    signal that only the last one gets."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    machine = Machine(torch.device("cpu"), rank, 2, 0)
    heads = train(root, trunk, out, RATES, machine)
    quiet = StopFlag()
    stop = StopFlag()
    if rank == 1:
        stop.requested = "SIGTERM"
    heard = [machine.stopping(quiet), machine.stopping(stop)]
    alone = machine.alone()
    if rank == 0:  # the others are gone, or wait for nothing
        heard += [alone.stopping(quiet), alone.stopping(None)]
    assert alone.world == 1 and not dist.is_initialized()
    torch.save({"heads": heads.state(), "heard": heard}, out / f"{rank}.pt")
