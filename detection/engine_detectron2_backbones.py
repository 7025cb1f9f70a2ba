"""Builds the trunk inside Detectron2's models: its own ResNet, or a trunk of ours under its
pyramids. `trunk_of` is the one place that tells them apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from detectron2.modeling.backbone import FPN, SimpleFeaturePyramid
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.solver import build_optimizer
from detectron2.solver.build import maybe_add_gradient_clipping
from torch import Tensor, nn

from backbench.detection import backbones
from backbench.detection.backbones import STRIDE, TrunkMaps
from backbench.weights import archs, exporting

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

# Of the map of stride 16: projects/ViTDet, mask_rcnn_vitdet.py
SCALES = (4.0, 2.0, 1.0, 0.5)


class OwnResNet:
    """The ResNet of a Detectron2 model. A C4 model has its last stage in the head."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.is_c4 = not hasattr(model.backbone, "bottom_up")
        self.path = "backbone" if self.is_c4 else "backbone.bottom_up"

    def named(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a checkpoint's tensors under the names that they have in the whole model."""
        out = {}
        for name, tensor in exporting.to_detectron2(state).items():
            if self.is_c4 and name.startswith("res5"):
                out[f"roi_heads.{name}"] = tensor
            else:
                out[f"{self.path}.{name}"] = tensor
        return out

    def stages(self, x: Tensor) -> list[Tensor]:
        """Compute the trunk's maps of normalised images (N, 3, H, W)."""
        maps = []
        for name, stage in self.model.get_submodule(self.path).named_children():
            x = stage(x)
            if name != "stem":
                maps.append(x)
        if self.is_c4:
            # C5 is the head's res5, without MoCo's extra norm after it.
            res5 = self.model.get_submodule("roi_heads.res5")
            for name, block in res5.named_children():
                if name != "norm":
                    x = block(x)
            maps.append(x)
        return maps

    def optimizer(self, cfg: CfgNode) -> torch.optim.Optimizer:
        """Make the optimiser of the whole model."""
        return build_optimizer(cfg, self.model)


class WholeTrunk:
    """A trunk of ours inside a Detectron2 model, with the methods of OwnResNet."""

    def __init__(self, model: nn.Module, path: str, body: TrunkMaps) -> None:
        self.model = model
        self.path = path  # of `body` in the model
        self.body = body

    def named(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"{self.path}.trunk.{name}": tensor for name, tensor in state.items()}

    def stages(self, x: Tensor) -> list[Tensor]:
        return self.body.stages(x)

    def optimizer(self, cfg: CfgNode) -> torch.optim.Optimizer:
        optimizer = backbones.optimizer(self.model, self.body, cfg)
        return maybe_add_gradient_clipping(cfg, optimizer)


def trunk_of(model: nn.Module) -> OwnResNet | WholeTrunk:
    """Find the trunk inside a model that Detectron2 has built."""
    for path, module in model.named_modules():
        if isinstance(module, TrunkMaps):
            return WholeTrunk(model, path, module)
    return OwnResNet(model)


class TrunkBackbone(TrunkMaps, Backbone):
    """A trunk as Detectron2's backbones are. Its weights are fresh; the engine loads the
    checkpoint's."""

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
    """Pads images to multiples of 32. Detectron2's own pyramid does not, because of a misspelt key
    (facebookresearch/detectron2#4676)."""

    @property
    def size_divisibility(self) -> int:
        return STRIDE

    @property
    def padding_constraints(self) -> dict[str, int]:
        return {"size_divisibility": STRIDE, "square_size": 0}


@BACKBONE_REGISTRY.register()
def build_trunk_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    body = TrunkBackbone(cfg)
    return FPN(
        bottom_up=body,
        in_features=body.keys,
        out_channels=cfg.MODEL.FPN.OUT_CHANNELS,
        norm=cfg.MODEL.FPN.NORM,
        top_block=LastLevelMaxPool(),
        fuse_type=cfg.MODEL.FPN.FUSE_TYPE,
    )


@BACKBONE_REGISTRY.register()
def build_trunk_simple_fpn_backbone(
    cfg: CfgNode, input_shape: ShapeSpec
) -> SimpleFeaturePyramid:
    body = TrunkBackbone(cfg)
    return PaddedSimplePyramid(
        net=body,
        in_feature=body.keys[0],
        out_channels=cfg.MODEL.FPN.OUT_CHANNELS,
        scale_factors=SCALES,
        top_block=LastLevelMaxPool(),
        norm=cfg.MODEL.FPN.NORM,
    )
