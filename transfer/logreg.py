"""Multinomial logistic regression by L-BFGS on cached features, in stated memory, with a warm-started path.

Objective (scikit-learn's with C = 1 / l2): sum_i CE(W x_i + b, y_i) + l2 / 2 ||W||^2; the bias is not penalised.
Features are read in chunks of rows, so beside the mapped files the working memory is two chunks and about 25 copies of
the weights (L-BFGS keeps ten pairs): 1.8M x 2048 features with 365 classes need about 1 GB on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Part = tuple[Tensor, Tensor]  # features (n, d), labels (n,)


@dataclass(frozen=True)
class Fit:
    weight: Tensor  # (C, d)
    bias: Tensor  # (C,)
    loss: float  # of the objective as a mean over samples
    iterations: int
    converged: bool

    def logits(self, features: Tensor, chunk: int = 65536) -> Tensor:
        """(N, d) -> (N, C), computed where the weights are and returned on the CPU."""
        device, dtype = self.weight.device, self.weight.dtype
        parts = [
            (x.to(device, dtype) @ self.weight.T + self.bias).cpu() for x in features.split(chunk)
        ]
        return torch.cat(parts)


@torch.no_grad()
def fit(
    parts: Sequence[Part],
    *,
    classes: int,
    l2: float,
    start: Fit | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    chunk: int = 65536,
    max_iterations: int = 1000,
    tolerance: float = 1e-5,
) -> Fit:
    """Minimise the objective over all `parts` together; `tolerance` is on the largest entry of the mean gradient."""
    from scipy.optimize import minimize

    device = device or torch.device("cpu")
    count = sum(len(y) for _, y in parts)
    dim = parts[0][0].shape[1]
    blocks = [(x, y) for xs, ys in parts for x, y in zip(xs.split(chunk), ys.split(chunk))]
    size = classes * dim

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.from_numpy(flat).to(device, dtype)
        weight, bias = point[:size].view(classes, dim), point[size:]
        gradient = torch.zeros_like(point)
        grad_weight, grad_bias = gradient[:size].view(classes, dim), gradient[size:]
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for block, labels in blocks:
            x, y = block.to(device, dtype), labels.to(device)
            scores = torch.addmm(bias, x, weight.T)
            log_p = torch.log_softmax(scores, 1)
            rows = torch.arange(len(y), device=device)
            loss -= log_p[rows, y].double().sum()
            p = log_p.exp_()
            p[rows, y] -= 1
            grad_weight.addmm_(p.T, x)
            grad_bias += p.sum(0)
        grad_weight.add_(weight, alpha=l2)
        loss += 0.5 * l2 * weight.double().square().sum()
        return float(loss) / count, (gradient.double() / count).cpu().numpy()

    first = np.zeros(size + classes)
    if start is not None:
        first[:size], first[size:] = start.weight.cpu().numpy().ravel(), start.bias.cpu().numpy()
    options = {
        "maxiter": max_iterations,
        "maxfun": 2 * max_iterations,
        "gtol": tolerance,
        "ftol": 1e-12,
        "maxls": 40,
    }
    found = minimize(objective, first, jac=True, method="L-BFGS-B", options=options)
    point = torch.from_numpy(found.x).to(device, dtype)
    return Fit(
        point[:size].view(classes, dim),
        point[size:],
        float(found.fun),
        int(found.nit),
        bool(found.success),
    )
