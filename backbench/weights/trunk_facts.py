"""What a comparison across trunks needs beside the score: size and cost of an image."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor

from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.trunk import Trunk


class TrunkFacts(TypedDict):
    """Of features: `gflops` are billions of multiply-adds for one image of `side` x `side` pixels,
    as fvcore counts them (a ResNet-50 at 224: 4.1); None where the trunk cannot be counted."""

    reading: str
    parameters: int
    side: int
    gflops: float | None


class MapFacts(TypedDict):
    """Of the trunk below a detector: `gflops` are those of its maps alone, for one image of `sides`
    = [height, width] pixels."""

    parameters: int
    sides: list[int]
    gflops: float | None


def facts(checkpoint: Checkpoint, side: int) -> TrunkFacts:
    """Of a checkpoint's trunk, for images of side x side pixels."""
    parameters, gflops = _counted(checkpoint.arch, checkpoint.stem, checkpoint.reading, side)
    return {
        "reading": checkpoint.reading,
        "parameters": parameters,
        "side": side,
        "gflops": gflops,
    }


def of_maps(
    checkpoint: Checkpoint, sides: tuple[int, int], given: Callable[[Tensor, Trunk], Tensor]
) -> MapFacts:
    """Of a checkpoint's trunk in a detector; `given` makes of the detector's images what the trunk
    is given."""
    trunk = _blank(checkpoint.arch, checkpoint.stem, checkpoint.reading)
    image = torch.empty(1, 3, *sides, device="meta")
    gflops = _gflops(trunk, lambda: trunk.stages(given(image, trunk)))
    return {"parameters": _size(trunk), "sides": list(sides), "gflops": gflops}


@functools.cache
def _counted(arch: str, stem: str, reading: str, side: int) -> tuple[int, float | None]:
    """Parameters, and billions of multiply-adds."""
    trunk = _blank(arch, stem, reading)
    image = torch.empty(1, 3, side, side, device="meta")
    return _size(trunk), _gflops(trunk, lambda: trunk(image))


def _blank(arch: str, stem: str, reading: str) -> Trunk:
    """The trunk without elements, so that counting takes no time."""
    if arch.startswith(archs.LIVE):
        return archs.build_trunk(arch, stem, reading).to("meta").eval()
    with torch.device("meta"):
        return archs.build_trunk(arch, stem, reading).eval()


def _size(trunk: Trunk) -> int:
    return sum(parameter.numel() for parameter in trunk.parameters())


def _gflops(trunk: Trunk, call: Callable[[], object]) -> float | None:
    """Billions of multiply-adds of `call`, on tensors without elements."""
    from torch.utils.flop_counter import FlopCounterMode

    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call()
    except Exception:  # whatever a stranger's module does without elements
        return None
    return round(counter.get_total_flops() / 2e9, 4)  # it counts both of a multiply-add
