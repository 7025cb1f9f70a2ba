"""A trunk of any kind as a detector's backbone: the trunk itself, in both engines.

    build_trunk_fpn_backbone          hierarchical trunks, C2..C5 under an FPN
    build_trunk_simple_fpn_backbone   plain vision transformers, under the simple feature pyramid of
                                      ViTDet (arXiv:2203.16527), attention global in every block

Nothing of the trunk is built again here, so that nothing of it can be lost on the way (Detectron2's
own ViT has neither LayerScale nor registers nor a last norm): both engines wrap the `Trunk` that
probes and finetuning use.

A plain trunk's map must have stride 16 in pixels of the image: the pyramid makes 4 to 32 of it. A
trunk of another patch size p is given the image scaled by p / 16. Patch 14: 896 pixels become 784,
56 x 56 patches; its weights are as they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d

from backbench.errors import BadInput
from backbench.parallel import batchnorm
from backbench.runs import seeding
from backbench.weights.trunk import Trunk
from detection.data.images import shortest_edge

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

FPN, SIMPLE = "build_trunk_fpn_backbone", "build_trunk_simple_fpn_backbone"
NAMES = (FPN, SIMPLE)  # MODEL.BACKBONE.NAME
PYRAMID = (4, 8, 16, 32)  # strides of what an FPN stands on
STRIDE = PYRAMID[-1]  # levels only add up where an image is a multiple of it
PLAIN = 16  # stride of a plain trunk's map, in pixels of the image
MAPS = ("C2", "C3", "C4", "C5")
SIDE = 64  # of the noise that tells which parameters a map depends on: whole patches at stride 16


def wraps(cfg: CfgNode) -> bool:
    """Whether the detector stands on a `Trunk` as it is, not on an engine's own ResNet."""
    return cfg.MODEL.BACKBONE.NAME in NAMES


def is_plain(trunk: Trunk) -> bool:
    """One map, as a plain vision transformer gives it."""
    return len(trunk.strides) == 1


def refuse(trunk: Trunk, backbone: str) -> None:
    """BadInput for a trunk that this backbone cannot stand on."""
    wanted = SIMPLE if is_plain(trunk) else FPN
    if not is_plain(trunk) and trunk.strides != PYRAMID:
        strides = ", ".join(map(str, trunk.strides)) or "none"
        raise BadInput(
            f"{trunk.arch} ({trunk.stem} stem) has maps of stride {strides}: detection needs those "
            "of 4, 8, 16 and 32, or the one map of a plain vision transformer"
        )
    if backbone != wanted:
        kind = "plain" if is_plain(trunk) else "hierarchical"
        raise BadInput(
            f"{trunk.arch} is {kind}: MODEL.BACKBONE.NAME must be {wanted}, not {backbone}"
        )
    if trunk.size is not None:
        raise BadInput(
            f"{trunk.arch} takes images of {trunk.size} x {trunk.size} pixels alone, and detection's "
            f"have many sizes; {trunk.other_sizes()}"
        )


def scaled(x: Tensor, trunk: Trunk) -> Tensor:
    """Images (N, 3, H, W), both sides multiples of 32 -> those that the trunk is given: of a plain
    one's patch p, scaled by p / 16."""
    if not is_plain(trunk) or trunk.strides[0] == PLAIN:
        return x
    patch = trunk.strides[0]
    size = [side * patch // PLAIN for side in x.shape[-2:]]
    return F.interpolate(x, size=size, mode="bilinear", antialias=True)


def sides(cfg: CfgNode) -> tuple[int, int]:
    """(height, width) of an image of four by three as it is tested on, padded."""
    i = cfg.INPUT
    height, width = shortest_edge(3, 4, i.MIN_SIZE_TEST, i.MAX_SIZE_TEST)
    return -(-height // STRIDE) * STRIDE, -(-width // STRIDE) * STRIDE


class TrunkMaps(nn.Module):
    """The trunk of a detector, by the config's MODEL.TRUNK: frozen or trained, with stochastic
    depth, a layer norm on each of its maps."""

    def __init__(self, trunk: Trunk, cfg: CfgNode) -> None:
        super().__init__()
        t = cfg.MODEL.TRUNK
        refuse(trunk, cfg.MODEL.BACKBONE.NAME)
        self.trunk, self.frozen = trunk, bool(t.FROZEN)
        # In pixels of the detector's image
        self.strides = (PLAIN,) if is_plain(trunk) else PYRAMID
        self.keys = [f"c{stride.bit_length() - 1}" for stride in self.strides]
        if cfg.MODEL.RESNETS.NORM != "BN":
            batchnorm.convert_sync_batchnorm(trunk)  # where there is batch norm
        if t.DROP_PATH:
            drop_paths(trunk, t.DROP_PATH)
        still(trunk, all_of_it=self.frozen)
        norms = [
            LayerNorm2d(width, eps=1e-6) if t.MAP_NORM else nn.Identity() for width in trunk.widths
        ]
        self.norms = nn.ModuleList(norms)
        self.train(self.training)

    def train(self, mode: bool = True) -> TrunkMaps:
        super().train(mode)
        if self.frozen:
            self.trunk.eval()
        return self

    def stages(self, x: Tensor) -> list[Tensor]:
        """Images (N, 3, H, W) -> the trunk's own maps, each (N, C, H / stride, W / stride)."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            return self.trunk.stages(scaled(x, self.trunk))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = self.stages(x)
        return {key: norm(m) for key, norm, m in zip(self.keys, self.norms, maps, strict=True)}


def drop_paths(trunk: Trunk, last: float) -> None:
    """Stochastic depth: 0 in the first block, rising evenly to `last` in the last, as timm's models
    have it of `drop_path_rate`."""
    from timm.layers import DropPath

    names = ("drop_path", "drop_path1", "drop_path2")
    blocks = [m for m in trunk.modules() if any(hasattr(m, name) for name in names)]
    if not blocks:
        raise BadInput(f"MODEL.TRUNK.DROP_PATH {last}: {trunk.arch} has no paths to drop; say 0.0")
    rates = torch.linspace(0, last, len(blocks)).tolist()
    for block, rate in zip(blocks, rates):
        for name in names:
            if hasattr(block, name):
                setattr(block, name, DropPath(rate) if rate else nn.Identity())


def still(trunk: Trunk, *, all_of_it: bool) -> None:
    """Stop the gradients of what is not trained: everything, or what no map depends on (a pooling
    head, a mask token), which DDP would wait for and weight decay shrink."""
    if not all_of_it:
        was, draw = trunk.training, seeding.generator(0, "which parameters")
        maps = trunk.eval().stages(scaled(torch.randn(1, 3, SIDE, SIDE, generator=draw), trunk))
        torch.stack([m.square().mean() for m in maps]).sum().backward()
        trunk.train(was)
    for parameter in trunk.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None


def optimizer(model: nn.Module, body: TrunkMaps, solver: CfgNode) -> torch.optim.Optimizer:
    """Of the whole detector, `body` being its trunk."""
    groups = parameter_groups(model, body, solver)
    if solver.OPTIMIZER == "SGD":
        return torch.optim.SGD(groups, lr=solver.BASE_LR, momentum=solver.MOMENTUM)
    # MOMENTUM is the decay of the first moment; 0.999 is that of the second in every recipe here
    return torch.optim.AdamW(groups, lr=solver.BASE_LR, betas=(solver.MOMENTUM, 0.999))


def parameter_groups(model: nn.Module, body: TrunkMaps, solver: CfgNode) -> list[dict[str, Any]]:
    """A group for each rate and decay, the trunk's deepest layers last.

    The rate of layer d of a trunk whose last is D is LAYER_DECAY ** (D + 1 - d) of the heads': BEiT
    (arXiv:2106.08254) and ViTDet have it so. Norms, biases, scales, tokens and position embeddings
    have WEIGHT_DECAY_NORM.
    """
    trunk, decay = body.trunk, solver.LAYER_DECAY
    depths = trunk.depths() if decay != 1 and not body.frozen else {}
    beyond = max(depths.values(), default=0) + 1
    undecayed = trunk.undecayed()
    name_of = {id(parameter): name for name, parameter in trunk.named_parameters()}
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            name = name_of.get(id(parameter))
            depth = beyond if name is None else depths.get(name, beyond)
            spared = parameter.ndim <= 1 or name in undecayed
            groups.setdefault((depth, spared), []).append(parameter)
    out = []
    for (depth, spared), parameters in sorted(groups.items(), key=lambda item: item[0]):
        out.append(
            {
                "params": parameters,
                "lr": solver.BASE_LR * decay ** (beyond - depth),
                "weight_decay": solver.WEIGHT_DECAY_NORM if spared else solver.WEIGHT_DECAY,
            }
        )
    return out
