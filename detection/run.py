"""Holds a detection run as data: its command, the weights and data it reads, and its files."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.detection.data.split import Split
from backbench.detection.dialect import Given
from backbench.detection.task_rows import DetectionTask
from backbench.errors import BadInput
from backbench.weights.checkpoint import Checkpoint

with warnings.catch_warnings():
    # fvcore.common imports deprecated packages on the way.
    warnings.simplefilter("ignore")
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
DETECTIONS_FILE = "predictions.json"  # in COCO's results format
EVALUATIONS_FILE = "evaluations.jsonl"  # AP during the training, every TEST.EVAL_PERIOD
PER_CATEGORY_FILE = "per_category.json"


@dataclass(frozen=True)
class DetectionRun:
    """The command and its config. The first process reads and checks them for all processes."""

    given: Given  # the config as the user stated it
    cfg: CfgNode  # the same over the engine's defaults, its keys checked
    task: DetectionTask
    engine: str
    checkpoint: Path | None  # with None, MODEL.WEIGHTS names the weights
    root: Path  # of the data
    out: Path
    # The folder below `root` whose boxes are trained on and scored; else the config names datasets
    dataset: str | None = None
    world: int = 1  # processes on all machines
    machines: int = 1
    machine: int = 0  # which of them this is
    dist_url: str = (
        ""  # tcp://HOST:PORT of the first machine; "" is a free port of this one
    )
    # Where Slurm has started a task for each rank, the rank of this process's task, among those of
    # all machines and among those of this one
    task_rank: int | None = None
    local_rank: int = 0
    eval_only: bool = False
    # train and val, if the first process has read them already
    splits: tuple[Split, Split] | None = None
    # Another run's folder, if that run's detector is scored again in this one
    trained: Path | None = None

    @property
    def leads(self) -> bool:
        """True if this process, or a rank that it starts, writes the run's folder."""
        if self.task_rank is not None:
            return self.task_rank == 0
        return self.machine == 0

    @property
    def final(self) -> Path:
        """The trained detector."""
        return (self.trained or self.out) / FINAL_FILE


@dataclass(frozen=True)
class Prepared:
    """The weights and the data that a process has read. They fit the config and each other."""

    cfg: CfgNode  # the engine's, with the checkpoint's pixels filled in
    task: DetectionTask
    seed: int
    checkpoint: Checkpoint
    train: Split
    val: Split
    schedule: SolverSchedule


@dataclass(frozen=True)
class SolverSchedule:
    """SOLVER as the training loop reads it: how long, at what rate, how often saved and scored.

    The rate is that of Detectron2's build_lr_scheduler in every iteration, the first and the last
    included.
    """

    iterations: int
    factors: (
        ParamScheduler  # on the base rate, by the fraction of the run that is behind
    )
    save_every: int  # iterations
    score_every: int  # iterations; with 0 only at the end
    # Batches over which batch norm is re-estimated at the end; None where it is not
    precise_bn: int | None

    @classmethod
    def of(cls, cfg: CfgNode) -> SolverSchedule:
        """Build it from a config. Raises BadInput if SOLVER makes no schedule."""
        solver = cfg.SOLVER
        try:
            factors = warmed_up(decaying(cfg), cfg)
        except (ValueError, ZeroDivisionError) as error:
            raise BadInput(
                f"SOLVER.STEPS {list(solver.STEPS)}, MAX_ITER {solver.MAX_ITER}: "
                f"no schedule ({error})"
            ) from None
        precise_bn = None
        if cfg.TEST.PRECISE_BN.ENABLED:
            precise_bn = cfg.TEST.PRECISE_BN.NUM_ITER
        return cls(
            iterations=solver.MAX_ITER,
            factors=factors,
            save_every=solver.CHECKPOINT_PERIOD,
            score_every=cfg.TEST.EVAL_PERIOD,
            precise_bn=precise_bn,
        )

    def scores_after(self, iteration: int) -> bool:
        """Return True if the detector is scored during the training after this many iterations."""
        return self.score_every > 0 and iteration % self.score_every == 0

    def factor_at(self, iteration: int) -> float:
        """Return the factor on each parameter group's own base rate in this iteration."""
        return self.factors(iteration / self.iterations)


def count_in_epochs(cfg: CfgNode, images: int) -> None:
    """Turn SOLVER.EPOCHS of so many images into iterations, and stretch the schedule to them."""
    solver = cfg.SOLVER
    if not solver.EPOCHS:
        return
    length = max(1, math.ceil(solver.EPOCHS * images / solver.IMS_PER_BATCH))
    stretch = length / solver.MAX_ITER
    solver.STEPS = tuple(round(step * stretch) for step in solver.STEPS)
    solver.WARMUP_ITERS = round(solver.WARMUP_ITERS * stretch)
    solver.MAX_ITER = length


def decaying(cfg: CfgNode) -> ParamScheduler:
    """Make the decay of the factor on the base rate, from 1 down, without warm-up."""
    solver = cfg.SOLVER
    if solver.LR_SCHEDULER_NAME == "WarmupMultiStepLR":
        # A step at the end or after it is never reached.
        steps = [step for step in solver.STEPS if step < solver.MAX_ITER]
        values = [solver.GAMMA**k for k in range(len(steps) + 1)]
        return MultiStepParamScheduler(
            values, num_updates=solver.MAX_ITER, milestones=steps
        )
    if solver.LR_SCHEDULER_NAME == "WarmupCosineLR":
        return CosineParamScheduler(1, solver.BASE_LR_END / solver.BASE_LR)
    raise BadInput(
        f"SOLVER.LR_SCHEDULER_NAME {solver.LR_SCHEDULER_NAME}: "
        "WarmupMultiStepLR or WarmupCosineLR"
    )


def warmed_up(rest: ParamScheduler, cfg: CfgNode) -> ParamScheduler:
    """Put a warm-up before `rest`.

    It leads from WARMUP_FACTOR times the first value of `rest` to the value of `rest` where the
    warm-up ends, so a step inside the warm-up has been taken by then. A warm-up that is longer than
    the run never ends.
    """
    solver = cfg.SOLVER
    length = min(solver.WARMUP_ITERS / solver.MAX_ITER, 1.0)
    first = solver.WARMUP_FACTOR * rest(0.0)
    if solver.WARMUP_METHOD == "linear":
        warming: ParamScheduler = LinearParamScheduler(first, rest(length))
    elif solver.WARMUP_METHOD == "constant":
        warming = ConstantParamScheduler(first)
    else:
        raise BadInput(
            f"SOLVER.WARMUP_METHOD {solver.WARMUP_METHOD}: linear or constant"
        )
    return CompositeParamScheduler(
        [warming, rest],
        lengths=[length, 1 - length],
        interval_scaling=["rescaled", "fixed"],
    )
