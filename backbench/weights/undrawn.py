"""Builds networks whose weights will come from a file, or which are only looked at, without drawing
any first."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_OF_TORCH = {
    function
    for name, function in vars(nn.init).items()
    if name.endswith("_") and not name.startswith("_")
}
# What timm's own initialisers are made of
_OF_TENSORS = {
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
    torch.Tensor.erfinv_,
    torch.Tensor.mul_,
    torch.Tensor.div_,
    torch.Tensor.add_,
    torch.Tensor.clamp_,
    torch.Tensor.zero_,
    torch.Tensor.fill_,
}
# These write into a tensor in place, and return it
_INITIALISERS = _OF_TORCH | _OF_TENSORS
# Each thread has modes of its own
_HERE = threading.local()


class Undrawn(TorchFunctionMode):
    """Leaves parameters as their memory was: drawing is nine tenths of building a network.

    A state dict holds every parameter, so whoever loads one strictly overwrites them all. Buffers
    need not be in it, and are computed as ever. No random number is used up.
    """

    def __enter__(self) -> "Undrawn":
        super().__enter__()
        _HERE.depth = getattr(_HERE, "depth", 0) + 1
        return self

    def __exit__(self, *error: Any) -> None:
        _HERE.depth -= 1
        super().__exit__(*error)

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


def is_on() -> bool:
    """Return True within `Undrawn`."""
    return getattr(_HERE, "depth", 0) > 0


@contextmanager
def without_memory() -> Iterator[None]:
    """Build networks without elements, for their names, shapes and attributes.

    torch computes the shape of each draw on the meta device in Python, which takes longer than all
    the rest and loads its compiler.
    """
    with torch.device("meta"), Undrawn():
        yield
