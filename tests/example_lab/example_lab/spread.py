"""A method: two views of an image are pulled together, all images of a batch are pushed apart."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbench.parallel import distributed
from backbench.pretrain import method
from backbench.pretrain.method import Batch, MethodConfig, Setup
from backbench.weights.trunk import Trunk


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    dim: int = 16
    push: float = 0.5


def spread_loss(z_a: Tensor, z_b: Tensor, *, push: float) -> Tensor:
    """Unit (N, d) of two views -> mean distance of pairs + push x log of the mean kernel."""
    pull = (z_a - z_b).square().sum(1).mean()
    everything = torch.cat((z_a, z_b))
    kernel = (-2 * torch.pdist(everything).square()).exp().mean()
    return pull + push * kernel.log()


class Method(method.Method):
    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__()
        self.config, self.backbone = config, backbone
        self.projector = nn.Linear(backbone.feature_dim, config.dim)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        z = F.normalize(self.projector(self.backbone(torch.cat(list(batch.views)))))
        z_a, z_b = (distributed.gather(part) for part in z.chunk(2))
        return {"loss": spread_loss(z_a, z_b, push=self.config.push)}
