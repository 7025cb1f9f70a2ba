"""`backbench semisup` and `backbench finetune`: the whole network is trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from backbench.requests.options import argument, option
from backbench.requests.places import (
    RunRequest,
    SeededRequest,
    WeightsRequest,
    overrides_words,
    protocol_option,
)


@dataclass(frozen=True, kw_only=True)
class SemisupRequest(WeightsRequest, RunRequest, SeededRequest):
    """Finetune on 1% or 10% of the labels."""

    verb: ClassVar[str] = "semisup"
    checkpoint: Path = argument("X")
    percent: Literal[1, 10] = option("of the labels")
    dataset: str | None = option(
        "any dataset below ROOT (default: the protocol's, ImageNet)",
        "NAME",
        default=None,
    )
    lists: Path | None = option(
        "folder with 1percent.txt / 10percent.txt; without: drawn (docs/datasets.md)",
        "DIR",
        default=None,
    )
    protocol: str = protocol_option("semisup")
    overrides: tuple[str, ...] = overrides_words()


@dataclass(frozen=True, kw_only=True)
class FinetuneRequest(WeightsRequest, RunRequest, SeededRequest):
    """Finetune on a whole dataset."""

    verb: ClassVar[str] = "finetune"
    checkpoint: Path = argument("X")
    dataset: str = option("any dataset below ROOT", "NAME")
    protocol: str = protocol_option("finetune")
    overrides: tuple[str, ...] = overrides_words()
