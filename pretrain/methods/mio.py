"""MIO: mutual information optimisation as binary classification of pairs (paper's equations)."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.pretrain.methods._heads import MIO_HEAD, Head
from backbench.pretrain.methods._precision import GradientContext, full_precision
from backbench.pretrain.methods.simclr import TwoViews, TwoViewsConfig
from backbench.requests.bounds import Positive

BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}  # similarities held at once


class _NegativePairs(torch.autograd.Function):
    """Computes the sum over negative pairs i < j of softplus(s_ij), with s_ij = z_i.z_j / t, and its
    gradient.

    softplus(s_ij) is -log(1 - sigmoid(s_ij)). Eq. 5 sums over ordered pairs, which is twice this.
    z (2N, d) holds N first views, then their N partners; no pair of partners is a negative one. Rows
    are made in blocks. The gradient, d/dz_i = sum_j sigmoid(s_ij) z_j / t, is added up in the same
    pass, for both members of a pair."""

    @staticmethod
    def forward(ctx: GradientContext, z: Tensor, temperature: float) -> Tensor:
        """Return the sum of softplus over the logits of the negative pairs i < j.

        The gradient is computed on the way, so that the backward pass needs no logits.
        """
        total = len(z)
        n = total // 2
        # As many rows as keep the logits of a block within the bound
        bound = BLOCK_ELEMENTS.get(z.device.type, 1 << 18)
        block = max(1, bound // total)
        value = z.new_zeros((), dtype=torch.float64)
        gradient = torch.zeros_like(z)
        for start in range(0, total, block):
            # 1. Rows of this block against themselves and all that follow, (size, total - start)
            rows = z[start : start + block]
            columns = z[start:]
            size = len(rows)
            logits = rows @ columns.T / temperature
            # 2. Only pairs i < j count: the others become -inf, whose softplus and sigmoid are 0
            lower = torch.ones(size, size, dtype=torch.bool, device=z.device).tril_()
            logits[:, :size].masked_fill_(lower, -torch.inf)
            #    ... and so do the positive pairs j = i + n of the first n rows. Their diagonal is
            #    n in every block, as rows and columns both begin at `start`
            with_positive = max(0, n - start)
            logits[:with_positive].diagonal(offset=n).fill_(-torch.inf)
            # 3. softplus = max(x, 0) + log(1 + e^-|x|): on a CPU F.softplus takes three times as long
            softplus = logits.abs().neg_().exp_().add_(1).log_()
            softplus.add_(logits.clamp_min(0))
            value += softplus.sum(dtype=torch.float64)
            # 4. The gradient to i, and to j. `logits` is not needed any more: its memory is reused
            weights = logits.sigmoid_()
            gradient[start : start + size].addmm_(weights, columns)
            gradient[start:].addmm_(weights.T, rows)
        ctx.save_for_backward(gradient.div_(temperature))
        return value.to(z.dtype)

    @staticmethod
    def backward(ctx: GradientContext, grad: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return grad * gradient, None


@full_precision
def mio_loss(
    z_a: Tensor,
    z_b: Tensor,
    *,
    temperature: float,
    l2_weight: float = 0.0,
    l2_reduction: Literal["mean", "pair_mean", "sum"] = "mean",
) -> Tensor:
    """Return the loss of Eq. 5 and, with `l2_weight`, of Eq. 39.

    z_a and z_b (N, d) are normalised here; both get a gradient. The loss is the mean of -log
    sigmoid(C / t) over the 2N ordered positive pairs plus the mean of -log(1 - sigmoid(C / t)) over
    the 4N^2 - 4N ordered negative ones, of which N = 1 has none. How the L2 term over positive pairs
    is reduced:

        mean        over N d: the released code's, and the scale of the reported lambda = 1
        pair_mean   over pairs
        sum         over the 2N ordered pairs: Eq. 39 to the letter
    """
    n, d = z_a.shape
    z_a, z_b = F.normalize(z_a, dim=1), F.normalize(z_b, dim=1)
    # Both orders of a positive pair are equal: the mean over N is the mean over T_P = 2N
    loss = F.softplus(-(z_a * z_b).sum(1) / temperature).mean()
    if n > 1:
        # Twice the triangle over T_N = 4N^2 - 4N
        pairs = _NegativePairs.apply(torch.cat([z_a, z_b]), temperature)
        loss = loss + 2 * pairs / (4 * n * n - 4 * n)
    if l2_weight:
        divisor = {"mean": n * d, "pair_mean": n, "sum": 0.5}[l2_reduction]
        loss = loss + l2_weight * (z_a - z_b).square().sum() / divisor
    return loss


@dataclass(frozen=True, kw_only=True)
class Config(TwoViewsConfig):
    """The paper's models: A 2 layers, B 3 layers, C and D the same with l2_weight 1."""

    head: Head = MIO_HEAD
    temperature: Positive = 0.5
    l2_weight: float = 0.0
    l2_reduction: Literal["mean", "pair_mean", "sum"] = "mean"


class Method(TwoViews[Config]):
    together = False  # the released code's two forward passes

    def loss(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        c = self.config
        return mio_loss(
            z_a,
            z_b,
            temperature=c.temperature,
            l2_weight=c.l2_weight,
            l2_reduction=c.l2_reduction,
        )
