"""Trunks of any kind as registered backbones of Detectron2, under its own FPN and its own
SimpleFeaturePyramid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from detectron2.modeling.backbone import FPN, SimpleFeaturePyramid
from detectron2.modeling.backbone.fpn import LastLevelMaxPool

from backbench.weights import archs
from detection.trunks import STRIDE, TrunkMaps

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

SCALES = (4.0, 2.0, 1.0, 0.5)  # of the map of stride 16: projects/ViTDet, mask_rcnn_vitdet.py


class TrunkBackbone(TrunkMaps, Backbone):
    """A trunk with fresh weights; the engine loads the checkpoint's."""

    def __init__(self, cfg: CfgNode) -> None:
        trunk = archs.build_trunk(cfg.MODEL.TRUNK.ARCH)
        super().__init__(trunk, cfg)
        self._out_features = self.keys
        self._out_feature_channels = dict(zip(self.keys, trunk.widths, strict=True))
        self._out_feature_strides = dict(zip(self.keys, self.strides, strict=True))

    @property
    def size_divisibility(self) -> int:
        return STRIDE


class PaddedSimplePyramid(SimpleFeaturePyramid):
    """Detectron2's says what images are padded to under a misspelt key, so that they are not
    (facebookresearch/detectron2#4676)."""

    @property
    def size_divisibility(self) -> int:
        return STRIDE

    @property
    def padding_constraints(self) -> dict[str, int]:
        return {"size_divisibility": STRIDE, "square_size": 0}


@BACKBONE_REGISTRY.register()
def build_trunk_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    body, fpn = TrunkBackbone(cfg), cfg.MODEL.FPN
    return FPN(
        bottom_up=body,
        in_features=body.keys,
        out_channels=fpn.OUT_CHANNELS,
        norm=fpn.NORM,
        top_block=LastLevelMaxPool(),
        fuse_type=fpn.FUSE_TYPE,
    )


@BACKBONE_REGISTRY.register()
def build_trunk_simple_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> SimpleFeaturePyramid:
    body, fpn = TrunkBackbone(cfg), cfg.MODEL.FPN
    return PaddedSimplePyramid(
        net=body,
        in_feature=body.keys[0],
        out_channels=fpn.OUT_CHANNELS,
        scale_factors=SCALES,
        top_block=LastLevelMaxPool(),
        norm=fpn.NORM,
    )
