"""Where a run computes: what --accelerator and the machine decide, without a GPU."""

from pathlib import Path

import pytest
import torch

from backbench.errors import BadInput
from backbench.parallel import lightning
from backbench.requests.probe import LinearRequest
from backbench.transfer import devices as devices_module
from backbench.transfer.devices import start_for
from backbench.weights import archs
from backbench.weights.checkpoint import PIXELS_FROM, Checkpoint

VIT = "timm:vit_tiny_patch16_224,depth=1,embed_dim=12,img_size=32,num_heads=2,patch_size=16"


@pytest.mark.parametrize(
    ("gpus", "accelerator", "device"),
    [
        (1, "auto", "cuda:0"),
        (1, "cuda", "cuda:0"),
        (1, "cpu", "cpu"),
        (0, "auto", "cpu"),
        (0, "cpu", "cpu"),
    ],
)
def test_one_process_computes_where_it_is_told(monkeypatch, gpus, accelerator, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    request = LinearRequest(
        checkpoints=("x",),
        datasets="digits",
        data=Path("data"),
        out=Path("out"),
        accelerator=accelerator,
    )
    machine = start_for(request)
    assert machine.device == torch.device(device)
    assert (machine.rank, machine.world, machine.main) == (0, 1, True)


class FakeFabric:
    """Stands for Fabric: keeps what it was made with."""

    def __init__(self, **given):
        self.given = given
        self.device = torch.device("cpu")
        self.global_rank = 3
        self.world_size = given["devices"] * given["num_nodes"]


@pytest.mark.parametrize(("devices", "nodes"), [(2, 1), (1, 2), (2, 4)])
def test_several_processes_are_started_by_fabric(monkeypatch, devices, nodes):
    launched = []
    monkeypatch.setattr(lightning, "Fabric", FakeFabric)
    monkeypatch.setattr(devices_module.distributed, "launch", launched.append)
    monkeypatch.setattr(devices_module.distributed, "started_by_fabric", lambda: True)
    monkeypatch.setattr(devices_module.log, "setLevel", lambda level: None)
    request = LinearRequest(
        checkpoints=("x",),
        datasets="digits",
        data=Path("data"),
        out=Path("out"),
        accelerator="cpu",
        devices=devices,
        nodes=nodes,
        workers=5,
    )
    machine = start_for(request)
    (fabric,) = launched
    wanted = {"accelerator": "cpu", "devices": devices, "num_nodes": nodes}
    assert fabric.given == {**wanted, "strategy": "ddp"}
    assert (machine.rank, machine.world) == (3, devices * nodes)
    assert (machine.workers, machine.main, machine.watched) == (5, False, True)


def a_request(**changes):
    about = {"checkpoints": ("x",), "datasets": "digits"}
    return LinearRequest(**about, data=Path("data"), out=Path("out"), **changes)


@pytest.mark.parametrize(("rank", "levels"), [(0, []), (1, ["ERROR"])])
def test_one_of_several_processes_speaks(monkeypatch, rank, levels):
    seen = []

    class Fabric(FakeFabric):
        def __init__(self, **given):
            super().__init__(**given)
            self.global_rank = rank

    monkeypatch.setattr(lightning, "Fabric", Fabric)
    monkeypatch.setattr(devices_module.distributed, "launch", lambda fabric: None)
    monkeypatch.setattr(devices_module.distributed, "started_by_fabric", lambda: False)
    monkeypatch.setattr(devices_module.log, "setLevel", seen.append)
    monkeypatch.setattr(devices_module, "default_workers", lambda devices: 10 * devices)
    machine = start_for(a_request(accelerator="cpu", devices=2))
    assert seen == levels
    assert (machine.main, machine.watched, machine.workers) == (rank == 0, False, 20)
    # None of a single process is another's
    machine = start_for(a_request(accelerator="cpu", workers=0))
    assert (machine.main, machine.watched, machine.workers) == (True, False, 0)
    assert seen == levels


def test_gpus_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for accelerator in ("auto", "cuda"):
        with pytest.raises(BadInput, match="--devices 3: torch finds 2 GPUs here; use"):
            start_for(a_request(accelerator=accelerator, devices=3))
    assert start_for(a_request(accelerator="cpu", workers=3)).workers == 3


def test_weights_that_two_files_hold_are_measured_once(tmp_path, caplog):
    caplog.set_level("INFO", "backbench")
    point = Checkpoint(
        arch=VIT,
        method="random",
        state_dict=archs.build_trunk(VIT).state_dict(),
        provenance={"name": "vit", PIXELS_FROM: "taken are ImageNet's"},
    )
    moved = {name: value + 1 for name, value in point.state_dict.items()}
    files = {
        "a": point,
        "b": point.replace(state_dict=moved, provenance={}),
        "c": point,
    }
    paths = []
    for name, each in files.items():
        paths.append(tmp_path / f"{name}.safetensors")
        each.save(paths[-1])
    found = devices_module.read_checkpoints(paths)
    assert [each.digest for each in found] == [files[name].digest for name in "ab"]
    first, _, last = paths
    assert f"{last}: the same weights as {first}; measured once" in caplog.messages
    assert caplog.messages.count("vit: taken are ImageNet's") == 2
