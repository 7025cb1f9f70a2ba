"""Runs losses in full precision, whatever the network runs in. Three of them (the queue's
log-sum-exp, the nuclear norm, MIO's pairs) know their gradient with their value: forward saves it,
backward only scales it. Nothing of the intermediate size, (N, K) or (2N, 2N), is kept."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

P = ParamSpec("P")


class GradientContext(Protocol):
    """The `ctx` of a torch.autograd.Function whose forward saves its own gradient."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def full_precision(loss: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Run `loss` without autocast, on floating arguments of one dtype: float64 where one of them
    is, else float32."""

    @functools.wraps(loss)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        floating = [x for x in (*args, *kwargs.values()) if _is_floating(x)]
        dtypes = {x.dtype for x in floating}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32

        def to_full(x: object) -> object:
            return x.to(dtype) if _is_floating(x) else x

        full: Any = [to_full(x) for x in args]
        named: Any = {name: to_full(x) for name, x in kwargs.items()}
        with torch.autocast(floating[0].device.type, enabled=False):
            return loss(*full, **named)

    return wrapped


def _is_floating(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.is_floating_point()


def raised(x: Tensor) -> Tensor:
    """Raise float16 and bfloat16 to float32; leave float32 and float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@full_precision
def unit(x: Tensor) -> Tensor:
    """Scale vectors (..., d) to length 1."""
    return F.normalize(x, dim=-1)
