"""Losses and decompositions against loops in float64, at ordinary and degenerate inputs."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.pretrain.methods._linalg import inverse_root, polar
from backbench.pretrain.methods.arb import arb_loss, standardise, tracks
from backbench.pretrain.methods.barlow_twins import barlow_twins_loss
from backbench.pretrain.methods.byol import cosine_loss
from backbench.pretrain.methods.cllr import cllr_regularizer, released_reconstruction
from backbench.pretrain.methods.co2 import consistency_loss
from backbench.pretrain.methods.dino import dino_loss
from backbench.pretrain.methods.hcl import hcl_loss
from backbench.pretrain.methods.jcl import jcl_loss
from backbench.pretrain.methods.lorac import lorac_loss, nuclear_norm
from backbench.pretrain.methods.mio import mio_loss
from backbench.pretrain.methods.moco import infonce_loss
from backbench.pretrain.methods.ressl import ressl_loss
from backbench.pretrain.methods.simclr import nt_xent_loss
from backbench.pretrain.methods.simsiam import simsiam_loss
from backbench.pretrain.methods.swav import sinkhorn
from backbench.pretrain.methods.vicreg import vicreg_loss
from backbench.pretrain.methods.w_mse import w_mse_loss, whiten

EPS = torch.finfo(torch.float64).eps


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def unit(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(normal(*shape, seed=seed), dim=-1)


def raw(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed) + 0.3


def dot(a: Tensor, b: Tensor) -> Tensor:
    total = a.new_zeros(())
    for x, y in zip(a, b):
        total = total + x * y
    return total


def loop_infonce(q, k, queue, t):
    total = q.new_zeros(())
    for i in range(len(q)):
        positive = torch.exp(dot(q[i], k[i]) / t)
        negative = sum(torch.exp(dot(q[i], queue[j]) / t) for j in range(len(queue)))
        total = total - torch.log(positive / (positive + negative))
    return total / len(q)


def loop_nuclear(matrix: Tensor) -> Tensor:
    """||matrix||_* with the gradient U V^T over nonzero singular values: <matrix, fixed U V^T>."""
    u, s, vh = torch.linalg.svd(matrix.detach(), full_matrices=False)
    kept = s > max(matrix.shape) * EPS * s.max()
    polar = torch.zeros_like(matrix.detach())
    for r in range(len(s)):
        if kept[r]:
            polar = polar + torch.outer(u[:, r], vh[r])
    return (matrix * polar).sum()


def loop_lorac(
    queries,
    key,
    queue,
    *,
    t,
    beta,
    rows=None,
    prior="laplace",
    sigma2=2.0,
    c0=None,
    margin=3.0,
):
    views, n = queries.shape[:2]
    total = queries.new_zeros(())
    for i in range(n):
        q_i = torch.stack([*queries[:, i], key[i]]) if rows is None else rows[:, i]
        m = len(q_i)
        if prior == "laplace":
            h = torch.exp(-loop_nuclear(q_i) / (m * beta * t))
        elif prior == "gaussian":
            least = math.sqrt(m) if c0 is None else c0
            h = torch.exp(-((loop_nuclear(q_i) - least) ** 2) / (sigma2 * m * t))
        elif prior == "margin":
            h = torch.tensor(math.exp(-margin / (m * beta * t)), dtype=torch.float64)
        elif prior == "batch":
            pairs = [(v, j) for j in range(n) for v in range(views)]
            stacked = [queries[v, j] - queries[:, j].mean(0) for v, j in pairs]
            h = torch.exp(-loop_nuclear(torch.stack(stacked)) / (n * views * beta * t))
        else:
            h = torch.ones((), dtype=torch.float64)
        for v in range(views):
            positive = torch.exp(dot(queries[v, i], key[i]) / t) * h
            negative = sum(
                torch.exp(dot(queries[v, i], queue[j]) / t) for j in range(len(queue))
            )
            total = total - torch.log(positive / (positive + negative))
    return total / (n * views)


def loop_jcl(q, keys, queue, t, lam):
    total = q.new_zeros(())
    m, n, d = keys.shape
    for i in range(n):
        mu = sum(keys[a, i] for a in range(m)) / m
        sigma = torch.zeros(d, d, dtype=torch.float64)
        for a in range(m):
            sigma = sigma + torch.outer(keys[a, i] - mu, keys[a, i] - mu) / m
        own = torch.exp(dot(q[i], mu) / t + lam / (2 * t * t) * (q[i] @ sigma @ q[i]))
        negative = sum(torch.exp(dot(q[i], queue[j]) / t) for j in range(len(queue)))
        total = total + torch.log(own + negative) - dot(q[i], mu) / t
    return total / n


def loop_mio(z_a, z_b, t, l2=0.0, reduction="mean"):
    z = torch.cat([z_a, z_b])
    z = z / z.norm(dim=1, keepdim=True)
    n, d = z_a.shape
    positive, negative = z.new_zeros(()), z.new_zeros(())
    count = 0
    for i in range(2 * n):
        for j in range(2 * n):
            c = dot(z[i], z[j]) / t
            if j == (i + n) % (2 * n):
                positive = positive - torch.log(torch.sigmoid(c)) / (2 * n)
            elif i != j:
                negative = negative - torch.log(1 - torch.sigmoid(c))
                count += 1
    assert count == 4 * n * n - 4 * n
    # Eq. 39: all ordered pairs
    distance = sum(((z[i] - z[(i + n) % (2 * n)]) ** 2).sum() for i in range(2 * n))
    distance = distance / {"sum": 1, "pair_mean": 2 * n, "mean": 2 * n * d}[reduction]
    return positive + negative / max(1, count) + l2 * distance


def loop_arb(
    z_a,
    z_b,
    *,
    groups=1,
    ridge=1e-4,
    permutation=None,
    align="base",
    loss="eq8",
    weight=0.0,
):
    d = z_a.shape[1]

    def columns(z):
        out = []
        for i in range(d):
            c = z[:, i] - z[:, i].mean()
            constant = float(c.detach().abs().max()) < 1e-12
            out.append(0.0 * c if constant else c / c.norm())
        z = torch.stack(out, 1)
        return z if permutation is None else z[:, permutation]

    def base(z):
        z = z.detach()
        values, vectors = torch.linalg.eigh(z.T @ z)
        return z @ (
            vectors @ torch.diag((values.clamp_min(0) + ridge) ** -0.5) @ vectors.T
        )

    a, b = columns(z_a), columns(z_b)
    total = z_a.new_zeros(())
    size = d // groups
    for g in range(groups):
        part_a = a[:, g * size : (g + 1) * size]
        part_b = b[:, g * size : (g + 1) * size]
        target_a, target_b = part_a, part_b
        if align == "base":
            target_a, target_b = base(part_a), base(part_b)
        for x, y in ((part_a, target_b), (part_b, target_a)):
            for i in range(size):
                if loss == "mse":
                    total = total + (x[:, i] - y[:, i] / y[:, i].norm()).square().sum()
                    continue
                total = total + (1 - dot(x[:, i], y[:, i])) ** 2
                for j in range(size):
                    if weight and i != j:
                        total = total + weight * dot(x[:, i], y[:, j]) ** 2
    return total


def loop_cllr(phi, projection, alpha, norm):
    total = phi.new_zeros(())
    for x in phi:
        total = total + ((projection.T @ (projection @ x) - x) ** 2).sum() / len(phi)
    if norm == "nuclear":
        total = total + alpha * loop_nuclear(projection)
    elif norm == "l21":
        for column in projection.T:
            if float(column.detach().abs().max()) > 0:
                total = total + alpha * column.square().sum().sqrt()
    return total


def cos(a, b):
    return (a * b).sum() / (a.norm() * b.norm())


def loop_pairs(z_a, z_b, t):
    """Anchor by anchor: exp of the positive and the list of exps of the negatives."""
    z = torch.cat([z_a, z_b])
    n = len(z_a)
    for i in range(2 * n):
        partner = (i + n) % (2 * n)
        others = [j for j in range(2 * n) if j not in (i, partner)]
        negatives = [torch.exp(cos(z[i], z[j]) / t) for j in others]
        yield torch.exp(cos(z[i], z[partner]) / t), negatives


def loop_nt_xent(z_a, z_b, t=0.5):
    losses = [
        -torch.log(p / (p + sum(negatives))) for p, negatives in loop_pairs(z_a, z_b, t)
    ]
    return sum(losses) / len(losses)


def loop_hcl(z_a, z_b, t=0.5, tau_plus=0.1, beta=1.0):
    losses = []
    for positive, negatives in loop_pairs(z_a, z_b, t):
        count = len(negatives)
        weights = [e**beta for e in negatives]
        mean = sum(weights) / count
        hard = sum(w / mean * e for w, e in zip(weights, negatives)) / count
        estimate = count * (hard - tau_plus * positive) / (1 - tau_plus)
        estimate = torch.clamp(estimate, min=count * math.exp(-1 / t))
        losses.append(-torch.log(positive / (positive + estimate)))
    return sum(losses) / len(losses)


def loop_barlow(z_a, z_b, weight=5e-3):
    n, d = z_a.shape
    a, b = ((z - z.mean(0)) / z.std(0, unbiased=False) for z in (z_a, z_b))
    total = z_a.new_zeros(())
    for i in range(d):
        for j in range(d):
            c = sum(a[k, i] * b[k, j] for k in range(n)) / n
            total = total + ((1 - c) ** 2 if i == j else weight * c**2)
    return total


def loop_vicreg(z_a, z_b):
    n, d = z_a.shape
    loss = 25 * ((z_a - z_b) ** 2).mean()
    for z in (z_a, z_b):
        centred = z - z.mean(0)
        for i in range(d):
            variance = (centred[:, i] ** 2).sum() / (n - 1)
            loss = loss + 25 * 0.5 * torch.relu(1 - torch.sqrt(variance + 1e-4)) / d
            for j in range(d):
                if i != j:
                    covariance = (centred[:, i] * centred[:, j]).sum() / (n - 1)
                    loss = loss + covariance**2 / d
    return loss


def loop_simsiam(p_a, p_b, z_a, z_b):
    z_a, z_b = z_a.detach(), z_b.detach()
    terms = []
    for i in range(len(p_a)):
        terms.append(-cos(p_a[i], z_b[i]) / 2 - cos(p_b[i], z_a[i]) / 2)
    return sum(terms) / len(terms)


def loop_byol(p, z):
    z = z.detach()
    terms = []
    for i in range(len(p)):
        difference = p[i] / p[i].norm() - z[i] / z[i].norm()
        terms.append((difference**2).sum())
    return sum(terms) / len(terms)


def loop_dino(student, teacher, center=0.1, ts=0.1, tt=0.04):
    teacher = teacher.detach()
    terms = []
    for t in range(len(teacher)):
        for s in range(len(student)):
            if s != t:
                for n in range(student.shape[1]):
                    target = torch.softmax((teacher[t, n] - center) / tt, 0)
                    logs = torch.log_softmax(student[s, n] / ts, 0)
                    terms.append(-(target * logs).sum())
    return sum(terms) / len(terms)


def loop_relations(q, k, queue, *, t, key_t, divergence):
    k, queue = k.detach(), queue.detach()
    total = q.new_zeros(())
    for i in range(len(q)):
        p = torch.softmax(torch.stack([(q[i] * x).sum() / t for x in queue]), 0)
        r = torch.softmax(torch.stack([(k[i] * x).sum() / key_t for x in queue]), 0)
        if divergence:
            there = (p * torch.log(p / r)).sum()
            back = (r * torch.log(r / p)).sum()
            total = total + (there + back) / 2
        else:
            total = total - (r * torch.log(p)).sum()
    return total / len(q)


def value_and_gradients(function, *inputs, autocast=False):
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = function(*leaves)
    assert value.ndim == 0
    value.backward()
    gradients = []
    for leaf in leaves:
        gradients.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    return value.detach(), gradients


def check_loss(function, oracle, *inputs, exact=1e-9, single=2e-5):
    """Value and gradient to all `inputs` against the oracle, in float64, float32 and autocast."""
    expected, expected_gradients = value_and_gradients(oracle, *inputs)
    for dtype, near in ((torch.float64, exact), (torch.float32, single)):
        given = [x.to(dtype) for x in inputs]
        autocast = dtype == torch.float32
        value, gradients = value_and_gradients(function, *given, autocast=autocast)
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), expected, rtol=near, atol=near)
        for g, e in zip(gradients, expected_gradients):
            absolute = near * (1 + float(e.abs().max()))
            torch.testing.assert_close(g.double(), e, rtol=near, atol=absolute)


def no_key_gradient(loop):
    """The loop with everything but its first argument cut off from the gradient."""
    return lambda q, *others: loop(q, *(x.detach() for x in others))


@pytest.mark.parametrize(("n", "d", "k"), [(5, 7, 11), (3, 4, 1), (1, 3, 2)])
@pytest.mark.parametrize("t", [0.07, 0.2])
def test_infonce(n, d, k, t):
    ours = functools.partial(infonce_loss, temperature=t)
    loop = no_key_gradient(functools.partial(loop_infonce, t=t))
    check_loss(ours, loop, unit(n, d), unit(n, d, seed=1), unit(k, d, seed=2))


def test_infonce_at_identical_vectors_and_over_many_chunks(monkeypatch):
    q = unit(4, 6)
    queue = torch.cat([q, unit(40, 6, seed=3)])
    # Three keys at a time
    monkeypatch.setattr("backbench.pretrain.methods.moco.CHUNK_ELEMENTS", {"cpu": 12})
    monkeypatch.setattr("backbench.pretrain.methods.moco.LEAST_KEYS", 1)
    for t in (0.01, 0.2):

        def ours(a, t=t):
            return infonce_loss(a, q.to(a), queue.to(a), temperature=t)

        def loop(a, t=t):
            return loop_infonce(a, q, queue, t)

        check_loss(ours, loop, q, single=2e-3 if t == 0.01 else 2e-5)


def degenerate_views(kind: str) -> Tensor:
    """(4, 3, 8) views of three images: apart, equal, nearly equal, or in two dimensions."""
    if kind == "apart":
        return unit(4, 3, 8)
    one = unit(1, 3, 8).expand(4, 3, 8)
    if kind == "equal":
        return one.clone()
    if kind == "flat":
        x, y = unit(1, 3, 8), unit(1, 3, 8, seed=5)
        angles = torch.linspace(0, 1, 4, dtype=torch.float64).view(4, 1, 1)
        return F.normalize(x * angles.cos() + y * angles.sin(), dim=-1)
    return F.normalize(one + float(kind) * unit(4, 3, 8, seed=6), dim=-1)


@pytest.mark.parametrize("kind", ["apart", "equal", "flat", "1e-3", "1e-6", "1e-9"])
@pytest.mark.parametrize("prior", ["laplace", "gaussian", "margin", "none", "batch"])
def test_lorac(kind, prior):
    views = degenerate_views(kind)
    queries, key = views[:3], views[3]
    queue = unit(9, 8, seed=9)
    near = kind in ("1e-6", "1e-9")
    how = {"temperature": 0.2, "beta": 2.0, "prior": prior}
    oracle = functools.partial(
        loop_lorac, key=key, queue=queue, t=0.2, beta=2.0, prior=prior
    )
    expected, (expected_gradient,) = value_and_gradients(oracle, queries)
    value, (gradient,) = value_and_gradients(
        lambda q: lorac_loss(q, key, queue, **how), queries
    )
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    # U V^T of views 1e-9 apart depends on the last digits of the input: 1e-16 / 1e-9
    torch.testing.assert_close(
        gradient, expected_gradient, rtol=1e-6, atol=1e-6 if near else 1e-9
    )
    value, (gradient,) = value_and_gradients(
        lambda q: lorac_loss(q, key.float(), queue.float(), **how),
        queries.float(),
        autocast=True,
    )
    torch.testing.assert_close(value.double(), expected, rtol=2e-5, atol=2e-5)
    assert gradient.isfinite().all()
    if not near and not (kind == "equal" and prior == "batch") and kind != "flat":
        torch.testing.assert_close(
            gradient.double(), expected_gradient, rtol=1e-3, atol=1e-3
        )
    # Views rounded to float32 are a matrix too, for which the gradient is exact
    rounded = queries.float().double()
    oracle = functools.partial(oracle, key=key.float().double())
    _, (exact,) = value_and_gradients(oracle, rounded)
    if prior != "batch":
        torch.testing.assert_close(gradient.double(), exact, rtol=1e-3, atol=1e-4)


def test_lorac_with_rows_of_their_own_and_gradient_to_them():
    large, small = unit(3, 4, 8), unit(5, 4, 8, seed=1)
    keys, queue = unit(2, 4, 8, seed=2), unit(6, 8, seed=3)

    def ours(large, small, key):
        rows = torch.cat([large, keys.to(large)])
        queries = torch.cat([large[1:], small])
        return lorac_loss(
            queries, key, queue.to(large), temperature=0.2, beta=4.0, rows=rows
        )

    def loop(large, small, key):
        rows = torch.cat([large, keys])
        queries = torch.cat([large[1:], small])
        return loop_lorac(queries, key.detach(), queue, t=0.2, beta=4.0, rows=rows)

    check_loss(ours, loop, large, small, keys[0])


def summed_nuclear_norm(matrices):
    return nuclear_norm(matrices).sum()


def loop_summed_nuclear(matrices):
    return sum(loop_nuclear(matrix) for matrix in matrices)


@pytest.mark.parametrize("shape", [(2, 3, 8), (3, 8, 3), (1, 5, 5), (2, 1, 4)])
def test_nuclear_norm_at_any_shape(shape):
    check_loss(summed_nuclear_norm, loop_summed_nuclear, raw(*shape))


@pytest.mark.parametrize("shape", [(5, 2, 60_000), (5, 60_000, 2)])
def test_nuclear_norms_of_large_matrices_are_computed_in_blocks(shape):
    """Two at a time, and the fifth alone."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    x.requires_grad_()
    norms = nuclear_norm(x)
    (norms * torch.arange(1, 6)).sum().backward()
    u, s, vh = torch.linalg.svd(x.detach(), full_matrices=False)
    torch.testing.assert_close(norms.detach(), s.sum(1))
    factors = u @ vh * torch.arange(1, 6)[:, None, None]
    torch.testing.assert_close(x.grad, factors, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("apart", [1e-3, 1e-4, 1e-5, 3e-6, 1e-6])
def test_nuclear_norm_of_near_views_is_that_of_the_float32_matrix(apart):
    """To 2e-5 where the Gram matrix lost half the digits; the papers' is off by 0.1 at 1e-5."""
    near = F.normalize(
        unit(32, 1, 64) + apart * unit(32, 5, 64, seed=1), dim=-1
    ).float()
    _, (gradient,) = value_and_gradients(summed_nuclear_norm, near)
    _, (exact,) = value_and_gradients(loop_summed_nuclear, near.double())
    torch.testing.assert_close(gradient.double(), exact, rtol=0, atol=2e-5)


def test_nuclear_norm_at_zero_and_at_equal_rows_is_finite():
    for x in (torch.zeros(2, 3, 4), torch.ones(2, 3, 4), torch.eye(3).expand(2, 3, 3)):
        value, (gradient,) = value_and_gradients(summed_nuclear_norm, x)
        assert value.isfinite()
        assert gradient.isfinite().all()
        # Every subgradient has norm at most 1
        assert float(torch.linalg.matrix_norm(gradient, 2).max()) < 1 + 1e-5


@pytest.mark.parametrize(("m", "n", "k"), [(5, 4, 9), (1, 3, 4), (2, 2, 1)])
@pytest.mark.parametrize("lam", [0.0, 1.0, 4.0])
def test_jcl(m, n, k, lam):
    ours = functools.partial(jcl_loss, temperature=0.2, lam=lam)
    loop = no_key_gradient(functools.partial(loop_jcl, t=0.2, lam=lam))
    check_loss(ours, loop, unit(n, 6), unit(m, n, 6, seed=1), unit(k, 6, seed=2))


def test_jcl_at_equal_and_nearly_equal_keys():
    queue = unit(7, 6, seed=2)
    ours = functools.partial(jcl_loss, temperature=0.2, lam=4.0)
    loop = no_key_gradient(functools.partial(loop_jcl, t=0.2, lam=4.0))
    for distance in (0.0, 1e-9):
        keys = F.normalize(
            unit(1, 4, 6).expand(5, 4, 6) + distance * unit(5, 4, 6, seed=3), dim=-1
        )
        check_loss(ours, loop, unit(4, 6), keys, queue)


@pytest.mark.parametrize("n", [1, 2, 6])
@pytest.mark.parametrize(
    ("l2", "reduction"),
    [(0.0, "mean"), (1.0, "mean"), (1.0, "pair_mean"), (1.0, "sum")],
)
def test_mio(n, l2, reduction, monkeypatch):
    # Several blocks of rows
    monkeypatch.setattr("backbench.pretrain.methods.mio.BLOCK_ELEMENTS", {"cpu": 40})
    ours = functools.partial(
        mio_loss, temperature=0.5, l2_weight=l2, l2_reduction=reduction
    )
    loop = functools.partial(loop_mio, t=0.5, l2=l2, reduction=reduction)
    check_loss(ours, loop, raw(n, 5), raw(n, 5, seed=1))


@pytest.mark.parametrize("block", [1, 3, 1000])
def test_mio_at_identical_views_and_at_low_temperature(block, monkeypatch):
    monkeypatch.setattr(
        "backbench.pretrain.methods.mio.BLOCK_ELEMENTS", {"cpu": block * 10}
    )
    z = raw(5, 4)
    ours = functools.partial(mio_loss, temperature=0.5)
    check_loss(ours, lambda a, b: loop_mio(a, b, 0.5), z, z.clone())
    collapsed = torch.ones(5, 4, dtype=torch.float32)
    # log(1 - sigmoid(200)) is not, in float32
    assert mio_loss(collapsed, collapsed, temperature=0.005).isfinite()


@pytest.mark.parametrize(
    ("n", "d", "groups"), [(9, 4, 1), (9, 8, 2), (5, 12, 1), (5, 12, 3), (6, 6, 1)]
)
def test_arb(n, d, groups):
    permutation = torch.randperm(d, generator=torch.Generator().manual_seed(3))
    how = {"groups": groups, "permutation": permutation}
    ours = functools.partial(arb_loss, **how)
    loop = functools.partial(loop_arb, **how)
    # rsqrt(0 + ridge) of an eigenvalue that is 0 up to 1e-16
    check_loss(ours, loop, raw(n, d), raw(n, d, seed=1), exact=1e-7, single=5e-4)


@pytest.mark.parametrize(
    "case",
    [
        "constant columns",
        "equal samples",
        "equal columns",
        "same views",
        "all constant",
    ],
)
@pytest.mark.parametrize("d", [4, 12])
def test_arb_degenerate(case, d):
    a, b = raw(7, d), raw(7, d, seed=1)
    if case == "constant columns":
        a[:, 1] = 0.1
        b[:, 2] = -1e4
    elif case == "equal samples":
        a[1:4] = a[0].clone()
        b[1:4] = b[0].clone()
    elif case == "equal columns":
        a[:, 1] = a[:, 0]
        b[:, 3] = b[:, 2]
    elif case == "same views":
        b = a.clone()
    else:
        a.fill_(0.1)
        b.fill_(3.3)
    check_loss(arb_loss, loop_arb, a, b, exact=1e-6, single=2e-3)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "ablation",
    [{"align": "direct"}, {"loss": "mse"}, {"loss": "off_diagonal", "weight": 0.2}],
)
def test_arbs_ablations(ablation, groups):
    """Tables 3 and 4; directly aligned, both views get a gradient."""
    settings = dict(ablation)
    if "weight" in settings:
        settings["off_diagonal_weight"] = settings.pop("weight")
    ours = functools.partial(arb_loss, groups=groups, **settings)
    loop = functools.partial(loop_arb, groups=groups, **ablation)
    check_loss(ours, loop, raw(12, 8), raw(12, 8, seed=1), exact=1e-7, single=5e-4)


def test_arb_over_instances_is_the_loss_of_the_transposed():
    a, b = raw(6, 20), raw(6, 20, seed=1)
    transposed = float(arb_loss(a.T, b.T))
    assert float(arb_loss(a, b, over="instances")) == pytest.approx(
        transposed, rel=1e-12
    )


def test_arbs_curves_at_their_ends():
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


@pytest.mark.parametrize("norm", ["nuclear", "l21", "none"])
@pytest.mark.parametrize("rows", [6, 3, 9])
def test_cllr(norm, rows):
    ours = functools.partial(cllr_regularizer, alpha=0.7, norm=norm)
    loop = functools.partial(loop_cllr, alpha=0.7, norm=norm)
    check_loss(ours, loop, raw(5, 6), raw(rows, 6, seed=1) / 3)


@pytest.mark.parametrize("norm", ["nuclear", "l21"])
def test_cllr_at_low_rank_zero_columns_and_zero(norm):
    thin = torch.outer(raw(4), raw(6, seed=2))
    holes = raw(4, 6, seed=1)
    holes[:, 2] = 0
    ours = functools.partial(cllr_regularizer, alpha=0.7, norm=norm)
    loop = functools.partial(loop_cllr, alpha=0.7, norm=norm)
    # Rounded to float32 the rank-one matrix has full rank
    for projection, single in (
        (thin, 2.0),
        (holes, 1e-4),
        (torch.zeros_like(holes), 1e-4),
    ):
        check_loss(ours, loop, raw(5, 6), projection, exact=1e-8, single=single)


def test_the_released_reconstruction_ignores_the_scale_of_the_projection():
    phi, projection = raw(5, 6), raw(3, 6, seed=1)
    one = released_reconstruction(phi, projection)
    assert float(one) == pytest.approx(
        float(released_reconstruction(phi, 1e-3 * projection))
    )
    again = phi @ projection.T @ projection
    expected = (F.normalize(phi, dim=1) - F.normalize(again, dim=1)).norm() / 5
    assert float(one) == pytest.approx(float(expected))


PAIR = (raw(4, 5), raw(4, 5, seed=1))
QUEUE = (unit(4, 5), unit(4, 5, seed=1), unit(6, 5, seed=2))
MULTI_CROP = (raw(3, 4, 5), raw(2, 4, 5, seed=1))
HCL = functools.partial(hcl_loss, temperature=0.5)
DINO = functools.partial(dino_loss, student_temperature=0.1, teacher_temperature=0.04)
CO2 = functools.partial(consistency_loss, temperature=0.1)
LOOP_CO2 = functools.partial(loop_relations, t=0.1, key_t=0.1, divergence=True)
RESSL = functools.partial(ressl_loss, temperature=0.1, key_temperature=0.04)
LOOP_RESSL = functools.partial(loop_relations, t=0.1, key_t=0.04, divergence=False)
CLAMPED = (PAIR[0], PAIR[0] + 0.01 * PAIR[1])
LOOP_HALF = functools.partial(loop_hcl, tau_plus=0.5)
BASELINES = {
    "nt_xent": (functools.partial(nt_xent_loss, temperature=0.5), loop_nt_xent, PAIR),
    "hcl": (functools.partial(HCL, tau_plus=0.1, beta=1.0), loop_hcl, PAIR),
    "dcl": (
        functools.partial(HCL, tau_plus=0.1, beta=0.0),
        lambda *z: loop_hcl(*z, beta=0),
        PAIR,
    ),
    "hcl clamped": (functools.partial(HCL, tau_plus=0.5, beta=1.0), LOOP_HALF, CLAMPED),
    "barlow_twins": (barlow_twins_loss, loop_barlow, PAIR),
    "vicreg": (vicreg_loss, loop_vicreg, PAIR),
    "simsiam": (
        simsiam_loss,
        loop_simsiam,
        (*PAIR, raw(4, 5, seed=2), raw(4, 5, seed=3)),
    ),
    "byol": (cosine_loss, loop_byol, PAIR),
    "dino": (
        lambda s, t: DINO(s, t, torch.full((5,), 0.1).to(s)),
        loop_dino,
        MULTI_CROP,
    ),
    "co2": (CO2, LOOP_CO2, QUEUE),
    "ressl": (RESSL, LOOP_RESSL, QUEUE),
}


@pytest.mark.parametrize("name", BASELINES)
def test_baselines(name):
    ours, loop, inputs = BASELINES[name]
    # A batch norm adds 1e-5 to the variance
    exact = 1e-4 if name == "barlow_twins" else 1e-9
    check_loss(ours, loop, *inputs, exact=exact, single=1e-4)


@pytest.mark.parametrize("weight", [5e-3, 0.0051, 0.5])
@pytest.mark.parametrize(("n", "d"), [(4, 5), (9, 3)])
def test_barlow_twins_is_lightlys(n, d, weight):
    from lightly.loss import BarlowTwinsLoss

    check_loss(
        functools.partial(barlow_twins_loss, off_diagonal_weight=weight),
        BarlowTwinsLoss(lambda_param=weight),
        raw(n, d),
        raw(n, d, seed=1),
        single=1e-4,
    )


def loop_sinkhorn(scores, *, epsilon, iterations):
    """Algorithm 1 of SwAV's supplement, on Q of shape (K, B) with entries in its polytope."""
    prototypes, samples = scores.shape[1], scores.shape[0]
    q = torch.exp(scores / epsilon).T / torch.exp(scores / epsilon).sum()
    for _ in range(iterations):
        for k in range(prototypes):
            q[k] = q[k] / q[k].sum() / prototypes
        for b in range(samples):
            q[:, b] = q[:, b] / q[:, b].sum() / samples
    return (q * samples).T


@pytest.mark.parametrize("iterations", [1, 3, 50])
@pytest.mark.parametrize(("n", "k"), [(8, 5), (5, 8), (1, 4)])
@pytest.mark.parametrize("epsilon", [0.05, 0.5])
def test_sinkhorn(n, k, epsilon, iterations):
    from lightly.loss.swav_loss import sinkhorn as lightlys

    scores = unit(n, 6) @ unit(k, 6, seed=1).T
    kept = scores.clone()
    how = {"epsilon": epsilon, "iterations": iterations}
    codes = sinkhorn(scores, **how)
    torch.testing.assert_close(codes, loop_sinkhorn(scores, **how))
    torch.testing.assert_close(codes, lightlys(scores, **how))
    torch.testing.assert_close(
        sinkhorn(scores.float(), **how).double(), codes, rtol=1e-4, atol=1e-6
    )
    assert torch.equal(scores, kept), "the scores are used again"


def test_sinkhorn_uses_prototypes_equally():
    """Also where the scores of all samples favour one prototype."""
    scores = unit(12, 6) @ unit(4, 6, seed=1).T
    scores[:, 0] += 1
    codes = sinkhorn(scores, epsilon=0.5, iterations=200)
    torch.testing.assert_close(codes.sum(1), torch.ones(12, dtype=torch.float64))
    torch.testing.assert_close(codes.sum(0), torch.full((4,), 3.0).double())


def test_whitening_gives_the_identity_as_covariance():
    white = whiten(raw(2, 30, 4), 0.0)
    for part in white:
        torch.testing.assert_close(torch.cov(part.T), torch.eye(4, dtype=torch.float64))


def test_a_ridge_draws_the_covariance_towards_the_identity():
    (x,) = raw(1, 30, 4)
    drawn = 0.75 * torch.cov(x.T) + 0.25 * torch.eye(4, dtype=torch.float64)
    (white,) = whiten(x[None], 0.25)
    centred = (x - x.mean(0)).T
    torch.testing.assert_close(torch.linalg.cholesky(drawn) @ white.T, centred)


def test_w_mse_is_the_distance_of_whitened_views():
    a, b = raw(12, 2), raw(12, 2, seed=1)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    total = 0.0
    for part in order.split(6):
        x, y = whiten(a[part][None], 0.0)[0], whiten(b[part][None], 0.0)[0]
        total += sum(float(2 - 2 * cos(x[i], y[i])) for i in range(6)) / 12
    assert float(w_mse_loss(a, b, order, size=6)) == pytest.approx(total)
    assert float(w_mse_loss(a, a, order, size=6)) == pytest.approx(0, abs=1e-12)


def test_w_mse_of_what_has_no_whitening_is_not_a_number():
    """Without a look at each step; the loop ends a run whose loss is none."""
    equal = torch.ones(12, 2, dtype=torch.float64)
    assert w_mse_loss(equal, equal, torch.arange(12), size=6).isnan()


@pytest.mark.parametrize("m", [1, 2, 5, 8])
def test_nuclear_norm_of_unit_rows_is_between_sqrt_m_and_m(m):
    norms = nuclear_norm(unit(200, m, 8))
    assert float(norms.min()) >= math.sqrt(m) - 1e-9
    assert float(norms.max()) <= m + 1e-9
    equal_rows = nuclear_norm(unit(1, 1, 8).expand(1, m, 8))
    assert float(equal_rows) == pytest.approx(math.sqrt(m))
    orthogonal_rows = nuclear_norm(torch.eye(8)[None, :m])
    assert float(orthogonal_rows) == pytest.approx(m)


def test_lorac_with_infinite_beta_is_moco_m():
    queries, key, queue = unit(7, 4, 8), unit(4, 8, seed=1), unit(20, 8, seed=2)
    without = lorac_loss(queries, key, queue, temperature=0.2, beta=4.0, prior="none")
    for prior in ("laplace", "batch"):
        infinite = lorac_loss(
            queries, key, queue, temperature=0.2, beta=math.inf, prior=prior
        )
        assert float(infinite) == float(without)
    pairs = [infonce_loss(q, key, queue, temperature=0.2) for q in queries]
    assert float(without) == pytest.approx(float(torch.stack(pairs).mean()), rel=1e-12)


def test_half_precision_inputs_are_raised():
    q = unit(4, 8).half()
    key = unit(4, 8, seed=1).half()
    queue = unit(9, 8, seed=2).half()
    how = {"temperature": 0.2, "beta": 2.0}
    loss = lorac_loss(q[None], key, queue, **how)
    exact = lorac_loss(q[None].double(), key.double(), queue.double(), **how)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(exact), rel=1e-5)


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
    x = torch.nn.functional.normalize(normal(64, m, 32, seed=m), dim=-1)
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
    m = shape[0]
    u, v = (torch.linalg.qr(normal(rows, m, seed=m)).Q for rows in shape)
    s = 7 * condition ** -torch.linspace(0, 1, m, dtype=torch.float64)
    s[m - zeros :] = 0
    check_polar(((u * s) @ v.mT)[None])


@pytest.mark.parametrize("ridge", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize("kind", ["any", "two equal", "collapsed"])
def test_inverse_root(ridge, kind):
    z = normal(2, 48, 24, seed=48)
    if kind == "two equal":
        z[..., 1] = z[..., 0]
    if kind == "collapsed":
        z = z[..., :1] + 1e-6 * z
    z = torch.stack([standardise(part) for part in z])
    gram = z.mT @ z
    values, vectors = torch.linalg.eigh(gram)
    roots = (values.clamp_min(0) + ridge).rsqrt()
    expected = (vectors * roots.unsqueeze(-2)) @ vectors.mT
    found = inverse_root(gram, ridge, largest=24)
    # What is used of it is its product with Z; an eigenvalue that is all rounding is eps / ridge off
    torch.testing.assert_close(z @ found, z @ expected, rtol=0, atol=1e-13 / ridge)
