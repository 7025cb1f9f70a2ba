"""The network of the torchvision engine, and the values of the dialect that it implements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.image_list import ImageList
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels, normalise
from backbench.parallel import batchnorm, distributed
from backbench.weights.trunk import Trunk
from detection import trunks
from detection.data.images import TrainTarget
from detection.rcnn.pyramids import NORM_LAYERS, TrunkPyramid
from detection.rcnn.roi_heads import build_heads
from detection.rcnn.rpn import BalancedSampler, build_rpn
from detection.trunks import STRIDE

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

# Keys of the dialect whose other values this engine does not implement.
FIXED: dict[str, tuple[object, ...]] = {
    "MODEL.META_ARCHITECTURE": ("GeneralizedRCNN",),
    "MODEL.BACKBONE.NAME": ("build_resnet_fpn_backbone", *trunks.NAMES),
    "MODEL.BACKBONE.FREEZE_AT": (0,),
    "MODEL.RESNETS.DEPTH": (18, 34, 50, 101, 152),
    "MODEL.RESNETS.NORM": ("SyncBN", "BN"),
    "MODEL.RESNETS.STRIDE_IN_1X1": (False,),
    "MODEL.RESNETS.OUT_FEATURES": (["res2", "res3", "res4", "res5"],),
    "MODEL.FPN.IN_FEATURES": (["res2", "res3", "res4", "res5"],),
    "MODEL.FPN.NORM": ("SyncBN", "BN", "LN", ""),
    "MODEL.RPN.IN_FEATURES": (["p2", "p3", "p4", "p5", "p6"],),
    "MODEL.ROI_HEADS.NAME": ("StandardROIHeads",),
    "MODEL.ROI_HEADS.IN_FEATURES": (["p2", "p3", "p4", "p5"],),
    "MODEL.ROI_BOX_HEAD.NAME": ("FastRCNNConvFCHead",),
    "MODEL.ROI_BOX_HEAD.NORM": ("",),
    "MODEL.ROI_BOX_HEAD.NUM_FC": (2,),
    "MODEL.ROI_MASK_HEAD.NAME": ("MaskRCNNConvUpsampleHead",),
    "MODEL.ROI_MASK_HEAD.NORM": ("",),
    "MODEL.ROI_KEYPOINT_HEAD.NAME": ("KRCNNConvDeconvUpsampleHead",),
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": ("choice", "range"),
    "INPUT.RANDOM_FLIP": ("horizontal", "none"),
}


def check(cfg: CfgNode, where: Path) -> None:
    """Refuse by name the values that this engine does not implement."""
    for key, allowed in FIXED.items():
        node = cfg
        for part in key.split("."):
            node = node[part]
        value = list(node) if isinstance(node, tuple) else node
        if value not in allowed:
            raise BadInput(
                f"{where}: {key} is {value!r}; "
                f"the torchvision engine has {' or '.join(map(repr, allowed))} "
                "(Detectron2 may have it: --engine detectron2)"
            )


class Detector(nn.Module):
    """The whole network: (images uint8, targets) -> losses; in evaluation images -> detections."""

    def __init__(self, cfg: CfgNode, trunk: Trunk, pixels: Pixels) -> None:
        super().__init__()
        self.pixels = pixels
        wraps = trunks.wraps(cfg)
        self.backbone = TrunkPyramid(trunk, cfg) if wraps else resnet_fpn(trunk, cfg)
        if cfg.MODEL.FPN.NORM == "SyncBN":
            batchnorm.convert_sync_batchnorm(self.backbone.fpn)
        self.rpn = build_rpn(cfg)
        self.roi_heads = build_heads(cfg)

    def batch(self, images: Sequence[Tensor]) -> ImageList:
        """uint8 (3, h, w) each -> one float batch, padded with zeros to a multiple of 32 and to all
        ranks' largest."""
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
        """What draws at random, by the name that its generators are seeded with."""
        return {"rpn": self.rpn.fg_bg_sampler, "roi": self.roi_heads.fg_bg_sampler}


def resnet_fpn(trunk: Trunk, cfg: CfgNode) -> BackboneWithFPN:
    """One of our ResNets, layer by layer. torchvision's detectors have no norm in their FPN. P6 is
    every second place of P5 in both."""
    m, width = cfg.MODEL, trunk.feature_dim
    backbone = BackboneWithFPN(
        trunk,
        {"layer1": "0", "layer2": "1", "layer3": "2", "layer4": "3"},
        [width // 8, width // 4, width // 2, width],
        m.FPN.OUT_CHANNELS,
        extra_blocks=LastLevelMaxPool(),
        norm_layer=NORM_LAYERS[m.FPN.NORM],
    )
    if m.RESNETS.NORM == "SyncBN":
        batchnorm.convert_sync_batchnorm(backbone.body)
    return backbone
