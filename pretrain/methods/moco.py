"""MoCo (arXiv:1911.05722), MoCo v2 (arXiv:2003.04297) and its symmetric form (v2+, arXiv:2011.10566, Table 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.runs import distributed, seeding
from backbench.weights.resnet import Trunk
from pretrain import method
from pretrain.method import Batch, MethodConfig, Setup
from pretrain.methods._heads import MOCO_HEAD, Head, build_head
from pretrain.methods._momentum import KeyEncoder, Queue, check_groups, check_queue, momentum_at
from pretrain.methods._precision import full_precision, unit

CHUNK_ELEMENTS = {
    "cpu": 1 << 16,
    "cuda": 1 << 24,
}  # logits held at once: 256 KiB in cache, 64 MiB on a GPU
LEAST_KEYS = 512  # fewer make slow matrix products


class _LogSumExp(torch.autograd.Function):
    """Row-wise log sum_j exp(q.k_j / t) over a long queue in chunks; the gradient, softmax @ queue / t, is accumulated
    in the same pass (as in online softmax), so that forward and backward together are two matrix products."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, queue: Tensor, temperature: float) -> Tensor:
        rows = max(LEAST_KEYS, CHUNK_ELEMENTS.get(q.device.type, 1 << 20) // max(1, len(q)))
        scaled = q / temperature
        peak = q.new_full((len(q), 1), -torch.inf)
        total = q.new_zeros(len(q), 1)
        weighted = torch.zeros_like(q)  # sum_j exp(logit_j - peak) k_j
        with_gradient = ctx.needs_input_grad[0]
        for keys in queue.split(rows):
            logits = scaled @ keys.T
            new = torch.maximum(peak, logits.amax(1, keepdim=True))
            shrink = (peak - new).exp_()
            logits.sub_(new).exp_()
            total.mul_(shrink).add_(logits.sum(1, keepdim=True))
            if with_gradient:
                weighted.mul_(shrink).addmm_(logits, keys)
            peak = new
        if with_gradient:
            ctx.save_for_backward(weighted.div_(total * temperature))
        return (peak + total.log()).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return grad.unsqueeze(1) * gradient, None, None


def queue_logsumexp(q: Tensor, queue: Tensor, *, temperature: float) -> Tensor:
    """(N, d), (K, d) -> (N,): log sum_j exp(q.k_j / temperature). Gradient to `q` only; memory independent of K."""
    return _LogSumExp.apply(q, queue.detach(), temperature)


@full_precision
def infonce_loss(q: Tensor, k: Tensor, queue: Tensor, *, temperature: float) -> Tensor:
    """InfoNCE with a queue of negatives (MoCo Eq. 1). q, k (N, d) and queue (K, d) unit; gradient to q only."""
    positive = (q * k.detach()).sum(1) / temperature
    return F.softplus(queue_logsumexp(q, queue, temperature=temperature) - positive).mean()


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    """v1: a linear head, temperature 0.07. v2: a two-layer head without batch norm, 0.2. v2+: symmetric."""

    head: Head = MOCO_HEAD
    temperature: float = 0.2
    queue: int = 65536
    momentum: float = 0.999
    final_momentum: float | None = None  # reached by half a cosine; null: constant (MoCo)
    symmetric: bool = False
    query_batchnorm: Literal["local", "sync"] = "local"  # MoCo's: statistics of one GPU
    groups: int | None = (
        None  # of local batch norm over the global batch (the paper's GPUs); null: one per process
    )


class Method(method.Method):
    accumulates = True

    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__()
        if setup.views != 2:
            raise BadInput(
                f"moco takes two views of each image, not {setup.views}; change views.crops"
            )
        check_queue(config.queue, setup.batch_size * (2 if config.symmetric else 1))
        check_groups(config.groups, setup.batch_size)
        self.config, self.seed = config, setup.seed
        self.backbone = backbone
        self.projector = build_head(config.head, backbone.feature_dim)
        self.key_encoder = KeyEncoder(
            nn.Sequential(backbone, self.projector), momentum=config.momentum, groups=config.groups
        )
        self.queue = Queue(config.queue, config.head.dim, seed=setup.seed)
        self.sync_batchnorm = config.query_batchnorm == "sync"
        if not self.sync_batchnorm:
            distributed.convert_group_batchnorm(self.backbone, config.groups)
            distributed.convert_group_batchnorm(self.projector, config.groups)
        self._new_keys: list[Tensor] = []

    def query(self, view: Tensor) -> Tensor:
        return unit(self.projector(self.backbone(view)))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        pairs = [(0, 1), (1, 0)] if self.config.symmetric else [(0, 1)]
        losses = []
        for query_view, key_view in pairs:
            order = seeding.generator(self.seed, "shuffle", batch.step, key_view)
            keys = self.key_encoder([batch.views[key_view]], order)[:, 0]
            losses.append(
                infonce_loss(
                    self.query(batch.views[query_view]),
                    distributed.local_slice(keys),
                    self.queue.keys,
                    temperature=self.config.temperature,
                )
            )
            self._new_keys.append(keys)
        return {"loss": distributed.mean_over_ranks(torch.stack(losses).mean())}

    def after_step(self, progress: float) -> None:
        config = self.config
        final = config.momentum if config.final_momentum is None else config.final_momentum
        momentum = momentum_at(progress, config.momentum, final)
        self.key_encoder.update(
            [*self.backbone.parameters(), *self.projector.parameters()], momentum
        )
        for keys in self._new_keys:
            self.queue.enqueue(keys)
        self._new_keys.clear()
        distributed.average_batchnorm(self.backbone)
        distributed.average_batchnorm(self.projector)
