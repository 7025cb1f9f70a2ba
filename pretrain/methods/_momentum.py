"""Builds momentum contrast from a key encoder with ShuffleBN and a queue of keys."""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.parallel import batchnorm, distributed, division
from backbench.pretrain import method
from backbench.pretrain.method import MethodConfig, Setup
from backbench.pretrain.methods._heads import MOCO_HEAD, Head, build_head
from backbench.pretrain.methods._precision import unit
from backbench.requests.bounds import Positive
from backbench.runs import seeding
from backbench.weights.trunk import Trunk


def momentum_copy(module: nn.Module) -> nn.Module:
    """Copy `module` and freeze the copy, which follows it as its moving average."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def momentum_update(
    average: Iterable[Tensor], source: Iterable[Tensor], momentum: float
) -> None:
    """Set average := momentum average + (1 - momentum) source, in one fused call."""
    # lerp computes the same as average + (1 - momentum) (source - average)
    torch._foreach_lerp_(list(average), [p.detach() for p in source], 1.0 - momentum)


def momentum_at(progress: float, start: float, final: float) -> float:
    """Rise from `start` at progress 0 to `final` at 1, by half a cosine (BYOL, Section 3.2)."""
    return final - (final - start) * (math.cos(math.pi * progress) + 1) / 2


class KeyEncoder(nn.Module):
    """MoCo's key encoder, the moving average of the query encoder. Only the parameters follow the
    query encoder; running statistics are its own.

    Its batch norm is local: statistics are taken over `groups` groups of the global batch (the
    papers' number of GPUs), or over one per rank where that is None. Images are shuffled over ranks
    unless `shuffled` is false."""

    def __init__(
        self, encoder: nn.Module, *, groups: int | None, shuffled: bool = True
    ) -> None:
        super().__init__()
        self.encoder = batchnorm.convert_group_batchnorm(momentum_copy(encoder), groups)
        self.local_batchnorm = True  # convert_sync_batchnorm passes by
        self.groups = groups
        self.shuffled = shuffled

    @torch.no_grad()
    def forward(self, views: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        """Encode V views (n, 3, h, w) of this rank -> unit keys (N, V, d) of the global batch."""
        # 1. (n V, 3, h, w), sample by sample: the shuffled order then does not depend on how many
        #    ranks the batch is spread over
        images = torch.stack(list(views), 1)
        n, v = images.shape[:2]
        images = images.flatten(0, 1)
        if not self.shuffled:
            keys = distributed.gather_without_gradient(unit(self.encoder(images)))
            return keys.view(n * distributed.world_size(), v, -1)
        # 2. Each rank gets images of all ranks, so that its batch norm cannot tell which query and
        #    key belong together (MoCo, Section 3.3)
        images, order = distributed.shuffle(images, generator)
        keys = unit(self.encoder(images))
        # 3. Back in order, on every rank
        return distributed.unshuffle(keys, order).view(
            n * distributed.world_size(), v, -1
        )


class Queue(nn.Module):
    """Holds the last `length` keys in each of C queues, (C, length, d). A queue starts with random
    directions, drawn by its name. Whole batches replace whole batches, the oldest first."""

    keys: Tensor
    position: Tensor

    def __init__(
        self, length: int, dim: int, *, batch_size: int, seed: int, names: Sequence[str]
    ) -> None:
        super().__init__()
        if length < 1 or length % batch_size:
            raise BadInput(
                f"a queue of {length} keys is no multiple of the batch size {batch_size};"
                " change either"
            )
        keys = []
        for name in names:
            generator = seeding.generator(seed, name)
            keys.append(torch.randn(length, dim, generator=generator, device="cpu"))
        self.register_buffer("keys", F.normalize(torch.stack(keys), dim=2))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """Append the global batch's keys (N, C, d), the c-th to queue c."""
        n = len(keys)
        length = self.keys.shape[1]
        # A batch that reaches the end goes on at the beginning
        index = (self.position + torch.arange(n, device=self.keys.device)) % length
        self.keys[:, index] = keys.transpose(0, 1).to(self.keys.dtype)
        self.position.copy_((self.position + n) % length)


@dataclass(frozen=True, kw_only=True)
class ContrastConfig(MethodConfig):
    """The keys that all methods with a queue share; the values are MoCo v2's."""

    head: Head = MOCO_HEAD
    temperature: Positive = 0.2
    queue: int = 65536
    momentum: float = 0.999
    # Of local batch norm over the global batch (the paper's GPUs); null: one per process
    groups: int | None = None


C = TypeVar("C", bound=ContrastConfig)


class MomentumContrast(method.Method, Generic[C]):
    """Holds a query encoder, its momentum copy and a queue. A subclass's `forward` makes the loss
    and leaves the keys that the queue gets after the step, (N, C, d), in `new_keys`."""

    accumulates = True

    def __init__(
        self,
        config: C,
        backbone: Trunk,
        setup: Setup,
        *,
        local_queries: bool = True,
        shuffled: bool = True,
        key_views: int = 1,
        enqueued: int = 1,
        queues: Sequence[str] = ("queue",),
    ) -> None:
        """With `local_queries` the query encoder has local batch norm as well, in the same groups.
        `key_views` views pass the key encoder at once, and a batch adds `enqueued` keys per image
        to each of the `queues`."""
        super().__init__()
        division.check_groups(config.groups, setup.images_at_once * key_views)
        self.config = config
        self.seed = setup.seed
        self.backbone = backbone
        self.projector = build_head(config.head, backbone.feature_dim)
        encoder = nn.Sequential(backbone, self.projector)
        self.key_encoder = KeyEncoder(encoder, groups=config.groups, shuffled=shuffled)
        self.queue = Queue(
            config.queue,
            config.head.dim,
            batch_size=setup.batch_size * enqueued,
            seed=setup.seed,
            names=queues,
        )
        self.sync_batchnorm = not local_queries
        if local_queries:
            batchnorm.convert_group_batchnorm(self.backbone, config.groups)
            batchnorm.convert_group_batchnorm(self.projector, config.groups)
        self.new_keys: list[Tensor] = []

    def network(self, images: Tensor) -> Tensor:
        return self.projector(self.backbone(images))

    def keys(self, views: Sequence[Tensor], *step: int) -> Tensor:
        """Encode V views -> unit keys (N, V, d) of the global batch. The numbers `step` decide how
        images are shuffled on the way."""
        return self.key_encoder(views, seeding.generator(self.seed, "shuffle", *step))

    def momentum(self, progress: float) -> float:
        return self.config.momentum

    def after_step(self, progress: float) -> None:
        source = [*self.backbone.parameters(), *self.projector.parameters()]
        momentum_update(
            self.key_encoder.encoder.parameters(), source, self.momentum(progress)
        )
        for keys in self.new_keys:
            self.queue.enqueue(keys)
        self.new_keys.clear()
        # Local running statistics differ between ranks, so all ranks go on with their mean
        batchnorm.average_batchnorm(self)
