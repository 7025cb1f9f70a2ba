"""Parameters, multiply-adds and images a second beside each score."""

import json
import logging

import pytest
import torch
from fvcore.nn import FlopCountAnalysis, parameter_count
from fvcore.nn.jit_handles import get_shape
from torch.utils.flop_counter import FlopCounterMode

from backbench import cli
from backbench.runs.forward_clock import ForwardClock
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.modules import checkpoint_of
from backbench.weights.trunk import ModuleTrunk
from backbench.weights.trunk_facts import facts, of_maps
from detection import backbones

VIT = "timm:vit_tiny_patch16_224,depth=2,embed_dim=48,img_size=64,num_heads=3"


def _attention(inputs, outputs):
    """fvcore knows none: q k^T and its product with v, each as many multiply-adds."""
    (*batch, rows, dim), (*_, columns, _) = get_shape(inputs[0]), get_shape(inputs[1])
    return 2 * torch.Size(batch).numel() * rows * columns * dim


@pytest.mark.parametrize(
    "arch",
    ["resnet18", "resnet50,width=0.125", "timm:test_convnext", VIT, "lab:resnet18,width=0.125"],
)
def test_costs_are_those_that_fvcore_counts(arch):
    trunk = archs.build_trunk(arch).eval()
    logging.getLogger("fvcore").setLevel("ERROR")
    counted = FlopCountAnalysis(trunk, torch.zeros(1, 3, 64, 64))
    counted.set_op_handle("aten::scaled_dot_product_attention", _attention)
    # Norms and pooling are no multiply-adds of matrices
    skipped = ("batch_norm", "layer_norm", "adaptive_avg_pool2d")
    theirs = sum(n for op, n in counted.by_operator().items() if op not in skipped)
    checkpoint = Checkpoint(
        arch=arch, method="random", state_dict=trunk.state_dict(), pixels=archs.default_pixels(arch)
    )
    found = facts(checkpoint, 64)
    assert found["parameters"] == parameter_count(trunk)[""]
    assert found["gflops"] == pytest.approx(theirs / 1e9, rel=0.01, abs=1e-4)
    assert (found["side"], found["reading"]) == (64, trunk.reading)


@pytest.mark.parametrize("patch", [14, 16])
def test_of_a_detector_the_maps_are_counted_at_the_size_that_the_trunk_sees(patch):
    side = 8 * patch
    arch = VIT.replace("img_size=64", f"img_size={side}") + f",patch_size={patch},pos=aa"
    trunk = archs.build_trunk(arch).eval()
    kept = Checkpoint(arch=arch, method="random", state_dict=trunk.state_dict())
    # 128 x 128 pixels of the detector are 8 x 8 patches, whatever their size
    found = of_maps(kept, (128, 128), backbones.scaled)
    features = facts(kept, side)
    assert found == {k: features[k] for k in ("parameters", "gflops")} | {"sides": [128, 128]}
    twice = of_maps(kept, (128, 256), backbones.scaled)
    assert twice["gflops"] > 2 * found["gflops"] > 0


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
@pytest.mark.parametrize("stem", ["imagenet", "conv3", "conv3_p0", "conv3_p2"])
def test_a_resnet_knows_what_a_forward_pass_would_count(arch, stem):
    trunk = archs.build_trunk(arch, stem=stem).eval()
    for side in (31, 32, 65):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            trunk(torch.zeros(1, 3, side, side))
        assert 2 * trunk.multiply_adds(side) == counter.get_total_flops()


def test_a_module_that_cannot_be_counted_has_no_cost():
    trunk = ModuleTrunk(
        torch.nn.Conv2d(3, 4, 3),
        feature_dim=4,
        features=lambda module, x: module(x).mean((2, 3)) * float(x.sum()),  # reads an element
    )
    wanted = {"reading": "pooled", "parameters": 112, "side": 32, "gflops": None}
    assert facts(checkpoint_of(trunk), 32) == wanted


def test_the_first_batch_is_not_timed(monkeypatch):
    now = iter([0.0, 90.0, 100.0, 101.0, 200.0, 203.0])
    monkeypatch.setattr("backbench.runs.forward_clock.time.perf_counter", lambda: next(now))
    clock, cpu = ForwardClock(), torch.device("cpu")
    for images in (64, 64, 32):
        assert clock.rate("a") is None or images == 32
        with clock.around("a", images, cpu):
            pass
    assert clock.rate("a") == 24.0  # 96 images in 4 seconds
    assert clock.rate("b") is None


def test_rows_say_what_the_trunk_costs(tiny_root, tmp_path):
    for arch in (VIT, "resnet18"):
        trunk = archs.build_trunk(arch)
        kept = Checkpoint(
            arch=arch, method="random", state_dict=trunk.state_dict(), provenance={"name": arch[:6]}
        )
        kept.save(tmp_path / f"{arch[:6]}.safetensors")
    protocol = tmp_path / "knn.yaml"
    protocol.write_text(
        "kind: knn\nprotocol: own-v1\nk: [5]\ngeometry: {resize: 64, crop: 64}\nfeature_batch: 32\n"
    )
    files = [str(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    line = ["linear", *files, "--datasets", "digits", "--protocol", str(protocol)]
    assert cli.main([*line, "--data", str(tiny_root), "--out", str(tmp_path / "run")]) == 0
    rows = [json.loads(x) for x in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    by_name = {row["name"]: row for row in rows}
    vit, resnet = by_name["timm:v"], by_name["resnet"]
    assert vit["arch"] == f"{VIT} cls" and resnet["arch"] == "resnet18"
    assert vit["provenance"]["trunk"]["reading"] == "cls"
    assert resnet["provenance"]["trunk"]["parameters"] == 11_176_512
    for row in rows:
        assert row["origin"]["images_per_second"] > 0 and row["origin"]["hardware"]
        assert row["provenance"]["trunk"]["side"] == 64
