"""How a trunk computes: few images at once on a CPU, and in the precision of its protocol."""

import pytest
import torch

from backbench.parallel import precision
from backbench.transfer.devices import Machine
from backbench.transfer.features.frozen import CPU_IMAGES, FrozenTrunk
from backbench.transfer.finetune import Network
from backbench.transfer.finetune_protocol import Finetune
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint


def test_a_large_batch_passes_in_parts_in_its_order():
    torch.manual_seed(0)
    state = build_trunk("resnet18").state_dict()
    point = Checkpoint(arch="resnet18", method="random", state_dict=state)
    trunk = FrozenTrunk.build(point, device=torch.device("cpu"))
    sizes = []
    trunk.module.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2 * CPU_IMAGES + 5, 3, 32, 32, generator=generator)
    features = trunk(images)
    assert sum(sizes) == len(images)
    assert CPU_IMAGES // 2 <= min(sizes) <= max(sizes) <= CPU_IMAGES
    for index in (0, CPU_IMAGES, len(images) - 1):
        alone = trunk(images[index : index + 1])[0]
        torch.testing.assert_close(features[index], alone, rtol=1e-3, atol=1e-4)


VIT = "timm:vit_tiny_patch16_224,depth=1,embed_dim=12,img_size=32,num_heads=2,patch_size=16"


def frozen(point, how):
    return FrozenTrunk.build(point, device=torch.device("cpu"), precision=how)


def finetuned(point, how):
    p = Finetune(kind="finetune", protocol="x", head_lr=(0.1,), precision=how)
    return Network(point, 2, p, 0, Machine(torch.device("cpu"), 0, 1, 0))


@pytest.mark.parametrize("build", [frozen, finetuned])
def test_the_process_computes_as_the_protocol_says(build, monkeypatch, caplog):
    state = build_trunk(VIT).state_dict()
    point = Checkpoint(arch=VIT, method="random", state_dict=state)
    monkeypatch.setattr(precision, "bf16_is_quick", lambda device: device != "cpu")
    precision.warn_if_slow.cache_clear()
    backends = (torch.backends.cudnn, torch.backends.cuda.matmul)
    for how in ("tf32", "fp32"):
        build(point, how)
        assert {each.allow_tf32 for each in backends} == {how == "tf32"}
    assert caplog.messages == []
    for _ in range(2):
        build(point, "bf16")
    assert {each.allow_tf32 for each in backends} == {False}
    assert caplog.messages == [
        "this CPU has no bf16 instructions: bf16 is slower than fp32 here"
    ]
    precision.warn_if_slow.cache_clear()
