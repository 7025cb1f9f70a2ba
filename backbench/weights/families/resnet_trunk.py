"""The network of a ResNet: torchvision's modules and key names, no fc."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torchvision.models import resnet as tv

from backbench.errors import BadInput, nearest
from backbench.weights.families.resnet_tables import ARCHS, STEMS, check_stem
from backbench.weights.trunk import Trunk


class ResNetTrunk(tv.ResNet, Trunk):
    """A torchvision ResNet without its fc; a conv3 stem gives maps at a quarter of the strides."""

    memory_format = torch.channels_last

    conv1: nn.Conv2d
    bn1: nn.Module
    relu: nn.Module
    maxpool: nn.Module
    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential
    layer4: nn.Sequential
    avgpool: nn.Module
    fc: nn.Linear

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

    def depths(self) -> dict[str, int]:
        """The stem is layer 0, then every block is one."""
        # 1. Which layer the first block of each stage is
        first, deepest = {}, 0
        for name in ("layer1", "layer2", "layer3", "layer4"):
            first[name] = deepest + 1
            deepest += len(getattr(self, name))
        # 2. layer2.0.conv1.weight: stage, block, the rest
        out: dict[str, int] = {}
        for name, _ in self.named_parameters():
            stage, block, *_ = name.split(".")
            out[name] = first[stage] + int(block) if stage in first else 0
        return out

    def zero_residuals(self) -> None:
        """Zero the last norm of each block, as torchvision's `zero_init_residual` does."""
        for block in self.modules():
            if isinstance(block, tv.Bottleneck | tv.BasicBlock):
                last = block.bn3 if isinstance(block, tv.Bottleneck) else block.bn2
                nn.init.constant_(last.weight, 0)

    def fuse(self) -> None:
        """Fold each batch norm into its convolution; features change by about 1e-6 of theirs."""
        _fuse_pair(self, "conv1", "bn1")
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in stage:
                for i in (1, 2, 3):
                    if hasattr(block, f"conv{i}"):
                        _fuse_pair(block, f"conv{i}", f"bn{i}")
                if isinstance(block.downsample, nn.Sequential):
                    _fuse_pair(block.downsample, "0", "1")

    def dilate(self, stride: int) -> None:
        dilation = 1
        strides = list(self.strides)
        for at in range(1, 4):
            halves = self.strides[at - 1] < self.strides[at]
            if halves and strides[at - 1] * 2 > stride:
                dilation = _dilate_stage(getattr(self, f"layer{at + 1}"), dilation)
                strides[at] = strides[at - 1]
            else:
                strides[at] = strides[at - 1] * (2 if halves else 1)
        self.strides = tuple(strides)


def _dilate_stage(stage: nn.Sequential, dilation: int) -> int:
    """Let a stage keep the size of its input, which has places for every `dilation`-th of which the
    stage was made; returns the same number for its output."""
    # As torchvision's replace_stride_with_dilation: the convolution that had the stride still reads
    # neighbours of its input, those after it read twice as far apart.
    for module in stage.modules():
        if not isinstance(module, nn.Conv2d):
            continue
        if module.kernel_size == (3, 3):
            module.dilation = module.padding = (dilation, dilation)
        if module.stride == (2, 2):
            if module.kernel_size == (3, 3):
                dilation *= 2
            module.stride = (1, 1)
    return dilation


def _fuse_pair(module: nn.Module, conv: str, norm: str) -> None:
    """Merge two children that follow one another; needs eval()."""
    # In eval() a batch norm is a fixed affine map of each channel: it scales the convolution's
    # weights and shifts its bias.
    fused = fuse_conv_bn_eval(getattr(module, conv), getattr(module, norm))
    setattr(module, conv, fused)
    setattr(module, norm, nn.Identity())


def build_backbone(
    arch: str, stem: str = "imagenet", *, channels: int = 3, width: float = 1.0
) -> ResNetTrunk:
    """A randomly initialised trunk for images of that many channels. `width` multiplies the channels
    of all stages, not the stem's."""
    if arch not in ARCHS:
        raise BadInput(f"unknown architecture '{arch}'; {nearest(arch, ARCHS)}")
    check_stem(stem)
    kind, layers = ARCHS[arch]
    block = getattr(tv, kind)
    trunk = ResNetTrunk(block, list(layers))
    bases = [int(base * width) for base in (64, 128, 256, 512)]
    if (channels, width) != (3, 1.0):
        _resize(trunk, block, list(layers), channels, bases)
    scale = 1 if STEMS[stem] is None else 4  # a conv3 stem keeps the image's size
    trunk.strides = tuple(stride // scale for stride in (4, 8, 16, 32))
    trunk.widths = tuple(base * block.expansion for base in bases)
    trunk.feature_dim = trunk.widths[-1]
    del trunk.fc
    trunk.arch, trunk.stem = arch, stem
    padding = STEMS[stem]
    if padding is not None:
        trunk.conv1 = nn.Conv2d(channels, 64, kernel_size=3, stride=1, padding=padding, bias=False)
        nn.init.kaiming_normal_(trunk.conv1.weight, mode="fan_out", nonlinearity="relu")
        trunk.maxpool = nn.Identity()
    return trunk


def _resize(
    trunk: Any,
    block: type[tv.BasicBlock | tv.Bottleneck],
    layers: list[int],
    channels: int,
    bases: list[int],
) -> None:
    """Other input channels, other widths of the stages; drawn as torchvision draws them."""
    trunk.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    trunk.inplanes = 64
    for number, (base, count) in enumerate(zip(bases, layers), 1):
        stage = trunk._make_layer(block, base, count, stride=1 if number == 1 else 2)
        setattr(trunk, f"layer{number}", stage)
    for module in trunk.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


@functools.cache
def trunk_shapes(arch: str, stem: str = "imagenet") -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a trunk's state dict: 318 for a ResNet-50."""
    with torch.device("meta"):
        tensors = build_backbone(arch, stem).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
