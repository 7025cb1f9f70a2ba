"""RUN/state.pt: what a run continues from, and how good what it holds is."""

import time
from pathlib import Path

import torch
from lightning_fabric import Fabric

from backbench.errors import BadInput, Failed
from backbench.runs.folder import STATE_FILE
from backbench.runs.state import load_state, save_state
from backbench.runs.terminal import log
from pretrain.method import Method
from pretrain.monitor import RecentTerms

# At the end of an epoch the state is written, unless the last one is younger than this
EPOCH_END_SECONDS = 30


class SavedState:
    """Everything that decides the steps to come, written by rank 0 and read by all.

    recipe (the fingerprint of what decides a run's numbers), step (how many are made), recent (the
    terms since the last row of metrics.jsonl), method (parameters and buffers), optimizer,
    precision (fp16's gradient scale). Nothing random is in it: draws are functions of the step.
    """

    def __init__(
        self,
        run: Path,
        recipe: str,
        fabric: Fabric,
        method: Method,
        optimizer: torch.optim.Optimizer,
        *,
        save_minutes: float,
    ) -> None:
        self.file = run / STATE_FILE
        self.recipe, self.fabric = recipe, fabric
        self.method, self.optimizer = method, optimizer
        self.save_seconds = save_minutes * 60
        self.saved = time.monotonic()

    def resume(self, last: int) -> tuple[int, RecentTerms]:
        """The step to continue at, of `last`, and the terms before it. 0 and none where nothing was
        saved. BadInput for a damaged state, or one of another recipe."""
        self.saved = time.monotonic()
        if not self.file.exists():
            return 0, RecentTerms()
        state = load_state(self.file)
        if state.get("recipe") != self.recipe:
            raise BadInput(
                f"{self.file}: the state of another recipe; move it away, or use another --out"
            )
        # The terms lie on the run's device, whatever the machine that saved them had
        step, recent = state["step"], RecentTerms()
        for row in state["recent"]:
            recent.rows.append({name: x.to(self.fabric.device) for name, x in row.items()})
        self.method.load_state_dict(state["method"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        log.info("%s: continuing at step %d of %d", self.file.parent, step, last)
        return step, recent

    def ages(self) -> tuple[bool, bool]:
        """Is the last state too old at any step, and at the end of an epoch? Asked on rank 0, whose
        clock decides for all ranks; no on the others."""
        if self.fabric.global_rank:
            return False, False
        old = time.monotonic() - self.saved
        return old > self.save_seconds, old > EPOCH_END_SECONDS

    def save(self, step: int, recent: RecentTerms) -> None:
        """The state after `step` steps, by rank 0. Weights that are not finite never replace a good
        state. On all ranks, whose weights are alike, so that all fail or none."""
        # A norm is finite only where all elements are, and one read answers for all: parameters,
        # queues, running statistics
        held = [x for x in self.method.state_dict().values() if x.is_floating_point()]
        norms = torch._foreach_norm(held)
        if not torch.stack(norms).isfinite().all():
            what = "the weights, or queues and statistics beside them, are not finite"
            raise Failed(f"after step {step} {what}; {self.last_good()}")
        if self.fabric.global_rank == 0:
            state = {"recipe": self.recipe, "step": step, "recent": recent.rows}
            state["precision"] = self.fabric.strategy.precision.state_dict()
            state |= {"method": self.method.state_dict(), "optimizer": self.optimizer.state_dict()}
            save_state(self.file, state)
        self.saved = time.monotonic()

    def last_good(self) -> str:
        """Where a run that went wrong can be taken up."""
        if not self.file.exists():
            return "no state was saved before"
        return f"the last good state is {self.file}, at step {load_state(self.file)['step']}"
