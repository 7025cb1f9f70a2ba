"""The published formats of vision transformers and ConvNeXts, as data.

A model's key is its width and patch, with `+reg` for register tokens, `+glu` for a gated MLP, and
for a ConvNeXt the width and the blocks of its third stage. Depth is not part of it: a file that
lacks a block is not a shallower model.
"""

import functools
from collections.abc import Callable

from backbench.images.preprocess import CLIP_MEAN, CLIP_STD, HALF, Pixels
from backbench.weights.family import Format, Tables, TrunkInFile

_APACHE, _MIT, _NC = "Apache-2.0", "MIT", "CC-BY-NC-4.0"
_CONVNEXT_LICENCES = "MIT (ConvNeXt V2: CC-BY-NC-4.0)"
_ITS_OWN = "the file's own: see the page that it is from"  # anybody's, in a layout that many share
_DINOV3 = "DINOv3 License (https://ai.meta.com/resources/models-and-libraries/dinov3-license)"
_CLIP_PIXELS = Pixels(CLIP_MEAN, CLIP_STD)
_HALF = Pixels(HALF, HALF)

Test = Callable[[Tables, list[TrunkInFile]], bool]


def _with(*ends: str, without: tuple[str, ...] = ()) -> Test:
    """A test that names with one of these ends are in every trunk, and none with the others."""

    def test(tables: Tables, trunks: list[TrunkInFile]) -> bool:
        for trunk in trunks:
            names = [key for key in tables[trunk.table] if key.startswith(trunk.prefix)]
            if ends and not any(name.endswith(ends) for name in names):
                return False
            if without and any(name.endswith(without) for name in names):
                return False
        return True

    return test


_SCALES = ("ls1.gamma", "gamma_1", "lambda1", "ls2.gamma", "gamma_2")
REGISTERS = ("reg_token", "register_tokens", "storage_tokens")
_HEADS = ("head.weight", "head.bias", "fc_norm.weight", "norm_pre.weight", "attn_pool.latent")
_plain = _with(without=(*_SCALES, *REGISTERS, *_HEADS))


def _fixed_positions(tables: Tables, trunk: TrunkInFile) -> bool:
    """True for MoCo-v3's and MAE's fixed positions, in which the class token's is 0."""
    position = tables[trunk.table].get(f"{trunk.prefix}pos_embed")
    # A file's tensors may pretend to any size
    if position is None or position.dim() != 3 or not 0 < position[:1, :1].numel() < 100_000:
        return False
    return not bool((position[0, 0] != 0).any())


def _said(method: str) -> Test:
    """A test for a ViT that no mark in the file says whose it is: `--method` has to. A training
    run's teacher and student are such a mark."""

    def test(tables: Tables, trunks: list[TrunkInFile]) -> bool:
        for trunk in trunks:
            marked = trunk.table in ("teacher", "student")
            if not marked and trunk.metadata.method != method:
                return False
            if not marked and _fixed_positions(tables, trunk):
                return False
        return _plain(tables, trunks)

    return test


def _mae(tables: Tables, trunks: list[TrunkInFile]) -> bool:
    """A decoder or fixed positions are MAE's marks; without them `--method mae` says it."""
    for trunk in trunks:
        decoder = any(key.startswith("decoder_") for key in tables[trunk.table])
        if not decoder and not _fixed_positions(tables, trunk) and trunk.metadata.method != "mae":
            return False
    return _plain(tables, trunks)


_VITS = {
    "192/16": "vit_tiny_patch16_224",
    "384/16": "vit_small_patch16_224",
    "384/8": "vit_small_patch8_224",
    "768/16": "vit_base_patch16_224",
    "768/8": "vit_base_patch8_224",
    "1024/16": "vit_large_patch16_224",
    "1280/14": "vit_huge_patch14_224",
}
# DINO's and iBOT's linear evaluation: the class tokens of the last four layers for S, otherwise
# class token and mean (facebookresearch/dino: eval_linear.py, --n_last_blocks, --avgpool_patchtokens)
_DINO_READINGS = {384: "cls@4"}
_DINOV2 = {
    "384/14": "vit_small_patch14_dinov2",
    "768/14": "vit_base_patch14_dinov2",
    "1024/14": "vit_large_patch14_dinov2",
    "1536/14+glu": "vit_giant_patch14_dinov2",
    "384/14+reg": "vit_small_patch14_reg4_dinov2",
    "768/14+reg": "vit_base_patch14_reg4_dinov2",
    "1024/14+reg": "vit_large_patch14_reg4_dinov2",
    "1536/14+reg+glu": "vit_giant_patch14_reg4_dinov2",
}
# Those that keep biases of queries and values (the others would drop them)
_DINOV3_VITS = {
    "384/16+reg": "vit_small_patch16_dinov3_qkvb",
    "384/16+reg+glu": "vit_small_plus_patch16_dinov3_qkvb",
    "768/16+reg": "vit_base_patch16_dinov3_qkvb",
    "1024/16+reg": "vit_large_patch16_dinov3_qkvb",
    "1280/16+reg+glu": "vit_huge_plus_patch16_dinov3_qkvb",
    "4096/16+reg+glu": "vit_7b_patch16_dinov3",
}
# "{}" is `clip`, or `clip_quickgelu` where the activation is
_CLIPS = {
    "768/32": "vit_base_patch32_{}_224",
    "768/16": "vit_base_patch16_{}_224",
    "1024/14": "vit_large_patch14_{}_224",
    "1280/14": "vit_huge_patch14_{}_224",
    "1408/14": "vit_giant_patch14_{}_224",
    "1664/14": "vit_gigantic_patch14_{}_224",
}
# google-research/big_vision: models/vit.py has flax's gelu, the approximation by tanh
_SIGLIPS = {
    "768/32": "vit_base_patch32_siglip_256,act_layer=gelu_tanh",
    "768/16": "vit_base_patch16_siglip_224,act_layer=gelu_tanh",
    "1024/16": "vit_large_patch16_siglip_256,act_layer=gelu_tanh",
    "1152/14": "vit_so400m_patch14_siglip_224,act_layer=gelu_tanh",
    "1152/16": "vit_so400m_patch16_siglip_256,act_layer=gelu_tanh",
    "1536/16": "vit_giantopt_patch16_siglip_256,act_layer=gelu_tanh",
}
_CONVNEXTS = {
    "96x9": "convnext_tiny",
    "96x27": "convnext_small",
    "128x27": "convnext_base",
    "192x27": "convnext_large",
    "256x27": "convnext_xlarge",
}
_CONVNEXTS_V2 = {
    "40x6+grn": "convnextv2_atto",
    "48x6+grn": "convnextv2_femto",
    "64x6+grn": "convnextv2_pico",
    "80x8+grn": "convnextv2_nano",
    "96x9+grn": "convnextv2_tiny",
    "128x27+grn": "convnextv2_base",
    "192x27+grn": "convnextv2_large",
    "352x27+grn": "convnextv2_huge",
}
_BARE = ":"  # at the file's top, under no prefix
_TIMM_HEADS = ("head.*", "head_dist.*", "fc.*", "classifier.*", "last_linear.*", "pre_logits.*")


_TRAINING = {"teacher": ("teacher:backbone.",), "student": ("student:backbone.",)}
_TEACHER_OR_BARE = {**_TRAINING, "teacher": (_BARE, "teacher:backbone.")}


# A row of the table below: it has timm's own names unless it says others
TimmFormat = functools.partial(Format, dialects=("timm's",))

# fmt: off
TIMM_FORMATS: tuple[Format, ...] = (
    TimmFormat(
        name="dino vit",
        source="facebookresearch/dino: vision_transformer.py, main_dino.py, eval_linear.py",
        method="dino",
        encoders=_TEACHER_OR_BARE, test=_said("dino"), timm=_VITS, beside=("masked_embed",),
        reading="cls+mean", readings=_DINO_READINGS, positions="+0.1", licence=_APACHE,
    ),
    TimmFormat(
        name="ibot",
        source="bytedance/ibot: models/vision_transformer.py, main_ibot.py (the release: extract_backbone_weights.py)",
        method="ibot",
        encoders=_TRAINING, refines=("dino vit",), needs=("@ibot_loss",), test=_plain, timm=_VITS,
        beside=("masked_embed",), reading="cls+mean", readings=_DINO_READINGS, positions="+0.1",
        licence=_APACHE,
    ),
    TimmFormat(
        name="ibot, released",
        source="bytedance/ibot: models/vision_transformer.py, extract_backbone_weights.py",
        method="ibot",
        encoders={"teacher": ("state_dict:",)}, test=_said("ibot"), timm=_VITS, beside=("masked_embed",),
        reading="cls+mean", readings=_DINO_READINGS, positions="+0.1", licence=_APACHE,
    ),
    TimmFormat(
        name="moco-v3 vit",
        source="facebookresearch/moco-v3: vits.py, moco/builder.py, main_moco.py", method="moco_v3",
        encoders={"query": ("state_dict:base_encoder.",), "key": ("state_dict:momentum_encoder.",)},
        needs=("predictor.*",),
        # vits.py: its ViT-S has 12 heads
        timm={"384/16": "vit_small_patch16_224,num_heads=12", "768/16": "vit_base_patch16_224"},
        beside=("head.*",), reading="cls", licence=_NC,
    ),
    TimmFormat(
        name="mae",
        source="facebookresearch/mae: models_mae.py, util/misc.py, util/pos_embed.py, main_linprobe.py",
        method="mae",
        encoders={"encoder": ("model:",)}, test=_mae, timm=_VITS,
        beside=("decoder_*", "mask_token"), reading="cls", positions="size", licence=_NC,
    ),
    TimmFormat(
        name="dinov2",
        source="facebookresearch/dinov2: dinov2/models/vision_transformer.py, dinov2/hub, dinov2/train/train.py",
        method="dinov2",
        encoders=_TEACHER_OR_BARE,
        test=_with(*_SCALES, without=("storage_tokens", "reg_token", "q_bias", *_HEADS)),
        timm=_DINOV2, beside=("mask_token",), reading="cls+mean", positions="+0.1",
        positions_with_registers="aa", folds=True, licence=_APACHE,
    ),
    TimmFormat(
        name="dinov3",
        source="facebookresearch/dinov3: dinov3/models/vision_transformer.py, dinov3/layers/attention.py, dinov3/hub",
        method="dinov3",
        encoders=_TEACHER_OR_BARE, test=_with("storage_tokens", "rope_embed.periods", "bias_mask"),
        timm=_DINOV3_VITS,
        beside=("mask_token", "rope_embed.periods", "blocks.*.attn.qkv.bias_mask", "local_cls_norm.*"),
        reading="cls+mean", licence=_DINOV3,
    ),
    TimmFormat(
        name="dinov3 convnext",
        source="facebookresearch/dinov3: dinov3/models/convnext.py, dinov3/hub", method="dinov3",
        encoders={"teacher": (_BARE,)}, dialects=("convnext",),
        test=_with("norms.3.weight", "norms.3.bias"), timm=_CONVNEXTS, beside=("norms.3.*",),
        licence=_DINOV3,
    ),
    TimmFormat(
        name="convnext",
        source="facebookresearch/ConvNeXt: models/convnext.py; facebookresearch/ConvNeXt-V2: models/convnextv2.py",
        also="ConvNeXt V2", method="supervised",
        encoders={"model": ("model:",), "ema": ("model_ema:",)}, dialects=("convnext",),
        timm=_CONVNEXTS | _CONVNEXTS_V2, beside=("head.*",), licence=_CONVNEXT_LICENCES,
    ),
    TimmFormat(
        name="convnext, torchvision", source="pytorch/vision: torchvision/models/convnext.py",
        method="supervised", encoders={"trunk": (_BARE, "model:", "model_ema:")},
        dialects=("torchvision's convnext",), needs=("classifier.2.weight",), timm=_CONVNEXTS,
        beside=("classifier.2.*",), licence="BSD-3-Clause",
    ),
    TimmFormat(
        name="clip",
        source="openai/CLIP: clip/model.py; mlfoundations/open_clip: src/open_clip/transformer.py",
        also="OpenCLIP", method="clip",
        encoders={"image": ("visual.", _BARE)}, dialects=("clip",), timm=_CLIPS, beside=("proj",),
        # The features before the projection: arXiv:2103.00020, appendix A.3
        reading="cls", pixels=_CLIP_PIXELS, asks=("activation",), licence=_MIT,
    ),
    TimmFormat(
        name="clip, hub", source="huggingface/transformers: models/clip/modeling_clip.py",
        method="clip",
        encoders={"image": (":vision_model.", _BARE)}, dialects=("hub clip",),
        test=_with(without=("head.probe", "head.attention.in_proj_weight", "head.layernorm.weight")),
        timm=_CLIPS, beside=("embeddings.position_ids",), reading="cls", pixels=_CLIP_PIXELS,
        asks=("activation",), licence=_MIT,
    ),
    TimmFormat(
        name="siglip",
        source="huggingface/transformers: models/siglip/modeling_siglip.py; google-research/big_vision: models/vit.py",
        also="SigLIP 2 of fixed size", method="siglip",
        encoders={"image": (":vision_model.", _BARE)}, dialects=("hub clip",),
        test=_with("head.probe", "head.attention.in_proj_weight", "head.layernorm.weight"),
        timm=_SIGLIPS, beside=("embeddings.position_ids",), reading="map", pixels=_HALF,
        licence=_APACHE,
    ),
    TimmFormat(
        name="siglip, openclip", source="mlfoundations/open_clip: src/open_clip/timm_model.py",
        method="siglip",
        encoders={"image": (":visual.trunk.",)},
        test=_with("attn_pool.latent", "attn_pool.q.weight", "attn_pool.kv.weight"), timm=_SIGLIPS,
        reading="map", pixels=_HALF, licence=_APACHE,
    ),
    TimmFormat(
        name="vit, hub", source="huggingface/transformers: models/vit/modeling_vit.py",
        also="DINO's on the Hub (--method dino)", method="unknown",
        encoders={"encoder": (_BARE, ":vit.")}, dialects=("hub vit",), test=_with(without=_SCALES),
        timm=_VITS, beside=("pooler.*",), reading="cls", asks=("pixels",), licence=_ITS_OWN,
    ),
    TimmFormat(
        name="mae, hub", source="huggingface/transformers: models/vit_mae/modeling_vit_mae.py",
        method="mae",
        encoders={"encoder": (":vit.",)}, refines=("vit, hub",), needs=("decoder.*",),
        dialects=("hub vit",), timm=_VITS, reading="cls", positions="size", licence=_NC,
    ),
    TimmFormat(
        name="dinov2, hub",
        source="huggingface/transformers: models/dinov2/modeling_dinov2.py, models/dinov2_with_registers",
        method="dinov2",
        encoders={"encoder": (_BARE, ":dinov2.", ":dinov2_with_registers.")}, dialects=("hub vit",),
        test=_with(*_SCALES), timm=_DINOV2, beside=("embeddings.mask_token",), reading="cls+mean",
        positions="+0.1", positions_with_registers="aa", folds=True, licence=_APACHE,
    ),
    TimmFormat(
        name="dinov3, hub",
        source="huggingface/transformers: models/dinov3_vit/modeling_dinov3_vit.py",
        method="dinov3",
        encoders={"encoder": (_BARE, ":dinov3_vit.")}, dialects=("hub dinov3",), timm=_DINOV3_VITS,
        beside=("embeddings.mask_token",), reading="cls+mean", licence=_DINOV3,
    ),
    TimmFormat(
        name="dinov3 convnext, hub",
        source="huggingface/transformers: models/dinov3_convnext/modeling_dinov3_convnext.py",
        method="dinov3",
        encoders={"encoder": (_BARE,)}, dialects=("hub dinov3 convnext",), timm=_CONVNEXTS,
        licence=_DINOV3,
    ),
    TimmFormat(
        name="convnext, hub",
        source="huggingface/transformers: models/convnext/modeling_convnext.py, models/convnextv2",
        method="supervised",
        encoders={"encoder": (_BARE, ":convnext.", ":convnextv2.")}, dialects=("hub convnext",),
        timm=_CONVNEXTS | _CONVNEXTS_V2, licence=_CONVNEXT_LICENCES,
    ),
)
# fmt: on

# Whose model the file beside it names (`beside`), a checkpoint of timm's training, or the command
TIMM = Format(
    name="timm",
    source="huggingface/pytorch-image-models: timm/models/_hub.py (config.json), timm/utils/checkpoint_saver.py",
    also="OpenCLIP's `visual.trunk.` with its open_clip_config.json",
    method="unknown",
    encoders={"trunk": ("", ":visual.trunk."), "ema": ("state_dict_ema:",)},
    dialects=("timm's", "timm's convnext"),
    beside=_TIMM_HEADS,
    asks=("pixels",),
    licence=_ITS_OWN,
)
