"""Barlow Twins (arXiv:2103.03230); the loss is lightly's, on the outputs of all ranks, which makes
the statistics the global batch's, as the released code's synchronised last batch norm does.
lightly's own `gather_distributed` averages correlations of columns standardised on each rank."""

from dataclasses import dataclass

from torch import Tensor

from backbench.pretrain.methods._heads import BARLOW_HEAD, Head
from backbench.pretrain.methods._precision import full_precision
from backbench.pretrain.methods.simclr import TwoViews, TwoViewsConfig


@full_precision
def barlow_twins_loss(
    z_a: Tensor, z_b: Tensor, *, off_diagonal_weight: float = 5e-3
) -> Tensor:
    """Eq. 1; z (N, d) raw, standardised inside."""
    from lightly.loss import BarlowTwinsLoss

    return BarlowTwinsLoss(lambda_param=off_diagonal_weight)(z_a, z_b)


@dataclass(frozen=True, kw_only=True)
class Config(TwoViewsConfig):
    head: Head = BARLOW_HEAD
    off_diagonal_weight: float = 5e-3  # Section 2.2's lambda; released code: 0.0051
    scale: float = 1.0  # released code: --scale-loss 0.024 (1/32 at first)


class Method(TwoViews[Config]):
    together = False

    def loss(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        config = self.config
        loss = barlow_twins_loss(
            z_a, z_b, off_diagonal_weight=config.off_diagonal_weight
        )
        return config.scale * loss
