"""Builds the network of the torchvision engine: a trunk, its pyramid P2..P6, and the R-CNN's parts."""

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


Layer: TypeAlias = Callable[[int], nn.Module]  # a number of channels -> a norm of them
# MODEL.FPN.NORM -> its layer. Batch norm is converted to SyncBN once the pyramid is built.
NORM_LAYERS: dict[str, Layer | None] = {
    "": None,
    "BN": nn.BatchNorm2d,
    "SyncBN": nn.BatchNorm2d,
    "LN": functools.partial(LayerNorm2d, eps=1e-6),
}


class TrunkPyramid(nn.Module):
    """Computes P2..P6 of images (N, 3, H, W), under torchvision's names: 0 to 3 and pool."""

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
            # torchvision's own detectors have no norm here, Detectron2's may. In both, P6 is every
            # second place of P5.
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
        half = width // 2
        quarter = width // 4
        # Stride -> the layers that resize the map to it, and their channels
        to_4: list[nn.Module] = [
            nn.ConvTranspose2d(width, half, 2, 2),
            norm(half),
            nn.GELU(),
            nn.ConvTranspose2d(half, quarter, 2, 2),
        ]
        to_8: list[nn.Module] = [nn.ConvTranspose2d(width, half, 2, 2)]
        to_16: list[nn.Module] = []
        to_32: list[nn.Module] = [nn.MaxPool2d(2, 2)]
        self.levels = nn.ModuleList()
        for resize, channels_in in (
            (to_4, quarter),
            (to_8, half),
            (to_16, width),
            (to_32, width),
        ):
            level = nn.Sequential(
                *resize,
                nn.Conv2d(channels_in, channels, 1, bias=False),
                norm(channels),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                norm(channels),
            )
            self.levels.append(level)
        self.pool = LastLevelMaxPool()

    def forward(self, maps: OrderedDict[str, Tensor]) -> OrderedDict[str, Tensor]:
        (last,) = maps.values()
        names = [str(level) for level in range(len(self.levels))]
        levels, names = self.pool([level(last) for level in self.levels], [last], names)
        return OrderedDict(zip(names, levels, strict=True))


class Detector(nn.Module):
    """The whole network. It turns uint8 images and targets into losses in training, and images into
    detections in evaluation."""

    def __init__(self, cfg: CfgNode, trunk: Trunk, pixels: Pixels) -> None:
        super().__init__()
        self.pixels = pixels
        self.backbone = TrunkPyramid(trunk, cfg)
        self.rpn = build_rpn(cfg)
        self.roi_heads = build_heads(cfg)

    def batch(self, images: Sequence[Tensor]) -> ImageList:
        """Normalise uint8 images (3, h, w) and zero-pad them to the largest of all ranks, rounded up
        to a multiple of 32."""
        device = self.roi_heads.box_predictor.cls_score.weight.device
        sizes = [(int(i.shape[-2]), int(i.shape[-1])) for i in images]
        height = math.ceil(max(h for h, _ in sizes) / STRIDE) * STRIDE
        width = math.ceil(max(w for _, w in sizes) / STRIDE) * STRIDE
        # Batch norm sees the padding, so it must not depend on which rank holds which image.
        if self.training and distributed.world_size() > 1:
            mine = torch.tensor([[height, width]], device=device)
            height, width = distributed.gather_without_gradient(mine).amax(0).tolist()
        # Images are padded after they are normalised, so that the padding has the mean colour, as
        # in Detectron2.
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
        # All losses have Detectron2's names.
        return {
            "loss_rpn_cls": rpn_losses["loss_objectness"],
            "loss_rpn_loc": rpn_losses["loss_rpn_box_reg"],
            **losses,
        }

    def samplers(self) -> dict[str, BalancedSampler | DropPath]:
        """Return the parts that draw at random, by the names that seed their generators."""
        samplers: dict[str, BalancedSampler | DropPath] = {
            "rpn": self.rpn.fg_bg_sampler,
            "roi": self.roi_heads.fg_bg_sampler,
        }
        paths = [module for module in self.modules() if isinstance(module, DropPath)]
        for i, path in enumerate(paths):
            samplers[f"drop path {i}"] = path
        return samplers
