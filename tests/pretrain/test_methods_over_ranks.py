"""Every method over ranks, on CPUs and pretended GPUs, equals one process after three steps."""

import functools
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.methods import CASES, build, train, train_on_pretended_gpu

from backbench.errors import BadInput
from backbench.parallel import division

# Batch norm in the papers' groups: as many as ranks, more, and fewer, where a group spans ranks
GROUPED = ("lorac", "moco_m", "moco", "jcl", "supervised", "co2")
# What one child makes: on so many ranks these methods
PLANS = {
    "few": {
        2: tuple(CASES),
        4: ("moco local", "lorac one key"),  # two groups, each on two ranks
    },
    "many": dict.fromkeys((1, 2, 4, 8), GROUPED),
    "a gpu each": {2: ("moco sync symmetric",)},
    "gpus": {2: tuple(CASES)},
}
FAST = ("few", "a gpu each")


@pytest.fixture(scope="module")
def made(tmp_path_factory, python):
    """made(PLAN) -> a folder with RANKS-RANK of each rank, which a program has forked."""

    @functools.cache
    def run(plans: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("ranks")
        code = Path(__file__).read_text()
        status, _, said = python.run(code, folder, *plans)
        assert status == 0, said
        return folder

    # The fast ones share a child
    return lambda plan: run(FAST if plan in FAST else (plan,)) / plan


@functools.cache
def alone(name: str) -> dict[str, torch.Tensor]:
    return train(CASES[name])


@functools.cache
def of_rank(folder: Path, ranks: int, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Load what a rank has saved: by method, name -> tensor."""
    found = pickle.loads((folder / f"{ranks}-{rank}").read_bytes())
    of_method = {}
    for name, arrays in found.items():
        waits = arrays.pop("waits", [])
        of_method[name] = {key: torch.from_numpy(one) for key, one in arrays.items()}
        of_method[name]["waits"] = waits
    return of_method


def places(plan: str) -> list[tuple[str, str, int]]:
    """Every (plan, method, number of ranks) of a plan."""
    found = []
    for ranks, names in PLANS[plan].items():
        for name in names:
            found.append((plan, name, ranks))
    return found


EVERY = [place for plan in FAST for place in places(plan)]
for place in places("many") + places("gpus"):
    EVERY.append(pytest.param(*place, marks=pytest.mark.slow))


@pytest.mark.parametrize(("plan", "name", "ranks"), EVERY)
def test_ranks_equal_one_process(made, plan, name, ranks):
    expected = alone(name)
    assert expected["0 loss"].dtype == torch.float64
    saved = [dict(of_rank(made(plan), ranks, rank)[name]) for rank in range(ranks)]
    for found in saved:
        waits = found.pop("waits")
        assert not waits, "\n".join(waits)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key],
                value,
                rtol=1e-7,
                atol=1e-8,
                msg=lambda said, key=key: f"{key}: {said}",
            )
            if "queue" in key or "memory" in key or "center" in key:
                assert torch.equal(found[key], saved[0][key]), (
                    f"{key} differs between the ranks"
                )
    of_trunk = [v for k, v in expected.items() if "grad " in k and "backbone" in k]
    assert any(float(v.abs().max()) > 1e-6 for v in of_trunk)


def test_every_method_is_compared():
    from backbench.pretrain.method import method_names

    assert {case["name"] for case in CASES.values()} == set(method_names()) - {"random"}


def test_local_batch_norm_is_not_synchronised_batch_norm():
    """The comparison with virtual groups means something: with one group the numbers are others."""
    whole = train({**CASES["moco local"], "groups": 1})
    assert (alone("moco local")["0 loss"] - whole["0 loss"]).abs() > 1e-4


def test_groups_and_ranks_that_do_not_nest_are_refused():
    for groups, ranks in ((4, 8), (8, 4), (4, 1), (1, 32), (8, 8)):
        division.check_nesting(groups, ranks)
    for groups, ranks, better in (
        (4, 6, "4 or 8"),
        (8, 12, "8 or 16"),
        (8, 3, "2 or 8"),
    ):
        with pytest.raises(
            BadInput, match=f"do not nest: .*; start {better} processes"
        ):
            division.check_nesting(groups, ranks)


def work(
    rank: int, ranks: int, folder: Path, names: tuple[str, ...], on_gpus: bool
) -> None:
    store = f"file://{folder}/store-{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    out = {}
    for name in names:
        if on_gpus:
            found, waits = train_on_pretended_gpu(CASES[name], wrapped=False)
            out[name] = {key: value.host.numpy() for key, value in found.items()}
            out[name]["waits"] = waits
        else:
            found = train(CASES[name])
            out[name] = {key: value.numpy() for key, value in found.items()}
    # torch takes ten times as long to save ten thousand small tensors
    (folder / f"{ranks}-{rank}").write_bytes(pickle.dumps(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    where, *plans = sys.argv[1:]
    # What the methods import and pydantic makes of their settings is there before the ranks fork
    for case in CASES.values():
        build(case)
    for plan in plans:
        folder = Path(where, plan)
        folder.mkdir()
        for count, names in PLANS[plan].items():
            arguments = (count, folder, names, "gpu" in plan)
            torch.multiprocessing.start_processes(
                work, arguments, nprocs=count, start_method="fork"
            )
