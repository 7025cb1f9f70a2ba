"""One pretraining step on the same tensors: ours beside lightly's and solo-learn's MoCo v2,
ResNet-18, 32 px, batch 64; and updates of ResNet-50's parameters, as MoCo and Barlow Twins write them.

lightly: its own modules and functions, as its MoCo example uses them. solo-learn: its symmetric MoCo
v2+ step, written here after its method (both views through both encoders, the queue cloned, logits
of positive and queue concatenated, parameters averaged one by one). gpu.py has the steps on a GPU.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from machine import Work, least, print_ratios
from torch import Tensor, nn

from backbench.parallel import precision
from backbench.pretrain import optim
from backbench.pretrain.method import Batch, Method, Setup, build_method
from backbench.pretrain.methods import moco
from backbench.pretrain.methods._heads import MOCO_HEAD
from backbench.pretrain.methods._momentum import momentum_update
from backbench.weights.families.resnet_trunk import build_backbone

ROUNDS = 5


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


def lightly_step(sizes: Sizes, views: list[Tensor], cast: bool) -> Work:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import MoCoProjectionHead
    from lightly.models.utils import (
        batch_shuffle,
        batch_unshuffle,
        deactivate_requires_grad,
        update_momentum,
    )

    trunk = sizes.trunk()
    head = MoCoProjectionHead(trunk.feature_dim, trunk.feature_dim, 128).to(
        sizes.device
    )
    trunk_m, head_m = copy.deepcopy(trunk), copy.deepcopy(head)
    deactivate_requires_grad(trunk_m)
    deactivate_requires_grad(head_m)
    criterion = NTXentLoss(temperature=0.2, memory_bank_size=(sizes.queue, 128)).to(
        sizes.device
    )
    params = [*trunk.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.03, momentum=0.9, weight_decay=1e-4)

    def step() -> None:
        update_momentum(trunk, trunk_m, m=0.999)
        update_momentum(head, head_m, m=0.999)
        with torch.autocast(sizes.device, torch.bfloat16, enabled=cast):
            query = head(trunk(views[0])).flatten(start_dim=1)
            with torch.no_grad():
                shuffled, order = batch_shuffle(views[1])
                key = batch_unshuffle(
                    head_m(trunk_m(shuffled)).flatten(start_dim=1), order
                )
        loss = criterion(query.float(), key.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def solo_step(sizes: Sizes, views: list[Tensor], cast: bool) -> Work:
    trunk = sizes.trunk()
    width = trunk.feature_dim
    head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 128)).to(
        sizes.device
    )
    trunk_m, head_m = copy.deepcopy(trunk), copy.deepcopy(head)
    queue = F.normalize(torch.randn(2, 128, sizes.queue, device=sizes.device), dim=1)
    position = 0
    params = [*trunk.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.03, momentum=0.9, weight_decay=1e-4)

    def infonce(q: Tensor, k: Tensor, negatives: Tensor) -> Tensor:
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, negatives)
        logits = torch.cat([positive, negative], dim=1) / 0.2
        return F.cross_entropy(
            logits, torch.zeros(len(q), dtype=torch.long, device=q.device)
        )

    def step() -> None:
        nonlocal position
        with torch.autocast(sizes.device, torch.bfloat16, enabled=cast):
            q = [F.normalize(head(trunk(v)).float(), dim=1) for v in views]
            with torch.no_grad():
                k = [F.normalize(head_m(trunk_m(v)).float(), dim=1) for v in views]
        negatives = queue.clone().detach()
        loss = (
            infonce(q[0], k[1], negatives[1]) + infonce(q[1], k[0], negatives[0])
        ) / 2
        queue[:, :, position : position + sizes.batch] = torch.stack(k).permute(0, 2, 1)
        position = (position + sizes.batch) % sizes.queue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for online, average in ((trunk, trunk_m), (head, head_m)):
            for p, p_m in zip(online.parameters(), average.parameters()):
                p_m.data = 0.999 * p_m.data + 0.001 * p.data

    return step


def our_step(sizes: Sizes, views: list[Tensor], cast: bool, *, symmetric: bool) -> Work:
    config = moco.Config(
        name="moco", head=MOCO_HEAD, queue=sizes.queue, symmetric=symmetric
    )
    setup = Setup(batch_size=sizes.batch, views=2, seed=0, images=10_000, classes=10)
    method = build_method(config, sizes.trunk(), setup).to(sizes.device)
    method = method.to(memory_format=torch.channels_last)
    params = [p for p in method.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(
        params, lr=0.03, momentum=0.9, weight_decay=1e-4, fused=True
    )
    # As views.py delivers them
    views = [v.contiguous(memory_format=torch.channels_last) for v in views]
    cast_to = partial(torch.autocast, sizes.device, torch.bfloat16, enabled=cast)
    return method_step(method, optimizer, views, cast_to, epoch=0, progress=0.0)


def method_step(
    method: Method,
    optimizer: torch.optim.Optimizer,
    views: list[Tensor],
    computing: Callable[[], AbstractContextManager[object]],
    **when: float,
) -> Work:
    """The loop's step on views that are there."""
    index = torch.arange(len(views[0]), device=views[0].device)
    count = 0

    def step() -> None:
        nonlocal count
        batch = Batch(
            views=views, labels=None, index=index, step=count, epochs=200, **when
        )
        with computing():
            loss = method(batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        method.after_step(when["progress"])
        count += 1

    return step


def of_all(sizes: Sizes, views: list[Tensor], cast: bool) -> dict[str, Work]:
    """Their step and ours, for one view's loss and for the symmetric one."""
    return {
        "lightly": lightly_step(sizes, views, cast),
        "ours": our_step(sizes, views, cast, symmetric=False),
        "solo-learn, symmetric": solo_step(sizes, views, cast),
        "ours, symmetric": our_step(sizes, views, cast, symmetric=True),
    }


def moco_update(keys: list[Tensor], queries: list[Tensor]) -> None:
    for k, q in zip(keys, queries):
        k.data = k.data * 0.999 + q.data * (1 - 0.999)


def plain_lars(network: nn.Module) -> Work:
    """The customary loop: a temporary for each product, `where` for the cases of a zero norm."""
    momenta = {p: torch.zeros_like(p) for p in network.parameters()}

    @torch.no_grad()
    def step() -> None:
        for p, momentum in momenta.items():
            assert p.grad is not None
            update = p.grad.add(p, alpha=1e-6)
            size, slope = torch.norm(p), torch.norm(update)
            one = torch.ones_like(size)
            scale = torch.where(slope > 0, 0.001 * size / slope, one)
            momentum.mul_(0.9).add_(update.mul(torch.where(size > 0, scale, one)))
            p.add_(momentum, alpha=-0.1)

    return step


def updates() -> None:
    """The momentum (key) encoder's update and LARS's, of all ResNet-50 parameters."""
    network = build_backbone("resnet50")
    keys, ours, flat = (
        [p.detach().clone() for p in network.parameters()] for _ in range(3)
    )
    queries = [p.detach() + 0.01 for p in network.parameters()]
    moco_update(keys, queries)
    momentum_update(ours, queries, 0.999)
    apart = max(float((x - y).abs().max()) for x, y in zip(keys, ours))
    buffer = torch.cat([x.flatten() for x in flat])
    target = torch.cat([x.flatten() for x in queries])
    ways: dict[str, Work] = {
        "the papers' loop": lambda: moco_update(keys, queries),
        "momentum_update": lambda: momentum_update(ours, queries, 0.999),
        "limit: one flat buffer": lambda: buffer.lerp_(target, 0.001),
    }
    note = f"largest difference {apart:.1e}"
    print_ratios("key encoder's update", least(ways, 3 * ROUNDS), note=note)
    networks = [network, copy.deepcopy(network), copy.deepcopy(network)]
    for module in networks:
        for p, like in zip(module.parameters(), queries):
            p.grad = like * 0.01
    lars = optim.LARS(networks[1].parameters(), 0.1, weight_decay=1e-6)
    sgd = torch.optim.SGD(
        network.parameters(), 0.1, momentum=0.9, weight_decay=1e-6, fused=True
    )
    ways = {
        "plain loop": plain_lars(networks[2]),
        "optim.LARS": lars.step,
        "limit: fused SGD, without norms": sgd.step,
    }
    print_ratios("LARS's step", least(ways, 3 * ROUNDS))


def run(quick: bool) -> None:
    sizes = Sizes(batch=16) if quick else Sizes()
    torch.manual_seed(1)
    views = [torch.randn(sizes.batch, 3, sizes.pixels, sizes.pixels) for _ in range(2)]
    for cast, way in ((False, "fp32"), (True, "bf16")):
        # No recipe is advised to use bf16 there
        if cast and not precision.bf16_is_quick("cpu"):
            continue
        seconds = least(of_all(sizes, views, cast), 1 if quick else ROUNDS)
        for loss, symmetric in (("MoCo v2", False), ("MoCo v2, symmetric,", True)):
            chosen = {
                name.partition(",")[0]: each
                for name, each in seconds.items()
                if ("symmetric" in name) == symmetric
            }
            title = f"{loss} in {way}"
            print_ratios(title, chosen, sizes.batch)
    updates()
