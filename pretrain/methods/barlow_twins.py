"""Barlow Twins (arXiv:2103.03230). The loss takes the outputs of all ranks, so its statistics are
the global batch's, as the released code's synchronised last batch norm makes them. lightly's
averages correlations of columns that each rank standardised by itself."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.pretrain.methods._heads import BARLOW_HEAD, Head
from backbench.pretrain.methods._precision import full_precision
from backbench.pretrain.methods.simclr import TwoViews, TwoViewsConfig


@full_precision
def barlow_twins_loss(
    z_a: Tensor, z_b: Tensor, *, off_diagonal_weight: float = 5e-3
) -> Tensor:
    """Return the loss of Eq. 1. z_a and z_b (N, d) are raw; they are standardised here."""
    # 1. Columns of mean 0 and variance 1 over the batch, by the epsilon of a batch norm
    a = F.batch_norm(z_a, None, None, training=True)
    b = F.batch_norm(z_b, None, None, training=True)
    # 2. The cross-correlation of the two views (Eq. 2)
    correlation = a.T @ b / len(a)
    diagonal = correlation.diagonal()
    others = correlation.diagonal_scatter(torch.zeros_like(diagonal))
    # 3. Both views alike, no two features alike
    invariance = (1 - diagonal).square().sum()
    redundancy = others.square().sum()
    return invariance + off_diagonal_weight * redundancy


@dataclass(frozen=True, kw_only=True)
class Config(TwoViewsConfig):
    head: Head = BARLOW_HEAD
    off_diagonal_weight: float = 5e-3  # Section 2.2's lambda; released code: 0.0051
    # Released code until June 2021: --scale-loss 0.024 (1/32 at first), with one rate for all
    # parameters. Afterwards: none, and 0.024 times that rate for biases and norms. Never both.
    scale: float = 1.0


class Method(TwoViews[Config]):
    together = False

    def loss(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        config = self.config
        loss = barlow_twins_loss(
            z_a, z_b, off_diagonal_weight=config.off_diagonal_weight
        )
        return config.scale * loss
