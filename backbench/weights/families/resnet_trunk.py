"""Builds the network of a ResNet with torchvision's modules, key names and draws, but without fc.

It is written here because `import torchvision` takes longer than most verbs.
"""

import functools

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from backbench.errors import BadInput, nearest
from backbench.weights import undrawn
from backbench.weights.families.resnet_tables import ARCHS, STEMS, check_stem
from backbench.weights.trunk import LayerOutputs, Trunk


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    """A residual block has two 3x3 convolutions or, as a bottleneck, 1x1, 3x3 and 1x1 ones. Its
    first 3x3 convolution has the stride (ResNet "v1.5")."""

    def __init__(
        self, inputs: int, channels: int, stride: int, bottleneck: bool
    ) -> None:
        super().__init__()
        outputs = 4 * channels if bottleneck else channels
        # torchvision draws the shortcut first, and names it last. Names and seeds depend on the order
        # of all these lines.
        shortcut = None
        if stride > 1 or inputs != outputs:
            conv = _conv(inputs, outputs, 1, stride)
            shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))
        if bottleneck:
            self.conv1 = _conv(inputs, channels, 1)
            self.bn1 = nn.BatchNorm2d(channels)
            self.conv2 = _conv(channels, channels, 3, stride)
            self.bn2 = nn.BatchNorm2d(channels)
            self.conv3 = _conv(channels, outputs, 1)
            self.bn3 = nn.BatchNorm2d(outputs)
            self.relu = nn.ReLU(inplace=True)
        else:
            self.conv1 = _conv(inputs, channels, 3, stride)
            self.bn1 = nn.BatchNorm2d(channels)
            self.relu = nn.ReLU(inplace=True)
            self.conv2 = _conv(channels, channels, 3)
            self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = shortcut
        self.bottleneck = bottleneck

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.bottleneck:
            branch = self.bn3(self.conv3(self.relu(branch)))
        branch += x if self.downsample is None else self.downsample(x)
        return self.relu(branch)


class ResNetTrunk(Trunk):
    """A ResNet without its fc. With a conv3 stem its maps have a quarter of these strides."""

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
        self.arch = arch
        self.strides = (4, 8, 16, 32)
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
        """Map images (N, 3, H, W) to C2..C5, each (N, C, H/s, W/s)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        maps = []
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
            maps.append(x)
        return maps

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to features (N, feature_dim), by global average pooling."""
        return self._pooled(self.stages(x)[-1])

    def layers(self, x: Tensor) -> LayerOutputs:
        maps = self.stages(x)
        return LayerOutputs(self._pooled(maps[-1]), maps, [], "stage")

    def _pooled(self, last: Tensor) -> Tensor:
        return torch.flatten(self.avgpool(last), 1)

    def depths(self) -> dict[str, int]:
        """Return parameter -> its layer: 0 for the stem, then a layer for each block."""
        # 1. The layer of each stage's first block
        first_layer = {}
        layer = 1
        for stage in ("layer1", "layer2", "layer3", "layer4"):
            first_layer[stage] = layer
            layer += len(getattr(self, stage))
        # 2. A name like layer2.0.conv1.weight begins with stage and block
        out: dict[str, int] = {}
        for name, _ in self.named_parameters():
            stage, block, *_ = name.split(".")
            out[name] = first_layer[stage] + int(block) if stage in first_layer else 0
        return out

    def multiply_adds(self, side: int) -> int:
        """Return how many multiply-adds its convolutions take for one side x side image."""
        total = 0

        def through(conv: nn.Conv2d, side: int) -> int:
            """Count a convolution's multiply-adds; return the side of its output."""
            nonlocal total
            padded = side + 2 * int(conv.padding[0])
            side = (padded - conv.kernel_size[0]) // conv.stride[0] + 1
            total += conv.weight.numel() * side**2
            return side

        side = through(self.conv1, side)
        if isinstance(self.maxpool, nn.MaxPool2d):
            side = (side - 1) // 2 + 1
        for block in self.blocks():
            if block.downsample is not None:
                through(block.downsample[0], side)  # type: ignore[arg-type]
            side = through(block.conv1, side)
            side = through(block.conv2, side)
            if block.bottleneck:
                side = through(block.conv3, side)
        return total

    def zero_residuals(self) -> None:
        """Zero the last norm of each block, as torchvision's `zero_init_residual` does."""
        for block in self.blocks():
            last_norm = block.bn3 if block.bottleneck else block.bn2
            nn.init.constant_(last_norm.weight, 0)

    def fuse(self) -> None:
        """Fold each batch norm into its convolution. Features change by a relative 1e-6 or so."""
        _fuse_pair(self, "conv1", "bn1")
        for block in self.blocks():
            _fuse_pair(block, "conv1", "bn1")
            _fuse_pair(block, "conv2", "bn2")
            if block.bottleneck:
                _fuse_pair(block, "conv3", "bn3")
            if isinstance(block.downsample, nn.Sequential):
                _fuse_pair(block.downsample, "0", "1")

    def dilate(self, stride: int) -> None:
        dilation = 1
        strides = list(self.strides)
        for i in range(1, 4):
            if self.strides[i] == self.strides[i - 1]:
                # This stage was dilated by an earlier call. Its input may be denser now.
                _spread(getattr(self, f"layer{i + 1}"), dilation)
                strides[i] = strides[i - 1]
            elif strides[i - 1] * 2 > stride:
                dilation = _dilate_stage(getattr(self, f"layer{i + 1}"), dilation)
                strides[i] = strides[i - 1]
            else:
                strides[i] = strides[i - 1] * 2
        self.strides = tuple(strides)


def _dilate_stage(stage: nn.Sequential, dilation: int) -> int:
    """Replace a stage's stride by dilation, so that its output is as large as its input.

    `dilation` says how much denser the input's places are than those for which the stage was made.
    Return the same number for its output.
    """
    # This is torchvision's replace_stride_with_dilation: the convolution that had the stride still
    # reads neighbours of its input, and the convolutions after it read twice as far apart.
    for module in stage.modules():
        if not isinstance(module, nn.Conv2d):
            continue
        if module.kernel_size == (3, 3):
            module.dilation = (dilation, dilation)
            module.padding = (dilation, dilation)
        if module.stride == (2, 2):
            # The convolutions after this one read twice as far apart. The block's shortcut, 1x1, had
            # the same stride and lies beside it: it does not count again.
            if module.kernel_size == (3, 3):
                dilation *= 2
            module.stride = (1, 1)
    return dilation


def _spread(stage: nn.Sequential, factor: int) -> None:
    """Let a stage that has no stride any more read `factor` times as far apart."""
    for module in stage.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            far = factor * module.dilation[0]
            module.dilation = module.padding = (far, far)


def _fuse_pair(module: nn.Module, conv: str, norm: str) -> None:
    """Merge a convolution and the norm behind it, both children of `module` in eval()."""
    # In eval() a batch norm is a fixed affine map of each channel: it scales the convolution's
    # weights and shifts its bias.
    assert not module.training
    fused, of_channels = getattr(module, conv), getattr(module, norm)
    fused.weight, fused.bias = fuse_conv_bn_weights(
        fused.weight,
        fused.bias,
        of_channels.running_mean,
        of_channels.running_var,
        of_channels.eps,
        of_channels.weight,
        of_channels.bias,
    )
    setattr(module, norm, nn.Identity())


def build_backbone(
    arch: str, stem: str = "imagenet", *, channels: int = 3, width: float = 1.0
) -> ResNetTrunk:
    """Build a randomly initialised trunk for images of that many channels. `width` multiplies the
    channels of all stages, not the stem's. A seed gives torchvision's weights."""
    if arch not in ARCHS:
        raise BadInput(f"unknown architecture '{arch}'; {nearest(arch, ARCHS)}")
    check_stem(stem)
    ordinary = (channels, width) == (3, 1.0)
    # Where nothing is drawn, a narrow trunk needs no ordinary one before it
    if ordinary or not undrawn.is_on():
        trunk = ResNetTrunk(arch)
        # torchvision draws its fc between building and initialising the trunk.
        nn.Linear(trunk.feature_dim, 1000)
        _draw(trunk)
    if not ordinary:
        # Drawn behind the whole ordinary network, as it always was: a seed keeps its weights.
        trunk = ResNetTrunk(arch, channels, width)
        _draw(trunk)
    padding = STEMS[stem]
    if padding is not None:
        trunk.conv1 = nn.Conv2d(
            channels, 64, kernel_size=3, stride=1, padding=padding, bias=False
        )
        nn.init.kaiming_normal_(trunk.conv1.weight, mode="fan_out", nonlinearity="relu")
        trunk.maxpool = nn.Identity()
        trunk.strides = (1, 2, 4, 8)  # this stem keeps the image's size
    trunk.stem = stem
    return trunk


def _draw(trunk: nn.Module) -> None:
    """Draw the weights of the convolutions as torchvision does."""
    # Without memory there is nothing to draw, and torch would load its compiler to find that out.
    for module in trunk.modules():
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


@functools.cache
def trunk_shapes(arch: str, stem: str = "imagenet") -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of a trunk's state dict: 318 for a ResNet-50."""
    with torch.device("meta"):
        tensors = build_backbone(arch, stem).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
