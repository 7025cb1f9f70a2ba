"""Puts a trunk of any kind below a detector, in both engines, and proves that its weights arrived.

MODEL.BACKBONE.NAME says what stands on the trunk, and by whose rules the two are trained:

    build_resnet_fpn_backbone         a ResNet under an FPN, trained by Detectron2's own rules
    build_resnet_backbone             a ResNet without an FPN (C4), trained by the same rules
    build_trunk_fpn_backbone          a hierarchical trunk of any kind, its maps C2..C5 under an FPN
    build_trunk_simple_fpn_backbone   a plain vision transformer under the simple feature pyramid of
                                      ViTDet (arXiv:2203.16527), with global attention in every block

The trunk is the same `Trunk` that probes and finetuning use. It is not built anew by the detector,
so nothing of it is lost: Detectron2's own ViT has neither LayerScale nor registers nor a last norm.
Only a ResNet under Detectron2's engine is that engine's own, because it is the reference of the
published numbers.

The simple pyramid makes the strides 4 to 32 from a plain trunk's one map, which must have stride 16.
For another patch size p the image is scaled by p / 16, not the weights: with patch size 14, an image
of 896 pixels becomes 784 pixels, which are 56 x 56 patches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d

from backbench.detection import dialect
from backbench.detection.data.images import shortest_edge
from backbench.detection.dialect import Given, Value
from backbench.errors import BadInput
from backbench.parallel import batchnorm, distributed
from backbench.runs import seeding
from backbench.weights import archs, importing
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.trunk import Trunk

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

    from backbench.detection.engine import DetectionEngine

# MODEL.BACKBONE.NAME
RESNET_FPN = "build_resnet_fpn_backbone"
FPN = "build_trunk_fpn_backbone"
SIMPLE = "build_trunk_simple_fpn_backbone"
STRIDES = (4, 8, 16, 32)  # of the maps that an FPN stands on
# An image's sides are padded to multiples of this, so that levels of different strides add up.
STRIDE = STRIDES[-1]
PLAIN_STRIDE = 16  # of a plain trunk's map, in pixels of the image
PROBE_SIDE = 64  # pixels of the noise in `stop_gradients`: 4 x 4 patches
PIXEL_TOLERANCE = 0.01  # of 255; converters round the statistics
NORM_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)
OPTIMIZERS = ("SGD", "ADAMW")
# Relative to a map's largest value. It is small because both sides do the same operations in the
# same order.
TOLERANCE = 1e-5
RANDOM = "random"  # MODEL.WEIGHTS of the random row


# Detectron2's keys for its own ResNet -> the values that leave a trunk whole: nothing is frozen,
# batch norm is trained, the 3x3 convolutions stride, all four stages are used
WHOLE_TRUNK: dict[str, tuple[Value, ...]] = {
    "MODEL.BACKBONE.FREEZE_AT": (0,),
    "MODEL.RESNETS.NORM": ("SyncBN", "BN"),
    "MODEL.RESNETS.STRIDE_IN_1X1": (False,),
    "MODEL.RESNETS.OUT_FEATURES": (["res2", "res3", "res4", "res5"],),
    "MODEL.FPN.IN_FEATURES": (["res2", "res3", "res4", "res5"],),
}
# Keys that decide nothing -> the values that they may be stated with. The first table is for
# Detectron2's names of backbones, the second for ours.
IDLE_FOR_RESNETS = {key: (value,) for key, value in dialect.OURS.items()}
IDLE_FOR_TRUNKS: dict[str, tuple[Value, ...]] = {
    **WHOLE_TRUNK,
    "SOLVER.NESTEROV": (False,),
    "SOLVER.BIAS_LR_FACTOR": (1.0,),
    "SOLVER.WEIGHT_DECAY_BIAS": (None,),
}


def is_resnet(cfg: CfgNode) -> bool:
    """Return True for Detectron2's names of backbones, False for ours.

    The former are a ResNet of MODEL.RESNETS.DEPTH with batch norm, trained as Detectron2 trains it;
    the latter any trunk with its own norms, trained as ViTDet trains.
    """
    return cfg.MODEL.BACKBONE.NAME not in (FPN, SIMPLE)


def arch_of(cfg: CfgNode) -> str:
    """Return the trunk that the config names, for the random row; "" where it names none."""
    if is_resnet(cfg):
        return f"resnet{cfg.MODEL.RESNETS.DEPTH}"
    return cfg.MODEL.TRUNK.ARCH


def refuse(cfg: CfgNode, given: Given, checkpoint: Checkpoint, trunk: Trunk) -> None:
    """Raise BadInput for a trunk or a key that does not go with the config's backbone."""
    name = cfg.MODEL.BACKBONE.NAME
    idle = IDLE_FOR_RESNETS if is_resnet(cfg) else IDLE_FOR_TRUNKS
    for key, allowed in idle.items():
        value = given.get(key, allowed[0])
        if isinstance(value, tuple):
            value = list(value)
        if value not in allowed:
            raise BadInput(
                f"{given.path}: {key} {value!r} would decide nothing with MODEL.BACKBONE.NAME "
                f"{name}; it must be {' or '.join(map(repr, allowed))}"
            )
    refuse_shape(trunk, name)
    if is_resnet(cfg):
        _refuse_resnet(cfg, given, checkpoint)
    else:
        _refuse_trunk(cfg, given, checkpoint)
    refuse_pixels(given, checkpoint)


def _refuse_resnet(cfg: CfgNode, given: Given, checkpoint: Checkpoint) -> None:
    if checkpoint.arch != arch_of(cfg):
        raise BadInput(
            f"{given.path}: MODEL.RESNETS.DEPTH is {cfg.MODEL.RESNETS.DEPTH} but {checkpoint.name} "
            f"is {checkpoint.arch}; state its depth, or for a trunk that is no ResNet use a config "
            f"with MODEL.BACKBONE.NAME {FPN} or {SIMPLE}"
        )
    # MSRA's ResNet-50, which Detectron2's own configs start from, strides in the first 1x1
    # convolution of a stage. torchvision's, and with it every checkpoint here, strides in the 3x3.
    # Names and shapes are the same, so no loading would notice.
    if cfg.MODEL.RESNETS.STRIDE_IN_1X1:
        raise BadInput(
            f"{given.path}: MODEL.RESNETS.STRIDE_IN_1X1 is True, as MSRA's weights need it, but "
            f"{checkpoint.name} strides in the 3x3 convolution: it would load without an error "
            "and compute other features; set it to False"
        )


def _refuse_trunk(cfg: CfgNode, given: Given, checkpoint: Checkpoint) -> None:
    solver = cfg.SOLVER
    trunk = cfg.MODEL.TRUNK
    if trunk.ARCH and archs.canonical(trunk.ARCH)[0] != checkpoint.arch:
        raise BadInput(
            f"{given.path}: MODEL.TRUNK.ARCH is {trunk.ARCH} but {checkpoint.name} is "
            f"{checkpoint.arch}; it is for MODEL.WEIGHTS random, leave it out"
        )
    if solver.OPTIMIZER not in OPTIMIZERS:
        raise BadInput(
            f"{given.path}: SOLVER.OPTIMIZER {solver.OPTIMIZER}: {' or '.join(OPTIMIZERS)}"
        )
    if not 0 < solver.LAYER_DECAY <= 1:
        raise BadInput(
            f"{given.path}: SOLVER.LAYER_DECAY must be above 0 and at most 1, "
            f"not {solver.LAYER_DECAY}"
        )
    if not 0 <= trunk.DROP_PATH < 1:
        raise BadInput(
            f"{given.path}: MODEL.TRUNK.DROP_PATH must be from 0 to below 1, "
            f"not {trunk.DROP_PATH}"
        )
    if cfg.MODEL.BACKBONE.NAME == SIMPLE and not cfg.MODEL.FPN.NORM:
        raise BadInput(
            f"{given.path}: MODEL.FPN.NORM '': the simple feature pyramid needs one, LN"
        )


def has_fpn(cfg: CfgNode) -> bool:
    """Return False for C4 configs."""
    return "fpn" in cfg.MODEL.BACKBONE.NAME


def is_plain(trunk: Trunk) -> bool:
    """Return True for a plain vision transformer, which has one map; other trunks have C2..C5."""
    return len(trunk.strides) == 1


def refuse_shape(trunk: Trunk, backbone: str) -> None:
    """Raise BadInput for a trunk whose maps this backbone cannot stand on."""
    plain = is_plain(trunk)
    if not plain and trunk.strides != STRIDES:
        strides = ", ".join(map(str, trunk.strides)) or "none"
        raise BadInput(
            f"{trunk.arch} ({trunk.stem} stem) has maps of stride {strides}: detection needs those "
            "of 4, 8, 16 and 32, or the one map of a plain vision transformer"
        )
    if plain and backbone != SIMPLE:
        raise BadInput(
            f"{trunk.arch} is plain: MODEL.BACKBONE.NAME must be {SIMPLE}, not {backbone}"
        )
    if not plain and backbone == SIMPLE:
        raise BadInput(
            f"{trunk.arch} is hierarchical: MODEL.BACKBONE.NAME must be {FPN}, not {backbone}"
        )
    if trunk.size is not None:
        raise BadInput(
            f"{trunk.arch} takes images of {trunk.size} x {trunk.size} pixels alone, and "
            f"detection's have many sizes; {trunk.other_sizes()}"
        )


def refuse_pixels(given: Given, checkpoint: Checkpoint) -> None:
    """Raise BadInput if the config states another channel order or other statistics than the
    checkpoint's."""
    pixels = checkpoint.pixels
    order = given.get("INPUT.FORMAT", pixels.order)
    if order != pixels.order:
        raise BadInput(
            f"{given.path}: INPUT.FORMAT is {order} but {checkpoint.name} was trained on "
            f"{pixels.order} images"
        )
    statistics = {"MODEL.PIXEL_MEAN": pixels.mean, "MODEL.PIXEL_STD": pixels.std}
    for key, values in statistics.items():
        wanted = [round(255 * v, 3) for v in values]
        stated = list(given.get(key, wanted))
        far = [abs(a - b) > PIXEL_TOLERANCE for a, b in zip(stated, wanted)]
        if len(stated) != len(wanted) or any(far):
            raise BadInput(
                f"{given.path}: {key} is {stated} but {checkpoint.name} was trained with "
                f"{wanted}; leave it out"
            )


def scaled(x: Tensor, trunk: Trunk) -> Tensor:
    """Scale images (N, 3, H, W) by p / 16 for a plain trunk with patch size p; leave them for others.

    Their sides must be multiples of 32, so that the scaled sides are whole numbers of patches.
    """
    if not is_plain(trunk) or trunk.strides[0] == PLAIN_STRIDE:
        return x
    patch = trunk.strides[0]
    size = [side * patch // PLAIN_STRIDE for side in x.shape[-2:]]
    return F.interpolate(x, size=size, mode="bilinear", antialias=True)


def padded_test_size(cfg: CfgNode) -> tuple[int, int]:
    """Return (height, width) of a four by three image at the size of testing, padded to 32 n."""
    height, width = shortest_edge(
        3, 4, cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST
    )
    return math.ceil(height / STRIDE) * STRIDE, math.ceil(width / STRIDE) * STRIDE


class TrunkMaps(nn.Module):
    """Holds the trunk inside a detector, as MODEL.TRUNK says: frozen or trained, with or without
    stochastic depth, with or without a layer norm on each of its maps."""

    def __init__(self, trunk: Trunk, cfg: CfgNode) -> None:
        super().__init__()
        options = cfg.MODEL.TRUNK
        self.trunk = trunk
        self.frozen = bool(options.FROZEN)
        # In pixels of the detector's image, which is scaled for a plain trunk
        self.strides = (PLAIN_STRIDE,) if is_plain(trunk) else STRIDES
        # A map of stride 2 ** n is Cn.
        self.keys = [f"c{stride.bit_length() - 1}" for stride in self.strides]
        if cfg.MODEL.RESNETS.NORM != "BN":
            # This changes nothing in a trunk without batch norm.
            batchnorm.convert_sync_batchnorm(trunk)
        if options.DROP_PATH:
            set_drop_paths(trunk, options.DROP_PATH)
        stop_gradients(trunk, all_of_it=self.frozen)
        self.norms = nn.ModuleList()
        for width in trunk.widths:
            norm = LayerNorm2d(width, eps=1e-6) if options.MAP_NORM else nn.Identity()
            self.norms.append(norm)
        self.train(self.training)

    def train(self, mode: bool = True) -> TrunkMaps:
        super().train(mode)
        if self.frozen:
            self.trunk.eval()
        return self

    def stages(self, x: Tensor) -> list[Tensor]:
        """Compute the trunk's own maps of images (N, 3, H, W), each (N, C, H / stride, W / stride)."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            return self.trunk.stages(scaled(x, self.trunk))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the maps by their names, c2 to c5, after their norms."""
        out = {}
        for key, norm, m in zip(self.keys, self.norms, self.stages(x), strict=True):
            out[key] = norm(m)
        return out


class DropPath(nn.Module):
    """Stochastic depth: in training it drops a branch for an image with probability `drop_prob`, and
    scales it by 1 / (1 - drop_prob) for the others, as timm's.

    `generators`, one per image, make its draws independent of all else. With None it draws from
    torch's global generator.
    """

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob
        self.generators: Sequence[torch.Generator] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        draws = torch.rand(len(x))
        for i, generator in enumerate(self.generators or ()):
            draws[i] = torch.rand((), generator=generator)
        kept = distributed.sent(draws >= self.drop_prob, x.device)
        # (N,) -> (N, 1, 1, ...), to be multiplied with x
        kept = kept.view(len(x), *[1] * (x.dim() - 1))
        return x * kept.to(x.dtype) / (1 - self.drop_prob)


def set_drop_paths(trunk: Trunk, last: float) -> None:
    """Let the blocks' stochastic depth rise evenly from 0 to `last`, as timm's drop_path_rate.

    Raises BadInput for a trunk whose blocks have no paths to drop.
    """
    names = ("drop_path", "drop_path1", "drop_path2")  # timm's
    blocks = [m for m in trunk.modules() if any(hasattr(m, name) for name in names)]
    if not blocks:
        raise BadInput(
            f"MODEL.TRUNK.DROP_PATH {last}: {trunk.arch} has no paths to drop; say 0.0"
        )
    rates = torch.linspace(0, last, len(blocks)).tolist()
    for block, rate in zip(blocks, rates):
        for name in names:
            if hasattr(block, name):
                setattr(block, name, DropPath(rate) if rate else nn.Identity())


def stop_gradients(trunk: Trunk, *, all_of_it: bool) -> None:
    """Stop the gradients of the whole trunk, or of the parameters that no map depends on.

    The latter are, for example, a pooling head or a mask token. DDP would wait for their gradients,
    and weight decay would shrink them.
    """
    if not all_of_it:
        # A backward pass from the maps of some noise leaves a gradient at what they depend on.
        training = trunk.training
        generator = seeding.generator(0, "which parameters")
        noise = torch.randn(1, 3, PROBE_SIDE, PROBE_SIDE, generator=generator)
        maps = trunk.eval().stages(scaled(noise, trunk))
        torch.stack([m.square().mean() for m in maps]).sum().backward()
        trunk.train(training)
    for parameter in trunk.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None


def optimizer(model: nn.Module, body: TrunkMaps, cfg: CfgNode) -> torch.optim.Optimizer:
    """Make the optimiser of the whole detector, `body` being its trunk."""
    solver = cfg.SOLVER
    groups = parameter_groups(model, body, cfg)
    if solver.OPTIMIZER == "SGD":
        return torch.optim.SGD(groups, lr=solver.BASE_LR, momentum=solver.MOMENTUM)
    # MOMENTUM is AdamW's beta 1. Every recipe here has a beta 2 of 0.999.
    return torch.optim.AdamW(groups, lr=solver.BASE_LR, betas=(solver.MOMENTUM, 0.999))


def parameter_groups(
    model: nn.Module, body: TrunkMaps, cfg: CfgNode
) -> list[dict[str, object]]:
    """Group the trained parameters by learning rate and weight decay, the heads' last.

    Layer d of the trunk's D has the heads' rate times LAYER_DECAY ** (D + 1 - d), as in BEiT
    (arXiv:2106.08254) and ViTDet. Norms have WEIGHT_DECAY_NORM; so have, under our backbones,
    biases, scales, tokens and position embeddings. Under Detectron2's, biases have WEIGHT_DECAY,
    and their rate has the factor BIAS_LR_FACTOR, as by its get_default_optimizer_params.
    """
    solver = cfg.SOLVER
    trunk = body.trunk
    # 1. The depth of each parameter of the trunk. All else, the heads, is one layer deeper.
    depths: Mapping[str, int] = {}
    if solver.LAYER_DECAY != 1 and not body.frozen:
        depths = trunk.depths()
    heads_depth = max(depths.values(), default=0) + 1
    depth_of = {}
    for name, parameter in trunk.named_parameters():
        depth_of[id(parameter)] = depths.get(name, heads_depth)
    # 2. The parameters that have WEIGHT_DECAY_NORM
    decayed_as_norms = set()
    for module in model.modules():
        if isinstance(module, NORM_LAYERS):
            decayed_as_norms |= {id(p) for p in module.parameters(recurse=False)}
    if not is_resnet(cfg):
        decayed_as_norms |= {id(p) for p in model.parameters() if p.ndim <= 1}
        undecayed = trunk.undecayed()
        for name, parameter in trunk.named_parameters():
            if name in undecayed:
                decayed_as_norms.add(id(parameter))
    # 3. The groups: all parameters of one depth, one rate and one decay
    groups: dict[tuple[int, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        depth = depth_of.get(id(parameter), heads_depth)
        is_bias = name.endswith("bias") and solver.BIAS_LR_FACTOR != 1
        as_norm = id(parameter) in decayed_as_norms
        groups.setdefault((depth, is_bias, as_norm), []).append(parameter)
    out: list[dict[str, object]] = []
    for depth, is_bias, as_norm in sorted(groups):
        factor = solver.LAYER_DECAY ** (heads_depth - depth)
        if is_bias:
            factor *= solver.BIAS_LR_FACTOR
        group: dict[str, object] = {
            "params": groups[depth, is_bias, as_norm],
            "lr": solver.BASE_LR * factor,
            "weight_decay": solver.WEIGHT_DECAY_NORM
            if as_norm
            else solver.WEIGHT_DECAY,
        }
        out.append(group)
    return out


# The checkpoint that a detector starts from, and the proof that its weights arrived: equal maps


def read_trunk(
    checkpoint: Path | None, model_weights: str, arch: str, seed: int
) -> Checkpoint:
    """Read --checkpoint X or MODEL.WEIGHTS FILE; MODEL.WEIGHTS random is a fresh trunk of `arch`.

    Raises BadInput without any weights: a detector that is trained from scratch by mistake would
    only look a bit low.
    """
    if checkpoint is not None and model_weights:
        raise BadInput(
            f"--checkpoint {checkpoint} and MODEL.WEIGHTS {model_weights}; give one"
        )
    if model_weights == RANDOM:
        if not arch:
            raise BadInput(
                f"MODEL.WEIGHTS {RANDOM}: which trunk? say MODEL.TRUNK.ARCH timm:NAME"
            )
        seeding.seed_everything(seed, "random row")
        return Checkpoint(
            arch=arch,
            method=RANDOM,
            state_dict=archs.build_trunk(arch).state_dict(),
            pixels=archs.default_pixels(arch),
            provenance={"name": "random"},
        )
    if "://" in model_weights:
        raise BadInput(
            f"MODEL.WEIGHTS {model_weights}: a run downloads nothing; give a local file"
        )
    if checkpoint is not None:
        return importing.read(checkpoint)
    if model_weights:
        return importing.read(Path(model_weights))
    raise BadInput(
        f"no weights: give --checkpoint X, MODEL.WEIGHTS OUT.pkl or MODEL.WEIGHTS {RANDOM}"
    )


def check_features(
    checkpoint: Checkpoint,
    trunk: Trunk,
    engine: DetectionEngine,
    sides: tuple[int, int],
) -> float:
    """Return the largest relative difference between the maps of `trunk` and of the loaded detector.

    Their images have (height, width) `sides`, those of testing, because position embeddings are
    resized for them. Raises BadInput for a difference above TOLERANCE: then only some of the names
    matched, or another convolution strides.
    """
    # The noise stands for normalised images, so this does not check how the engine normalises.
    noise = torch.randn(2, 3, *sides, generator=seeding.generator(0, "feature check"))
    x = noise.to(engine.device)
    with torch.no_grad():
        own = trunk.eval().to(engine.device).stages(scaled(x, trunk))
    trunk.cpu()
    worst = 0.0
    names = ("C2", "C3", "C4", "C5") if len(own) > 1 else ("map",)
    for name, a, b in zip(names, own, engine.stages(x), strict=True):
        if a.shape != b.shape:
            raise BadInput(
                f"{engine.name}: {name} of the detector is {tuple(b.shape)}, "
                f"the checkpoint's {tuple(a.shape)}"
            )
        difference = float((a - b).abs().max() / a.abs().max().clamp(min=1e-12))
        if not difference <= TOLERANCE:  # not `>`: NaN is refused too
            raise BadInput(
                f"{engine.name}: the loaded {name} is off from {checkpoint.name}'s by "
                f"{difference:.2g} of its size; weights or stride did not arrive, nothing was trained"
            )
        worst = max(worst, difference)
    return worst
