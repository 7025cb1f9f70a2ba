"""`backbench analyze`: statistics of features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from backbench.requests.bounds import MOST_REPEATS
from backbench.requests.options import option
from backbench.requests.places import (
    JsonRequest,
    RunRequest,
    WeightsRequest,
    checkpoints_argument,
    seed_option,
)


@dataclass(frozen=True, kw_only=True)
class AnalyzeRequest(WeightsRequest, RunRequest, JsonRequest):
    """Show what the features look like: the papers' figures."""

    verb: ClassVar[str] = "analyze"
    checkpoints: tuple[Path, ...] = checkpoints_argument()
    dataset: str = option("any dataset below ROOT", "NAME")
    augmentations: int | None = option(
        "views of each image (default: the recipe's, 32)",
        "N",
        default=None,
        least=2,
        most=MOST_REPEATS,
    )
    recipe: str = option("how the views are made", "NAME", default="analyze")
    seed: int = seed_option("of the choice of images and of the views")
