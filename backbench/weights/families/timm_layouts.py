"""How the tensors of vision transformers and ConvNeXts are called by those who publish them.

A layout is a table from timm's names to those of a file. What stands there for one of timm's
tensors: `a|b` is the first of these that the file has, `{q,k,v}` three tensors one below the other,
`x[0:1/3]` the first third of one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from backbench.weights.family import Shape


def _as_it_is(shape: Shape) -> Shape:
    return shape


def _without_batch(shape: Shape) -> Shape:
    """(1, n, D) -> (n, D)"""
    return shape[1:]


def _vector(shape: Shape) -> Shape:
    """(1, 1, D) -> (D,)"""
    return shape[-1:]


def _linear(shape: Shape) -> Shape:
    """A convolution of 1 x 1 as a linear layer: (out, in, 1, 1) -> (out, in)"""
    return shape[:2]


def _per_channel(shape: Shape) -> Shape:
    """(C,) -> (1, 1, 1, C)"""
    return (1, 1, 1, *shape)


@dataclass(frozen=True)
class Rule:
    """`ours` is a regex of timm's names; `shape` gives the file's shape from timm's."""

    ours: str
    theirs: str
    shape: Callable[[Shape], Shape] = _as_it_is


@dataclass(frozen=True)
class Piece:
    """What of a file's tensor makes a part of one of timm's: rows `start` to `stop` of `parts`
    equal ones."""

    key: str
    shape: Shape  # of the file's tensor
    start: int = 0
    stop: int = 1
    parts: int = 1

    def taken(self, tensor: Tensor) -> Tensor:
        rows = tensor.shape[0] // self.parts
        return tensor[self.start * rows : self.stop * rows] if self.parts > 1 else tensor


@dataclass(frozen=True)
class Layout:
    """`blocks` is what stands before a block's number, `outside` tensors of no block: half of them
    must be there, or it is a text tower or a decoder."""

    name: str
    blocks: str
    outside: tuple[str, ...]
    rules: tuple[Rule, ...] = ()
    # DINOv2's and DINOv3's large models: blocks.CHUNK.NUMBER, where the number counts through
    chunked: bool = False

    def local(self, name: str) -> str:
        """A name of the file without the number of its chunk."""
        if not self.chunked:
            return name
        return re.sub(rf"^{self.blocks}\.\d+\.(\d+\.)", rf"{self.blocks}.\1", name)


_BLOCK = r"blocks\.(\d+)\."
_STAGE = r"stages\.(\d)\.blocks\.(\d+)\."

VIT = Layout(
    "timm's",
    "blocks",
    ("cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias", "norm.weight"),
    (
        Rule("reg_token", "reg_token|register_tokens|storage_tokens"),
        Rule(_BLOCK + r"gamma_([12])", r"blocks.\1.gamma_\2|blocks.\1.ls\2.gamma"),
        # DINOv2's gated MLP has one matrix for gate and value, DINOv3's two
        Rule(_BLOCK + r"mlp\.fc1\.(\w+)", r"blocks.\1.mlp.fc1.\2|blocks.\1.mlp.w12.\2"),
        Rule(_BLOCK + r"mlp\.fc2\.(\w+)", r"blocks.\1.mlp.fc2.\2|blocks.\1.mlp.w3.\2"),
        Rule(_BLOCK + r"mlp\.fc1_g\.(\w+)", r"blocks.\1.mlp.fc1_g.\2|blocks.\1.mlp.w1.\2"),
        Rule(_BLOCK + r"mlp\.fc1_x\.(\w+)", r"blocks.\1.mlp.fc1_x.\2|blocks.\1.mlp.w2.\2"),
        # DINOv3 keeps one bias and masks its keys' third
        Rule(_BLOCK + r"attn\.q_bias", r"blocks.\1.attn.q_bias|blocks.\1.attn.qkv.bias[0:1/3]"),
        Rule(_BLOCK + r"attn\.v_bias", r"blocks.\1.attn.v_bias|blocks.\1.attn.qkv.bias[2:3/3]"),
    ),
    chunked=True,
)

# transformers: models/{vit,vit_mae,dinov2,dinov2_with_registers}/modeling_*.py, as it writes them
HUB_VIT = Layout(
    "hub vit",
    r"encoder\.layer",
    (
        "embeddings.cls_token",
        "embeddings.position_embeddings",
        "embeddings.patch_embeddings.projection.weight",
        "embeddings.patch_embeddings.projection.bias",
        "layernorm.weight",
    ),
    (
        Rule("cls_token", "embeddings.cls_token"),
        Rule("reg_token", "embeddings.register_tokens"),
        Rule("pos_embed", "embeddings.position_embeddings"),
        Rule(r"patch_embed\.proj\.(\w+)", r"embeddings.patch_embeddings.projection.\1"),
        Rule(
            _BLOCK + r"attn\.qkv\.(\w+)",
            r"encoder.layer.\1.attention.attention.{query,key,value}.\2",
        ),
        Rule(_BLOCK + r"attn\.proj\.(\w+)", r"encoder.layer.\1.attention.output.dense.\2"),
        Rule(
            _BLOCK + r"norm1\.(\w+)",
            r"encoder.layer.\1.norm1.\2|encoder.layer.\1.layernorm_before.\2",
        ),
        Rule(
            _BLOCK + r"norm2\.(\w+)",
            r"encoder.layer.\1.norm2.\2|encoder.layer.\1.layernorm_after.\2",
        ),
        Rule(
            _BLOCK + r"mlp\.fc1\.(\w+)",
            r"encoder.layer.\1.mlp.fc1.\2|encoder.layer.\1.mlp.weights_in.\2"
            r"|encoder.layer.\1.intermediate.dense.\2",
        ),
        Rule(
            _BLOCK + r"mlp\.fc2\.(\w+)",
            r"encoder.layer.\1.mlp.fc2.\2|encoder.layer.\1.mlp.weights_out.\2"
            r"|encoder.layer.\1.output.dense.\2",
        ),
        Rule(_BLOCK + r"ls([12])\.gamma", r"encoder.layer.\1.layer_scale\2.lambda1"),
        Rule(r"norm\.(\w+)", r"layernorm.\1"),
    ),
)

# transformers: models/dinov3_vit/modeling_dinov3_vit.py; the keys have no bias
HUB_DINOV3 = Layout(
    "hub dinov3",
    "layer",
    (
        "embeddings.cls_token",
        "embeddings.register_tokens",
        "embeddings.patch_embeddings.weight",
        "embeddings.patch_embeddings.bias",
        "norm.weight",
    ),
    (
        Rule("cls_token", "embeddings.cls_token"),
        Rule("reg_token", "embeddings.register_tokens"),
        Rule(r"patch_embed\.proj\.(\w+)", r"embeddings.patch_embeddings.\1"),
        Rule(_BLOCK + r"attn\.([qv])_bias", r"layer.\1.attention.\2_proj.bias"),
        Rule(_BLOCK + r"attn\.qkv\.weight", r"layer.\1.attention.{q,k,v}_proj.weight"),
        Rule(_BLOCK + r"attn\.proj\.(\w+)", r"layer.\1.attention.o_proj.\2"),
        Rule(_BLOCK + r"norm([12])\.(\w+)", r"layer.\1.norm\2.\3"),
        Rule(_BLOCK + r"mlp\.fc1\.(\w+)", r"layer.\1.mlp.up_proj.\2"),
        Rule(_BLOCK + r"mlp\.fc1_x\.(\w+)", r"layer.\1.mlp.up_proj.\2"),
        Rule(_BLOCK + r"mlp\.fc1_g\.(\w+)", r"layer.\1.mlp.gate_proj.\2"),
        Rule(_BLOCK + r"mlp\.fc2\.(\w+)", r"layer.\1.mlp.down_proj.\2"),
        Rule(_BLOCK + r"gamma_([12])", r"layer.\1.layer_scale\2.lambda1"),
    ),
)

# transformers: models/{clip,siglip}/modeling_*.py
HUB_CLIP = Layout(
    "hub clip",
    r"encoder\.layers",
    (
        "embeddings.patch_embedding.weight",
        "embeddings.position_embedding.weight",
        "post_layernorm.weight",
        "post_layernorm.bias",
    ),
    (
        Rule("cls_token", "embeddings.class_embedding", _vector),
        Rule("pos_embed", "embeddings.position_embedding.weight", _without_batch),
        Rule(r"patch_embed\.proj\.(\w+)", r"embeddings.patch_embedding.\1"),
        Rule(r"norm_pre\.(\w+)", r"pre_layrnorm.\1"),  # spelled so
        Rule(_BLOCK + r"attn\.qkv\.(\w+)", r"encoder.layers.\1.self_attn.{q,k,v}_proj.\2"),
        Rule(_BLOCK + r"attn\.proj\.(\w+)", r"encoder.layers.\1.self_attn.out_proj.\2"),
        Rule(_BLOCK + r"norm([12])\.(\w+)", r"encoder.layers.\1.layer_norm\2.\3"),
        Rule(_BLOCK + r"mlp\.(fc[12])\.(\w+)", r"encoder.layers.\1.mlp.\2.\3"),
        Rule(r"norm\.(\w+)", r"post_layernorm.\1"),
        Rule(r"attn_pool\.latent", "head.probe"),
        Rule(r"attn_pool\.q\.(\w+)", r"head.attention.in_proj_\1[0:1/3]"),
        Rule(r"attn_pool\.kv\.(\w+)", r"head.attention.in_proj_\1[1:3/3]"),
        Rule(r"attn_pool\.proj\.(\w+)", r"head.attention.out_proj.\1"),
        Rule(r"attn_pool\.norm\.(\w+)", r"head.layernorm.\1"),
        Rule(r"attn_pool\.mlp\.(fc[12])\.(\w+)", r"head.mlp.\1.\2"),
    ),
)

# openai/CLIP: clip/model.py (VisionTransformer); mlfoundations/open_clip: src/open_clip/transformer.py
CLIP = Layout(
    "clip",
    r"transformer\.resblocks",
    ("class_embedding", "conv1.weight", "ln_pre.weight", "ln_pre.bias", "ln_post.weight"),
    (
        Rule("cls_token", "class_embedding", _vector),
        Rule("pos_embed", "positional_embedding", _without_batch),
        Rule(r"patch_embed\.proj\.(\w+)", r"conv1.\1"),
        Rule(r"norm_pre\.(\w+)", r"ln_pre.\1"),
        Rule(_BLOCK + r"attn\.qkv\.(\w+)", r"transformer.resblocks.\1.attn.in_proj_\2"),
        Rule(_BLOCK + r"attn\.proj\.(\w+)", r"transformer.resblocks.\1.attn.out_proj.\2"),
        Rule(_BLOCK + r"norm([12])\.(\w+)", r"transformer.resblocks.\1.ln_\2.\3"),
        Rule(_BLOCK + r"mlp\.fc1\.(\w+)", r"transformer.resblocks.\1.mlp.c_fc.\2"),
        Rule(_BLOCK + r"mlp\.fc2\.(\w+)", r"transformer.resblocks.\1.mlp.c_proj.\2"),
        Rule(_BLOCK + r"ls([12])\.gamma", r"transformer.resblocks.\1.ls_\2.gamma"),
        Rule(r"norm\.(\w+)", r"ln_post.\1"),
    ),
)

TIMM_CONVNEXT = Layout(
    "timm's convnext",
    "stages",
    ("stem.0.weight", "stem.0.bias", "stem.1.weight", "stem.1.bias"),
)

# facebookresearch/ConvNeXt: models/convnext.py; ConvNeXt-V2: models/convnextv2.py
CONVNEXT = Layout(
    "convnext",
    "stages",
    (
        "downsample_layers.0.0.weight",
        "downsample_layers.0.0.bias",
        "downsample_layers.0.1.weight",
        "downsample_layers.1.0.weight",
    ),
    (
        Rule(r"stem\.([01])\.(\w+)", r"downsample_layers.0.\1.\2"),
        Rule(r"stages\.(\d)\.downsample\.([01])\.(\w+)", r"downsample_layers.\1.\2.\3"),
        Rule(_STAGE + r"conv_dw\.(\w+)", r"stages.\1.\2.dwconv.\3"),
        Rule(_STAGE + r"norm\.(\w+)", r"stages.\1.\2.norm.\3"),
        Rule(_STAGE + r"mlp\.fc([12])\.(\w+)", r"stages.\1.\2.pwconv\3.\4", _linear),
        Rule(_STAGE + r"gamma", r"stages.\1.\2.gamma"),
        Rule(_STAGE + r"mlp\.grn\.weight", r"stages.\1.\2.grn.gamma", _per_channel),
        Rule(_STAGE + r"mlp\.grn\.bias", r"stages.\1.\2.grn.beta", _per_channel),
        Rule(r"head\.norm\.(\w+)", r"norm.\1"),
    ),
)

# transformers: models/{convnext,convnextv2}/modeling_*.py
HUB_CONVNEXT = Layout(
    "hub convnext",
    r"encoder\.stages",
    (
        "embeddings.patch_embeddings.weight",
        "embeddings.patch_embeddings.bias",
        "embeddings.layernorm.weight",
        "embeddings.layernorm.bias",
    ),
    (
        Rule(r"stem\.0\.(\w+)", r"embeddings.patch_embeddings.\1"),
        Rule(r"stem\.1\.(\w+)", r"embeddings.layernorm.\1"),
        Rule(
            r"stages\.(\d)\.downsample\.([01])\.(\w+)",
            r"encoder.stages.\1.downsampling_layer.\2.\3",
        ),
        Rule(_STAGE + r"conv_dw\.(\w+)", r"encoder.stages.\1.layers.\2.dwconv.\3"),
        Rule(_STAGE + r"norm\.(\w+)", r"encoder.stages.\1.layers.\2.layernorm.\3"),
        Rule(_STAGE + r"mlp\.fc([12])\.(\w+)", r"encoder.stages.\1.layers.\2.pwconv\3.\4", _linear),
        Rule(_STAGE + r"gamma", r"encoder.stages.\1.layers.\2.layer_scale_parameter"),
        Rule(_STAGE + r"mlp\.grn\.(\w+)", r"encoder.stages.\1.layers.\2.grn.\3", _per_channel),
        Rule(r"head\.norm\.(\w+)", r"layernorm.\1"),
    ),
)

# transformers: models/dinov3_convnext/modeling_dinov3_convnext.py
HUB_DINOV3_CONVNEXT = Layout(
    "hub dinov3 convnext",
    "stages",
    (
        "stages.0.downsample_layers.0.weight",
        "stages.0.downsample_layers.1.weight",
        "layer_norm.weight",
        "layer_norm.bias",
    ),
    (
        Rule(r"stem\.([01])\.(\w+)", r"stages.0.downsample_layers.\1.\2"),
        Rule(r"stages\.(\d)\.downsample\.([01])\.(\w+)", r"stages.\1.downsample_layers.\2.\3"),
        Rule(_STAGE + r"conv_dw\.(\w+)", r"stages.\1.layers.\2.depthwise_conv.\3"),
        Rule(_STAGE + r"norm\.(\w+)", r"stages.\1.layers.\2.layer_norm.\3"),
        Rule(_STAGE + r"mlp\.fc([12])\.(\w+)", r"stages.\1.layers.\2.pointwise_conv\3.\4", _linear),
        Rule(_STAGE + r"gamma", r"stages.\1.layers.\2.gamma"),
        Rule(r"head\.norm\.(\w+)", r"layer_norm.\1"),
    ),
)

LAYOUTS = (
    VIT,
    HUB_VIT,
    HUB_DINOV3,
    HUB_CLIP,
    CLIP,
    TIMM_CONVNEXT,
    CONVNEXT,
    HUB_CONVNEXT,
    HUB_DINOV3_CONVNEXT,
)


# --- a layout's names of one model ---


def pieces(
    layout: Layout, tensors: Mapping[str, Tensor], there: Mapping[str, object]
) -> dict[str, list[Piece]]:
    """For each of timm's tensors (`tensors`: name -> shape) what a file with the names `there` has
    of it."""
    habits: dict[Rule, Counter[int]] = {}  # which of the alternatives this file uses
    told: dict[str, tuple[Rule | None, list[str]]] = {}
    for ours in tensors:
        rule, theirs = _theirs(layout, ours)
        told[ours] = rule, theirs
        for i, names in enumerate(theirs):
            if rule is not None and all(key in there for key in _keys(names)):
                habits.setdefault(rule, Counter())[i] += 1
    out = {}
    for ours, (rule, theirs) in told.items():
        # What is missing is called as its like in the other blocks
        usual = habits[rule].most_common(1)[0][0] if rule in habits else 0
        shape = tuple(tensors[ours].shape)
        wanted = rule.shape(shape) if rule is not None else shape
        out[ours] = _pieces(theirs[usual], wanted)
    return out


def _theirs(layout: Layout, ours: str) -> tuple[Rule | None, list[str]]:
    for rule in layout.rules:
        found = re.fullmatch(rule.ours, ours)
        if found is not None:
            return rule, [found.expand(each) for each in rule.theirs.split("|")]
    return None, [ours]


_BRACE = re.compile(r"\{([\w,]+)\}")
_PART = re.compile(r"(.*)\[(\d):(\d)/(\d)\]")


def _keys(text: str) -> list[str]:
    """'a.{q,k}.b' -> ['a.q.b', 'a.k.b'], and 'a[0:1/3]' -> ['a']"""
    part = _PART.fullmatch(text)
    if part is not None:
        return [part[1]]
    brace = _BRACE.search(text)
    if brace is None:
        return [text]
    return [text[: brace.start()] + word + text[brace.end() :] for word in brace[1].split(",")]


def _pieces(text: str, shape: Shape) -> list[Piece]:
    part = _PART.fullmatch(text)
    if part is not None:
        start, stop, parts = int(part[2]), int(part[3]), int(part[4])
        whole = (shape[0] * parts // (stop - start), *shape[1:])
        return [Piece(part[1], whole, start, stop, parts)]
    keys = _keys(text)
    return [Piece(key, (shape[0] // len(keys), *shape[1:]) if shape else ()) for key in keys]
