"""CLLR: contrastive learning with low-dimensional reconstruction, a regulariser on top of another
method."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.runs import distributed, seeding
from backbench.weights.trunk import Trunk
from pretrain import method
from pretrain.method import Batch, MethodConfig, Setup, build_method, choose_config
from pretrain.methods._precision import full_precision
from pretrain.methods.lorac import nuclear_norm

ON = ("simclr", "dcl", "hcl", "moco", "byol", "simsiam", "cmc")


@full_precision
def cllr_regularizer(
    phi: Tensor,
    projection: Tensor,
    *,
    alpha: float,
    norm: Literal["nuclear", "l21", "none"] = "nuclear",
) -> Tensor:
    """mean_i ||L^T L phi_i - phi_i||^2 + alpha ||L||: the regulariser of Eq. 8, without its lambda.

    phi (N, H) raw, L (H', H); gradient to both. `nuclear` the sum of singular values (Eq. 7) |
    `l21` the sum of column norms (Eq. 6; a column is a feature, one that is 0 gets no gradient) |
    `none` 0.
    """
    rebuilt = phi @ projection.T @ projection  # rows are samples: (L^T L phi)^T = phi^T L^T L
    loss = (rebuilt - phi).square().sum(1).mean()
    if norm == "nuclear":
        loss = loss + alpha * nuclear_norm(projection.unsqueeze(0))[0]
    elif norm == "l21":
        loss = loss + alpha * projection.norm(dim=0).sum()
    return loss


@full_precision
def released_reconstruction(phi: Tensor, projection: Tensor) -> Tensor:
    """The released code's term for one view: ||unit(phi) - unit(L^T L phi)||_F / N, without square
    and blind to the scale of L, so that a penalty on ||L|| beside it would shrink L for free."""
    rebuilt = F.normalize(phi @ projection.T @ projection, dim=1)
    return (F.normalize(phi, dim=1) - rebuilt).norm() / len(phi)


def soft_rank(matrix: Tensor) -> Tensor:
    """(sum s^2)^2 / sum s^4 of the singular values s: k where k of them are equal and the others
    0."""
    gram = matrix @ matrix.T  # its trace is sum s^2, its squared entries add up to sum s^4
    return gram.trace().square() / gram.square().sum().clamp_min(1e-30)


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    """`inner` is the method that is regularised.

    phi is its encoder's output for all its views, as in the released code (the paper writes one Phi
    for both terms).
    """

    inner: MethodConfig = field(metadata={"choose": choose_config})
    weight: float = 0.1  # the paper's lambda
    alpha: float = 10.0
    norm: Literal["nuclear", "l21", "none"] = "nuclear"
    rows: int | None = None  # H'; null: H, the paper's square L
    normalize: bool = False  # phi to unit length; alpha = 10 then has L = 0 as its best
    reconstruction: Literal["paper", "released"] = "paper"


class Method(method.Method):
    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__()
        if config.inner.name not in ON:
            raise BadInput(
                f"cllr works on {', '.join(ON)}, not on '{config.inner.name}'; "
                "change method.inner.name"
            )
        if config.reconstruction == "released" and config.norm != "none":
            raise BadInput(
                "cllr: the released reconstruction ignores L's scale; "
                "with it method.norm must be none"
            )
        self.config = config
        self.inner = build_method(config.inner, backbone, setup)
        self.sync_batchnorm = self.inner.sync_batchnorm
        self.backbone = self.inner.backbone
        width = backbone.feature_dim
        rows = config.rows or width
        # Orthonormal rows: L^T L starts as a projection (the identity when square). The paper gives
        # no start, and the released code's N(0, 1) suits only its normalised reconstruction.
        generator = seeding.generator(setup.seed, "cllr projection")
        start = torch.eye(width)
        if rows < width:
            start = torch.linalg.qr(torch.randn(width, rows, generator=generator, device="cpu")).Q.T
        self.projection = nn.Parameter(start[:rows].contiguous())
        self._features: list[Tensor] = []
        self.backbone.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        if output.requires_grad:  # of queries, not of keys
            self._features.append(output)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        # 1. The inner method, whose trunk leaves its outputs phi here on the way
        self._features.clear()
        out = self.inner(batch)
        features = torch.cat(self._features)
        self._features.clear()
        # 2. The regulariser of phi and L, equal on all ranks
        if self.config.reconstruction == "released":
            # Over the batch of all ranks: the norm is not a sum over samples
            views = features.split(len(batch.views[0]))
            gathered = [distributed.gather(view) for view in views]
            parts = [released_reconstruction(view, self.projection) for view in gathered]
            term = torch.stack(parts).sum()
        else:
            term = distributed.mean_over_ranks(self._regularizer(features))
        # 3. Eq. 8
        loss = out["loss"] + self.config.weight * term
        logged = {
            "contrastive": out["loss"].detach(),
            "regularizer": term.detach(),
            "rank_L": soft_rank(self.projection.detach()),
        }
        return {**out, "loss": loss, **logged}

    def _regularizer(self, features: Tensor) -> Tensor:
        config = self.config
        phi = F.normalize(features, dim=1) if config.normalize else features
        return cllr_regularizer(phi, self.projection, alpha=config.alpha, norm=config.norm)

    def after_step(self, progress: float) -> None:
        self.inner.after_step(progress)

    def heads(self) -> dict[str, Tensor]:
        return {**self.inner.heads(), "cllr.projection": self.projection.detach()}
