"""The network of a ResNet: torchvision's modules, key names and draws, no fc.

It is written here because `import torchvision` takes longer than most verbs.
"""

import functools

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from backbench.errors import BadInput, nearest
from backbench.weights.families.resnet_tables import ARCHS, STEMS, check_stem
from backbench.weights.trunk import Trunk


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    """A residual block of two 3x3 convolutions or, as a bottleneck, of 1x1, 3x3 and 1x1. The first
    3x3 one has the stride (ResNet "v1.5")."""

    def __init__(
        self, inputs: int, channels: int, stride: int, bottleneck: bool
    ) -> None:
        super().__init__()
        outputs = 4 * channels if bottleneck else channels
        # 1. The shortcut is drawn first, and named last, as in torchvision
        shortcut = None
        if stride > 1 or inputs != outputs:
            shortcut = nn.Sequential(
                _conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)
            )
        # 2. The branch
        if bottleneck:
            self.conv1, self.bn1 = _conv(inputs, channels, 1), nn.BatchNorm2d(channels)
            self.conv2, self.bn2 = (
                _conv(channels, channels, 3, stride),
                nn.BatchNorm2d(channels),
            )
            self.conv3, self.bn3 = _conv(channels, outputs, 1), nn.BatchNorm2d(outputs)
            self.relu = nn.ReLU(inplace=True)
        else:
            self.conv1, self.bn1 = (
                _conv(inputs, channels, 3, stride),
                nn.BatchNorm2d(channels),
            )
            self.relu = nn.ReLU(inplace=True)
            self.conv2, self.bn2 = (
                _conv(channels, channels, 3),
                nn.BatchNorm2d(channels),
            )
        self.downsample = shortcut
        self.bottleneck = bottleneck

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.bottleneck:
            branch = self.bn3(self.conv3(self.relu(branch)))
        branch += x if self.downsample is None else self.downsample(x)
        return self.relu(branch)


class ResNetTrunk(Trunk):
    """A ResNet without its fc; a conv3 stem gives maps at a quarter of the strides."""

    memory_format = torch.channels_last

    maxpool: nn.Module
    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential
    layer4: nn.Sequential

    def __init__(self, arch: str, channels: int = 3, width: float = 1.0) -> None:
        super().__init__()
        kind, blocks = ARCHS[arch]
        bottleneck = kind == "Bottleneck"
        bases = [int(base * width) for base in (64, 128, 256, 512)]
        self.arch, self.strides = arch, (4, 8, 16, 32)
        self.widths = tuple(4 * base if bottleneck else base for base in bases)
        self.feature_dim = self.widths[-1]
        self.conv1 = nn.Conv2d(
            channels, 64, kernel_size=7, stride=2, padding=3, bias=False
        )
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        inputs = 64
        for number, (base, count) in enumerate(zip(bases, blocks), 1):
            stage = []
            for place in range(count):
                stride = 2 if number > 1 and place == 0 else 1
                stage.append(Block(inputs, base, stride, bottleneck))
                inputs = self.widths[number - 1]
            setattr(self, f"layer{number}", nn.Sequential(*stage))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))

    def blocks(self) -> list[Block]:
        return [module for module in self.modules() if isinstance(module, Block)]

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

    def multiply_adds(self, side: int) -> int:
        """Those of its convolutions."""
        total = 0

        def through(conv: nn.Conv2d, side: int) -> int:
            nonlocal total
            side = (
                side + 2 * int(conv.padding[0]) - conv.kernel_size[0]
            ) // conv.stride[0] + 1
            total += conv.weight.numel() * side**2
            return side

        side = through(self.conv1, side)
        if isinstance(self.maxpool, nn.MaxPool2d):
            side = (side - 1) // 2 + 1
        for block in self.blocks():
            if block.downsample is not None:
                through(block.downsample[0], side)  # type: ignore[arg-type]
            side = through(block.conv2, through(block.conv1, side))
            side = through(block.conv3, side) if block.bottleneck else side
        return total

    def zero_residuals(self) -> None:
        """Zero the last norm of each block, as torchvision's `zero_init_residual` does."""
        for block in self.blocks():
            nn.init.constant_((block.bn3 if block.bottleneck else block.bn2).weight, 0)

    def fuse(self) -> None:
        """Fold each batch norm into its convolution; features change by about 1e-6 of theirs."""
        _fuse_pair(self, "conv1", "bn1")
        for block in self.blocks():
            for i in (1, 2, 3) if block.bottleneck else (1, 2):
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
    """A randomly initialised trunk for images of that many channels. `width` multiplies the
    channels of all stages, not the stem's. A seed gives torchvision's weights."""
    if arch not in ARCHS:
        raise BadInput(f"unknown architecture '{arch}'; {nearest(arch, ARCHS)}")
    check_stem(stem)
    trunk = ResNetTrunk(arch)
    nn.Linear(trunk.feature_dim, 1000)  # torchvision draws its fc here
    _draw(trunk)
    if (channels, width) != (
        3,
        1.0,
    ):  # drawn behind the whole network: seeds stay what they were
        trunk = ResNetTrunk(arch, channels, width)
        _draw(trunk)
    padding = STEMS[stem]
    if padding is not None:
        trunk.conv1 = nn.Conv2d(
            channels, 64, kernel_size=3, stride=1, padding=padding, bias=False
        )
        nn.init.kaiming_normal_(trunk.conv1.weight, mode="fan_out", nonlinearity="relu")
        trunk.maxpool = nn.Identity()
        trunk.strides = (1, 2, 4, 8)  # it keeps the image's size
    trunk.stem = stem
    return trunk


def _draw(trunk: nn.Module) -> None:
    # Without memory there is nothing to draw, and torch would load its compiler to find that out
    for module in trunk.modules():
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


@functools.cache
def trunk_shapes(arch: str, stem: str = "imagenet") -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a trunk's state dict: 318 for a ResNet-50."""
    with torch.device("meta"):
        tensors = build_backbone(arch, stem).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
