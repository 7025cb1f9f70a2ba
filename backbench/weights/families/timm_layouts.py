"""The names that publishers of vision transformers and ConvNeXts give their tensors.

A layout is a table from timm's names to those of a file, a line each:

    @attn.qkv.*    @attention.{q,k,v}_proj.*

`@` stands for what precedes the names within a block (`blocks.#.`, `layer.#.`), `#` for a number,
`?` for one digit or letter, `*` for a word. In the second column `a|b` is the first of these that
the file has, `{q,k,v}` three tensors one below the other, `x[0:1/3]` the first third of one. A third
column says how the file's shape differs (`SHAPES`).
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from backbench.weights.family import Shape

# timm's shape -> the file's
SHAPES: dict[str, Callable[[Shape], Shape]] = {
    "same": lambda shape: shape,
    "no_batch": lambda shape: shape[1:],  # (1, n, D) -> (n, D)
    "vector": lambda shape: shape[-1:],  # (1, 1, D) -> (D,)
    "linear": lambda shape: shape[:2],  # a 1 x 1 convolution: (out, in, 1, 1) -> (out, in)
    "last_two_one": lambda shape: (*shape, 1, 1),  # (C,) -> (C, 1, 1)
    "per_channel": lambda shape: (1, 1, 1, *shape),  # (C,) -> (1, 1, 1, C)
}
_WILDCARDS = {"#": r"(\d+)", "?": r"([\dqv])", "*": r"(\w+)"}


@dataclass(frozen=True)
class Rule:
    """One line of a layout: a regex of timm's names, and templates of the file's."""

    ours: str
    theirs: tuple[str, ...]
    shape: str = "same"


@dataclass(frozen=True)
class Piece:
    """Parts `start` to `stop` of `parts` equal ones of a file's tensor, for one of timm's."""

    key: str
    shape: Shape  # of the file's tensor
    start: int = 0
    stop: int = 1
    parts: int = 1

    def taken(self, tensor: Tensor) -> Tensor:
        if self.parts == 1:
            return tensor
        rows = tensor.shape[0] // self.parts
        return tensor[self.start * rows : self.stop * rows]


@dataclass(frozen=True)
class Layout:
    """One project's names. `blocks` is what stands before a block's number, `outside` tensors of no
    block: half of them must be there, or it is a text tower or a decoder."""

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


def _layout(name: str, blocks: str, outside: str, rules: str = "", chunked: bool = False) -> Layout:
    """A layout from its table."""
    parsed = []
    for line in rules.strip().splitlines():
        ours, theirs, *shape = line.split()
        ours, theirs = ours.replace("@", "blocks.#."), theirs.replace("@", f"{blocks}.#.")
        regex = "".join(_WILDCARDS.get(letter, re.escape(letter)) for letter in ours)
        parsed.append(Rule(regex, _templates(theirs), *shape))
    return Layout(name, re.escape(blocks), tuple(outside.split()), tuple(parsed), chunked)


def _templates(theirs: str) -> tuple[str, ...]:
    """'a.#.b|c.#.b' -> (r'a.\1.b', r'c.\1.b')"""
    out = []
    for alternative in theirs.split("|"):
        template, number = "", 0
        for letter in alternative:
            if letter in _WILDCARDS:
                number += 1
            template += f"\\{number}" if letter in _WILDCARDS else letter
        out.append(template)
    return tuple(out)


LAYOUTS = (
    # DINOv2's gated MLP has one matrix for gate and value, DINOv3's two; DINOv3 keeps one bias and
    # masks its keys' third
    _layout(
        "timm's",
        "blocks",
        "cls_token pos_embed patch_embed.proj.weight patch_embed.proj.bias norm.weight",
        """
        reg_token             reg_token|register_tokens|storage_tokens
        @gamma_?              @gamma_?|@ls?.gamma
        @mlp.fc1.*            @mlp.fc1.*|@mlp.w12.*
        @mlp.fc2.*            @mlp.fc2.*|@mlp.w3.*
        @mlp.fc1_g.*          @mlp.fc1_g.*|@mlp.w1.*
        @mlp.fc1_x.*          @mlp.fc1_x.*|@mlp.w2.*
        @attn.q_bias          @attn.q_bias|@attn.qkv.bias[0:1/3]
        @attn.v_bias          @attn.v_bias|@attn.qkv.bias[2:3/3]
        """,
        chunked=True,
    ),
    # transformers: models/{vit,vit_mae,dinov2,dinov2_with_registers}/modeling_*.py, as it writes them
    _layout(
        "hub vit",
        "encoder.layer",
        "embeddings.cls_token embeddings.position_embeddings layernorm.weight"
        " embeddings.patch_embeddings.projection.weight embeddings.patch_embeddings.projection.bias",
        """
        cls_token             embeddings.cls_token
        reg_token             embeddings.register_tokens
        pos_embed             embeddings.position_embeddings
        patch_embed.proj.*    embeddings.patch_embeddings.projection.*
        @attn.qkv.*           @attention.attention.{query,key,value}.*
        @attn.proj.*          @attention.output.dense.*
        @norm1.*              @norm1.*|@layernorm_before.*
        @norm2.*              @norm2.*|@layernorm_after.*
        @mlp.fc1.*            @mlp.fc1.*|@mlp.weights_in.*|@intermediate.dense.*
        @mlp.fc2.*            @mlp.fc2.*|@mlp.weights_out.*|@output.dense.*
        @ls?.gamma            @layer_scale?.lambda1
        norm.*                layernorm.*
        """,
    ),
    # transformers: models/dinov3_vit/modeling_dinov3_vit.py; the keys have no bias
    _layout(
        "hub dinov3",
        "layer",
        "embeddings.cls_token embeddings.register_tokens norm.weight"
        " embeddings.patch_embeddings.weight embeddings.patch_embeddings.bias",
        """
        cls_token             embeddings.cls_token
        reg_token             embeddings.register_tokens
        patch_embed.proj.*    embeddings.patch_embeddings.*
        @attn.?_bias          @attention.?_proj.bias
        @attn.qkv.weight      @attention.{q,k,v}_proj.weight
        @attn.proj.*          @attention.o_proj.*
        @norm?.*              @norm?.*
        @mlp.fc1.*            @mlp.up_proj.*
        @mlp.fc1_x.*          @mlp.up_proj.*
        @mlp.fc1_g.*          @mlp.gate_proj.*
        @mlp.fc2.*            @mlp.down_proj.*
        @gamma_?              @layer_scale?.lambda1
        """,
    ),
    # transformers: models/{clip,siglip}/modeling_*.py; pre_layrnorm is spelled so
    _layout(
        "hub clip",
        "encoder.layers",
        "embeddings.patch_embedding.weight embeddings.position_embedding.weight"
        " post_layernorm.weight post_layernorm.bias",
        """
        cls_token             embeddings.class_embedding              vector
        pos_embed             embeddings.position_embedding.weight    no_batch
        patch_embed.proj.*    embeddings.patch_embedding.*
        norm_pre.*            pre_layrnorm.*
        @attn.qkv.*           @self_attn.{q,k,v}_proj.*
        @attn.proj.*          @self_attn.out_proj.*
        @norm?.*              @layer_norm?.*
        @mlp.fc?.*            @mlp.fc?.*
        norm.*                post_layernorm.*
        attn_pool.latent      head.probe
        attn_pool.q.*         head.attention.in_proj_*[0:1/3]
        attn_pool.kv.*        head.attention.in_proj_*[1:3/3]
        attn_pool.proj.*      head.attention.out_proj.*
        attn_pool.norm.*      head.layernorm.*
        attn_pool.mlp.fc?.*   head.mlp.fc?.*
        """,
    ),
    # openai/CLIP: clip/model.py (VisionTransformer); mlfoundations/open_clip: src/open_clip/transformer.py
    _layout(
        "clip",
        "transformer.resblocks",
        "class_embedding conv1.weight ln_pre.weight ln_pre.bias ln_post.weight",
        """
        cls_token             class_embedding                         vector
        pos_embed             positional_embedding                    no_batch
        patch_embed.proj.*    conv1.*
        norm_pre.*            ln_pre.*
        @attn.qkv.*           @attn.in_proj_*
        @attn.proj.*          @attn.out_proj.*
        @norm?.*              @ln_?.*
        @mlp.fc1.*            @mlp.c_fc.*
        @mlp.fc2.*            @mlp.c_proj.*
        @ls?.gamma            @ls_?.gamma
        norm.*                ln_post.*
        """,
    ),
    _layout("timm's convnext", "stages", "stem.0.weight stem.0.bias stem.1.weight stem.1.bias"),
    # facebookresearch/ConvNeXt: models/convnext.py; ConvNeXt-V2: models/convnextv2.py
    _layout(
        "convnext",
        "stages",
        "downsample_layers.0.0.weight downsample_layers.0.0.bias"
        " downsample_layers.0.1.weight downsample_layers.1.0.weight",
        """
        stem.?.*                        downsample_layers.0.?.*
        stages.#.downsample.?.*         downsample_layers.#.?.*
        stages.#.blocks.#.conv_dw.*     stages.#.#.dwconv.*
        stages.#.blocks.#.norm.*        stages.#.#.norm.*
        stages.#.blocks.#.mlp.fc?.*     stages.#.#.pwconv?.*    linear
        stages.#.blocks.#.gamma         stages.#.#.gamma
        stages.#.blocks.#.mlp.grn.weight  stages.#.#.grn.gamma  per_channel
        stages.#.blocks.#.mlp.grn.bias  stages.#.#.grn.beta     per_channel
        head.norm.*                     norm.*
        """,
    ),
    # pytorch/vision: torchvision/models/convnext.py; stages and downsampling take turns
    _layout(
        "torchvision's convnext",
        "features",
        "features.1.0.layer_scale features.1.0.block.5.weight features.0.0.bias features.0.1.bias",
        "stem.?.*  features.0.?.*\n"
        + "\n".join(
            f"""
            stages.{n}.downsample.?.*         features.{2 * n}.?.*
            stages.{n}.blocks.#.conv_dw.*     features.{2 * n + 1}.#.block.0.*
            stages.{n}.blocks.#.norm.*        features.{2 * n + 1}.#.block.2.*
            stages.{n}.blocks.#.mlp.fc1.*     features.{2 * n + 1}.#.block.3.*   linear
            stages.{n}.blocks.#.mlp.fc2.*     features.{2 * n + 1}.#.block.5.*   linear
            stages.{n}.blocks.#.gamma         features.{2 * n + 1}.#.layer_scale  last_two_one
            """.strip()
            for n in range(4)
        )
        + "\nhead.norm.*  classifier.0.*",
    ),
    # transformers: models/{convnext,convnextv2}/modeling_*.py
    _layout(
        "hub convnext",
        "encoder.stages",
        "embeddings.patch_embeddings.weight embeddings.patch_embeddings.bias"
        " embeddings.layernorm.weight embeddings.layernorm.bias",
        """
        stem.0.*                        embeddings.patch_embeddings.*
        stem.1.*                        embeddings.layernorm.*
        stages.#.downsample.?.*         encoder.stages.#.downsampling_layer.?.*
        stages.#.blocks.#.conv_dw.*     encoder.stages.#.layers.#.dwconv.*
        stages.#.blocks.#.norm.*        encoder.stages.#.layers.#.layernorm.*
        stages.#.blocks.#.mlp.fc?.*     encoder.stages.#.layers.#.pwconv?.*  linear
        stages.#.blocks.#.gamma         encoder.stages.#.layers.#.layer_scale_parameter
        stages.#.blocks.#.mlp.grn.*     encoder.stages.#.layers.#.grn.*      per_channel
        head.norm.*                     layernorm.*
        """,
    ),
    # transformers: models/dinov3_convnext/modeling_dinov3_convnext.py
    _layout(
        "hub dinov3 convnext",
        "stages",
        "stages.0.downsample_layers.0.weight stages.0.downsample_layers.1.weight"
        " layer_norm.weight layer_norm.bias",
        """
        stem.?.*                        stages.0.downsample_layers.?.*
        stages.#.downsample.?.*         stages.#.downsample_layers.?.*
        stages.#.blocks.#.conv_dw.*     stages.#.layers.#.depthwise_conv.*
        stages.#.blocks.#.norm.*        stages.#.layers.#.layer_norm.*
        stages.#.blocks.#.mlp.fc?.*     stages.#.layers.#.pointwise_conv?.*  linear
        stages.#.blocks.#.gamma         stages.#.layers.#.gamma
        head.norm.*                     layer_norm.*
        """,
    ),
)


# --- a layout's names of one model ---


def pieces(
    layout: Layout, tensors: Mapping[str, Tensor], there: Mapping[str, object]
) -> dict[str, list[Piece]]:
    """The pieces of a file with the names `there` that make each of timm's tensors (`tensors`)."""
    # 1. The rule of each tensor, and the pieces that each of the rule's alternatives takes
    chosen: dict[str, tuple[Rule, list[list[Piece]]]] = {}
    habits: Counter[tuple[Rule, int]] = Counter()  # which alternatives this file uses
    for ours, tensor in tensors.items():
        rule, theirs = _UNCHANGED, [ours]
        for each in layout.rules:
            match = re.fullmatch(each.ours, ours)
            if match is not None:
                rule, theirs = each, [match.expand(template) for template in each.theirs]
                break
        shape = SHAPES[rule.shape](tuple(tensor.shape))
        chosen[ours] = rule, [_pieces(name, shape) for name in theirs]
        for i, some in enumerate(chosen[ours][1]):
            habits[rule, i] += all(piece.key in there for piece in some)
    # 2. A missing tensor is called as its like in the other blocks
    out = {}
    for ours, (rule, alternatives) in chosen.items():
        usual = max(range(len(alternatives)), key=lambda i: habits[rule, i])
        out[ours] = alternatives[usual]
    return out


_UNCHANGED = Rule("", ())  # the file has timm's own name
_BRACE = re.compile(r"\{([\w,]+)\}")
_PART = re.compile(r"(.*)\[(\d):(\d)/(\d)\]")


def _pieces(text: str, shape: Shape) -> list[Piece]:
    """'a.{q,k}.b' -> the tensors a.q.b and a.k.b, and 'a[0:1/3]' -> the first third of a."""
    part = _PART.fullmatch(text)
    if part is not None:
        start, stop, parts = int(part[2]), int(part[3]), int(part[4])
        whole = (shape[0] * parts // (stop - start), *shape[1:])
        return [Piece(part[1], whole, start, stop, parts)]
    keys = [text]
    brace = _BRACE.search(text)
    if brace is not None:
        before, after = text[: brace.start()], text[brace.end() :]
        keys = [before + word + after for word in brace[1].split(",")]
    return [Piece(key, (shape[0] // len(keys), *shape[1:]) if shape else ()) for key in keys]
