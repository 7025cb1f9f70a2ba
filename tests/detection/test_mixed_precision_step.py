"""Detectron2's trainer under mixed precision: the step that we make in its place."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip(
    "detectron2", reason="Detectron2 is not installed: `make detectron2`"
)

from backbench.detection import engine_detectron2
from backbench.detection.engine_detectron2 import LossKeepingTrainer, WideSyncBatchNorm


def test_a_step_goes_down_the_sum_of_the_losses_and_keeps_each():
    weight = torch.nn.Parameter(torch.tensor(3.0))
    seen, steps = [], []

    def model(data):
        seen.append((data, inside[-1]))
        return {"loss_cls": 2 * weight, "loss_box": weight**2}

    inside = [False]

    @contextlib.contextmanager
    def autocast():
        inside.append(True)
        yield
        inside.append(False)

    trainer = object.__new__(LossKeepingTrainer)
    trainer.model = model
    trainer.optimizer = "the optimizer"
    trainer._data_loader_iter_obj = iter(["first batch", "second batch"])

    def descend(loss, optimizer):
        steps.append((loss.item(), optimizer))

    trainer.amp = SimpleNamespace(
        dtype=torch.bfloat16, autocast=autocast, descend=descend
    )
    trainer.run_step()
    assert seen == [("first batch", True)]
    assert steps == [(15.0, "the optimizer")]
    losses = {name: float(loss) for name, loss in trainer.losses.items()}
    assert losses == {"loss_cls": 6.0, "loss_box": 9.0}
    assert not any(loss.requires_grad for loss in trainer.losses.values())


def test_bfloat16_is_normalised_in_float32_where_ranks_share_a_batch(monkeypatch):
    seen = []

    def forward(layer, x):
        seen.append(x.dtype)
        return x + 1

    monkeypatch.setattr(engine_detectron2.NaiveSyncBatchNorm, "forward", forward)
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    layer = WideSyncBatchNorm(2)
    for ranks, inside in ((1, kinds), (2, (torch.float32, *kinds[1:]))):
        monkeypatch.setattr(
            engine_detectron2.distributed, "world_size", lambda ranks=ranks: ranks
        )
        seen.clear()
        for kind in kinds:
            found = layer(torch.ones(1, 2, 3, 3, dtype=kind))
            assert found.dtype is kind and bool((found == 2).all())
        assert tuple(seen) == inside
