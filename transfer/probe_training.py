"""The training pass of the SGD probe: heads of several trunks and rates, one stream of images."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backbench.errors import Preempted
from backbench.images.image_list import ImageList
from backbench.parallel.distributed import sent
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag, load_state, save_state
from transfer.batches import rank_batches, training_pictures
from transfer.devices import Machine
from transfer.feature_rows import FeatureRows
from transfer.frozen import FrozenTrunk, forward_all
from transfer.heads import BestHeads, LinearHeads
from transfer.protocols import Sgd
from transfer.scoring import Assignment

SHOW_EVERY = 50  # steps; reading a loss waits for the device


@dataclass(frozen=True)
class Watched:
    """What `patience` looks at: validation features per trunk, and the labels."""

    features: Sequence[Tensor]
    labels: Tensor


@dataclass
class ProbeTraining:
    """One pass that trains the heads of all trunks, stoppable and continuable at any step."""

    phase: str  # select, refit or train; a state of another phase is not this one's
    task: Assignment[Sgd]
    trunks: Sequence[FrozenTrunk]
    heads: list[LinearHeads]
    rates: list[Tensor]  # per trunk (H,), as used
    images: ImageList
    features: list[FeatureRows] | None  # of the images, where they are not augmented
    watched: Watched | None  # for `patience`
    machine: Machine
    stop: StopFlag

    def __post_init__(self) -> None:
        p = self.task.protocol
        length = p.length.get(self.task.dataset.name, p.length["default"])
        self.steps = length.steps(len(self.images), p.batch_size)
        self.per_epoch = len(self.images) / p.batch_size  # broken, where the batch does not divide
        self.labels = torch.tensor(self.images.labels)
        self.best = [BestHeads(heads) for heads in self.heads]

    def run(self) -> None:
        """All steps that are left; with `patience` the heads end as they were at their best."""
        p, machine = self.task.protocol, self.machine
        first, loss = self._resume(), 0.0
        progress = Progress(
            self.task.run if machine.main else None,
            self.steps,
            f"{self.task.dataset.name} {self.phase}",
            done=first,
        )
        saved = time.monotonic()
        for step, (features, labels) in zip(range(first, self.steps), self._batches(first)):
            # 1. One step of the heads of every trunk.
            factor = p.schedule.factor(step, self.steps, self.per_epoch)
            losses = [
                heads.step(
                    of_trunk,
                    labels,
                    rates * factor,
                    momentum=p.momentum,
                    decay=p.weight_decay,
                    batch=p.batch_size,
                )
                for heads, of_trunk, rates in zip(self.heads, features, self.rates)
            ]
            if machine.main:
                if step % SHOW_EVERY == first % SHOW_EVERY:
                    loss = float(losses[0].min()) * machine.world / p.batch_size
                progress.advance(1, loss=loss)
            # 2. Every rank has the same heads and finds the same about their patience; a signal
            #    reaches one of them, so all vote on it, in every step.
            exhausted = self._exhausted(step)
            stopping = machine.stopping(self.stop)
            if exhausted:
                break
            # 3. Rank 0 saves, now and then and before a stop.
            if stopping or time.monotonic() - saved > 60 * p.save_minutes:
                self._save(step + 1)
                saved = time.monotonic()
            if stopping and step + 1 < self.steps:
                raise Preempted(
                    f"stopped by {stopping} at step {step + 1} of {self.steps};"
                    " the same command continues"
                )
        if self.watched is not None:
            for heads, best in zip(self.heads, self.best):
                best.restore(heads)

    def _batches(self, first: int) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Features per trunk and labels of this rank's share of each global batch."""
        p, machine = self.task.protocol, self.machine
        shares = rank_batches(
            self.task.seed,
            len(self.images),
            p.batch_size,
            first,
            self.steps,
            rank=machine.rank,
            world=machine.world,
        )
        if self.features is not None:
            for share in shares:
                index = torch.tensor([i for _, i in share])
                mine = [sent(of_trunk.take(index), machine.device) for of_trunk in self.features]
                yield mine, sent(self.labels[index], machine.device)
            return
        assert p.augment is not None
        pictures = training_pictures(
            self.images, p.augment, shares, seed=self.task.seed, machine=machine
        )
        for pixels, index in pictures:
            mine = forward_all(self.trunks, pixels.to(machine.device, non_blocking=True))
            yield mine, sent(self.labels[index], machine.device)

    def _exhausted(self, step: int) -> bool:
        """Whether all heads have given up; those that were never better are kept. Once an epoch."""
        patience = self.task.protocol.patience
        epoch = int((step + 1) / self.per_epoch)
        ended = epoch > int(step / self.per_epoch)
        if self.watched is None or patience is None or not ended:
            return False
        device = self.machine.device
        labels = self.watched.labels.to(device)
        given_up = []  # by trunk; all are asked, since asking is what keeps the best
        for heads, best, features in zip(self.heads, self.best, self.watched.features):
            loss = heads.mean_loss(features.to(device), labels).cpu()
            given_up.append(best.update(heads, loss, epoch=epoch, patience=patience))
        return all(given_up)

    def _save(self, step: int) -> None:
        if not self.machine.main:
            return
        heads = {t.digest: h.state() for t, h in zip(self.trunks, self.heads)}
        best = {t.digest: b.state() for t, b in zip(self.trunks, self.best)}
        state = {"phase": self.phase, "step": step, "heads": heads, "best": best}
        save_state(self.task.state_file, state)

    def _resume(self) -> int:
        """The step to start at: 0, or where a saved state of this phase ends."""
        file = self.task.state_file
        if not file.exists():
            return 0
        state = load_state(file)
        # It may hold more trunks than are left: of a run that was killed between two rows.
        if state["phase"] != self.phase or any(t.digest not in state["heads"] for t in self.trunks):
            return 0
        for trunk, heads, best in zip(self.trunks, self.heads, self.best):
            heads.load(state["heads"][trunk.digest])
            best.load(state["best"][trunk.digest])
        return int(state["step"])
