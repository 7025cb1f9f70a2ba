"""What the small files beside weights say: the Hub's, timm's, OpenCLIP's and our own export's."""

import json

import pytest

from backbench.errors import BadInput
from backbench.images.preprocess import CLIP_MEAN, CLIP_STD, Pixels
from backbench.weights.families import sidecar_metadata
from backbench.weights.family import TrunkMetadata


@pytest.fixture
def beside(tmp_path):
    """beside(weights, files): what is read beside a file of this name."""

    def read(weights, files):
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name).write_text(text)
        return sidecar_metadata.beside(tmp_path / weights)

    return read


VIT = {"model_type": "vit", "num_attention_heads": 6, "layer_norm_eps": 1e-12}


def test_transformers_tells_heads_eps_and_activation(beside):
    files = {"config.json": VIT | {"hidden_act": "gelu_new"}}
    files["preprocessor_config.json"] = {
        "image_mean": [0.1] * 3,
        "image_std": [0.2] * 3,
    }
    found = beside("model.safetensors", files)
    expected = {"num_heads": "6", "eps": "1e-12", "act_layer": "gelu_tanh"}
    assert found.options == expected
    assert found.activation == "gelu_tanh"
    assert found.pixels == Pixels((0.1,) * 3, (0.2,) * 3)
    assert found.source == "config.json"
    assert not found.names_model


def test_a_model_of_images_and_text_has_its_own_part_for_images(beside):
    whole = {"model_type": "clip", "num_attention_heads": 99, "vision_config": VIT}
    found = beside("pytorch_model.bin", {"config.json": whole})
    assert found.options == {"num_heads": "6", "eps": "1e-12"}
    assert found.pixels is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"hidden_act": "mish"},
            "/config.json: hidden_act 'mish': expected one of gelu, ",
        ),
        (
            {"rope_theta": 10000.0},
            "'rope_theta' is 10000.0, and no trunk here has another",
        ),
        ({"rope_scaling": {"a": 1}}, "'rope_scaling' is {'a': 1}, and no trunk here"),
        ({"num_attention_heads": "six"}, "not a configuration that is known"),
    ],
)
def test_what_no_trunk_here_does_is_refused(beside, change, says):
    with pytest.raises(BadInput) as error:
        beside("model.safetensors", {"config.json": VIT | change})
    assert says in str(error.value)


def test_usual_values_are_no_fault(beside):
    usual = {"rope_theta": 100.0, "rope_scaling": None, "hidden_act": ""}
    found = beside("model.safetensors", {"config.json": VIT | usual})
    assert found.options == {"num_heads": "6", "eps": "1e-12"}


def test_timm_names_its_model_with_the_arguments(beside):
    config = {
        "architecture": "vit_small_patch16_224",
        "model_args": {"img_size": 96, "num_classes": 10, "depths": [1, 2]},
        "global_pool": "avg",
        "mean": [0.4] * 3,
        "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.25] * 3, "license": "mit"},
    }
    found = beside("model.safetensors", {"config.json": config})
    assert found == TrunkMetadata(
        arch="timm:vit_small_patch16_224,img_size=96,depths=1-2",
        reading="mean",
        pixels=Pixels((0.5,) * 3, (0.25,) * 3),
        licence="mit",
        names_model=True,
        source="config.json",
    )
    config = {"architecture": "vit_small_patch16_224", "global_pool": "other"}
    plain = beside("model.safetensors", {"config.json": config})
    assert (plain.reading, plain.pixels, plain.licence) == ("", None, "")


@pytest.mark.parametrize(
    ("vision", "quick", "arch", "activation"),
    [
        (
            {"timm_model_name": "vit_base_patch16_clip_224"},
            True,
            "timm:vit_base_patch16_clip_224",
            "",
        ),
        ({"layers": 12}, True, "", "quick_gelu"),
        ({"layers": 12}, None, "", "gelu"),
    ],
)
def test_openclip_tells_its_model(beside, vision, quick, arch, activation):
    model = {"vision_cfg": vision} | ({} if quick is None else {"quick_gelu": quick})
    files = {"open_clip_config.json": {"model_cfg": model}, "config.json": VIT}
    found = beside("open_clip_pytorch_model.bin", files)
    assert (found.arch, found.activation) == (arch, activation)
    assert found.names_model == bool(arch)
    assert found.pixels == Pixels(tuple(CLIP_MEAN), tuple(CLIP_STD))
    assert found.source == "open_clip_config.json"
    pixels = {"mean": [0.1] * 3, "std": [0.3] * 3}
    files["open_clip_config.json"]["preprocess_cfg"] = pixels
    found = beside("open_clip_model.safetensors", files)
    assert found.pixels == Pixels((0.1,) * 3, (0.3,) * 3)


def test_our_own_export_tells_all(beside):
    pixels = {"mean": [0.1] * 3, "std": [0.3] * 3, "order": "BGR"}
    about = {
        "digest": "aa",
        "arch": "timm:vit_tiny",
        "reading": "cls",
        "pixels": pixels,
    }
    found = beside("mine.safetensors", {"mine.safetensors.json": about})
    assert (found.arch, found.reading) == ("timm:vit_tiny", "cls")
    assert found.pixels == Pixels((0.1,) * 3, (0.3,) * 3, "BGR")
    assert found.names_model
    # Another trunk's export tells itself, by its tensors
    about = about | {"arch": "resnet50"}
    assert (
        beside("mine.safetensors", {"mine.safetensors.json": about}) == TrunkMetadata()
    )


@pytest.mark.parametrize(
    "weights", ["mine.safetensors", "model.pth", "a_model.safetensors", "model.bin.txt"]
)
def test_a_configuration_counts_beside_the_hubs_names_alone(beside, weights):
    assert beside(weights, {"config.json": VIT}) == TrunkMetadata()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "config.json: not readable"),
        ("[]", "config.json: expected an object, not list"),
        ('{"architecture": "x", "model_args": 3}', "not a configuration that is known"),
    ],
)
def test_a_damaged_configuration_is_said(beside, text, says):
    with pytest.raises(BadInput, match=says):
        beside("model.safetensors", {"config.json": text})


@pytest.mark.parametrize("files", [{}, {"config.json": {"a": 1}}])
def test_what_says_nothing_is_no_fault(beside, files):
    found = beside("model.safetensors", files)
    assert (found.arch, found.options, found.pixels) == ("", {}, None)
