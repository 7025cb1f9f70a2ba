"""Trunks against torchvision's networks, and the stems against plain convolutions."""

import pytest
import torch
import torchvision
from torch import nn

from backbench.errors import BadInput
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families.resnet_trunk import ARCHS, STEMS, build_backbone, trunk_shapes


@pytest.mark.parametrize("arch", ARCHS)
def test_names_and_shapes_are_torchvisions(arch):
    with torch.device("meta"):
        theirs = getattr(torchvision.models, arch)().state_dict()
    assert trunk_shapes(arch) == {
        k: tuple(v.shape) for k, v in theirs.items() if not k.startswith("fc.")
    }
    assert len(trunk_shapes("resnet50")) == 318


@pytest.mark.parametrize(("arch", "dim"), [("resnet18", 512), ("resnet50", 2048)])
def test_draws_and_gradients_and_stages_are_torchvisions(arch, dim):
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, arch)()
    theirs.fc = nn.Identity()
    torch.manual_seed(0)
    ours = build_backbone(arch)
    images = torch.randn(2, 3, 64, 64)
    for trunk in (theirs, ours):
        trunk(images).square().sum().backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, gradients[name]), name
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-3)
    ours.eval(), theirs.eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))
    maps = ours.stages(images)
    widths = [dim // 8, dim // 4, dim // 2, dim]
    assert [tuple(m.shape) for m in maps] == [
        (2, c, side, side) for c, side in zip(widths, (16, 8, 4, 2))
    ]
    assert ours.feature_dim == dim


def test_a_width_is_of_the_stages_and_part_of_the_name(tmp_path):
    """`resnet18,width=0.25`: a quarter of each stage's channels, below the whole stem."""
    trunk = build_trunk("resnet18,width=0.25")
    assert trunk.widths == (16, 32, 64, 128) and trunk.feature_dim == 128
    assert trunk.strides == (4, 8, 16, 32)
    assert tuple(trunk.conv1.weight.shape) == (64, 3, 7, 7)
    made = Checkpoint(arch=trunk.arch, method="random", state_dict=trunk.state_dict())
    made.save(tmp_path / "narrow.safetensors")
    read = Checkpoint.load(tmp_path / "narrow.safetensors").backbone()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(read.eval()(images), trunk.eval()(images))
    with pytest.raises(BadInput, match="unknown architecture"):
        build_trunk("resnet18,width=0.3")


@pytest.mark.parametrize(("stem", "size"), [("conv3", 32), ("conv3_p0", 30), ("conv3_p2", 34)])
def test_small_stems_differ_in_padding_only(stem, size):
    trunk = build_backbone("resnet18", stem).eval()
    weight = trunk.conv1.weight
    assert weight.shape == (64, 3, 3, 3)
    images = torch.randn(1, 3, 32, 32)
    expected = nn.functional.conv2d(
        images, weight, padding={"conv3": 1, "conv3_p0": 0, "conv3_p2": 2}[stem]
    )
    assert torch.equal(trunk.conv1(images), expected)
    assert trunk.stages(images)[0].shape[-1] == size  # no max-pool, no stride
    assert trunk_shapes("resnet18", stem)["conv1.weight"] == (64, 3, 3, 3)


def test_zero_init_residual_zeroes_the_last_norm_of_each_block():
    trunk = build_trunk("resnet18", zero_init_residual=True)
    assert all(bool((block.bn2.weight == 0).all()) for block in trunk.layer1)
    assert all(bool((block.bn1.weight == 1).all()) for block in trunk.layer1)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(BadInput, match="unknown architecture 'resnet5'; did you mean 'resnet50'"):
        build_backbone("resnet5")
    with pytest.raises(BadInput, match="unknown stem 'conv3p0'; did you mean 'conv3_p0'"):
        build_backbone("resnet18", "conv3p0")
    assert set(STEMS) == {"imagenet", "conv3", "conv3_p0", "conv3_p2"}
