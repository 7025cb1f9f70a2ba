"""Out to Detectron2 and back: the same tensors, the same C2..C5, with the real Detectron2."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import foreign_fixtures as fx
from support.detection_runs import needs_detectron2
from torchvision.models import resnet18

from backbench.cli import program
from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights import exporting, importing
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families.resnet_names import find_trunks
from backbench.weights.families.resnet_trunk import ARCHS, trunk_shapes
from backbench.weights.family import TrunkMetadata
from backbench.weights.undrawn import Undrawn


def checkpoint(arch, **changes):
    trunk = fx.trunk_of(fx.known_resnet(arch))
    provenance = {"name": "MoCo, 200 epochs", "recipe": {"lr": 0.03}}
    fields = {"method": "moco", "epochs": 200, "provenance": provenance}
    return Checkpoint(arch=arch, state_dict=trunk, **(fields | changes))


def export(kept, tmp_path):
    """The exit status of the command on a checkpoint, and the file that it is to make."""
    kept.save(tmp_path / "x.safetensors")
    words = ["export", tmp_path / "x.safetensors", "--format", "detectron2", "--out"]
    return program.main(
        list(map(str, [*words, tmp_path / "out.pkl"]))
    ), tmp_path / "out.pkl"


def exported(arch, tmp_path, **changes):
    source = checkpoint(arch, **changes)
    status, out = export(source, tmp_path)
    assert status == 0
    return source, out


@pytest.mark.parametrize("arch", ARCHS)
def test_names_are_a_total_map(arch):
    ours = {name: torch.zeros(()) for name in trunk_shapes(arch)}
    theirs = exporting.to_detectron2(ours)
    assert theirs.keys() == fx.detectron2_names(ours).keys()
    assert len(theirs) == len(ours)
    for prefix in ("", "backbone.bottom_up."):
        found = trunks_of({f"{prefix}{key}": value for key, value in theirs.items()})
        assert [(each.arch, each.missing, each.extra) for each in found] == [
            (arch, [], ())
        ]
        assert found[0].keys.keys() == ours.keys()
    del theirs["res3.0.shortcut.norm.running_var"]
    assert trunks_of(theirs)[0].missing == ["layer2.0.downsample.1.running_var"]


def trunks_of(tensors):
    return find_trunks({"": tensors}, TrunkMetadata())


def test_there_and_back(tmp_path, capsys):
    arch = "resnet18"
    pixels = Pixels((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "BGR")
    source, out = exported(arch, tmp_path, pixels=pixels)
    assert "MODEL.PIXEL_MEAN [25.500,51.000,76.500]" in capsys.readouterr().out
    content = pickle.loads(out.read_bytes())
    assert (content["__author__"], content["matching_heuristics"]) == (
        "backbench",
        True,
    )
    assert content["backbench"]["pixels"]["input_format"] == "BGR"
    assert content["backbench"]["pixels"]["pixel_std"] == pytest.approx(
        [102, 127.5, 153]
    )
    assert len(content["model"]) == len(trunk_shapes(arch))
    back = importing.read(out)
    about = (back.digest, back.name, back.pixels, back.epochs)
    assert about == (source.digest, source.name, pixels, 200)
    assert back.provenance == source.provenance
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        stages = [
            source.backbone().eval().stages(images),
            back.backbone().eval().stages(images),
        ]
    assert [float((a - b).abs().max()) for a, b in zip(*stages)] == [0.0] * 4


def test_a_changed_file_is_noticed(tmp_path):
    _, out = exported("resnet18", tmp_path)
    content = pickle.loads(out.read_bytes())
    content["model"]["res2.0.conv1.weight"][0, 0, 0, 0] += 1
    out.write_bytes(pickle.dumps(content))
    with pytest.raises(BadInput, match="do not match the digest in the header"):
        importing.read(out)
    for key in ("pixels", "name"):
        said = {k: v for k, v in content["backbench"].items() if k != key}
        out.write_bytes(pickle.dumps({**content, "backbench": said}))
        with pytest.raises(
            BadInput, match=rf"header is incomplete \(KeyError\('{key}'\)\)"
        ):
            importing.read(out)


def test_pixels_are_not_chosen_for_a_file_that_has_them(tmp_path):
    _, out = exported("resnet18", tmp_path)
    with pytest.raises(BadInput, match=r"out\.pkl: .*; leave out the choice of pixels"):
        importing.read(out, pixels="half")


def test_small_stems_do_not_go_out(tmp_path):
    state = fx.trunk_of(fx.small_stem(fx.known_resnet("resnet18")))
    kept = Checkpoint(arch="resnet18", stem="conv3", method="x", state_dict=state)
    status, out = export(kept, tmp_path)
    assert status == 2 and not out.exists()


@pytest.mark.parametrize("author", ["Detectron2 Model Zoo", "Caffe2"])
def test_detectron2s_own_weights_are_refused(author, tmp_path):
    """BGR pixels and the stride in the 1x1 convolution do not show in the tensors."""
    made = fx.detectron2_moco(fx.known_resnet("resnet18")) | {"__author__": author}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(made))
    with pytest.raises(BadInput, match="BGR"):
        importing.read(tmp_path / "x.pkl")


def detectron2_stages(arch, file, *, stride_in_1x1=False, norm="BN"):
    """Load the file as Detectron2's trainer does; images -> C2..C5, and the network."""
    from detectron2.checkpoint import DetectionCheckpointer
    from detectron2.config import get_cfg
    from detectron2.layers import ShapeSpec
    from detectron2.modeling import build_resnet_backbone

    config = get_cfg()
    config.MODEL.DEVICE = "cpu"
    config.MODEL.RESNETS.DEPTH = int(arch.removeprefix("resnet"))
    config.MODEL.RESNETS.RES2_OUT_CHANNELS = (
        64 if arch in ("resnet18", "resnet34") else 256
    )
    config.MODEL.RESNETS.OUT_FEATURES = ["res2", "res3", "res4", "res5"]
    config.MODEL.RESNETS.NORM = norm
    config.MODEL.RESNETS.STRIDE_IN_1X1 = stride_in_1x1
    config.MODEL.BACKBONE.FREEZE_AT = 0
    with Undrawn():
        backbone = build_resnet_backbone(config, ShapeSpec(channels=3))
    model = torch.nn.ModuleDict(
        {"backbone": torch.nn.ModuleDict({"bottom_up": backbone})}
    )
    DetectionCheckpointer(model).load(str(file))
    backbone.eval()
    return (lambda images: list(backbone(images).values())), backbone


@needs_detectron2
@pytest.mark.parametrize(
    "arch", [pytest.param("resnet18", marks=pytest.mark.slow), "resnet50"]
)
def test_detectron2_computes_the_same_c2_to_c5(arch, tmp_path):
    source, out = exported(arch, tmp_path)
    stages, backbone = detectron2_stages(arch, out)
    state = backbone.state_dict()
    (found,) = trunks_of(state)
    loaded = {ours: state[key] for ours, key in found.keys.items()}
    assert all(torch.equal(loaded[k], v) for k, v in source.state_dict.items())
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        ours = source.backbone().eval().stages(images)
        found = zip(ours, stages(images), strict=True)
        differences = [float((a - b).abs().max()) for a, b in found]
    assert differences == [0.0] * 4
    if arch == "resnet50":
        # A stride in the wrong convolution loads without a word; only the features tell.
        wrong, _ = detectron2_stages(arch, out, stride_in_1x1=True)
        with torch.no_grad():
            pairs = list(zip(ours, wrong(images), strict=True))
        off = [float((a - b).abs().max() / a.abs().max()) for a, b in pairs]
        assert off[0] == 0.0
        assert min(off[1:]) > 0.01
        frozen, _ = detectron2_stages(arch, out, norm="FrozenBN")
        with torch.no_grad():
            pairs = list(zip(ours, frozen(images), strict=True))
        assert max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs) < 1e-5


@needs_detectron2
def test_what_detectron2_saves_comes_back(tmp_path):
    from detectron2.checkpoint import DetectionCheckpointer

    source, out = exported("resnet18", tmp_path)
    _, backbone = detectron2_stages("resnet18", out)
    model = torch.nn.ModuleDict(
        {"backbone": torch.nn.ModuleDict({"bottom_up": backbone})}
    )
    DetectionCheckpointer(model, str(tmp_path)).save("model_final", iteration=9)
    back = importing.read(tmp_path / "model_final.pth", name="after detection")
    assert back.digest == source.digest
    assert back.provenance["format"] == "detectron2"


TOOL = Path(__file__).parents[3] / "tools" / "convert_to_d2.py"


def run(*arguments):
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_converts_any_importable_file_and_refuses_others(tmp_path):
    torch.manual_seed(0)
    state = {f"module.encoder_q.{k}": v for k, v in resnet18().state_dict().items()}
    torch.save({"epoch": 200, "state_dict": state}, tmp_path / "moco.pth.tar")
    done = run(tmp_path / "moco.pth.tar", tmp_path / "out.pkl")
    assert done.returncode == 0, done.stderr
    assert "STRIDE_IN_1X1 False" in done.stdout
    content = pickle.loads((tmp_path / "out.pkl").read_bytes())
    assert len(content["model"]) == 120
    original = importing.read(tmp_path / "moco.pth.tar")
    back = importing.read(tmp_path / "out.pkl")
    assert (back.digest, back.name, back.epochs) == (original.digest, "moco", 200)
    misnamed = {key.replace("layer4", "layer5"): v for key, v in state.items()}
    torch.save(misnamed, tmp_path / "bad.pth")
    done = run(tmp_path / "bad.pth", tmp_path / "bad.pkl")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "missing: module.encoder_q.layer4.0.conv1.weight" in done.stderr
    assert not (tmp_path / "bad.pkl").exists()
