"""Everything that crosses ranks. One convention carries all gradients:

    objective = mean over ranks of the loss that each rank returns,

which is what DDP's gradient mean makes of it. Each collective's backward is its exact transpose
(for `gather` and `sum_over_ranks` a sum over ranks), never divided by the world size. So a rank may
return its own samples' mean loss, or the loss of the gathered batch (equal on all ranks): two ranks
with half the batch each then give the gradient of one process with the whole batch in both cases. A
plain all_reduce or all_gather has no backward over ranks: the loss is right and the gradient too
small by the world size.

Why transposes are enough: write L_s for the loss of rank s, w_r for rank r's copy of the weights w.

    1. With transposed collectives, backward on rank r leaves d(sum_s L_s)/dw_r: also what r's
       samples did to the losses of the others, which came back through the exchanges.
    2. DDP's mean over ranks is 1/W sum_r d(sum_s L_s)/dw_r = d(1/W sum_s L_s)/dw, as w_r = w.
    3. That is the gradient of the objective. A backward divided by W would put 1/W there twice.

The global batch is rank-major: rank r holds its r-th contiguous slice. Without an initialised
process group every function is the identity, for one process.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.modules._functions import SyncBatchNorm as _TorchSyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from backbench.errors import BadInput


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _Gather(torch.autograd.Function):
    """y_s = [x_0; ...; x_{W-1}] on every rank s."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return gather_without_gradient(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        # The transpose: d(sum_s L_s)/dx_r = sum_s (dL_s/dy_s), of which x_r was the r-th slice
        return local_slice(_summed_over_ranks(grad))


class _Sum(torch.autograd.Function):
    """y_s = x_0 + ... + x_{W-1} on every rank s: a symmetric map, which is its own transpose."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return _summed_over_ranks(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return _summed_over_ranks(grad)


def _summed_over_ranks(x: Tensor) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total)
    return total


def gather(x: Tensor) -> Tensor:
    """(n, ...), the same shape on all ranks -> (W n, ...) rank-major, with gradient."""
    return _Gather.apply(x) if world_size() > 1 else x


@torch.no_grad()
def gather_without_gradient(x: Tensor) -> Tensor:
    """(n, ...) on each rank -> (W n, ...) rank-major, detached."""
    if world_size() == 1:
        return x.detach()
    mine = x.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


def sum_over_ranks(x: Tensor) -> Tensor:
    """Elementwise sum over ranks, with gradient."""
    return _Sum.apply(x) if world_size() > 1 else x


def mean_over_ranks(x: Tensor) -> Tensor:
    """Elementwise mean over ranks, with gradient: a rank's own loss becomes the global batch's."""
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
    """ShuffleBN's first exchange (MoCo): (n, ...) -> (n, ...), the order of the global batch.

    The first is this rank's share of the permuted batch of all ranks, (W n, ...). `generator` must
    be seeded alike on all ranks. No gradient passes.
    """
    everything = gather_without_gradient(x)
    order = torch.randperm(len(everything), generator=generator).to(x.device)
    # Place p of the permuted batch holds sample order[p]; rank r takes the r-th slice of the places
    return everything[local_slice(order)], order


def unshuffle(x: Tensor, order: Tensor) -> Tensor:
    """Undo `shuffle` on what was made of its output: (n, ...) -> the whole batch (W n, ...).

    Without gradient.
    """
    everything = gather_without_gradient(x)
    restored = torch.empty_like(everything)
    # Sample order[p] came back at place p: scattering by the order inverts indexing by it
    restored[order] = everything
    return restored


class GroupBatchNorm(_BatchNorm):
    """Batch norm over `groups` contiguous groups of the global batch, as if each group sat on a GPU
    of its own.

    groups = None is one group per rank: ordinary local batch norm. With G groups, W ranks hold G /
    W each, so one process reproduces the statistics of G ranks. The running statistics are the mean
    of what each group would keep (the update is linear); `average_batchnorm` averages them over
    ranks too.
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
                f"{len(input)} samples at a time do not divide into the {groups} batch norm groups "
                "of a process; change method.groups, batch_size or accumulate"
            )
        means: list[Tensor] = []
        variances: list[Tensor] = []
        out: list[Tensor] = []
        for part in input.chunk(groups):
            # Each group moves a copy of the same old statistics, as if it were the only one
            mean, variance = _copy(self.running_mean), _copy(self.running_var)
            out.append(
                F.batch_norm(
                    part, mean, variance, self.weight, self.bias, True, self._momentum(), self.eps
                )
            )
            if mean is not None and variance is not None:
                means.append(mean)
                variances.append(variance)
        # old + m (new_g - old), averaged over the groups g, is old + m (mean of new_g - old)
        if self.running_mean is not None and self.running_var is not None:
            self.running_mean.copy_(torch.stack(means).mean(0))
            self.running_var.copy_(torch.stack(variances).mean(0))
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return torch.cat(out)


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()


class SyncBatchNorm(_BatchNorm):
    """Batch norm with the statistics of all ranks, which must bring equally many samples.

    On a GPU torch's kernel; on a CPU, where torch has none, the mean and then the centred variance
    are summed over ranks with gradient. Not a torch.nn.SyncBatchNorm, because DDP refuses to wrap
    that on a CPU.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() >= 2

    def forward(self, input: Tensor) -> Tensor:
        if world_size() == 1 or not self.training:
            return super().forward(input)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return self._on_gpu(input) if input.is_cuda else self._on_cpu(input)

    def _on_gpu(self, input: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if not self.affine:
            weight = input.new_ones(self.num_features, dtype=torch.float32)
            bias = input.new_zeros(self.num_features, dtype=torch.float32)
        return _TorchSyncBatchNorm.apply(
            input,
            weight,
            bias,
            self.running_mean,
            self.running_var,
            self.eps,
            self.momentum,
            dist.group.WORLD,
            world_size(),
        )

    def _on_cpu(self, input: Tensor) -> Tensor:
        assert self.momentum is not None
        assert self.running_mean is not None and self.running_var is not None
        axes = [0, *range(2, input.dim())]  # all but the channels
        shape = [1, -1] + [1] * (input.dim() - 2)
        count = input.numel() // input.shape[1] * world_size()
        with torch.autocast(input.device.type, enabled=False):
            x = input.double()  # as exact as torch's CPU kernel, which accumulates in double
            # 1. mean_c = 1/n sum over ranks, samples and places of x
            mean = sum_over_ranks(x.sum(axes)) / count
            # 2. variance_c = 1/n sum of (x - mean)^2, in a second exchange: one exchange of the
            #    sums of x and x^2 would do, but their difference cancels where |mean| is large
            x = x - mean.view(shape)
            variance = sum_over_ranks(x.square().sum(axes)) / count
            # 3. Autograd goes back through both exchanges: each sample feels the loss of all ranks
            #    through mean and variance, as it does in one process
            out = x * torch.rsqrt(variance + self.eps).view(shape)
            if self.affine:
                out = out * self.weight.view(shape) + self.bias.view(shape)
        with torch.no_grad():
            # As in every batch norm, what is kept is the unbiased variance
            unbiased = variance * (count / (count - 1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        return out.to(input.dtype)


def _replace_batchnorm(module: nn.Module, cls: type[_BatchNorm]) -> nn.Module:
    """`module` with its plain batch norms as `cls`, which hold the very same parameters."""
    if getattr(module, "local_batchnorm", False):
        return module
    if isinstance(module, GroupBatchNorm | SyncBatchNorm):
        return module
    if isinstance(module, _BatchNorm):
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
    """Replace every batch norm below `module` by SyncBatchNorm, in place; parameters are shared.

    Submodules with `local_batchnorm = True` (MoCo's key encoder) and GroupBatchNorm layers stay as
    they are. A `module` that is itself a batch norm cannot be replaced in place: use what is
    returned.
    """
    return _replace_batchnorm(module, SyncBatchNorm)


def convert_group_batchnorm(module: nn.Module, groups: int | None) -> nn.Module:
    """The same, by GroupBatchNorm of `groups` groups over all ranks."""
    module = _replace_batchnorm(module, GroupBatchNorm)
    for layer in module.modules():
        if isinstance(layer, GroupBatchNorm):
            layer.groups = groups
    return module


def _running_statistics(module: nn.Module) -> Iterator[Tensor]:
    """Means and variances that the GroupBatchNorm layers below `module` keep, in the order of the
    layers."""
    for layer in module.modules():
        if isinstance(layer, GroupBatchNorm):
            for buffer in (layer.running_mean, layer.running_var):
                if buffer is not None:
                    yield buffer


@torch.no_grad()
def average_batchnorm(module: nn.Module) -> None:
    """Running statistics of all GroupBatchNorm layers := their mean over ranks, in one exchange."""
    if world_size() == 1:
        return
    buffers = list(_running_statistics(module))
    if not buffers:
        return
    flat = torch.cat(buffers)
    dist.all_reduce(flat)
    flat /= world_size()
    for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers])):
        buffer.copy_(part)


class Agreement:
    """What one rank finds and all ranks act upon in the same step: a signal, an unreadable image, a
    bad loss.

    Every rank must make it at the same point, and call `any` and `first` equally often and in the
    same order. The exchange runs on the CPU over gloo, so that it never waits for a GPU. One
    process exchanges nothing.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        if world_size() == 1:
            return
        # A second gloo group costs a rendezvous and threads, and gains nothing: within a group,
        # exchanges are matched by the order in which they are asked for, and all ranks run the same
        # program. NCCL's group cannot serve: its exchanges are kernels in a queue of the GPU, and
        # reading their result waits for all that is before them
        if dist.get_backend() == "gloo":
            self.group = dist.group.WORLD
        else:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self.group = group

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag or-ed over the ranks."""
        if self.group is None:
            return flags
        # "or" is the maximum of zeros and ones
        raised = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=self.group)
        return tuple(raised.bool().tolist())

    def first(self, message: str | None) -> str | None:
        """The message of the lowest rank that has one, on every rank."""
        # Nearly always there is none: one integer tells, and only then is text exchanged
        if self.group is None or not self.any(message is not None)[0]:
            return message
        messages: list[str | None] = [None] * world_size()
        dist.all_gather_object(messages, message, group=self.group)
        return next(m for m in messages if m is not None)
