"""BYOL (arXiv:2006.07733)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbench.parallel import distributed
from backbench.pretrain.method import Batch, Setup
from backbench.pretrain.methods._heads import BYOL_HEAD, Head, build_head
from backbench.pretrain.methods._momentum import (
    momentum_at,
    momentum_copy,
    momentum_update,
)
from backbench.pretrain.methods._precision import full_precision
from backbench.pretrain.methods.simclr import TwoViews, TwoViewsConfig
from backbench.weights.trunk import Trunk


@full_precision
def cosine_loss(p: Tensor, z: Tensor) -> Tensor:
    """Return the mean over samples of 2 - 2 cos(p, z) (Eq. 2 of BYOL).

    p and z are (N, d). Only p gets a gradient."""
    return 2 - 2 * F.cosine_similarity(p, z.detach(), dim=1).mean()


@dataclass(frozen=True, kw_only=True)
class Config(TwoViewsConfig):
    head: Head = BYOL_HEAD
    predictor: Head = BYOL_HEAD
    momentum: float = 0.996
    final_momentum: float = 1.0  # reached by half a cosine over the run


class Method(TwoViews[Config]):
    accumulates = True

    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__(config, backbone, setup)
        self.predictor = build_head(config.predictor, config.head.dim)
        self.target = momentum_copy(nn.Sequential(backbone, self.projector))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        online = [
            self.predictor(self.projector(self.backbone(view))) for view in batch.views
        ]
        with torch.no_grad():
            target = [self.target(view) for view in batch.views]
        # Both ways round: each view predicts what the target network makes of the other
        loss = cosine_loss(online[0], target[1]) + cosine_loss(online[1], target[0])
        return {"loss": distributed.mean_over_ranks(loss)}

    def after_step(self, progress: float) -> None:
        momentum = momentum_at(
            progress, self.config.momentum, self.config.final_momentum
        )
        source = [*self.backbone.parameters(), *self.projector.parameters()]
        momentum_update(self.target.parameters(), source, momentum)
