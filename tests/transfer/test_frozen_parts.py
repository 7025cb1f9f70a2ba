"""Tests that a trunk on a CPU takes few images at once, and gives the features of each."""

import torch

from backbench.transfer.features.frozen import CPU_IMAGES, FrozenTrunk
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint


def test_a_large_batch_passes_in_parts_in_its_order():
    torch.manual_seed(0)
    state = build_trunk("resnet18").state_dict()
    point = Checkpoint(arch="resnet18", method="random", state_dict=state)
    trunk = FrozenTrunk.build(point, device=torch.device("cpu"))
    sizes = []
    trunk.module.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2 * CPU_IMAGES + 5, 3, 32, 32, generator=generator)
    features = trunk(images)
    assert sum(sizes) == len(images)
    assert CPU_IMAGES // 2 <= min(sizes) <= max(sizes) <= CPU_IMAGES
    for index in (0, CPU_IMAGES, len(images) - 1):
        alone = trunk(images[index : index + 1])[0]
        torch.testing.assert_close(features[index], alone, rtol=1e-3, atol=1e-4)
