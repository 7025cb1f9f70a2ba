"""SOLVER as the loop reads it: how long, at what rate, how often saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode


@dataclass(frozen=True)
class SolverSchedule:
    iterations: int
    base_lr: float
    gamma: float
    steps: Sequence[int]  # iterations at which the rate drops
    warmup_iterations: int
    warmup_factor: float
    save_every: int
    precise_bn: int | None  # batches over which batch norm is re-estimated at the end, if it is

    @classmethod
    def of(cls, cfg: CfgNode) -> SolverSchedule:
        s, bn = cfg.SOLVER, cfg.TEST.PRECISE_BN
        return cls(
            iterations=s.MAX_ITER,
            base_lr=s.BASE_LR,
            gamma=s.GAMMA,
            steps=s.STEPS,
            warmup_iterations=s.WARMUP_ITERS,
            warmup_factor=s.WARMUP_FACTOR,
            save_every=s.CHECKPOINT_PERIOD,
            precise_bn=bn.NUM_ITER if bn.ENABLED else None,
        )

    def lr_at(self, iteration: int) -> float:
        """Detectron2's WarmupMultiStepLR with linear warm-up."""
        # 1. x GAMMA at each of STEPS that is behind
        lr = self.base_lr * self.gamma ** sum(iteration >= step for step in self.steps)
        # 2. while warming up, a line from WARMUP_FACTOR of it to all of it
        if iteration < self.warmup_iterations:
            alpha = iteration / self.warmup_iterations
            lr *= self.warmup_factor * (1 - alpha) + alpha
        return lr
