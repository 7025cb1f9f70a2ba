"""A file that no format recognises is held against all networks of timm and torchvision."""

import re

import pytest
import timm
import torch
import torchvision
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file
from support.foreign_fixtures import cut_from_one_row

from backbench.cli import program
from backbench.errors import BadInput
from backbench.weights import archs, importing
from backbench.weights.families import (
    architectures,
    lookalikes,
    picture_check,
    vit_shapes,
)
from backbench.weights.undrawn import Undrawn

SPOT_CHECKED = (
    "efficientnet_lite0",
    "tf_efficientnet_lite0",
    "swin_tiny_patch4_window7_224",
    "wide_resnet50_2",
    "vit_tiny_patch16_224",
    "iformer_h",
)


@pytest.mark.parametrize("name", SPOT_CHECKED)
def test_the_index_has_what_timm_builds(name):
    built = architectures.of_timm(name)
    row = architectures.row_of("timm", name)
    assert row is not None
    assert row == built or row == built._replace(network="")


def test_the_index_has_what_torchvision_builds():
    built = architectures.of_torchvision("efficientnet_b0")
    row = architectures.row_of("torchvision", "efficientnet_b0")
    assert row == built


def test_the_index_has_all_names():
    """Of a newer timm, or torchvision, `python tools/index_architectures.py` makes a new one."""
    known = {(row.library, row.name) for row in architectures.rows()}
    assert {("timm", name) for name in timm.list_models()} <= known
    ours = torchvision.models.list_models(module=torchvision.models)
    assert {("torchvision", name) for name in ours} <= known


@pytest.fixture(scope="module")
def small():
    """MobileNetV3-Small 0.75 with a classifier, by timm's names; each tensor has values of its own."""
    torch.manual_seed(0)
    model = timm.create_model("tf_mobilenetv3_small_075", num_classes=5)
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)
    return model.eval()


def renamed(state):
    """Give each module another name, as its author has: the order stays."""
    return {f"_net.{key.replace('blocks', 'stage')}": state[key] for key in state}


def refusal(path, capsys, *options):
    """Return the one line that refuses the file."""
    out = path.parent / "out.safetensors"
    assert program.main(["import", str(path), "--out", str(out), *options]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1, line
    assert not out.exists()
    return line


def test_two_networks_of_the_same_tensors_are_named_with_what_differs(
    small, tmp_path, capsys
):
    torch.save(small.state_dict(), tmp_path / "x.pth")
    line = refusal(tmp_path / "x.pth", capsys)
    assert "mobilenetv3_small_075 (eps 1e-05, padding (1, 1)" in line
    assert "tf_mobilenetv3_small_075 (eps 0.001, padding (0, 0)" in line
    assert "mean 0.5/0.5/0.5" in line and "mean 0.485/0.456/0.406" in line
    assert "--arch timm:NAME --out" in line and "--check FOLDER" in line


def test_networks_that_differ_in_little_are_told_apart_all_the_same():
    groups = lookalikes.groups(["iformer_l", "iformer_l_distilled"])
    assert len(groups) == 2
    assert all(lookalikes.differences(groups))


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: timm.create_model("regnety_002", num_classes=3), "regnety_002"),
        (torchvision.models.densenet121, "densenet121"),
        pytest.param(
            torchvision.models.wide_resnet50_2,
            "wide_resnet50_2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_command_that_the_refusal_names_imports_equal_tensors(
    made, name, tmp_path, capsys
):
    with Undrawn():
        model = made()
    state = cut_from_one_row(model).state_dict()
    torch.save(
        {"state_dict": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "x.pth"
    )
    line = refusal(tmp_path / "x.pth", capsys)
    command = re.search(r"`backbench import FILE (--arch \S+) --out", line)[1].split()
    assert command[1] == f"timm:{name}"
    out = tmp_path / "out.safetensors"
    assert (
        program.main(["import", str(tmp_path / "x.pth"), "--out", str(out), *command])
        == 0
    )
    printed = capsys.readouterr().out
    assert "classes comes along" in printed and "no part of the features" in printed
    found = importing.read(out).state_dict
    assert found and all(torch.equal(found[key], state[key]) for key in found)


def test_a_named_network_that_is_one_of_two_is_said(small, tmp_path, caplog):
    torch.save(small.state_dict(), tmp_path / "x.pth")
    out = tmp_path / "out.safetensors"
    options = ["--arch", "timm:mobilenetv3_small_075", "--out", str(out)]
    assert program.main(["import", str(tmp_path / "x.pth"), *options]) == 0
    assert "but also of tf_mobilenetv3_small_075 (eps 0.001" in caplog.text


def test_other_names_go_in_by_order_with_the_features_of_their_author(tmp_path, capsys):
    torch.manual_seed(0)
    theirs = torchvision.models.efficientnet_b0().eval()
    torch.save(theirs.state_dict(), tmp_path / "x.pth")
    line = refusal(tmp_path / "x.pth", capsys)
    assert "--rename by-order" in line
    out = tmp_path / "out.safetensors"
    options = ["--arch", "timm:efficientnet_b0", "--rename", "by-order"]
    assert (
        program.main(["import", str(tmp_path / "x.pth"), "--out", str(out), *options])
        == 0
    )
    printed = capsys.readouterr().out
    assert re.search(r"features\.0\.0\.weight +conv_stem\.weight\n", printed)
    assert re.search(r"classifier\.1\.weight +classifier\.weight\n", printed)
    pixels = torch.randn(2, 3, 64, 64)
    trunk = importing.read(out).backbone().eval()
    with torch.no_grad():
        expected = theirs.avgpool(theirs.features(pixels)).flatten(1)
        torch.testing.assert_close(trunk(pixels), expected, rtol=1e-4, atol=1e-5)


def test_a_losss_temperature_is_no_classifier(small, tmp_path, capsys):
    state = renamed(small.state_dict())
    plain = {key.removeprefix("_net."): state[key] for key in state}
    trunk = {key: plain[key] for key in plain if not key.startswith("classifier")}
    torch.save(trunk | {"loss.temperature": torch.ones(())}, tmp_path / "x.pth")
    line = refusal(tmp_path / "x.pth", capsys)
    count = len(lookalikes.shapes_of("tf_mobilenetv3_small_075", 0))
    assert f"its {count} tensors are those of several" in line
    assert "--rename by-order" in line and "--check" not in line


@pytest.mark.parametrize("damage", ["swapped", "alphabet", "missing", "kinds"])
def test_an_order_that_is_another_one_is_refused(damage, small, tmp_path, capsys):
    state = renamed(small.state_dict())
    keys = [key for key in state if not key.endswith("num_batches_tracked")]
    if damage == "swapped":
        keys[0], keys[5] = keys[5], keys[0]
    elif damage == "alphabet":
        keys.sort()
    elif damage == "missing":
        del keys[40]
    else:
        # A norm's weight and bias have one shape.
        keys[1], keys[2] = keys[2], keys[1]
    torch.save({key: state[key] for key in keys}, tmp_path / "x.pth")
    options = ["--arch", "timm:tf_mobilenetv3_small_075", "--rename", "by-order"]
    assert "--rename by-order" in refusal(tmp_path / "x.pth", capsys, *options)


def test_names_by_rules(small, tmp_path, capsys):
    save_file(renamed(small.state_dict()), tmp_path / "x.safetensors")
    rules = tmp_path / "rules.txt"
    rules.write_text("# the author's names\n^_net\\.stage -> blocks\n^_net\\. -> \n")
    found = importing.read(
        tmp_path / "x.safetensors",
        arch="timm:tf_mobilenetv3_small_075",
        rename=str(rules),
    )
    state = small.state_dict()
    assert all(
        torch.equal(found.state_dict[key], state[key]) for key in found.state_dict
    )
    keys = [key for key in state if not key.startswith("classifier.")]
    total = found.provenance["renamed"]
    assert [total[key] for key in renamed(dict.fromkeys(keys))] == keys
    for text, word in (
        ("x y\n", "no arrow"),
        ("( -> y\n", "rules.txt:1"),
        (".* -> y\n", "another tensor both become y"),
        ("^_net\\. -> \n^net\\. -> \n", "rules.txt:2: '^net\\.' fits none"),
        (
            "^_net\\.stage -> blocks\n^_net\\.(bn|conv_h) -> \\1\n",
            "rules.txt: 1 of tf_mobilenetv3_small_075's tensors get none of the file's:"
            " conv_stem.weight (no rule fits _net.classifier.bias",
        ),
    ):
        rules.write_text(text)
        options = ["--arch", "timm:tf_mobilenetv3_small_075", "--rename", str(rules)]
        assert word in refusal(tmp_path / "x.safetensors", capsys, *options)
    rules.write_bytes(b"\xff\xfea\x00")
    line = refusal(tmp_path / "x.safetensors", capsys, *options)
    assert f"--rename {rules}: is no text; write rules, a line each" in line


# --- pictures that tell ---


def drawn(folder, model, count):
    """Draw pictures, put each into the folder of the class that the model gives it."""
    config = timm.data.resolve_data_config({}, pretrained_cfg=model.pretrained_cfg)
    transform = timm.data.create_transform(**config)
    generator = torch.Generator().manual_seed(0)
    pictures = []
    for _ in range(count):
        cells = torch.rand(4, 4, 3, generator=generator) * 255
        pictures.append(Image.fromarray(cells.byte().numpy()).resize((64, 64)))
    with torch.no_grad():
        labels = model(torch.stack([transform(p) for p in pictures])).argmax(1).tolist()
    for number, (picture, label) in enumerate(zip(pictures, labels)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        picture.save(folder / str(label) / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def sharp(small):
    """The same network with a classifier whose classes are equally frequent on its features."""
    config = timm.data.resolve_data_config({}, pretrained_cfg=small.pretrained_cfg)
    transform = timm.data.create_transform(**config)
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(24):
        cells = torch.rand(4, 4, 3, generator=generator) * 255
        rows.append(transform(Image.fromarray(cells.byte().numpy()).resize((64, 64))))
    with torch.no_grad():
        features = small.forward_head(
            small.forward_features(torch.stack(rows)), pre_logits=True
        )
        spread = features - features.mean(0)
        _, _, axes = torch.linalg.svd(spread, full_matrices=False)
        weight = torch.cat([axes[:2], -axes[:2], axes[2:3]])
        small.classifier.weight.copy_(weight)
        small.classifier.bias.copy_(-(weight @ features.mean(0)))
    return small


def test_pictures_of_known_classes_choose_the_network(sharp, tmp_path, capsys):
    folder = drawn(tmp_path / "pictures", sharp, count=24)
    torch.save(renamed(sharp.state_dict()), tmp_path / "x.pth")
    out = tmp_path / "out.safetensors"
    command = ["import", str(tmp_path / "x.pth"), "--out", str(out)]
    assert program.main([*command, "--check", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "timm:tf_mobilenetv3_small_075: 100.0% of 24 pictures" in printed
    assert importing.read(out).arch == "timm:tf_mobilenetv3_small_075"
    # The wrong one is refused, though a user names it
    out.unlink()
    wrong = ["--arch", "timm:mobilenetv3_small_075", "--check", str(folder)]
    line = refusal(tmp_path / "x.pth", capsys, *wrong)
    assert "is not the network of this file" in line


def test_pictures_choose_the_network_of_a_file_in_the_hubs_cache(
    sharp, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--north--tiny"
    file = cached / "snapshots" / ("5" * 40) / "model.safetensors"
    file.parent.mkdir(parents=True)
    save_file(sharp.state_dict(), file)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("5" * 40)
    folder = drawn(tmp_path / "pictures", sharp, count=24)
    out = tmp_path / "out.safetensors"
    words = ["import", "hf:north/tiny", "--check", str(folder), "--out", str(out)]
    assert program.main(words) == 0
    line = "hf:north/tiny: timm:tf_mobilenetv3_small_075: 100.0% of 24 pictures"
    assert line in capsys.readouterr().out
    assert importing.read(out).arch == "timm:tf_mobilenetv3_small_075"


def test_pictures_of_other_classes_choose_none(sharp, tmp_path, capsys):
    folder = drawn(tmp_path / "pictures", sharp, count=20)
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        (folder / name).rename(folder / f"x{name}")
    for name, other in zip(names, names[1:] + names[:1]):
        (folder / f"x{name}").rename(folder / other)
    torch.save(sharp.state_dict(), tmp_path / "x.pth")
    line = refusal(tmp_path / "x.pth", capsys, "--check", str(folder))
    assert "no network is better than chance" in line


def test_labels_of_pictures(tmp_path):
    def labels(folder, classes):
        images = picture_check.pictures(folder, classes)
        return dict(zip(images.paths, images.labels))

    def picture(name):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)

    picture("flat/n01440764_tench.png")
    picture("flat/n15075141_tissue.png")
    assert list(labels(tmp_path / "flat", 1000).values()) == [0, 999]
    picture("ids/n01443537/a.png")
    assert list(labels(tmp_path / "ids", 1000).values()) == [1]
    picture("places/12/a.png")
    assert list(labels(tmp_path / "places", 20).values()) == [12]
    picture("names/cat/a.png")
    picture("names/dog/a.png")
    assert list(labels(tmp_path / "names", 2).values()) == [0, 1]
    with pytest.raises(BadInput, match="nothing tells which"):
        picture_check.pictures(tmp_path / "names", 3)
    picture("odd/a.png")
    with pytest.raises(BadInput, match="ImageNet's ids"):
        picture_check.pictures(tmp_path / "odd", 3)


def test_networks_that_differ_in_pixels_alone_are_said_where_nobody_told_them():
    said = lookalikes.twins("vit_small_patch16_224", pixels_told=False)
    assert said.startswith(
        "has the tensors of timm:vit_small_patch16_224 (mean 0.5/0.5/0.5"
    )
    assert "but also of deit_small_patch16_224 (mean 0.485/0.456/0.406" in said
    assert lookalikes.twins("vit_small_patch16_224", pixels_told=True) == ""
    for told in (False, True):
        assert "tf_efficientnet_lite0" in lookalikes.twins(
            "efficientnet_lite0", pixels_told=told
        )
        assert lookalikes.twins("test_vit", pixels_told=told) == ""
        assert lookalikes.twins("no_such_network", pixels_told=told) == ""


def of_no_square(state):
    state["pos_embed"] = torch.empty(1, 9, 192)


def of_another_block(state):
    state["blocks.0.attn.gate"] = torch.empty(192)


def of_no_norm(state):
    del state["norm.weight"]


def of_gated_blocks(state):
    del state["blocks.0.mlp.fc1.weight"]


def of_flat_patches(state):
    state["patch_embed.proj.weight"] = torch.empty(192, 192)


@pytest.mark.parametrize(
    "change",
    [of_no_square, of_another_block, of_no_norm, of_gated_blocks, of_flat_patches],
)
def test_a_transformer_that_no_option_makes_is_not_called_timms(change):
    family = archs.family_of("timm:vit_tiny_patch16_224")
    arch = "timm:vit_tiny_patch16_224,depth=1,img_size=24,patch_size=8"
    state = dict(family.tensors(arch, "native")) | {"head.weight": torch.empty(7, 192)}
    assert f"--arch {arch} --out" in vit_shapes.advice(family, {"model": dict(state)})
    change(state)
    assert vit_shapes.advice(family, {"model": state}) == ""
