"""LORAC: low-rank promoting prior for unsupervised contrastive learning (equations: the paper's).

One momentum key meets every other view of the image. The nuclear norm of the matrix Q of an image's
views is subtracted from the positive logit, inside the temperature, which pushes Q to low rank.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.errors import BadInput
from backbench.parallel import distributed
from backbench.pretrain.method import Batch, Setup
from backbench.pretrain.methods._heads import forward_crops
from backbench.pretrain.methods._linalg import polar
from backbench.pretrain.methods._momentum import ContrastConfig, MomentumContrast
from backbench.pretrain.methods._precision import GradientContext, full_precision, unit
from backbench.pretrain.methods.moco import queue_logsumexp
from backbench.weights.trunk import Trunk

Prior = Literal["laplace", "gaussian", "margin", "none", "batch"]


def _polar_by_gram(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the nuclear norms (B,) and U V^T (B, m, n) of X = U S V^T (B, m, n), float64, m <= n.

    They are computed from the Gram matrix where the ratio of its least to its largest eigenvalue is
    above `threshold`, and else from a singular value decomposition of X."""
    # 1. G = X X^T = U S^2 U^T, only (m, m)
    values, vectors = torch.linalg.eigh(x @ x.mT)
    singular = values.clamp_min(0).sqrt()
    # 2. ||X||_* = trace of S = trace of G^(1/2)
    norms = singular.sum(-1)
    # 3. U V^T = U S^-1 U^T X = G^(-1/2) X
    factor = ((vectors / singular.unsqueeze(-2)) @ vectors.mT) @ x
    # 4. Squaring has lost half the digits: where the least eigenvalue is too small for that (or
    #    nan, hence the `not`), a singular value decomposition of X itself. Directions that are zero
    #    there are left out, which is the subgradient of least norm
    doubtful = ~(values[..., 0] > threshold * values[..., -1])
    if doubtful.any():
        left, s, right = torch.linalg.svd(x[doubtful], full_matrices=False)
        kept = s > max(x.shape[-2:]) * torch.finfo(x.dtype).eps * s[..., :1]
        norms[doubtful] = s.sum(-1)
        factor[doubtful] = (left * kept.unsqueeze(-2)) @ right
    return norms, factor


class _NuclearNorm(torch.autograd.Function):
    """||X||_* and its gradient U V^T (Eq. 20), in float64, by the smaller Gram matrix."""

    @staticmethod
    def forward(ctx: GradientContext, matrices: Tensor) -> Tensor:
        wide = matrices.shape[-2] <= matrices.shape[-1]
        if matrices.is_cuda:
            x = matrices.double()
            norms, factor = polar(x if wide else x.mT)
            ctx.save_for_backward((factor if wide else factor.mT).to(matrices.dtype))
            return norms.to(matrices.dtype)
        # How much of the Gram matrix's spectrum is trusted. A direction whose share of the largest
        # singular value is s has an error of 1e-16 / s^2 in U V^T. In float64 that keeps to 1e-12;
        # float32's rounding of X moves it by 6e-8 / s already, a thousand times as far at s = 3e-6
        threshold = 1e-11 if matrices.dtype == torch.float32 else 1e-4
        norms = matrices.new_empty(len(matrices))
        gradient = torch.empty_like(matrices)
        size = len(matrices)
        if matrices.device.type == "cpu":
            # Blocks of 2 MiB stay in the CPU's cache and need few calls
            size = max(1, (1 << 18) // matrices[0].numel())
        for start in range(0, len(matrices), size):
            part = matrices[start : start + size].double()
            norm, factor = _polar_by_gram(part if wide else part.mT, threshold)
            norms[start : start + size] = norm
            gradient[start : start + size] = factor if wide else factor.mT
        ctx.save_for_backward(gradient)
        return norms

    @staticmethod
    def backward(ctx: GradientContext, grad: Tensor) -> Tensor:
        (gradient,) = ctx.saved_tensors
        return grad[..., None, None] * gradient


def nuclear_norm(matrices: Tensor) -> Tensor:
    """Map (B, M, d) to (B,): sums of singular values; gradient U V^T, also at rank deficiency."""
    return _NuclearNorm.apply(matrices)


WITH_NORMS = ("laplace", "gaussian")  # priors that look at ||Q||_*


@full_precision
def lorac_loss(
    queries: Tensor,
    key: Tensor,
    queue: Tensor,
    *,
    temperature: float,
    beta: float,
    rows: Tensor | None = None,
    norms: Tensor | None = None,
    prior: Prior = "laplace",
    sigma2: float = 2.0,
    c0: float | None = None,
    margin: float = 3.0,
) -> Tensor:
    """Return InfoNCE of V queries (V, N, d) with one key (N, d), with a penalty on each positive
    (Eq. 12).

    `rows` (M, N, d) are the rows of Q, by default the queries and the key. `norms` (N,) are ||Q||_*,
    where they are known already. All vectors have unit length. `queries`, `rows` and `norms` get a
    gradient. What is subtracted from each positive:

        laplace    ||Q||_* / (M beta)
        gaussian   (||Q||_* - c0)^2 / (M sigma2); c0 is by default sqrt(M), the least of M unit rows
        margin     margin / (M beta), a constant
        batch      ||P||_* / (N V beta); P are the queries minus their mean over V (Eq. 15)
        none       0
    """
    views, n, d = queries.shape
    key = key.detach()
    if rows is None:
        rows = torch.cat([queries, key.unsqueeze(0)])
    m = len(rows)
    positive = (queries * key).sum(-1)
    if norms is None:
        norms = queries.new_zeros(n)
        if prior in WITH_NORMS:
            norms = nuclear_norm(rows.transpose(0, 1))
    # h = exp(-penalty / t) multiplies exp(q.k / t) (Eq. 9, 11): the penalty moves into the exponent
    penalty: Tensor | float = 0.0
    if prior == "laplace":  # Eq. 11; an infinite beta makes it 0
        penalty = norms / (m * beta)
    elif prior == "gaussian":  # Section 6.2 b
        if c0 is None:
            c0 = math.sqrt(m)
        penalty = (norms - c0).square() / (m * sigma2)
    elif prior == "margin":  # Section 6.2 a
        penalty = margin / (m * beta)
    elif prior == "batch" and math.isfinite(beta):  # Eq. 15
        centred = (queries - queries.mean(0)).reshape(1, views * n, d)
        penalty = nuclear_norm(centred) / (n * views * beta)
    # -log(e^p h / (e^p h + e^L)) = log(1 + e^(L - (p - penalty / t))); mean over V (Eq. 12), N (13)
    negative = queue_logsumexp(queries.reshape(-1, d), queue, temperature=temperature)
    reduced = (positive - penalty) / temperature
    return F.softplus(negative.view(views, n) - reduced).mean()


@dataclass(frozen=True, kw_only=True)
class Config(ContrastConfig):
    """Views 0 .. keys-1 are keys; each meets every other view. The first crops (as large as view 0)
    and the keys are the rows of Q: 3 + 2 in multi-crop. beta is the paper's; the released code's
    --lorac_beta is M beta."""

    keys: int = 2
    prior: Prior = "laplace"
    beta: float = 4.0  # laplace, margin and batch
    sigma2: float = 2.0  # gaussian
    margin: float = 3.0
    # No prior (an infinite beta) before this share of the epochs
    prior_from: float = 0.5
    drop_tau: bool = False  # released code: no temperature once the prior is on
    swap_queues: bool = False  # released code: key c meets the queue of the other key


class Method(MomentumContrast[Config]):
    """Queries with synchronised batch norm, keys with ShuffleBN. A queue per key position."""

    def __init__(self, config: Config, backbone: Trunk, setup: Setup) -> None:
        if not 1 <= config.keys < setup.views:
            raise BadInput(
                f"{config.name}: {config.keys} keys need more views than that, not {setup.views}"
            )
        queues = [f"queue {c}" for c in range(config.keys)]
        super().__init__(
            config,
            backbone,
            setup,
            local_queries=False,
            key_views=config.keys,
            queues=queues,
        )
        self.accumulates = config.prior != "batch"

    def meets(self, key: int, view: int) -> bool:
        """Say whether a key is trained against the query of a view: of every view but its own."""
        return view != key

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        config = self.config
        # 1. Queries (V, n, d): all views; but with one key its view is never a query
        first = 0 if config.keys > 1 else 1
        views = batch.views[first:]
        queries = unit(torch.stack(forward_crops(self.network, views)))
        # 2. Keys (keys, n, d) of this rank's samples, out of all that go into the queues
        all_keys = self.keys(batch.views[: config.keys], batch.step)  # (N, keys, d)
        self.new_keys.append(all_keys)
        keys = distributed.local_slice(all_keys).transpose(0, 1)
        # 3. Rows of Q: the large queries and the keys. The small crops get its penalty on their
        #    logits without being in it (Section 5: views that may show something else)
        shape = batch.views[0].shape
        large = [i for i, view in enumerate(views) if view.shape == shape]
        rows = torch.cat([_chosen(queries, large), keys])
        # 4. Each key meets every other view
        prior: Prior = "none"
        if batch.epoch >= config.prior_from * batch.epochs:
            prior = config.prior
        temperature = config.temperature
        if config.drop_tau and prior != "none":
            temperature = 1.0
        # ||Q||_* is the same for all keys; without such a prior it is only logged
        with torch.set_grad_enabled(prior in WITH_NORMS):
            norms = nuclear_norm(rows.transpose(0, 1))
        losses = []
        for c in range(config.keys):
            others = [i for i in range(len(views)) if self.meets(c, i + first)]
            met = _chosen(queries, others)
            key = keys[c]
            used_rows = rows
            if prior == "batch":  # P spans the batch of all ranks
                met = _gathered(met)
                key = _gathered(key)
                used_rows = _gathered(rows)
            queue = config.keys - 1 - c if config.swap_queues else c
            losses.append(
                lorac_loss(
                    met,
                    key,
                    self.queue.keys[queue],
                    temperature=temperature,
                    beta=config.beta,
                    rows=used_rows,
                    norms=norms,
                    prior=prior,
                    sigma2=config.sigma2,
                    margin=config.margin,
                )
            )
        loss = distributed.mean_over_ranks(torch.stack(losses).mean())
        norm = distributed.mean_over_ranks(norms.detach().mean())
        return {"loss": loss, "nuclear_norm": norm}


def _chosen(x: Tensor, places: list[int]) -> Tensor:
    """Return x[places], but without sending the list to the device and waiting for that."""
    return torch.stack([x[i] for i in places])


def _gathered(x: Tensor) -> Tensor:
    """Gather (..., n, d) over the ranks -> (..., N, d), with gradient."""
    return distributed.gather(x.movedim(-2, 0)).movedim(0, -2)
