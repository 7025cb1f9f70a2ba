"""The trunk below a detector has one path for all kinds of trunks, in both engines.

MODEL.BACKBONE.NAME says what stands on the trunk, and by whose rules it is trained:

    build_resnet_fpn_backbone         a ResNet under an FPN, by Detectron2's own rules
    build_resnet_backbone             a ResNet without one (C4), the same
    build_trunk_fpn_backbone          a hierarchical trunk of any kind, C2..C5 under an FPN
    build_trunk_simple_fpn_backbone   a plain vision transformer under the simple feature pyramid of
                                      ViTDet (arXiv:2203.16527), attention global in every block

The trunk is the `Trunk` that probes and finetuning use, not built again, so nothing of it is lost
(Detectron2's own ViT has neither LayerScale nor registers nor a last norm). Only a ResNet under
Detectron2's engine is built by that engine, the reference of the published numbers.

A plain trunk's map must have stride 16: the pyramid makes 4 to 32 of it. For another patch size p
the image is scaled by p / 16 (patch 14: 896 pixels become 784, 56 x 56 patches), not the weights.
"""

from __future__ import annotations

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

FPN, SIMPLE = "build_trunk_fpn_backbone", "build_trunk_simple_fpn_backbone"
RESNET_FPN = "build_resnet_fpn_backbone"
STRIDES = (4, 8, 16, 32)  # of the maps that an FPN stands on
STRIDE = STRIDES[-1]  # levels only add up where an image is a multiple of it
PLAIN_STRIDE = 16  # of a plain trunk's map, in pixels of the image
PROBE_SIDE = (
    64  # of the noise that tells which parameters a map depends on: 4 x 4 patches
)
PIXEL_TOLERANCE = 0.01  # of 255; converters round the statistics
NORM_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)
OPTIMIZERS = ("SGD", "ADAMW")
TOLERANCE = 1e-5  # of a map's size: the operations are the same in the same order
RANDOM = "random"  # MODEL.WEIGHTS of the random row


# Detectron2's keys for its own ResNet, and the values that go with every trunk that is whole
WHOLE_TRUNK: dict[str, tuple[Value, ...]] = {
    "MODEL.BACKBONE.FREEZE_AT": (0,),
    "MODEL.RESNETS.NORM": ("SyncBN", "BN"),
    "MODEL.RESNETS.STRIDE_IN_1X1": (False,),
    "MODEL.RESNETS.OUT_FEATURES": (["res2", "res3", "res4", "res5"],),
    "MODEL.FPN.IN_FEATURES": (["res2", "res3", "res4", "res5"],),
}
# Keys that decide nothing -> the values that they may be stated with: under Detectron2's names of
# backbones, and under ours
IDLE_FOR_RESNETS = {key: (value,) for key, value in dialect.OURS.items()}
IDLE_FOR_TRUNKS: dict[str, tuple[Value, ...]] = {
    **WHOLE_TRUNK,
    "SOLVER.NESTEROV": (False,),
    "SOLVER.BIAS_LR_FACTOR": (1.0,),
    "SOLVER.WEIGHT_DECAY_BIAS": (None,),
}


def is_resnet(cfg: CfgNode) -> bool:
    """True for Detectron2's names: a ResNet of MODEL.RESNETS.DEPTH with batch norm, trained as
    Detectron2 trains it. False for ours: any trunk with its own norms, trained as ViTDet trains."""
    return cfg.MODEL.BACKBONE.NAME not in (FPN, SIMPLE)


def arch_of(cfg: CfgNode) -> str:
    """The trunk that the config names, for the random row; empty where it names none."""
    return (
        f"resnet{cfg.MODEL.RESNETS.DEPTH}" if is_resnet(cfg) else cfg.MODEL.TRUNK.ARCH
    )


def refuse(cfg: CfgNode, given: Given, checkpoint: Checkpoint, trunk: Trunk) -> None:
    """Raise BadInput for a trunk or a key that does not go with the config's backbone."""
    name = cfg.MODEL.BACKBONE.NAME
    idle = IDLE_FOR_RESNETS if is_resnet(cfg) else IDLE_FOR_TRUNKS
    for key, allowed in idle.items():
        value = given.get(key, allowed[0])
        if isinstance(value, tuple):
            value = list(value)
        if value not in allowed:
            nothing = f"{value!r} would decide nothing with MODEL.BACKBONE.NAME {name}"
            values = " or ".join(map(repr, allowed))
            raise BadInput(f"{given.path}: {key} {nothing}; it must be {values}")
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
    # convolution of a stage; torchvision's, and with it every checkpoint here, in the 3x3. Both
    # have the same names and shapes.
    if cfg.MODEL.RESNETS.STRIDE_IN_1X1:
        raise BadInput(
            f"{given.path}: MODEL.RESNETS.STRIDE_IN_1X1 is True, as MSRA's weights need it, but "
            f"{checkpoint.name} strides in the 3x3 convolution: it would load without an error "
            "and compute other features; set it to False"
        )


def _refuse_trunk(cfg: CfgNode, given: Given, checkpoint: Checkpoint) -> None:
    solver, trunk = cfg.SOLVER, cfg.MODEL.TRUNK
    if trunk.ARCH and archs.canonical(trunk.ARCH)[0] != checkpoint.arch:
        both = f"is {trunk.ARCH} but {checkpoint.name} is {checkpoint.arch}"
        use = "it is for MODEL.WEIGHTS random, leave it out"
        raise BadInput(f"{given.path}: MODEL.TRUNK.ARCH {both}; {use}")
    said = ""
    if solver.OPTIMIZER not in OPTIMIZERS:
        said = f"SOLVER.OPTIMIZER {solver.OPTIMIZER}: {' or '.join(OPTIMIZERS)}"
    elif not 0 < solver.LAYER_DECAY <= 1:
        said = f"SOLVER.LAYER_DECAY must be above 0 and at most 1, not {solver.LAYER_DECAY}"
    elif not 0 <= trunk.DROP_PATH < 1:
        said = f"MODEL.TRUNK.DROP_PATH must be from 0 to below 1, not {trunk.DROP_PATH}"
    elif cfg.MODEL.BACKBONE.NAME == SIMPLE and not cfg.MODEL.FPN.NORM:
        said = "MODEL.FPN.NORM '': the simple feature pyramid needs one, LN"
    if said:
        raise BadInput(f"{given.path}: {said}")


def has_fpn(cfg: CfgNode) -> bool:
    """False for C4 configs."""
    return "fpn" in cfg.MODEL.BACKBONE.NAME


def is_plain(trunk: Trunk) -> bool:
    """A plain vision transformer gives one map; a hierarchical trunk gives C2..C5."""
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
    if plain != (backbone == SIMPLE):
        kind, wanted = ("plain", SIMPLE) if plain else ("hierarchical", FPN)
        raise BadInput(
            f"{trunk.arch} is {kind}: MODEL.BACKBONE.NAME must be {wanted}, not {backbone}"
        )
    if trunk.size is not None:
        own = f"{trunk.arch} takes images of {trunk.size} x {trunk.size} pixels alone"
        raise BadInput(f"{own}, and detection's have many sizes; {trunk.other_sizes()}")


def refuse_pixels(given: Given, checkpoint: Checkpoint) -> None:
    """Refuse another channel order or other statistics than the checkpoint's, if they are stated."""
    own, name = checkpoint.pixels, checkpoint.name
    order = given.get("INPUT.FORMAT", own.order)
    if order != own.order:
        raise BadInput(
            f"{given.path}: INPUT.FORMAT is {order} but {name} was trained on {own.order} images"
        )
    for key, values in (("MODEL.PIXEL_MEAN", own.mean), ("MODEL.PIXEL_STD", own.std)):
        wanted = [round(255 * v, 3) for v in values]
        stated = list(given.get(key, wanted))
        far = [abs(a - b) > PIXEL_TOLERANCE for a, b in zip(stated, wanted)]
        if len(stated) != len(wanted) or any(far):
            raise BadInput(
                f"{given.path}: {key} is {stated} but {name} was trained with {wanted}; leave it out"
            )


def scaled(x: Tensor, trunk: Trunk) -> Tensor:
    """Scale (N, 3, H, W), sides multiples of 32, by p / 16 for a plain trunk with patch size p."""
    if not is_plain(trunk) or trunk.strides[0] == PLAIN_STRIDE:
        return x
    patch = trunk.strides[0]
    size = [side * patch // PLAIN_STRIDE for side in x.shape[-2:]]
    return F.interpolate(x, size=size, mode="bilinear", antialias=True)


def padded_test_size(cfg: CfgNode) -> tuple[int, int]:
    """(height, width) of an image of four by three at the size of testing, padded."""
    i = cfg.INPUT
    height, width = shortest_edge(3, 4, i.MIN_SIZE_TEST, i.MAX_SIZE_TEST)
    return -(-height // STRIDE) * STRIDE, -(-width // STRIDE) * STRIDE


class TrunkMaps(nn.Module):
    """Holds the trunk inside a detector, as MODEL.TRUNK says: frozen or trained, with stochastic
    depth, with a layer norm on each of its maps."""

    def __init__(self, trunk: Trunk, cfg: CfgNode) -> None:
        super().__init__()
        options = cfg.MODEL.TRUNK
        self.trunk, self.frozen = trunk, bool(options.FROZEN)
        # In pixels of the detector's image
        self.strides = (PLAIN_STRIDE,) if is_plain(trunk) else STRIDES
        self.keys = [f"c{stride.bit_length() - 1}" for stride in self.strides]
        if cfg.MODEL.RESNETS.NORM != "BN":
            batchnorm.convert_sync_batchnorm(trunk)  # where there is batch norm
        if options.DROP_PATH:
            set_drop_paths(trunk, options.DROP_PATH)
        stop_gradients(trunk, all_of_it=self.frozen)
        self.norms = nn.ModuleList()
        for width in trunk.widths:
            self.norms.append(
                LayerNorm2d(width, eps=1e-6) if options.MAP_NORM else nn.Identity()
            )
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
        return {
            key: norm(m)
            for key, norm, m in zip(self.keys, self.norms, maps, strict=True)
        }


class DropPath(nn.Module):
    """Stochastic depth: in training it drops a branch for an image with probability `drop_prob`, and
    scales it by 1 / (1 - drop_prob) for the others, as timm's. `generators`, one per image, make
    its draws independent of all else; None draws from torch's global one."""

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
        kept = distributed.sent(draws >= self.drop_prob, x.device).view(
            -1, *[1] * (x.dim() - 1)
        )
        return x * kept.to(x.dtype) / (1 - self.drop_prob)


def set_drop_paths(trunk: Trunk, last: float) -> None:
    """Let the blocks' stochastic depth rise evenly from 0 to `last`, as timm's drop_path_rate."""
    names = ("drop_path", "drop_path1", "drop_path2")
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
    """Stop the gradients of what is not trained: everything, or what no map depends on (a pooling
    head, a mask token), which DDP would wait for and weight decay shrink."""
    if not all_of_it:
        training, draw = trunk.training, seeding.generator(0, "which parameters")
        noise = torch.randn(1, 3, PROBE_SIDE, PROBE_SIDE, generator=draw)
        maps = trunk.eval().stages(scaled(noise, trunk))
        torch.stack([m.square().mean() for m in maps]).sum().backward()
        trunk.train(training)
    for parameter in trunk.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None


def optimizer(model: nn.Module, body: TrunkMaps, cfg: CfgNode) -> torch.optim.Optimizer:
    """The optimiser of the whole detector, `body` being its trunk."""
    solver = cfg.SOLVER
    groups = parameter_groups(model, body, cfg)
    if solver.OPTIMIZER == "SGD":
        return torch.optim.SGD(groups, lr=solver.BASE_LR, momentum=solver.MOMENTUM)
    # MOMENTUM is the decay of the first moment; 0.999 is that of the second in every recipe here
    return torch.optim.AdamW(groups, lr=solver.BASE_LR, betas=(solver.MOMENTUM, 0.999))


def parameter_groups(
    model: nn.Module, body: TrunkMaps, cfg: CfgNode
) -> list[dict[str, object]]:
    """Group parameters by rate and decay, the trunk's deepest layers last. The rate of layer d of D
    is LAYER_DECAY ** (D + 1 - d) of the heads', as in BEiT (arXiv:2106.08254) and ViTDet. Norms
    have WEIGHT_DECAY_NORM; so have, under our backbones, biases, scales, tokens and position
    embeddings. By Detectron2's get_default_optimizer_params biases have WEIGHT_DECAY, and
    BIAS_LR_FACTOR on the rate."""
    solver, trunk = cfg.SOLVER, body.trunk
    depths: Mapping[str, int] = {}
    if solver.LAYER_DECAY != 1 and not body.frozen:
        depths = trunk.depths()
    heads = max(depths.values(), default=0) + 1  # the depth of what stands on the trunk
    spared = {
        id(p)
        for m in model.modules()
        if isinstance(m, NORM_LAYERS)
        for p in m.parameters(False)
    }
    if not is_resnet(cfg):
        spared |= {id(p) for p in model.parameters() if p.ndim <= 1}
        undecayed = trunk.undecayed()
        spared |= {id(p) for name, p in trunk.named_parameters() if name in undecayed}
    trunk_names = {id(parameter): name for name, parameter in trunk.named_parameters()}
    groups: dict[tuple[int, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            depth = depths.get(trunk_names.get(id(parameter), ""), heads)
            bias = name.endswith("bias") and solver.BIAS_LR_FACTOR != 1
            groups.setdefault((depth, bias, id(parameter) in spared), []).append(
                parameter
            )
    out: list[dict[str, object]] = []
    for depth, bias, norm in sorted(groups):
        factor = solver.LAYER_DECAY ** (heads - depth) * (
            solver.BIAS_LR_FACTOR if bias else 1
        )
        decay = solver.WEIGHT_DECAY_NORM if norm else solver.WEIGHT_DECAY
        members = groups[depth, bias, norm]
        out.append(
            {"params": members, "lr": solver.BASE_LR * factor, "weight_decay": decay}
        )
    return out


# The checkpoint that a detector starts from, and the proof that it arrived: equal maps


def read_trunk(
    checkpoint: Path | None, model_weights: str, arch: str, seed: int
) -> Checkpoint:
    """Read --checkpoint X or MODEL.WEIGHTS FILE; MODEL.WEIGHTS random is a fresh trunk of `arch`.
    Without weights it refuses: a detector trained from scratch by mistake only looks a bit low."""
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
    file = checkpoint or (Path(model_weights) if model_weights else None)
    if file is None:
        raise BadInput(
            f"no weights: give --checkpoint X, MODEL.WEIGHTS OUT.pkl or MODEL.WEIGHTS {RANDOM}"
        )
    return importing.read(file)


def check_features(
    checkpoint: Checkpoint,
    trunk: Trunk,
    engine: DetectionEngine,
    sides: tuple[int, int],
) -> float:
    """Return the largest relative difference between the maps of `trunk` and of the loaded
    detector, for images of (height, width) `sides`. BadInput above the tolerance: half of the names
    matched, or another convolution strides."""
    # The noise is what the trunk sees after normalisation; how the engine normalises is not looked
    # at here. At the size of testing, where position embeddings are resized.
    noise = torch.randn(2, 3, *sides, generator=seeding.generator(0, "feature check"))
    x = noise.to(engine.device)
    with torch.no_grad():
        own = trunk.eval().to(engine.device).stages(scaled(x, trunk))
    trunk.cpu()
    worst = 0.0
    names = ("C2", "C3", "C4", "C5") if len(own) > 1 else ("map",)
    for name, a, b in zip(names, own, engine.stages(x), strict=True):
        if a.shape != b.shape:
            shapes = f"{tuple(b.shape)}, the checkpoint's {tuple(a.shape)}"
            raise BadInput(f"{engine.name}: {name} of the detector is {shapes}")
        difference = float((a - b).abs().max() / a.abs().max().clamp(min=1e-12))
        if not difference <= TOLERANCE:  # not `>`: NaN is refused too
            raise BadInput(
                f"{engine.name}: the loaded {name} is off from {checkpoint.name}'s by "
                f"{difference:.2g} of its size; weights or stride did not arrive, nothing was trained"
            )
        worst = max(worst, difference)
    return worst
