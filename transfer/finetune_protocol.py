"""Declares the protocol of `backbench semisup` and `backbench finetune`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from backbench.transfer.protocol import (
    CropAugment,
    Length,
    Rates,
    RateSchedule,
    ScaledRates,
)


@dataclass(frozen=True, kw_only=True)
class ListFile:
    """The number of lines and the sha256 of a published list of labelled images."""

    lines: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """How the whole network trains on one part of the labels."""

    length: Length
    head_over_trunk: float = 1.0  # the head's rate, divided by the trunk's
    list: ListFile | None = None  # what the list must be; null: any list


@dataclass(frozen=True, kw_only=True)
class Finetune(ScaledRates):
    """All layers train by SGD or AdamW; the rates of the head are a grid."""

    dataset: str | None = None  # the one that `backbench semisup` is about
    head_lr: Rates
    schedule: RateSchedule = RateSchedule(name="step", milestones=(0.6, 0.8), gamma=0.2)
    # By percent of the labels: "1", "10", "100"
    parts: dict[str, Part] = field(default_factory=dict)
    augment: CropAugment = CropAugment()
    init_std: float = 0.01
    save_minutes: float = 5.0
    optimizer: Literal["sgd", "adamw"] = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW's
    # Each layer of the trunk has the rate of the layer above it, times this (BEiT, arXiv:2106.08254)
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    # The share of the training in which the rates rise from 0
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def factor(self, step: int, steps: int, steps_per_epoch: float) -> float:
        """Return the factor on the peak rates at `step` of `steps`: the warm-up, then the schedule
        over the steps that are left."""
        rising = round(self.warmup * steps)
        if step < rising:
            return (step + 1) / rising
        return self.schedule.factor(step - rising, steps - rising, steps_per_epoch)
