"""HCL: contrastive learning with hard negative samples (arXiv:2010.04592); lightly has none."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from backbench.pretrain.methods._heads import HCL_HEAD, Head
from backbench.pretrain.methods._precision import full_precision
from backbench.pretrain.methods.simclr import (
    TwoViews,
    TwoViewsConfig,
    pair_similarities,
)
from backbench.pretrain.recipe import BelowOne
from backbench.requests.bounds import Positive


@full_precision
def hcl_loss(
    z_a: Tensor, z_b: Tensor, *, temperature: float, tau_plus: float, beta: float
) -> Tensor:
    """Return the contrastive loss whose negatives are weighted by their hardness, exp(beta sim / t),
    and freed of the share tau_plus of false ones (Eq. 4 and 5).

    z_a and z_b (N, d), N at least 2, are normalised here. beta = 0 is the debiased loss. The
    negatives' estimate is kept above its least possible value, (2N - 2) exp(-1 / t)."""
    positive, negative = pair_similarities(z_a, z_b, temperature)
    count = negative.shape[1] - 2
    # 1. The weighted mean of e^n: sum_j w_j e^(n_j) / sum_j w_j with w = e^(beta n), in logarithms.
    #    Hidden entries, -inf, stay hidden when beta is 0
    hardness = torch.where(negative.isinf(), negative, beta * negative)
    log_sum = torch.logsumexp(hardness + negative, 1)
    log_weights = torch.logsumexp(hardness, 1)
    weighted = (log_sum - log_weights).exp()
    # 2. That mean is over a mixture, tau_plus of it positives: p = (1 - tau+) p- + tau+ p+, solved
    #    for p-
    estimate = count * (weighted - tau_plus * positive.exp()) / (1 - tau_plus)
    estimate = estimate.clamp_min(count * math.exp(-1 / temperature))
    # 3. -log(e^p / (e^p + estimate))
    return (torch.log(positive.exp() + estimate) - positive).mean()


@dataclass(frozen=True, kw_only=True)
class Config(TwoViewsConfig):
    head: Head = HCL_HEAD
    temperature: Positive = 0.5
    tau_plus: BelowOne = 0.1
    beta: float = 1.0


class Method(TwoViews[Config]):
    together = False  # the released code's two forward passes

    def loss(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        c = self.config
        return hcl_loss(
            z_a, z_b, temperature=c.temperature, tau_plus=c.tau_plus, beta=c.beta
        )
