"""Builds networks whose weights will come from a file, without drawing any first."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# What initialises a tensor in place: each function of torch.nn.init, and what timm's own are made of
_INITIALISERS = {
    function
    for name, function in vars(nn.init).items()
    if name.endswith("_") and not name.startswith("_")
}
_IN_PLACE = (
    "normal_",
    "uniform_",
    "erfinv_",
    "mul_",
    "div_",
    "add_",
    "clamp_",
    "zero_",
    "fill_",
)
_INITIALISERS |= {getattr(torch.Tensor, name) for name in _IN_PLACE}


class Undrawn(TorchFunctionMode):
    """Leaves parameters as their memory was: drawing is nine tenths of building a network.

    A state dict holds every parameter, so whoever loads one strictly overwrites them all. Buffers
    need not be in it, and are computed as ever. No random number is used up.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        # torch.nn.init passes its tensor by name
        tensor = args[0] if args else named.get("tensor")
        if func in _INITIALISERS and isinstance(tensor, nn.Parameter):
            return tensor
        return func(*args, **named)
