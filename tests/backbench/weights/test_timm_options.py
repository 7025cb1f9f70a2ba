"""Options in the names of timm's models: what each does to the module, and what is refused."""

import functools

import pytest
import timm
import torch
from torch import nn

from backbench.errors import BadInput
from backbench.weights import archs, readings
from backbench.weights.families import timm_trunk
from backbench.weights.families.timm_model_names import parse
from backbench.weights.families.timm_models import TimmFamily
from backbench.weights.family import NATIVE, TrunkMetadata

VIT = "timm:vit_tiny_patch16_224,depth=2,embed_dim=24,img_size=32,num_heads=2,patch_size=8"
CONVNEXT = "timm:test_convnext"
# Without positions for its prefix tokens
DEIT3 = "timm:deit3_small_patch16_224,depth=1,embed_dim=24,img_size=32,num_heads=2,patch_size=8"


def trunk_of(arch, reading="cls"):
    torch.manual_seed(0)
    return archs.build_trunk(arch, NATIVE, reading).eval()


def images(side=32):
    return torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("arch", "reading"), [(VIT, "cls"), (CONVNEXT, readings.POOLED)]
)
def test_eps_is_that_of_all_norms(arch, reading):
    usual = trunk_of(arch, reading)
    other = trunk_of(f"{arch},eps=0.5", reading)
    norms = [m for m in other.modules() if isinstance(m, nn.LayerNorm)]
    assert norms and {norm.eps for norm in norms} == {0.5}
    assert not torch.allclose(usual(images()), other(images()))


@pytest.mark.parametrize(
    ("arch", "reading"),
    [(VIT, "cls"), (f"{VIT},eps=0.5", "cls"), (f"{CONVNEXT},eps=0.5", readings.POOLED)],
)
def test_the_call_that_is_told_builds_the_same_network(arch, reading):
    """A reader who has timm alone types it."""
    call = TimmFamily().loaded_by(arch, NATIVE, "timm")
    theirs = eval(call, {"timm": timm, "nn": nn, "partial": functools.partial})
    ours = trunk_of(arch, reading)
    theirs.load_state_dict(ours.model.state_dict())
    with torch.no_grad():
        features = theirs.eval().forward_features(images())
        torch.testing.assert_close(features, ours.model.forward_features(images()))
    assert TimmFamily().loaded_by(arch, NATIVE, "transformers") is None


@pytest.mark.parametrize(
    ("options", "differ"),
    [
        ({}, {}),
        ({"num_heads": "3", "eps": "1e-6", "act_layer": "gelu"}, {}),
        ({"num_heads": "6"}, {"num_heads": "6"}),
        ({"eps": "1e-5"}, {"eps": "1e-5"}),
        # The Hub's conversions wrote their default, for models that were trained with more
        ({"eps": "1e-12"}, {}),
        ({"act_layer": "quick_gelu"}, {"act_layer": "quick_gelu"}),
    ],
)
def test_options_that_the_model_has_already_are_not_named(options, differ):
    name = parse("timm:vit_tiny_patch16_224")
    assert timm_trunk.differences(name, options) == differ


def test_an_activation_counts_where_the_block_has_a_plain_one():
    convnext = parse(CONVNEXT)
    assert timm_trunk.differences(convnext, {"act_layer": "gelu_tanh"}) == {}
    assert timm_trunk.differences(convnext, {"act_layer": "relu"}) == {
        "act_layer": "relu"
    }
    assert timm_trunk.differences(convnext, {"num_heads": "3"}) == {}
    gated = parse("timm:vit_giant_patch14_dinov2")  # SwiGLU
    assert timm_trunk.differences(gated, {"act_layer": "relu"}) == {}


@pytest.mark.parametrize("arch", [VIT, DEIT3])
@pytest.mark.parametrize("rule", ["+0.1", "aa", "size"])
def test_a_rule_for_positions_leaves_their_own_size_alone(arch, rule):
    usual, ruled = trunk_of(arch), trunk_of(f"{arch},pos={rule}")
    ruled.load_state_dict(usual.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ruled(images()), usual(images()))
        assert ruled(images(48)).shape == (2, 24)
    assert (usual.size, ruled.size) == (32, None)
    with pytest.raises(BadInput, match="pos=RULE"):
        usual(images(48))


@pytest.mark.parametrize(
    ("arch", "says"),
    [
        (
            f"{CONVNEXT},pos=aa",
            "it has no position embeddings to resize; leave out pos",
        ),
        (
            f"{VIT},pos=other",
            r"'other' in the trunk's name: expected \+0.1 or aa or size",
        ),
        (f"{VIT},eps=0", "'0' in the trunk's name: expected a number above 0"),
        (f"{VIT},eps=1e7", "expected a number above 0"),
        (
            f"{VIT},depth=0",
            "'0' in the trunk's name: expected a whole number from 1 to 200",
        ),
        (f"{VIT},depth=201", "expected a whole number from 1 to 200"),
        (f"{VIT},embed_dim=65537", "expected a whole number from 1 to 65536"),
        (f"{VIT},depths={'1-' * 8}1", "expected a number for each stage"),
        (f"{VIT},act_layer=mish", "expected gelu or quick_gelu or "),
        (f"{VIT},colour=red", "'colour=red' is none of img_size, "),
        (f"{VIT},depth", "'depth' is none of img_size, "),
        (
            "timm:vit_tiny_patch17_224",
            "has no model 'vit_tiny_patch17_224'; .*patch16_224",
        ),
        (f"{CONVNEXT},num_heads=3", "cannot be built: "),
        ("timm:vit_tiny_patch16_224,embed_dim=25", "cannot be built: "),
    ],
)
def test_a_name_that_is_none_is_refused(arch, says):
    with pytest.raises(BadInput, match=says):
        trunk_of(arch, "cls")


@pytest.mark.parametrize(
    ("arch", "reading", "says"),
    [
        (VIT, readings.POOLED[::-1], "expected cls, mean"),
        (VIT, readings.MAP, "has no reading 'map'"),
        (VIT, "cls@3", "2 layers, 'cls@3' reads more"),
        (CONVNEXT, "cls", "is read by 'pooled' alone, not by 'cls'"),
        ("timm:vit_tiny_patch16_gap,depth=1,embed_dim=24,num_heads=2", "cls", "cls"),
    ],
)
def test_a_reading_that_the_model_lacks_is_refused(arch, reading, says):
    arch = arch.replace("vit_tiny_patch16_gap", "vit_base_patch16_siglip_gap_224")
    with pytest.raises(BadInput, match=says):
        trunk_of(arch, reading)


def test_readings_of_several_layers_are_joined():
    trunk = trunk_of(VIT, "cls@2+mean")
    assert trunk.feature_dim == 72
    x = images()
    with torch.no_grad():
        features = trunk(x)
        tokens = trunk.model.forward_features(x)
        _, found = trunk.model.forward_intermediates(
            x, return_prefix_tokens=True, norm=True
        )
        expected = [prefix[:, 0] for _, prefix in found] + [tokens[:, 1:].mean(1)]
        torch.testing.assert_close(features, torch.cat(expected, 1))
        layers = trunk.layers(x)
    torch.testing.assert_close(layers.feature, features)
    assert (layers.what, len(layers.maps), len(layers.class_tokens)) == ("block", 2, 2)
    assert layers.maps[0].shape == (2, 24, 4, 4)


def test_a_reading_by_attention_is_the_models_own():
    arch = "timm:vit_base_patch16_siglip_224,depth=1,embed_dim=24,img_size=32,num_heads=2,patch_size=8"
    trunk = trunk_of(arch, readings.MAP)
    x = images()
    with torch.no_grad():
        features = trunk(x)
        expected = trunk.model.forward_head(
            trunk.model.forward_features(x), pre_logits=True
        )
        layers = trunk.layers(x)
    torch.testing.assert_close(features, expected)
    torch.testing.assert_close(layers.feature, features)
    assert (len(layers.maps), layers.class_tokens) == (1, [])
    assert trunk.feature_dim == 24


def test_maps_of_a_transformer_and_of_a_pyramid():
    (single,) = trunk_of(VIT).stages(images())
    assert single.shape == (2, 24, 4, 4)
    pyramid = trunk_of(CONVNEXT, readings.POOLED)
    maps = pyramid.stages(images(64))
    assert [64 // each.shape[-1] for each in maps] == list(pyramid.strides)
    assert [each.shape[1] for each in maps] == list(pyramid.widths)
    layers = pyramid.layers(images(64))
    assert (layers.what, layers.class_tokens) == ("stage", [])
    assert [each.shape for each in layers.maps] == [each.shape for each in maps]
    torch.testing.assert_close(layers.feature, pyramid(images(64)))


# Names that stand for weights


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("timm:resnet18@random", "resnet18"),
        ("timm:test_vit@random", "timm:test_vit"),
        (f"{VIT}@random", VIT),
    ],
)
def test_a_random_trunk_needs_no_file(name, arch):
    named = TimmFamily().named_weights(name, TrunkMetadata())
    assert (named.name, named.file) == (name, None)
    assert parse(named.metadata.arch) == parse(arch)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "timm:resnet18.a1_in1k@random",
            "what is random has no tag; leave out .a1_in1k",
        ),
        ("timm:", "expected timm:NAME, timm:NAME.TAG or timm:NAME@random"),
        ("timm:a/b", "expected timm:NAME"),
        (
            "timm:resnet18.a9_in1k",
            "timm:resnet18 has no weights 'a9_in1k'; did you mean 'a",
        ),
        ("timm:resnet19", "has no model 'resnet19'"),
        ("timm:vit_tiny_patch16_18x2_224", "has no (weights on the Hub|model)"),
    ],
)
def test_a_name_that_stands_for_no_weights_is_said(name, says):
    with pytest.raises(BadInput, match=says):
        TimmFamily().named_weights(name, TrunkMetadata())


def test_other_names_are_not_timms():
    assert TimmFamily().named_weights("resnet18", TrunkMetadata()) is None


def test_weights_in_the_hubs_cache_are_found(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    family = TimmFamily()
    assert family.cached_names() == []
    for name, file in (
        ("b", "model.safetensors"),
        ("a", "model.safetensors"),
        ("c", "x.txt"),
    ):
        folder = tmp_path / f"models--timm--{name}" / "snapshots" / "1234"
        folder.mkdir(parents=True)
        (folder / file).touch()
    (tmp_path / "models--other--d" / "snapshots" / "1").mkdir(parents=True)
    assert family.cached_names() == ["timm:a", "timm:b"]


def test_a_checkpoint_of_timms_training_names_its_model(tmp_path):
    module = timm.create_model("test_convnext", num_classes=0)
    state = dict(module.state_dict())
    tree = {"arch": "test_convnext", "version": 2, "state_dict": state}
    tables = {"state_dict": state}
    (found,) = TimmFamily().find(tables, tree, tmp_path / "a.pth", TrunkMetadata())
    assert found.metadata.arch == CONVNEXT


# Modules that timm has made


def test_a_module_of_timms_is_known_by_its_configuration():
    family = TimmFamily()
    module = timm.create_model("test_convnext", num_classes=3).train()
    arch, pixels = family.of_module(module)
    assert arch == CONVNEXT
    assert pixels.mean == tuple(module.pretrained_cfg["mean"])
    assert pixels.std == tuple(module.pretrained_cfg["std"])
    assert module.training  # as it was
    assert family.of_module(nn.Linear(2, 2)) is None
    resnet = timm.create_model("resnet18", num_classes=0)
    assert family.of_module(resnet)[0] == "resnet18"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_of_timms_has_the_options_that_it_was_made_with(dtype):
    options = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32}
    module = timm.create_model("vit_tiny_patch16_224", num_heads=2, **options)
    module = module.to(dtype)
    arch, _ = TimmFamily().of_module(module)
    assert arch == (
        "timm:vit_tiny_patch16_224,depth=2,embed_dim=32,img_size=32,num_heads=2,patch_size=8"
    )
    assert next(module.parameters()).dtype == dtype  # as it was


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("test_convnext", {"in_chans": 1}),
        ("test_vit", {"img_size": (32, 64)}),
        ("test_vit", {"global_pool": "avg"}),
    ],
)
def test_a_module_that_no_option_makes_is_refused(model, options):
    module = timm.create_model(model, num_classes=0, **options)
    with pytest.raises(
        BadInput,
        match=f"^this module is not timm's {model} as it is registered: its tensors differ;"
        r" give it as backbench\.ModuleTrunk$",
    ):
        TimmFamily().of_module(module)


def test_a_module_that_was_changed_is_refused():
    module = timm.create_model("test_convnext", num_classes=0)
    for block in module.modules():
        if isinstance(block, nn.LayerNorm):
            block.eps = 0.5
    with pytest.raises(
        BadInput, match="this module is not timm's test_convnext as it is"
    ):
        TimmFamily().of_module(module)
