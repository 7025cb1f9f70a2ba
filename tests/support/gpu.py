"""Where tests/gpu runs: the first GPU, or BACKBENCH_GPU_TESTS=cpu; two ranks on it, over gloo."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from backbench.parallel import precision
from support.methods import CASES, train

DEVICE = os.environ.get("BACKBENCH_GPU_TESTS", "cuda")
REAL = DEVICE == "cuda"
absent = REAL and not torch.cuda.is_available()
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(absent, reason="torch finds no GPU")]
RANKS = 2


def work(rank: int, folder: Path) -> None:
    """RANK.pt: what `train` gives of each case, on the CPU."""
    precision.use("fp32")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    made = {}
    for name, case in CASES.items():
        found = train(case, device=DEVICE)
        made[name] = {key: value.cpu() for key, value in found.items()}
    torch.save(made, folder / f"{rank}.pt")
    dist.destroy_process_group()


def all_cases(folder: Path) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Of each rank."""
    # A process that has used its GPU cannot be forked
    torch.multiprocessing.start_processes(
        work, (folder,), nprocs=RANKS, start_method="spawn"
    )
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
