"""The network of the torchvision engine; P2..P6 of a trunk."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d
from torchvision.models.detection.image_list import ImageList
from torchvision.ops.feature_pyramid_network import (
    FeaturePyramidNetwork,
    LastLevelMaxPool,
)

from backbench.detection.backbones import STRIDE, DropPath, TrunkMaps, is_plain
from backbench.detection.data.images import TrainTarget
from backbench.detection.rcnn.roi_heads import build_heads
from backbench.detection.rcnn.rpn import BalancedSampler, build_rpn
from backbench.images.preprocess import Pixels, normalise
from backbench.parallel import batchnorm, distributed
from backbench.weights.trunk import Trunk

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
                list(trunk.widths),
                self.out_channels,
                LastLevelMaxPool(),
                norm_layer=norm,
            )
        if cfg.MODEL.FPN.NORM == "SyncBN":
            batchnorm.convert_sync_batchnorm(self.fpn)

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        maps = self.body(x).values()
        return self.fpn(OrderedDict((str(level), m) for level, m in enumerate(maps)))


class SimplePyramid(nn.Module):
    """Makes strides 4, 8, 16 and 32 from the one map of stride 16, each by itself (ViTDet,
    arXiv:2203.16527, Section 3), as Detectron2's SimpleFeaturePyramid does."""

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


class Detector(nn.Module):
    """The whole network: (images uint8, targets) -> losses; in evaluation images -> detections."""

    def __init__(self, cfg: CfgNode, trunk: Trunk, pixels: Pixels) -> None:
        super().__init__()
        self.pixels = pixels
        self.backbone = TrunkPyramid(trunk, cfg)
        self.rpn = build_rpn(cfg)
        self.roi_heads = build_heads(cfg)

    def batch(self, images: Sequence[Tensor]) -> ImageList:
        """uint8 (3, h, w) each -> a float batch, zero-padded to 32 n and to all ranks' largest."""
        device = self.roi_heads.box_predictor.cls_score.weight.device
        sizes = [(int(i.shape[-2]), int(i.shape[-1])) for i in images]
        height = math.ceil(max(h for h, _ in sizes) / STRIDE) * STRIDE
        width = math.ceil(max(w for _, w in sizes) / STRIDE) * STRIDE
        # Batch norm sees the padding, so the padding may not depend on who holds which image.
        if self.training and distributed.world_size() > 1:
            mine = torch.tensor([[height, width]], device=device)
            height, width = distributed.gather_without_gradient(mine).amax(0).tolist()
        # Padded after it was normalised, so that padding is the mean colour: as in Detectron2.
        out = torch.zeros(len(images), 3, height, width, device=device)
        for i, image in enumerate(images):
            pixels = normalise(distributed.sent(image, device), self.pixels)
            out[i, :, : image.shape[-2], : image.shape[-1]] = pixels
        return ImageList(out, sizes)

    def forward(
        self, images: Sequence[Tensor], targets: list[TrainTarget] | None = None
    ) -> list[dict[str, Tensor]] | dict[str, Tensor]:
        batch = self.batch(images)
        features = self.backbone(batch.tensors)
        proposals, rpn_losses = self.rpn(batch, features, targets)
        detections, losses = self.roi_heads(
            features, proposals, batch.image_sizes, targets
        )
        if not self.training:
            return detections
        # Under Detectron2's names
        return {
            "loss_rpn_cls": rpn_losses["loss_objectness"],
            "loss_rpn_loc": rpn_losses["loss_rpn_box_reg"],
            **losses,
        }

    def samplers(self) -> dict[str, BalancedSampler | DropPath]:
        """The parts that draw at random, by the name that seeds their generators."""
        paths = [module for module in self.modules() if isinstance(module, DropPath)]
        named: dict[str, BalancedSampler | DropPath] = {
            f"drop path {i}": path for i, path in enumerate(paths)
        }
        return named | {
            "rpn": self.rpn.fg_bg_sampler,
            "roi": self.roi_heads.fg_bg_sampler,
        }
