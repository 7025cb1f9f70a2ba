"""VICReg (arXiv:2105.04906); the loss is lightly's, on the outputs of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pretrain.method import Batch
from pretrain.methods._heads import VICREG_HEAD, Head
from pretrain.methods._precision import full_precision
from pretrain.methods.simclr import TwoViews, TwoViewsConfig


@full_precision
def vicreg_loss(
    z_a: Tensor,
    z_b: Tensor,
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
) -> Tensor:
    """Eq. 6 as the released code computes it.

    z (N, d) raw. The invariance is a mean over N d, the variance term the mean over the two views,
    the covariance term their sum.
    """
    from lightly.loss import VICRegLoss

    return VICRegLoss(lambda_param=invariance, mu_param=variance, nu_param=covariance)(z_a, z_b)


@dataclass(frozen=True, kw_only=True)
class Config(TwoViewsConfig):
    head: Head = VICREG_HEAD
    invariance: float = 25.0
    variance: float = 25.0
    covariance: float = 1.0


class Method(TwoViews[Config]):
    together = False

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        z_a, z_b = self.project(batch)
        config = self.config
        loss = vicreg_loss(
            z_a,
            z_b,
            invariance=config.invariance,
            variance=config.variance,
            covariance=config.covariance,
        )
        return {"loss": loss}
