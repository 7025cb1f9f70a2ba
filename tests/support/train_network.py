"""train_network.py ROOT TRUNK OUT RANK WORLD PORT: one rank of a full finetuning."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from backbench.datasets import catalog
from backbench.images.preprocess import normalise, to_input
from backbench.runs import seeding
from backbench.runs.state import StopFlag
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.batches import CropFlip, global_batches
from backbench.transfer.finetune import Finetuning, Network
from backbench.transfer.finetune_protocol import Finetune, Part
from backbench.transfer.protocol import CropAugment, Geometry, Length, RateSchedule
from backbench.weights.checkpoint import Checkpoint

LR = 0.02
BATCH = 8
PROTOCOL = Finetune(
    kind="finetune",
    protocol="finetune-test-v1",
    head_lr=(LR,),
    batch_size=BATCH,
    reference_batch=BATCH,
    schedule=RateSchedule(name="step", milestones=(0.6, 0.8), gamma=0.2),
    augment=CropAugment(size=32, scale=(0.5, 1.0)),
    geometry=Geometry(resize=32, crop=32),
)


class DoubleNetwork(Network):
    """In float64: batch norm over eight images at 1x1 amplifies float32's rounding 1000 times."""

    def __init__(self, *about):
        super().__init__(*about)
        self.module.double()

    def __call__(self, pixels):
        return self.module(normalise(pixels, self.pixels).double())


def train(root, trunk, run, machine, *, iterations, ratio=1.0, kind=Network):
    """The trained nn.Sequential(trunk, head)."""
    found = catalog.load("classes", Path(root))
    checkpoint = Checkpoint.load(trunk)
    network = kind(checkpoint, len(found.train.classes), PROTOCOL, 0, machine)
    task = Assignment(
        run=Path(run),
        task="finetune",
        dataset=catalog.find("classes"),
        splits=found,
        protocol=PROTOCOL,
        seed=0,
        checkpoints=(checkpoint,),
    )
    part = Part(length=Length(iterations=iterations), head_over_trunk=ratio)
    Finetuning(task, part, machine, StopFlag()).train(network, found.train, LR, "test")
    return network.module


def plain(root, trunk, *, iterations, ratio):
    """The head's weight after the same training, with torch's own modules and optimiser."""
    images = catalog.load("classes", Path(root)).train
    checkpoint = Checkpoint.load(trunk)
    backbone = checkpoint.backbone().train()
    head = nn.Linear(backbone.feature_dim, len(images.classes))
    start = seeding.generator(0, "head", len(images.classes), backbone.feature_dim)
    nn.init.normal_(head.weight, 0, 0.01, generator=start)
    nn.init.zeros_(head.bias)
    groups = [
        {"params": backbone.parameters(), "lr": LR / ratio},
        {"params": head.parameters(), "lr": LR},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    steps = [round(0.6 * iterations), round(0.8 * iterations)]
    decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, steps, 0.2)
    view = CropFlip(PROTOCOL.augment, 0)
    for batch in global_batches(0, len(images), BATCH, 0, iterations):
        crops = [view(images.open(i), (epoch, i)) for epoch, i in batch]
        pixels = torch.stack([to_input(crop, checkpoint.pixels) for crop in crops])
        labels = torch.tensor([images.labels[i] for _, i in batch])
        loss = F.cross_entropy(head(backbone(pixels)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
    return head.weight.detach()


if __name__ == "__main__":
    root, trunk, out, rank, world, port = sys.argv[1:]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=int(rank), world_size=int(world))
    machine = Machine(torch.device("cpu"), int(rank), int(world), 0)
    network = train(
        root, trunk, Path(out).parent, machine, iterations=3, kind=DoubleNetwork
    )
    if int(rank) == 0:
        torch.save(network.state_dict(), out)
    dist.destroy_process_group()
