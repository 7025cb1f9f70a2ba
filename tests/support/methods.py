"""Every method in small, float64, and three steps of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from backbench.parallel import batchnorm, distributed
from backbench.pretrain.first_step import FirstStep
from backbench.pretrain.method import Batch, Method, Setup, build_method, choose_config
from backbench.recipes import config as recipes
from backbench.weights.families.pair_trunk import LabPair
from support.pretended_gpu import PretendedGpu

HEAD = {"hidden": 12, "dim": 6}
BOTH = {"head": HEAD, "predictor": HEAD}
QUEUE = {"head": HEAD, "queue": 32, "momentum": 0.9, "groups": 2}
CROPS = {**QUEUE, "groups": 4, "views": [8, 8, 8, 6, 6]}
LORAC = {"name": "lorac", **CROPS, "prior_from": 0.0}
SWAV = {"name": "swav", "head": HEAD, "prototypes": 10}
DINO = {"name": "dino", "hidden": 12, "bottleneck": 6, "dim": 9}


def cllr(inner: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"name": "cllr", "inner": inner, **settings}


# name -> method and its settings; `views` are the crops' sizes
CASES: dict[str, dict[str, Any]] = {
    "moco": {"name": "moco", **QUEUE, "groups": 8},
    "moco local": {"name": "moco", **QUEUE},
    "moco sync symmetric": {
        "name": "moco",
        **QUEUE,
        "query_batchnorm": "sync",
        "symmetric": True,
    },
    "moco two queues": {
        "name": "moco",
        **QUEUE,
        "symmetric": True,
        "queue_per_view": True,
    },
    "moco_m": {"name": "moco_m", **CROPS},
    "moco_m as released": {"name": "moco_m", **CROPS, "released_pairs": True},
    "lorac": {**LORAC, "beta": 2.0},
    "lorac one key": {**LORAC, "groups": 2, "keys": 1, "views": [8, 8, 8], "beta": 2.0},
    "lorac batch prior": {**LORAC, "beta": 2.0, "prior": "batch"},
    "lorac as released": {**LORAC, "drop_tau": True, "swap_queues": True},
    "jcl": {"name": "jcl", **QUEUE, "groups": 8, "views": [8] * 4},
    "mio": {"name": "mio", "head": HEAD, "l2_weight": 1.0},
    "arb": {"name": "arb", "head": {**HEAD, "dim": 12}, "groups": 3},
    "cllr on simclr": cllr({"name": "simclr", "head": HEAD}, alpha=0.1),
    "cllr l21 on moco": cllr({"name": "moco", **QUEUE}, norm="l21", rows=5),
    "cllr as released": cllr(
        {"name": "simclr", "head": HEAD}, norm="none", reconstruction="released"
    ),
    "cllr on byol": cllr({"name": "byol", **BOTH}, norm="l21"),
    "cllr on simsiam": cllr({"name": "simsiam", **BOTH}, norm="none"),
    "cllr on cmc": cllr({"name": "cmc", "head": HEAD, "negatives": 7}, views=[8]),
    "simclr": {"name": "simclr", "head": HEAD},
    "byol": {"name": "byol", **BOTH},
    "simsiam": {"name": "simsiam", **BOTH},
    "barlow_twins": {"name": "barlow_twins", "head": HEAD},
    "vicreg": {"name": "vicreg", "head": HEAD},
    "swav": {**SWAV, "views": [8, 8, 8, 6], "freeze_epochs": 0},
    "swav frozen": {**SWAV, "views": [8, 8]},
    "swav queue": {**SWAV, "queue": 32, "queue_from": 0, "freeze_epochs": 0},
    "swav one by one": {**SWAV, "together": False, "views": [8, 8], "freeze_epochs": 0},
    "dino one by one": {**DINO, "together": False, "views": [8, 8]},
    "dino": {**DINO, "views": [8, 8, 6], "freeze_epochs": 0},
    "dino frozen": {**DINO, "batchnorm": True},
    "w_mse": {"name": "w_mse", "head": {"hidden": 12, "dim": 2}, "size": 8},
    "dcl": {"name": "dcl", "head": HEAD},
    "hcl": {"name": "hcl", "head": HEAD},
    "co2": {"name": "co2", **QUEUE},
    "ressl": {"name": "ressl", **QUEUE},
    "ressl not shuffled": {"name": "ressl", **QUEUE, "shuffle": False},
    "cmc": {"name": "cmc", "head": HEAD, "negatives": 7, "views": [8]},
    "supervised": {"name": "supervised", "groups": 2, "views": [8]},
}
BATCH = 16


class TinyTrunk(nn.Sequential):
    feature_dim = 8

    def __init__(self, channels: int = 3) -> None:
        super().__init__(
            nn.Conv2d(channels, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 8),
        )


class TinyPair(LabPair):
    """CMC's, around two of them."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.l_to_ab = TinyTrunk(1)
        self.ab_to_l = TinyTrunk(2)
        self.feature_dim = 16


def trunk_of(case: dict[str, Any]) -> nn.Module:
    """The kind of trunk that the case's method trains."""
    if "cmc" in (case["name"], case.get("inner", {}).get("name")):
        return TinyPair()
    return TinyTrunk()


def build(case: dict[str, Any]) -> tuple[Method, list[int]]:
    torch.manual_seed(0)
    settings = dict(case)
    sizes = settings.pop("views", [8, 8])
    config = recipes.build(choose_config(settings), settings, where="test")
    setup = Setup(batch_size=BATCH, views=len(sizes), seed=0, images=40, classes=5)
    method = build_method(config, trunk_of(case), setup).double()
    if method.sync_batchnorm:
        batchnorm.convert_sync_batchnorm(method)
    return method, sizes


def train(
    case: dict[str, Any],
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    around: Callable[[int], AbstractContextManager[object]] = lambda step: (
        nullcontext()
    ),
    skips: bool = False,
    wrapped: bool = True,
) -> dict[str, torch.Tensor]:
    """Make three steps, each in `around(step)`. Return the terms, the gradients, and all state at
    the end.

    With `skips` a step whose gradients overflow is left out, as in half precision. With `wrapped`
    the method is in DDP, where there are several ranks.
    """
    method, sizes = build(case)
    method.to(device, dtype)
    ranks = distributed.world_size()
    model = method
    if ranks > 1 and wrapped:
        model = DistributedDataParallel(method)
    optimizer = torch.optim.SGD(
        [p for p in method.parameters() if p.requires_grad], 0.05
    )
    scaler = torch.amp.GradScaler(device, init_scale=1.0, enabled=skips)
    rules = FirstStep(method, case["name"])
    out: dict[str, torch.Tensor] = {}
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        views = []
        for size in sizes:
            shape = (BATCH, 3, size, size)
            drawn = torch.randn(shape, dtype=torch.float64, generator=generator)
            views.append(distributed.local_slice(drawn.to(dtype)))
        labels = torch.randint(5, (BATCH,), generator=generator)
        index = torch.randperm(40, generator=generator)[:BATCH]
        batch = Batch(
            views=views,
            labels=distributed.local_slice(labels),
            index=distributed.local_slice(index),
            step=step,
            epoch=step,
            epochs=3,
            progress=step / 3,
        )
        batch = moved(batch, device)
        with around(step):
            terms = rules.terms(model(batch))
            optimizer.zero_grad()
            scaler.scale(terms["loss"]).backward()
            if not wrapped:
                for parameter in method.parameters():
                    if parameter.requires_grad:
                        dist.all_reduce(parameter.grad)
                        parameter.grad.div_(ranks)
            rules.gradients()
            for name in terms.keys() - {"lambda"}:  # JCL makes it on the CPU
                out[f"{step} {name}"] = terms[name].detach()
            for name, parameter in method.named_parameters():
                if parameter.requires_grad:
                    out[f"{step} grad {name}"] = parameter.grad.clone()
            scaler.step(optimizer)
            scaler.update()
            method.after_step((step + 1) / 3)
            rules.state()
    for name, value in method.state_dict().items():
        out[f"state {name}"] = value.clone()
    return out


def moved(batch: Batch, device: str) -> Batch:
    """Send the batch to the device, as the loop does."""
    assert batch.labels is not None
    return replace(
        batch,
        views=[view.to(device, non_blocking=True) for view in batch.views],
        labels=batch.labels.to(device, non_blocking=True),
        index=batch.index.to(device, non_blocking=True),
    )


def train_on_pretended_gpu(
    case: dict[str, Any], **how: Any
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return what `train` gives on it, and what has waited for the device after the first step."""
    waits: list[str] = []
    with PretendedGpu() as gpu:

        @contextmanager
        def around(step: int) -> Iterator[None]:
            gpu.take()
            yield
            waited = gpu.take()
            if step:
                waits.extend(waited)

        return train(case, device="cuda", around=around, **how), waits
