"""One pretraining step on the same tensors: ours beside lightly's and solo-learn's MoCo v2,
ResNet-18, 32 px, batch 64.

    python benchmarks/step.py [--rounds 5]

lightly: its own modules and functions (MoCoProjectionHead, NTXentLoss with a memory bank,
batch_shuffle, update_momentum), as its MoCo example uses them. solo-learn: its symmetric MoCo v2+
step, written here after its method (both views through both encoders, the queue cloned, logits of
positive and queue concatenated, parameters averaged one by one). Times alternate in one process on
one thread; the figures that count are the ratios; gpu.py has the same on a GPU. The last output is
kept in step.txt.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from machine import describe, in_turns
from torch import Tensor, nn

from backbench.weights.families.resnet_trunk import build_backbone
from pretrain.method import Batch, Setup, build_method
from pretrain.methods import moco
from pretrain.methods._heads import MOCO_HEAD

Step = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    device: str = "cpu"
    arch: str = "resnet18"
    stem: str = "conv3"
    batch: int = 64
    pixels: int = 32
    queue: int = 4096

    def trunk(self) -> nn.Module:
        torch.manual_seed(0)
        return build_backbone(self.arch, self.stem).to(self.device)


def lightly_step(sizes: Sizes, views: list[Tensor], cast: bool) -> Step:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import MoCoProjectionHead
    from lightly.models.utils import (
        batch_shuffle,
        batch_unshuffle,
        deactivate_requires_grad,
        update_momentum,
    )

    trunk = sizes.trunk()
    head = MoCoProjectionHead(trunk.feature_dim, trunk.feature_dim, 128).to(sizes.device)
    trunk_m, head_m = copy.deepcopy(trunk), copy.deepcopy(head)
    deactivate_requires_grad(trunk_m)
    deactivate_requires_grad(head_m)
    criterion = NTXentLoss(temperature=0.2, memory_bank_size=(sizes.queue, 128)).to(sizes.device)
    optimizer = torch.optim.SGD(
        [*trunk.parameters(), *head.parameters()], lr=0.03, momentum=0.9, weight_decay=1e-4
    )

    def step() -> None:
        update_momentum(trunk, trunk_m, m=0.999)
        update_momentum(head, head_m, m=0.999)
        with torch.autocast(sizes.device, torch.bfloat16, enabled=cast):
            query = head(trunk(views[0])).flatten(start_dim=1)
            with torch.no_grad():
                shuffled, order = batch_shuffle(views[1])
                key = batch_unshuffle(head_m(trunk_m(shuffled)).flatten(start_dim=1), order)
        loss = criterion(query.float(), key.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def solo_step(sizes: Sizes, views: list[Tensor], cast: bool) -> Step:
    trunk = sizes.trunk()
    width = trunk.feature_dim
    head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 128)).to(sizes.device)
    trunk_m, head_m = copy.deepcopy(trunk), copy.deepcopy(head)
    queue = F.normalize(torch.randn(2, 128, sizes.queue, device=sizes.device), dim=1)
    position = 0
    optimizer = torch.optim.SGD(
        [*trunk.parameters(), *head.parameters()], lr=0.03, momentum=0.9, weight_decay=1e-4
    )

    def infonce(q: Tensor, k: Tensor, negatives: Tensor) -> Tensor:
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, negatives)
        logits = torch.cat([positive, negative], dim=1) / 0.2
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))

    def step() -> None:
        nonlocal position
        with torch.autocast(sizes.device, torch.bfloat16, enabled=cast):
            q = [F.normalize(head(trunk(v)).float(), dim=1) for v in views]
            with torch.no_grad():
                k = [F.normalize(head_m(trunk_m(v)).float(), dim=1) for v in views]
        negatives = queue.clone().detach()
        loss = (infonce(q[0], k[1], negatives[1]) + infonce(q[1], k[0], negatives[0])) / 2
        queue[:, :, position : position + sizes.batch] = torch.stack(k).permute(0, 2, 1)
        position = (position + sizes.batch) % sizes.queue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for online, average in ((trunk, trunk_m), (head, head_m)):
            for p, p_m in zip(online.parameters(), average.parameters()):
                p_m.data = 0.999 * p_m.data + 0.001 * p.data

    return step


def our_step(sizes: Sizes, views: list[Tensor], cast: bool, *, symmetric: bool) -> Step:
    config = moco.Config(name="moco", head=MOCO_HEAD, queue=sizes.queue, symmetric=symmetric)
    setup = Setup(batch_size=sizes.batch, views=2, seed=0, images=10_000, classes=10)
    method = build_method(config, sizes.trunk(), setup).to(
        sizes.device, memory_format=torch.channels_last
    )
    params = [p for p in method.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.03, momentum=0.9, weight_decay=1e-4, fused=True)
    # As views.py delivers them
    views = [v.contiguous(memory_format=torch.channels_last) for v in views]
    count = 0

    def step() -> None:
        nonlocal count
        index = torch.arange(sizes.batch)
        batch = Batch(
            views=views, labels=None, index=index, step=count, epoch=0, epochs=200, progress=0.0
        )
        with torch.autocast(sizes.device, torch.bfloat16, enabled=cast):
            loss = method(batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        method.after_step(0.0)
        count += 1

    return step


def compare(sizes: Sizes, base: str, ways: dict[str, Step], rounds: int) -> None:
    times = in_turns(ways, rounds)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in medians.items():
        ratio = medians[base] / seconds
        print(f"  {name:44} {sizes.batch / seconds:8.1f} images/s   {ratio:5.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(describe())
    sizes = Sizes()
    torch.manual_seed(1)
    views = [torch.randn(sizes.batch, 3, sizes.pixels, sizes.pixels) for _ in range(2)]
    names = {False: "fp32", True: "bf16"}
    print(f"\nMoCo v2, {sizes.arch}, {sizes.pixels} px, batch {sizes.batch}, against lightly")
    ways = {f"lightly, {names[c]}": lightly_step(sizes, views, c) for c in names}
    ways |= {f"ours, {names[c]}": our_step(sizes, views, c, symmetric=False) for c in names}
    compare(sizes, next(iter(ways)), ways, args.rounds)
    print("\nthe symmetric loss, against solo-learn")
    ways = {f"solo-learn, {names[c]}": solo_step(sizes, views, c) for c in names}
    ways |= {f"ours, {names[c]}": our_step(sizes, views, c, symmetric=True) for c in names}
    compare(sizes, next(iter(ways)), ways, args.rounds)


if __name__ == "__main__":
    main()
