"""No training: with `epochs: 0` the initialised trunk is saved, which all must beat."""

from dataclasses import dataclass

from torch import Tensor

from backbench.pretrain import method
from backbench.pretrain.method import Batch, MethodConfig, Setup
from backbench.weights.trunk import Trunk


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    pass


class Method(method.Method):
    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return a loss of zero: nothing is learned even when a step is taken."""
        return {"loss": 0.0 * self.backbone(batch.views[0]).float().sum()}
