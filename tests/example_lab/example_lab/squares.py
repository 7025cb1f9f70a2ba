"""A trunk: two convolutions, pooled."""

from typing import Any

from torch import Tensor, nn

from backbench.images.preprocess import Pixels
from backbench.weights.trunk import InstalledTrunk, ModuleTrunk


def _pooled(module: Any, x: Tensor) -> Tensor:
    return module(x).mean((2, 3))


def _maps(module: Any, x: Tensor) -> list[Tensor]:
    return [module(x)]


def build() -> ModuleTrunk:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
    )
    return ModuleTrunk(
        net, feature_dim=24, features=_pooled, stages=_maps, strides=(4,), widths=(24,)
    )


SQUARES = InstalledTrunk(
    name="squares", build=build, pixels=Pixels((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
)
