"""Strides that become dilations: in one step or in several, of one trunk and of a pair."""

import copy

import pytest
import torch

from backbench.weights.families.pair_trunk import LabPair
from backbench.weights.families.resnet_trunk import build_backbone


@pytest.mark.parametrize(
    ("arch", "steps"),
    [
        *[("resnet18", steps) for steps in ((16, 8), (8, 4), (16, 4), (8, 16), (8, 8))],
        ("resnet50", (16, 8, 4)),
    ],
)
def test_a_stride_may_be_replaced_in_several_steps(arch, steps):
    """All places of the map that was there before keep their features."""
    torch.manual_seed(0)
    trunk = build_backbone(arch, width=0.125).eval().double()
    at_once = copy.deepcopy(trunk)
    for stride in steps:
        trunk.dilate(stride)
    at_once.dilate(min(steps))
    assert trunk.strides == at_once.strides
    assert trunk.strides[-1] == min(steps)
    images = torch.randn(1, 3, 64, 96, dtype=torch.float64)
    with torch.no_grad():
        maps, expected = trunk.stages(images), at_once.stages(images)
    for mine, other in zip(maps, expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_pair_is_dilated_on_both_sides():
    torch.manual_seed(0)
    pair = LabPair("resnet18", "imagenet", 0.125).eval()
    images = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        before = pair.stages(images)
        pair.dilate(16)
        after = pair.stages(images)
    assert pair.strides == (4, 8, 16, 16)
    assert [tuple(each.shape[2:]) for each in after] == [
        (16, 24),
        (8, 12),
        (4, 6),
        (4, 6),
    ]
    assert before[-1].shape[2:] == (2, 3)
    torch.testing.assert_close(after[-1][:, :, ::2, ::2], before[-1])
    assert sum(pair.widths) == sum(each.shape[1] for each in after)
