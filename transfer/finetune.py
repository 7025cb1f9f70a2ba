"""`backbench semisup` and `finetune`: all layers trained, on 1%, 10% or all of the labels.

For every head rate of the grid the network is trained on the training part; the best rate is chosen
on validation images, and the final network scores the test split once. The trunk's rate is the
head's divided by `head_over_trunk`. Batch norm is trained with the statistics of the global batch,
so the result does not depend on the number of processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from backbench.datasets import catalog, splits
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images import contents
from backbench.images.image_list import ImageList
from backbench.recipes import config
from backbench.results import store
from backbench.results.store import Result
from backbench.runs.folder import STATES, open_run
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.runs.terminal import log
from backbench.tasks import TASKS
from backbench.weights.checkpoint import Checkpoint
from transfer import metrics, scoring
from transfer.devices import Machine, read_checkpoints, start_for
from transfer.network import Network, NetworkTraining, predict
from transfer.protocols import Finetune, Part, load_protocol
from transfer.scoring import Assignment, CheckpointPredictions, best_of


def run_semisup(args: argparse.Namespace) -> int:
    """The verb `semisup`."""
    protocol = _protocol(args.protocol)
    part = protocol.parts.get(str(args.percent))
    if protocol.dataset is None or part is None:
        what = f"has no part for {args.percent}%"
        if protocol.dataset is None:
            what = "names no dataset"
        raise BadInput(
            f"--protocol {args.protocol}: {what}; use a semi-supervised protocol, as `semisup`"
        )
    file = args.lists / f"{args.percent}percent.txt"
    published = part.list
    if published is None:
        listed = splits.read_list(file)
    else:
        listed = splits.read_list(file, lines=published.lines, sha256=published.sha256)
    found = catalog.load(protocol.dataset, args.data, seed=args.seed)
    labelled = labelled_part(found, listed, file, args.seed)
    task_name = f"semi_{args.percent}pct"
    return _run(args, protocol, part, labelled, task_name=task_name, name=protocol.dataset)


def run(args: argparse.Namespace) -> int:
    """The verb `finetune`."""
    protocol = _protocol(args.protocol)
    part = protocol.parts.get("100")
    if part is None:
        raise BadInput(
            f"--protocol {args.protocol}: has no part for all labels; use `finetune`,"
            " or `backbench semisup`"
        )
    found = catalog.load(args.dataset, args.data, seed=args.seed)
    return _run(args, protocol, part, found, task_name="finetune", name=args.dataset)


def _protocol(name: str) -> Finetune:
    protocol = load_protocol(name, {"finetune": Finetune})
    assert isinstance(protocol, Finetune)
    return protocol


def labelled_part(found: Splits, listed: Sequence[str], file: Path, seed: int) -> Splits:
    """The listed labels only: never more labels than the list has are used, also for the choice."""
    # Without an official val a fifth of the list is given up for the choice of the rate. An
    # official one chooses, and trains nothing.
    train = found.both() if found.held_out else found.train
    part = train.subset(splits.select(train, listed, where=str(file)))
    note = (*found.notes, f"{len(part)} labelled images from {file.name}")
    if found.held_out:
        return splits.with_hold_out(part, found.test, seed=seed, notes=note)
    return Splits(part, found.val, found.test, False, note)


def _run(
    args: argparse.Namespace,
    protocol: Finetune,
    part: Part,
    found: Splits,
    *,
    task_name: str,
    name: str,
) -> int:
    checkpoints = read_checkpoints([args.checkpoint])
    machine = start_for(args)
    hashes = splits.digests(found)
    identity = {
        "recipe": config.to_dict(protocol),
        "task": task_name,
        "checkpoints": [c.digest for c in checkpoints],
        "datasets": {name: hashes},
        "seed": args.seed,
        contents.KEY: {name: contents.of_splits(found.items())},
    }
    task = Assignment(
        run=args.out,
        task=task_name,
        dataset=catalog.find(name),
        splits=found,
        hashes=hashes,
        protocol=protocol,
        seed=args.seed,
    )
    verb = TASKS[task_name].verb
    opening = open_run(args.out, verb=verb, identity=identity)
    with (
        machine.rank_0_tells(),
        machine.agreement.together(opening if machine.main else None),
    ):
        if machine.main:
            splits.write_manifests(args.out, name, found)
            store.owe(args.out, len(catalog.find(name).metrics))
        rows = finetune(task, part, checkpoints[0], machine)
    if machine.main:
        scoring.show(rows)
    return 0


@dataclass
class TriedRates:
    """What has been done of the grid."""

    scores: list[float] = field(default_factory=list)  # on val, of each finished rate
    best: dict[str, Tensor] = field(default_factory=dict)  # weights; none where the best refits


def finetune(
    task: Assignment[Finetune], part: Part, checkpoint: Checkpoint, machine: Machine
) -> list[Result]:
    """Every rate of the grid, the choice, the final network, the test -> the rows."""
    done = task.done([checkpoint], task.dataset.metrics)
    if checkpoint.digest in done:
        return done[checkpoint.digest]
    with StopFlag() as stop:
        work = Finetuning(task, part, checkpoint, machine, stop)
        if machine.main:
            work.say_rates()
        # 1. Each rate is tried on train and scored on val, unless there is nothing to choose.
        tried = work.try_rates()
        best = best_of(tried.scores) if tried.scores else 0
        lr = task.protocol.head_lr[best]
        # 2. The network that counts: trained again with val, or the one that was best.
        network = work.final_network(lr, tried)
        # 3. The one look at test.
        ranking = predict(network, task.splits.test, task.protocol, machine, stop)
    if not machine.main:
        return []
    predictions = CheckpointPredictions(
        checkpoint=checkpoint, ranking=ranking, chosen=work.chosen(lr, tried)
    )
    rows = scoring.write(task, [predictions])
    work.tried_file.unlink(missing_ok=True)
    work.training_file.unlink(missing_ok=True)
    return rows


@dataclass(frozen=True)
class Finetuning:
    """One checkpoint on one part of the labels.

    RUN/state holds two files: `tried_file` what is done of the grid, `training_file` where the
    training in progress is. That one names its rate and images, so that no other is taken for it.
    """

    task: Assignment[Finetune]
    part: Part
    checkpoint: Checkpoint
    machine: Machine
    stop: StopFlag

    @property
    def tried_file(self) -> Path:
        return self.task.run / STATES / "grid.state"

    @property
    def training_file(self) -> Path:
        return self.task.run / STATES / "training.state"

    @property
    def refits(self) -> bool:
        """Whether the best rate trains again, with val."""
        # A hold-out is a part of what may be trained on; so is finetuning's official val. With an
        # official val, semi-supervised training has used the whole list already.
        return self.task.splits.held_out or self.task.task == "finetune"

    def say_rates(self) -> None:
        p, task = self.task.protocol, self.task
        pairs = ", ".join(
            f"{p.used(lr):g}/{p.used(lr) / self.part.head_over_trunk:g}" for lr in p.head_lr
        )
        log.info(
            f"{task.dataset.name} {task.task}: head/trunk rates as used {pairs}"
            f" (declared for {p.reference_batch} images, times {p.batch_size}/{p.reference_batch})"
        )

    def try_rates(self) -> TriedRates:
        """The rates that are left, trained on train and scored on val; saved after each."""
        task, p = self.task, self.task.protocol
        tried = TriedRates()
        if self.tried_file.exists():
            tried = TriedRates(**load_state(self.tried_file))
        if len(p.head_lr) == 1 and self.refits:
            return tried  # nothing to choose
        label = np.asarray(task.splits.val.labels)
        classes = len(task.splits.train.classes)
        for index in range(len(tried.scores), len(p.head_lr)):
            lr, what = p.head_lr[index], f"rate {index + 1} of {len(p.head_lr)}"
            network = self._train(task.splits.train, lr, what)
            ranking = predict(network, task.splits.val, p, self.machine, self.stop)
            prediction = ranking[:, 0].numpy()
            score = metrics.score(task.dataset.metric, prediction, label, classes)
            tried.scores.append(score)
            if not self.refits and best_of(tried.scores) == index:
                tried.best = network.state()
            if self.machine.main:
                log.info(f"{self.checkpoint.name}: head rate {lr:g}: val {score:.2f}")
                save_state(self.tried_file, {"scores": tried.scores, "best": tried.best})
        return tried

    def final_network(self, lr: float, tried: TriedRates) -> Network:
        if self.refits:
            return self._train(self.task.splits.both(), lr, "final")
        network = self._network()
        network.load(tried.best)
        return network

    def _train(self, images: ImageList, lr: float, what: str) -> Network:
        network = self._network()
        NetworkTraining(
            network=network,
            task=self.task,
            part=self.part,
            images=images,
            lr=lr,
            what=what,
            machine=self.machine,
            stop=self.stop,
            file=self.training_file,
        ).run()
        return network

    def _network(self) -> Network:
        classes = len(self.task.splits.train.classes)
        return Network(self.checkpoint, classes, self.task.protocol, self.task.seed, self.machine)

    def chosen(self, lr: float, tried: TriedRates) -> dict[str, object]:
        """`chosen` of the rows."""
        p = self.task.protocol
        return {
            "lr": lr,
            "lr_used": p.used(lr),
            "trunk_lr_used": p.used(lr) / self.part.head_over_trunk,
            "reference_batch": p.reference_batch,
            "batch_size": p.batch_size,
            "on": "val" if tried.scores else None,
            "trained_on": "train+val" if self.refits else "train",
            "scores": {f"{rate:g}": score for rate, score in zip(p.head_lr, tried.scores)},
            "at_edge": scoring.warn_edge(self.task, self.checkpoint, "head rate", lr, p.head_lr),
        }
