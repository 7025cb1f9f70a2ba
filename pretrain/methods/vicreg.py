"""VICReg (arXiv:2105.04906), on the outputs of all ranks. lightly's loss picks covariances off the
diagonal by a mask: at 8192 outputs it takes 1 GB a view and makes the host wait for a GPU."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from backbench.pretrain.methods._heads import VICREG_HEAD, Head
from backbench.pretrain.methods._precision import full_precision
from backbench.pretrain.methods.simclr import TwoViews, TwoViewsConfig

EPSILON = 1e-4  # under the root of the standard deviation


@full_precision
def vicreg_loss(
    z_a: Tensor,
    z_b: Tensor,
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
) -> Tensor:
    """Return the loss of Eq. 6 as the released code computes it.

    z_a and z_b (N, d) are raw. The invariance is a mean over N d, the variance term the mean over the
    two views, and the covariance term their sum."""
    # 1. Both views alike (Eq. 5)
    loss = invariance * F.mse_loss(z_a, z_b)
    for z in (z_a, z_b):
        n, d = z.shape
        centred = z - z.mean(0)
        variances = centred.square().sum(0) / (n - 1)
        # 2. Standard deviations of at least 1 (Eq. 1)
        hinge = F.relu(1 - (variances + EPSILON).sqrt()).mean()
        # 3. No covariances (Eq. 3, 4): all squared, without those on the diagonal. C = X^T X / (n - 1)
        #    has the norm of X X^T / (n - 1), of which the smaller is made
        gram = centred @ centred.T if n < d else centred.T @ centred
        others = gram.square().sum() / (n - 1) ** 2 - variances.square().sum()
        loss = loss + variance * hinge / 2 + covariance * others / d
    return loss


@dataclass(frozen=True, kw_only=True)
class Config(TwoViewsConfig):
    head: Head = VICREG_HEAD
    invariance: float = 25.0
    variance: float = 25.0
    covariance: float = 1.0


class Method(TwoViews[Config]):
    together = False

    def loss(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        c = self.config
        return vicreg_loss(
            z_a,
            z_b,
            invariance=c.invariance,
            variance=c.variance,
            covariance=c.covariance,
        )
