"""GPUs that are asked for and are not here: one line, from every verb, and nothing written."""

import pytest
import torch
from support.pictures import picture

from backbench.cli.program import main
from backbench.errors import BadInput
from backbench.parallel import gpus

TRUNK = "timm:resnet18@random"
PLAIN = ["--protocol", "knn_own"]
SEMISUP = ["--percent", "10", "--protocol", "semisup_own"]
VERBS = {
    "linear": ["linear", TRUNK, "--datasets", "mine", *PLAIN, "--data", "ROOT"],
    "finetune": ["finetune", TRUNK, "--dataset", "mine", "--data", "ROOT"],
    # It says first how many labels it draws
    "semisup": ["semisup", TRUNK, "--dataset", "mine", *SEMISUP, "--data", "ROOT"],
    "analyze": ["analyze", TRUNK, "--dataset", "mine", "--data", "ROOT"],
    "evaluate": ["evaluate", TRUNK, "knn", "--data", "ROOT/mine"],
    # It says first what it trains, and what that changes of the paper
    "pretrain": ["pretrain", "simclr", "--images", "ROOT/mine"],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    base = tmp_path_factory.mktemp("data")
    for n in range(16):
        split = ("train", "test")[n % 2]
        folder = base / "mine" / split / ("cat", "dog")[n // 8]
        folder.mkdir(parents=True, exist_ok=True)
        picture(n).save(folder / f"{n}.png")
    return base


@pytest.mark.parametrize("verb", VERBS)
def test_no_gpu_is_one_line(verb, root, tmp_path, bad_input, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    out = tmp_path / "runs"
    words = [word.replace("ROOT", str(root)) for word in VERBS[verb]]
    status = main([*words, "--out", str(out), "--accelerator", "cuda"])
    said = bad_input(
        status, "--accelerator cuda: torch finds no GPU; use --accelerator cpu"
    )
    assert len(said.splitlines()) == 1
    assert not out.exists()


def test_fewer_than_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BadInput, match=r"--devices 2: torch finds 1 GPU here"):
        gpus.refuse_missing("cuda", 2)
    gpus.refuse_missing("cuda", 1)
    gpus.refuse_missing("cpu", 2)  # as many processes as one likes
