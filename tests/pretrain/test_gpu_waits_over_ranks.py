"""Two ranks with a pretended GPU each: batch norm over ranks by the GPU's path, gathers and sums of
tensors that lie there; the numbers are those of one process on the CPU, and no step waits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.methods import CASES, train, train_on_pretended_gpu

RANKS = 2
FEW = ("moco sync symmetric", "lorac")


def run(folder: Path, names) -> list[dict[str, object]]:
    """What each rank saved. One child imports torch, and forks."""
    home = Path(__file__).parents[2]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{home}:{home / 'tests'}"}
    command = [sys.executable, __file__, str(folder), *names]
    subprocess.run(command, env=environment, check=True, timeout=400)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return run(tmp_path_factory.mktemp("few"), FEW)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return run(tmp_path_factory.mktemp("many"), [name for name in CASES if name not in FEW])


@pytest.mark.parametrize("name", FEW)
def test_two_ranks_do_not_wait(few, name):
    compare(few, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in FEW])
def test_two_ranks_of_any_method_do_not_wait(many, name):
    compare(many, name)


def compare(ranks, name) -> None:
    expected = train(CASES[name])
    for rank in ranks:
        found, waits = rank[name]
        assert not waits, "\n".join(waits)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-8, msg=key)


def work(rank: int, folder: Path, names: tuple[str, ...]) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    out = {}
    for name in names:
        got, waits = train_on_pretended_gpu(CASES[name], wrapped=False)
        out[name] = {key: value.host for key, value in got.items()}, waits
    torch.save(out, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    where, *chosen = sys.argv[1:]
    torch.multiprocessing.start_processes(
        work, (Path(where), tuple(chosen)), nprocs=RANKS, start_method="fork"
    )
