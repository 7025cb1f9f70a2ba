"""`backbench semisup` and `backbench finetune`: all layers trained, on 1%, 10% or all of a dataset's labels.

For every head rate of the grid the network is trained on the training part; the best rate is chosen on validation
images, and the final network scores the test split once. The trunk's rate is the head's divided by `head_over_trunk`.
Batch norm is trained with the statistics of the global batch, so the result does not depend on the number of processes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbench import config
from backbench.datasets import catalog, splits
from backbench.errors import BadInput, Preempted
from backbench.images.files import ImageList
from backbench.images.preprocess import eval_geometry, normalise
from backbench.results.store import Result
from backbench.runs import distributed, seeding
from backbench.runs.folder import Progress, log, open_run
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.weights.checkpoint import Checkpoint
from transfer import metrics, scoring
from transfer.config import Finetune, Part, load_protocol
from transfer.features import loader, stopping_together
from transfer.linear import CropFlip, best_of, positions, share
from transfer.machine import Machine, read_checkpoints, start_for
from transfer.scoring import Measured, Task


def run_semisup(args: argparse.Namespace) -> int:
    """The verb `semisup`."""
    protocol = _protocol(args.protocol)
    part = protocol.parts.get(str(args.percent))
    if protocol.dataset is None or part is None:
        what = (
            "names no dataset" if protocol.dataset is None else f"has no part for {args.percent}%"
        )
        raise BadInput(
            f"--protocol {args.protocol}: {what}; use a semi-supervised protocol, as `semisup`"
        )
    file = args.lists / f"{args.percent}percent.txt"
    published = part.list
    listed = splits.read_list(
        file,
        lines=published.lines if published else None,
        sha256=published.sha256 if published else None,
    )
    found = catalog.load(protocol.dataset, args.data, seed=args.seed)
    return _run(
        args, protocol, part, f"semi_{args.percent}pct", _labelled(found, listed, file, args.seed)
    )


def run(args: argparse.Namespace) -> int:
    """The verb `finetune`."""
    protocol = _protocol(args.protocol)
    part = protocol.parts.get("100")
    if part is None:
        raise BadInput(
            f"--protocol {args.protocol}: has no part for all labels; use `finetune`, or `backbench semisup`"
        )
    return _run(
        args, protocol, part, "finetune", catalog.load(args.dataset, args.data, seed=args.seed)
    )


def _protocol(name: str) -> Finetune:
    protocol = load_protocol(name, ("finetune",))
    assert isinstance(protocol, Finetune)
    return protocol


def _labelled(found: splits.Splits, listed: Sequence[str], file: Path, seed: int) -> splits.Splits:
    """The listed labels only. A dataset without an official val gives up a fifth of the list for the choice of the
    rate; never more labels than the list has are used. An official val chooses, and trains nothing."""
    train = found.both() if found.held_out else found.train
    part = train.subset(splits.select(train, listed, where=str(file)))
    note = (*found.notes, f"{len(part)} labelled images from {file.name}")
    if found.held_out:
        return splits.with_hold_out(part, found.test, seed=seed, notes=note)
    return splits.Splits(part, found.val, found.test, False, note)


def _run(
    args: argparse.Namespace, protocol: Finetune, part: Part, task_name: str, found: splits.Splits
) -> int:
    checkpoints = read_checkpoints([args.checkpoint])
    machine = start_for(args)
    name = str(protocol.dataset if task_name.startswith("semi") else args.dataset)
    hashes = {which: splits.digest(images) for which, images in found.items()}
    if machine.main:
        identity = {
            "recipe": config.to_dict(protocol),
            "task": task_name,
            "checkpoints": [c.digest for c in checkpoints],
            "datasets": {name: hashes},
            "seed": args.seed,
        }
        verb = "semisup" if task_name.startswith("semi") else "finetune"
        open_run(args.out, verb=verb, identity=identity)
        splits.write_manifests(args.out, name, found)
    dataset = catalog.find(name)
    task = Task(
        run=args.out,
        task=task_name,
        dataset=dataset,
        splits=found,
        hashes=hashes,
        protocol=protocol,
        seed=args.seed,
    )
    rows = finetune(task, part, checkpoints[0], machine)
    if machine.main:
        scoring.show(rows)
    return 0


@dataclass
class Grid:
    """What has been done: the validation score of each finished rate, and the weights of the best of them."""

    scores: list[float] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)


def finetune(task: Task, part: Part, checkpoint: Checkpoint, machine: Machine) -> list[Result]:
    """Every rate of the grid, the choice, the final network, the test -> the rows."""
    done = task.done([checkpoint], task.dataset.metrics)
    if checkpoint.digest in done:
        return done[checkpoint.digest]
    p = task.protocol
    assert isinstance(p, Finetune)
    classes = len(task.splits.train.classes)
    folder = task.run / "state"
    grid_file = folder / "grid.state"
    grid = Grid(**load_state(grid_file)) if grid_file.exists() else Grid()
    # A list or a hold-out is trained on whole again; with an official val, semi-supervised training is already whole.
    refit = task.splits.held_out or task.task == "finetune"
    if machine.main:
        pairs = ", ".join(
            f"{p.used(lr):g}/{p.used(lr) / part.head_over_trunk:g}" for lr in p.head_lr
        )
        log.info(
            f"{task.dataset.name} {task.task}: head/trunk rates as used {pairs}"
            f" (declared for {p.reference_batch} images, times {p.batch_size}/{p.reference_batch})"
        )
    with StopFlag() as stop:

        def train(images: ImageList, lr: float, what: str) -> Network:
            network = Network(checkpoint, classes, p, task.seed, machine)
            file = folder / "training.state"
            Training(network, p, part, images, lr, what, task, machine, stop, file)()
            return network

        for index in range(len(grid.scores), len(p.head_lr)):
            if len(p.head_lr) == 1 and refit:
                break  # nothing to choose
            network = train(
                task.splits.train, p.head_lr[index], f"rate {index + 1} of {len(p.head_lr)}"
            )
            ranking = predict(network, task.splits.val, p, machine, stop)
            label = np.asarray(task.splits.val.labels)
            grid.scores.append(
                metrics.score(task.dataset.metric, ranking[:, 0].numpy(), label, classes)
            )
            if not refit and best_of(grid.scores) == index:
                grid.best = network.state()
            if machine.main:
                log.info(
                    f"{checkpoint.name}: head rate {p.head_lr[index]:g}: val {grid.scores[-1]:.2f}"
                )
                save_state(grid_file, {"scores": grid.scores, "best": grid.best})
        best = best_of(grid.scores) if grid.scores else 0
        lr = p.head_lr[best]
        if refit:
            network = train(task.splits.both(), lr, "final")
        else:
            network = Network(checkpoint, classes, p, task.seed, machine)
            network.load(grid.best)
        ranking = predict(network, task.splits.test, p, machine, stop)
    if not machine.main:
        return []
    choice: dict[str, Any] = {
        "lr": lr,
        "lr_used": p.used(lr),
        "trunk_lr_used": p.used(lr) / part.head_over_trunk,
        "reference_batch": p.reference_batch,
        "batch_size": p.batch_size,
        "on": "val" if grid.scores else None,
        "trained_on": "train+val" if refit else "train",
        "scores": {f"{rate:g}": score for rate, score in zip(p.head_lr, grid.scores)},
        "at_edge": scoring.warn_edge(task, checkpoint, "head rate", lr, p.head_lr),
    }
    rows = scoring.write(task, [Measured(checkpoint=checkpoint, ranking=ranking, chosen=choice)])
    grid_file.unlink(missing_ok=True)
    (folder / "training.state").unlink(missing_ok=True)
    return rows


class Network:
    """Trunk and head, with SGD's two parameter groups (trunk, head)."""

    def __init__(
        self, checkpoint: Checkpoint, classes: int, p: Finetune, seed: int, machine: Machine
    ) -> None:
        self.pixels = checkpoint.pixels
        trunk = checkpoint.backbone()
        head = nn.Linear(trunk.feature_dim, classes)
        generator = seeding.generator(seed, "head", classes, trunk.feature_dim)
        nn.init.normal_(head.weight, 0, p.init_std, generator=generator)
        nn.init.zeros_(head.bias)
        module: nn.Module = nn.Sequential(trunk, head)
        if machine.world > 1:
            module = distributed.convert_sync_batchnorm(module)
        self.module = module.to(machine.device)
        if machine.device.type == "cuda":  # on a CPU small maps train slower with channels last
            self.module = self.module.to(memory_format=torch.channels_last)
        groups = [list(m.parameters()) for m in self.module.children()]
        self.optimizer = torch.optim.SGD(
            [{"params": g} for g in groups],
            lr=0.0,
            momentum=p.momentum,
            weight_decay=p.weight_decay,
        )
        self.bf16 = p.precision == "bf16"

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 (N, 3, H, W) -> logits (N, C) float32."""
        images = normalise(pixels, self.pixels)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            return self.module(images).float()

    def state(self) -> dict[str, Tensor]:
        return {
            name: value.detach().cpu().clone() for name, value in self.module.state_dict().items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        self.module.load_state_dict(state)


@dataclass
class Training:
    """One network trained at one head rate; stoppable and continuable at any step."""

    network: Network
    p: Finetune
    part: Part
    images: ImageList
    lr: float
    what: str
    task: Task
    machine: Machine
    stop: StopFlag
    file: Path

    def __call__(self) -> None:
        p, machine, network = self.p, self.machine, self.network
        batch = p.batch_size
        if batch % machine.world:
            raise BadInput(
                f"a batch of {batch} images on {machine.world} processes: use a number that divides it"
            )
        steps = self.part.length.steps(len(self.images), batch)
        first, shown = self._resume(), 0.0
        stream = positions(self.task.seed, len(self.images), batch, first, steps)
        mine = (share(b, machine.rank, machine.world) for b in stream)
        keyed = ([((epoch, i), i) for epoch, i in b] for b in mine)
        labels = torch.tensor(self.images.labels, device=machine.device)
        view = CropFlip(p.augment, self.task.seed)
        progress = Progress(
            self.task.run if machine.main else None,
            steps,
            f"{self.task.task} {self.what}",
            done=first,
        )
        head_lr, ratio = p.used(self.lr), self.part.head_over_trunk
        network.module.train()
        saved = time.monotonic()
        pictures = loader(self.images, view, keyed, workers=machine.workers)
        for step, (pixels, index) in zip(range(first, steps), pictures):
            factor = p.schedule.factor(step, steps, len(self.images) / batch)
            for group, peak in zip(network.optimizer.param_groups, (head_lr / ratio, head_lr)):
                group["lr"] = peak * factor
            logits = network(pixels.to(machine.device, non_blocking=True))
            # Summed over this rank's share and divided by the global batch: gradients then add up over ranks.
            loss = (
                F.cross_entropy(logits, labels[index.to(machine.device)], reduction="sum") / batch
            )
            network.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self._sum_gradients()
            network.optimizer.step()
            if machine.main:
                if step % 20 == first % 20:  # reading a loss waits for the device
                    shown = float(loss.detach()) * machine.world
                progress.advance(1, loss=shown)
            stopping = stopping_together(self.stop, machine.device)
            if stopping or time.monotonic() - saved > 60 * p.save_minutes:
                self._save(step + 1)
                saved = time.monotonic()
            if stopping and step + 1 < steps:
                raise Preempted(
                    f"stopped by {stopping} at step {step + 1} of {steps}; the same command continues"
                )

    def _sum_gradients(self) -> None:
        if self.machine.world == 1:
            return
        gradients = [p.grad for p in self.network.module.parameters() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        torch.distributed.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(part.view_as(gradient))

    def _key(self) -> str:
        return json.dumps([self.what, self.lr, len(self.images)])

    def _save(self, step: int) -> None:
        if self.machine.main:
            momentum = self.network.optimizer.state_dict()["state"]
            state = {
                "key": self._key(),
                "step": step,
                "network": self.network.state(),
                "momentum": momentum,
            }
            save_state(self.file, state)

    def _resume(self) -> int:
        if not self.file.exists():
            return 0
        state = load_state(self.file)
        if state["key"] != self._key():
            return 0
        self.network.load(state["network"])
        whole = self.network.optimizer.state_dict()
        self.network.optimizer.load_state_dict({**whole, "state": state["momentum"]})
        return int(state["step"])


@torch.no_grad()
def predict(
    network: Network, images: ImageList, p: Finetune, machine: Machine, stop: StopFlag
) -> Tensor:
    """The five best classes (N, 5) of every image; the ranks share the images."""
    network.module.eval()
    geometric = eval_geometry(**config.to_dict(p.geometry))
    size = p.feature_batch
    batches: list[list[tuple[None, int]]] = []
    for begin in range(0, len(images), size):
        each = -(-(min(begin + size, len(images)) - begin) // machine.world)
        mine = range(begin + machine.rank * each, begin + (machine.rank + 1) * each)
        batches.append([(None, min(i, len(images) - 1)) for i in mine])  # padded; cut below
    out = []
    pictures = loader(
        images, lambda picture, _: geometric(picture), batches, workers=machine.workers
    )
    for begin, (pixels, _) in zip(range(0, len(images), size), pictures):
        logits = distributed.gather_without_gradient(
            network(pixels.to(machine.device, non_blocking=True))
        )
        out.append(scoring.rank_classes(logits[: min(size, len(images) - begin)]))
        if stopping := stopping_together(stop, machine.device):
            raise Preempted(f"stopped by {stopping} while scoring; the same command continues")
    ranking = torch.cat(out)
    if bool((ranking < 0).all()):
        log.warning(f"{images.root}: the network's scores are not finite; this rate diverged")
    return ranking
