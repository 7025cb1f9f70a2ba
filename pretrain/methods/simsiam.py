"""SimSiam (arXiv:2011.10566)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from backbench.parallel import distributed
from backbench.pretrain.method import Batch, Setup
from backbench.pretrain.methods._heads import (
    SIMSIAM_HEAD,
    SIMSIAM_PREDICTOR,
    Head,
    build_head,
)
from backbench.pretrain.methods._precision import full_precision
from backbench.pretrain.methods.simclr import TwoViews, TwoViewsConfig
from backbench.weights.trunk import Trunk


@full_precision
def simsiam_loss(p_a: Tensor, p_b: Tensor, z_a: Tensor, z_b: Tensor) -> Tensor:
    """Return the mean over samples of -cos(p_a, z_b)/2 - cos(p_b, z_a)/2 (Eq. 4).

    All are (N, d). Only p_a and p_b get a gradient."""
    ab = F.cosine_similarity(p_a, z_b.detach(), dim=1)
    ba = F.cosine_similarity(p_b, z_a.detach(), dim=1)
    return -(ab + ba).mean() / 2


@dataclass(frozen=True, kw_only=True)
class Config(TwoViewsConfig):
    head: Head = SIMSIAM_HEAD
    predictor: Head = SIMSIAM_PREDICTOR


class Method(TwoViews[Config]):
    accumulates = True

    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__(config, backbone, setup)
        self.predictor = build_head(config.predictor, config.head.dim)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        z_a, z_b = (self.projector(self.backbone(view)) for view in batch.views)
        loss = simsiam_loss(self.predictor(z_a), self.predictor(z_b), z_a, z_b)
        # 1 when the projections are spread evenly, 0 when they have collapsed
        z = distributed.gather_without_gradient(F.normalize(z_a.float(), dim=1))
        spread = z.std(0).mean() * z.shape[1] ** 0.5
        return {"loss": distributed.mean_over_ranks(loss), "spread": spread}
