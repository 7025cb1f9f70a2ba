"""The momentum (key) encoder with ShuffleBN, and the queue of keys."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.parallel import batchnorm, distributed
from backbench.runs import seeding
from pretrain.methods._precision import unit


def momentum_copy(module: nn.Module) -> nn.Module:
    """A frozen copy of `module`, to follow it as its moving average."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def momentum_update(average: Iterable[Tensor], source: Iterable[Tensor], momentum: float) -> None:
    """average := momentum average + (1 - momentum) source, tensor by tensor, in one fused call."""
    # lerp: average + (1 - momentum) (source - average)
    torch._foreach_lerp_(list(average), [p.detach() for p in source], 1.0 - momentum)


def momentum_at(progress: float, start: float, final: float) -> float:
    """`start` at progress 0, `final` at 1, by half a cosine (BYOL, Section 3.2)."""
    return final - (final - start) * (math.cos(math.pi * progress) + 1) / 2


class KeyEncoder(nn.Module):
    """MoCo's key encoder: the query encoder's moving average, its batch norm local, its images
    shuffled over ranks.

    groups: batch norm's statistics are taken over this many groups of the global batch (the papers'
    number of GPUs); None: one per rank. Only the parameters follow the query encoder; batch norm's
    running statistics are its own.
    """

    def __init__(self, encoder: nn.Module, *, momentum: float, groups: int | None) -> None:
        super().__init__()
        self.encoder = batchnorm.convert_group_batchnorm(momentum_copy(encoder), groups)
        self.local_batchnorm = True  # convert_sync_batchnorm passes by
        self.momentum = momentum
        self.groups = groups

    @torch.no_grad()
    def forward(self, views: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        """V views (n, 3, h, w) on each rank -> unit keys (N, V, d) of the whole global batch, on
        every rank."""
        # 1. (n V, 3, h, w), sample by sample: the shuffled order then does not depend on how many
        #    ranks the batch is spread over
        images = torch.stack(list(views), 1)
        n, v = images.shape[:2]
        # 2. Each rank gets images of all ranks, so that its batch norm cannot tell which query and
        #    key belong together (MoCo, Section 3.3)
        images, order = distributed.shuffle(images.flatten(0, 1), generator)
        keys = unit(self.encoder(images))
        # 3. Back in order, on every rank
        return distributed.unshuffle(keys, order).view(n * distributed.world_size(), v, -1)

    def update(self, parameters: Iterable[Tensor], momentum: float | None = None) -> None:
        """One momentum step towards the query encoder's `parameters`.

        Running statistics are averaged over ranks.
        """
        chosen = self.momentum if momentum is None else momentum
        momentum_update(self.encoder.parameters(), parameters, chosen)
        batchnorm.average_batchnorm(self.encoder)


class Queue(nn.Module):
    """The last `length` keys, (length, d), oldest overwritten first.

    It starts with random directions.
    """

    keys: Tensor
    position: Tensor

    def __init__(self, length: int, dim: int, *, seed: int, name: str = "queue") -> None:
        super().__init__()
        keys = torch.randn(length, dim, generator=seeding.generator(seed, name), device="cpu")
        self.register_buffer("keys", F.normalize(keys, dim=1))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """Append the global batch's (N, d) keys; N must divide the length."""
        # Modulo the length: a batch that reaches the end goes on at the beginning
        index = (self.position + torch.arange(len(keys), device=self.keys.device)) % len(self.keys)
        self.keys[index] = keys.to(self.keys.dtype)
        self.position.copy_((self.position + len(keys)) % len(self.keys))


def check_queue(length: int, batch_size: int) -> None:
    """Whole batches replace whole batches."""
    if length < 1 or length % batch_size:
        raise BadInput(
            f"a queue of {length} keys is no multiple of the batch size {batch_size}; change either"
        )
