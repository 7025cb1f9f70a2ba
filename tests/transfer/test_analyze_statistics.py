"""Every statistic against plain loops in float64, and on features whose answer is known."""

import math

import numpy as np
import pytest
import torch

from transfer import feature_statistics as fs


def _views(b: int = 5, a: int = 8, d: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randn(b, a, d, generator=torch.Generator().manual_seed(seed))


def _rows(x: torch.Tensor) -> list[np.ndarray]:
    return [r / np.linalg.norm(r) for r in x.double().numpy()]


def _euclid(a: np.ndarray, b: np.ndarray) -> float:
    return math.sqrt(sum((float(p) - float(q)) ** 2 for p, q in zip(a, b)))


def test_statistics_of_views_equal_loops() -> None:
    x = _views()
    wide = fs.ViewStatistics(8, 12)
    for part in x.split(2):
        wide.add(part)
    nuclear, cosine, diagonal, align = [], [], [], []
    for image in x:
        rows = _rows(image)
        q = np.stack(rows)
        nuclear.append(sum(math.sqrt(max(0.0, v)) for v in np.linalg.eigvalsh(q @ q.T)))
        cosine.append(sum(float(a @ b) for a in rows for b in rows) / len(rows) ** 2)
        mean = sum(rows) / len(rows)
        entries = [sum((row[k] - mean[k]) ** 2 for row in rows) / len(rows) for k in range(12)]
        diagonal.append(sum(entries) / 12)
        pairs = [_euclid(rows[i], rows[j]) ** 2 for i in range(8) for j in range(8) if i != j]
        align.append(sum(pairs) / len(pairs))
    for name, loop in zip(fs.PER_IMAGE, (nuclear, cosine, diagonal, align), strict=True):
        mean, ci95 = wide.mean(name)
        assert mean == pytest.approx(np.mean(loop), rel=1e-9), name
        half = 1.959964 * np.std(loop, ddof=1) / math.sqrt(5)
        assert ci95 is not None and ci95[1] - mean == pytest.approx(half, rel=1e-6), name
        histogram = wide.histograms[name]
        width = (histogram.high - histogram.low) / fs.BINS
        expected = np.bincount([int((v - histogram.low) / width) for v in loop], minlength=fs.BINS)
        assert histogram.counts.tolist() == expected.tolist(), name


def test_pairs_equal_loops() -> None:
    x = torch.randn(23, 6, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([i % 3 for i in range(22)] + [-1])
    found = fs.pairs(x, labels, chunk=7)  # several chunks, the last one short
    rows = _rows(x)
    within, between, potential = [], [], []
    for i in range(23):
        for j in range(i + 1, 23):
            distance = _euclid(rows[i], rows[j])
            potential.append(math.exp(-2 * distance**2))
            if labels[i] >= 0 and labels[j] >= 0:
                (within if labels[i] == labels[j] else between).append(distance)
    assert found.within_mean == pytest.approx(np.mean(within), rel=1e-9)
    assert found.between_mean == pytest.approx(np.mean(between), rel=1e-9)
    assert found.uniformity == pytest.approx(math.log(np.mean(potential)), rel=1e-9)
    counts = [
        np.bincount([int(v / 2 * fs.BINS) for v in values], minlength=fs.BINS)
        for values in (within, between)
    ]
    assert found.within.counts.tolist() == counts[0].tolist()
    shared = sum(min(a / len(within), b / len(between)) for a, b in zip(*counts))
    assert found.overlap == pytest.approx(shared, abs=1e-6)


def test_min_max_equals_loops() -> None:
    x = torch.randn(11, 20, generator=torch.Generator().manual_seed(2))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    found = fs.min_max(x, order, chunk=4)
    assert found["dims"] == [2, 4, 8, 16, 20]
    rows = [row[order.numpy()] for row in _rows(x)]
    for i, h in enumerate(found["dims"]):
        contrast = []
        for a in range(11):
            distances = [_euclid(rows[a][:h], rows[b][:h]) for b in range(11) if b != a]
            contrast.append((max(distances) - min(distances)) / min(distances))
        assert found["contrast"][i] == pytest.approx(np.mean(contrast), rel=1e-7)


def test_spectra_equal_loops() -> None:
    x = torch.randn(30, 7, generator=torch.Generator().manual_seed(4)) + 3.0
    moments = fs.Moments(7)
    for part in x.split(4):
        moments.add(part)
    data = x.double().numpy()
    mean = data.sum(0) / 30
    covariance = np.array(
        [
            [sum((r[i] - mean[i]) * (r[j] - mean[j]) for r in data) / 30 for j in range(7)]
            for i in range(7)
        ]
    )
    expected = np.linalg.eigvalsh(covariance)[::-1]
    np.testing.assert_allclose(moments.spectrum().numpy(), expected, rtol=1e-9)
    singular = np.linalg.svd(data, compute_uv=False)
    np.testing.assert_allclose(moments.singular_values().numpy(), singular, rtol=1e-8)
    p = singular / sum(singular)
    assert fs.entropy_rank(moments.singular_values()) == pytest.approx(
        math.exp(-sum(v * math.log(v) for v in p)), rel=1e-8
    )


# Known answers


def test_equal_features() -> None:
    same = torch.ones(6, 32, 16)
    views = fs.ViewStatistics(32, 16)
    views.add(same)
    # Rank 1: the least value of 32 unit rows
    assert views.mean("nuclear_norm")[0] == pytest.approx(math.sqrt(32))
    assert views.mean("view_cosine")[0] == pytest.approx(1.0)
    assert views.mean("covariance_diagonal")[0] == pytest.approx(0.0, abs=1e-15)
    moments = fs.Moments(16)
    moments.add(same[:, 0])
    assert fs.collapse(moments).kind == fs.COMPLETE
    assert fs.entropy_rank(moments.singular_values()) == pytest.approx(1.0, abs=1e-6)
    assert math.isnan(fs.entropy_rank(moments.spectrum()))
    found = fs.pairs(same[:, 0], torch.tensor([0, 0, 0, 1, 1, 1]))
    assert found.within_mean == found.between_mean == 0.0
    assert found.overlap == pytest.approx(1.0) and found.uniformity == pytest.approx(0.0, abs=1e-12)
    assert set(fs.min_max(same[:, 0], torch.arange(16))["contrast"]) == {None}


def test_isotropic_gaussians() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4096, 64, generator=generator)
    moments = fs.Moments(64)
    moments.add(x)
    assert fs.entropy_rank(moments.singular_values()) > 63.5  # all 64 directions alike
    assert fs.collapse(moments) == fs.Collapse(64, 64, fs.FULL)
    # On the sphere E ||u - v||^2 = 2, and E exp(-2 ||u - v||^2) = e^-4 E exp(4 u.v), about e^(-4 +
    # 8/d).
    found = fs.pairs(x[:1024], torch.arange(1024) % 10)
    assert found.uniformity == pytest.approx(-4 + 8 / 64, abs=0.02)
    assert found.between_mean == pytest.approx(math.sqrt(2), abs=0.01)
    assert found.overlap > 0.85  # labels say nothing here
    views = fs.ViewStatistics(32, 64)
    views.add(x[:2048].view(64, 32, 64))
    assert views.mean("view_cosine")[0] == pytest.approx(1 / 32, abs=0.01)  # a view with itself
    assert views.mean("alignment")[0] == pytest.approx(2.0, abs=0.02)
    # Theorem 1: the contrast vanishes as the dimension grows.
    noise = torch.randn(512, 2048, generator=generator)
    curve = fs.min_max(noise, torch.arange(2048))["contrast"]
    assert sorted(curve, reverse=True) == curve
    assert curve[-1] < 0.12


@pytest.mark.parametrize("rank", [1, 3, 20])
def test_features_of_rank_r(rank: int) -> None:
    generator = torch.Generator().manual_seed(6)
    basis = torch.linalg.qr(torch.randn(64, rank, generator=generator).double()).Q
    x = torch.randn(2000, rank, generator=generator).double() @ basis.T
    moments = fs.Moments(64)
    moments.add(x)
    found = fs.collapse(moments)
    assert found.live == rank and found.kind == fs.DIMENSIONAL
    assert rank * 0.95 < fs.entropy_rank(moments.singular_values()) <= rank + 1e-6
    views = fs.ViewStatistics(32, 64)
    views.add(x[:64].view(2, 32, 64))
    assert views.mean("nuclear_norm")[0] <= math.sqrt(32 * min(rank, 32)) + 1e-9
