"""Every method, three steps in float64: gloo ranks with a part of the batch each equal one process
with the whole batch, in loss, gradients, weights and state (queues and running statistics). Two
ranks for every method; four and eight for those with batch norm in groups."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from backbench.errors import BadInput
from backbench.runs import batchnorm, distributed, division
from pretrain.first_step import FirstStep
from pretrain.method import Batch, Method, Setup, build_method, choose_config

HEAD = {"hidden": 12, "dim": 6}
QUEUE = {"head": HEAD, "queue": 32, "momentum": 0.9, "groups": 2}
CROPS = {**QUEUE, "groups": 4, "views": [8, 8, 8, 6, 6]}
# name -> method and its settings; `views` are the crops' sizes
CASES: dict[str, dict[str, Any]] = {
    "moco": {"name": "moco", **QUEUE, "groups": 8},
    "moco local": {"name": "moco", **QUEUE},
    "moco sync symmetric": {"name": "moco", **QUEUE, "query_batchnorm": "sync", "symmetric": True},
    "moco_m": {"name": "moco_m", **CROPS},
    "lorac": {"name": "lorac", **CROPS, "beta": 2.0, "prior_from": 0.0},
    "lorac one key": {
        "name": "lorac",
        **QUEUE,
        "keys": 1,
        "views": [8, 8, 8],
        "beta": 2.0,
        "prior_from": 0.0,
    },
    "lorac batch prior": {
        "name": "lorac",
        **CROPS,
        "beta": 2.0,
        "prior": "batch",
        "prior_from": 0.0,
    },
    "lorac as released": {
        "name": "lorac",
        **CROPS,
        "prior_from": 0.0,
        "drop_tau": True,
        "swap_queues": True,
    },
    "jcl": {"name": "jcl", **QUEUE, "groups": 8, "views": [8] * 4},
    "mio": {"name": "mio", "head": HEAD, "l2_weight": 1.0},
    "arb": {"name": "arb", "head": {**HEAD, "dim": 12}, "groups": 3},
    "cllr on simclr": {"name": "cllr", "inner": {"name": "simclr", "head": HEAD}, "alpha": 0.1},
    "cllr l21 on moco": {
        "name": "cllr",
        "inner": {"name": "moco", **QUEUE},
        "norm": "l21",
        "rows": 5,
    },
    "cllr as released": {
        "name": "cllr",
        "inner": {"name": "simclr", "head": HEAD},
        "norm": "none",
        "reconstruction": "released",
    },
    "cllr on byol": {
        "name": "cllr",
        "inner": {"name": "byol", "head": HEAD, "predictor": HEAD},
        "norm": "l21",
    },
    "cllr on simsiam": {
        "name": "cllr",
        "inner": {"name": "simsiam", "head": HEAD, "predictor": HEAD},
        "norm": "none",
    },
    "cllr on cmc": {
        "name": "cllr",
        "inner": {"name": "cmc", "head": HEAD, "negatives": 7},
        "views": [8],
    },
    "simclr": {"name": "simclr", "head": HEAD},
    "byol": {"name": "byol", "head": HEAD, "predictor": HEAD},
    "simsiam": {"name": "simsiam", "head": HEAD, "predictor": HEAD},
    "barlow_twins": {"name": "barlow_twins", "head": HEAD},
    "vicreg": {"name": "vicreg", "head": HEAD},
    "swav": {
        "name": "swav",
        "head": HEAD,
        "prototypes": 10,
        "views": [8, 8, 8, 6],
        "freeze_epochs": 0,
    },
    "swav frozen": {"name": "swav", "head": HEAD, "prototypes": 10, "views": [8, 8]},
    "swav queue": {
        "name": "swav",
        "head": HEAD,
        "prototypes": 10,
        "queue": 32,
        "queue_from": 0,
        "freeze_epochs": 0,
    },
    "dino": {
        "name": "dino",
        "hidden": 12,
        "bottleneck": 6,
        "dim": 9,
        "views": [8, 8, 6],
        "freeze_epochs": 0,
    },
    "dino frozen": {"name": "dino", "hidden": 12, "bottleneck": 6, "dim": 9, "batchnorm": True},
    "w_mse": {"name": "w_mse", "head": {"hidden": 12, "dim": 2}, "size": 8, "repeats": 2},
    "dcl": {"name": "dcl", "head": HEAD},
    "hcl": {"name": "hcl", "head": HEAD},
    "co2": {"name": "co2", **QUEUE},
    "ressl": {"name": "ressl", **QUEUE},
    "cmc": {"name": "cmc", "head": HEAD, "negatives": 7, "views": [8]},
    "supervised": {"name": "supervised", "groups": 2, "views": [8]},
}
# Batch norm in the papers' groups: as many as ranks, more, and fewer, where a group spans ranks
GROUPED = ("lorac", "moco_m", "moco", "jcl", "supervised", "co2")
SPANNED = ("moco local", "lorac one key")  # two groups: on four ranks each spans two
BATCH = 16


class TinyTrunk(nn.Sequential):
    feature_dim = 8

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(6, 8),
        )  # fmt: skip


def build(case: dict[str, Any]) -> tuple[Method, list[int]]:
    torch.manual_seed(0)
    settings = dict(case)
    sizes = settings.pop("views", [8, 8])
    from backbench.config import build as build_config

    config = build_config(choose_config(settings, "test", "method"), settings, where="test")
    setup = Setup(batch_size=BATCH, views=len(sizes), seed=0, images=40, classes=5)
    method = build_method(config, TinyTrunk(), setup).double()
    if method.sync_batchnorm:
        batchnorm.convert_sync_batchnorm(method)
    return method, sizes


def train(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Three steps; what was returned, the gradients, and all state at the end."""
    method, sizes = build(case)
    model = DistributedDataParallel(method) if distributed.world_size() > 1 else method
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], 0.05)
    rules = FirstStep(method, case["name"])
    out: dict[str, torch.Tensor] = {}
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        views = [
            torch.randn(BATCH, 3, s, s, dtype=torch.float64, generator=generator) for s in sizes
        ]
        labels = torch.randint(5, (BATCH,), generator=generator)
        index = torch.randperm(40, generator=generator)[:BATCH]
        batch = Batch(
            views=[distributed.local_slice(view) for view in views],
            labels=distributed.local_slice(labels),
            index=distributed.local_slice(index),
            step=step,
            epoch=step,
            epochs=3,
            progress=step / 3,
        )
        terms = rules.terms(model(batch))
        optimizer.zero_grad()
        terms["loss"].backward()
        rules.gradients()
        out[f"{step} loss"] = terms["loss"].detach()
        for name, parameter in method.named_parameters():
            if parameter.requires_grad:
                out[f"{step} grad {name}"] = parameter.grad.clone()
        optimizer.step()
        method.after_step((step + 1) / 3)
        rules.state()
    return out | {f"state {k}": v.clone() for k, v in method.state_dict().items()}


def run(folder: Path, *counts: str) -> Path:
    """COUNT-RANK.pt: what each rank saved. One child imports torch, and forks."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder), *counts]
    subprocess.run(command, env=environment, check=True, timeout=500)
    return folder


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("few"), "2", "4")


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("many"), "1", "2", "4", "8")


@functools.cache
def alone(name: str) -> dict[str, torch.Tensor]:
    return train(CASES[name])


@pytest.mark.parametrize(
    ("name", "ranks"), [(name, 2) for name in CASES] + [(name, 4) for name in SPANNED]
)
def test_ranks_equal_one_process(few, name, ranks):
    compare(few, name, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", GROUPED)
def test_groups_on_any_number_of_ranks(many, name, ranks):
    compare(many, name, ranks)


def compare(folder: Path, name: str, ranks: int) -> None:
    """Loss, gradients, weights, queues and running statistics after three steps, to 1e-7."""
    expected = alone(name)
    assert expected["0 loss"].dtype == torch.float64
    made = [torch.load(folder / f"{ranks}-{rank}.pt")[name] for rank in range(ranks)]
    for rank in made:
        assert rank.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                rank[key], value, rtol=1e-7, atol=1e-8, msg=lambda m, k=key: f"{k}: {m}"
            )
            if "queue" in key or "memory" in key or "center" in key:
                assert torch.equal(rank[key], made[0][key]), f"{key} differs between the ranks"
    assert any(
        float(v.abs().max()) > 1e-6 for k, v in expected.items() if "grad " in k and "backbone" in k
    )


def test_every_method_is_compared():
    from pretrain.method import method_names

    assert {case["name"] for case in CASES.values()} == set(method_names()) - {"random"}


def test_local_batch_norm_is_not_synchronised_batch_norm():
    """The comparison with virtual groups means something: with one group the numbers are others."""
    local = train(CASES["moco local"])
    whole = train({**CASES["moco local"], "groups": 1})
    assert (local["0 loss"] - whole["0 loss"]).abs() > 1e-4


def test_groups_and_ranks_that_do_not_nest_are_refused():
    for groups, ranks in ((4, 8), (8, 4), (4, 1), (1, 32), (8, 8)):
        division.check_nesting(groups, ranks)
    for groups, ranks, better in ((4, 6, "4 or 8"), (8, 12, "8 or 16"), (8, 3, "2 or 8")):
        with pytest.raises(BadInput, match=f"do not nest: .*; start {better} processes"):
            division.check_nesting(groups, ranks)


def work(rank: int, ranks: int, folder: Path, names: tuple[str, ...]) -> None:
    store = f"file://{folder}/store-{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    torch.save({name: train(CASES[name]) for name in names}, folder / f"{ranks}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    where, *counts = sys.argv[1:]
    for count in map(int, counts):
        chosen = GROUPED
        if len(counts) == 2:
            chosen = tuple(CASES) if count == 2 else SPANNED
        torch.multiprocessing.start_processes(
            work, (count, Path(where), chosen), nprocs=count, start_method="fork"
        )
