"""Everything that crosses ranks. One convention carries all gradients:

    objective = mean over ranks of the loss that each rank returns,

which is what DDP's gradient mean makes of it. Each collective's backward is its exact transpose (for `gather` and
`sum_over_ranks` a sum over ranks), never divided by the world size. So a rank may return its own samples' mean loss, or
the loss of the gathered batch (equal on all ranks): two ranks with half the batch each then give the gradient of one
process with the whole batch in both cases. A plain all_reduce or all_gather has no backward over ranks: the loss is
right and the gradient too small by the world size.

The global batch is rank-major: rank r holds its r-th contiguous slice. Without an initialised process group every
function is the identity, for one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as _TorchSyncBatchNorm

from backbench.errors import BadInput


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather_without_gradient(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(world_size())[rank()]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


def gather(x: Tensor) -> Tensor:
    """(n, ...) on each rank -> (W n, ...) rank-major, with gradient. All ranks must bring the same shape."""
    return _Gather.apply(x) if world_size() > 1 else x


@torch.no_grad()
def gather_without_gradient(x: Tensor) -> Tensor:
    """(n, ...) on each rank -> (W n, ...) rank-major, detached."""
    if world_size() == 1:
        return x.detach()
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world_size())
    ]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts)


def sum_over_ranks(x: Tensor) -> Tensor:
    """Elementwise sum over ranks, with gradient."""
    return _Sum.apply(x) if world_size() > 1 else x


def mean_over_ranks(x: Tensor) -> Tensor:
    """Elementwise mean over ranks, with gradient: turns a rank's own loss into the global batch's."""
    return sum_over_ranks(x) / world_size() if world_size() > 1 else x


@torch.no_grad()
def broadcast(x: Tensor) -> Tensor:
    """Rank 0's values on every rank, in place; returns `x`."""
    if world_size() > 1:
        dist.broadcast(x, src=0)
    return x


def local_slice(x: Tensor) -> Tensor:
    """This rank's contiguous share of a gathered (N, ...) tensor."""
    return x.chunk(world_size())[rank()]


def shuffle(x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """ShuffleBN's first exchange (MoCo): (n, ...) -> this rank's share of the permuted global batch, and the order.

    `generator` must be seeded alike on all ranks. No gradient passes.
    """
    everything = gather_without_gradient(x)
    order = torch.randperm(len(everything), generator=generator).to(x.device)
    return everything[local_slice(order)], order


def unshuffle(x: Tensor, order: Tensor) -> Tensor:
    """Undo `shuffle` on what was computed from its output: (n, ...) -> the whole batch (W n, ...), without gradient."""
    everything = gather_without_gradient(x)
    restored = torch.empty_like(everything)
    restored[order] = everything
    return restored


class GroupBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm over `groups` contiguous groups of the global batch, as if each group sat on a GPU of its own.

    groups = None is one group per rank: ordinary local batch norm. With G groups, W ranks hold G / W each, so one
    process reproduces the statistics of G ranks. The running statistics are the mean of what each group would keep
    (the update is linear); `average_batchnorm` averages them over ranks too.
    """

    groups: int | None = None

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() >= 2

    def _momentum(self) -> float:
        assert self.momentum is not None, "a cumulative average does not split into groups"
        return self.momentum

    def forward(self, input: Tensor) -> Tensor:
        groups = max(1, (self.groups or 1) // world_size())
        if not self.training or groups == 1:
            return super().forward(input)
        if len(input) % groups:
            raise BadInput(
                f"{len(input)} samples at a time do not divide into the {groups} batch norm groups of a process; "
                "change method.groups, batch_size or accumulate"
            )
        means, variances, out = [], [], []
        for part in input.chunk(groups):
            mean = self.running_mean.clone() if self.running_mean is not None else None
            variance = self.running_var.clone() if self.running_var is not None else None
            out.append(
                F.batch_norm(
                    part, mean, variance, self.weight, self.bias, True, self._momentum(), self.eps
                )
            )
            means.append(mean)
            variances.append(variance)
        if self.running_mean is not None and self.running_var is not None:
            self.running_mean.copy_(torch.stack([m for m in means if m is not None]).mean(0))
            self.running_var.copy_(torch.stack([v for v in variances if v is not None]).mean(0))
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return torch.cat(out)


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm with the statistics of all ranks, which must bring equally many samples.

    On a GPU torch's kernel; on a CPU, where torch has none, the mean and then the centred variance are summed over
    ranks with gradient. Not a torch.nn.SyncBatchNorm, because DDP refuses to wrap that on a CPU.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() >= 2

    def forward(self, input: Tensor) -> Tensor:
        if world_size() == 1 or not self.training:
            return super().forward(input)
        assert (
            self.momentum is not None
            and self.running_mean is not None
            and self.running_var is not None
        )
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if input.is_cuda:
            return _TorchSyncBatchNorm.apply(
                input,
                self.weight
                if self.affine
                else input.new_ones(self.num_features, dtype=torch.float32),
                self.bias
                if self.affine
                else input.new_zeros(self.num_features, dtype=torch.float32),
                self.running_mean,
                self.running_var,
                self.eps,
                self.momentum,
                dist.group.WORLD,
                world_size(),
            )
        axes = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        count = input.numel() // input.shape[1] * world_size()
        with torch.autocast(input.device.type, enabled=False):
            x = input.double()  # as exact as torch's CPU kernel, which accumulates in double
            mean = sum_over_ranks(x.sum(axes)) / count
            x = x - mean.view(shape)
            variance = sum_over_ranks(x.square().sum(axes)) / count
            out = x * torch.rsqrt(variance + self.eps).view(shape)
            if self.affine:
                out = out * self.weight.view(shape) + self.bias.view(shape)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(
                (variance * (count / (count - 1))).to(self.running_var.dtype), self.momentum
            )
        return out.to(input.dtype)


def _replace_batchnorm(module: nn.Module, cls: type[nn.modules.batchnorm._BatchNorm]) -> nn.Module:
    if getattr(module, "local_batchnorm", False):
        return module
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if isinstance(module, GroupBatchNorm | SyncBatchNorm):
            return module
        new = cls(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
        )
        new.weight, new.bias = module.weight, module.bias
        new.running_mean, new.running_var = module.running_mean, module.running_var
        new.num_batches_tracked, new.training = module.num_batches_tracked, module.training
        return new
    for name, child in module.named_children():
        setattr(module, name, _replace_batchnorm(child, cls))
    return module


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every batch norm below `module` by SyncBatchNorm, in place where it can; the parameters are shared.

    Submodules with `local_batchnorm = True` (MoCo's key encoder) and GroupBatchNorm layers stay as they are.
    """
    return _replace_batchnorm(module, SyncBatchNorm)


def convert_group_batchnorm(module: nn.Module, groups: int | None) -> nn.Module:
    """Replace every batch norm below `module` by GroupBatchNorm of `groups` groups over all ranks."""
    module = _replace_batchnorm(module, GroupBatchNorm)
    for layer in module.modules():
        if isinstance(layer, GroupBatchNorm):
            layer.groups = groups
    return module


def _group_norms(module: nn.Module) -> Iterator[GroupBatchNorm]:
    for layer in module.modules():
        if isinstance(layer, GroupBatchNorm) and layer.running_mean is not None:
            yield layer


@torch.no_grad()
def average_batchnorm(module: nn.Module) -> None:
    """Running statistics of all GroupBatchNorm layers := their mean over ranks, in one exchange."""
    if world_size() == 1:
        return
    buffers = [
        b
        for layer in _group_norms(module)
        for b in (layer.running_mean, layer.running_var)
        if b is not None
    ]
    if not buffers:
        return
    flat = torch.cat(buffers)
    dist.all_reduce(flat)
    flat /= world_size()
    for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers])):
        buffer.copy_(part)


class Agreement:
    """What one rank finds and all ranks act upon in the same step: a signal, an unreadable image, a bad loss.

    The exchange runs on the CPU over gloo, so that it never waits for a GPU. One process needs none.
    """

    def __init__(self) -> None:
        self.group: Any = dist.new_group(backend="gloo") if world_size() > 1 else None

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag or-ed over the ranks."""
        if self.group is None:
            return flags
        raised = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=self.group)
        return tuple(raised.bool().tolist())

    def first(self, message: str | None) -> str | None:
        """The message of the lowest rank that has one, on every rank."""
        if self.group is None or not self.any(message is not None)[0]:
            return message
        messages: list[str | None] = [None] * world_size()
        dist.all_gather_object(messages, message, group=self.group)
        return next(m for m in messages if m is not None)
