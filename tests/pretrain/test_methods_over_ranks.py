"""Every method, three steps in float64: gloo ranks with a part of the batch each equal one process
with the whole batch, in loss, gradients, weights and state (queues and running statistics). Two
ranks for every method; four and eight for those with batch norm in groups. Two ranks with a
pretended GPU each have the CPU's numbers, too, and no step waits."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.methods import CASES, train, train_on_pretended_gpu

from backbench.errors import BadInput
from backbench.parallel import division

# Batch norm in the papers' groups: as many as ranks, more, and fewer, where a group spans ranks
GROUPED = ("lorac", "moco_m", "moco", "jcl", "supervised", "co2")
SPANNED = ("moco local", "lorac one key")  # two groups: on four ranks each spans two

ON_GPUS = ("moco sync symmetric", "lorac")  # the others are slow


def run(folder: Path, *words: str) -> Path:
    """COUNT-RANK.pt: what each rank saved. One child imports torch, and forks."""
    home = Path(__file__).parents[2]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{home}:{home / 'tests'}"}
    command = [sys.executable, __file__, str(folder), *words]
    subprocess.run(command, env=environment, check=True, timeout=500)
    return folder


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("few"), "2", "4")


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("many"), "1", "2", "4", "8")


@pytest.fixture(scope="module")
def few_on_gpus(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("gpus"), "2", *ON_GPUS)


@pytest.fixture(scope="module")
def all_on_gpus(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("gpus"), "2", *(set(CASES) - set(ON_GPUS)))


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


@pytest.mark.parametrize("name", ON_GPUS)
def test_two_ranks_do_not_wait(few_on_gpus, name):
    compare_on_gpus(few_on_gpus, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in ON_GPUS])
def test_two_ranks_of_any_method_do_not_wait(all_on_gpus, name):
    compare_on_gpus(all_on_gpus, name)


def compare_on_gpus(folder: Path, name: str) -> None:
    expected = alone(name)
    for rank in range(2):
        found, waits = torch.load(folder / f"2-{rank}.pt")[name]
        assert not waits, "\n".join(waits)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-8, msg=key)


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


def work(rank: int, ranks: int, folder: Path, names: tuple[str, ...], on_gpus: bool) -> None:
    store = f"file://{folder}/store-{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    out = {}
    for name in names:
        if on_gpus:
            got, waits = train_on_pretended_gpu(CASES[name], wrapped=False)
            out[name] = {key: value.host for key, value in got.items()}, waits
        else:
            out[name] = train(CASES[name])
    torch.save(out, folder / f"{ranks}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    where, *words = sys.argv[1:]
    counts = [int(word) for word in words if word.isdigit()]
    on_gpus = tuple(word for word in words if not word.isdigit())
    for count in counts:
        chosen = on_gpus or GROUPED
        if len(counts) == 2:
            chosen = tuple(CASES) if count == 2 else SPANNED
        arguments = (count, Path(where), chosen, bool(on_gpus))
        torch.multiprocessing.start_processes(work, arguments, nprocs=count, start_method="fork")
