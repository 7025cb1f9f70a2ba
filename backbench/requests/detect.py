"""`backbench detect`: R-CNNs on COCO."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from backbench.requests.bounds import MOST_PROCESSES, MOST_SEED
from backbench.requests.options import argument, option
from backbench.requests.places import JsonRequest, WeightsRequest, seeds_option

# The configs for boxes of one's own
OWN_CONFIG = "faster_rcnn_own"
OWN_PLAIN_CONFIG = "faster_rcnn_own_plain"
Engine = Literal["auto", "detectron2", "torchvision"]


@dataclass(frozen=True, kw_only=True)
class DetectRequest(WeightsRequest, JsonRequest):
    """Train Faster, Mask or Keypoint R-CNN on COCO, or on boxes of your own."""

    verb: ClassVar[str] = "detect"
    config_file: str | None = option(
        "a file or a name under configs/detection (with --dataset:"
        f" {OWN_CONFIG}, or {OWN_PLAIN_CONFIG} for a plain vision transformer)",
        "YAML",
        default=None,
    )
    dataset: str | None = option(
        "boxes of your own in ROOT/NAME: COCO's json, VOC's XML or YOLO's text files",
        "NAME",
        default=None,
    )
    engine: Engine = option("auto: detectron2 where it is installed", default="auto")
    checkpoint: Path | None = option(
        "a Checkpoint or any importable file", "X", default=None
    )
    data: Path | None = option(
        "folder that holds coco/ (default: $DETECTRON2_DATASETS)", "ROOT", default=None
    )
    out: Path | None = option("run folder (or OUTPUT_DIR DIR)", "RUN", default=None)
    resume: bool = option("continue the run that RUN holds", default=False)
    eval_only: bool = option("only evaluate", default=False)
    num_gpus: int = option(
        "processes on this machine (CPU ranks without a GPU)",
        "N",
        default=1,
        least=1,
        most=MOST_PROCESSES,
    )
    num_machines: int = option(
        "machines; the same command on each, with its --machine-rank",
        "N",
        default=1,
        least=1,
        most=MOST_PROCESSES,
    )
    machine_rank: int = option(
        "from 0", "R", default=0, least=0, most=MOST_PROCESSES - 1
    )
    dist_url: str = option("tcp://HOST:PORT of machine 0", "URL", default="")
    # Detectron2's SEED -1 is no seed
    seed: int | None = option(
        "in place of the config's SEED", "S", default=None, least=0, most=MOST_SEED
    )
    seeds: int = seeds_option()
    opts: tuple[str, ...] = argument(
        "KEY VALUE", "changes to the config", several="rest", default=()
    )
