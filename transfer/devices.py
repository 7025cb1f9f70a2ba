"""The processes and devices of an evaluation, and the checkpoints that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from backbench.errors import BadInput, Preempted
from backbench.parallel import distributed, gpus
from backbench.parallel.distributed import Agreement
from backbench.parallel.loading import Unreadable, default_workers
from backbench.requests.places import RunRequest
from backbench.runs.terminal import log

if TYPE_CHECKING:
    from backbench.runs.state import StopFlag
    from backbench.weights.checkpoint import Checkpoint

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """This process's place among those of an evaluation, and how they agree."""

    device: torch.device
    rank: int
    world: int
    workers: int  # loader processes of this process
    watched: bool = False  # whether Fabric started the other processes and watches them
    # It is made once, when all processes are up, as making it is itself an exchange among them. Its
    # votes go over the CPU, so none of them waits for a GPU. With one process they do nothing.
    agreement: Agreement = field(default_factory=Agreement, compare=False, repr=False)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def stopping(self, stop: StopFlag | None) -> str | None:
        """Return the name of a signal on all ranks as soon as one rank has it, else None. All ranks
        must ask in the same step."""
        asked = stop.requested if stop is not None else None
        (anyone,) = self.agreement.any(asked is not None)
        if not anyone:
            return None
        # Only the ranks that have the signal know its name.
        return asked or "a signal"

    def preempt(self, stop: StopFlag | None, where: str) -> None:
        """Raise Preempted on all ranks as soon as one has a signal."""
        if stopping := self.stopping(stop):
            raise preempted(stopping, where)

    def readable(self, batch: T | Unreadable) -> T:
        """Return the batch. BadInput on all ranks if one of them could not read its own. All ranks
        must ask in the same step."""
        mine = batch.error if isinstance(batch, Unreadable) else None
        error = self.agreement.first(mine)
        if error is not None or isinstance(batch, Unreadable):
            raise BadInput(error or "")
        return batch

    def rank_0_tells(self) -> AbstractContextManager[None]:
        """Let rank 0 alone report an error inside, which every process comes to alike."""
        return distributed.rank_0_tells(watched=self.watched)

    def alone(self) -> Machine:
        """Leave the group of processes: nothing after this waits for the others."""
        # The agreement's group is destroyed too, so a new agreement is made, of one process.
        if self.world > 1:
            dist.destroy_process_group()
        return replace(self, world=1, agreement=Agreement())


def preempted(signal: str, where: str) -> Preempted:
    """Make the error of a run that has saved what it needs to go on."""
    return Preempted(f"stopped by {signal} {where}; the same command continues")


def start_for(request: RunRequest) -> Machine:
    """This process's place among --devices x --nodes; the other processes are started by Fabric."""
    devices, nodes, workers = request.devices, request.nodes, request.workers
    kind: str = request.accelerator
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    gpus.refuse_missing(kind, devices)
    if workers is None:
        workers = default_workers(devices)
    if devices * nodes == 1:
        device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
        return Machine(device, rank=0, world=1, workers=workers)
    from backbench.parallel.lightning import Fabric

    fabric = Fabric(accelerator=kind, devices=devices, num_nodes=nodes, strategy="ddp")
    distributed.launch(fabric)
    if fabric.global_rank:
        log.setLevel("ERROR")  # one process speaks
    watched = distributed.started_by_fabric()
    return Machine(
        fabric.device, fabric.global_rank, fabric.world_size, workers, watched
    )


def read_checkpoints(paths: Sequence[Path]) -> list[Checkpoint]:
    """Read the files as checkpoints. Weights that two files hold are measured once."""
    from backbench.weights.checkpoint import PIXELS_FROM
    from backbench.weights.importing import read
    from backbench.weights.shared_names import told_apart

    out: dict[str, Checkpoint] = {}
    names: dict[str, Path] = {}
    for path in paths:
        checkpoint = read(path)
        if remark := checkpoint.provenance.get(PIXELS_FROM):
            log.info(f"{checkpoint.name}: {remark}")
        if checkpoint.digest in out:
            there = names[checkpoint.digest]
            log.warning(f"{path}: the same weights as {there}; measured once")
            continue
        out[checkpoint.digest] = checkpoint
        names[checkpoint.digest] = path
    return told_apart(list(out.values()), list(names.values()))
