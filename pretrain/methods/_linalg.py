"""Decompositions for a GPU that nobody waits for.

`torch.linalg.eigh` and `svd` look on the host whether they have succeeded, and take a batch of
small matrices one by one. What is here runs a number of products that is known beforehand.
"""

import math

import torch
from torch import Tensor

MOST_ROWS = 16  # of `polar_by_rotations`
SWEEPS = 8  # for 8 rows, 6 reach rounding; each further one squares what is left
LEAST_SHARE = 1e-11  # of ||X||_F, in `polar_by_products`
LEAST_RIDGE = 1e-8  # of `inverse_root`


def polar_by_rotations(x: Tensor) -> tuple[Tensor, Tensor]:
    """X (B, m, n) float64, m <= 16 -> nuclear norms (B,) and U V^T (B, m, n), with X = U S V^T.

    One-sided Jacobi (Golub and Van Loan, Section 8.6.3): pairs of rows are turned until all are
    orthogonal, J X = S V^T, in rounds of m / 2 disjoint pairs at once. No digit is lost to a Gram
    matrix. Rows that end at zero, up to rounding, are left out: the subgradient of least norm.
    """
    _, m, n = x.shape
    # 1. What is done to the rows of X is done to those of I beside it, which become J. A row of
    #    zeros makes their number even
    w = torch.cat([x, torch.eye(m, dtype=x.dtype, device=x.device).expand(len(x), m, m)], 2)
    if m % 2:
        w = torch.cat([w, torch.zeros_like(w[:, :1])], 1)
    half = w.shape[1] // 2
    for _ in range(SWEEPS * (2 * half - 1)):
        # 2. Each pair (p, q), from the first and the last to the two in the middle, is turned by
        #    the angle that makes p.q zero
        p, q = w[:, :half], w[:, half:].flip(1)
        cosine, sine = _rotation(p[..., :n], q[..., :n])
        w = torch.cat([cosine * p - sine * q, (sine * p + cosine * q).flip(1)], 1)
        # 3. The next round has other pairs: the first stays, the others move on by one place. After
        #    2 half - 1 rounds everyone has met everyone
        w = torch.cat([w[:, :1], w[:, 1:].roll(1, 1)], 1)
    rotated, j = w[..., :n], w[..., n:]
    singular = torch.linalg.vector_norm(rotated, dim=-1)
    # 4. X = J^T (J X), so U V^T = J^T S^-1 J X
    rounding = max(m, n) * torch.finfo(x.dtype).eps * singular.amax(-1, keepdim=True)
    inverse = torch.where(singular > rounding, 1 / singular, 0.0)
    return singular.sum(-1), (j.mT * inverse.unsqueeze(-2)) @ rotated


def _rotation(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """(..., n) pairs of vectors -> cosine and sine (..., 1) of the smaller of the angles by which
    c p - s q and s p + c q are orthogonal."""
    product = (p * q).sum(-1, keepdim=True)
    lengths = p.square().sum(-1, keepdim=True), q.square().sum(-1, keepdim=True)
    still = product.abs() <= torch.finfo(p.dtype).eps * (lengths[0] * lengths[1]).sqrt()
    # t^2 + 2 zeta t - 1 = 0 with zeta = (|q|^2 - |p|^2) / (2 p.q); the root of smaller modulus
    zeta = (lengths[1] - lengths[0]) / (2 * torch.where(still, 1.0, product))
    sign = torch.where(zeta >= 0, 1.0, -1.0)
    tangent = torch.where(still, 0.0, sign / (zeta.abs() + (1 + zeta.square()).sqrt()))
    cosine = torch.rsqrt(1 + tangent.square())
    return cosine, cosine * tangent


def polar_by_products(x: Tensor) -> tuple[Tensor, Tensor]:
    """X (B, m, n) float64, m <= n -> nuclear norms (B,) and U V^T (B, m, n), with X = U S V^T.

    Newton and Schulz's iteration with the steps of Chen and Chow (2014): for large matrices, where
    a GPU has finished all its products before it has one `eigh`. Directions whose singular value is
    below 1e-11 ||X||_F fade out, and those at zero are left out: the subgradient of least norm.
    """
    # 1. Singular values into [0, 1]. A matrix of zeros stays one
    length = torch.linalg.matrix_norm(x, keepdim=True)
    polar = x / torch.where(length > 0, length, 1.0)
    # 2. An odd polynomial, applied to X, is applied to its singular values: each s goes to p(a s)
    #    with p(y) = y (3 - y^2) / 2. By a = sqrt(3 / (1 + low + low^2)) both ends of [low, 1] would
    #    meet, as near to 1 as one step can bring them; but p(a) is close to 0 then while low is
    #    small, and rounding as large as what it falls on. With 1.6 at most no s loses more than
    #    two thirds, a small one grows by 2.4, and near 1 its distance is squared
    low = LEAST_SHARE
    while low < 1 - torch.finfo(x.dtype).eps:
        a = min(math.sqrt(3 / (1 + low + low * low)), 1.6)
        scaled = a * polar
        polar = 1.5 * scaled - 0.5 * (scaled @ scaled.mT) @ scaled
        low = min(y * (3 - y * y) / 2 for y in (a * low, a))
    # 3. What is now between 0 and 1 was next to zero before: (5 s^3 - 3 s^5) / 2 keeps 1 and takes
    #    the rounding that stood in place of zeros, 1e-5 by now, to 1e-15
    cube = polar @ polar.mT @ polar
    polar = 2.5 * cube - 1.5 * (cube @ polar.mT) @ polar
    # 4. The nuclear norm is <U V^T, X>
    return (polar * x).sum((-2, -1)), polar


def inverse_root(gram: Tensor, ridge: float, largest: float) -> Tensor:
    """G (p, n, n) float64, positive semidefinite -> (G + ridge I)^(-1/2), ridge >= 1e-8. `largest`
    is a bound on G's eigenvalues that is known without looking. Newton and Schulz's coupled
    iteration (Higham, Functions of Matrices, Eq. 6.35)."""
    assert ridge >= LEAST_RIDGE
    bound = largest + ridge
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    # 1. A = (G + ridge I) / bound has its eigenvalues in [ridge / bound, 1]
    y, z = (gram + ridge * eye) / bound, eye.expand_as(gram)
    # 2. Y -> A^(1/2), Z -> A^(-1/2). An eigenvalue x of Y goes to x (3 - x^2 / a) / 2: by 1.5 as
    #    long as it is small, and then the distance from its goal is squared
    growth = math.log(bound / ridge) / (2 * math.log(1.5))
    for _ in range(math.ceil(growth) + 6):
        t = 1.5 * eye - 0.5 * (z @ y)
        y, z = y @ t, t @ z
    # 3. (G + ridge I)^(-1/2) = bound^(-1/2) A^(-1/2)
    return z / math.sqrt(bound)
