"""What torch has for a GPU alone, for tensors that lie on the CPU: the parts of its synchronised
batch norm, as they are documented by what they give there."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _axes(x: Tensor) -> list[int]:
    """All but the channels."""
    return [0, *range(2, x.dim())]


def _by_channel(v: Tensor, x: Tensor) -> Tensor:
    return v.view(1, -1, *[1] * (x.dim() - 2))


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / deviation (C,), in float32 at least."""
    full = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    variance = full.var(_axes(x), unbiased=False)
    return full.mean(_axes(x)), (variance + eps).rsqrt()


def gather_stats(  # noqa: PLR0917  (torch's)
    x: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Of (ranks, C) and (ranks,); the running statistics move."""
    share = (counts / counts.sum())[:, None].to(means.dtype)
    mean = (share * means).sum(0)
    variances = inverses.square().reciprocal() - eps
    variance = (share * (variances + (means - mean).square())).sum(0)
    if running_mean is not None and running_var is not None:
        total = counts.sum()
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        unbiased = variance * (total / (total - 1)).to(variance.dtype)
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return mean, (variance + eps).rsqrt()


def normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, *_: float
) -> Tensor:
    out = (x - _by_channel(mean, x)) * _by_channel(inverse, x)
    if weight is not None and bias is not None:
        out = out * _by_channel(weight, x) + _by_channel(bias, x)
    return out.to(x.dtype)


def backward_reduce(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, *_: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over samples and places of g and g (x - mean), and the gradients of weight and bias."""
    of_grad = grad.sum(_axes(x))
    of_product = (grad * (x - _by_channel(mean, x))).sum(_axes(x))
    return of_grad, of_product, of_product * inverse, of_grad.clone()


def backward(  # noqa: PLR0917  (torch's)
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    of_grad: Tensor,
    of_product: Tensor,
    counts: Tensor,
) -> Tensor:
    total = int(counts.sum())
    centred = (x - _by_channel(mean, x)) * _by_channel(inverse.square() * of_product / total, x)
    scale = inverse if weight is None else inverse * weight
    return (grad - _by_channel(of_grad / total, x) - centred) * _by_channel(scale, x)


KERNELS: dict[Any, Callable[..., Any]] = {
    aten.batch_norm_stats: stats,
    aten.batch_norm_gather_stats_with_counts: gather_stats,
    aten.batch_norm_elemt: normalised,
    aten.batch_norm_backward_reduce: backward_reduce,
    aten.batch_norm_backward_elemt: backward,
}
