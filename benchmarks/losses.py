"""The losses against the code that their papers released, each timed forward + backward. Accuracy
is the largest gradient error relative to the largest float64 gradient. Extra memory is the growth
of the resident peak in one step."""

import ctypes
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from machine import least, print_ratios
from torch import Tensor

from backbench.pretrain.methods.arb import nearest_base, standardise
from backbench.pretrain.methods.jcl import jcl_loss, moments
from backbench.pretrain.methods.lorac import lorac_loss, nuclear_norm
from backbench.pretrain.methods.mio import mio_loss
from backbench.pretrain.methods.moco import CHUNK_ELEMENTS, LEAST_KEYS, infonce_loss

T = 0.2
REPEATS = 20


def unit(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1
    )


def naive_infonce(q: Tensor, k: Tensor, queue: Tensor) -> Tensor:
    """MoCo, JCL, LORAC: einsum, cat, cross-entropy, the queue cloned."""
    columns = queue.T.clone().detach()
    positive = torch.einsum("nc,nc->n", q, k)[:, None]
    negative = torch.einsum("nc,ck->nk", q, columns)
    logits = torch.cat([positive, negative], 1) / T
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def naive_quadratic(q: Tensor, keys: Tensor) -> Tensor:
    """JCL's code: q^T Sigma q with the covariance as (N, d, d)."""
    centred = (keys - keys.mean(0)).permute(1, 2, 0)
    sigma = torch.bmm(centred, centred.mT) / len(keys)
    return torch.bmm(torch.bmm(q[:, None], sigma), q[:, :, None]).view(-1)


def naive_jcl(q: Tensor, keys: Tensor, queue: Tensor) -> Tensor:
    positive = (q * keys.mean(0)).sum(1) / T
    own = positive + 4.0 / (2 * T * T) * naive_quadratic(q, keys)
    return (torch.logaddexp(own, (q @ queue.T / T).logsumexp(1)) - positive).mean()


def naive_lorac(queries: Tensor, key: Tensor, queue: Tensor) -> Tensor:
    rows = torch.cat([queries, key[None]])
    rank = torch.linalg.matrix_norm(rows.transpose(0, 1), "nuc")[:, None]
    losses = []
    for q in queries:
        positive = torch.einsum("nc,nc->n", q, key)[:, None] - rank / (len(rows) * 4.0)
        negative = torch.einsum("nc,ck->nk", q, queue.T.clone().detach())
        logits = torch.cat([positive, negative], 1) / T
        losses.append(F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long)))
    return torch.stack(losses).mean()


def naive_mio(a: Tensor, b: Tensor) -> Tensor:
    """Masks over all pairs and log(1 - sigmoid)."""
    z = F.normalize(torch.cat([a, b]), dim=1)
    n = len(a)
    c = torch.sigmoid(z @ z.T / 0.5)
    eye = torch.eye(2 * n, dtype=torch.bool)
    partner = torch.roll(eye, n, 1)
    return -torch.log(c[partner]).mean() - torch.log(1 - c[~(eye | partner)]).mean()


def naive_base(z: Tensor) -> Tensor:
    """ARB: eigenvectors of the d x d matrix."""
    values, vectors = torch.linalg.eigh(z.mT @ z)
    return (
        z @ (vectors * (values.clamp_min(0) + 1e-4).rsqrt().unsqueeze(-2)) @ vectors.mT
    )


Inputs = tuple[Tensor, ...]
Loss = Callable[..., Tensor]
Shape = tuple[int, ...]


def as_they_are(*inputs: Tensor) -> Inputs:
    return inputs


def nearly_equal(apart: float, common: Tensor, own: Tensor) -> Inputs:
    """Views that lie `apart` from one another, so their matrix is nearly of rank one."""
    return (F.normalize(common + apart * own, dim=-1),)


def in_groups(groups: int, features: Tensor) -> Inputs:
    """Standardised features (N, d) as ARB's groups of columns (groups, N, d / groups)."""
    z = standardise(features)
    return (z.view(len(z), groups, -1).transpose(0, 1).contiguous(),)


@dataclass(frozen=True)
class LossCase:
    """A row of the table: the released code's form beside ours, on the same inputs."""

    what: str
    naive: Loss
    ours: Loss
    shapes: tuple[Shape, ...]  # of random unit vectors
    gradients: int = (
        1  # the first inputs that take a gradient; 0: forward only, compared by value
    )
    prepare: Callable[..., Inputs] = (
        as_they_are  # what the functions take, from those vectors
    )

    def inputs(self) -> Inputs:
        """Made when the case is measured, and forgotten with it."""
        return self.prepare(
            *(unit(*shape, seed=i) for i, shape in enumerate(self.shapes))
        )


def ours_quadratic(q: Tensor, keys: Tensor) -> Tensor:
    return moments(q, keys)[1]


# LORAC's code, over the batch
naive_nuclear = partial(torch.linalg.matrix_norm, ord="nuc")
ours_infonce = partial(infonce_loss, temperature=T)
ours_jcl = partial(jcl_loss, temperature=T, lam=4.0)
ours_lorac = partial(lorac_loss, temperature=T, beta=4.0)
ours_mio = partial(mio_loss, temperature=0.5)
ours_base = partial(nearest_base, ridge=1e-4)


def two_products(q: Tensor, k: Tensor, queue: Tensor) -> Tensor:
    """The work that every InfoNCE over a queue does: scores, exp, and their gradient."""
    with torch.no_grad():
        rows = q.flatten(0, -2)
        for part in queue.split(
            max(LEAST_KEYS, CHUNK_ELEMENTS[q.device.type] // len(rows))
        ):
            (rows @ part.T).exp_() @ part
    return q.sum()


def cases(quick: bool) -> list[LossCase]:
    """The table, at the papers' sizes: N images, d dimensions, M views, M' keys, K in the queue."""
    n, d, k = 256, 128, 8192 if quick else 65536
    wide = 512 if quick else 2048
    pair = ((512, d), (5, 512, d))
    queued = ((n, d), (n, d), (k, d))
    quadratic, without = "JCL's quadratic form", "JCL without its queue"
    out = [
        LossCase(f"InfoNCE, K {k}", naive_infonce, ours_infonce, queued),
        LossCase(quadratic, naive_quadratic, ours_quadratic, pair),
        LossCase(without, naive_jcl, ours_jcl, (*pair, (1, d))),
    ]
    for m in (3, 5, 8):
        what = f"nuclear norms, M {m}"
        out.append(LossCase(what, naive_nuclear, nuclear_norm, ((n, m, d),)))
    for apart in (1e-2, 1e-5):
        what, shapes = (
            f"nuclear norms, M 5, views {apart:g} apart",
            ((n, 1, d), (n, 5, d)),
        )
        views = partial(nearly_equal, apart)
        out.append(LossCase(what, naive_nuclear, nuclear_norm, shapes, prepare=views))
    what, shapes = "LORAC, M 8", ((7, 64, d), (64, d), (k, d))
    out.append(LossCase(what, naive_lorac, ours_lorac, shapes))
    shapes = ((1024, d), (1024, d))
    out.append(LossCase("MIO", naive_mio, ours_mio, shapes, gradients=2))
    for groups in (1, 8):
        what = f"ARB's base, {groups} group{'s' if groups > 1 else ''}"
        columns, shapes = partial(in_groups, groups), ((wide // 4, wide),)
        out.append(
            LossCase(what, naive_base, ours_base, shapes, gradients=0, prepare=columns)
        )
    return out


def run_once(function: Loss, inputs: Inputs, gradients: int) -> Inputs:
    """The gradients of the sum to the first inputs, or the value where `gradients` is 0."""
    leaves = [x.detach().requires_grad_(i < gradients) for i, x in enumerate(inputs)]
    value = function(*leaves)
    if not gradients:
        return (value,)
    value.sum().backward()
    return tuple(x.grad for x in leaves[:gradients] if x.grad is not None)


def compare(case: LossCase) -> dict[str, float]:
    """Least seconds of naive and ours; short ones are repeated up to ten times as often."""
    inputs = case.inputs()
    ways = {
        "their code": lambda: run_once(case.naive, inputs, case.gradients),
        "ours": lambda: run_once(case.ours, inputs, case.gradients),
    }
    once = least({"ours": ways["ours"]}, 1)["ours"]
    return least(ways, max(REPEATS, min(10 * REPEATS, int(0.5 / once))))


def errors(case: LossCase) -> tuple[float, float]:
    """Largest error of naive and ours to the naive form in float64, over its largest entry."""
    inputs = case.inputs()
    exact = run_once(case.naive, tuple(x.double() for x in inputs), case.gradients)
    out = []
    for function in (case.naive, case.ours):
        worst = 0.0
        for got, want in zip(run_once(function, inputs, case.gradients), exact):
            worst = max(
                worst, float((got.double() - want).abs().max() / want.abs().max())
            )
        out.append(worst)
    return out[0], out[1]


def peak_mib(function: Loss, case: LossCase) -> float:
    """Growth of this process's resident memory during one forward + backward (Linux)."""
    inputs = case.inputs()
    run_once(function, inputs, case.gradients)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    status = Path("/proc/self/status")  # in KiB
    before = int(re.findall(r"VmRSS:\s+(\d+)", status.read_text())[0])
    run_once(function, inputs, case.gradients)
    peak = int(re.findall(r"VmHWM:\s+(\d+)", status.read_text())[0])
    return max(0, peak - before) / 1024


def run(quick: bool) -> None:
    for case in cases(quick):
        memory = f"extra {peak_mib(case.naive, case):.1f}, {peak_mib(case.ours, case):.1f} MiB"
        theirs, ours = errors(case)
        note = f"{memory}; error {theirs:.1e}, {ours:.1e}"
        print_ratios(case.what, compare(case), note=note)
        # No form can do without those products
        if case.ours in (ours_infonce, ours_lorac):
            limit = compare(replace(case, naive=two_products))
            print(
                f"  two products and exp alone: {limit['their code'] / limit['ours']:.2f} of ours"
            )
