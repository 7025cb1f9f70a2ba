"""A classifier comes along with its trunk, under the names of the trunk's own library."""

import hashlib
import re

import pytest
import timm
import torch
import torchvision
from support import timm_fixtures as fx

from backbench.cli import program
from backbench.errors import BadInput
from backbench.weights import importing, undrawn
from backbench.weights.families import file_classifier, timm_classifier

LINEAR = {"weight": torch.randn(3, 32), "bias": torch.randn(3)}


def below(name):
    return {f"{name}.{part}": tensor for part, tensor in LINEAR.items()}


def of_authors(state):
    return {"model": fx.convnext(state)["model"] | below("head")}


def of_torchvision(state):
    return fx.torchvision_convnext(state) | below("classifier.2")


def of_the_hub(state):
    return fx.hub_convnext(state) | below("classifier")


@pytest.mark.parametrize("maker", [of_authors, of_torchvision, of_the_hub])
def test_each_authors_name_of_it_becomes_timms(maker, tmp_path):
    arch = "timm:convnext_tiny" + fx.SMALL_NEXT
    torch.save(maker(fx.known(arch)), tmp_path / "x.pth")
    heads = importing.read(tmp_path / "x.pth", arch=arch).heads
    assert heads.keys() == {"head.fc.weight", "head.fc.bias"}
    for part, tensor in LINEAR.items():
        assert torch.equal(heads[f"head.fc.{part}"], tensor)


def test_one_below_another_prefix_than_the_trunk_is_found(tmp_path):
    arch = "timm:vit_tiny_patch16_224" + fx.SMALL_VIT
    made = fx.prefixed("vit.", fx.hub_vit(fx.known(arch))) | below("classifier")
    torch.save(made, tmp_path / "x.pth")
    heads = importing.read(tmp_path / "x.pth", arch=arch, pixels="half").heads
    assert heads.keys() == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    "beside",
    [
        below("head.0") | below("head.2"),
        {"head.weight": torch.randn(3, 16), "head.bias": torch.randn(3)},
        {"head.0.weight": torch.randn(32, 32)},
        below("projector"),
    ],
)
def test_a_projector_is_no_classifier(beside, tmp_path):
    arch = "timm:vit_tiny_patch16_224" + fx.SMALL_VIT
    torch.save(fx.known(arch) | beside, tmp_path / "x.pth")
    found = importing.read(tmp_path / "x.pth", arch=arch)
    assert found.heads.keys() == beside.keys()
    assert timm_classifier.own_head(found) is None
    with pytest.raises(BadInput, match=r"no head of its own that is known.*--protocol"):
        timm_classifier.classifier(found)


def test_one_of_imagenets_classes_is_found_behind_many_other_layers():
    layers = {f"fc.{n}.weight": torch.empty(n + 1, 7, device="meta") for n in range(6)}
    with undrawn.without_memory():
        model = timm.create_model("test_vit", num_classes=1000).state_dict()
    trunk = [key for key in model if not key.startswith("head.")]
    tensors = layers | model
    found = file_classifier.found("timm:test_vit", "", tensors, trunk)
    assert found.classes == 1000
    assert found.names == {key: key for key in ("head.weight", "head.bias")}


def test_it_gives_the_logits_of_its_author(tmp_path, capsys):
    torch.manual_seed(0)
    theirs = torchvision.models.efficientnet_b0().eval()
    torch.save(theirs.state_dict(), tmp_path / "x.pth")
    options = ["--arch", "timm:efficientnet_b0", "--rename", "by-order"]
    out = tmp_path / "x.safetensors"
    words = ["import", str(tmp_path / "x.pth"), *options, "--out", str(out)]
    assert program.main(words) == 0
    said = re.search(
        r"its classifier of 1000 classes comes along \(classifier\.weight, classifier\.bias;"
        r" digest (\w+)\)",
        capsys.readouterr().out,
    )
    model, head = timm_classifier.classifier(importing.read(out))
    assert head.digest.startswith(said[1])
    pixels = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(pixels), theirs(pixels), rtol=1e-4, atol=1e-4)
    # Another classifier has another digest
    torch.nn.init.ones_(theirs.classifier[1].bias)
    torch.save(theirs.state_dict(), tmp_path / "y.pth")
    other = importing.read(
        tmp_path / "y.pth", arch="timm:efficientnet_b0", rename="by-order"
    )
    assert timm_classifier.own_head(other).digest != head.digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_its_digest_is_over_the_bytes_that_the_file_holds(dtype, tmp_path, capsys):
    state = timm.create_model("test_convnext", num_classes=4).state_dict()
    held = {key: tensor.to(getattr(torch, dtype)) for key, tensor in state.items()}
    torch.save(held, tmp_path / "x.pth")
    words = ["import", str(tmp_path / "x.pth"), "--arch", "timm:test_convnext"]
    assert program.main([*words, "--out", str(tmp_path / "x.safetensors")]) == 0
    sha = hashlib.sha256()
    for name in ("head.fc.bias", "head.fc.weight"):
        sha.update(name.replace(".", "/").encode())
        sha.update(bytes(held[name].flatten().view(torch.uint8).tolist()))
    assert f"digest {sha.hexdigest()[:12]})" in capsys.readouterr().out


def test_what_stays_behind_is_named(tmp_path, capsys):
    state = timm.create_model("test_convnext", num_classes=4).state_dict()
    made = {
        "state_dict": state,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}},
        "queue": torch.ones(2),
    }
    torch.save(made, tmp_path / "x.pth")
    out = tmp_path / "x.safetensors"
    words = ["import", str(tmp_path / "x.pth"), "--arch", "timm:test_convnext"]
    assert program.main([*words, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "its classifier of 4 classes comes along (head.fc.weight" in printed
    assert "ood_own" not in printed, "ImageNet's sets need 1000 classes"
    left = "left behind: optimiser: 1 (optimizer.state.0: exp_avg); queue: 1 (queue)"
    assert left in printed
    arch = fx.CASES[fx.ijepa][1]
    torch.save(fx.ijepa(fx.known(arch)), tmp_path / "x.pth")
    words = ["import", str(tmp_path / "x.pth"), "--arch", arch, "--out", str(out)]
    assert program.main(words) == 0
    printed = capsys.readouterr().out
    assert "left behind: the encoder context; " in printed
    assert "predictor: 13 (predictor: module.predictor_" in printed
