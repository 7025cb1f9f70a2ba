"""The cost of an update of all ResNet-50 parameters: the momentum (key) encoder's, and LARS's.

    python benchmarks/momentum.py

Baselines: MoCo's `k.data = k.data * m + q.data * (1 - m)`, and LARS as Barlow Twins writes it,
tensor by tensor. Times alternate in one process; the figures that count are the ratios. The last
output is kept in momentum.txt.
"""

from __future__ import annotations

import copy

import torch
from machine import describe, in_turns, print_ratios
from torch import Tensor

from backbench.weights.families.resnet_trunk import build_backbone
from pretrain import optim
from pretrain.methods._momentum import momentum_update

ROUNDS = 15


def moco_update(keys: list[Tensor], queries: list[Tensor]) -> None:
    for k, q in zip(keys, queries):
        k.data = k.data * 0.999 + q.data * (1 - 0.999)


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
                scale = torch.where(slope > 0, group["eta"] * size / slope, one)
                update = update.mul(torch.where(size > 0, scale, one))
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                mu = state["mu"]
                mu.mul_(group["momentum"]).add_(update)
                p.add_(mu, alpha=-group["lr"])


def main() -> None:
    torch.set_num_threads(1)
    print(describe())
    query = build_backbone("resnet50")
    a, b, c = ([p.detach().clone() for p in query.parameters()] for _ in range(3))
    source = [p.detach() + 0.01 for p in query.parameters()]
    moco_update(a, source)
    momentum_update(b, source, 0.999)
    apart = max(float((x - y).abs().max()) for x, y in zip(a, b))
    flat = torch.cat([x.flatten() for x in c])
    flat_source = torch.cat([x.flatten() for x in source])
    updates = {
        "k.data = k.data * m + q.data * (1 - m)": lambda: moco_update(a, source),
        "momentum_update": lambda: momentum_update(b, source, 0.999),
        "one flat buffer (the limit)": lambda: flat.lerp_(flat_source, 0.001),
    }
    title = f"momentum update, ResNet-50 (largest difference {apart:.1e})"
    print_ratios(title, in_turns(updates, ROUNDS, warm=2))
    modules = [copy.deepcopy(query) for _ in range(2)]
    for module in (query, *modules):
        for p, like in zip(module.parameters(), source):
            p.grad = like * 0.01
    plain = PlainLars(modules[0].parameters(), 0.1)
    lars = optim.LARS(modules[1].parameters(), 0.1, weight_decay=1e-6)
    sgd = torch.optim.SGD(query.parameters(), 0.1, momentum=0.9, weight_decay=1e-6, fused=True)
    steps = {
        "LARS, plain loop": plain.step,
        "optim.LARS": lars.step,
        "fused SGD (no norms: the floor)": sgd.step,
    }
    print_ratios("optimiser step, ResNet-50", in_turns(steps, ROUNDS, warm=2))


if __name__ == "__main__":
    main()
