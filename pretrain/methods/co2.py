"""CO2: consistent contrast (arXiv:2010.02217), MoCo with a consistency term. lightly's regulariser
has no gradient."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from backbench.pretrain.methods import moco
from backbench.pretrain.methods._precision import full_precision
from backbench.requests.bounds import Positive


@full_precision
def consistency_loss(
    q: Tensor, k: Tensor, queue: Tensor, *, temperature: float
) -> Tensor:
    """Return the mean over samples of half the symmetric KL divergence between softmax(queue.q / t)
    and softmax(queue.k / t) (Eq. 6).

    q and k (N, d) and queue (K, d) have rows of unit length. Only q gets a gradient."""
    p = F.log_softmax(q @ queue.detach().T / temperature, dim=1)
    r = F.log_softmax(k.detach() @ queue.detach().T / temperature, dim=1)
    # KL(P, R) + KL(R, P) = sum P (log P - log R) + sum R (log R - log P)
    #                     = sum (P - R) (log P - log R)
    return ((p.exp() - r.exp()) * (p - r)).sum(1).mean() / 2


@dataclass(frozen=True, kw_only=True)
class Config(moco.Config):
    consistency: float = 0.3  # alpha; Section 4.1
    consistency_temperature: Positive = 0.04


class Method(moco.Method):
    config: Config
    may_be_symmetric = False

    def pair_loss(self, q: Tensor, k: Tensor, negatives: Tensor) -> Tensor:
        c = self.config
        contrast = super().pair_loss(q, k, negatives)
        apart = consistency_loss(q, k, negatives, temperature=c.consistency_temperature)
        return contrast + c.consistency * apart
