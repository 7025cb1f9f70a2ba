"""Two ranks on one GPU, over gloo with tensors that lie there: every method, three steps."""

from pathlib import Path

import torch
import torch.distributed as dist

from backbench.parallel import precision
from support.gpu import DEVICE
from support.methods import CASES, train

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
    torch.multiprocessing.start_processes(work, (folder,), nprocs=RANKS, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
