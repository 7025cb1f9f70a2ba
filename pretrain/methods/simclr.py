"""SimCLR (arXiv:2002.05709)."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.parallel import distributed
from backbench.pretrain import method
from backbench.pretrain.method import Batch, MethodConfig, Setup
from backbench.pretrain.methods._heads import SIMCLR_HEAD, Head, build_head
from backbench.pretrain.methods._precision import full_precision, raised
from backbench.requests.bounds import Positive
from backbench.weights.trunk import Trunk


def pair_similarities(
    z_a: Tensor, z_b: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return cosine / temperature of 2N views: the positives (2N,), and all (2N, 2N).

    In the second a view itself and its positive are -inf."""
    # Row i is view i; its positive is the other view of the same image, N rows on
    n = len(z_a)
    z = F.normalize(torch.cat([z_a, z_b]), dim=1)
    logits = z @ z.T / temperature
    i = torch.arange(2 * n, device=z.device)
    partner = (i + n) % (2 * n)
    positive = logits[i, partner]
    hidden = (torch.cat([i, i]), torch.cat([i, partner]))
    negative = logits.index_put(hidden, logits.new_full((), -torch.inf))
    return positive, negative


@full_precision
def nt_xent_loss(z_a: Tensor, z_b: Tensor, *, temperature: float) -> Tensor:
    """Return SimCLR's loss over 2N anchors (Eq. 1), with the positive in the denominator.

    z_a and z_b (N, d) are normalised here."""
    # -log(e^p / (e^p + sum e^n)) = log(1 + e^(logsumexp(n) - p))
    positive, negative = pair_similarities(z_a, z_b, temperature)
    return F.softplus(negative.logsumexp(1) - positive).mean()


@dataclass(frozen=True, kw_only=True)
class TwoViewsConfig(MethodConfig):
    head: Head


C = TypeVar("C", bound=TwoViewsConfig)


class TwoViews(method.Method, Generic[C]):
    """Encodes two views, `together` in one batch that shares batch norm's statistics."""

    views = 2
    together = True

    def __init__(self, config: C, backbone: Trunk, setup: Setup) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.projector = build_head(config.head, backbone.feature_dim)

    def loss(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        """Return the loss of the projections (N, d) of the global batch."""
        raise AssertionError("a method of two views has a `loss` or a `forward`")

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.loss(*self.project(batch))}

    def project(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return z_a and z_b (N, d) of the global batch with gradient, in float32 or more."""
        if self.together:
            both = torch.cat(list(batch.views))
            z_a, z_b = self.projector(self.backbone(both)).chunk(2)
        else:
            z_a, z_b = (self.projector(self.backbone(view)) for view in batch.views)
        return distributed.gather(raised(z_a)), distributed.gather(raised(z_b))


@dataclass(frozen=True, kw_only=True)
class Config(TwoViewsConfig):
    head: Head = SIMCLR_HEAD
    temperature: Positive = 0.1
    # false: a forward pass for each view, with batch norm statistics of its own (CLLR's code)
    together: bool = True


class Method(TwoViews[Config]):
    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__(config, backbone, setup)
        self.together = config.together

    def loss(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        return nt_xent_loss(z_a, z_b, temperature=self.config.temperature)
