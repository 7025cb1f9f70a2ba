"""A torch module that a program holds -> Checkpoint."""

from __future__ import annotations

from torch import nn

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.family import NATIVE
from backbench.weights.trunk import Trunk


def checkpoint_of(module: nn.Module, pixels: Pixels | None = None) -> Checkpoint | None:
    """The checkpoint of a module that some family of trunks knows; None for any other module.

    `pixels` are the statistics that it takes, where they are not the family's own.
    """
    kind = type(getattr(module, "model", module)).__name__ if isinstance(module, Trunk) else ""
    if isinstance(module, Trunk) and _has_name(module):
        return Checkpoint(
            arch=module.arch,
            stem=module.stem,
            reading=module.reading,
            method="module",
            state_dict=module.state_dict(),
            pixels=pixels or archs.default_pixels(module.arch),
            provenance={"name": kind, "source": f"module {kind}"},
        )
    for family in archs.FAMILIES:
        given = family.of_module(module)
        if given is not None:
            return Checkpoint(
                arch=given.arch,
                method="module",
                state_dict=given.state_dict,
                pixels=pixels or given.pixels,
                provenance={
                    "name": given.name,
                    "source": f"module {kind or type(module).__name__}",
                },
            )
    return None


def _has_name(trunk: Trunk) -> bool:
    """True for a trunk that its name builds."""
    try:
        archs.canonical(getattr(trunk, "arch", ""), getattr(trunk, "stem", NATIVE))
    except BadInput:
        return False
    return True
