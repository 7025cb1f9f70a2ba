"""JCL: joint contrastive learning with infinite possibilities (arXiv:2009.14776)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from backbench.errors import BadInput
from backbench.parallel import distributed
from backbench.pretrain.method import Batch, Setup
from backbench.pretrain.methods._momentum import ContrastConfig, MomentumContrast
from backbench.pretrain.methods._precision import full_precision, unit
from backbench.pretrain.methods.moco import queue_logsumexp
from backbench.weights.trunk import Trunk


def moments(q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Map q (N, d), keys (M', N, d) to the mean over keys of q.k, and its variance q^T Sigma q, both (N,).
    Sigma is the keys' biased covariance; no (N, d, d) array is formed."""
    # With mu = mean_m k_m:  q^T Sigma q = 1/M' sum_m (q.(k_m - mu))^2, the variance of the scores
    # q.k_m
    scores = (keys * q).sum(-1)  # (M', N)
    mean = scores.mean(0)
    return mean, (scores - mean).square().mean(0)


@full_precision
def jcl_loss(
    q: Tensor, keys: Tensor, queue: Tensor, *, temperature: float, lam: float
) -> Tensor:
    """Return the upper bound of InfoNCE's expectation over Gaussian keys (Eq. 8).

    q is (N, d), keys (M', N, d) with M' at least 1, queue (K, d). The mean key is not normalised
    again. Only q gets a gradient."""
    # 1. Jensen's bound (Eq. 7): log E[e^(q.k/t) + sum_j e^(q.k_j/t)] - q.mu/t, over keys k
    # 2. For k ~ N(mu, Sigma): E e^(q.k/t) = e^(q.mu/t + q^T Sigma q / (2 t^2)); lambda scales Sigma
    mean, quadratic = moments(q, keys.detach())
    positive = mean / temperature
    own = positive + lam / (2 * temperature**2) * quadratic
    # 3. log(e^own + e^L) - positive, with L = log sum_j e^(q.k_j/t); mean over the batch (Eq. 9)
    negatives = queue_logsumexp(q, queue, temperature=temperature)
    return (torch.logaddexp(own, negatives) - positive).mean()


@dataclass(frozen=True, kw_only=True)
class Config(ContrastConfig):
    """View 0 is the query, the others keys: M' = 5 takes six views, the released script's 4 five."""

    lam: float = 4.0
    # Released code: lambda grows by lam / epochs with each epoch, up to lam in the last
    ramp: bool = True


class Method(MomentumContrast[Config]):
    """Local batch norm for queries, ShuffleBN for all keys; the queue holds raw mean keys."""

    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__(config, backbone, setup)
        if setup.views < 2:
            raise BadInput(
                f"jcl takes one query view and at least one key view, not {setup.views} in all"
            )

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        all_keys = self.keys(batch.views[1:], batch.step)  # (N, M', d)
        q = unit(self.network(batch.views[0]))
        ramp = (batch.epoch + 1) / batch.epochs if self.config.ramp else 1.0
        lam = self.config.lam * ramp
        keys = distributed.local_slice(all_keys).transpose(0, 1)
        loss = jcl_loss(
            q, keys, self.queue.keys[0], temperature=self.config.temperature, lam=lam
        )
        # The queue keeps the mean of an image's keys as it is, without making it a unit vector
        self.new_keys.append(all_keys.mean(1, keepdim=True))
        return {"loss": distributed.mean_over_ranks(loss), "lambda": torch.tensor(lam)}
