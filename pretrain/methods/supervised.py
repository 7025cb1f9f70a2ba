"""Supervised training with cross-entropy: the papers' "Supervised" rows."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.parallel import batchnorm, distributed, division
from backbench.pretrain import method
from backbench.pretrain.method import Batch, MethodConfig, Setup
from backbench.pretrain.methods._precision import full_precision
from backbench.weights.trunk import Trunk


@full_precision
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    # Of local batch norm over the global batch; null: one per process
    groups: int | None = None


class Method(method.Method):
    views = 1
    sync_batchnorm = False
    accumulates = True

    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__()
        if setup.classes < 2:
            raise BadInput(
                f"supervised needs labels of at least two classes, not {setup.classes}; change data"
            )
        division.check_groups(config.groups, setup.images_at_once)
        self.config = config
        self.backbone = backbone
        self.classifier = nn.Linear(backbone.feature_dim, setup.classes)
        batchnorm.convert_group_batchnorm(self.backbone, config.groups)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        if batch.labels is None:
            raise BadInput("supervised training needs labels; this dataset has none")
        logits = self.classifier(self.backbone(batch.views[0]))
        loss = cross_entropy(logits, batch.labels)
        correct = (logits.detach().argmax(1) == batch.labels).float().mean()
        return {
            "loss": distributed.mean_over_ranks(loss),
            "accuracy": distributed.mean_over_ranks(correct),
        }

    def after_step(self, progress: float) -> None:
        batchnorm.average_batchnorm(self.backbone)

    def heads(self) -> dict[str, Tensor]:
        return {f"fc.{k}": v for k, v in self.classifier.state_dict().items()}
