"""W-MSE: whitening for self-supervised representation learning (arXiv:2007.06346), on slices of the
global batch. lightly's draws from the global generator and whitens each rank's samples alone."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.errors import BadInput
from backbench.parallel import distributed
from backbench.pretrain.method import Batch, Setup
from backbench.pretrain.methods._heads import WMSE_HEAD, Head
from backbench.pretrain.methods._precision import full_precision
from backbench.pretrain.methods.simclr import TwoViews, TwoViewsConfig
from backbench.runs import seeding
from backbench.weights.trunk import Trunk


def whiten(x: Tensor, ridge: float) -> Tensor:
    """Map (S, N, d) slices to the same with mean 0 and covariance I, by Cholesky (Section 3)."""
    # With covariance C = L L^T, the rows x of centred X become L^-1 x: their covariance is
    # L^-1 C L^-T = I
    centred = x - x.mean(1, keepdim=True)
    covariance = centred.mT @ centred / (x.shape[1] - 1)
    eye = torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
    root, failed = torch.linalg.cholesky_ex((1 - ridge) * covariance + ridge * eye)
    # Without a root the loss is not a number, which ends the run as soon as somebody looks
    root = torch.where(failed[:, None, None] == 0, root, torch.nan)
    return torch.linalg.solve_triangular(root, centred.mT, upper=False).mT


@full_precision
def w_mse_loss(
    z_a: Tensor, z_b: Tensor, order: Tensor, *, size: int, ridge: float = 0.0
) -> Tensor:
    """Return the mean over pairs of the distance 2 - 2 cos between whitened views (Eq. 6).

    z_a and z_b are (N, d). `order` (N,) is a permutation of the samples, whose neighbours form slices
    of `size` that are whitened together, each view by itself. `size` must exceed d, or the covariance
    has no inverse (unless ridge > 0)."""
    a, b = (whiten(z[order].view(-1, size, z.shape[1]), ridge) for z in (z_a, z_b))
    return 2 - 2 * F.cosine_similarity(a, b, dim=2).mean()


@dataclass(frozen=True, kw_only=True)
class Config(TwoViewsConfig):
    head: Head = WMSE_HEAD
    size: int = 128  # samples whitened together
    ridge: float = 0.0


class Method(TwoViews[Config]):
    together = False

    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__(config, backbone, setup)
        if config.size < 2 * config.head.dim or setup.batch_size % config.size:
            raise BadInput(
                f"w_mse whitens slices of {config.size}: they must divide the batch of "
                f"{setup.batch_size} and hold at least twice as many samples as the "
                f"{config.head.dim} outputs; change method.size"
            )
        self.seed = setup.seed

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        z_a, z_b = self.project(batch)
        generator = seeding.generator(self.seed, "whitening slices", batch.step)
        order = distributed.sent(
            torch.randperm(len(z_a), generator=generator), z_a.device
        )
        c = self.config
        return {"loss": w_mse_loss(z_a, z_b, order, size=c.size, ridge=c.ridge)}
