"""DCL: debiased contrastive learning (arXiv:2007.00224), CLLR's baseline.

lightly's DCL is the decoupled loss.
"""

from dataclasses import dataclass

from torch import Tensor

from pretrain.methods._heads import HCL_HEAD, Head
from pretrain.methods.hcl import hcl_loss
from pretrain.methods.simclr import TwoViews, TwoViewsConfig


def dcl_loss(z_a: Tensor, z_b: Tensor, *, temperature: float, tau_plus: float) -> Tensor:
    """Eq. 8, M = 1: NT-Xent without the share tau_plus of false negatives. z (N, d), N >= 2."""
    return hcl_loss(z_a, z_b, temperature=temperature, tau_plus=tau_plus, beta=0.0)


@dataclass(frozen=True, kw_only=True)
class Config(TwoViewsConfig):
    head: Head = HCL_HEAD
    temperature: float = 0.5
    tau_plus: float = 0.1


class Method(TwoViews[Config]):
    together = False

    def loss(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        config = self.config
        return dcl_loss(z_a, z_b, temperature=config.temperature, tau_plus=config.tau_plus)
