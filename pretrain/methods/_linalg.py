"""Decomposes matrices on a GPU without waiting for it, by a fixed number of matrix products.
`torch.linalg.eigh` and `svd` would check on the host whether they have succeeded, and take the
small matrices of a batch one by one."""

import math

import torch
from torch import Tensor

LEAST_SHARE = 1e-11  # singular values that `polar` keeps, as a share of ||X||_F
LEAST_RIDGE = 1e-8  # that `inverse_root` takes


def polar(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nuclear norms (B,) and U V^T (B, m, n) of X = U S V^T (B, m, n), float64, m <= n.

    It is Newton and Schulz's iteration with the steps of Chen and Chow (2014). Directions with a
    singular value below 1e-11 ||X||_F fade out; zero ones are left out, which is the subgradient of
    least norm."""
    # 1. Singular values into [0, 1]. A matrix of zeros stays one
    length = torch.linalg.matrix_norm(x, keepdim=True)
    factor = x / torch.where(length > 0, length, 1.0)
    # 2. Each step maps every singular value s to p(a s), with p(y) = y (3 - y^2) / 2. `low` is the
    #    least of those that are to reach 1. The best factor is a = sqrt(3 / (1 + low + low^2)), which
    #    takes both ends of [low, 1] to one value. But while `low` is small it takes 1 close to 0,
    #    where rounding is as large as the value. So a is 1.6 at most: then small values grow by 2.4
    #    a step, no value loses more than two thirds, and near 1 the distance from 1 is squared
    low = LEAST_SHARE
    while low < 1 - torch.finfo(x.dtype).eps:
        a = min(math.sqrt(3 / (1 + low + low * low)), 1.6)
        scaled = a * factor
        factor = 1.5 * scaled - 0.5 * (scaled @ scaled.mT) @ scaled
        low = min(y * (3 - y * y) / 2 for y in (a * low, a))
    # 3. What is now between 0 and 1 was next to zero before: (5 s^3 - 3 s^5) / 2 keeps 1 and takes
    #    the rounding that stood in place of zeros, 1e-5 by now, to 1e-15
    cube = factor @ factor.mT @ factor
    factor = 2.5 * cube - 1.5 * (cube @ factor.mT) @ factor
    # 4. The nuclear norm is <U V^T, X>
    return (factor * x).sum((-2, -1)), factor


def inverse_root(gram: Tensor, ridge: float, largest: float) -> Tensor:
    """Return (G + ridge I)^(-1/2) of positive semidefinite G (p, n, n), float64, for ridge >= 1e-8.

    `largest` is a bound on G's eigenvalues that is known beforehand. It is Newton and Schulz's coupled
    iteration (Higham, Functions of Matrices, Eq. 6.35)."""
    assert ridge >= LEAST_RIDGE
    bound = largest + ridge
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    # 1. A = (G + ridge I) / bound has its eigenvalues in [ridge / bound, 1]
    y = (gram + ridge * eye) / bound
    z = eye.expand_as(gram)
    # 2. Y -> A^(1/2), Z -> A^(-1/2). An eigenvalue x of Y goes to x (3 - x^2 / a) / 2: by 1.5 as
    #    long as it is small, and then the distance from its goal is squared
    growth = math.log(bound / ridge) / (2 * math.log(1.5))
    for _ in range(math.ceil(growth) + 6):
        t = 1.5 * eye - 0.5 * (z @ y)
        y, z = y @ t, t @ z
    # 3. (G + ridge I)^(-1/2) = bound^(-1/2) A^(-1/2)
    return z / math.sqrt(bound)
