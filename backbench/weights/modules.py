"""A torch module that a program holds -> Checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.trunk import Trunk


def checkpoint_of(module: nn.Module, pixels: Pixels | None = None) -> Checkpoint | None:
    """Of a Trunk, or of a model that timm made and that the trunk of its name equals; None for any
    other module.

    A Trunk that no name builds (`ModuleTrunk`) becomes `python:NAME`, which only this process
    knows.
    """
    if isinstance(module, Trunk):
        return _of_trunk(module, pixels)
    about = getattr(module, "pretrained_cfg", None)
    if about is None or "architecture" not in about:
        return None
    return _of_timm(module, about, pixels or Pixels(tuple(about["mean"]), tuple(about["std"])))


def _of_trunk(trunk: Trunk, pixels: Pixels | None) -> Checkpoint:
    kind = type(getattr(trunk, "model", trunk)).__name__
    arch = getattr(trunk, "arch", "")
    try:
        archs.canonical(arch, getattr(trunk, "stem", archs.NATIVE))
    except BadInput:  # no name builds it
        arch = archs.register(kind, trunk)
    return Checkpoint(
        arch=arch,
        stem=trunk.stem,
        reading=trunk.reading,
        method="module",
        state_dict=trunk.state_dict(),
        pixels=pixels or archs.default_pixels(arch),
        provenance={"name": kind, "source": f"module {kind}"},
    )


def _of_timm(module: nn.Module, about: Any, pixels: Pixels) -> Checkpoint:
    """By the name that timm gave it. BadInput where that name's trunk is not this module: built
    with other arguments, or changed."""
    arch = f"timm:{about['architecture']}"
    names = archs.tensors(arch).keys()
    state = {name: tensor for name, tensor in module.state_dict().items() if name in names}
    found = Checkpoint(
        arch=arch,
        method="module",
        state_dict=state,
        pixels=pixels,
        provenance={
            "name": str(about["architecture"]),
            "source": f"module {type(module).__name__}",
        },
    )
    # Arguments that leave no tensor (heads, an activation) would change the features unseen
    side = int(about["input_size"][-1])
    x = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    device = next(module.parameters()).device
    training = module.training
    with torch.no_grad():
        model: Any = module.eval()
        theirs = model.forward_features(x.to(device)).cpu()
        trunk: Any = found.backbone().eval()
        ours = trunk.model.forward_features(x)
    module.train(training)
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-3, atol=1e-4):
        raise BadInput(
            f"this module is not timm's {about['architecture']} as it is registered: its features "
            "differ; give it as backbench.weights.trunk.ModuleTrunk"
        )
    return found
