"""Recipes of `backbench analyze` as typed values: configs/transfer/analyze*.yaml."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

from backbench.images.crops import Crops
from backbench.recipes import config
from transfer.protocols import Geometry, above_zero, at_least


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig:
    """`{space}` in the protocol's name becomes `trunk` or `projector`."""

    protocol: str = "analyze-{space}-v1"
    split: Literal["train", "val", "test"] = "test"
    images: int | None = None  # a seeded choice of so many; null: all
    augmentations: int = 32
    crops: Crops
    geometry: Geometry
    # Images whose plain features are kept, for distances between images and the probes
    sample: int = 4096
    batch: int = 4  # images at a time, each with all its views
    neighbours: int = 20
    temperature: float = 0.07
    shots: int = 2
    draws: int = 20
    l2: float = 0.01
    save_minutes: float = 5.0

    def __post_init__(self) -> None:
        if "{space}" not in self.protocol:
            raise ValueError(
                f"protocol '{self.protocol}' needs {{space}} in it,"
                " so that spaces do not share a column"
            )
        if self.crops.size != self.geometry.crop:
            raise ValueError(
                f"crops.size {self.crops.size} and geometry.crop {self.geometry.crop} must be equal"
            )
        if self.augmentations < 2 or self.sample < 2 or self.batch < 1:
            raise ValueError("augmentations and sample must be at least 2, batch at least 1")
        at_least(1, neighbours=self.neighbours, shots=self.shots, draws=self.draws)
        if self.images is not None:
            at_least(2, images=self.images)
        above_zero(temperature=self.temperature)

    def name(self, space: str) -> str:
        return self.protocol.replace("{space}", space)


def load_config(recipe: str, augmentations: int | None) -> AnalyzeConfig:
    """The recipe; another number of augmentations than its own becomes part of the protocol's
    name."""
    found = config.load(AnalyzeConfig, recipe, kind="transfer")
    if augmentations is None or augmentations == found.augmentations:
        return found
    data = config.to_dict(found) | {"augmentations": augmentations}
    data["protocol"] = found.protocol.replace("{space}", f"{{space}}-{augmentations}views")
    return config.build(AnalyzeConfig, data, where="--augmentations")


def check(args: argparse.Namespace) -> None:
    """BadInput for the recipe of `analyze`, before torch is imported."""
    load_config(args.recipe, args.augmentations)
