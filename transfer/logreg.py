"""Fits multinomial logistic regression on cached features by warm-started L-BFGS, in stated memory.

Objective (scikit-learn's with C = 1 / l2): sum_i CE(W x_i + b, y_i) + l2 / 2 ||W||^2; the bias is
not penalised. Features are read in chunks of rows, so memory is two chunks, about 25 copies of the
weights (L-BFGS keeps ten pairs) and two matrices of d x d: about 1 GB on the CPU for 1.8M x 2048
features and 365 classes. A GPU with room for the features keeps them.

L-BFGS alone needs thousands of iterations where features differ in scale or are correlated, as a
transformer's are. So it works on U = T L, where T = (W | b) and L L^T is the Hessian at equal
probabilities of all classes: the objective is the same, and its level lines are nearly round.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

ALIKE = (
    100.0  # largest ratio of second moments with which L-BFGS is quick without a factor
)
ROOM = 0.5  # of a GPU's free memory, for features
LabelledFeatures = tuple[Tensor, Tensor]  # (n, d), labels (n,)


@dataclass(frozen=True)
class Fit:
    """Where a minimisation ended."""

    weight: Tensor  # (C, d)
    bias: Tensor  # (C,)
    loss: float  # of the objective as a mean over samples
    iterations: int
    converged: bool  # whether `gradient` is within the tolerance
    # The largest entry of the gradient of the mean objective. It is the larger of two: by T, where
    # a feature whose root mean square is above 1 is measured in units of that, and by the weights
    # of features that L has brought to unit spread.
    gradient: float = 0.0

    @staticmethod
    def at(weight: Tensor, bias: Tensor) -> "Fit":
        """Return a point to start from."""
        return Fit(weight, bias, loss=0.0, iterations=0, converged=True)

    def logits(self, features: Tensor, chunk: int = 65536) -> Tensor:
        """Map (N, d) to (N, C), computed where the weights are and returned on the CPU."""
        parts = []
        for rows in features.split(chunk):
            x = rows.to(self.weight.device, self.weight.dtype)
            parts.append((x @ self.weight.T + self.bias).cpu())
        return torch.cat(parts)


@dataclass
class Objective:
    """The objective and its gradient in the form that scipy asks for: as functions of one vector,
    the rows of U one after the other."""

    blocks: Sequence[LabelledFeatures]
    classes: int
    l2: float
    factor: Tensor | None  # L (d + 1, d + 1), lower triangular, float64; None: T itself
    device: torch.device
    dtype: torch.dtype
    spread: float  # the mean p (1 - p) that the factor was made with
    units: Tensor  # (d + 1,): each feature's root mean square where that is above 1
    # `Fit.gradient` of the last evaluation
    gradient: float = field(default=float("inf"), init=False)
    # The point of the last evaluation, its loss and its gradient by U. They are kept because scipy
    # asks for the first and the last point again.
    last: tuple[np.ndarray, float, np.ndarray] | None = field(default=None, init=False)

    def __call__(self, flat: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the loss and its gradient by U, both per sample, so that a tolerance means the
        same for every dataset."""
        if self.last is not None and np.array_equal(flat, self.last[0]):
            return self.last[1:]
        device = self.device
        both = self.to_weights(torch.from_numpy(flat).to(device))
        point = both.to(self.dtype)
        weight = point[:, :-1]
        bias = point[:, -1]
        gradient = torch.zeros_like(point)
        loss = torch.zeros((), dtype=torch.float64, device=device)
        count = 0
        for features, labels in self.blocks:
            x = features.to(device, self.dtype)
            y = labels.to(device)
            rows = torch.arange(len(y), device=device)
            # 1. The cross-entropy of image i is -log p[i, y_i], with p = softmax(x W^T + b).
            log_p = torch.log_softmax(torch.addmm(bias, x, weight.T), 1)
            loss -= log_p[rows, y].double().sum()
            # 2. Its derivative by the logits is R = p - onehot(y). It is computed in place: log_p
            #    becomes p, and p becomes R.
            residual = log_p.exp_()
            residual[rows, y] -= 1
            # 3. So its derivative by W is R^T x, and by b the sum of R's rows.
            gradient[:, :-1].addmm_(residual.T, x)
            gradient[:, -1] += residual.sum(0)
            count += len(y)
        # 4. The penalty l2 / 2 ||W||^2, whose derivative is l2 W.
        by_weights = gradient.double()
        by_weights[:, :-1] += self.l2 * both[:, :-1]
        by_weights /= count
        loss += 0.5 * self.l2 * both[:, :-1].square().sum()
        # 5. T = U L^-1, so the gradient by U is that by T times L^-T. With `spread` taken out of
        #    L, U's features have unit spread.
        by_u = by_weights
        if self.factor is not None:
            solved = torch.linalg.solve_triangular(
                self.factor, by_weights.T, upper=False
            )
            by_u = solved.T
        whitened = self.spread**0.5 * by_u.abs().max()
        plain = (by_weights / self.units).abs().max()
        self.gradient = float(torch.maximum(plain, whitened))
        self.last = (flat.copy(), float(loss) / count, by_u.cpu().numpy().ravel())
        return self.last[1:]

    def to_weights(self, flat: Tensor) -> Tensor:
        """U as a vector -> T = U L^-1 (C, d + 1)."""
        u = flat.view(self.classes, -1)
        if self.factor is None:
            return u
        return torch.linalg.solve_triangular(self.factor, u, upper=False, left=False)


@dataclass(frozen=True)
class SecondMoments:
    """Second moments of features: the mean of z z^T, where z is (x | 1). `alike` says that the
    features have similar scales and are nearly uncorrelated: L-BFGS is quick with those as they
    are."""

    mean: Tensor  # (d + 1, d + 1), float64; float32 if they are alike
    alike: bool


def second_moments(
    parts: Sequence[LabelledFeatures], device: torch.device, chunk: int
) -> SecondMoments:
    """Compute the moments over every k-th image, about four images for each feature."""
    dim = parts[0][0].shape[1]
    images = sum(len(labels) for _, labels in parts)
    step = max(1, images // (4 * dim))
    # Rows at a time: a chunk in float64 takes twice the memory, and z is a copy of it.
    few = max(1, chunk // 4)
    # Single precision is enough to see that features are alike. A factor needs double precision.
    for precision in (torch.float32, torch.float64):
        total = torch.zeros(dim + 1, dim + 1, dtype=precision, device=device)
        count = 0
        for features, _ in parts:
            for rows in features[::step].split(few):
                x = rows.to(device, precision)
                z = torch.nn.functional.pad(x, (0, 1), value=1.0)
                total.addmm_(z.T, z)
                count += len(rows)
        factor, failed = torch.linalg.cholesky_ex(total)
        alike = not failed and _alike(total, factor)
        if alike:
            break
    return SecondMoments(total / count, alike)


def _alike(moments: Tensor, factor: Tensor) -> bool:
    """Return whether no feature has a second moment much larger than what is left of another's when
    the features before that one are projected out. A penalty adds to both, so features that are
    alike without one are alike with every penalty."""
    # The square of a diagonal entry of a Cholesky factor is what is left of that feature.
    left = factor.diagonal()[:-1].square()
    return bool(moments.diagonal()[:-1].max() < ALIKE * left.min())


def resident(
    blocks: list[LabelledFeatures], device: torch.device, dtype: torch.dtype
) -> list[LabelledFeatures]:
    """Move the blocks to a GPU that has room for them; without room each evaluation sends them."""
    if device.type != "cuda":
        return blocks
    need = sum(features.numel() for features, _ in blocks) * dtype.itemsize
    free, _ = torch.cuda.mem_get_info(device)
    if need > ROOM * free:
        return blocks
    return [(x.to(device, dtype), y.to(device)) for x, y in blocks]


@torch.no_grad()
def fit(
    parts: Sequence[LabelledFeatures],
    *,
    classes: int,
    l2: float,
    start: Fit | None = None,
    moments: SecondMoments | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    chunk: int = 65536,
    max_iterations: int = 1000,
    tolerance: float = 1e-5,
    between: Callable[[], None] = lambda: None,
) -> Fit:
    """Minimise the objective over all `parts`, to `tolerance` on `Fit.gradient`. A path of penalties
    passes the `moments` of these or of similar features, so that they are computed once. `between`
    is called at each iteration, and may raise to stop."""
    device = device or torch.device("cpu")
    dim = parts[0][0].shape[1]
    count = sum(len(labels) for _, labels in parts)
    # 1. With fewer images than features, the best W is a sum of the images' rows. In coordinates
    #    of their span the problem is smaller, and ||W|| is the same.
    if count < dim:
        everything = torch.cat([x for x, _ in parts]).double()
        span = torch.linalg.qr(everything.T).Q  # (d, n)
        parts = [((x.double() @ span).to(dtype), y) for x, y in parts]
        moments = None
    if moments is None:
        moments = second_moments(parts, device, chunk)
    # 2. The point to start from, (W | b)
    if start is None:
        point = torch.zeros(classes, dim + 1, dtype=torch.float64, device=device)
    else:
        given = torch.cat([start.weight, start.bias[:, None]], 1)
        point = given.to(device, torch.float64)
    if count < dim:
        point = torch.cat([point[:, :-1] @ span.to(device), point[:, -1:]], 1)
    # 3. The factor L. `spread` enters it and, by its root (at most 1/2), the test of convergence.
    #    Without a factor that term is max|g| * root, and the other is at least max|g| / max(units):
    #    with units up to 2 the other always decides, so no pass over the images is needed.
    units = moments.mean.diagonal().double().sqrt().clamp(min=1)
    if start is None or (moments.alike and units.max() <= 2):
        spread = 1 / classes - 1 / classes**2
    else:
        spread = _spread(parts, point, chunk)
    factor = None
    if not moments.alike:
        factor = preconditioner(moments.mean, spread, l2 / count)
    # 4. L-BFGS. In single precision the objective soon is flat for a line search: double precision
    #    goes on from there.
    iterations = 0
    loss = 0.0
    gradient = float("inf")
    for precision in dict.fromkeys((dtype, torch.float64)):
        rows = max(1, chunk * 4 // precision.itemsize)
        blocks: list[LabelledFeatures] = []
        for features, labels in parts:
            blocks += zip(features.split(rows), labels.split(rows))
        blocks = resident(blocks, device, precision)
        objective = Objective(
            blocks, classes, l2, factor, device, precision, spread, units
        )
        left = max_iterations - iterations
        point, done = minimised(objective, point, left, tolerance, between)
        iterations += done
        assert objective.last is not None
        _, loss, _ = objective.last
        gradient = objective.gradient
        if gradient <= tolerance or iterations >= max_iterations:
            break
    weight = point[:, :-1]
    if count < dim:
        weight = weight @ span.to(device).T
    return Fit(
        weight=weight.to(dtype),
        bias=point[:, -1].to(dtype),
        loss=loss,
        iterations=iterations,
        converged=gradient <= tolerance,
        gradient=gradient,
    )


def preconditioner(moments: Tensor, spread: float, penalty: float) -> Tensor | None:
    """Return L, with L L^T the Hessian per sample: `spread` (the mean p (1 - p)) times the moments
    of z, plus the penalty on W. None where the features are alike (`_alike`) under the penalty."""
    hessian = moments * spread
    diagonal = hessian.diagonal()
    diagonal[:-1] += penalty
    diagonal += 1e-12 * diagonal.mean()
    factor: Tensor = torch.linalg.cholesky(hessian)
    return None if _alike(hessian, factor) else factor


def minimised(
    objective: Objective,
    point: Tensor,
    most: int,
    tolerance: float,
    between: Callable[[], None],
) -> tuple[Tensor, int]:
    """Return (W | b) after L-BFGS from `point`, in at most `most` iterations, and their number. The
    objective's last evaluation is that of the returned point."""
    from scipy.optimize import minimize

    # 1. L-BFGS's first step has length 1. In units of the gradient that is a Newton step; the unit
    #    is a power of 2, so that the same point comes back with the same bits. The loss is in the
    #    unit's square, so that the first gradient is about 1: from one of 1e-12, next to the
    #    minimum, the line search takes no step.
    factor = objective.factor
    u = point if factor is None else point @ factor
    at = u.cpu().numpy().ravel()
    _, slope = objective(at)
    unit = 1.0
    if factor is not None:
        length = max(float(np.linalg.norm(slope)), 1e-30)
        unit = 2.0 ** round(math.log2(length))

    def in_units(flat: np.ndarray) -> tuple[float, np.ndarray]:
        loss, slope = objective(flat * unit)
        return loss / unit**2, slope / unit

    def after_iteration(_: np.ndarray) -> None:
        between()
        if objective.gradient <= tolerance:
            raise StopIteration

    # 2. The minimisation, unless the start is good enough. scipy's own tolerances are 0: what ends
    #    it is `after_iteration`.
    iterations = 0
    if objective.gradient > tolerance:
        found = minimize(
            in_units,
            at / unit,
            jac=True,
            method="L-BFGS-B",
            options={
                "maxiter": most,
                "maxfun": 2 * most,
                "gtol": 0.0,
                "ftol": 0.0,
                "maxls": 40,
            },
            callback=after_iteration,
        )
        at = found.x * unit
        iterations = int(found.nit)
    # 3. The last evaluation may be one that the line search rejected.
    objective(at)
    return objective.to_weights(torch.from_numpy(at).to(point.device)), iterations


def _spread(parts: Sequence[LabelledFeatures], point: Tensor, chunk: int) -> float:
    """Return the mean of p (1 - p) over images and classes at (W | b)."""
    total = 0.0
    count = 0
    start = Fit.at(point[:, :-1].float(), point[:, -1].float())
    for features, _ in parts:
        for rows in features.split(chunk):
            p = torch.softmax(start.logits(rows), 1)
            total += float((p - p.square()).double().sum())
            count += p.numel()
    return max(total / count, 1e-6)
