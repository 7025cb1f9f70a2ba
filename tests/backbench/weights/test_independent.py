"""Features of imported files against those that transformers and open_clip, if there, compute."""

import json

import pytest
import torch

from backbench.weights import importing

pytestmark = pytest.mark.slow

SIZE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 99,
}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
VIT = ",depth=4,embed_dim=64,img_size=32,num_heads=4,patch_size=8"
NEXT = ",dims=8-16-24-32,depths=1-1-2-1"


def randomised(model):
    """Draw every parameter; scales from 0.5 to 1.5, as a small LayerScale hides what is before it."""
    generator = torch.Generator().manual_seed(0)
    scales = ("lambda1", "gamma", "layer_scale_parameter")
    for name, parameter in model.named_parameters():
        if name.endswith(scales) or ("norm" in name and name.endswith("weight")):
            parameter.data = torch.rand(parameter.shape, generator=generator) + 0.5
        else:
            spread = 0.1 if parameter.dim() > 1 else 0.3
            parameter.data = torch.randn(parameter.shape, generator=generator) * spread
    return model.eval()


def tokens(registers):
    """Make a reading of the class token and the mean of the patches, beside so many registers."""

    def read(model, images):
        last = model(pixel_values=images).last_hidden_state
        return torch.cat([last[:, 0], last[:, 1 + registers :].mean(dim=1)], dim=1)

    return read


def class_token(model, images):
    return model(pixel_values=images).last_hidden_state[:, 0]


def of_encoder(model, images):
    return class_token(model.vit, images)


def pooled(model, images):
    return model(pixel_values=images).pooler_output


def of_tower(model, images):
    return pooled(model.vision_model, images)


def of_convnext(model, images):
    return pooled(model.convnext, images)


DINOV2 = "timm:vit_small_patch14_dinov2"
DINOV2_REG = "timm:vit_small_patch14_reg4_dinov2"
DINOV3 = "timm:vit_small_patch16_dinov3_qkvb"
DINOV3_VIT = VIT.replace(",img_size=32", "")
S16 = "timm:vit_small_patch16_224" + VIT
TINY = "timm:convnext_tiny" + NEXT
GIANT = f"timm:vit_giant_patch14_dinov2{VIT},mlp_ratio=5.5"
CLIP = "timm:vit_base_patch16_clip_quickgelu_224" + VIT
SIGLIP = "timm:vit_base_patch16_siglip_224,act_layer=gelu_tanh" + VIT
EXACT = SIZE | {"layer_norm_eps": 1e-6}
EXACT_NEXT = STAGES | {"layer_norm_eps": 1e-6}
MAE = {"mask_ratio": 0.0, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1}
FOUR = SIZE | {"num_register_tokens": 4}
GATED = {"use_gated_mlp": True, "hidden_act": "silu"}
TOWERS = {"vision_config": SIZE, "text_config": TEXT}
PLUS = DINOV3.replace("small", "small_plus") + DINOV3_VIT
# Name -> class of transformers, its configuration, timm's model, how its own features are read
CASES = {
    "vit": ("ViTModel", EXACT, S16, class_token),
    "mae": ("ViTMAEForPreTraining", EXACT | MAE, S16, of_encoder),
    "dinov2": ("Dinov2Model", SIZE, DINOV2 + VIT, tokens(0)),
    "dinov2 glu": ("Dinov2Model", SIZE | {"use_swiglu_ffn": True}, GIANT, tokens(0)),
    "dinov2 registers": ("Dinov2WithRegistersModel", SIZE, DINOV2_REG + VIT, tokens(4)),
    "dinov3": ("DINOv3ViTModel", FOUR, DINOV3 + DINOV3_VIT, tokens(4)),
    "dinov3 plus": ("DINOv3ViTModel", FOUR | GATED, PLUS, tokens(4)),
    "dinov3 convnext": ("DINOv3ConvNextModel", STAGES, TINY, pooled),
    "clip": ("CLIPModel", TOWERS, CLIP, of_tower),
    "clip tower": ("CLIPVisionModel", SIZE, CLIP, pooled),
    "siglip": ("SiglipModel", TOWERS, SIGLIP, of_tower),
    "convnext": ("ConvNextForImageClassification", EXACT_NEXT, TINY, of_convnext),
    "convnext v2": (
        "ConvNextV2Model",
        EXACT_NEXT,
        "timm:convnextv2_tiny" + NEXT,
        pooled,
    ),
}


def difference(checkpoint, expected, images):
    with torch.no_grad():
        found = checkpoint.backbone().eval()(images)
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_what_the_hub_holds_is_what_transformers_computes(case, tmp_path):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed"
    )
    kind, words, arch, read = CASES[case]
    network = getattr(transformers, kind)
    model = randomised(network(network.config_class(**words)))
    model.save_pretrained(tmp_path)
    pixels = "half" if case == "vit" else None  # its file does not tell them
    file = tmp_path / "model.safetensors"
    checkpoint = importing.read(file, arch=arch, pixels=pixels)
    assert checkpoint.provenance["format"] != "unrecognised"
    side = 64 if "convnext" in arch else 32
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = read(model, images)
    assert difference(checkpoint, expected, images) < 1e-5


@pytest.mark.parametrize("quick", [True, False])
def test_what_open_clip_saves_is_what_it_computes(quick, tmp_path):
    """The activation is only in its configuration."""
    open_clip = pytest.importorskip("open_clip", reason="open_clip is not installed")
    vision = {"image_size": 224, "patch_size": 32, "width": 768, "layers": 12}
    text = {"context_length": 7, "vocab_size": 99, "width": 32, "heads": 2, "layers": 1}
    config = {
        "embed_dim": 16,
        "vision_cfg": vision,
        "text_cfg": text,
        "quick_gelu": quick,
    }
    model = randomised(open_clip.CLIP(**config))
    torch.save(model.state_dict(), tmp_path / "open_clip_pytorch_model.bin")
    mean = [0.4, 0.5, 0.6]
    about = {
        "model_cfg": config,
        "preprocess_cfg": {"mean": mean, "std": [0.2, 0.2, 0.2]},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(about))
    checkpoint = importing.read(tmp_path / "open_clip_pytorch_model.bin")
    kind = "clip_quickgelu" if quick else "clip"
    assert checkpoint.arch == f"timm:vit_base_patch32_{kind}_224"
    assert checkpoint.pixels.mean == tuple(mean)
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    model.visual.proj = None  # the features before the projection
    with torch.no_grad():
        expected = model.visual(images)
    assert difference(checkpoint, expected, images) < 1e-5
