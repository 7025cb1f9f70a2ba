"""What CLLR's regulariser costs beside its hosts, as its Table 0.3 asks, in small: time of a step,
and the most memory that a process of its own held.

    python benchmarks/cllr_cost.py [--rounds 3] [--batch 16]

ResNet-18 at 32 pixels, so L is 512 x 512, Adam, one thread; SimCLR and DCL, and each with the
penalties of Eq. 6 and 7. Steps alternate in one process, the least processor time counts, the ratio
is to the host (a busy machine moves it by a tenth); `term` is the regulariser alone with its
gradients, and its share of the host's step. The printed table has hours of four V100: 2.3 of SimCLR
on CIFAR-10 at batch 512 are 2.3 with l2,1 and 2.4 with the nuclear norm, 1.00 and 1.04 times. The
last output is kept in cllr_cost.txt. At full size, on the hardware that there is: `backbench launch
run cllr_table03`, then `backbench paper cllr:0.3 RUNS`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from machine import describe

from backbench.recipes import config
from backbench.runs import atomic
from backbench.weights.families.resnet_trunk import build_backbone
from pretrain.method import Batch, Setup, build_method, choose_config
from pretrain.methods.cllr import cllr_regularizer

HEAD = {"hidden": 512, "dim": 256}
HOSTS = ("simclr", "dcl")
Norm = Literal["l21", "nuclear"]
PENALTIES: dict[str, Norm] = {"l2,1": "l21", "nuclear": "nuclear"}
PIXELS = 32


def settings(host: str, norm: Norm | None) -> dict[str, Any]:
    inner = {"name": host, "head": HEAD}
    return inner if norm is None else {"name": "cllr", "inner": inner, "norm": norm, "kept": 256}


def stepper(of: dict[str, Any], batch_size: int) -> Callable[[], None]:
    """What makes one step of these settings of a method."""
    torch.manual_seed(0)
    setup = Setup(batch_size=batch_size, views=2, seed=0, images=10_000, classes=10)
    recipe = config.build(choose_config(of), of, where="benchmark")
    method = build_method(recipe, build_backbone("resnet18", "conv3"), setup)
    optimizer = torch.optim.Adam(method.parameters(), lr=1e-3, weight_decay=1e-6)
    views = [torch.randn(batch_size, 3, PIXELS, PIXELS) for _ in range(2)]
    index = torch.arange(batch_size)
    batch = Batch(views=views, labels=None, index=index, step=0, epoch=0, epochs=100, progress=0.0)

    def step() -> None:
        method(batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def regulariser(norm: Norm, batch_size: int) -> Callable[[], None]:
    """The term alone, on phi of two views, with the gradients of phi and L."""
    phi = torch.randn(2 * batch_size, 512, requires_grad=True)
    projection = torch.eye(512, requires_grad=True)

    def step() -> None:
        cllr_regularizer(phi, projection, alpha=10.0, norm=norm).backward()
        phi.grad = projection.grad = None

    return step


def times(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The least seconds of the processor that each took, in turns; the first turn is not counted."""
    least = dict.fromkeys(ways, float("inf"))
    for turn in range(rounds + 1):
        for name, step in ways.items():
            began = time.process_time()
            step()
            if turn:
                least[name] = min(least[name], time.process_time() - began)
    return least


def peak(of: dict[str, Any], batch_size: int) -> float:
    """The most MiB that this process held by the end of two steps."""
    step = stepper(of, batch_size)
    step()
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # Linux counts in KiB


def peak_alone(of: dict[str, Any], batch_size: int) -> float:
    """In a process of its own, which begins with what this one has imported."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=fork) as pool:
        return pool.submit(peak, of, batch_size).result()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"{describe()}; batch {args.batch}",
        f"{'method':24}{'ms':>7}{'ratio':>7}{'term ms':>9}{'of step':>9}{'MiB':>7}",
    ]
    norms: dict[tuple[str, str], Norm | None] = {}
    for host in HOSTS:
        norms[host, host] = None
        norms |= {(host, f"CLLR({host} + {k})"): v for k, v in PENALTIES.items()}
    # Memory first: a child's peak begins where this process stands when it forks
    peaks = {key: peak_alone(settings(key[0], v), args.batch) for key, v in norms.items()}
    for host in HOSTS:
        mine = {name: norm for (of, name), norm in norms.items() if of == host}
        ways = {name: stepper(settings(host, norm), args.batch) for name, norm in mine.items()}
        took = times(ways, args.rounds)
        for name, norm in mine.items():
            term = 0.0
            if norm is not None:
                term = times({"": regulariser(norm, args.batch)}, 2 * args.rounds)[""]
            line = f"{name:24}{1000 * took[name]:7.0f}{took[name] / took[host]:7.2f}"
            line += f"{1000 * term:9.1f}{term / took[host]:9.1%}{peaks[host, name]:7.0f}"
            lines.append(line)
            print(lines[-1], flush=True)
    atomic.write_text(Path(__file__).with_suffix(".txt"), "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
