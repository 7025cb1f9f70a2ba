"""The network of a timm model: its features, maps, and position embeddings."""

import functools
from collections.abc import Mapping
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
from backbench.weights.family import POSITION_RULES, refuse_other_readings
from backbench.weights.trunk import WrappedTrunk

TOKENS = ("pos_embed", "cls_token", "reg_token", "mask_token")  # beside the patches
_PYRAMID = (4, 8, 16, 32)  # the strides of C2..C5
_OFFSET = 0.1  # of the rule "+0.1"
TimmModule: TypeAlias = Any  # each of timm's classes has attributes of its own


@functools.cache
def registered(model: str) -> TimmModule:
    """The model as timm registers it, without memory, for its attributes."""
    import timm

    with torch.device("meta"):
        return timm.create_model(model, pretrained=False, num_classes=0)


def is_transformer(model: object) -> bool:
    """True for a plain vision transformer: one grid of tokens from the first block to the last."""
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    return isinstance(model, VisionTransformer | Eva)


def norm_after_pooling(model: TimmModule) -> bool:
    """True for a transformer whose last norm stands behind the mean of its tokens (`fc_norm`)."""
    return any(True for _ in getattr(model, "fc_norm", nn.Identity()).parameters())


def default_reading(model: str) -> str:
    """The reading of timm's own head."""
    known = registered(model)
    if not is_transformer(known) or norm_after_pooling(known):
        return readings.POOLED
    if known.global_pool == readings.MAP:
        return readings.MAP
    if known.cls_token is None:
        return readings.POOLED
    return "mean" if known.global_pool == "avg" else "cls"


def differences(name: TimmName, options: Mapping[str, str]) -> dict[str, str]:
    """Heads, eps and activation where a configuration says others than the model has. Not a smaller
    eps: the Hub's conversions took its default, 1e-12, for what was trained with 1e-6."""
    if not options.keys() & {"num_heads", "eps", "act_layer"}:
        return {}
    with torch.device("meta"):
        model = create(name)
    out = {}
    heads, eps = options.get("num_heads"), options.get("eps")
    blocks, norm = getattr(model, "blocks", None), getattr(model, "norm", None)
    if (
        heads is not None
        and blocks is not None
        and int(heads) != blocks[0].attn.num_heads
    ):
        out["num_heads"] = heads
    if (
        eps is not None
        and isinstance(norm, nn.LayerNorm)
        and float(eps) > 1.5 * norm.eps
    ):
        out["eps"] = eps
    activation = options.get("act_layer")
    if activation is not None and blocks is None and hasattr(model, "stages"):
        blocks = model.stages[0].blocks
    mlp: TimmModule = (
        blocks[0].mlp if activation is not None and blocks is not None else None
    )
    # A gated MLP has its own, whatever the configuration says
    gated = type(mlp).__name__ != "Mlp"
    if activation and not gated and type(mlp.act).__name__ != ACTIVATIONS[activation]:
        out["act_layer"] = activation
    return out


def create(name: TimmName) -> TimmModule:
    """timm's module, freshly drawn. BadInput where the model does not take an option."""
    import timm

    try:
        model = timm.create_model(
            name.model, pretrained=False, num_classes=0, **_keywords(name)
        )
    except (
        TypeError,
        ValueError,
        AssertionError,
        RuntimeError,
        KeyError,
        IndexError,
    ) as error:
        said = " ".join(str(error).split())[:120]
        raise BadInput(f"{str(name)[:120]} cannot be built: {said}") from None
    if "pos" in name.options:
        from timm.models.vision_transformer import VisionTransformer

        if type(model) is not VisionTransformer or model.pos_embed is None:
            raise BadInput(
                f"{name}: it has no position embeddings to resize; leave out pos"
            )
        ruled: TimmModule = model
        ruled.__class__ = _with_rule()
        ruled.position_rule = name.options["pos"]
    return model


def _keywords(name: TimmName) -> dict[str, Any]:
    """timm's own arguments for it."""
    known = registered(name.model)
    keywords: dict[str, Any] = {}
    for key, text in name.options.items():
        if key not in OURS:
            keywords[key] = OPTIONS[key](text)
    if is_transformer(known):
        # Any grid: our own forward refuses those that no rule was named for
        keywords["dynamic_img_size"] = True
        # With `token` the last norm stands before the pooling, where every reading finds it
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
    """How one builds it with timm itself."""
    words = [f"'{name.model}'", "num_classes=0"]
    for key, value in _keywords(name).items():
        if key == "norm_layer":
            words.append(f"norm_layer=partial(nn.LayerNorm, eps={name.options['eps']})")
        elif key != "dynamic_img_size":
            words.append(f"{key}={value!r}")
    return f"timm.create_model({', '.join(words)})"


@functools.cache
def _with_rule() -> type[nn.Module]:
    """A vision transformer whose positions follow `position_rule`; made once timm is imported."""
    from timm.models.vision_transformer import VisionTransformer

    class RuledTransformer(VisionTransformer):
        position_rule: str

        def _pos_embed(self, x: Tensor) -> Tensor:
            """Patch tokens (N, h, w, D) -> all tokens (N, prefix + h * w, D), with positions."""
            n, h, w, _ = x.shape
            both = (self.cls_token, self.reg_token)
            prefix = [token.expand(n, -1, -1) for token in both if token is not None]
            # Some embed the class token's position too, some the patches' alone
            placed = 0 if self.no_embed_class else self.num_prefix_tokens
            assert self.pos_embed is not None
            positioned = resized(
                self.pos_embed, (h, w), prefix=placed, rule=self.position_rule
            )
            patches = x.flatten(1, 2)
            if self.no_embed_class:
                return self.pos_drop(torch.cat([*prefix, patches + positioned], dim=1))
            return self.pos_drop(torch.cat([*prefix, patches], dim=1) + positioned)

    return RuledTransformer


def resized(
    embedding: Tensor, grid: tuple[int, int], *, prefix: int, rule: str
) -> Tensor:
    """Position embeddings for another grid of patches, by the rule of those who trained them:
    (1, prefix + s * s, D) of a square grid -> (1, prefix + h * w, D) for `grid` = (h, w).

    The first `prefix` embeddings belong to class and register tokens and stay as they are. Every
    rule is bicubic; they differ in where the samples lie and in what is done before (features of a
    ViT at 224 instead of 518 pixels move by up to 2% from one rule to another):

        +0.1   the scale is (n + 0.1) / M, no antialiasing: DINO, iBOT, DINOv2 without registers
               (facebookresearch/dinov2: dinov2/models/vision_transformer.py, interpolate_pos_encoding)
        aa     to the size, antialiased: DINOv2 with registers, timm
        size   to the size, no antialiasing: MAE (facebookresearch/mae: util/pos_embed.py), Detectron2
    """
    first, patches = embedding[:, :prefix], embedding[:, prefix:]
    side = round(patches.shape[1] ** 0.5)
    if grid == (side, side):
        return embedding
    # 1. (1, s * s, D) -> (1, D, s, s), in float32: weights in bf16 would lose their places
    maps = patches.float().reshape(1, side, side, -1).permute(0, 3, 1, 2)
    # 2. The new grid
    if rule == "+0.1":
        scale = tuple((n + _OFFSET) / side for n in grid)
        maps = F.interpolate(maps, scale_factor=scale, mode="bicubic", antialias=False)
        assert maps.shape[-2:] == grid, f"{maps.shape[-2:]} instead of {grid}"
    else:
        maps = F.interpolate(maps, size=grid, mode="bicubic", antialias=rule == "aa")
    # 3. Back in a row
    rows = (
        maps.permute(0, 2, 3, 1).reshape(1, grid[0] * grid[1], -1).to(embedding.dtype)
    )
    return torch.cat([first, rows], dim=1)


class TimmTrunk(WrappedTrunk):
    """A timm model without its classifier."""

    def __init__(self, arch: str, reading: str) -> None:
        name = parse(arch)
        super().__init__(create(name))
        self.arch, self.stem, self.reading = str(name), "native", reading
        self.transformer = is_transformer(self.model)
        trained = self.model.pretrained_cfg.get("input_size")
        if trained is not None:
            self.trained_size = int(name.options.get("img_size", trained[-1]))
        if self.transformer:
            self._describe_transformer(name)
        else:
            self._describe_pyramid(name)

    def _describe_transformer(self, name: TimmName) -> None:
        model, width = self.model, self.model.embed_dim
        patch = model.patch_embed.feat_ratio(
            as_scalar=True
        )  # of a hybrid: with its convolutions
        self.strides, self.widths, self.divisor = (patch,), (width,), patch
        if model.pos_embed is not None and "pos" not in name.options:
            self.size = model.patch_embed.img_size[0]
        self.read = None
        if self.reading in (readings.POOLED, readings.MAP):
            if self.reading != (
                readings.MAP if model.attn_pool is not None else readings.POOLED
            ):
                raise BadInput(f"{self.arch} has no reading '{self.reading}'")
            self.feature_dim = width
            return
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
        self.feature_dim = width * (self.read.layers + self.read.mean)

    def _describe_pyramid(self, name: TimmName) -> None:
        model = self.model
        refuse_other_readings(self.arch, self.reading)
        self.feature_dim = (
            getattr(model, "head_hidden_size", None) or model.num_features
        )
        self.memory_format = torch.channels_last
        if model.pretrained_cfg.get(
            "fixed_input_size"
        ):  # windows that are cut for one size
            self.size = int(
                name.options.get("img_size", model.pretrained_cfg["input_size"][-1])
            )
        about = getattr(model, "feature_info", None)
        if about is None or not hasattr(model, "forward_intermediates"):
            return
        # timm keeps a list of rows, or an object around one. The later of two maps of one stride counts
        rows = about.info if hasattr(about, "info") else list(about)
        last = {row["reduction"]: i for i, row in enumerate(rows)}
        self.strides = tuple(stride for stride in _PYRAMID if stride in last)
        self.indices = [last[stride] for stride in self.strides]
        self.widths = tuple(rows[i]["num_chs"] for i in self.indices)

    def forward(self, x: Tensor) -> Tensor:
        self.refuse_size(*x.shape[-2:])
        if not self.transformer or self.read is None:
            return self.model.forward_head(
                self.model.forward_features(x), pre_logits=True
            )
        last, layers = self._tokens(x, self.read.layers)
        parts = [layer[:, 0] for layer in layers]
        if self.read.mean:
            parts.append(last[:, self.model.num_prefix_tokens :].mean(dim=1))
        return torch.cat(parts, dim=1)

    def _tokens(self, x: Tensor, layers: int) -> tuple[Tensor, list[Tensor]]:
        """The last layer's tokens (N, T, D) after the norm, and the prefix tokens of the last
        `layers` layers, each after it."""
        if layers <= 1:
            tokens = self.model.forward_features(x)
            return tokens, [tokens] * layers
        how = {"return_prefix_tokens": True, "norm": True, "output_fmt": "NLC"}
        pairs = self.model.forward_intermediates(
            x, indices=layers, intermediates_only=True, **how
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
        # Tokens and positions are the stem's; timm before 1.0.29 had register tokens behind the last
        # block, and so a layer more
        return {
            f"model.{n}": 0 if n in TOKENS else depth for n, depth in groups.items()
        }

    def undecayed(self) -> set[str]:
        said = (
            self.model.no_weight_decay()
            if hasattr(self.model, "no_weight_decay")
            else set()
        )
        tokens = {*TOKENS, "latent", *said}
        out = super().undecayed()
        for name, _ in self.model.named_parameters():
            if (
                name in tokens
                or name.split(".")[-1] in tokens
                or "gamma" in name.split(".")[-1]
            ):
                out.add(f"model.{name}")
        return out

    def other_sizes(self) -> str:
        if not self.transformer:
            return f"use a protocol of that size, or name the trunk with img_size ({self.arch},img_size=N)"
        return (
            f"use a protocol of that size, or `backbench import` it as {self.arch},pos=RULE, which"
            f" resizes its position embeddings ({' or '.join(POSITION_RULES)})"
        )


def refuse_other_module(module: nn.Module, trunk: TimmTrunk, side: int) -> None:
    """Load the module's weights into the trunk; BadInput unless it then has its features: arguments
    that leave no tensor (heads, an activation) would change them unseen."""
    state, names = module.state_dict(), trunk.state_dict().keys()
    trunk.load_state_dict(
        {name: state[name] for name in names if name in state}, strict=True
    )
    x = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    device = next(module.parameters()).device
    training = module.training
    with torch.no_grad():
        model: TimmModule = module.eval()
        theirs = model.forward_features(x.to(device)).cpu()
        ours = trunk.eval().model.forward_features(x)
    module.train(training)
    if theirs.shape != ours.shape or not torch.allclose(
        theirs, ours, rtol=1e-3, atol=1e-4
    ):
        model = (
            f"timm's {parse(trunk.arch).model} as it is registered: its features differ"
        )
        raise BadInput(
            f"this module is not {model}; give it as backbench.weights.trunk.ModuleTrunk"
        )
