"""A file is what its tensors prove: author, pixels and heads come from marks, the Hub or the user."""

import json

import pytest
import timm
import torch
import torchvision

from backbench.errors import BadInput
from backbench.weights import importing


def saved(tmp_path, state, name="some_run.pth"):
    torch.save(state, tmp_path / name)
    return tmp_path / name


def headless(model, **how):
    return timm.create_model(model, num_classes=0, **how).state_dict()


OTHERS = ("mixer_s16_224", "pvt_v2_b0", "swin_tiny_patch4_window7_224")


@pytest.mark.parametrize("model", OTHERS)
def test_another_model_is_not_dinos(tmp_path, model):
    file = saved(tmp_path, headless(model))
    named = importing.read(file, arch=f"timm:{model}")
    assert named.method == "unknown", "a file of this kind does not say who trained it"
    assert named.pixels.mean == timm.get_pretrained_cfg(model).mean, "the name's pixels"
    chosen = importing.read(file, arch=f"timm:{model}", pixels="half")
    assert chosen.pixels.mean[0] == 0.5


@pytest.mark.parametrize(
    ("table", "method"), [("", "dino"), ("state_dict", "ibot"), ("model", "mae")]
)
def test_a_bare_transformer_is_asked_about(tmp_path, table, method):
    state = headless("vit_small_patch16_224" if method != "mae" else "vit_base_patch16_224")
    file = saved(tmp_path, {table: state} if table else state)
    with pytest.raises(BadInput, match=r"--arch timm:NAME --pixels P .*--method dino, ibot or mae"):
        importing.read(file)
    assert importing.read(file, method=method).method == method


DEPTHS = {"wide_resnet50_2": 50, "resnext50_32x4d": 50, "resnet50d": 50}


@pytest.mark.parametrize("model", list(DEPTHS))
def test_other_resnets_are_timms(tmp_path, model):
    """Wide, grouped, deep stem: named as no trunk of ours, and loaded strictly under their name."""
    torch.manual_seed(0)
    theirs = timm.create_model(model)
    file = saved(tmp_path, theirs.state_dict())
    with pytest.raises(BadInput, match="--arch timm:NAME"):
        importing.read(file)
    checkpoint = importing.read(file, arch=f"timm:{model}", pixels="imagenet")
    x = torch.randn(1, 3, 64, 64)
    theirs.reset_classifier(0)
    with torch.no_grad():
        assert torch.allclose(checkpoint.backbone().eval()(x), theirs.eval()(x), atol=1e-5)
    state = theirs.state_dict()
    del state["layer3.1.conv2.weight"]
    with pytest.raises(BadInput, match=r"layer3\.1\.conv2\.weight"):
        importing.read(saved(tmp_path, state), arch=f"timm:{model}", pixels="imagenet")


def test_torchvisions_convnext_has_the_same_features(tmp_path):
    theirs = torchvision.models.convnext_tiny().eval()
    checkpoint = importing.read(saved(tmp_path, theirs.state_dict()))
    assert checkpoint.arch == "timm:convnext_tiny" and checkpoint.method == "supervised"
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        wanted = theirs.classifier[:2](theirs.avgpool(theirs.features(x)))
        assert torch.allclose(checkpoint.backbone().eval()(x), wanted, atol=1e-4)


@pytest.mark.parametrize("model", ["resnet18", "timm:vit_small_patch16_224"])
def test_a_reading_that_the_trunk_lacks_is_refused_at_import(tmp_path, model):
    timms = model.startswith("timm:")
    state = headless(model.removeprefix("timm:"))
    how = {"arch": model, "pixels": "half"} if timms else {}
    with pytest.raises(BadInput, match="reading"):
        importing.read(saved(tmp_path, state), reading="map", **how)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [("hidden_act", "relu", "act_layer=relu"), ("rope_theta", 10000.0, "'rope_theta' is 10000")],
)
def test_the_hubs_configuration_is_read_or_refused(tmp_path, key, value, match):
    from support import timm_fixtures as fx

    model = "timm:vit_small_patch16_224"
    config = {"model_type": "vit", "num_attention_heads": 6, "hidden_act": "gelu", key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = fx.hub_vit(headless("vit_small_patch16_224"))
    file = saved(tmp_path, state, "pytorch_model.bin")
    try:
        said = importing.read(file, pixels="half").arch
    except BadInput as error:
        said = str(error)
    assert model in said or key in said
    assert match in said
