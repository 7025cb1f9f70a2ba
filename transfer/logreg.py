"""Multinomial logistic regression by L-BFGS on cached features, in stated memory, warm-started.

Objective (scikit-learn's with C = 1 / l2): sum_i CE(W x_i + b, y_i) + l2 / 2 ||W||^2; the
bias is not penalised. Features are read in chunks of rows, so beside the mapped files the
working memory is two chunks and about 25 copies of the weights (L-BFGS keeps ten pairs): 1.8M
x 2048 features with 365 classes need about 1 GB on the CPU. A GPU with room for them keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ROOM = 0.5  # of a GPU's free memory, for features
LabelledFeatures = tuple[Tensor, Tensor]  # (n, d), labels (n,)


@dataclass(frozen=True)
class Fit:
    weight: Tensor  # (C, d)
    bias: Tensor  # (C,)
    loss: float  # of the objective as a mean over samples
    iterations: int
    converged: bool

    @staticmethod
    def at(weight: Tensor, bias: Tensor) -> Fit:
        """A point to start from."""
        return Fit(weight, bias, loss=0.0, iterations=0, converged=True)

    def logits(self, features: Tensor, chunk: int = 65536) -> Tensor:
        """(N, d) -> (N, C), computed where the weights are and returned on the CPU."""
        parts = []
        for rows in features.split(chunk):
            x = rows.to(self.weight.device, self.weight.dtype)
            parts.append((x @ self.weight.T + self.bias).cpu())
        return torch.cat(parts)


@dataclass(frozen=True)
class Objective:
    """The objective and its gradient as scipy asks for them: of one vector, W's rows and then b."""

    blocks: Sequence[LabelledFeatures]
    classes: int
    dim: int
    l2: float
    device: torch.device
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return self.classes * self.dim  # of W

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """W (C, d) and b (C,), as views of `flat`."""
        return flat[: self.size].view(self.classes, self.dim), flat[self.size :]

    def __call__(self, flat: np.ndarray) -> tuple[float, np.ndarray]:
        """Both per sample, so that a tolerance means the same for every dataset."""
        point = torch.from_numpy(flat).to(self.device, self.dtype)
        gradient = torch.zeros_like(point)
        weight, bias = self.split(point)
        grad_weight, grad_bias = self.split(gradient)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        count = 0
        for features, labels in self.blocks:
            x, y = features.to(self.device, self.dtype), labels.to(self.device)
            rows = torch.arange(len(y), device=self.device)
            # 1. The cross-entropy of image i is -log p[i, y_i], with p = softmax(x W^T + b).
            log_p = torch.log_softmax(torch.addmm(bias, x, weight.T), 1)
            loss -= log_p[rows, y].double().sum()
            # 2. By the logits its derivative is R = p - onehot(y); in
            #    place, log_p becomes p becomes R.
            residual = log_p.exp_()
            residual[rows, y] -= 1
            # 3. So by W it is R^T x, and by b the sum of R's rows.
            grad_weight.addmm_(residual.T, x)
            grad_bias += residual.sum(0)
            count += len(y)
        # 4. The penalty l2 / 2 ||W||^2, whose derivative is l2 W.
        grad_weight.add_(weight, alpha=self.l2)
        loss += 0.5 * self.l2 * weight.double().square().sum()
        return float(loss) / count, (gradient.double() / count).cpu().numpy()


def resident(
    blocks: list[LabelledFeatures], device: torch.device, dtype: torch.dtype
) -> list[LabelledFeatures]:
    """The blocks on a GPU that has room for them, where each evaluation would send them anew;
    elsewhere as they are."""
    if device.type != "cuda":
        return blocks
    need = sum(features.numel() for features, _ in blocks) * dtype.itemsize
    free, _ = torch.cuda.mem_get_info(device)
    if need > ROOM * free:
        return blocks
    return [(features.to(device, dtype), labels.to(device)) for features, labels in blocks]


@torch.no_grad()
def fit(
    parts: Sequence[LabelledFeatures],
    *,
    classes: int,
    l2: float,
    start: Fit | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    chunk: int = 65536,
    max_iterations: int = 1000,
    tolerance: float = 1e-5,
    between: Callable[[], None] = lambda: None,
) -> Fit:
    """Minimise over all `parts`, to `tolerance` on the largest entry of the mean gradient.
    `between` is called after each iteration; what it raises ends the fit."""
    from scipy.optimize import minimize

    device = device or torch.device("cpu")
    blocks: list[LabelledFeatures] = []
    for features, labels in parts:
        blocks += zip(features.split(chunk), labels.split(chunk))
    dim = parts[0][0].shape[1]
    blocks = resident(blocks, device, dtype)
    objective = Objective(blocks, classes, dim, l2, device, dtype)

    first = np.zeros(objective.size + classes)
    if start is not None:
        first[: objective.size] = start.weight.cpu().numpy().ravel()
        first[objective.size :] = start.bias.cpu().numpy()
    options = {
        "maxiter": max_iterations,
        "maxfun": 2 * max_iterations,
        "gtol": tolerance,
        "ftol": 1e-12,
        "maxls": 40,
    }
    found = minimize(
        objective, first, jac=True, method="L-BFGS-B", options=options, callback=lambda _: between()
    )
    weight, bias = objective.split(torch.from_numpy(found.x).to(device, dtype))
    return Fit(weight, bias, float(found.fun), int(found.nit), bool(found.success))
