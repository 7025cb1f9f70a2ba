"""The cost of an update of all ResNet-50 parameters: the momentum (key) encoder's, and LARS's.

    python benchmarks/momentum.py [--rounds 15]

Baselines: MoCo's `k.data = k.data * m + q.data * (1 - m)`, and LARS as Barlow Twins writes it,
tensor by tensor. Times alternate in one process; the figures that count are the ratios. The last
output is kept in momentum.txt.
"""

from __future__ import annotations

import argparse
import copy
import statistics

import torch
from machine import describe, in_turns
from torch import Tensor

from backbench.weights.families.resnet_trunk import build_backbone
from pretrain import optim
from pretrain.methods._momentum import momentum_update


def moco_update(keys: list[Tensor], queries: list[Tensor], m: float = 0.999) -> None:
    for k, q in zip(keys, queries):
        k.data = k.data * m + q.data * (1.0 - m)


class PlainLars(torch.optim.Optimizer):
    """The customary loop: a temporary for each product, `where` for the cases of a zero norm."""

    def __init__(self, params, lr, weight_decay=1e-6, momentum=0.9, eta=0.001):
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eta": eta}
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad.add(p, alpha=group["weight_decay"])
                size, slope = torch.norm(p), torch.norm(update)
                one = torch.ones_like(size)
                scale = torch.where(
                    size > 0, torch.where(slope > 0, group["eta"] * size / slope, one), one
                )
                update = update.mul(scale)
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                mu = state["mu"]
                mu.mul_(group["momentum"]).add_(update)
                p.add_(mu, alpha=-group["lr"])


def compare(title: str, ways: dict, rounds: int) -> None:
    times = in_turns(ways, rounds, warm=2)
    base = statistics.median(next(iter(times.values())))
    print(f"\n{title}")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"  {name:44} {1000 * median:7.1f} ms   {base / median:5.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(describe())
    query = build_backbone("resnet50")
    a, b, c = ([p.detach().clone() for p in query.parameters()] for _ in range(3))
    source = [p.detach() + 0.01 for p in query.parameters()]
    moco_update(a, source)
    momentum_update(b, source, 0.999)
    apart = max(float((x - y).abs().max()) for x, y in zip(a, b))
    flat, flat_source = (
        torch.cat([x.flatten() for x in c]),
        torch.cat([x.flatten() for x in source]),
    )
    compare(
        f"momentum update, ResNet-50 (largest difference {apart:.1e})",
        {
            "k.data = k.data * m + q.data * (1 - m)": lambda: moco_update(a, source),
            "momentum_update": lambda: momentum_update(b, source, 0.999),
            "one flat buffer (the limit)": lambda: flat.lerp_(flat_source, 0.001),
        },
        args.rounds,
    )
    modules = [copy.deepcopy(query) for _ in range(2)]
    for module in (query, *modules):
        for p, like in zip(module.parameters(), source):
            p.grad = like * 0.01
    plain = PlainLars(modules[0].parameters(), 0.1)
    lars = optim.LARS(modules[1].parameters(), 0.1, weight_decay=1e-6)
    sgd = torch.optim.SGD(query.parameters(), 0.1, momentum=0.9, weight_decay=1e-6, fused=True)
    compare(
        "optimiser step, ResNet-50",
        {
            "LARS, plain loop": plain.step,
            "optim.LARS": lars.step,
            "fused SGD (no norms: the floor)": sgd.step,
        },
        args.rounds,
    )


if __name__ == "__main__":
    main()
