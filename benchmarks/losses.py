"""The losses against the code that their papers released, in one run: time, extra memory and
accuracy.

Each pair is timed forward + backward, interleaved A B A B, the least processor time on one thread
(what else runs on the machine only adds to it); the ratio is naive / ours. Accuracy is the largest
gradient error relative to the largest float64 gradient, of the naive form and of ours. Extra memory
is the growth of the resident peak in one step. The last output, with the growth in N, K, M
and d, is kept in losses.txt:

    OMP_NUM_THREADS=1 python benchmarks/losses.py      (--quick: smaller sizes, nothing written)
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.runs import atomic
from pretrain.methods.arb import nearest_base, standardise
from pretrain.methods.jcl import jcl_loss, moments
from pretrain.methods.lorac import lorac_loss, nuclear_norm
from pretrain.methods.mio import mio_loss
from pretrain.methods.moco import CHUNK_ELEMENTS, LEAST_KEYS, infonce_loss

T = 0.2


def unit(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


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


def naive_nuclear(rows: Tensor) -> Tensor:
    """LORAC's code: torch's nuclear norm over the batch."""
    return torch.linalg.matrix_norm(rows, "nuc").sum()


def naive_lorac(queries: Tensor, key: Tensor, queue: Tensor) -> Tensor:
    rows = torch.cat([queries, key[None]])
    rank = torch.linalg.matrix_norm(rows.transpose(0, 1), "nuc")[:, None]
    losses = []
    for q in queries:
        positive = torch.einsum("nc,nc->n", q, key)[:, None] - rank / (len(rows) * 4.0)
        logits = (
            torch.cat([positive, torch.einsum("nc,ck->nk", q, queue.T.clone().detach())], 1) / T
        )
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
    return z @ (vectors * (values.clamp_min(0) + 1e-4).rsqrt().unsqueeze(-2)) @ vectors.mT


Inputs = tuple[Tensor, ...]
Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class LossCase:
    """A row of the table: the released code's form beside ours, on the same inputs."""

    row: str  # of the goals
    what: str
    naive: Loss
    ours: Loss
    inputs: Callable[[], Inputs]
    goal: float = 0.0  # least ratio of their times; 0: none
    gradients: int = 1  # the first inputs that take a gradient; 0: forward only, compared by value


ours_infonce = partial(infonce_loss, temperature=T)
ours_jcl = partial(jcl_loss, temperature=T, lam=4.0)
ours_lorac = partial(lorac_loss, temperature=T, beta=4.0)
ours_mio = partial(mio_loss, temperature=0.5)
ours_base = partial(nearest_base, ridge=1e-4)


def ours_nuclear(rows: Tensor) -> Tensor:
    return nuclear_norm(rows).sum()


@torch.no_grad()
def _two_products(q: Tensor, queue: Tensor) -> None:
    for part in queue.split(max(LEAST_KEYS, CHUNK_ELEMENTS[q.device.type] // len(q))):
        (q @ part.T).exp_() @ part


def two_products(q: Tensor, k: Tensor, queue: Tensor) -> Tensor:
    """The work that every InfoNCE over a queue does: scores, exp, and their gradient."""
    _two_products(q, queue)
    return q.sum()


# The cases, by their sizes: each makes its inputs when it is measured, and forgets them


def infonce_case(n: int, k: int, d: int = 128, *, goal: float = 0.0) -> LossCase:
    def inputs() -> Inputs:
        return unit(n, d), unit(n, d, seed=1), unit(k, d, seed=2)

    what = f"InfoNCE, N {n}, d {d}, K {k}"
    return LossCase("5", what, naive_infonce, ours_infonce, inputs, goal)


def quadratic_case(n: int, m: int, d: int, *, goal: float) -> LossCase:
    def inputs() -> Inputs:
        return unit(n, d), unit(m, n, d, seed=1)

    def naive(q: Tensor, keys: Tensor) -> Tensor:
        return naive_quadratic(q, keys).sum()

    def ours(q: Tensor, keys: Tensor) -> Tensor:
        return moments(q, keys)[1].sum()

    what = f"JCL's quadratic form, N {n}, M' {m}, d {d}"
    return LossCase("6", what, naive, ours, inputs, goal)


def jcl_case(n: int, m: int, d: int) -> LossCase:
    def inputs() -> Inputs:
        return unit(n, d), unit(m, n, d, seed=1), unit(1, d, seed=2)

    what = f"JCL without its queue, N {n}, M' {m}, d {d}"
    return LossCase("6", what, naive_jcl, ours_jcl, inputs)


def nuclear_case(n: int, m: int, d: int, *, goal: float = 0.0) -> LossCase:
    def inputs() -> Inputs:
        return (unit(n, m, d),)

    what = f"nuclear norms, N {n}, M {m}, d {d}"
    return LossCase("7", what, naive_nuclear, ours_nuclear, inputs, goal)


def nearly_equal_case(n: int, m: int, d: int, distance: float) -> LossCase:
    """Views lie `distance` apart, so their matrix is nearly of rank one."""

    def inputs() -> Inputs:
        return (F.normalize(unit(n, 1, d) + distance * unit(n, m, d, seed=1), dim=-1),)

    what = f"the same, M {m}, views {distance:g} apart"
    return LossCase("7", what, naive_nuclear, ours_nuclear, inputs)


def lorac_case(n: int, m: int, k: int, d: int = 128, *, goal: float) -> LossCase:
    def inputs() -> Inputs:
        return unit(m - 1, n, d), unit(n, d, seed=1), unit(k, d, seed=2)

    return LossCase("7b", f"LORAC, N {n}, M {m}, K {k}", naive_lorac, ours_lorac, inputs, goal)


def mio_case(n: int, d: int = 128, *, goal: float = 0.0) -> LossCase:
    def inputs() -> Inputs:
        return unit(n, d), unit(n, d, seed=1)

    return LossCase("8", f"MIO, 2N {2 * n}, d {d}", naive_mio, ours_mio, inputs, goal, gradients=2)


def base_case(n: int, d: int, groups: int, *, goal: float = 0.0) -> LossCase:
    def inputs() -> Inputs:
        z = standardise(torch.randn(n, d, generator=torch.Generator().manual_seed(0)))
        return (z.view(n, groups, d // groups).transpose(0, 1).contiguous(),)

    what = f"ARB base, N {n}, d {d}, {groups} group{'s' if groups > 1 else ''}"
    return LossCase("9", what, naive_base, ours_base, inputs, goal, gradients=0)


def cases(quick: bool) -> list[LossCase]:
    k = 8192 if quick else 65536
    d = 512 if quick else 2048
    return [
        infonce_case(256, k, goal=3.3),
        quadratic_case(512, 5, 128, goal=42.0),
        jcl_case(512, 5, 128),
        nuclear_case(256, 3, 128, goal=3.0),
        nuclear_case(256, 5, 128, goal=3.0),
        nuclear_case(256, 8, 128, goal=3.0),
        nearly_equal_case(256, 5, 128, 1e-2),
        nearly_equal_case(256, 5, 128, 1e-5),
        lorac_case(64, 8, k, goal=1.8),
        mio_case(1024, goal=4.1),
        base_case(d // 4, d, 1, goal=15.0),
        base_case(d // 4, d, 8, goal=1.0),
    ]


def run_once(function: Loss, inputs: Inputs, gradients: int) -> Inputs:
    """The gradients to the first inputs, or the value where `gradients` is 0."""
    leaves = [x.detach().requires_grad_(i < gradients) for i, x in enumerate(inputs)]
    value = function(*leaves)
    if not gradients:
        return (value,)
    value.backward()
    return tuple(x.grad for x in leaves[:gradients] if x.grad is not None)


def seconds(function: Loss, inputs: Inputs, gradients: int) -> float:
    start = time.process_time()
    run_once(function, inputs, gradients)
    return time.process_time() - start


def compare(case: LossCase, repeats: int) -> tuple[float, float]:
    """Least seconds of naive and ours, taken in turns.

    Short ones are repeated up to ten times as often.
    """
    inputs = case.inputs()
    warm = seconds(case.ours, inputs, case.gradients)
    naive, ours = [], []
    for _ in range(max(repeats, min(10 * repeats, int(0.5 / warm)))):
        naive.append(seconds(case.naive, inputs, case.gradients))
        ours.append(seconds(case.ours, inputs, case.gradients))
    return min(naive), min(ours)


def errors(case: LossCase) -> tuple[float, float]:
    """Largest error of naive and ours against the naive form in float64, relative to its largest
    entry."""
    inputs = case.inputs()
    exact = run_once(case.naive, tuple(x.double() for x in inputs), case.gradients)
    out = []
    for function in (case.naive, case.ours):
        worst = 0.0
        for got, want in zip(run_once(function, inputs, case.gradients), exact):
            worst = max(worst, float((got.double() - want).abs().max() / want.abs().max()))
        out.append(worst)
    return out[0], out[1]


def peak_mib(function: Loss, case: LossCase) -> float:
    """Growth of this process's resident memory during one forward + backward (Linux)."""
    inputs = case.inputs()
    run_once(function, inputs, case.gradients)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status("VmRSS")
    run_once(function, inputs, case.gradients)
    return max(0.0, status("VmHWM") - before) / 1024


def status(name: str) -> int:
    """KiB, from the kernel."""
    text = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{name}:\s+(\d+)", text)[0])


# As one size grows and the others stay
SWEEPS: dict[str, dict[int, LossCase]] = {
    "InfoNCE: K (N 256, d 128)": {k: infonce_case(256, k) for k in (1024, 4096, 16384, 65536)},
    "InfoNCE: N (K 16384, d 128)": {n: infonce_case(n, 16384) for n in (32, 128, 512)},
    "InfoNCE: d (N 256, K 16384)": {d: infonce_case(256, 16384, d) for d in (32, 128, 512)},
    "nuclear norms: M (N 256, d 128)": {m: nuclear_case(256, m, 128) for m in (2, 4, 8, 16, 32)},
    "JCL: d (N 256, M' 5)": {d: jcl_case(256, 5, d) for d in (32, 64, 128, 256)},
    "MIO: 2N (d 128)": {2 * n: mio_case(n) for n in (128, 256, 512, 1024)},
    "ARB base: d (N 128, one group)": {d: base_case(128, d, 1) for d in (128, 256, 512, 1024)},
}
Growth = dict[str, list[tuple[int, float, float]]]  # of a sweep: size, naive and our milliseconds


def growth(repeats: int) -> Growth:
    out: Growth = {}
    for name, sweep in SWEEPS.items():
        out[name] = []
        for size, case in sweep.items():
            naive, ours = compare(case, repeats)
            out[name].append((size, 1e3 * naive, 1e3 * ours))
    return out


HEADER = (
    f"{'row':4}{'work':44}{'naive ms':>10}{'ours ms':>9}{'ratio':>7}{'goal':>6}"
    f"{'naive MiB':>11}{'ours MiB':>10}{'naive error':>13}{'ours':>9}"
)


def table_line(case: LossCase, repeats: int) -> str:
    naive, ours = compare(case, repeats)
    naive_error, our_error = errors(case)
    naive_mib, our_mib = peak_mib(case.naive, case), peak_mib(case.ours, case)
    return (
        f"{case.row:4}{case.what:44}{1e3 * naive:10.1f}{1e3 * ours:9.1f}{naive / ours:7.1f}"
        f"{case.goal or math.nan:6.1f}{naive_mib:11.1f}{our_mib:10.1f}{naive_error:13.1e}{our_error:9.1e}"
    )


def limit_line(case: LossCase, products: Loss, repeats: int) -> str:
    """Our time beside that of the products which no form can do without."""
    limit, ours = compare(replace(case, naive=products), repeats)
    beside = f"{1e3 * limit:.1f} ms; ours in turns with it {1e3 * ours:.1f} ms"
    return f"# limit of row {case.row}, two matrix products and exp: {beside}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line.rstrip())
        print(line, flush=True)

    tell(
        f"# torch {torch.__version__}, one thread, float32; ratio = naive / ours; "
        "error: of the gradient, to float64"
    )
    tell(HEADER)
    by_row = {}
    for case in cases(args.quick):
        tell(table_line(case, args.repeats))
        by_row[case.row] = case
    limits = {"5": two_products, "7b": lambda q, k, queue: two_products(q.flatten(0, 1), k, queue)}
    for row, products in limits.items():
        tell(limit_line(by_row[row], products, args.repeats))
    if args.quick:
        return
    sweeps = growth(max(3, args.repeats // 4))
    lines.append("# growth, ms: size naive ours")
    for name, rows in sweeps.items():
        lines.append(f"{name}: " + "; ".join(f"{size} {a:.1f} {b:.1f}" for size, a, b in rows))
    atomic.write_text(Path(__file__).with_suffix(".txt"), "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
