"""The decompositions without a wait against torch's own, also where there is next to nothing left."""

import pytest
import torch

from pretrain.methods._linalg import inverse_root, polar
from pretrain.methods.arb import standardise


def normal(*shape):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(shape[1])
    )


def check_polar(x):
    """Norms to 13 digits; a direction of size s is known to eps / s."""
    left, s, right = torch.linalg.svd(x, full_matrices=False)
    kept = s > x.shape[-1] * torch.finfo(x.dtype).eps * s[..., :1]
    norms, factor = polar(x)
    torch.testing.assert_close(norms, s.sum(-1), rtol=1e-13, atol=1e-13)
    least = float(torch.where(kept, s / s[..., :1].clamp_min(1e-300), 1.0).min())
    expected = (left * kept.unsqueeze(-2)) @ right
    torch.testing.assert_close(factor, expected, rtol=0, atol=1e-14 / least + 1e-12)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize(
    "kind", ["any", "nearly equal", "two equal", "all equal", "scaled", "zero"]
)
def test_polar_of_the_views_of_many_images(m, kind):
    x = torch.nn.functional.normalize(normal(64, m, 32), dim=-1)
    if kind == "nearly equal" and m > 1:
        x[:, 1] = x[:, 0] + 1e-6 * x[:, 1]
    if kind == "two equal":
        x[:, -1] = x[:, 0]
    if kind == "all equal":
        x[:] = x[:, :1]
    if kind == "scaled":
        x *= torch.logspace(0, -9, m, dtype=x.dtype).view(1, m, 1)
    check_polar(torch.zeros_like(x) if kind == "zero" else x)


@pytest.mark.parametrize("shape", [(24, 24), (40, 96)])
@pytest.mark.parametrize("condition", [1.0, 1e6, 1e9])
@pytest.mark.parametrize("zeros", [0, 10])
def test_polar_of_large_matrices(shape, condition, zeros):
    m, n = shape
    u, v = torch.linalg.qr(normal(m, m)).Q, torch.linalg.qr(normal(n, m)).Q
    s = 7 * condition ** -torch.linspace(0, 1, m, dtype=torch.float64)
    s[m - zeros :] = 0
    check_polar(((u * s) @ v.mT)[None])


@pytest.mark.parametrize("ridge", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize("kind", ["any", "two equal", "collapsed"])
def test_inverse_root(ridge, kind):
    z = normal(2, 48, 24)
    if kind == "two equal":
        z[..., 1] = z[..., 0]
    if kind == "collapsed":
        z = z[..., :1] + 1e-6 * z
    z = torch.stack([standardise(part) for part in z])
    gram = z.mT @ z
    values, vectors = torch.linalg.eigh(gram)
    expected = (vectors * (values.clamp_min(0) + ridge).rsqrt().unsqueeze(-2)) @ vectors.mT
    found = inverse_root(gram, ridge, largest=24)
    # What is used of it is its product with Z; an eigenvalue that is all rounding is eps / ridge off
    torch.testing.assert_close(z @ found, z @ expected, rtol=0, atol=1e-13 / ridge)
