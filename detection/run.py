"""A detection run as data: its command, the weights and data that it reads, and the files that it
leaves beside those of every run (backbench.runs.folder names them)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.weights.checkpoint import Checkpoint
from backbench.weights.trunk import Trunk
from detection.data.split import Split
from detection.dialect import Given
from detection.schedule import SolverSchedule
from detection.task_rows import DetectionTask

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
    splits: tuple[Split, Split] | None = None  # train and val as the first process has read them
    trained: Path | None = None  # another run's folder, whose detector is scored again in this one

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
