"""The losses against the code that their papers released, in one run: time, extra memory and accuracy.

Each pair is timed forward + backward, interleaved A B A B, the least processor time on one thread (what else runs on
the machine only adds to it); the ratio is naive / ours. Accuracy is the largest gradient error relative to the largest
float64 gradient, of the naive form and of ours. Extra memory is the growth of the resident peak in one step.
The last output is kept in losses.txt and the growth with N, K, M and d in losses.png:

    OMP_NUM_THREADS=1 python benchmarks/losses.py            (--quick: smaller sizes, nothing written)
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


@dataclass(frozen=True)
class Case:
    row: str  # of the goals
    what: str
    naive: Callable[..., Tensor]
    ours: Callable[..., Tensor]
    inputs: Callable[[], tuple[Tensor, ...]]
    goal: float
    gradients: int = 1  # the first inputs that take a gradient; 0: forward only, compared by value


def ours_infonce(q: Tensor, k: Tensor, queue: Tensor) -> Tensor:
    return infonce_loss(q, k, queue, temperature=T)


@torch.no_grad()
def _two_products(q: Tensor, queue: Tensor) -> None:
    for part in queue.split(max(LEAST_KEYS, CHUNK_ELEMENTS["cpu"] // len(q))):
        (q @ part.T).exp_() @ part


def two_products(q: Tensor, k: Tensor, queue: Tensor) -> Tensor:
    """What no InfoNCE over a queue can do without: scores, exp, and their gradient on its way back."""
    _two_products(q, queue)
    return q.sum()


def ours_jcl(q: Tensor, keys: Tensor, queue: Tensor) -> Tensor:
    return jcl_loss(q, keys, queue, temperature=T, lam=4.0)


def ours_lorac(queries: Tensor, key: Tensor, queue: Tensor) -> Tensor:
    return lorac_loss(queries, key, queue, temperature=T, beta=4.0)


def ours_nuclear(rows: Tensor) -> Tensor:
    return nuclear_norm(rows).sum()


def ours_mio(a: Tensor, b: Tensor) -> Tensor:
    return mio_loss(a, b, temperature=0.5)


def ours_base(z: Tensor) -> Tensor:
    return nearest_base(z, 1e-4)


def nearly_equal(n: int, m: int, d: int, distance: float) -> Tensor:
    return F.normalize(unit(n, 1, d) + distance * unit(n, m, d, seed=1), dim=-1)


def base_input(n: int, d: int, groups: int) -> tuple[Tensor, ...]:
    z = standardise(torch.randn(n, d, generator=torch.Generator().manual_seed(0)))
    return (z.view(n, groups, d // groups).transpose(0, 1).contiguous(),)


def queue_case(n: int, k: int, d: int = 128) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (unit(n, d), unit(n, d, seed=1), unit(k, d, seed=2))


def cases(quick: bool) -> list[Case]:
    k = 8192 if quick else 65536
    d = 512 if quick else 2048
    n = d // 4
    return [
        Case(
            "5",
            f"InfoNCE, N 256, d 128, K {k}",
            naive_infonce,
            ours_infonce,
            queue_case(256, k),
            3.3,
        ),
        Case(
            "6",
            "JCL's quadratic form, N 512, M' 5, d 128",
            lambda q, keys: naive_quadratic(q, keys).sum(),
            lambda q, keys: moments(q, keys)[1].sum(),
            lambda: (unit(512, 128), unit(5, 512, 128, seed=1)),
            42.0,
        ),
        Case(
            "6",
            "JCL without its queue, N 512, M' 5, d 128",
            naive_jcl,
            ours_jcl,
            lambda: (unit(512, 128), unit(5, 512, 128, seed=1), unit(1, 128, seed=2)),
            0.0,
        ),
        *(
            Case(
                "7",
                f"nuclear norms, N 256, M {m}, d 128",
                naive_nuclear,
                ours_nuclear,
                lambda m=m: (unit(256, m, 128),),
                3.0,
            )
            for m in (3, 5, 8)
        ),
        *(
            Case(
                "7",
                f"the same, M 5, views {distance:g} apart",
                naive_nuclear,
                ours_nuclear,
                lambda x=distance: (nearly_equal(256, 5, 128, x),),
                0.0,
            )
            for distance in (1e-2, 1e-5)
        ),
        Case(
            "7b",
            f"LORAC, N 64, M 8, K {k}",
            naive_lorac,
            ours_lorac,
            lambda: (unit(7, 64, 128), unit(64, 128, seed=1), unit(k, 128, seed=2)),
            1.8,
        ),
        Case(
            "8",
            "MIO, 2N 2048, d 128",
            naive_mio,
            ours_mio,
            lambda: (unit(1024, 128), unit(1024, 128, seed=1)),
            4.1,
            gradients=2,
        ),
        *(
            Case(
                "9",
                f"ARB base, N {n}, d {d}, {g} group{'s' if g > 1 else ''}",
                naive_base,
                ours_base,
                lambda g=g: base_input(n, d, g),
                15.0 if g == 1 else 1.0,
                gradients=0,
            )
            for g in (1, 8)
        ),
    ]


def run_once(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], gradients: int
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_(i < gradients) for i, x in enumerate(inputs)]
    value = function(*leaves)
    if not gradients:
        return (value,)
    value.backward()
    return tuple(x.grad for x in leaves[:gradients] if x.grad is not None)


def seconds(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], gradients: int) -> float:
    start = time.process_time()
    run_once(function, inputs, gradients)
    return time.process_time() - start


def compare(case: Case, repeats: int) -> tuple[float, float]:
    """Least seconds of naive and ours, taken in turns; short ones are repeated up to ten times as often."""
    inputs = case.inputs()
    warm = seconds(case.ours, inputs, case.gradients)
    naive, ours = [], []
    for _ in range(max(repeats, min(10 * repeats, int(0.5 / warm)))):
        naive.append(seconds(case.naive, inputs, case.gradients))
        ours.append(seconds(case.ours, inputs, case.gradients))
    return min(naive), min(ours)


def errors(case: Case) -> tuple[float, float]:
    """Largest error of naive and ours against the naive form in float64, relative to its largest entry."""
    inputs = case.inputs()
    exact = run_once(case.naive, tuple(x.double() for x in inputs), case.gradients)
    out = []
    for function in (case.naive, case.ours):
        got = run_once(function, inputs, case.gradients)
        out.append(
            max(float((g.double() - e).abs().max() / e.abs().max()) for g, e in zip(got, exact))
        )
    return out[0], out[1]


def peak_mib(function: Callable[..., Tensor], case: Case) -> float:
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
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))  # type: ignore[union-attr]


def growth(repeats: int) -> dict[str, list[tuple[int, float, float]]]:
    """Milliseconds of naive and ours as one size grows and the others stay."""
    sweeps: dict[str, list[tuple[int, Case]]] = {
        "InfoNCE: K (N 256, d 128)": [
            (k, Case("5", "", naive_infonce, ours_infonce, queue_case(256, k), 0))
            for k in (1024, 4096, 16384, 65536)
        ],
        "InfoNCE: N (K 16384, d 128)": [
            (n, Case("5", "", naive_infonce, ours_infonce, queue_case(n, 16384), 0))
            for n in (32, 128, 512)
        ],
        "InfoNCE: d (N 256, K 16384)": [
            (d, Case("5", "", naive_infonce, ours_infonce, queue_case(256, 16384, d), 0))
            for d in (32, 128, 512)
        ],
        "nuclear norms: M (N 256, d 128)": [
            (m, Case("7", "", naive_nuclear, ours_nuclear, lambda m=m: (unit(256, m, 128),), 0))
            for m in (2, 4, 8, 16, 32)
        ],
        "JCL: d (N 256, M' 5)": [
            (
                d,
                Case(
                    "6",
                    "",
                    naive_jcl,
                    ours_jcl,
                    lambda d=d: (unit(256, d), unit(5, 256, d, seed=1), unit(1, d, seed=2)),
                    0,
                ),
            )
            for d in (32, 64, 128, 256)
        ],
        "MIO: 2N (d 128)": [
            (
                2 * n,
                Case(
                    "8",
                    "",
                    naive_mio,
                    ours_mio,
                    lambda n=n: (unit(n, 128), unit(n, 128, seed=1)),
                    0,
                    2,
                ),
            )
            for n in (128, 256, 512, 1024)
        ],
        "ARB base: d (N 128, one group)": [
            (d, Case("9", "", naive_base, ours_base, lambda d=d: base_input(128, d, 1), 0, 0))
            for d in (128, 256, 512, 1024)
        ],
    }
    out: dict[str, list[tuple[int, float, float]]] = {}
    for name, sweep in sweeps.items():
        out[name] = []
        for size, case in sweep:
            naive, ours = compare(case, repeats)
            out[name].append((size, 1e3 * naive, 1e3 * ours))
    return out


def draw(sweeps: dict[str, list[tuple[int, float, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2, math.ceil(len(sweeps) / 2), figsize=(11, 5), layout="constrained"
    )
    for axis in axes.flat[len(sweeps) :]:
        axis.axis("off")
    for axis, (name, rows) in zip(axes.flat, sweeps.items()):
        for column, label in ((1, "naive"), (2, "backbench")):
            axis.loglog(
                [r[0] for r in rows], [r[column] for r in rows], marker="o", ms=3, label=label
            )
        axis.minorticks_off()
        axis.set_xticks([r[0] for r in rows], [str(r[0]) for r in rows])
        axis.set_title(name, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set_ylabel("ms, forward + backward", fontsize=7)
    axes.flat[0].legend(fontsize=7)
    with atomic.atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"# torch {torch.__version__}, one thread, float32; ratio = naive / ours; error: of the gradient, to float64",
        f"{'row':4}{'work':44}{'naive ms':>10}{'ours ms':>9}{'ratio':>7}{'goal':>6}"
        f"{'naive MiB':>11}{'ours MiB':>10}{'naive error':>13}{'ours':>9}",
    ]
    print("\n".join(lines), flush=True)
    for case in cases(args.quick):
        naive, ours = compare(case, args.repeats)
        naive_error, our_error = errors(case)
        memory = [peak_mib(function, case) for function in (case.naive, case.ours)]
        lines.append(
            f"{case.row:4}{case.what:44}{1e3 * naive:10.1f}{1e3 * ours:9.1f}{naive / ours:7.1f}"
            f"{case.goal or math.nan:6.1f}{memory[0]:11.1f}{memory[1]:10.1f}{naive_error:13.1e}{our_error:9.1e}"
        )
        print(lines[-1], flush=True)
    by_row = {case.row: case for case in cases(args.quick)}
    limits = {"5": two_products, "7b": lambda q, k, queue: two_products(q.flatten(0, 1), k, queue)}
    for row, products in limits.items():
        limit, ours = compare(replace(by_row[row], naive=products), args.repeats)
        beside = f"{1e3 * limit:.1f} ms; ours in turns with it {1e3 * ours:.1f} ms"
        lines.append(f"# limit of row {row}, two matrix products and exp: {beside}")
        print(lines[-1], flush=True)
    if not args.quick:
        sweeps = growth(max(3, args.repeats // 4))
        lines.append("# growth, ms: size naive ours")
        for name, rows in sweeps.items():
            lines.append(f"{name}: " + "; ".join(f"{size} {a:.1f} {b:.1f}" for size, a, b in rows))
        draw(sweeps, Path(__file__).with_suffix(".png"))
        atomic.write_text(
            Path(__file__).with_suffix(".txt"), "\n".join(line.rstrip() for line in lines) + "\n"
        )


if __name__ == "__main__":
    main()
