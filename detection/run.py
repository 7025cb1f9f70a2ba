"""Holds a detection run as data: its command, the weights and data it reads, and its files."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.detection.data.split import Split
from backbench.detection.dialect import Given
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.trunk import Trunk

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what fvcore.common imports on the way
    from fvcore.common.param_scheduler import (
        CompositeParamScheduler,
        ConstantParamScheduler,
        CosineParamScheduler,
        LinearParamScheduler,
        MultiStepParamScheduler,
        ParamScheduler,
    )

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

FINAL_FILE = "model_final.pth"  # Detectron2's name for the trained detector
DETECTIONS_FILE = "predictions.json"  # COCO's results format
EVALUATIONS_FILE = "evaluations.jsonl"  # AP on the way, TEST.EVAL_PERIOD
PER_CATEGORY_FILE = "per_category.json"


@dataclass(frozen=True)
class DetectionRun:
    """The command and its config, which the first process reads and checks once for all of them."""

    given: Given  # the config as the user stated it
    cfg: CfgNode  # the same over the engine's defaults, checked against its keys
    task: DetectionTask
    engine: str
    checkpoint: Path | None  # None: MODEL.WEIGHTS names the weights
    root: Path
    out: Path
    world: int = 1  # processes on all machines
    machines: int = 1
    machine: int = 0  # which of them this is
    dist_url: str = ""  # tcp://HOST:PORT of the first machine; "": this machine's own
    # Where Slurm has started a task for each rank: this one's, on all machines and on this one
    task_rank: int | None = None
    local_rank: int = 0
    eval_only: bool = False
    splits: tuple[Split, Split] | None = (
        None  # train and val as the first process has read them
    )
    trained: Path | None = (
        None  # another run's folder, whose detector is scored again in this one
    )

    @property
    def leads(self) -> bool:
        """Does this process, or a rank that it starts, write the run's folder?"""
        return (self.machine if self.task_rank is None else self.task_rank) == 0

    @property
    def final(self) -> Path:
        """The trained detector."""
        return (self.trained or self.out) / FINAL_FILE


@dataclass(frozen=True)
class Prepared:
    """The weights and the data that a process has read, and which fit the config and each other."""

    cfg: CfgNode  # the engine's, with the checkpoint's pixels filled in
    task: DetectionTask
    seed: int
    checkpoint: Checkpoint
    trunk: Trunk  # the checkpoint's own, which the detector's must equal
    train: Split
    val: Split
    schedule: SolverSchedule


@dataclass(frozen=True)
class SolverSchedule:
    """SOLVER as the loop reads it: how long, at what rate, how often saved and scored. The rate is
    that of Detectron2's build_lr_scheduler at every iteration, edges included."""

    iterations: int
    factors: ParamScheduler  # of the base rate, by the part of the run that is behind
    save_every: int
    score_every: int  # iterations; 0: only at the end
    precise_bn: (
        int | None
    )  # batches over which batch norm is re-estimated at the end, if it is

    @classmethod
    def of(cls, cfg: CfgNode) -> SolverSchedule:
        """Build it from a config. Raises BadInput if SOLVER makes no schedule."""
        s, bn = cfg.SOLVER, cfg.TEST.PRECISE_BN
        try:
            factors = warmed_up(decaying(cfg), cfg)
        except (ValueError, ZeroDivisionError) as error:
            raise BadInput(
                f"SOLVER.STEPS {list(s.STEPS)}, MAX_ITER {s.MAX_ITER}: no schedule ({error})"
            ) from None
        return cls(
            iterations=s.MAX_ITER,
            factors=factors,
            save_every=s.CHECKPOINT_PERIOD,
            score_every=cfg.TEST.EVAL_PERIOD,
            precise_bn=bn.NUM_ITER if bn.ENABLED else None,
        )

    def scores_after(self, iteration: int) -> bool:
        """True if the detector is scored on the way after this many iterations."""
        return self.score_every > 0 and iteration % self.score_every == 0

    def factor_at(self, iteration: int) -> float:
        """The factor on each parameter group's own base rate in this iteration."""
        return self.factors(iteration / self.iterations)


def decaying(cfg: CfgNode) -> ParamScheduler:
    """The factor on the base rate from 1 down, without warm-up."""
    s = cfg.SOLVER
    if s.LR_SCHEDULER_NAME == "WarmupMultiStepLR":
        # A step at the end or after it is never reached.
        steps = [step for step in s.STEPS if step < s.MAX_ITER]
        values = [s.GAMMA**k for k in range(len(steps) + 1)]
        return MultiStepParamScheduler(values, num_updates=s.MAX_ITER, milestones=steps)
    if s.LR_SCHEDULER_NAME == "WarmupCosineLR":
        return CosineParamScheduler(1, s.BASE_LR_END / s.BASE_LR)
    known = "WarmupMultiStepLR or WarmupCosineLR"
    raise BadInput(f"SOLVER.LR_SCHEDULER_NAME {s.LR_SCHEDULER_NAME}: {known}")


def warmed_up(rest: ParamScheduler, cfg: CfgNode) -> ParamScheduler:
    """Put a warm-up before `rest`: from WARMUP_FACTOR times its first value to its value where the
    warm-up ends. A step inside it is taken by then; a longer warm-up than the run never ends."""
    s = cfg.SOLVER
    length = min(s.WARMUP_ITERS / s.MAX_ITER, 1.0)
    first = s.WARMUP_FACTOR * rest(0.0)
    if s.WARMUP_METHOD == "linear":
        warming: ParamScheduler = LinearParamScheduler(first, rest(length))
    elif s.WARMUP_METHOD == "constant":
        warming = ConstantParamScheduler(first)
    else:
        raise BadInput(f"SOLVER.WARMUP_METHOD {s.WARMUP_METHOD}: linear or constant")
    return CompositeParamScheduler(
        [warming, rest],
        lengths=[length, 1 - length],
        interval_scaling=["rescaled", "fixed"],
    )
