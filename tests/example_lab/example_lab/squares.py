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
    small, large = (
        nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in ((3, 16), (16, 24))
    )
    net = nn.Sequential(small, nn.BatchNorm2d(16), nn.ReLU(), large)
    sizes = {"feature_dim": 24, "strides": (4,), "widths": (24,)}
    return ModuleTrunk(net, features=_pooled, stages=_maps, **sizes)


PIXELS = Pixels((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
SQUARES = InstalledTrunk(name="squares", build=build, pixels=PIXELS)
