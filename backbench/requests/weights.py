"""`backbench inspect`, `import` and `export`: files of weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from backbench.requests.bounds import MOST_EPOCHS
from backbench.requests.options import argument, option
from backbench.requests.places import JsonRequest, WeightsRequest


@dataclass(frozen=True, kw_only=True)
class InspectRequest(WeightsRequest, JsonRequest):
    """Show what a checkpoint file holds."""

    verb: ClassVar[str] = "inspect"
    file: Path = argument("FILE")


@dataclass(frozen=True, kw_only=True)
class ImportRequest(WeightsRequest):
    """Take in a published checkpoint, completely or not at all."""

    verb: ClassVar[str] = "import"
    file: Path = argument("FILE")
    name: str | None = option(
        "the row's name on the leaderboard (default: the file's name)",
        "NAME",
        default=None,
    )
    published: str | None = option(
        "the published row that this checkpoint must reproduce", "KEY", default=None
    )
    encoder: str | None = option(
        "which of several encoders in the file (see `inspect`)", "NAME", default=None
    )
    stem: str | None = option(
        "conv3, conv3_p0 or conv3_p2: the padding of a 3x3 first convolution",
        "NAME",
        default=None,
    )
    arch: str | None = option(
        "which ViT or ConvNeXt, where its format does not tell",
        "timm:NAME[,k=v]",
        default=None,
    )
    reading: str | None = option(
        "what is read of a ViT: cls, mean, cls+mean, cls@4, cls@4+mean, map",
        "R",
        default=None,
    )
    pixels: str | None = option(
        "imagenet, half (mean and std 0.5) or clip", "NAME", default=None
    )
    pos: str | None = option(
        "take any size of image: resize position embeddings by +0.1, aa or size",
        "RULE",
        default=None,
    )
    rename: str | None = option(
        "give the tensors the names of --arch: by-order, or a file of rules REGEX -> NAME",
        "RULES",
        default=None,
    )
    check: Path | None = option(
        "score pictures of known classes under each network that the file may be",
        "FOLDER",
        default=None,
    )
    method: str | None = option(
        "the method's name, where the file does not tell it", "NAME", default=None
    )
    epochs: int | None = option(
        "pretraining epochs, where the file does not tell them",
        "N",
        default=None,
        least=0,
        most=MOST_EPOCHS,
    )
    trained_on: tuple[str, ...] | None = option(
        "what it was trained on; numbers on images that it has seen are marked",
        "DATASET[:SPLIT]",
        default=None,
    )
    allow_missing_statistics: bool = option(
        "accept batch norm without running statistics", default=False
    )
    out: Path = option("the checkpoint to write", "X.safetensors")


@dataclass(frozen=True, kw_only=True)
class ExportRequest(WeightsRequest):
    """Write a checkpoint in another library's format."""

    verb: ClassVar[str] = "export"
    checkpoint: Path = argument("X")
    format: Literal["torchvision", "timm", "detectron2"] = option("whose")
    out: Path = option("the file to write", "F")
