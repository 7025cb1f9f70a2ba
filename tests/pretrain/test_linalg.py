"""The decompositions without a wait against torch's own, also where there is next to nothing left."""

import pytest
import torch

from pretrain.methods._linalg import MOST_ROWS, inverse_root, polar_by_products, polar_by_rotations
from pretrain.methods.arb import standardise


def unit_rows(m, kind):
    x = torch.randn(64, m, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(m))
    x = torch.nn.functional.normalize(x, dim=-1)
    if kind == "nearly equal" and m > 1:
        x[:, 1] = x[:, 0] + 1e-6 * x[:, 1]
    if kind == "two equal":
        x[:, -1] = x[:, 0]
    if kind == "all equal":
        x[:] = x[:, :1]
    if kind == "scaled":
        x *= torch.logspace(0, -9, m, dtype=x.dtype).view(1, m, 1)
    return torch.zeros_like(x) if kind == "zero" else x


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, MOST_ROWS])
@pytest.mark.parametrize(
    "kind", ["any", "nearly equal", "two equal", "all equal", "scaled", "zero"]
)
def test_polar_by_rotations(m, kind):
    x = unit_rows(m, kind)
    left, s, right = torch.linalg.svd(x, full_matrices=False)
    kept = s > 32 * torch.finfo(x.dtype).eps * s[..., :1]
    norms, polar = polar_by_rotations(x)
    torch.testing.assert_close(norms, s.sum(-1), rtol=1e-13, atol=1e-13)
    # A direction of size s is known to eps / s
    least = float(torch.where(kept, s, 1.0).min())
    torch.testing.assert_close(
        polar, (left * kept.unsqueeze(-2)) @ right, rtol=0, atol=1e-14 / least + 1e-12
    )


@pytest.mark.parametrize("shape", [(24, 24), (40, 96), (64, 64)])
@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6, 1e9])
@pytest.mark.parametrize("zeros", [0, 1, 10])
def test_polar_by_products(shape, condition, zeros):
    m, n = shape
    generator = torch.Generator().manual_seed(m)
    u = torch.linalg.qr(torch.randn(m, m, dtype=torch.float64, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(n, m, dtype=torch.float64, generator=generator)).Q
    s = 7 * condition ** -torch.linspace(0, 1, m, dtype=torch.float64)
    s[m - zeros :] = 0
    norms, polar = polar_by_products(torch.stack([(u * s) @ v.mT, torch.zeros(m, n).double()]))
    assert norms[0] == pytest.approx(float(s.sum()), rel=1e-13)
    expected = (u * (s > 0)) @ v.mT
    torch.testing.assert_close(polar[0], expected, rtol=0, atol=1e-14 * condition + 1e-13)
    assert not norms[1]
    assert not polar[1].any()


@pytest.mark.parametrize("ridge", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize("kind", ["any", "two equal", "collapsed"])
def test_inverse_root(ridge, kind):
    z = torch.randn(2, 48, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
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
