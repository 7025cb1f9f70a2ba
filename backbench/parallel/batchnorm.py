"""Batch norm over the global batch, or over a part of it, on any number of ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as _TorchSyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from backbench.errors import BadInput
from backbench.parallel import distributed, division


class GroupBatchNorm(_BatchNorm):
    """Batch norm over `groups` contiguous groups of the global batch, as if each sat on its own GPU.

    None is one group per rank: ordinary local batch norm. With G groups and W ranks, G / W or W / G
    must be whole: a rank holds several groups, or several ranks share one. The running statistics
    are the mean of what each group would keep (the update is linear); `average_batchnorm` averages
    them over ranks, too."""

    groups: int | None = None

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() >= 2

    def forward(self, input: Tensor) -> Tensor:
        ranks = distributed.world_size()
        groups = self.groups or ranks
        if not self.training or groups == ranks:
            return super().forward(input)
        division.check_nesting(groups, ranks)
        if groups < ranks:
            return _over_ranks(self, input, distributed.neighbours(ranks // groups))
        return self._over_groups(input, groups // ranks)

    def _over_groups(self, input: Tensor, groups: int) -> Tensor:
        """Normalise `groups` groups, all of them on this rank."""
        if len(input) % groups:
            raise BadInput(
                f"{len(input)} samples at a time do not divide into the {groups} batch norm groups "
                "of a process; change method.groups, batch_size or accumulate"
            )
        momentum = self.momentum
        assert momentum is not None, "a cumulative average does not split into groups"
        means: list[Tensor] = []
        variances: list[Tensor] = []
        out: list[Tensor] = []
        for part in input.chunk(groups):
            # Each group moves a copy of the same old statistics, as if it were the only one
            mean = None
            variance = None
            if self.running_mean is not None and self.running_var is not None:
                mean = self.running_mean.clone()
                variance = self.running_var.clone()
                means.append(mean)
                variances.append(variance)
            out.append(
                F.batch_norm(
                    part,
                    mean,
                    variance,
                    self.weight,
                    self.bias,
                    training=True,
                    momentum=momentum,
                    eps=self.eps,
                )
            )
        # old + m (new_g - old), averaged over the groups g, is old + m (mean of new_g - old)
        if self.running_mean is not None and self.running_var is not None:
            self.running_mean.copy_(torch.stack(means).mean(0))
            self.running_var.copy_(torch.stack(variances).mean(0))
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return torch.cat(out)


class SyncBatchNorm(_BatchNorm):
    """Batch norm with the statistics of all ranks, which must bring equally many samples.

    DDP refuses to wrap a torch.nn.SyncBatchNorm on a CPU, so this is a class of its own."""

    _check_input_dim = GroupBatchNorm._check_input_dim

    def forward(self, input: Tensor) -> Tensor:
        if distributed.world_size() == 1 or not self.training:
            return super().forward(input)
        return _over_ranks(self, input, distributed.everyone())


def _over_ranks(layer: _BatchNorm, input: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Run a layer in training, with the statistics of all samples of these ranks, and gradient.

    On a GPU torch's kernels do it; on a CPU mean and then centred variance are summed over ranks."""
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    if input.is_cuda:
        return _on_gpu(layer, input, ranks)
    return _on_cpu(layer, input, ranks)


class _OfEqualCounts(_TorchSyncBatchNorm):
    """torch's synchronised batch norm, for ranks that all bring equally many samples.

    torch's own forward asks which ranks brought nothing, for which the host waits 159 times in a
    pass of ResNet-50. The backward is torch's."""

    @staticmethod
    def forward(  # noqa: PLR0917  (torch's)
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        eps: float,
        momentum: float,
        ranks: dist.ProcessGroup,
        world: int,
    ) -> Tensor:
        # 1. A layout that the kernels have
        if not input.is_contiguous(memory_format=torch.channels_last):
            input = input.contiguous()
        # 2. Each rank's mean and 1 / deviation (C,), told to all: (ranks, 2 C)
        mine = torch.cat(torch.batch_norm_stats(input, eps))
        theirs = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(theirs, mine, group=ranks)
        means, inverses = torch.stack(theirs).chunk(2, 1)
        # 3. The statistics of all ranks together, which also move the running ones
        count = input.numel() // input.shape[1]
        dtype = mine.dtype if running_mean is None else running_mean.dtype
        counts = torch.full((world,), count, dtype=dtype, device=input.device)
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            input, means, inverses, running_mean, running_var, momentum, eps, counts
        )
        ctx.save_for_backward(
            input, weight, mean, inverse, counts[:, None].to(torch.int32)
        )
        ctx.process_group = ranks
        return torch.batch_norm_elemt(input, weight, bias, mean, inverse, eps)


def _on_gpu(layer: _BatchNorm, input: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    weight: Tensor = layer.weight
    bias: Tensor = layer.bias
    if not layer.affine:
        dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
        weight = input.new_ones(layer.num_features, dtype=dtype)
        bias = input.new_zeros(layer.num_features, dtype=dtype)
    return _OfEqualCounts.apply(
        input,
        weight,
        bias,
        layer.running_mean,
        layer.running_var,
        layer.eps,
        layer.momentum,
        ranks,
        ranks.size(),
    )


def _on_cpu(layer: _BatchNorm, input: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    assert layer.momentum is not None
    assert layer.running_mean is not None and layer.running_var is not None
    axes = [0, *range(2, input.dim())]  # all but the channels
    shape = [1, -1] + [1] * (input.dim() - 2)
    count = input.numel() // input.shape[1] * ranks.size()
    with torch.autocast(input.device.type, enabled=False):
        # As exact as torch's CPU kernel, which accumulates in double
        x = input.double()
        # 1. mean_c = 1/n sum over ranks, samples and places of x
        mean = distributed.sum_among(x.sum(axes), ranks) / count
        # 2. variance_c = 1/n sum of (x - mean)^2, in a second exchange: one exchange of the
        #    sums of x and x^2 would do, but their difference cancels where |mean| is large
        x = x - mean.view(shape)
        variance = distributed.sum_among(x.square().sum(axes), ranks) / count
        # 3. Autograd goes back through both exchanges: each sample feels the loss of all these ranks
        #    through mean and variance, as it does in one process
        out = x * torch.rsqrt(variance + layer.eps).view(shape)
        if layer.affine:
            out = out * layer.weight.view(shape) + layer.bias.view(shape)
    with torch.no_grad():
        # As in every batch norm, the running variance is the unbiased one
        unbiased = variance * (count / (count - 1))
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), layer.momentum)
        layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), layer.momentum)
    return out.to(input.dtype)


class _Activated(_BatchNorm):
    """A batch norm that is followed by a dropout and an activation of its own, as timm's
    BatchNormAct2d: EfficientNet, MobileNet and others have no activations elsewhere."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))


class ActivatedGroupBatchNorm(_Activated, GroupBatchNorm):
    pass


class ActivatedSyncBatchNorm(_Activated, SyncBatchNorm):
    pass


ACTIVATED: dict[type[_BatchNorm], type[_Activated]] = {
    GroupBatchNorm: ActivatedGroupBatchNorm,
    SyncBatchNorm: ActivatedSyncBatchNorm,
}


def _replace_batchnorm(module: nn.Module, cls: type[_BatchNorm]) -> nn.Module:
    """Return `module` with its plain batch norms as `cls`, which hold the very same parameters."""
    if getattr(module, "local_batchnorm", False):
        return module
    if isinstance(module, GroupBatchNorm | SyncBatchNorm):
        return module
    if isinstance(module, _BatchNorm):
        parts = dict(module.named_children())
        if parts and set(parts) != {"drop", "act"}:
            raise BadInput(
                f"{type(module).__name__} holds {', '.join(parts)}, which batch norm over several"
                " processes would lose; use one process"
            )
        new = (ACTIVATED[cls] if parts else cls)(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
        )
        new.weight = module.weight
        new.bias = module.bias
        new.running_mean = module.running_mean
        new.running_var = module.running_var
        new.num_batches_tracked = module.num_batches_tracked
        new.training = module.training
        for name, part in parts.items():
            new.add_module(name, part)
        return new
    for name, child in module.named_children():
        setattr(module, name, _replace_batchnorm(child, cls))
    return module


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every batch norm below `module` by SyncBatchNorm, in place; parameters are shared.

    GroupBatchNorm and submodules with `local_batchnorm = True` (MoCo's key encoder) stay. A
    `module` that is itself a batch norm cannot change in place, so use what is returned."""
    return _replace_batchnorm(module, SyncBatchNorm)


def convert_group_batchnorm(module: nn.Module, groups: int | None) -> nn.Module:
    """Replace every batch norm likewise by GroupBatchNorm, with `groups` groups over all ranks."""
    module = _replace_batchnorm(module, GroupBatchNorm)
    for layer in module.modules():
        if isinstance(layer, GroupBatchNorm):
            layer.groups = groups
    return module


def groups_of(module: nn.Module) -> set[int | None]:
    """Return the numbers of groups that the GroupBatchNorm layers below `module` have."""
    return {
        layer.groups for layer in module.modules() if isinstance(layer, GroupBatchNorm)
    }


@torch.no_grad()
def average_batchnorm(module: nn.Module) -> None:
    """Set the running statistics of all GroupBatchNorm layers to their mean over ranks.

    All layers' statistics are averaged in one exchange."""
    if distributed.world_size() == 1:
        return
    buffers: list[Tensor] = []
    for layer in module.modules():
        if isinstance(layer, GroupBatchNorm):
            for buffer in (layer.running_mean, layer.running_var):
                if buffer is not None:
                    buffers.append(buffer)
    if not buffers:
        return
    flat = torch.cat(buffers)
    dist.all_reduce(flat)
    flat /= distributed.world_size()
    for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers])):
        buffer.copy_(part)
