"""ReSSL: relational self-supervised learning with weak augmentation (arXiv:2107.09282)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from backbench.parallel import distributed
from pretrain.method import Batch
from pretrain.methods import moco
from pretrain.methods._precision import full_precision


@full_precision
def ressl_loss(
    q: Tensor, k: Tensor, queue: Tensor, *, temperature: float, key_temperature: float
) -> Tensor:
    """Eq. 5: cross-entropy of the key's and the query's similarities to the queue, softmaxed at
    their temperatures. q, k (N, d), queue (K, d), unit; gradient to q only."""
    target = F.softmax(k.detach() @ queue.detach().T / key_temperature, dim=1)
    return -(target * F.log_softmax(q @ queue.detach().T / temperature, dim=1)).sum(1).mean()


@dataclass(frozen=True, kw_only=True)
class Config(moco.Config):
    """View 0, strongly augmented, is the query; view 1, weakly augmented, the key."""

    temperature: float = 0.1
    key_temperature: float = 0.04


class Method(moco.Method):
    config: Config
    may_be_symmetric = False

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        q, k = self.query_and_keys(batch, 0, 1)
        loss = ressl_loss(
            q,
            k,
            self.queue.keys[0],
            temperature=self.config.temperature,
            key_temperature=self.config.key_temperature,
        )
        return {"loss": distributed.mean_over_ranks(loss)}
