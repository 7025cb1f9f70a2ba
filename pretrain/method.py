"""What a pretraining method is: a module that turns a batch of views into a loss. One file each in
pretrain/methods."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import pretrain.methods
from backbench.errors import BadInput, nearest
from backbench.weights.resnet import Trunk


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """The part of a recipe under `method:`. Each file in pretrain/methods extends it as
    `Config`."""

    name: str


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch.

    views: V tensors (N, 3, h, w), in the order of the recipe's crop groups; labels (N,) or None;
    index (N,) positions in the dataset. `step` counts optimiser steps from 0, `progress` is step /
    total steps, in [0, 1); `epoch` is progress in whole epochs of `epochs`.
    """

    views: Sequence[Tensor]
    labels: Tensor | None
    index: Tensor
    step: int
    epoch: int
    epochs: int
    progress: float


@dataclass(frozen=True)
class Setup:
    """What a method is told about the run it is built for. `batch_size` is the global one, over all
    ranks; `seed` is the recipe's; `views` is the number of views per image; `images` the dataset's
    length; `classes` its class count."""

    batch_size: int
    views: int
    seed: int
    images: int
    classes: int


class Method(nn.Module):
    """Base of all methods; the loop wraps the whole of it in DDP.

    A method's file holds its pure loss function, its frozen `Config(MethodConfig)` and `class
    Method(Base)` whose constructor takes (config, backbone, setup) and refuses what it cannot do
    with BadInput. Collectives go through backbench.distributed only. All state (queues, momentum
    encoders) lives in parameters and buffers.
    """

    backbone: nn.Module
    sync_batchnorm = (
        True  # the query encoder's batch norm spans ranks, unless the method's paper keeps it local
    )
    accumulates = False  # the loss is a mean over samples that do not meet, so that micro-batches add up to the batch

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """{"loss": 0-dim tensor with gradient, **detached terms to log}; the loss is over all
        ranks' samples."""
        raise AssertionError("a method overrides forward")

    def after_step(self, progress: float) -> None:
        """Called after each optimiser step: momentum update, enqueueing."""

    def heads(self) -> dict[str, Tensor]:
        """Projector and the like, kept in the Checkpoint; by default `projector`, where the method
        has one."""
        projector = getattr(self, "projector", None)
        return (
            {f"projector.{k}": v for k, v in projector.state_dict().items()}
            if projector is not None
            else {}
        )


def method_names() -> list[str]:
    return [
        m.name
        for m in pkgutil.iter_modules(pretrain.methods.__path__)
        if not m.name.startswith("_")
    ]


def method_module(name: str) -> Any:
    """The module pretrain.methods.<name>; BadInput with the nearest name where there is none."""
    if name not in method_names():
        raise BadInput(f"unknown method '{name}'; {nearest(name, method_names())}")
    return importlib.import_module(f"pretrain.methods.{name}")


def choose_config(data: Any, where: str, path: str) -> type:
    """For config.py: the Config class that `method.name` selects."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise BadInput(f"{where}: '{path}' needs a name; allowed: {', '.join(method_names())}")
    try:
        return method_module(data["name"]).Config
    except BadInput as error:
        raise BadInput(f"{where}: '{path}.name': {error}") from None


def build_method(config: MethodConfig, backbone: Trunk, setup: Setup) -> Method:
    return method_module(config.name).Method(config, backbone, setup)
