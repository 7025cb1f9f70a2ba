"""CLLR: contrastive learning with low-dimensional reconstruction, on top of another method."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbench.errors import BadInput
from backbench.parallel import distributed
from backbench.pretrain import method
from backbench.pretrain.method import (
    AnyMethodConfig,
    Batch,
    MethodConfig,
    Setup,
    build_method,
)
from backbench.pretrain.methods._precision import full_precision
from backbench.pretrain.methods.lorac import nuclear_norm
from backbench.runs import seeding
from backbench.weights.trunk import Trunk

ON = ("simclr", "dcl", "hcl", "moco", "byol", "simsiam", "cmc")


@full_precision
def cllr_regularizer(
    phi: Tensor,
    projection: Tensor,
    *,
    alpha: float,
    norm: Literal["nuclear", "l21", "none"] = "nuclear",
) -> Tensor:
    """Return the mean over samples of ||L^T L phi_i - phi_i||^2, plus alpha ||L||: the regulariser of
    Eq. 8 without its lambda.

    phi (N, H) is raw, L is (H', H); both get a gradient. The norm of L:

        nuclear   the sum of its singular values (Eq. 7)
        l21       the sum of its column norms (Eq. 6); a column is a feature, and a zero one has no
                  gradient
        none      0
    """
    # Rows are samples: (L^T L phi)^T = phi^T L^T L
    rebuilt = phi @ projection.T @ projection
    loss = (rebuilt - phi).square().sum(1).mean()
    if norm == "nuclear":
        loss = loss + alpha * nuclear_norm(projection.unsqueeze(0))[0]
    elif norm == "l21":
        loss = loss + alpha * projection.norm(dim=0).sum()
    return loss


@full_precision
def released_reconstruction(phi: Tensor, projection: Tensor) -> Tensor:
    """Compute the released code's term for one view: ||unit(phi) - unit(L^T L phi)||_F / N. Without
    square and blind to the scale of L, it lets a penalty on ||L|| shrink L for free."""
    rebuilt = F.normalize(phi @ projection.T @ projection, dim=1)
    return (F.normalize(phi, dim=1) - rebuilt).norm() / len(phi)


@torch.no_grad()
def alive(phi: Tensor, projection: Tensor, *, scaled: bool) -> dict[str, Tensor]:
    """Measure what is left of L: rank_L, its effective rank, and kept_L, the share of phi's squared
    length that L^T L phi gives back (1: all, 0: L is dead). `scaled`: of its best multiple."""
    rebuilt = phi @ projection.T @ projection
    sums = torch.stack(
        [phi.square().sum(), (phi * rebuilt).sum(), rebuilt.square().sum()]
    )
    length, product, square = distributed.sum_over_ranks(sums).clamp_min(1e-30)
    if scaled:
        kept = product.square() / (length * square)
    else:
        kept = (2 * product - square) / length  # 1 - |rebuilt - phi|^2 / |phi|^2
    # (sum s^2)^2 / sum s^4 of the singular values s is k where k of them are equal and the others 0.
    # The trace of L L^T is sum s^2, its squared entries add up to sum s^4
    gram = projection @ projection.T
    rank = gram.trace().square() / gram.square().sum().clamp_min(1e-30)
    return {"rank_L": rank, "kept_L": kept}


@torch.no_grad()
def kept_projection(projection: Tensor, kept: int) -> Tensor:
    """Return the head (kept, H) that computes L phi with all but `kept` columns of L (H', H) set to 0
    (Section 2.2).

    The kept columns are the pivots of a QR decomposition: each is the column whose part orthogonal to
    those before is the longest. So they are linearly independent (the paper's maximal set, Eq. 7) as
    far as L's rank goes, and long (Eq. 6). The result is in an orthonormal basis of their span; where
    L's rank is below `kept`, the coordinates beyond it are 0."""
    # 1. L P = Q R with the pivots in the order of P
    from scipy.linalg import qr

    matrix = projection.detach().cpu().double().numpy()
    q, _, order = qr(matrix, mode="economic", pivoting=True)
    # 2. All columns but the first `kept` pivots are 0
    cut = np.zeros_like(matrix)
    cut[:, order[:kept]] = matrix[:, order[:kept]]
    # 3. Those pivots lie in the span of Q's first columns: Q^T is an isometry on it, so that
    #    lengths and angles of L phi are as they were
    return torch.from_numpy(q[:, :kept].T @ cut).to(projection)


def _start(
    kind: Literal["orthonormal", "randn"], rows: int, width: int, seed: int
) -> Tensor:
    """Return L (rows, width) as it is before the first step."""
    generator = seeding.generator(seed, "cllr projection")
    if kind == "randn":
        return torch.randn(rows, width, generator=generator, device="cpu")
    # With orthonormal rows L^T L starts as a projection (the identity where L is square). The paper
    # gives no start
    start = torch.eye(width)
    if rows < width:
        drawn = torch.randn(width, rows, generator=generator, device="cpu")
        start = torch.linalg.qr(drawn).Q.T
    return start[:rows].contiguous()


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    """`inner` is the method that is regularised. phi is its encoder's output for all its views, as
    in the released code (the paper writes one Phi for both terms)."""

    inner: AnyMethodConfig
    weight: float = 0.1  # the paper's lambda
    alpha: float = 10.0
    norm: Literal["nuclear", "l21", "none"] = "nuclear"
    rows: int | None = None  # H'; null: H, the paper's square L
    reconstruction: Literal["paper", "released"] = "paper"
    # Columns of L that are kept when it is done: the dimension of L phi; null: all
    kept: int | None = None
    start: Literal["orthonormal", "randn"] = "orthonormal"  # randn: the released code's


class Method(method.Method):
    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__()
        if config.inner.name not in ON:
            raise BadInput(
                f"cllr works on {', '.join(ON)}, not on '{config.inner.name}';"
                " change method.inner.name"
            )
        if config.reconstruction == "released" and config.norm != "none":
            raise BadInput(
                "cllr: the released reconstruction ignores L's scale: method.norm must be none"
            )
        self.config = config
        self.inner = build_method(config.inner, backbone, setup)
        self.sync_batchnorm = self.inner.sync_batchnorm
        self.backbone = self.inner.backbone
        width = backbone.feature_dim
        rows = config.rows or width
        if config.kept is not None and not 1 <= config.kept <= min(rows, width):
            raise BadInput(
                f"cllr: {config.kept} columns cannot be kept of L, {rows} x {width};"
                f" set method.kept from 1 to {min(rows, width)}"
            )
        self.projection = nn.Parameter(_start(config.start, rows, width, setup.seed))
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
        config = self.config
        is_released = config.reconstruction == "released"
        if is_released:
            # Over the batch of all ranks: the norm is not a sum over samples
            term = torch.zeros((), device=features.device)
            for view in features.split(len(batch.views[0])):
                term = term + released_reconstruction(
                    distributed.gather(view), self.projection
                )
        else:
            own = cllr_regularizer(
                features, self.projection, alpha=config.alpha, norm=config.norm
            )
            term = distributed.mean_over_ranks(own)
        # 3. Eq. 8
        loss = out["loss"] + config.weight * term
        projection = self.projection.detach()
        return {
            **out,
            "loss": loss,
            "contrastive": out["loss"].detach(),
            "regularizer": term.detach(),
            **alive(
                features.detach().to(projection.dtype), projection, scaled=is_released
            ),
        }

    def after_step(self, progress: float) -> None:
        self.inner.after_step(progress)

    def heads(self) -> dict[str, Tensor]:
        # `lphi` is the head that probes read: L with its kept columns
        projection = self.projection.detach()
        kept = kept_projection(projection, self.config.kept or projection.shape[1])
        own = {"cllr.projection": projection, "lphi.0.weight": kept.contiguous()}
        return {**self.inner.heads(), **own}
