"""Everything that crosses ranks. One convention carries all gradients:

    objective = mean over ranks of the loss that each rank returns,

which is what DDP's mean of gradients makes of it. Each collective's backward is its exact transpose
(for `gather` and `sum_over_ranks` a sum over ranks), never divided by the world size. So a rank may
return its own samples' mean loss, or the loss of the gathered batch, equal on all ranks. In both
cases two ranks with half the batch each give the gradient of one process with the whole batch. A
plain all_reduce or all_gather has no backward over ranks: with it, the loss is right and the
gradient too small by the world size.

Why transposes are enough: write L_s for the loss of rank s, w_r for rank r's copy of the weights w.

    1. With transposed collectives, backward on rank r leaves d(sum_s L_s)/dw_r. It includes what
       r's samples did to the losses of other ranks, which comes back through the exchanges.
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
    """Gather (n, ...), of one shape on all ranks, to (W n, ...), rank-major, with gradient."""
    return _Gather.apply(x) if world_size() > 1 else x


@torch.no_grad()
def gather_without_gradient(x: Tensor) -> Tensor:
    """Gather (n, ...) on each rank to (W n, ...), rank-major, detached."""
    if world_size() == 1:
        return x.detach()
    mine = x.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


def sum_over_ranks(x: Tensor) -> Tensor:
    """Sum elementwise over all ranks, with gradient."""
    return sum_among(x, everyone()) if world_size() > 1 else x


def sum_among(x: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Sum elementwise, with gradient, over a group of ranks that this one belongs to."""
    return _Sum.apply(x, ranks)


def everyone() -> dist.ProcessGroup:
    """Return all ranks of the initialised process group."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def neighbours(count: int) -> dist.ProcessGroup:
    """Return this rank's group of `count` neighbours: 0 .. count-1, count .. 2 count-1, and so on.

    `count` divides the number of ranks. All ranks must make the first call for a count at the same
    point, because it creates all groups, in one order."""
    return everyone() if count == world_size() else _neighbours(everyone(), count)


@functools.cache
def _neighbours(world: dist.ProcessGroup, count: int) -> dist.ProcessGroup:
    mine, _ = dist.new_subgroups(count)
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def mean_over_ranks(x: Tensor) -> Tensor:
    """Average elementwise over ranks, with gradient: ranks' losses become the global batch's."""
    return sum_over_ranks(x) / world_size() if world_size() > 1 else x


@torch.no_grad()
def broadcast(x: Tensor) -> Tensor:
    """Put rank 0's values on every rank, in place; return `x`."""
    if world_size() > 1:
        dist.broadcast(x, src=0)
    return x


def local_slice(x: Tensor) -> Tensor:
    """Return this rank's contiguous share of a gathered (N, ...) tensor."""
    return x.chunk(world_size())[rank()]


def shuffle(x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Shuffle the global batch (MoCo's ShuffleBN), without gradient.

    Return this rank's share (n, ...) and the order (W n,). `generator` must be seeded alike on all
    ranks."""
    everything = gather_without_gradient(x)
    order = sent(torch.randperm(len(everything), generator=generator), x.device)
    # Place p of the permuted batch holds sample order[p]; rank r takes the r-th slice of the places
    return everything[local_slice(order)], order


def unshuffle(x: Tensor, order: Tensor) -> Tensor:
    """Undo `shuffle` on outputs (n, ...): return the whole batch (W n, ...), without gradient."""
    everything = gather_without_gradient(x)
    restored = torch.empty_like(everything)
    # Sample order[p] came back at place p: scattering by the order inverts indexing by it
    restored[order] = everything
    return restored


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Send `x` to the device; nobody waits until it is there."""
    return x.to(device, non_blocking=True)


class OnTheirWay:
    """Tensors that are copied to the CPU while the caller goes on."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [x.to("cpu", non_blocking=True) for x in tensors]
        self._arrived: torch.cuda.Event | None = None
        if any(x.is_cuda for x in tensors):
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def taken(self) -> list[Tensor]:
        """Return all of them, once the last is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies


class Agreement:
    """Shares what one rank finds (a signal, an unreadable image, a bad loss): all act in one step.

    Every rank must make it at the same point, and call its methods equally often, in the same
    order. It runs over gloo on the CPU, so it never waits for a GPU."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        if world_size() == 1:
            return
        if dist.get_backend() == "gloo":
            # A second gloo group would cost a rendezvous and threads, and gain nothing: within a
            # group, exchanges are matched by the order in which they are asked for, and all ranks
            # run the same program
            self.group = dist.group.WORLD
        else:
            # NCCL's group cannot serve: its exchanges are kernels in a queue of the GPU, and
            # reading their result waits for all that is before them
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self.group = group

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Say of each flag whether any rank has raised it."""
        if self.group is None:
            return flags
        # Of zeros and ones, "any" is the maximum
        raised = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=self.group)
        return tuple(raised.bool().tolist())

    def first(self, message: str | None) -> str | None:
        """Return, on every rank, the message of the lowest rank that has one."""
        if self.group is None:
            return message
        # Nearly always there is none, which one integer tells. Only otherwise is text exchanged
        (somebody_has_one,) = self.any(message is not None)
        if not somebody_has_one:
            return None
        messages: list[str | None] = [None] * world_size()
        dist.all_gather_object(messages, message, group=self.group)
        return next(m for m in messages if m is not None)

    @contextlib.contextmanager
    def together(self, context: AbstractContextManager[T] | None) -> Iterator[T | None]:
        """Enter a context that one rank alone has; the others give None, and get None.

        Where it is refused, all ranks end with an error."""
        with contextlib.ExitStack() as stack:
            entered: T | None = None
            own: Exception | None = None
            if context is not None:
                try:
                    entered = stack.enter_context(context)
                except (BadInput, Failed, OSError) as error:
                    own = error
            # What the first rank that has an error says, on all ranks
            refused = self.first(None if own is None else str(own))
            if own is not None:
                raise own
            if refused is not None:
                raise BadInput(refused)
            yield entered


# The variable that tells processes which Fabric started who started them. Fabric cannot be asked:
# once they are started, it says that the environment started them
_RANK_0 = "BACKBENCH_RANK_0"


def launch(fabric: Fabric) -> None:
    """Make this process one of Fabric's ranks. The ranks that rank 0 starts end with it.

    Otherwise, if rank 0 alone were killed, they would wait in a collective for ever, on GPUs that
    the next attempt needs."""
    environment = getattr(fabric.strategy, "cluster_environment", None)
    if environment is not None and not environment.creates_processes_externally:
        os.environ[_RANK_0] = str(os.getpid())
    fabric.launch()
    if started_by_fabric() and fabric.local_rank > 0:
        die_with_parent()


def started_by_fabric() -> bool:
    """Return True if Fabric itself started the processes of rank 1 and up, and so watches them."""
    return os.environ.get(_RANK_0) in (str(os.getpid()), str(os.getppid()))


@contextlib.contextmanager
def rank_0_tells(*, watched: bool) -> Iterator[None]:
    """Let rank 0 alone report an error that ends all ranks; the others exit silently.

    `watched` says whether Fabric started and watches them."""
    try:
        yield
    except (BadInput, Failed, Preempted, Stopped):
        if rank() == 0:
            raise
        # If a process that Fabric watches does not exit with 0, Fabric takes that for a crash, and
        # kills rank 0 within seconds, perhaps before it has saved
        raise SystemExit(0 if watched else EXIT_PREEMPTED) from None
