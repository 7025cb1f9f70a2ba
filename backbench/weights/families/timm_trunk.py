"""Builds the network of a timm model and reads its features and maps; resizes position embeddings."""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.weights import readings
from backbench.weights.families.timm_model_names import (
    ACTIVATIONS,
    OPTIONS,
    OURS,
    TimmName,
    parse,
)
from backbench.weights.family import NATIVE, POSITION_RULES, refuse_other_readings
from backbench.weights.trunk import LayerOutputs, WrappedTrunk
from backbench.weights.undrawn import without_memory

# Parameters for the positions, and for tokens that are no patches
TOKENS = ("pos_embed", "cls_token", "reg_token", "mask_token")
_PYRAMID = (4, 8, 16, 32)  # the strides of C2..C5
_OFFSET = 0.1  # what the rule "+0.1" adds
TimmModule: TypeAlias = Any  # each of timm's classes has attributes of its own


@functools.cache
def registered(model: str) -> TimmModule:
    """Return the model as timm registers it, without memory, for its attributes."""
    import timm

    with without_memory():
        return timm.create_model(model, pretrained=False, num_classes=0)


def is_transformer(model: object) -> bool:
    """Return True for a plain vision transformer: one grid of tokens from the first block to the
    last."""
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    return isinstance(model, VisionTransformer | Eva)


def norm_after_pooling(model: TimmModule) -> bool:
    """Return True for a transformer whose last norm stands behind the mean of its tokens
    (`fc_norm`)."""
    norm = getattr(model, "fc_norm", nn.Identity())
    return len(list(norm.parameters())) > 0


def default_reading(model: str) -> str:
    """Return the reading of timm's own head."""
    known = registered(model)
    if not is_transformer(known) or norm_after_pooling(known):
        return readings.POOLED
    if known.global_pool == readings.MAP:
        return readings.MAP
    if known.cls_token is None:
        return readings.POOLED
    return "mean" if known.global_pool == "avg" else "cls"


def differences(name: TimmName, options: Mapping[str, str]) -> dict[str, str]:
    """Return the heads, eps and activation of a configuration that differ from the model's."""
    if not options.keys() & {"num_heads", "eps", "act_layer"}:
        return {}
    with without_memory():
        model = create(name)
    blocks = getattr(model, "blocks", None)
    out = {}
    # 1. Heads of attention
    if "num_heads" in options and blocks is not None:
        own_heads = blocks[0].attn.num_heads
        if int(options["num_heads"]) != own_heads:
            out["num_heads"] = options["num_heads"]
    # 2. The norms' eps, if larger: the Hub's conversions wrote their default, 1e-12, for models that
    # were trained with 1e-6
    norm = getattr(model, "norm", None)
    if "eps" in options and isinstance(norm, nn.LayerNorm):
        eps = options["eps"]
        if float(eps) > 1.5 * norm.eps:
            out["eps"] = eps
    # 3. The activation. A gated MLP has its own, whatever the configuration says
    activation = options.get("act_layer")
    if activation:
        if blocks is None and hasattr(model, "stages"):
            blocks = model.stages[0].blocks
        mlp: TimmModule = blocks[0].mlp if blocks is not None else None
        is_plain = type(mlp).__name__ == "Mlp"
        if is_plain and type(mlp.act).__name__ != ACTIVATIONS[activation]:
            out["act_layer"] = activation
    return out


# What timm's constructors raise for options that do not fit together
_CONSTRUCTOR_ERRORS = (
    TypeError,
    ValueError,
    AssertionError,
    RuntimeError,
    KeyError,
    IndexError,
)


def create(name: TimmName, classes: int = 0) -> TimmModule:
    """Build timm's module, freshly drawn. BadInput where the model does not take an option."""
    import timm

    try:
        model = timm.create_model(
            name.model, pretrained=False, num_classes=classes, **_keywords(name)
        )
    except _CONSTRUCTOR_ERRORS as error:
        said = " ".join(str(error).split())[:120]
        raise BadInput(f"{str(name)[:120]} cannot be built: {said}") from None
    if "pos" in name.options:
        from timm.models.vision_transformer import VisionTransformer

        if type(model) is not VisionTransformer or model.pos_embed is None:
            raise BadInput(
                f"{name}: it has no position embeddings to resize; leave out pos"
            )
        # timm builds the model, and only the method that resizes its positions becomes another.
        ruled: TimmModule = model
        ruled.__class__ = _with_rule()
        ruled.position_rule = name.options["pos"]
    return model


def _keywords(name: TimmName) -> dict[str, Any]:
    """Return the arguments with which timm builds this model."""
    known = registered(name.model)
    keywords: dict[str, Any] = {}
    for key, text in name.options.items():
        if key not in OURS:
            keywords[key] = OPTIONS[key](text)
    if is_transformer(known):
        # The model takes any grid; `refuse_size` refuses those for which no rule was named.
        keywords["dynamic_img_size"] = True
        # With `token` the last norm stands before the pooling, where every reading finds it.
        by_tokens = known.global_pool != readings.MAP and not norm_after_pooling(known)
        if known.cls_token is not None and by_tokens:
            keywords["global_pool"] = "token"
    if "eps" in name.options:
        eps = float(name.options["eps"])
        if is_transformer(known):
            keywords["norm_layer"] = functools.partial(nn.LayerNorm, eps=eps)
        else:
            keywords["norm_eps"] = eps
    return keywords


def call(name: TimmName) -> str:
    """Return the call that builds this model with timm itself, as text."""
    words = [f"'{name.model}'", "num_classes=0"]
    for key, value in _keywords(name).items():
        if key == "norm_layer":
            words.append(f"norm_layer=partial(nn.LayerNorm, eps={name.options['eps']})")
        elif key != "dynamic_img_size":
            words.append(f"{key}={value!r}")
    return f"timm.create_model({', '.join(words)})"


@functools.cache
def _with_rule() -> type[nn.Module]:
    """Return the class of a vision transformer whose positions follow `position_rule`.

    It is made in a function so that timm is imported only when it is needed.
    """
    from timm.models.vision_transformer import VisionTransformer

    class RuledTransformer(VisionTransformer):
        position_rule: str

        def _pos_embed(self, x: Tensor) -> Tensor:
            """Return all tokens (N, prefix + h * w, D) with positions, of patch tokens (N, h, w, D)."""
            n, h, w, _ = x.shape
            both = (self.cls_token, self.reg_token)
            prefix = [token.expand(n, -1, -1) for token in both if token is not None]
            # Some models have positions for the prefix tokens, too, some only for the patches.
            without_patch = 0 if self.no_embed_class else self.num_prefix_tokens
            assert self.pos_embed is not None
            positions = resized(
                self.pos_embed, (h, w), prefix=without_patch, rule=self.position_rule
            )
            patches = x.flatten(1, 2)
            if self.no_embed_class:
                return self.pos_drop(torch.cat([*prefix, patches + positions], dim=1))
            return self.pos_drop(torch.cat([*prefix, patches], dim=1) + positions)

    return RuledTransformer


def resized(
    embedding: Tensor, grid: tuple[int, int], *, prefix: int, rule: str
) -> Tensor:
    """Resize position embeddings to another grid of patches, by the rule of those who trained them:
    (1, prefix + s * s, D) of a square grid -> (1, prefix + h * w, D) for `grid` = (h, w).

    The first `prefix` embeddings belong to class and register tokens and stay as they are. All rules
    are bicubic. They differ in where the samples lie and in antialiasing; features of a ViT at 224
    instead of 518 pixels move by up to 2% from one rule to another:

        +0.1   the scale is (n + 0.1) / M, no antialiasing: DINO, iBOT, DINOv2 without registers
               (facebookresearch/dinov2: dinov2/models/vision_transformer.py, interpolate_pos_encoding)
        aa     to the size, antialiased: DINOv2 with registers, timm
        size   to the size, no antialiasing: MAE (facebookresearch/mae: util/pos_embed.py), Detectron2
    """
    first, patches = embedding[:, :prefix], embedding[:, prefix:]
    side = round(patches.shape[1] ** 0.5)
    if grid == (side, side):
        return embedding
    # 1. From a row to a map, (1, s * s, D) -> (1, D, s, s), in float32: bfloat16 is too coarse for
    # the weights of the interpolation
    maps = patches.float().reshape(1, side, side, -1).permute(0, 3, 1, 2)
    # 2. From s x s to h x w
    if rule == "+0.1":
        scale = tuple((n + _OFFSET) / side for n in grid)
        maps = F.interpolate(maps, scale_factor=scale, mode="bicubic", antialias=False)
        assert maps.shape[-2:] == grid, f"{maps.shape[-2:]} instead of {grid}"
    else:
        maps = F.interpolate(maps, size=grid, mode="bicubic", antialias=rule == "aa")
    # 3. From a map to a row, (1, D, h, w) -> (1, h * w, D)
    rows = maps.permute(0, 2, 3, 1).reshape(1, grid[0] * grid[1], -1)
    return torch.cat([first, rows.to(embedding.dtype)], dim=1)


class TimmTrunk(WrappedTrunk):
    """A timm model without its classifier."""

    def __init__(self, arch: str, reading: str) -> None:
        name = parse(arch)
        super().__init__(create(name))
        self.arch = str(name)
        self.stem = NATIVE
        self.reading = reading
        self.transformer = is_transformer(self.model)
        trained = self.model.pretrained_cfg.get("input_size")
        if trained is not None:
            self.trained_size = int(name.options.get("img_size", trained[-1]))
        if self.transformer:
            self._describe_transformer(name)
        else:
            self._describe_pyramid(name)

    def _describe_transformer(self, name: TimmName) -> None:
        """Set the trunk's facts for a plain vision transformer. BadInput for a reading it lacks."""
        model = self.model
        width = model.embed_dim
        # Of a hybrid, this ratio includes the convolutions before the patches.
        patch = model.patch_embed.feat_ratio(as_scalar=True)
        self.strides = (patch,)
        self.widths = (width,)
        self.divisor = patch
        # Position embeddings fix the size, unless `pos` names a rule to resize them by.
        if model.pos_embed is not None and "pos" not in name.options:
            self.size = model.patch_embed.img_size[0]
        # 1. The model's own pooling, which is attention pooling where it has any
        self.read = None
        if self.reading in (readings.POOLED, readings.MAP):
            own = readings.POOLED if model.attn_pool is None else readings.MAP
            if self.reading != own:
                raise BadInput(f"{self.arch} has no reading '{self.reading}'")
            self.feature_dim = width
            return
        # 2. A reading of tokens after the last norm
        if norm_after_pooling(model):
            raise BadInput(
                f"{self.arch} has no reading '{self.reading}': its last norm follows the pooling;"
                f" take '{readings.POOLED}'"
            )
        self.read = readings.tokens(self.reading)
        if self.read.layers and model.cls_token is None:
            raise BadInput(
                f"{self.arch} has no class token to read by '{self.reading}'"
            )
        if self.read.layers > len(model.blocks):
            raise BadInput(
                f"{self.arch}: {len(model.blocks)} layers, '{self.reading}' reads more"
            )
        # One width for each class token, and one for the mean of the patches
        parts = self.read.layers
        if self.read.mean:
            parts += 1
        self.feature_dim = width * parts

    def _describe_pyramid(self, name: TimmName) -> None:
        """Set the trunk's facts for any other model of timm's."""
        model = self.model
        refuse_other_readings(self.arch, self.reading)
        self.feature_dim = (
            getattr(model, "head_hidden_size", None) or model.num_features
        )
        self.memory_format = torch.channels_last
        if model.pretrained_cfg.get("fixed_input_size"):
            # Its windows are cut for one size.
            default = model.pretrained_cfg["input_size"][-1]
            self.size = int(name.options.get("img_size", default))
        about = getattr(model, "feature_info", None)
        if about is None or not hasattr(model, "forward_intermediates"):
            return
        # timm keeps a list of rows, or an object around one.
        rows = about.info if hasattr(about, "info") else list(about)
        # Of several maps with the same stride the last one counts.
        last = {row["reduction"]: i for i, row in enumerate(rows)}
        self.strides = tuple(stride for stride in _PYRAMID if stride in last)
        self.indices = [last[stride] for stride in self.strides]
        self.widths = tuple(rows[i]["num_chs"] for i in self.indices)
        # Maps of one stride are those of blocks, as in BEiT, and each is a layer
        is_flat = len(rows) > 1 and len(last) == 1
        self.layer_indices = None if is_flat else self.indices

    def forward(self, x: Tensor) -> Tensor:
        self.refuse_size(*x.shape[-2:])
        if not self.transformer or self.read is None:
            return self.model.forward_head(
                self.model.forward_features(x), pre_logits=True
            )
        last, prefixes = self._tokens(x, self.read.layers)
        return self._joined(last, prefixes, self.read.mean)

    def _joined(self, last: Tensor, prefixes: Sequence[Tensor], mean: bool) -> Tensor:
        """Join the class tokens of some layers, and the mean of the last layer's patches."""
        # The class token is the first of the prefix tokens.
        parts = [prefix[:, 0] for prefix in prefixes]
        if mean:
            parts.append(last[:, self.model.num_prefix_tokens :].mean(dim=1))
        return torch.cat(parts, dim=1)

    def layers(self, x: Tensor) -> LayerOutputs:
        self.refuse_size(*x.shape[-2:])
        if not self.transformer:
            last, maps = self.model.forward_intermediates(x, indices=self.layer_indices)
            feature = self.model.forward_head(last, pre_logits=True)
            what = "stage" if self.layer_indices else "block"
            return LayerOutputs(feature, maps, [], what)
        # 1. All blocks, each after the last norm, as DINO and DINOv2 read them
        last, found = self.model.forward_intermediates(
            x, return_prefix_tokens=True, norm=True
        )
        maps, prefixes = found, []
        if self.model.num_prefix_tokens:
            maps = [patches for patches, _ in found]
            prefixes = [prefix for _, prefix in found]
        # 2. The feature, as `forward` makes it
        if self.read is None:
            feature = self.model.forward_head(last, pre_logits=True)
        else:
            of_last = prefixes[len(prefixes) - self.read.layers :]
            feature = self._joined(last, of_last, self.read.mean)
        class_tokens = []
        if self.model.cls_token is not None:
            class_tokens = [prefix[:, 0] for prefix in prefixes]
        return LayerOutputs(feature, maps, class_tokens, "block")

    def _tokens(self, x: Tensor, layers: int) -> tuple[Tensor, list[Tensor]]:
        """Return the last layer's tokens (N, T, D), and for each of the last `layers` layers tokens
        that begin with the prefix tokens; all after the norm."""
        if layers <= 1:
            tokens = self.model.forward_features(x)
            return tokens, [tokens] * layers
        pairs = self.model.forward_intermediates(
            x,
            indices=layers,
            intermediates_only=True,
            return_prefix_tokens=True,
            norm=True,
            output_fmt="NLC",
        )
        patches, prefix = pairs[-1]
        return torch.cat([prefix, patches], dim=1), [prefix for _, prefix in pairs]

    def stages(self, x: Tensor) -> list[Tensor]:
        self.refuse_size(*x.shape[-2:])
        if not self.transformer:
            if not self.strides:
                raise BadInput(f"{self.arch} gives no maps: detection cannot use it")
            return self.model.forward_intermediates(
                x, indices=self.indices, intermediates_only=True
            )
        h, w = (side // self.divisor for side in x.shape[-2:])
        patches = self.model.forward_features(x)[:, self.model.num_prefix_tokens :]
        return [patches.transpose(1, 2).reshape(len(x), -1, h, w)]

    def depths(self) -> dict[str, int]:
        from timm.models._manipulate import group_parameters

        groups = group_parameters(
            self.model, self.model.group_matcher(coarse=False), reverse=True
        )
        # Tokens and positions belong to the stem. timm before 1.0.29 puts register tokens behind the
        # last block, in a layer of their own.
        depths = {}
        for name, depth in groups.items():
            depths[f"model.{name}"] = 0 if name in TOKENS else depth
        return depths

    def undecayed(self) -> set[str]:
        undecayed = {*TOKENS, "latent"}
        if hasattr(self.model, "no_weight_decay"):
            undecayed.update(self.model.no_weight_decay())
        out = super().undecayed()
        for name, _ in self.model.named_parameters():
            last_part = name.split(".")[-1]
            if name in undecayed or last_part in undecayed or "gamma" in last_part:
                out.add(f"model.{name}")
        return out

    def other_sizes(self) -> str:
        if not self.transformer:
            return f"use a protocol of that size, or name the trunk with img_size ({self.arch},img_size=N)"
        return (
            f"read it at its own size, or as {self.arch},pos=RULE (a file: `backbench import FILE"
            f" --arch {self.arch},pos=RULE`), which resizes its position embeddings (RULE is"
            f" {' or '.join(POSITION_RULES)})"
        )


def options_of(module: nn.Module, trunk: TimmTrunk) -> dict[str, str]:
    """Return the size, patch, depth and heads of a module of timm's that differ from the trunk's."""
    options = {}
    ours = _shape_of(trunk.model)
    for key, value in _shape_of(module).items():
        if key in ours and value != ours[key]:
            options[key] = str(value)
    return options


def _shape_of(model: TimmModule) -> dict[str, int]:
    """Return the options of timm's that a network's modules tell, where they tell them."""
    shape = {}
    patches = getattr(model, "patch_embed", None)
    for key in ("img_size", "patch_size"):
        sides = getattr(patches, key, None)
        # No option says two sides
        if isinstance(sides, tuple) and len(set(sides)) == 1:
            shape[key] = int(sides[0])
    if is_transformer(model):
        shape["depth"] = len(model.blocks)
        shape["embed_dim"] = int(model.embed_dim)
        shape["num_heads"] = int(model.blocks[0].attn.num_heads)
    return shape


def refuse_other_module(module: nn.Module, trunk: TimmTrunk, side: int) -> None:
    """Raise BadInput if the module has other features than the trunk with the module's weights.

    The weights are not enough: heads or an activation change the features and leave no tensor.
    """
    # 1. The same weights
    state = module.state_dict()
    names = trunk.state_dict().keys()
    try:
        trunk.load_state_dict(
            {name: state[name] for name in names if name in state}, strict=True
        )
    except RuntimeError:
        raise _other_module(trunk, "tensors") from None
    # 2. The features of one random image, in the trunk's precision
    x = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    model: TimmModule = module
    if any(each.dtype != torch.float32 for each in module.parameters()):
        model = copy.deepcopy(module).float()
    device = next(model.parameters()).device
    training = model.training
    with torch.no_grad():
        theirs = model.eval().forward_features(x.to(device)).cpu()
        ours = trunk.eval().model.forward_features(x)
    model.train(training)
    same = theirs.shape == ours.shape
    if not same or not torch.allclose(theirs, ours, rtol=1e-3, atol=1e-4):
        raise _other_module(trunk, "features")


def _other_module(trunk: TimmTrunk, what: str) -> BadInput:
    return BadInput(
        f"this module is not timm's {parse(trunk.arch).model} as it is registered: its {what}"
        " differ; give it as backbench.ModuleTrunk"
    )
