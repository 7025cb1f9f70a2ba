"""Makes files of each published format of ViTs and ConvNeXts: what its project saves."""

import argparse
import re

import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from backbench.weights import archs

VIT = "timm:vit_small_patch16_224,depth=2,embed_dim=32,img_size=32,num_heads=2,patch_size=8"
SMALL_VIT = ",depth=2,embed_dim=32,img_size=32,num_heads=2,patch_size=8"
SMALL_NEXT = ",depths=1-1-2-1,dims=8-16-24-32"


def known(arch, seed=0):
    """Draw every tensor; scales from 0.5 to 1.5, as a small LayerScale hides what is before it."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, blank in archs.tensors(arch).items():
        value = torch.randn(blank.shape, generator=generator)
        scale = "norm" in name or "gamma" in name or name.startswith("stem.1")
        if scale and name.endswith(("weight", "gamma", "gamma_1", "gamma_2")):
            value = torch.rand(blank.shape, generator=generator) + 0.5
        out[name] = value if value.dim() < 2 else value * 0.2
    return out


def shaped(arch):
    """Return the same tensors without memory, for what is told from shapes alone."""
    return {
        name: torch.ones(1).expand(blank.shape)
        for name, blank in archs.tensors(arch).items()
    }


def put_in_hub(monkeypatch, hub, model, state):
    """Write the weights of timm's `model` as the Hub's local cache has them; return their folder."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    repository = timm.models.get_pretrained_cfg(model).hf_hub_id
    folder = hub / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    save_file(
        {key: value.clone() for key, value in state.items()},
        snapshot / "model.safetensors",
    )
    return snapshot


def renamed(state, *pairs):
    out = {}
    for key, tensor in state.items():
        name = key
        for pattern, new in pairs:
            name = re.sub(pattern, new, name)
        out[name] = tensor
    return out


def prefixed(prefix, state):
    return {prefix + key: tensor for key, tensor in state.items()}


def split(state, pattern, *names):
    """Split `x.qkv.weight` into three tensors; in their names `pattern` becomes one of `names`."""
    out = {}
    for key, tensor in state.items():
        if not re.search(pattern, key):
            out[key] = tensor
            continue
        for name, part in zip(names, tensor.chunk(len(names)), strict=True):
            # Tensors of `shaped` have no memory to clone.
            out[re.sub(pattern, name, key)] = (
                part.clone() if tensor.is_contiguous() else part
            )
    return out


def other(state):
    """Make a second trunk, with another bias in its first norm."""
    out = {}
    for key, tensor in state.items():
        is_first = key.endswith("blocks.0.norm1.bias")
        out[key] = tensor + 1 if is_first else tensor
    return out


# --- the authors' own files ---
def dino(state):
    return dict(state)


def dino_training(state):
    head = {"head.mlp.0.weight": torch.ones(3, 3)}
    student = prefixed("module.", prefixed("backbone.", other(state)) | head)
    states = {"student": student, "teacher": prefixed("backbone.", state) | head}
    about = {"epoch": 100, "args": argparse.Namespace(arch="vit_small")}
    return states | about | {"dino_loss": {"center": torch.zeros(1, 3)}}


def ibot(state):
    return {"state_dict": state | {"masked_embed": torch.ones(1, 32)}}


def ibot_training(state):
    made = dino_training(state)
    made["ibot_loss"] = made.pop("dino_loss")
    made["student"]["module.backbone.masked_embed"] = torch.ones(1, 32)
    return made


def moco_v3(state):
    head = {f"head.{i}.weight": torch.ones(3) for i in range(8)}
    tensors = prefixed("module.base_encoder.", state | head)
    tensors |= prefixed("module.momentum_encoder.", other(state) | head)
    tensors |= {"module.predictor.0.weight": torch.ones(3, 3)}
    return {"epoch": 300, "arch": "vit_small", "state_dict": tensors, "optimizer": {}}


def mae(state):
    decoder = {
        "decoder_blocks.0.norm1.weight": torch.ones(8),
        "decoder_embed.bias": torch.ones(8),
    }
    return {"model": state | decoder | {"mask_token": torch.ones(1, 1, 8)}}


def dinov2(state):
    state = renamed(state, ("^reg_token", "register_tokens"))
    return state | {"mask_token": torch.ones(1, 32)}


def dinov2_registers(state, dialect=dinov2):
    """Give the file a position of the class token, which timm has within the token."""
    position = torch.full_like(state["cls_token"], 0.25)
    positions = torch.cat([position, state["pos_embed"]], dim=1)
    return dialect(
        state | {"cls_token": state["cls_token"] - position, "pos_embed": positions}
    )


def dinov2_chunked(state):
    made = renamed(
        dinov2(state), (r"^blocks\.1", "blocks.1.1"), (r"^blocks\.0\.", "blocks.0.0.")
    )
    return {"teacher": prefixed("backbone.", made)}


def dinov2_consolidated(state):
    """Both networks in one table, as a training of DINOv2 saves them, and its blocks in chunks."""
    table = {}
    for network, content in (("teacher", state), ("student", other(state))):
        chunked = renamed(
            dinov2(content),
            (r"^blocks\.1", "blocks.1.1"),
            (r"^blocks\.0\.", "blocks.0.0."),
        )
        table |= prefixed(f"{network}.backbone.", chunked)
        table[f"{network}.dino_head.mlp.0.weight"] = torch.ones(3, 3)
    return {"model": table, "iteration": 99}


def ijepa(state):
    predictor = {
        f"module.predictor_blocks.{i}.mlp.fc1.weight": torch.ones(4, 4)
        for i in range(12)
    }
    predictor["module.predictor_embed.weight"] = torch.ones(4, 4)
    return {
        "encoder": prefixed("module.", with_other_values(state)),
        "predictor": predictor,
        "target_encoder": prefixed("module.", state),
        "opt": {"state": {0: {"exp_avg": torch.ones(3)}}},
        "epoch": 300,
    }


def with_other_values(state):
    """Give the same names other values, as the encoder has that is not read by default."""
    return {key: tensor + 1 for key, tensor in state.items()}


def dinov2_giant(state):
    return renamed(dinov2(state), (r"mlp\.fc1", "mlp.w12"), (r"mlp\.fc2", "mlp.w3"))


def dinov3(state):
    out = {}
    for key, tensor in state.items():
        if key.endswith("q_bias"):
            start = key.removesuffix("q_bias")
            bias = [tensor, torch.full_like(tensor, 7.0), state[start + "v_bias"]]
            out[start + "qkv.bias"] = torch.cat(bias)
            ones = torch.ones(len(tensor))
            out[start + "qkv.bias_mask"] = torch.cat([ones, 0 * ones, ones])
        elif not key.endswith("v_bias"):
            out[key] = tensor
    out = renamed(
        out,
        ("^reg_token", "storage_tokens"),
        (r"gamma_([12])$", r"ls\1.gamma"),
    )
    if any("fc1_g" in key for key in out):
        out = renamed(
            out,
            (r"mlp\.fc1_g", "mlp.w1"),
            (r"mlp\.fc1_x", "mlp.w2"),
            (r"mlp\.fc2", "mlp.w3"),
        )
    width = state["cls_token"].shape[-1]
    heads = 2 if width == 32 else width // 64
    count = width // heads // 4
    periods = (100 ** (torch.arange(count) / count)).bfloat16()
    return out | {"rope_embed.periods": periods, "mask_token": torch.ones(1, width)}


def convnext(state):
    made = _convnext(state)
    return {
        "model": made | {"head.weight": torch.ones(3, 32), "head.bias": torch.ones(3)}
    }


def torchvision_convnext(state):
    made = renamed(
        state,
        (r"^stem", "features.0"),
        (r"^stages\.(\d)\.downsample", lambda match: f"features.{2 * int(match[1])}"),
        (r"^stages\.(\d)\.blocks", lambda match: f"features.{2 * int(match[1]) + 1}"),
        ("conv_dw", "block.0"),
        (r"(\d\.\d+)\.norm", r"\1.block.2"),
        (r"mlp\.fc1", "block.3"),
        (r"mlp\.fc2", "block.5"),
        ("gamma", "layer_scale"),
        (r"^head\.norm", "classifier.0"),
    )
    for key, tensor in made.items():
        if ".block.3.weight" in key or ".block.5.weight" in key:
            made[key] = tensor.reshape(tensor.shape[:2])
        elif "layer_scale" in key:
            made[key] = tensor.reshape(-1, 1, 1)
    return made | {
        "classifier.2.weight": torch.ones(3, 32),
        "classifier.2.bias": torch.ones(3),
    }


def dinov3_convnext(state):
    made = _convnext(state)
    return made | {
        f"norms.3.{part}": made[f"norm.{part}"] for part in ("weight", "bias")
    }


def _convnext(state):
    made = renamed(
        state,
        (r"^stem\.", "downsample_layers.0."),
        (r"^stages\.(\d)\.downsample", r"downsample_layers.\1"),
        (r"\.blocks\.", "."),
        ("conv_dw", "dwconv"),
        (r"mlp\.fc", "pwconv"),
        (r"mlp\.grn\.weight", "grn.gamma"),
        (r"mlp\.grn\.bias", "grn.beta"),
        (r"^head\.norm", "norm"),
    )
    return _linears(made, "grn.")


def _linears(made, grn):
    """Turn 1 x 1 convolutions into linear layers, and scales of a response norm (C,) into
    (1, 1, 1, C)."""
    for key, tensor in made.items():
        if "pwconv" in key and tensor.dim() == 4:
            made[key] = tensor[:, :, 0, 0]
        elif grn in key:
            made[key] = tensor.reshape(1, 1, 1, -1)
    return made


def clip(state):
    made = renamed(
        state,
        (r"^patch_embed\.proj", "conv1"),
        (r"^blocks", "transformer.resblocks"),
        (r"^norm_pre", "ln_pre"),
        (r"^norm\.", "ln_post."),
        (r"\.norm([12])", r".ln_\1"),
        (r"attn\.qkv\.", "attn.in_proj_"),
        (r"attn\.proj", "attn.out_proj"),
        (r"mlp\.fc1", "mlp.c_fc"),
        (r"mlp\.fc2", "mlp.c_proj"),
        ("^cls_token", "class_embedding"),
        ("^pos_embed", "positional_embedding"),
    )
    made["class_embedding"] = made["class_embedding"][0, 0]
    made["positional_embedding"] = made["positional_embedding"][0]
    text = {
        "token_embedding.weight": torch.ones(9, 4),
        "ln_final.weight": torch.ones(4),
    }
    for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
        text[f"transformer.resblocks.0.{name}"] = torch.ones(4)
    text |= {
        f"transformer.resblocks.{i}.mlp.c_fc.weight": torch.ones(4, 4)
        for i in range(12)
    }
    tower = prefixed("visual.", made | {"proj": torch.ones(32, 8)})
    return tower | text | {"logit_scale": torch.ones(())}


def siglip_openclip(state):
    return prefixed("visual.trunk.", state) | {
        "text.token_embedding.weight": torch.ones(9, 4)
    }


# --- the Hub's ---
def hub_vit(state):
    made = split(state, r"attn\.qkv", "attn.query", "attn.key", "attn.value")
    return renamed(
        made,
        (r"attn\.(query|key|value)", r"attention.attention.\1"),
        (r"attn\.proj", "attention.output.dense"),
        (r"^blocks", "encoder.layer"),
        (r"mlp\.fc1", "intermediate.dense"),
        (r"mlp\.fc2", "output.dense"),
        ("norm1", "layernorm_before"),
        ("norm2", "layernorm_after"),
        (r"^norm\.", "layernorm."),
        (r"^patch_embed\.proj", "embeddings.patch_embeddings.projection"),
        ("^cls_token", "embeddings.cls_token"),
        ("^pos_embed", "embeddings.position_embeddings"),
    )


def hub_mae(state):
    return prefixed("vit.", hub_vit(state)) | {
        "decoder.mask_token": torch.ones(1, 1, 8)
    }


def hub_dinov2(state):
    made = renamed(
        hub_vit(state),
        ("intermediate.dense", "mlp.fc1"),
        (r"(\d)\.output\.dense", r"\1.mlp.fc2"),
        ("layernorm_before", "norm1"),
        ("layernorm_after", "norm2"),
        (r"ls([12])\.gamma", r"layer_scale\1.lambda1"),
        ("^reg_token", "embeddings.register_tokens"),
    )
    return made | {"embeddings.mask_token": torch.ones(1, 32)}


def hub_dinov2_registers(state):
    return dinov2_registers(state, hub_dinov2)


def hub_dinov3(state):
    made = split(state, r"attn\.qkv\.", "attn.q_proj.", "attn.k_proj.", "attn.v_proj.")
    made = renamed(
        made,
        (r"attn\.([qv])_bias", r"attention.\1_proj.bias"),
        (r"attn\.([qkv])_proj", r"attention.\1_proj"),
        (r"attn\.proj", "attention.o_proj"),
        (r"mlp\.fc1_g", "mlp.gate_proj"),
        (r"mlp\.fc1(_x)?\.", "mlp.up_proj."),
        (r"mlp\.fc2", "mlp.down_proj"),
        (r"gamma_([12])$", r"layer_scale\1.lambda1"),
        (r"^blocks", "layer"),
        (r"^patch_embed\.proj", "embeddings.patch_embeddings"),
        ("^cls_token", "embeddings.cls_token"),
        ("^reg_token", "embeddings.register_tokens"),
    )
    return made | {"embeddings.mask_token": torch.ones(1, 1, 32)}


def _hub_towers(state):
    made = split(
        state, r"attn\.qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
    )
    made = renamed(
        made,
        (r"^(blocks.*)attn\.proj", r"\1self_attn.out_proj"),
        (r"^blocks", "encoder.layers"),
        (r"(\d)\.norm([12])", r"\1.layer_norm\2"),
        (r"^norm_pre", "pre_layrnorm"),
        (r"^norm\.", "post_layernorm."),
        (r"^patch_embed\.proj", "embeddings.patch_embedding"),
    )
    made["embeddings.position_embedding.weight"] = made.pop("pos_embed")[0]
    return made


def hub_clip(state):
    made = _hub_towers(state)
    made["embeddings.class_embedding"] = made.pop("cls_token")[0, 0]
    text = {"text_model.encoder.layers.0.layer_norm1.weight": torch.ones(4)}
    return (
        prefixed("vision_model.", made)
        | text
        | {"visual_projection.weight": torch.ones(8, 32)}
    )


def _below(parts):
    """Put tensors one below the other; without memory where they have none."""
    if all(part.is_contiguous() for part in parts):
        return torch.cat(parts)
    rows = sum(len(part) for part in parts)
    return torch.ones(1).expand(rows, *parts[0].shape[1:])


def hub_siglip(state):
    made = {}
    for key, tensor in _hub_towers(state).items():
        if not re.match(r"attn_pool\.(q|kv)\.", key):
            made[key] = tensor
    for part in ("weight", "bias"):
        thirds = [state[f"attn_pool.{each}.{part}"] for each in ("q", "kv")]
        made[f"head.attention.in_proj_{part}"] = _below(thirds)
    made = renamed(
        made,
        (r"^attn_pool\.latent", "head.probe"),
        (r"^attn_pool\.proj", "head.attention.out_proj"),
        (r"^attn_pool\.norm", "head.layernorm"),
        (r"^attn_pool\.mlp", "head.mlp"),
    )
    return prefixed("vision_model.", made) | {"text_model.head.bias": torch.ones(4)}


def hub_convnext(state):
    made = renamed(
        state,
        (r"^stem\.0", "embeddings.patch_embeddings"),
        (r"^stem\.1", "embeddings.layernorm"),
        (r"^stages\.(\d)\.downsample", r"encoder.stages.\1.downsampling_layer"),
        (r"^stages\.(\d)\.blocks", r"encoder.stages.\1.layers"),
        ("conv_dw", "dwconv"),
        (r"mlp\.fc", "pwconv"),
        (r"mlp\.grn", "grn"),
        ("gamma$", "layer_scale_parameter"),
        (r"^head\.norm", "layernorm"),
        (r"layers\.(\d+)\.norm", r"layers.\1.layernorm"),
    )
    made = prefixed("convnext.", _linears(made, ".grn."))
    return made | {"classifier.weight": torch.ones(3, 32)}


def hub_dinov3_convnext(state):
    made = renamed(
        state,
        (r"^stem", "stages.0.downsample_layers"),
        (r"\.downsample\.", ".downsample_layers."),
        (r"\.blocks\.", ".layers."),
        ("conv_dw", "depthwise_conv"),
        (r"mlp\.fc", "pwconv"),
        (r"(layers\.\d+)\.norm", r"\1.layer_norm"),
        (r"^head\.norm", "layer_norm"),
    )
    return renamed(_linears(made, ".grn."), ("pwconv", "pointwise_conv"))


IN = 0.485
# By the format's name or its first word
POSITIONS = {"dino": "+0.1", "ibot": "+0.1", "dinov2": "+0.1", "mae": "size"}
LICENCES = {
    "moco-v3": "CC-BY-NC-4.0",
    "mae": "CC-BY-NC-4.0",
    "i-jepa": "CC-BY-NC-4.0",
    "dinov3": "DINOv3 License",
    "clip": "MIT",
    "convnext": "MIT (ConvNeXt V2: CC-BY-NC-4.0)",
    "vit": "the file's own",
    "convnext, torchvision": "BSD-3-Clause",
}


def _case(
    form, small, published="", *, options=None, reading="cls", red=IN, more=SMALL_VIT
):
    """Return (format, small model, published model, options of import, reading, mean of red pixels,
    rule by which positions are resized, how the licence begins)."""
    word = form.split()[0].strip(",")
    positions = "aa" if "reg4" in small else POSITIONS.get(word, "")
    licence = LICENCES.get(form, LICENCES.get(word, "Apache-2.0"))
    small = f"timm:{small}{more}"
    if published:
        published = f"timm:{published}"
    return form, small, published, options or {}, reading, red, positions, licence


S = "vit_small_patch16_224"
B = "vit_base_patch16_224"
D2 = "vit_small_patch14_dinov2"
G2 = "vit_giant_patch14_dinov2"
R2 = "vit_base_patch14_reg4_dinov2"
GAP = "vit_base_patch16_gap_224"
H14 = "vit_huge_patch14_gap_224"
D3 = "vit_small_patch16_dinov3_qkvb"
D3PLUS = "vit_small_plus_patch16_dinov3_qkvb"
QUICK = "vit_base_patch16_clip_quickgelu_224"
SIGLIP = "vit_base_patch16_siglip_224,act_layer=gelu_tanh"
CLS_MEAN = {"reading": "cls+mean"}
# DINOv3 takes images of any size
FREE = {"more": SMALL_VIT.replace(",img_size=32", "")}
NEXT = {"reading": "pooled", "more": SMALL_NEXT}
MAP = {"reading": "map", "red": 0.5}
CASES = {
    dino: _case("dino vit", S, S, options={"method": "dino"}, reading="cls@4"),
    dino_training: _case("dino vit", S, S, reading="cls@4"),
    ibot: _case("ibot, released", S, S, options={"method": "ibot"}, reading="cls@4"),
    ibot_training: _case("ibot", S, S, reading="cls@4"),
    moco_v3: _case("moco-v3 vit", S, f"{S},num_heads=12"),
    mae: _case("mae", S, B),
    dinov2: _case("dinov2", D2, D2, **CLS_MEAN),
    dinov2_registers: _case("dinov2", R2.replace("base", "small"), R2, **CLS_MEAN),
    dinov2_chunked: _case("dinov2", D2, **CLS_MEAN),
    dinov2_consolidated: _case("dinov2", D2, **CLS_MEAN),
    dinov2_giant: _case("dinov2", G2, G2, **CLS_MEAN),
    ijepa: _case("i-jepa", GAP, H14, reading="pooled"),
    dinov3: _case("dinov3", D3PLUS, D3, **CLS_MEAN, **FREE),
    dinov3_convnext: _case(
        "dinov3 convnext", "convnext_tiny", "convnext_small", **NEXT
    ),
    convnext: _case("convnext", "convnextv2_tiny", "convnextv2_atto", **NEXT),
    torchvision_convnext: _case(
        "convnext, torchvision", "convnext_tiny", "convnext_small", **NEXT
    ),
    clip: _case("clip", QUICK, red=0.48145466),
    siglip_openclip: _case("siglip, openclip", SIGLIP, SIGLIP, **MAP),
    hub_vit: _case("vit, hub", S, options={"pixels": "half"}, red=0.5),
    hub_mae: _case("mae, hub", S, B),
    hub_dinov2: _case("dinov2, hub", D2, D2.replace("small", "large"), **CLS_MEAN),
    hub_dinov2_registers: _case("dinov2, hub", R2.replace("base", "small"), **CLS_MEAN),
    hub_dinov3: _case("dinov3, hub", D3, D3PLUS, **CLS_MEAN, **FREE),
    hub_clip: _case("clip, hub", QUICK, red=0.48145466),
    hub_siglip: _case("siglip", SIGLIP, SIGLIP, **MAP),
    hub_convnext: _case("convnext, hub", "convnextv2_tiny", "convnext_tiny", **NEXT),
    hub_dinov3_convnext: _case(
        "dinov3 convnext, hub", "convnext_tiny", "convnext_base", **NEXT
    ),
}
