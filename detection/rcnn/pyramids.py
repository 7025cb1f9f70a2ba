"""P2..P6 of a trunk, in the torchvision engine."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from backbench.parallel import batchnorm
from backbench.weights.trunk import Trunk
from detection.backbones import TrunkMaps, is_plain

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

Layer: TypeAlias = Callable[[int], nn.Module]  # channels -> a norm of them
# MODEL.FPN.NORM; SyncBN is made of batch norm afterwards
NORM_LAYERS: dict[str, Layer | None] = {
    "": None,
    "BN": nn.BatchNorm2d,
    "SyncBN": nn.BatchNorm2d,
    "LN": functools.partial(LayerNorm2d, eps=1e-6),
}


class TrunkPyramid(nn.Module):
    """Images (N, 3, H, W) -> P2..P6 under torchvision's names, 0 to 3 and pool."""

    fpn: nn.Module

    def __init__(self, trunk: Trunk, cfg: CfgNode) -> None:
        super().__init__()
        self.body = TrunkMaps(trunk, cfg)
        self.out_channels = cfg.MODEL.FPN.OUT_CHANNELS
        norm = NORM_LAYERS[cfg.MODEL.FPN.NORM]
        if is_plain(trunk):
            assert norm is not None
            self.fpn = SimplePyramid(trunk.widths[0], self.out_channels, norm)
        else:
            # torchvision's detectors have no norm here. P6 is every second place of P5 in both.
            self.fpn = FeaturePyramidNetwork(
                list(trunk.widths), self.out_channels, LastLevelMaxPool(), norm_layer=norm
            )
        if cfg.MODEL.FPN.NORM == "SyncBN":
            batchnorm.convert_sync_batchnorm(self.fpn)

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        maps = self.body(x).values()
        return self.fpn(OrderedDict((str(level), m) for level, m in enumerate(maps)))


class SimplePyramid(nn.Module):
    """ViTDet's (arXiv:2203.16527, Section 3): strides 4, 8, 16 and 32 from the one map of stride
    16, each by itself, as Detectron2's SimpleFeaturePyramid has it."""

    def __init__(self, width: int, channels: int, norm: Layer) -> None:
        super().__init__()
        up, half, quarter = nn.ConvTranspose2d, width // 2, width // 4
        four = [up(width, half, 2, 2), norm(half), nn.GELU(), up(half, quarter, 2, 2)]
        self.levels = nn.ModuleList()
        for resized, channels_in in (
            (four, quarter),
            ([up(width, half, 2, 2)], half),
            ([], width),
            ([nn.MaxPool2d(2, 2)], width),
        ):
            lateral = nn.Conv2d(channels_in, channels, 1, bias=False)
            smooth = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            layers = (lateral, norm(channels), smooth, norm(channels))
            self.levels.append(nn.Sequential(*resized, *layers))
        self.pool = LastLevelMaxPool()

    def forward(self, maps: OrderedDict[str, Tensor]) -> OrderedDict[str, Tensor]:
        (last,) = maps.values()
        names = [str(level) for level in range(len(self.levels))]
        levels, names = self.pool([level(last) for level in self.levels], [last], names)
        return OrderedDict(zip(names, levels, strict=True))
