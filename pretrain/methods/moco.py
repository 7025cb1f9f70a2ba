"""MoCo (arXiv:1911.05722), MoCo v2 (arXiv:2003.04297) and its symmetric form (v2+,
arXiv:2011.10566, Table 4)."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.errors import BadInput
from backbench.parallel import distributed
from backbench.pretrain.method import Batch, Setup
from backbench.pretrain.methods._momentum import (
    ContrastConfig,
    MomentumContrast,
    momentum_at,
)
from backbench.pretrain.methods._precision import GradientContext, full_precision, unit
from backbench.weights.trunk import Trunk

# Logits held at once: 256 KiB in a CPU's cache, 64 MiB on a GPU; fewer keys make slow products
CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}
LEAST_KEYS = 512


class _LogSumExp(torch.autograd.Function):
    """L_n = log sum_j exp(s_nj), s_nj = q_n.k_j / t, over a long queue in chunks, and in the same
    pass its gradient dL_n/dq_n = sum_j softmax(s_n)_j k_j / t: forward and backward together are
    two matrix products (online softmax, Milakov and Gimelshein, arXiv:1805.02867)."""

    @staticmethod
    def forward(
        ctx: GradientContext, q: Tensor, queue: Tensor, temperature: float
    ) -> Tensor:
        elements = CHUNK_ELEMENTS.get(q.device.type, 1 << 20)
        rows = max(LEAST_KEYS, elements // max(1, len(q)))
        scaled = q / temperature
        # Of all keys so far: m = max_j s_j, Z = sum_j e^(s_j - m), W = sum_j e^(s_j - m) k_j
        peak = q.new_full((len(q), 1), -torch.inf)
        total = q.new_zeros(len(q), 1)
        weighted = torch.zeros_like(q)
        with_gradient = ctx.needs_input_grad[0]
        for keys in queue.split(rows):
            # 1. s of this chunk, and m' = max(m, max_j s_j): no exponent is positive
            logits = scaled @ keys.T
            new = torch.maximum(peak, logits.amax(1, keepdim=True))
            # 2. What was summed with m shrinks by e^(m - m') (by 0 at first, where m is -inf)
            shrink = (peak - new).exp_()
            logits.sub_(new).exp_()
            # 3. Z' = Z e^(m - m') + sum_j e^(s_j - m')
            total.mul_(shrink).add_(logits.sum(1, keepdim=True))
            # 4. W' = W e^(m - m') + sum_j e^(s_j - m') k_j
            if with_gradient:
                weighted.mul_(shrink).addmm_(logits, keys)
            peak = new
        # 5. softmax(s)_j = e^(s_j - m) / Z, so the gradient is W / (Z t); and L = m + log Z
        if with_gradient:
            ctx.save_for_backward(weighted.div_(total * temperature))
        return (peak + total.log()).squeeze(1)

    @staticmethod
    def backward(ctx: GradientContext, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return grad.unsqueeze(1) * gradient, None, None


def queue_logsumexp(q: Tensor, queue: Tensor, *, temperature: float) -> Tensor:
    """Map (N, d), (K, d) to (N,): log sum_j exp(q.k_j / temperature). Gradient to `q` only."""
    return _LogSumExp.apply(q, queue.detach(), temperature)


@full_precision
def infonce_loss(q: Tensor, k: Tensor, queue: Tensor, *, temperature: float) -> Tensor:
    """Return InfoNCE with a queue (MoCo, Eq. 1).

    q and k (N, d) and queue (K, d) have rows of unit length. Only q gets a gradient."""
    # -log(e^p / (e^p + e^L)) = log(1 + e^(L - p)), with p = q.k / t and L over the negatives
    positive = (q * k.detach()).sum(1) / temperature
    negative = queue_logsumexp(q, queue, temperature=temperature)
    return F.softplus(negative - positive).mean()


@dataclass(frozen=True, kw_only=True)
class Config(ContrastConfig):
    """v1: a linear head, temperature 0.07. v2: two layers, no batch norm, 0.2. v2+: symmetric."""

    # Reached by half a cosine; null: the momentum is constant (MoCo)
    final_momentum: float | None = None
    symmetric: bool = False
    # The keys of each view go into a queue of their own (solo-learn)
    queue_per_view: bool = False
    shuffle: bool = True  # ShuffleBN of the keys (solo-learn has none)
    query_batchnorm: Literal["local", "sync"] = "local"  # MoCo's: statistics of one GPU


class Method(MomentumContrast[Config]):
    views = 2
    may_be_symmetric = True

    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        if config.symmetric and not self.may_be_symmetric:
            raise BadInput(f"{config.name} is not symmetric; remove method.symmetric")
        if config.queue_per_view and not config.symmetric:
            raise BadInput(
                f"{config.name}: only view 1 has keys; set method.symmetric too, or remove"
                " method.queue_per_view"
            )
        super().__init__(
            config,
            backbone,
            setup,
            local_queries=config.query_batchnorm == "local",
            shuffled=config.shuffle,
            enqueued=2 if config.symmetric and not config.queue_per_view else 1,
            queues=["queue 0", "queue 1"] if config.queue_per_view else ["queue"],
        )

    def pair_loss(self, q: Tensor, k: Tensor, negatives: Tensor) -> Tensor:
        """Return the loss of queries and their keys, both (n, d), and earlier keys (K, d)."""
        return infonce_loss(q, k, negatives, temperature=self.config.temperature)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        config = self.config
        pairs = [(0, 1), (1, 0)] if config.symmetric else [(0, 1)]
        losses = []
        for query, key in pairs:
            # Keys of the whole global batch, which go into the queue; queries of this rank
            keys = self.keys([batch.views[key]], batch.step, key)  # (N, 1, d)
            self.new_keys.append(keys)
            q = unit(self.network(batch.views[query]))
            k = distributed.local_slice(keys)[:, 0]  # (n, d)
            # The negatives are earlier keys: of all views, or of the positive's own view
            negatives = self.queue.keys[key if config.queue_per_view else 0]
            losses.append(self.pair_loss(q, k, negatives))
        if config.queue_per_view:
            # The first pair gave the keys of view 1, the second those of view 0. The queues want
            # one tensor (N, 2, d) in the order of the views.
            of_view_1, of_view_0 = self.new_keys[-2:]
            self.new_keys[-2:] = [torch.cat([of_view_0, of_view_1], 1)]
        return {"loss": distributed.mean_over_ranks(torch.stack(losses).mean())}

    def momentum(self, progress: float) -> float:
        config = self.config
        if config.final_momentum is None:
            return config.momentum
        return momentum_at(progress, config.momentum, config.final_momentum)
