"""ARB: align representations with base (equation numbers are the paper's)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backbench import resume
from backbench.backbones import Trunk
from backbench.errors import BadInput
from pretrain.method import Batch, MethodConfig, Setup
from pretrain.methods._heads import BARLOW_HEAD, Head
from pretrain.methods._precision import full_precision
from pretrain.methods.simclr import TwoViews


def standardise(z: Tensor) -> Tensor:
    """(N, d) -> columns of mean 0 and norm 1; a column that is constant up to rounding becomes 0, without gradient."""
    centred = z - z.mean(0)
    norm = centred.norm(dim=0)
    rounding = 4 * torch.finfo(z.dtype).eps * z.detach().abs().amax(0) * len(z) ** 0.5
    constant = norm.detach() <= rounding
    return torch.where(constant, 0.0, centred) / torch.where(constant, 1.0, norm)


@torch.no_grad()
def nearest_base(z: Tensor, ridge: float) -> Tensor:
    """(p, N, d) standardised -> B = Z (Z^T Z + ridge I)^(-1/2), Eq. 9, without gradient.

    From the eigenvectors of the smaller Gram matrix, Z f(Z^T Z) = f(Z Z^T) Z, in float64.
    """
    x = z.double()
    wide = x.shape[-2] <= x.shape[-1]
    values, vectors = torch.linalg.eigh(x @ x.mT if wide else x.mT @ x)
    root = (vectors * (values.clamp_min(0) + ridge).rsqrt().unsqueeze(-2)) @ vectors.mT
    root = root.to(z.dtype)
    return root @ z if wide else z @ root


@full_precision
def arb_loss(
    z_a: Tensor, z_b: Tensor, *, groups: int = 1, ridge: float = 1e-4, permutation: Tensor | None = None
) -> Tensor:
    """Eq. 8, diagonal only: sum_i (1 - <z^A_i, b^B_i>)^2 + (1 - <z^B_i, b^A_i>)^2 over the d columns.

    z (N, d) raw, standardised inside; the base takes no gradient. With `groups` the columns, after `permutation` (d,),
    fall into that many neighbouring groups with a base each. d must be a multiple of groups.
    """
    n, d = z_a.shape
    a, b = standardise(z_a), standardise(z_b)
    if permutation is not None:
        a, b = a[:, permutation], b[:, permutation]
    a, b = (x.view(n, groups, d // groups).transpose(0, 1) for x in (a, b))
    base_a, base_b = nearest_base(a.detach(), ridge), nearest_base(b.detach(), ridge)
    return (1 - (a * base_b).sum(1)).square().sum() + (1 - (b * base_a).sum(1)).square().sum()


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    head: Head = BARLOW_HEAD
    groups: int = 1
    ridge: float = 1e-4


class Method(TwoViews):
    """Standardisation and base over the global batch; one column permutation for both views, new in each step."""

    together = False

    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        super().__init__(config.name, config.head, backbone, setup)
        if config.head.dim % config.groups:
            raise BadInput(f"arb: {config.groups} groups do not divide {config.head.dim} outputs; change method.groups")
        self.config, self.seed = config, setup.seed

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        z_a, z_b = self.project(batch)
        generator = resume.generator(self.seed, "feature shuffle", batch.step)
        permutation = torch.randperm(z_a.shape[1], generator=generator).to(z_a.device)
        loss = arb_loss(z_a, z_b, groups=self.config.groups, ridge=self.config.ridge, permutation=permutation)
        return {"loss": loss}
