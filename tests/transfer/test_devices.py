"""Where a run computes: what --accelerator and the machine decide, without a GPU."""

from pathlib import Path

import lightning_fabric
import pytest
import torch

from backbench.requests.probe import LinearRequest
from backbench.transfer import devices as devices_module
from backbench.transfer.devices import start_for


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
    monkeypatch.setattr(lightning_fabric, "Fabric", FakeFabric)
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
