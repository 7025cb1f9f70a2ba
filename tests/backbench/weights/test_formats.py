"""Every published format goes in bit-equal or is refused by name."""

import json
import pickle
import re

import pytest
import timm
import torch
from support import foreign_fixtures as fx
from torch import nn
from torchvision.models import resnet18
from torchvision.models.resnet import BasicBlock

from backbench.cli import program
from backbench.errors import BadInput
from backbench.weights import archs, assembling, importing, inspecting
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.choosing import choose
from backbench.weights.families.resnet_tables import FORMATS
from backbench.weights.file_contents import FileContents
from backbench.weights.undrawn import Undrawn
from backbench.weights.weight_file import Opened, open_file

MAKERS = list(fx.EXPECTED)
with_all_makers = pytest.mark.parametrize(
    "maker", MAKERS, ids=lambda maker: maker.__name__
)


def write(made, path):
    """Write it as the format's project does: torch.save, or a pickle of arrays for Detectron2."""
    if isinstance(made, dict) and "__author__" in made:
        path.write_bytes(pickle.dumps(made))
    else:
        torch.save(made, path)
    return path


def opened(made, tmp_path):
    """Return the object as `open_file` does, without the file: arrays as tensors."""
    if "__author__" in made:
        tensors = {k: torch.from_numpy(v) for k, v in made["model"].items()}
        made = {**made, "model": tensors}
    return Opened(tmp_path / "x.pth", "torch zip", "0" * 64, 0, made, {})


def refused(file, match):
    """Assert that the file does not become a checkpoint, and that the line says why."""
    with pytest.raises(BadInput, match=match):
        found = FileContents(file)
        assembling.checkpoint(found, choose(found))


def equal(state_dict, expected):
    kept = [key for key in expected if not key.endswith("num_batches_tracked")]
    same = state_dict.keys() == expected.keys()
    return same and all(torch.equal(state_dict[key], expected[key]) for key in kept)


@with_all_makers
def test_goes_in_bit_equal(maker, tmp_path):
    arch = "resnet18"
    model = fx.known_resnet(arch)
    file = write(maker(model), tmp_path / "some_run.pth.tar")
    trunk = fx.trunk_of(model)
    form, encoder, _, method, epochs, stem, (mean, std) = fx.EXPECTED[maker]
    checkpoint = importing.read(file)
    file.unlink()
    assert equal(checkpoint.state_dict, trunk)
    about = (checkpoint.arch, checkpoint.stem, checkpoint.method, checkpoint.epochs)
    assert about == (arch, stem, method, epochs)
    pixels = checkpoint.pixels
    assert (pixels.mean, pixels.std, pixels.order) == (mean, std, "RGB")
    assert checkpoint.provenance["format"] == form
    assert checkpoint.provenance["encoder"] == encoder
    assert checkpoint.name == "some_run"
    assert not any("queue" in name or "layer1" in name for name in checkpoint.heads)


def test_every_format_has_a_fixture():
    assert {form.name for form in FORMATS} == {row[0] for row in fx.EXPECTED.values()}


@pytest.mark.parametrize(
    "maker", [m for m in MAKERS if fx.EXPECTED[m][2]], ids=lambda maker: maker.__name__
)
def test_the_other_encoder_can_be_chosen(maker, tmp_path):
    model = fx.known_resnet("resnet18")
    found = FileContents(opened(maker(model), tmp_path))
    trunk = fx.trunk_of(model)
    one = assembling.checkpoint(found, choose(found))
    other = assembling.checkpoint(
        found, choose(found, fx.EXPECTED[maker][2]), None, False
    )
    assert equal(one.state_dict, trunk)
    assert torch.equal(other.state_dict["conv1.weight"], -trunk["conv1.weight"])
    assert torch.equal(
        other.state_dict["bn1.running_mean"], trunk["bn1.running_mean"] + 1
    )
    with pytest.raises(
        BadInput, match=r"no encoder 'teachr' in it; (did you mean|allowed)"
    ):
        choose(found, "teachr")


# --- damage: one key renamed, removed or reshaped ---
def renamed(tensors, key):
    # A slip inside the name, as a hand-written converter makes it
    old, new = ("conv", "cnv") if "conv" in key else ("running_mean", "runing_mean")
    changed = key.replace(old, new)
    tensors[changed if changed != key else key.replace("weight", "wieght")] = (
        tensors.pop(key)
    )
    return key


def removed(tensors, key):
    del tensors[key]
    return key


def reshaped(tensors, key):
    tensors[key] = tensors[key][:3]
    return key


@with_all_makers
def test_damage_is_refused_by_name(maker, tmp_path):
    made = maker(fx.known_resnet("resnet18"))
    trunk = choose(FileContents(opened(made, tmp_path)))
    for name in (
        "conv1.weight",
        "layer3.1.conv2.weight",
        "layer4.0.downsample.1.running_mean",
    ):
        for damage in (renamed, removed, reshaped):
            content = copy_tables(made)
            table = content
            if trunk.table:
                for part in trunk.table.split("."):
                    table = table[part]
            key = damage(table, trunk.keys[name])
            found = FileContents(opened(content, tmp_path))
            with pytest.raises(BadInput) as error:
                assembling.checkpoint(found, choose(found))
            assert key in str(error.value), error.value
            assert "\n" not in str(error.value)


def copy_tables(value):
    """Copy the dicts, so that one table can be changed; tensors are shared."""
    if not isinstance(value, dict):
        return value
    return {key: copy_tables(child) for key, child in value.items()}


def test_command_line_refuses_with_one_line_and_no_file(tmp_path, bad_input):
    made = fx.moco(fx.known_resnet("resnet18"))
    key = renamed(made["state_dict"], "module.encoder_q.layer1.0.conv1.weight")
    file = write(made, tmp_path / "damaged.pth")
    out = tmp_path / "out" / "x.safetensors"
    meant = "is 'module.encoder_q.layer1.0.cnv1.weight' meant?"
    said = bad_input(program.main(["import", str(file), "--out", str(out)]), key, meant)
    assert said.count("\n") == 1 and not out.exists()
    target = str(tmp_path / "x.pkl")
    export = ["export", str(file), "--format", "detectron2", "--out", target]
    assert program.main(export) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged.pth"]


def test_unrecognised_file_with_two_trunks_is_refused(tmp_path, bad_input):
    model = fx.known_resnet("resnet18")
    made = fx.prefixed("encoder_one.", model) | fx.prefixed(
        "encoder_two.", fx.second(model)
    )
    file = write({"weights": made}, tmp_path / "x.pth")
    out = tmp_path / "x.safetensors"
    choice = ("nearest format: ", "--encoder encoder_one or encoder_two")
    both = "'weights: encoder_one.' and 'weights: encoder_two.'"
    bad_input(program.main(["import", str(file), "--out", str(out)]), both, *choice)
    assert not out.exists()
    # export has no --encoder.
    exported = program.main(
        ["export", str(file), "--format", "timm", "--out", str(out)]
    )
    bad_input(exported, "in `backbench import FILE --out X.safetensors`")
    words = ["import", str(file), "--out", str(out), "--encoder", "encoder_two"]
    assert program.main(words) == 0
    assert torch.equal(
        importing.read(out).state_dict["conv1.weight"], -model.conv1.weight
    )


def test_recognised_format_with_a_stray_trunk_is_refused(tmp_path):
    model = fx.known_resnet("resnet18")
    made = fx.moco(model)
    made["state_dict"] |= fx.prefixed("module.encoder_x.", model)
    refused(opened(made, tmp_path), "in no known format")


def test_key_encoder_alone_is_not_taken_for_the_query(tmp_path):
    made = fx.moco(fx.known_resnet("resnet18"))
    made["state_dict"] = {
        k: v for k, v in made["state_dict"].items() if "encoder_q" not in k
    }
    refused(
        opened(made, tmp_path),
        "format moco without its query; choose with --encoder key",
    )


def test_unrecognised_file_with_one_trunk_goes_in(tmp_path):
    model = fx.known_resnet("resnet18")
    file = write({"net": {"visual": model.state_dict()}}, tmp_path / "x.pth")
    checkpoint = importing.read(
        file, method="mine", name="Mine", epochs=7, published="p/t/r"
    )
    assert equal(checkpoint.state_dict, fx.trunk_of(model))
    assert (checkpoint.method, checkpoint.name, checkpoint.epochs) == (
        "mine",
        "Mine",
        7,
    )
    assert checkpoint.provenance["format"] == "unrecognised"
    assert checkpoint.provenance["published"] == "p/t/r"


def test_shortcuts_of_resnets_for_cifar_are_torchvisions_downsamples(tmp_path):
    model = fx.small_stem(fx.known_resnet("resnet18"))
    theirs = {
        f"module.{key.replace('downsample', 'shortcut').replace('fc.', 'linear.')}": value
        for key, value in model.state_dict().items()
    }
    file = write({"net": theirs, "acc": 95.1, "epoch": 199}, tmp_path / "ckpt.pth")
    with pytest.raises(BadInput, match="choose --stem conv3 "):
        importing.read(file)
    checkpoint = importing.read(file, stem="conv3")
    assert equal(checkpoint.state_dict, fx.trunk_of(model))
    assert checkpoint.heads.keys() == {"linear.weight", "linear.bias"}
    del theirs["module.layer2.0.shortcut.1.weight"]
    refused(
        opened({"net": theirs}, tmp_path),
        r"1 missing: module\.layer2\.0\.shortcut\.1\.weight",
    )


@pytest.mark.parametrize(
    "extra",
    [
        "layer1.0.conv4.weight",
        "layer5.0.conv1.weight",
        "layer2.7.bn1.weight",
        "bn1.extra",
        "conv0.weight",
    ],
)
def test_extra_tensor_inside_the_trunk_is_refused(extra, tmp_path):
    state = fx.known_resnet("resnet18").state_dict() | {extra: torch.ones(3)}
    refused(opened(state, tmp_path), f"1 extra inside the trunk: {extra}")


def test_other_networks_are_not_trunks(tmp_path):
    from torchvision.models import mobilenet_v3_small, wide_resnet50_2

    with torch.device("meta"):
        wide = {
            k: torch.zeros(v.shape) for k, v in wide_resnet50_2().state_dict().items()
        }
    refused(
        opened(wide, tmp_path),
        r"of the wrong shape: layer1.0.conv1.weight \(128, 64, 1, 1\)",
    )
    state = mobilenet_v3_small().state_dict()
    refused(
        opened(state, tmp_path), "tensors are those of torchvision's mobilenet_v3_small"
    )
    refused(opened({"epoch": 3}, tmp_path), "it holds no tensors")


def test_two_copies_that_should_be_one_trunk_must_agree(tmp_path):
    made = fx.mmselfsup_09(fx.known_resnet("resnet18"))
    key = "encoder_q.0.layer2.0.conv1.weight"
    value = made["state_dict"][key]
    for other in (value + 1, value.to_sparse(), value.to(torch.float8_e4m3fn)):
        made["state_dict"][key] = other
        said = r"should be the same trunk but differ in .*layer2.0.conv1.weight"
        refused(opened(made, tmp_path), said)


# --- values ---
def test_missing_statistics_are_refused_unless_asked_for(tmp_path, capsys, bad_input):
    model = fx.known_resnet("resnet18")
    absent = ("running_mean", "running_var", "num_batches_tracked")
    state = {k: v for k, v in model.state_dict().items() if not k.endswith(absent)}
    file = write(state, tmp_path / "parameters.pth")
    out = tmp_path / "x.safetensors"
    words = ["import", str(file), "--out", str(out)]
    allow = "--allow-missing-statistics in `backbench import FILE"
    bad_input(program.main(words), "no batch-norm statistics", allow)
    assert not out.exists()
    assert program.main(["inspect", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["importable"] is False
    assert report["encoders"][0]["missing_statistics"] == "all"
    assert program.main([*words, "--allow-missing-statistics"]) == 0
    checkpoint = importing.read(out)
    for key, value in checkpoint.state_dict.items():
        if key.endswith("running_var"):
            assert bool((value == 1).all())
        elif key.endswith("running_mean"):
            assert bool((value == 0).all())
    assert "missing" in checkpoint.provenance["statistics"]


def test_one_missing_statistic_is_a_missing_tensor(tmp_path):
    state = fx.known_resnet("resnet18").state_dict()
    del state["layer1.0.bn1.running_var"]
    found = FileContents(opened(state, tmp_path))
    with pytest.raises(BadInput, match=r"1 missing: layer1\.0\.bn1\.running_var"):
        assembling.checkpoint(found, choose(found), allow_missing_statistics=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_become_float32_and_absent_counters_zero(dtype, tmp_path):
    model = fx.known_resnet("resnet18")
    state = {
        k: v.to(dtype) for k, v in model.state_dict().items() if "num_batches" not in k
    }
    found = importing.read(write(state, tmp_path / "x.pth")).state_dict
    assert equal(
        found, {k: v.to(dtype).to(v.dtype) for k, v in fx.trunk_of(model).items()}
    )
    assert found["conv1.weight"].dtype == torch.float32
    assert found["bn1.num_batches_tracked"] == 0


@pytest.mark.parametrize(
    ("key", "change", "word"),
    [
        ("layer1.0.conv1.weight", lambda t: t.fill_(float("nan")), "not finite"),
        ("bn1.running_mean", lambda t: t.fill_(float("inf")), "not finite"),
        ("bn1.running_var", lambda t: t.neg_(), "negative"),
        ("bn1.running_var", lambda t: t.neg_().to(torch.float8_e4m3fn), "negative"),
        (
            "conv1.weight",
            lambda t: t.fill_(float("nan")).to(torch.float8_e4m3fn),
            "not finite",
        ),
        (
            "conv1.weight",
            lambda t: torch.full(t.shape, 1e300, dtype=torch.float64),
            "float32",
        ),
        ("conv1.weight", lambda t: (t * 100).to(torch.int8), "int8"),
        (
            "layer4.0.conv1.weight",
            lambda t: torch.zeros(1).expand(t.shape),
            "not all in the file",
        ),
    ],
)
def test_unusable_values_are_refused(key, change, word, tmp_path):
    state = dict(fx.known_resnet("resnet18").state_dict())
    state[key] = change(state[key].clone())
    refused(opened(state, tmp_path), rf"1 not usable: {key} \(.*{word}")


def test_large_but_finite_weights_are_finite(tmp_path):
    state = dict(fx.known_resnet("resnet18").state_dict())
    # Their sum overflows float32.
    state["layer1.0.conv1.weight"] = torch.full((64, 64, 3, 3), 3e38)
    found = FileContents(opened(state, tmp_path))
    assembling.checkpoint(found, choose(found))


# --- stems, features ---
def test_padding_of_a_plain_3x3_convolution_must_be_told(tmp_path, bad_input):
    model = fx.small_stem(fx.known_resnet("resnet18"))
    file = write(fx.plain(model), tmp_path / "x.pth")
    out = tmp_path / "x.safetensors"
    words = ["import", str(file), "--out", str(out)]
    bad_input(program.main(words), "choose --stem", "in `backbench import FILE")
    bad_input(
        program.main([*words, "--stem", "imagenet"]), "(64, 3, 3, 3), not 'imagenet'"
    )
    bad_input(program.main([*words, "--stem", "conv3_p1"]), "did you mean")
    assert program.main([*words, "--stem", "conv3_p2"]) == 0
    assert importing.read(out).stem == "conv3_p2"
    with pytest.raises(BadInput, match="not 'conv3'"):
        file = write(fx.plain(fx.known_resnet("resnet18")), tmp_path / "y.pth")
        importing.read(file, stem="conv3")


def test_a_rule_of_positions_is_refused_for_a_resnet(tmp_path, bad_input):
    file = write(fx.plain(fx.known_resnet("resnet18")), tmp_path / "x.pth")
    out = tmp_path / "out"
    messages = {
        "nope": "--pos nope: expected +0.1, aa, size",
        "aa": "leave out --pos",
    }
    for rule, message in messages.items():
        words = ["import", str(file), "--out", str(out), "--pos", rule]
        said = bad_input(program.main(words), message)
        assert said.count("\n") == 1
    assert not out.exists()


def features_of(model, size):
    torch.manual_seed(5)
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        return images, model.eval()(images).flatten(1)


@pytest.mark.parametrize(
    ("maker", "padding"),
    [
        (fx.moco, None),
        (fx.vissl, None),
        (fx.lightly_example, None),
        (fx.cllr, 1),
        (fx.mio, 0),
        (fx.arb_cifar, 2),
    ],
)
def test_features_before_and_after_are_equal(maker, padding, tmp_path):
    model = fx.known_resnet("resnet18")
    made = maker(model)  # the modules' padding does not reach the file
    if padding is not None:
        model.conv1.padding = (padding, padding)
    model.fc = nn.Identity()
    images, expected = features_of(model, 40)
    checkpoint = importing.read(write(made, tmp_path / "x.pth"))
    with torch.no_grad():
        found = checkpoint.backbone().eval()(images)
    assert (found - expected).abs().max() == 0.0


# --- inspect and export ---
def test_inspect_tells_what_is_there(tmp_path, capsys):
    file = write(fx.moco(fx.known_resnet("resnet18")), tmp_path / "x.pth.tar")
    assert program.main(["inspect", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    about = [report[key] for key in ("format", "container", "epochs", "arch")]
    assert about == ["moco", "torch zip", 200, "resnet18"]
    query, key = report["encoders"]
    about = [query[key] for key in ("encoder", "default", "matched", "expected")]
    assert about == ["query", True, 120, 120]
    assert (key["encoder"], key["default"], key["prefix"]) == (
        "key",
        False,
        "module.encoder_k.",
    )
    assert query["problems"] == {}
    assert query["untrained"] == []
    groups = {row["group"]: row["tensors"] for row in report["leftovers"]}
    assert groups == {"optimiser": 3, "projector": 8, "queue": 2}
    assert report["digest"] == importing.read(file).digest
    assert report["pixels"]["order"] == "RGB"
    assert program.main(["inspect", str(file)]) == 0
    table = capsys.readouterr().out
    for word in (
        "moco",
        "JCL",
        "query",
        "120/120",
        "resnet18",
        "queue",
        report["digest"],
    ):
        assert word in table


def test_inspect_shows_what_is_wrong_and_how_much_matches(tmp_path, capsys):
    made = fx.dino(fx.known_resnet("resnet18"))
    removed(made["teacher"], "module.backbone.layer1.0.conv1.weight")
    assert program.main(["inspect", str(write(made, tmp_path / "x.pth"))]) == 0
    text = capsys.readouterr().out
    assert "119/120" in text
    assert "1 missing: module.backbone.layer1.0.conv1.weight" in text
    assert "cannot be imported as it is" in text


def test_where_no_trunk_is_recognised_nothing_lies_beside_it(tmp_path, capsys):
    file = write({"decoder.weight": torch.ones(3, 4)}, tmp_path / "x.pth")
    assert program.main(["inspect", str(file)]) == 0
    said = capsys.readouterr().out
    assert "\ntrunk     none recognised\nholds     other: 1 tensors" in said
    assert "beside" not in said


def test_inspect_recognises_an_untrained_trunk(tmp_path):
    torch.manual_seed(0)
    model = resnet18().train()
    report = inspecting.inspect(write(model.state_dict(), tmp_path / "random.pth"))
    assert len(report["encoders"][0]["untrained"]) == 3
    for module in model.modules():
        if isinstance(module, BasicBlock):
            nn.init.zeros_(module.bn2.weight)  # as of zero_init_residual=True
    model(torch.randn(2, 3, 64, 64))  # one batch moves the statistics, not the weights
    report = inspecting.inspect(write(model.state_dict(), tmp_path / "seen.pth"))
    found = [sign.split(":")[0] for sign in report["encoders"][0]["untrained"]]
    convolutions = "every convolution has the scale of its initialisation"
    assert found == [convolutions, "every norm's weight is 1 or 0"]


def test_inspect_and_import_of_our_own_files(tmp_path, capsys):
    file = write(fx.moco(fx.known_resnet("resnet18")), tmp_path / "x.pth")
    checkpoint = importing.read(file, name="Ours")
    checkpoint.save(tmp_path / "x.safetensors")
    report = inspecting.inspect(tmp_path / "x.safetensors")
    about = (report["format"], report["digest"], report["name"])
    assert about == ("backbench", checkpoint.digest, "Ours")
    assert importing.read(tmp_path / "x.safetensors", epochs=3).epochs == 3
    with pytest.raises(BadInput, match="holds one trunk"):
        importing.read(tmp_path / "x.safetensors", encoder="key")


@pytest.mark.parametrize("stem", ["imagenet", "conv3_p0", "conv3_p2"])
def test_the_printed_call_loads_the_exported_file(stem, tmp_path, capsys):
    model = fx.known_resnet("resnet18")
    state = fx.trunk_of(model if stem == "imagenet" else fx.small_stem(model))
    with Undrawn():
        trunk = archs.build_trunk("resnet18", stem)
    trunk.load_state_dict(state, strict=True)
    source = Checkpoint(
        arch="resnet18", stem=stem, method="x", state_dict=trunk.state_dict()
    )
    file = tmp_path / "x.safetensors"
    source.save(file)
    out = tmp_path / "out.pth"
    images = torch.randn(2, 3, 32, 32)
    for form in ("torchvision", "timm"):
        words = ["export", str(file), "--format", form, "--out", str(out)]
        assert program.main(words) == 0
        line = capsys.readouterr().out
        call = re.search(r"tensors for (.*); pixel statistics", line)[1]
        with Undrawn():
            theirs = resnet18()
            if form == "timm":
                theirs = eval(call.partition(" with ")[0], {"timm": timm})
        for name, value in re.findall(r"(\w+) = ((?:Identity|Conv2d)\(.*?\))", call):
            setattr(theirs, name, eval(value, vars(nn)))
        theirs.load_state_dict(torch.load(out), strict=True)
        with torch.no_grad():
            features = theirs.eval()(images)
            torch.testing.assert_close(features, trunk.eval()(images))


@pytest.mark.parametrize(
    ("kind", "form", "takes"),
    [
        (("resnet18", "conv3"), "detectron2", ("torchvision", "timm")),
        (("resnet18,width=0.25", "imagenet"), "detectron2", ()),
        (("resnet18,width=0.25", "imagenet"), "timm", ()),
        (("lab:resnet18,width=0.5", "imagenet"), "torchvision", ()),
        (("timm:test_convnext", "imagenet"), "torchvision", ("timm",)),
    ],
)
def test_what_a_refused_export_names_is_true(kind, form, takes, tmp_path, bad_input):
    """Each command that the line names writes the file; where none does, the line names none."""
    arch, stem = kind
    trunk = archs.build_trunk(arch, stem)
    source = Checkpoint(
        arch=arch,
        stem=stem,
        method="x",
        state_dict=trunk.state_dict(),
        pixels=archs.default_pixels(arch),
    )
    file = tmp_path / "x.safetensors"
    source.save(file)
    out = tmp_path / "out"
    words = ["export", str(file), "--format", form, "--out", str(out)]
    line = bad_input(program.main(words), arch, f"which {form} does not have")
    assert not out.exists() and line.count("\n") == 1
    commands = re.findall(r"`backbench (export [^`]*)`", line)
    assert [command.split()[3] for command in commands] == list(takes)
    for command in commands:
        named = [str(out) if word == "F" else word for word in command.split()]
        assert program.main(named) == 0
        assert out.exists()
    if not commands:
        inspected = re.search(r"`backbench (inspect [^`]*)`", line)[1]
        assert program.main(inspected.split()) == 0
        importing.read(file).backbone()


@pytest.mark.parametrize(
    ("form", "suffix"), [("torchvision", ".pth"), ("timm", ".safetensors")]
)
def test_export_and_back(form, suffix, tmp_path, capsys):
    model = fx.known_resnet("resnet18")
    file = write(fx.swav(model), tmp_path / "x.pth")
    out = tmp_path / f"out{suffix}"
    assert program.main(["export", str(file), "--format", form, "--out", str(out)]) == 0
    state = open_file(out).tree
    with Undrawn():
        theirs = resnet18()
    theirs.fc = nn.Identity()
    theirs.load_state_dict(state)
    assert equal(theirs.state_dict(), fx.trunk_of(model))
    beside = json.loads((tmp_path / f"{out.name}.json").read_text())
    assert beside["pixels"]["std"] == [0.228, 0.224, 0.225]
    first = importing.read(file)
    again = importing.read(out)
    assert first.digest == beside["digest"]
    # torchvision's and timm's formats have ImageNet's deviations, SwAV has others.
    assert again.digest != first.digest
    assert again.replace(pixels=first.pixels).digest == first.digest
