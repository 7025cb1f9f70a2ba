"""The network of the torchvision engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList

from backbench.images.preprocess import Pixels, normalise
from backbench.parallel import distributed
from backbench.weights.trunk import Trunk
from detection.backbones import STRIDE
from detection.data.images import TrainTarget
from detection.rcnn.pyramids import TrunkPyramid
from detection.rcnn.roi_heads import build_heads
from detection.rcnn.rpn import BalancedSampler, build_rpn

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode


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
        detections, losses = self.roi_heads(features, proposals, batch.image_sizes, targets)
        if not self.training:
            return detections
        # Under Detectron2's names
        return {
            "loss_rpn_cls": rpn_losses["loss_objectness"],
            "loss_rpn_loc": rpn_losses["loss_rpn_box_reg"],
            **losses,
        }

    def samplers(self) -> dict[str, BalancedSampler]:
        """The parts that draw at random, by the name that seeds their generators."""
        return {"rpn": self.rpn.fg_bg_sampler, "roi": self.roi_heads.fg_bg_sampler}
