"""Losses run in full precision, whatever the network around them runs in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

P = ParamSpec("P")


def full_precision(loss: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Autocast off inside; floating arguments become float64 where one of them is, float32 otherwise."""

    @functools.wraps(loss)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        tensors = [
            x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()
        ]
        dtype = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32

        def to_full(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

        with torch.autocast(tensors[0].device.type, enabled=False):
            return loss(*map(to_full, args), **{k: to_full(v) for k, v in kwargs.items()})

    return wrapped


def raised(x: Tensor) -> Tensor:
    """float16 and bfloat16 become float32; the rest stays."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@full_precision
def unit(x: Tensor) -> Tensor:
    """(..., d) -> vectors of length 1."""
    return F.normalize(x, dim=-1)
