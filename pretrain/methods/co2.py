"""CO2: consistent contrast (arXiv:2010.02217), MoCo with a consistency term.

lightly's regulariser has no gradient.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.parallel import distributed
from pretrain.method import Batch
from pretrain.methods import moco
from pretrain.methods._precision import full_precision


@full_precision
def consistency_loss(q: Tensor, k: Tensor, queue: Tensor, *, temperature: float) -> Tensor:
    """Eq. 6: half the symmetric KL divergence between softmax(queue.q / t) and softmax(queue.k /
    t), mean over samples. q, k (N, d), queue (K, d), unit; gradient to q only."""
    p = F.log_softmax(q @ queue.detach().T / temperature, dim=1)
    r = F.log_softmax(k.detach() @ queue.detach().T / temperature, dim=1)
    # KL(P, R) + KL(R, P) = sum P (log P - log R) + sum R (log R - log P) = sum (P - R)(log P - log
    # R)
    return ((p.exp() - r.exp()) * (p - r)).sum(1).mean() / 2


@dataclass(frozen=True, kw_only=True)
class Config(moco.Config):
    consistency: float = 0.3  # alpha; Section 4.1
    consistency_temperature: float = 0.04


class Method(moco.Method):
    config: Config
    may_be_symmetric = False

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        config, queue = self.config, self.queue.keys[0]
        q, k = self.query_and_keys(batch, 0, 1)
        contrast = moco.infonce_loss(q, k, queue, temperature=config.temperature)
        consistency = consistency_loss(q, k, queue, temperature=config.consistency_temperature)
        loss = distributed.mean_over_ranks(contrast + config.consistency * consistency)
        return {"loss": loss, "consistency": torch.detach(consistency)}
