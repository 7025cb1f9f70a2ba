"""Where a run computes: what --accelerator and the machine decide, without a GPU."""

from pathlib import Path

import pytest
import torch

from backbench.requests.probe import LinearRequest
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
