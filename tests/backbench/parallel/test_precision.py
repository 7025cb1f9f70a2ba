"""What float32 means is set for convolutions and for matrix products, and who computes in bf16 asks."""

from types import SimpleNamespace

import pytest
import torch

from backbench.parallel import precision
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint

PLACES = (torch.backends.cudnn, torch.backends.cuda.matmul)


@pytest.fixture(params=[True, False])
def before(request):
    """Both places as a user may have left them; their own values come back."""
    own = [place.allow_tf32 for place in PLACES]
    for place in PLACES:
        place.allow_tf32 = request.param
    yield
    for place, value in zip(PLACES, own):
        place.allow_tf32 = value


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize(
    ("name", "rounds"), [("tf32", True), ("fp32", False), ("bf16", False)]
)
def test_only_tf32_rounds_the_operands(name, rounds):
    precision.use(name)
    assert [place.allow_tf32 for place in PLACES] == [rounds, rounds]


# Who computes in bf16 asks whether the device is slow in it

CPU = torch.device("cpu")
VIT = "timm:vit_tiny_patch16_224,depth=1,embed_dim=12,img_size=32,num_heads=2,patch_size=16"


def a_trunk():
    state = archs.build_trunk(VIT).state_dict()
    return Checkpoint(arch=VIT, method="random", state_dict=state)


def freeze_a_trunk(name):
    from backbench.transfer.features.frozen import FrozenTrunk

    FrozenTrunk.build(a_trunk(), device=CPU, precision=name)


def finetune_a_network(name):
    from backbench.transfer.devices import Machine
    from backbench.transfer.finetune import Network
    from backbench.transfer.protocols import load_protocol

    protocol = load_protocol("finetune", ["finetune"], [f"precision={name}"])
    Network(a_trunk(), 3, protocol, 0, Machine(CPU, 0, 1, 0))


def pretrain_on_a_cpu(name):
    from backbench.pretrain import train

    request = SimpleNamespace(accelerator="auto", devices=1, nodes=1)
    train.launch(SimpleNamespace(precision=name), request)


def detect(name):
    from backbench.detection.engine import MixedPrecision

    on = {"ENABLED": name == "bf16", "PRECISION": "bf16"}
    solver = SimpleNamespace(AMP=SimpleNamespace(**on))
    MixedPrecision(SimpleNamespace(SOLVER=solver), CPU)


@pytest.mark.parametrize(
    "compute", [freeze_a_trunk, finetune_a_network, pretrain_on_a_cpu, detect]
)
def test_bf16_on_a_slow_device_is_warned_of(compute, monkeypatch):
    asked = []
    monkeypatch.setattr(precision, "warn_if_slow", asked.append)
    monkeypatch.setattr(precision, "use", lambda name: None)  # of the whole process
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    compute("fp32")
    assert asked == []
    compute("bf16")
    assert asked == ["cpu"]
