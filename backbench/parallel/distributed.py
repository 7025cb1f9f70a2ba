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

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from backbench.errors import EXIT_PREEMPTED, BadInput, Failed, Preempted, Stopped
from backbench.runs.state import die_with_parent

if TYPE_CHECKING:
    from lightning_fabric import Fabric

T = TypeVar("T")


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
    """y_s = x_0 + ... + x_{W-1} on every rank of `among`: symmetric, so its own transpose."""

    among: dist.ProcessGroup

    @staticmethod
    def forward(ctx: _Sum, x: Tensor, among: dist.ProcessGroup) -> Tensor:
        ctx.among = among
        return _summed_over_ranks(x, among)

    @staticmethod
    def backward(ctx: _Sum, grad: Tensor) -> tuple[Tensor, None]:
        return _summed_over_ranks(grad, ctx.among), None


def _summed_over_ranks(x: Tensor, among: dist.ProcessGroup | None = None) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=among)
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
    return sum_among(x, everyone()) if world_size() > 1 else x


def sum_among(x: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Elementwise sum over these ranks, of which this one is one, with gradient."""
    return _Sum.apply(x, ranks)


def everyone() -> dist.ProcessGroup:
    """All ranks of an initialised process group."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def neighbours(count: int) -> dist.ProcessGroup:
    """This rank's group of `count` neighbouring ranks: 0 .. count-1, count .. 2 count-1, and so on.
    `count` divides the number of ranks. The first call for a count is made by all ranks at the same
    point: they create all groups in one order."""
    return everyone() if count == world_size() else _neighbours(everyone(), count)


@functools.cache
def _neighbours(world: dist.ProcessGroup, count: int) -> dist.ProcessGroup:
    mine, _ = dist.new_subgroups(count)
    assert isinstance(mine, dist.ProcessGroup)
    return mine


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
    """Shuffle the global batch (MoCo's ShuffleBN), without gradient: return this rank's share (n,
    ...) and the order (W n,). `generator` must be seeded alike on all ranks."""
    everything = gather_without_gradient(x)
    order = sent(torch.randperm(len(everything), generator=generator), x.device)
    # Place p of the permuted batch holds sample order[p]; rank r takes the r-th slice of the places
    return everything[local_slice(order)], order


def unshuffle(x: Tensor, order: Tensor) -> Tensor:
    """Undo `shuffle` on outputs: (n, ...) -> the batch (W n, ...), without gradient."""
    everything = gather_without_gradient(x)
    restored = torch.empty_like(everything)
    # Sample order[p] came back at place p: scattering by the order inverts indexing by it
    restored[order] = everything
    return restored


def sent(x: Tensor, device: torch.device) -> Tensor:
    """`x` on the device; nobody waits until it is there."""
    return x.to(device, non_blocking=True)


class OnTheirWay:
    """Tensors that are copied to the CPU while whoever asked for them goes on."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [x.to("cpu", non_blocking=True) for x in tensors]
        self._arrived: torch.cuda.Event | None = None
        if any(x.is_cuda for x in tensors):
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def taken(self) -> list[Tensor]:
        """All of them, once the last is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies


class Agreement:
    """Shares what one rank finds (a signal, an unreadable image, a bad loss), so that all act in
    the same step. Every rank must make it at the same point, and call `any` and `first` equally
    often, in the same order. It runs over gloo on the CPU, so it never waits for a GPU."""

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

    @contextlib.contextmanager
    def together(self, context: AbstractContextManager[T] | None) -> Iterator[T | None]:
        """`with` what one rank alone enters; the others give None. Where it is refused, all end."""
        with contextlib.ExitStack() as stack:
            entered: T | None = None
            own: Exception | None = None
            if context is not None:
                try:
                    entered = stack.enter_context(context)
                except (BadInput, Failed, OSError) as error:
                    own = error
            refused = self.first(None if own is None else str(own))
            if own is not None:
                raise own
            if refused is not None:
                raise BadInput(refused)
            yield entered


# Names the process that starts the others, to them. Fabric's own question, whether the environment
# starts processes, is answered by yes as soon as it has started them
_RANK_0 = "BACKBENCH_RANK_0"


def launch(fabric: Fabric) -> None:
    """Make this process one of Fabric's ranks. Those that rank 0 starts end with it: killed alone,
    it would leave them in a collective, on GPUs that the next attempt needs."""
    environment = getattr(fabric.strategy, "cluster_environment", None)
    if environment is not None and not environment.creates_processes_externally:
        os.environ[_RANK_0] = str(os.getpid())
    fabric.launch()
    if started_by_fabric() and fabric.local_rank > 0:
        die_with_parent()


def started_by_fabric() -> bool:
    """Did Fabric itself start the processes of rank 1 and up, and does it watch them?"""
    return os.environ.get(_RANK_0) in (str(os.getpid()), str(os.getppid()))


@contextlib.contextmanager
def rank_0_tells(*, watched: bool) -> Iterator[None]:
    """Let rank 0 alone report an error that ends all ranks; the others exit silently. `watched`: by
    Fabric, which takes a process of its own that does not exit 0 for a crash, and kills rank 0
    within seconds, perhaps before it has saved."""
    try:
        yield
    except (BadInput, Failed, Preempted, Stopped):
        if rank() == 0:
            raise
        raise SystemExit(0 if watched else EXIT_PREEMPTED) from None
