"""Counts what a trunk costs, which a comparison needs beside the score: parameters, multiply-adds."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.trunk import Trunk

Facts = dict[str, str | int | float | list[int] | None]


def facts(checkpoint: Checkpoint, side: int) -> Facts:
    """Return a checkpoint's costs. `gflops` are billions of multiply-adds for the features of one
    side x side image, as torch counts them (4.1 for a ResNet-50 at 224); None if not countable."""
    gflops = _of_features(checkpoint.arch, checkpoint.stem, checkpoint.reading, side)
    return {
        "reading": checkpoint.reading,
        "parameters": checkpoint.parameters,
        "side": side,
        "gflops": gflops,
    }


def of_maps(
    checkpoint: Checkpoint,
    sides: tuple[int, int],
    given: Callable[[Tensor, Trunk], Tensor],
) -> Facts:
    """Return the costs of a trunk in a detector: `gflops` are those of its maps alone, for one image
    of `sides` = (height, width) pixels. `given` makes the trunk's input of the detector's images."""
    gflops = _of_maps(
        checkpoint.arch, checkpoint.stem, checkpoint.reading, sides, given
    )
    return {"parameters": checkpoint.parameters, "sides": list(sides), "gflops": gflops}


@functools.cache
def _of_features(arch: str, stem: str, reading: str, side: int) -> float | None:
    trunk = archs.family_of(arch).blank(arch, stem, reading)
    known = trunk.multiply_adds(side)
    if known is None:
        return _gflops(trunk, (side, side))
    return round(known / 1e9, 4)


@functools.lru_cache(maxsize=16)
def _of_maps(
    arch: str,
    stem: str,
    reading: str,
    sides: tuple[int, int],
    given: Callable[[Tensor, Trunk], Tensor],
) -> float | None:
    trunk = archs.family_of(arch).blank(arch, stem, reading)
    return _gflops(lambda image: trunk.stages(given(image, trunk)), sides)


def _gflops(call: Callable[[Tensor], object], sides: tuple[int, int]) -> float | None:
    """Count the multiply-adds of `call` for one image without elements, in billions."""
    from torch.utils.flop_counter import FlopCounterMode

    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call(torch.empty(1, 3, *sides, device="meta"))
    except Exception:
        # A stranger's module may raise anything on tensors without elements.
        return None
    # torch counts the multiplication and the addition each.
    return round(counter.get_total_flops() / 2e9, 4)
