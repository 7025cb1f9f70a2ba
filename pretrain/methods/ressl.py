"""ReSSL: relational self-supervised learning with weak augmentation (arXiv:2107.09282)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from backbench.pretrain.methods import moco
from backbench.pretrain.methods._precision import full_precision
from backbench.requests.bounds import Positive


@full_precision
def ressl_loss(
    q: Tensor, k: Tensor, queue: Tensor, *, temperature: float, key_temperature: float
) -> Tensor:
    """Return the mean cross-entropy between the key's and the query's similarities to the queue, each
    a softmax at its own temperature (Eq. 5).

    q and k (N, d) and queue (K, d) have rows of unit length. Only q gets a gradient."""
    target = F.softmax(k.detach() @ queue.detach().T / key_temperature, dim=1)
    logs = F.log_softmax(q @ queue.detach().T / temperature, dim=1)
    return -(target * logs).sum(1).mean()


@dataclass(frozen=True, kw_only=True)
class Config(moco.Config):
    """View 0, strongly augmented, is the query; view 1, weakly augmented, the key."""

    temperature: Positive = 0.1
    key_temperature: Positive = 0.04


class Method(moco.Method):
    config: Config
    may_be_symmetric = False  # the key's view is the weakly augmented one

    def pair_loss(self, q: Tensor, k: Tensor, negatives: Tensor) -> Tensor:
        c = self.config
        return ressl_loss(
            q,
            k,
            negatives,
            temperature=c.temperature,
            key_temperature=c.key_temperature,
        )
