"""(arch, stem) -> a ResNet trunk: torchvision's modules and key names, no fc."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet as tv

from backbench.errors import BadInput, nearest

ARCHS = {
    "resnet18": (tv.BasicBlock, (2, 2, 2, 2)),
    "resnet34": (tv.BasicBlock, (3, 4, 6, 3)),
    "resnet50": (tv.Bottleneck, (3, 4, 6, 3)),
    "resnet101": (tv.Bottleneck, (3, 4, 23, 3)),
    "resnet152": (tv.Bottleneck, (3, 8, 36, 3)),
}
# conv3: 3x3 stride 1 and no max-pool, for small images. The padding differs between papers: 1 is SimCLR's (appendix
# B.9), 0 is what MIO's released code has, 2 what ARB's has.
STEMS = {"imagenet": None, "conv3": 1, "conv3_p0": 0, "conv3_p2": 2}


class Trunk(tv.ResNet):
    """A torchvision ResNet without its fc. `forward` gives pooled features, `stages` the maps C2..C5."""

    feature_dim: int
    arch: str
    stem: str

    def stages(self, x: Tensor) -> list[Tensor]:
        """(N, 3, H, W) -> C2..C5, each (N, C, H/s, W/s)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        maps = []
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
            maps.append(x)
        return maps

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, feature_dim), global average pooled."""
        return torch.flatten(self.avgpool(self.stages(x)[-1]), 1)


def build_backbone(
    arch: str, stem: str = "imagenet", *, zero_init_residual: bool = False, **kwargs: Any
) -> Trunk:
    """A randomly initialised trunk; `kwargs` go to torchvision's ResNet (norm_layer, say)."""
    if arch not in ARCHS:
        raise BadInput(f"unknown architecture '{arch}'; {nearest(arch, ARCHS)}")
    if stem not in STEMS:
        raise BadInput(f"unknown stem '{stem}'; {nearest(stem, STEMS)}")
    block, layers = ARCHS[arch]
    trunk = Trunk(block, list(layers), zero_init_residual=zero_init_residual, **kwargs)
    trunk.feature_dim = trunk.fc.in_features
    del trunk.fc
    trunk.arch, trunk.stem = arch, stem
    padding = STEMS[stem]
    if padding is not None:
        trunk.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=padding, bias=False)
        nn.init.kaiming_normal_(trunk.conv1.weight, mode="fan_out", nonlinearity="relu")
        trunk.maxpool = nn.Identity()
    return trunk


@functools.cache
def trunk_shapes(arch: str, stem: str = "imagenet") -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a trunk's state dict: 318 for a ResNet-50."""
    with torch.device("meta"):
        return {
            name: tuple(tensor.shape)
            for name, tensor in build_backbone(arch, stem).state_dict().items()
        }
