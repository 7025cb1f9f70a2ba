"""The baselines' losses against loops in float64, value and gradient."""

import math

import pytest
import torch
import torch.nn.functional as F

from pretrain.methods.barlow_twins import barlow_twins_loss
from pretrain.methods.byol import cosine_loss
from pretrain.methods.co2 import consistency_loss
from pretrain.methods.dcl import dcl_loss
from pretrain.methods.dino import dino_loss
from pretrain.methods.hcl import hcl_loss
from pretrain.methods.ressl import ressl_loss
from pretrain.methods.simclr import nt_xent_loss
from pretrain.methods.simsiam import simsiam_loss
from pretrain.methods.vicreg import vicreg_loss
from pretrain.methods.w_mse import w_mse_loss, whiten


def raw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator) + 0.3


def unit(*shape, seed=0):
    return F.normalize(raw(*shape, seed=seed), dim=-1)


def cos(a, b):
    return (a * b).sum() / (a.norm() * b.norm())


def loop_pairs(z_a, z_b, t):
    """Anchor by anchor: exp of the positive and the list of exps of the negatives."""
    z = torch.cat([z_a, z_b])
    n = len(z_a)
    for i in range(2 * n):
        partner = (i + n) % (2 * n)
        yield (
            torch.exp(cos(z[i], z[partner]) / t),
            [torch.exp(cos(z[i], z[j]) / t) for j in range(2 * n) if j not in (i, partner)],
        )


def loop_nt_xent(z_a, z_b, t=0.5):
    losses = [-torch.log(p / (p + sum(negatives))) for p, negatives in loop_pairs(z_a, z_b, t)]
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
                    loss = loss + ((centred[:, i] * centred[:, j]).sum() / (n - 1)) ** 2 / d
    return loss


def loop_simsiam(p_a, p_b, z_a, z_b):
    z_a, z_b = z_a.detach(), z_b.detach()
    terms = [-cos(p_a[i], z_b[i]) / 2 - cos(p_b[i], z_a[i]) / 2 for i in range(len(p_a))]
    return sum(terms) / len(terms)


def loop_byol(p, z):
    z = z.detach()
    terms = [((p[i] / p[i].norm() - z[i] / z[i].norm()) ** 2).sum() for i in range(len(p))]
    return sum(terms) / len(terms)


def loop_dino(student, teacher, center=0.1, ts=0.1, tt=0.04):
    teacher = teacher.detach()
    terms = []
    for t in range(len(teacher)):
        for s in range(len(student)):
            if s != t:
                for n in range(student.shape[1]):
                    target = torch.softmax((teacher[t, n] - center) / tt, 0)
                    terms.append(-(target * torch.log_softmax(student[s, n] / ts, 0)).sum())
    return sum(terms) / len(terms)


def loop_relations(q, k, queue, *, t, key_t, divergence):
    k, queue = k.detach(), queue.detach()
    total = q.new_zeros(())
    for i in range(len(q)):
        p = torch.softmax(torch.stack([(q[i] * x).sum() / t for x in queue]), 0)
        r = torch.softmax(torch.stack([(k[i] * x).sum() / key_t for x in queue]), 0)
        if divergence:
            total = total + ((p * torch.log(p / r)).sum() + (r * torch.log(r / p)).sum()) / 2
        else:
            total = total - (r * torch.log(p)).sum()
    return total / len(q)


def gradients(function, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    value = function(*leaves)
    value.backward()
    return value.detach(), [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


PAIR = (raw(4, 5), raw(4, 5, seed=1))
QUEUE = (unit(4, 5), unit(4, 5, seed=1), unit(6, 5, seed=2))
CASES = {
    "nt_xent": (lambda a, b: nt_xent_loss(a, b, temperature=0.5), loop_nt_xent, PAIR),
    "hcl": (lambda a, b: hcl_loss(a, b, temperature=0.5, tau_plus=0.1, beta=1.0), loop_hcl, PAIR),
    "dcl": (
        lambda a, b: dcl_loss(a, b, temperature=0.5, tau_plus=0.1),
        lambda a, b: loop_hcl(a, b, beta=0.0),
        PAIR,
    ),
    "hcl clamped": (
        lambda a, b: hcl_loss(a, b, temperature=0.5, tau_plus=0.5, beta=1.0),
        lambda a, b: loop_hcl(a, b, tau_plus=0.5),
        (PAIR[0], PAIR[0] + 0.01 * PAIR[1]),
    ),
    "barlow_twins": (barlow_twins_loss, loop_barlow, PAIR),
    "vicreg": (vicreg_loss, loop_vicreg, PAIR),
    "simsiam": (simsiam_loss, loop_simsiam, (*PAIR, raw(4, 5, seed=2), raw(4, 5, seed=3))),
    "byol": (cosine_loss, loop_byol, PAIR),
    "dino": (
        lambda s, t: dino_loss(
            s, t, torch.full((5,), 0.1).to(s), student_temperature=0.1, teacher_temperature=0.04
        ),
        loop_dino,
        (raw(3, 4, 5), raw(2, 4, 5, seed=1)),
    ),
    "co2": (
        lambda q, k, queue: consistency_loss(q, k, queue, temperature=0.1),
        lambda q, k, queue: loop_relations(q, k, queue, t=0.1, key_t=0.1, divergence=True),
        QUEUE,
    ),
    "ressl": (
        lambda q, k, queue: ressl_loss(q, k, queue, temperature=0.1, key_temperature=0.04),
        lambda q, k, queue: loop_relations(q, k, queue, t=0.1, key_t=0.04, divergence=False),
        QUEUE,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient(name):
    ours, loop, inputs = CASES[name]
    expected, expected_gradients = gradients(loop, inputs)
    value, got = gradients(ours, inputs)
    # Lightly's standardisation divides by std + 1e-5
    exact = 1e-4 if name == "barlow_twins" else 1e-9
    torch.testing.assert_close(value, expected, rtol=exact, atol=exact)
    for g, e in zip(got, expected_gradients):
        torch.testing.assert_close(g, e, rtol=exact, atol=exact)
    with torch.autocast("cpu", torch.bfloat16):
        single = ours(*(x.float() for x in inputs))
    assert single.dtype == torch.float32
    assert float(single) == pytest.approx(float(expected), rel=max(exact, 1e-4))


def test_whitening_gives_the_identity_as_covariance():
    white = whiten(raw(2, 30, 4), 0.0)
    for part in white:
        torch.testing.assert_close(torch.cov(part.T), torch.eye(4, dtype=torch.float64))


def test_w_mse_is_the_distance_of_whitened_views():
    a, b = raw(12, 2), raw(12, 2, seed=1)
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    orders = torch.stack([torch.arange(12), shuffled])
    total = 0.0
    for order in orders:
        for part in order.split(6):
            x, y = whiten(a[part][None], 0.0)[0], whiten(b[part][None], 0.0)[0]
            total += sum(float(2 - 2 * cos(x[i], y[i])) for i in range(6)) / 12
    assert float(w_mse_loss(a, b, orders, size=6)) == pytest.approx(total / 2)
    assert float(w_mse_loss(a, a, orders, size=6)) == pytest.approx(0, abs=1e-12)


def test_w_mse_of_what_has_no_whitening_is_not_a_number():
    """Without a look at each step; the loop ends a run whose loss is none."""
    equal = torch.ones(12, 2, dtype=torch.float64)
    assert w_mse_loss(equal, equal, torch.arange(12)[None], size=6).isnan()
