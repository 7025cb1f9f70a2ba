"""ARB: align representations with base (the paper's equation numbers)."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.errors import BadInput
from backbench.parallel import distributed
from backbench.pretrain.method import Batch, Setup
from backbench.pretrain.methods._heads import BARLOW_HEAD, Head
from backbench.pretrain.methods._linalg import LEAST_RIDGE, inverse_root
from backbench.pretrain.methods._precision import full_precision
from backbench.pretrain.methods.simclr import TwoViews, TwoViewsConfig
from backbench.runs import seeding
from backbench.weights.trunk import Trunk


def standardise(z: Tensor) -> Tensor:
    """Map (N, d) to columns of mean 0 and norm 1 (Eq. 7). A column that is constant up to rounding
    becomes 0, without gradient."""
    # The norm of a centred column is sqrt(N) sigma, which Eq. 7 divides by
    centred = z - z.mean(0)
    norm = centred.norm(dim=0)
    # N centred entries of a constant column are rounding errors of its size
    rounding = 4 * torch.finfo(z.dtype).eps * z.detach().abs().amax(0) * len(z) ** 0.5
    constant = norm.detach() <= rounding
    return torch.where(constant, 0.0, centred) / torch.where(constant, 1.0, norm)


def _well_conditioned(gram: Tensor, *, centred: bool) -> bool:
    """Return True if all eigenvalues of G (p, n, n) are above a thousandth of its Frobenius norm.
    With `centred` the constant direction, which is always zero, is left out."""
    # 1. G = Z Z^T of centred columns has the eigenvector 1 = (1, ..., 1) with eigenvalue 0. Adding
    #    c / n in every entry makes that c, here the mean of the diagonal, and leaves the others
    n = gram.shape[-1]
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    shifted = gram + diagonal.mean(-1)[..., None, None] / n if centred else gram.clone()
    # 2. All eigenvalues are above x exactly if G - x I has a Cholesky factor, which takes a tenth
    #    of the time of the eigenvalues
    shifted.diagonal(dim1=-2, dim2=-1).sub_(
        1e-3 * torch.linalg.matrix_norm(gram).unsqueeze(-1)
    )
    return bool((torch.linalg.cholesky_ex(shifted).info == 0).all())


@torch.no_grad()
def nearest_base(z: Tensor, ridge: float) -> Tensor:
    """Map (p, N, d) standardised to B = Z (Z^T Z + ridge I)^(-1/2), Eq. 9, without gradient: the
    orthonormal matrix nearest to Z if Z has full column rank (Theorem 1, Eq. 2), else its ridged
    form. A badly conditioned Gram matrix, as in a collapse, loses its small eigenvalues in float32
    (errors of 10% were seen): float64 there."""
    # 1. The Gram matrix of the smaller side: Z f(Z^T Z) = f(Z Z^T) Z for any function f, since
    #    Z (Z^T Z)^k = (Z Z^T)^k Z
    wide = z.shape[-2] <= z.shape[-1]
    x = z
    gram = x @ x.mT if wide else x.mT @ x
    if z.is_cuda and ridge >= LEAST_RIDGE:
        # Looking at the condition would wait for the GPU, so this is float64 always. Columns have
        # length 1 at most, so the eigenvalues add up to their number at most
        x = z.double()
        gram = x @ x.mT if wide else x.mT @ x
        root = inverse_root(gram, ridge, largest=z.shape[-1])
        return (root @ x if wide else x @ root).to(z.dtype)
    if z.dtype == torch.float32 and not _well_conditioned(gram, centred=wide):
        x = z.double()
        gram = x @ x.mT if wide else x.mT @ x
    # 2. G = U diag(lambda) U^T, eigenvectors as columns (as in Theorem 1; Eq. 9 has them as rows)
    values, vectors = torch.linalg.eigh(gram)
    # 3. (G + ridge I)^(-1/2) = U diag((lambda + ridge)^(-1/2)) U^T
    root = (vectors * (values.clamp_min(0) + ridge).rsqrt().unsqueeze(-2)) @ vectors.mT
    return (root @ x if wide else x @ root).to(z.dtype)


def grouped_columns(z: Tensor, groups: int, permutation: Tensor | None) -> Tensor:
    """Map (N, d) raw to (groups, N, d / groups), standardised, permuted, cut (Section 3.2.4)."""
    columns = standardise(z)
    if permutation is not None:
        columns = columns[:, permutation]
    n, d = columns.shape
    return columns.view(n, groups, d // groups).transpose(0, 1)


Align = Literal["base", "direct"]
Loss = Literal["eq8", "mse", "off_diagonal"]
Over = Literal["features", "instances"]


@full_precision
def arb_loss(
    z_a: Tensor,
    z_b: Tensor,
    *,
    groups: int = 1,
    ridge: float = 1e-4,
    permutation: Tensor | None = None,
    align: Align = "base",
    loss: Loss = "eq8",
    off_diagonal_weight: float = 0.0051,
    over: Over = "features",
) -> Tensor:
    """Return the sum over d columns of (1 - <z^A_i, b^B_i>)^2 + (1 - <z^B_i, b^A_i>)^2: the diagonal
    of Eq. 8.

    z_a and z_b (N, d) are raw; they are standardised here. The base gets no gradient. With `groups`,
    a divisor of d, the columns fall, after `permutation` (d,), into that many neighbouring groups
    with a base each.

    The other arguments make the paper's variants. align `direct`: each view with the other instead
    of with its base (Table 3), both with gradient. loss `mse`: the sum of squared distances of unit
    columns; `off_diagonal`: Barlow Twins' second term is added, within the groups (Table 4). over
    `instances`: samples take the place of features (Table 5), without permutation.
    """
    if over == "instances":
        z_a, z_b, permutation = z_a.T, z_b.T, None
    # 1. Columns of mean 0 and norm 1, in groups (g, N, d / g)
    a, b = (grouped_columns(z, groups, permutation) for z in (z_a, z_b))
    # 2. What each view is aligned with: the base of the other
    target_a, target_b = a, b
    if align == "base":
        target_a = nearest_base(a.detach(), ridge)
        target_b = nearest_base(b.detach(), ridge)
    # 3. Column i with its target's column i: 1 - <x_i, t_i>, squared
    total = z_a.new_zeros(())
    for x, target in ((a, target_b), (b, target_a)):
        if loss == "mse":
            total = total + (x - F.normalize(target, dim=1)).square().sum()
            continue
        total = total + (1 - (x * target).sum(1)).square().sum()
        if loss == "off_diagonal":
            # 4. Different columns should be orthogonal: all squared products but the diagonal's
            correlation = x.mT @ target
            diagonal = correlation.diagonal(dim1=1, dim2=2)
            others = correlation.square().sum() - diagonal.square().sum()
            total = total + off_diagonal_weight * others
    return total


@torch.no_grad()
def tracks(z_a: Tensor, z_b: Tensor, *, ridge: float) -> dict[str, Tensor]:
    """Compute Fig. 3's curves from embeddings (N, d).

    embedding_distance and base_distance are those of the views' standardised embeddings and of
    their bases, divided by sqrt(2 d), the distance of orthogonal unit columns. (Bases of more than
    N - 1 columns are shorter: orthogonal ones are at sqrt((N - 1) / d).) variance is that of unit
    embeddings: 0 where all are equal, 1 where they fill the sphere."""
    a, b = standardise(z_a.float()), standardise(z_b.float())
    scale = (2 * z_a.shape[1]) ** 0.5
    bases = nearest_base(torch.stack([a, b]), ridge)
    unit = F.normalize(z_a.float(), dim=1)
    return {
        "embedding_distance": (a - b).norm() / scale,
        "base_distance": (bases[0] - bases[1]).norm() / scale,
        "variance": unit.var(0, correction=0).sum(),
    }


@dataclass(frozen=True, kw_only=True)
class Config(TwoViewsConfig):
    """The fields from `shuffle` to `over` change the loss as the paper's ablations do. `track` adds
    Fig. 3's curves to metrics.jsonl."""

    head: Head = BARLOW_HEAD
    groups: int = 1
    ridge: float = 1e-4
    shuffle: bool = True
    align: Align = "base"
    loss: Loss = "eq8"
    off_diagonal_weight: float = 0.0051
    over: Over = "features"
    track: bool = False


class Method(TwoViews[Config]):
    """Standardisation and base are global; one column permutation a step for both views."""

    together = False

    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__(config, backbone, setup)
        columns = config.head.dim if config.over == "features" else setup.batch_size
        if config.groups < 1 or columns % config.groups:
            raise BadInput(
                f"arb: {config.groups} groups do not divide {columns} columns; change method.groups"
            )
        self.seed = setup.seed

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        config = self.config
        z_a, z_b = self.project(batch)
        permutation = None
        if config.shuffle:
            generator = seeding.generator(self.seed, "feature shuffle", batch.step)
            order = torch.randperm(z_a.shape[1], generator=generator)
            permutation = distributed.sent(order, z_a.device)
        loss = arb_loss(
            z_a,
            z_b,
            groups=config.groups,
            ridge=config.ridge,
            permutation=permutation,
            align=config.align,
            loss=config.loss,
            off_diagonal_weight=config.off_diagonal_weight,
            over=config.over,
        )
        if not config.track:
            return {"loss": loss}
        return {"loss": loss, **tracks(z_a, z_b, ridge=config.ridge)}
