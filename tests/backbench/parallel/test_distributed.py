"""Two gloo ranks against one process, in float64: exchanges, batch norm; and slow bfloat16."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from backbench.errors import BadInput
from backbench.parallel import batchnorm, distributed
from backbench.runs import seeding


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(8, 3, 5, 5, dtype=torch.float64, generator=generator) * 3 + 100
    return pixels, torch.randn(8, 4, dtype=torch.float64, generator=generator)


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = (
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 4),
    )
    return nn.Sequential(*layers).double()


def train_step(kind: str) -> dict[str, torch.Tensor]:
    """One loss over the global batch on this rank's slice, gradients averaged as DDP does."""
    images, weights = data()
    model = network()
    if kind == "sync":
        model = batchnorm.convert_sync_batchnorm(model)
    else:
        model = batchnorm.convert_group_batchnorm(model, 2)
    z = model(distributed.local_slice(images))
    # Of the samples of this rank alone, and of all samples, where every one meets every other
    own_loss = (distributed.local_slice(weights) * z).square().mean()
    gathered = distributed.gather(z)
    global_loss = (gathered @ gathered.T).logsumexp(1).mean()
    loss = global_loss + distributed.mean_over_ranks(own_loss)
    loss.backward()
    out = {"loss": loss.detach(), "z": distributed.gather_without_gradient(z)}
    for name, parameter in model.named_parameters():
        out[f"grad {name}"] = distributed.mean_over_ranks(parameter.grad)
    batchnorm.average_batchnorm(model)
    for name, buffer in model.named_buffers():
        out[f"buffer {name}"] = buffer.clone()
    return out


def exchanges() -> dict[str, torch.Tensor]:
    images, _ = data()
    mine = distributed.local_slice(images)
    shuffled, order = distributed.shuffle(mine, seeding.generator(0, "order"))
    own_number = torch.full((2,), float(distributed.rank() + 5))
    return {
        "shuffled": distributed.gather_without_gradient(shuffled),
        "restored": distributed.unshuffle(shuffled, order),
        "broadcast": distributed.broadcast(own_number),
        "sum": distributed.sum_over_ranks(mine.sum()),
    }


def votes() -> dict[str, object]:
    """Let the last rank alone say something, then both, then none."""
    agreement = distributed.Agreement()
    rank = distributed.rank()
    last = rank == distributed.world_size() - 1
    message = f"rank {rank} found it"
    group = agreement.group
    return {
        "any": agreement.any(last, False, not last),
        "one": agreement.first(message if last else None),
        "both": agreement.first(message),
        "none": agreement.first(None),
        "group": group is not None,
        "shares": group is dist.group.WORLD if group is not None else None,
    }


def everything() -> dict[str, dict[str, torch.Tensor]]:
    return {
        "sync": train_step("sync"),
        "groups": train_step("groups"),
        "exchanges": exchanges(),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory, python) -> Path:
    """What two ranks saved, RANK.pt and votes-RANK.json; and what is said where the CPU has no bf16."""
    folder = tmp_path_factory.mktemp("ranks")
    # torch asks oneDNN, which reads this when it is asked first
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        status, out, err = python.run(Path(__file__).read_text(), folder)
    assert status == 0, err
    (folder / "out").write_text(out)
    (folder / "err").write_text(err)
    return folder


@pytest.mark.parametrize("part", ["sync", "groups", "exchanges"])
def test_two_ranks_equal_one_process(folder, part):
    alone = everything()[part]
    for rank in (0, 1):
        found = torch.load(folder / f"{rank}.pt")[part]
        assert found.keys() == alone.keys()
        for name, expected in alone.items():
            torch.testing.assert_close(
                found[name],
                expected,
                rtol=1e-9,
                atol=1e-9,
                msg=lambda said, name=name: f"{name}: {said}",
            )


def test_what_one_rank_finds_all_ranks_know(folder):
    told = json.loads((folder / "votes-0.json").read_text())
    assert told == json.loads((folder / "votes-1.json").read_text())
    assert told["any"] == [True, False, True]
    assert told["one"] == "rank 1 found it"
    assert told["both"] == "rank 0 found it"
    assert told["none"] is None
    assert told["shares"] is True  # the default group is gloo's: no second one


def test_one_process_agrees_with_itself_without_an_exchange():
    alone = votes()
    assert alone["any"] == (True, False, False)
    assert alone["one"] == "rank 0 found it"
    assert alone["none"] is None
    assert alone["group"] is False


def test_sync_batchnorm_is_batch_norm_in_one_process():
    images, _ = data()
    plain = network()
    sync = batchnorm.convert_sync_batchnorm(network())
    for _ in range(2):
        assert torch.equal(plain(images), sync(images))
    for (name, a), (_, b) in zip(plain.named_buffers(), sync.named_buffers()):
        assert torch.equal(a, b), name
    assert torch.equal(plain.eval()(images), sync.eval()(images))
    assert list(plain.state_dict()) == list(sync.state_dict())


@pytest.mark.parametrize("group", [False, True])
def test_a_norm_with_an_activation_keeps_it(group):
    """timm's EfficientNets have their activations inside of their norms."""
    import timm  # takes the ranks' process as long as torch

    model = timm.create_model("tf_efficientnet_lite0", num_classes=0)
    pixels = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    names = list(model.state_dict())
    expected = [model.eval()(pixels), copy.deepcopy(model).train()(pixels)]
    if group:
        converted = batchnorm.convert_group_batchnorm(model, None)
    else:
        converted = batchnorm.convert_sync_batchnorm(model)
    assert list(converted.state_dict()) == names
    found = [converted.eval()(pixels), converted.train()(pixels)]
    torch.testing.assert_close(found, expected)


def test_a_norm_that_holds_something_unknown_is_refused():
    norm = nn.BatchNorm2d(4)
    norm.gate = nn.Sigmoid()
    with pytest.raises(BadInput, match="BatchNorm2d holds gate"):
        batchnorm.convert_sync_batchnorm(nn.Sequential(norm))


def test_groups_are_normalised_as_if_alone():
    images, _ = data()
    plain = network()
    grouped = batchnorm.convert_group_batchnorm(network(), 4)
    # The convolution runs over 8 images at once or over 2 at a time: equal up to rounding
    alone = torch.cat([copy.deepcopy(plain)(part) for part in images.chunk(4)])
    torch.testing.assert_close(grouped(images), alone, rtol=1e-10, atol=1e-10)
    kept = []
    for part in images.chunk(4):
        alone = copy.deepcopy(plain)
        alone(part)
        kept.append(alone[1].running_var)
    torch.testing.assert_close(grouped[1].running_var, torch.stack(kept).mean(0))


def test_local_modules_are_left_alone_by_the_conversion():
    model = nn.ModuleDict({"a": network(), "b": network()})
    model["b"].local_batchnorm = True
    batchnorm.convert_sync_batchnorm(model)
    assert type(model["a"][1]) is batchnorm.SyncBatchNorm
    assert type(model["b"][1]) is nn.BatchNorm2d


CODE = """
from backbench.parallel import precision
print(precision.bf16_is_quick("cpu"), precision.bf16_is_quick("cuda"))
precision.warn_if_slow("cpu")
precision.warn_if_slow("cpu")
"""


@pytest.mark.parametrize("bf16", [True, False])
def test_a_cpu_without_bf16_is_told(bf16, folder):
    if bf16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bf16")
    if bf16:
        command = [sys.executable, "-c", CODE]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        out, err = ran.stdout, ran.stderr
    else:
        out, err = ((folder / name).read_text() for name in ("out", "err"))
    assert out.split() == [str(bf16), "True"]
    warnings = 0 if bf16 else 1
    assert err.count("no bf16 instructions") == warnings


def be_one_rank(rank: int, folder: Path) -> None:
    """Save what this rank finds; `folder` has two such processes started."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    torch.save(everything(), folder / f"{rank}.pt")
    (folder / f"votes-{rank}.json").write_text(json.dumps(votes()))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(
        be_one_rank, (Path(sys.argv[1]),), nprocs=2, start_method="fork"
    )
    exec(CODE)
