"""Makes random trunks, and extractors of their features."""

import functools

import torch

from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.features.frozen import FrozenTrunk
from backbench.transfer.protocol import Geometry
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint
from support.layouts import SMALL

CPU = torch.device("cpu")
GEOMETRY = Geometry(resize=40, crop=32)


@functools.cache  # nobody changes one
def checkpoint(seed=0, arch=SMALL, **about):
    """A checkpoint of a random trunk, whose batch norms are no longer the identity."""
    torch.manual_seed(seed)
    trunk = build_trunk(arch).train()
    with torch.no_grad():
        for _ in range(2):
            trunk(torch.randn(8, 3, 32, 32))
        for name, value in trunk.named_parameters():
            if "bn" in name or "downsample.1" in name:
                value.add_(0.2 * torch.randn_like(value))
    return Checkpoint(
        arch=arch, method="random", state_dict=trunk.state_dict(), **about
    )


def extractor(cache, *checkpoints, precision="fp32", workers=0, stop=None):
    """An extractor of the features of these checkpoints, four images at a time, on the CPU."""
    trunks = []
    for point in checkpoints:
        trunks.append(FrozenTrunk.build(point, device=CPU, precision=precision))
    return Extractor(
        trunks=trunks,
        geometry=GEOMETRY,
        cache=cache,
        machine=Machine(CPU, rank=0, world=1, workers=workers),
        batch=4,
        stop=stop,
    )
