"""ARB's ablations (Tables 3 to 5) against plain float64 loops, and Fig. 3's curves at their
ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pretrain.methods.arb import arb_loss, tracks


def views(n: int = 12, d: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return z, z + 0.5 * torch.randn(n, d, generator=generator, dtype=torch.float64)


def columns(z: torch.Tensor) -> np.ndarray:
    x = z.numpy() - z.numpy().mean(0)
    return x / np.sqrt((x**2).sum(0))


def base(x: np.ndarray, ridge: float = 1e-4) -> np.ndarray:
    left, values, right = np.linalg.svd(x, full_matrices=False)
    return left @ np.diag(values / np.sqrt(values**2 + ridge)) @ right


def test_direct_alignment_moves_both_views() -> None:
    a, b = (z.requires_grad_() for z in views())
    x, y = columns(a.detach()), columns(b.detach())
    expected = 2 * sum((1 - float(x[:, i] @ y[:, i])) ** 2 for i in range(8))
    loss = arb_loss(a, b, align="direct")
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-9)
    loss.backward()
    assert (
        a.grad is not None
        and b.grad is not None
        and float(a.grad.norm()) > 0 < float(b.grad.norm())
    )


def test_mean_squared_error_of_unit_columns() -> None:
    a, b = views()
    expected = 0.0
    for x, target in ((columns(a), base(columns(b))), (columns(b), base(columns(a)))):
        for i in range(8):
            expected += float(((x[:, i] - target[:, i] / np.linalg.norm(target[:, i])) ** 2).sum())
    assert float(arb_loss(a, b, loss="mse")) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_off_diagonal_term_stays_within_the_groups(groups: int) -> None:
    a, b = views()
    size, expected = 8 // groups, 0.0
    for z, other in ((a, b), (b, a)):
        for g in range(groups):
            x = columns(z)[:, g * size : (g + 1) * size]
            target = base(columns(other)[:, g * size : (g + 1) * size])
            for i in range(size):
                for j in range(size):
                    c = float(x[:, i] @ target[:, j])
                    expected += (1 - c) ** 2 if i == j else 0.2 * c**2
    found = arb_loss(a, b, loss="off_diagonal", off_diagonal_weight=0.2, groups=groups)
    assert float(found) == pytest.approx(expected, rel=1e-9)


def test_over_instances_is_the_loss_of_the_transposed() -> None:
    a, b = views(6, 20)
    assert float(arb_loss(a, b, over="instances")) == pytest.approx(
        float(arb_loss(a.T, b.T)), rel=1e-12
    )


def test_the_curves_at_their_ends() -> None:
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(400, 8, generator=generator)
    same = tracks(a, a, ridge=1e-4)
    assert float(same["embedding_distance"]) == pytest.approx(0, abs=1e-6)
    assert float(same["base_distance"]) == pytest.approx(0, abs=1e-6)
    assert float(same["variance"]) == pytest.approx(1, abs=0.02)
    far = tracks(a, torch.randn(400, 8, generator=generator), ridge=1e-4)
    assert float(far["embedding_distance"]) == pytest.approx(1, abs=0.05)
    flat = tracks(torch.ones(40, 8), torch.ones(40, 8), ridge=1e-4)
    assert float(flat["variance"]) == pytest.approx(0, abs=1e-6)
