"""Formats of ViTs and ConvNeXts go in bit-equal or are refused by name; nothing is guessed."""

import functools
import json
import re
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from support import timm_fixtures as fx
from support.foreign_fixtures import cut_from_one_row

from backbench.cli import program
from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights import archs, assembling, importing, inspecting
from backbench.weights.choosing import choose
from backbench.weights.families.resnet_tables import FORMATS
from backbench.weights.families.timm_formats import TIMM, TIMM_FORMATS
from backbench.weights.family import TrunkMetadata
from backbench.weights.file_contents import FileContents
from backbench.weights.undrawn import Undrawn
from backbench.weights.weight_file import Opened

MAKERS = list(fx.CASES)
# These are told from others by one name or two; some of them build large models to look at.
ALIKE = (fx.dinov2_giant, fx.ibot_training, fx.hub_mae, fx.hub_dinov3_convnext)
QUICK = (fx.dino, fx.dinov2_registers, fx.convnext, fx.hub_mae)


def some(slow, makers=MAKERS):
    """Make a parameter of each maker; those of which `slow` is true are slow tests."""
    out = []
    for maker in makers:
        marks = pytest.mark.slow if slow(maker) else ()
        out.append(pytest.param(maker, marks=marks, id=maker.__name__))
    return out


with_all_makers = pytest.mark.parametrize("maker", some(lambda maker: maker in ALIKE))


def opened(made, tmp_path):
    """Return the object as `open_file` does, without the file."""
    return Opened(tmp_path / "x.pth", "torch zip", "0" * 64, 0, made, {})


def saved(made, tmp_path, name="some_run.pth"):
    torch.save(made, tmp_path / name)
    return tmp_path / name


@with_all_makers
def test_goes_in_bit_equal(maker, tmp_path):
    form, arch, _, options, reading, red, positions, licence = fx.CASES[maker]
    state = fx.known(arch)
    # Of two layers, four cannot be read
    said = {"reading": "cls@2"} if reading == "cls@4" else {}
    checkpoint = importing.read(
        saved(maker(state), tmp_path), arch=arch, **options, **said
    )
    assert checkpoint.provenance["format"] == form
    assert checkpoint.state_dict.keys() == state.keys()
    for name, tensor in state.items():
        if name == "cls_token" and "registers" in maker.__name__:
            # It is the sum of token and position.
            assert torch.allclose(checkpoint.state_dict[name], tensor, atol=1e-6)
            continue
        assert torch.equal(checkpoint.state_dict[name], tensor), name
    assert checkpoint.pixels.mean[0] == red
    assert checkpoint.reading == said.get("reading", reading)
    assert checkpoint.provenance.get("positions", "") == positions
    assert checkpoint.provenance["licence"].startswith(licence)
    assert checkpoint.arch == archs.canonical(arch, "native")[0]


PUBLISHED = [maker for maker in MAKERS if fx.CASES[maker][2]]


# The Hub's ConvNeXt has its stages one level deeper
TOLD = (*QUICK, fx.hub_convnext)


@pytest.mark.parametrize("maker", some(lambda maker: maker not in TOLD, PUBLISHED))
def test_the_model_is_told_from_shapes(maker, tmp_path):
    form, _, arch, options, reading, *_ = fx.CASES[maker]
    metadata = TrunkMetadata(method=options.get("method", ""))
    found = FileContents(opened(maker(fx.shaped(arch)), tmp_path), metadata)
    trunk = choose(found)
    assert (found.form.name, trunk.arch) == (form, archs.canonical(arch, "native")[0])
    assert not trunk.missing and not trunk.extra
    if "small" in arch or reading != "cls@4":
        assert (trunk.reading() or "pooled") == reading


def test_every_format_has_a_fixture():
    assert {row.name for row in TIMM_FORMATS} == {row[0] for row in fx.CASES.values()}


@with_all_makers
def test_damage_is_refused_by_name(maker, tmp_path):
    """A tensor is missing, misspelt, of another shape or too many: the first, a middle one, the last."""
    arch = fx.CASES[maker][1]
    made = maker(fx.known(arch))
    metadata = TrunkMetadata(arch=arch, method=fx.CASES[maker][3].get("method", ""))
    trunk = choose(FileContents(opened(made, tmp_path), metadata))
    keys = [key for name, key in trunk.keys.items() if "bias_mask" not in name]
    middle = keys[len(keys) // 2]
    norm = next(key for key in keys if re.search(r"(norm|ln_|block\.2).*weight", key))
    damages = [
        (keys[0], "missing"),
        (keys[0], "reshaped"),
        (middle, "renamed"),
        (norm, "extra"),
        (keys[1], "sparse"),
        (middle, "missing"),
        (keys[-1], "not finite"),
    ]
    for key, damage in damages:
        content = {k: dict(v) if isinstance(v, dict) else v for k, v in made.items()}
        table = content[trunk.table] if trunk.table else content
        value = table.pop(key)
        if damage == "renamed":
            table[f"{key[:-3]}_{key[-3:]}"] = value
        elif damage == "reshaped":
            table[key] = value[..., :1]
        elif damage == "extra":
            table |= {key: value, f"{key}_scale": torch.ones(3)}
        elif damage == "sparse":
            table[key] = value.to_sparse()
        elif damage == "not finite":
            table[key] = torch.full_like(value, float("nan"))
        about = TrunkMetadata(arch=arch) if damage == "extra" else metadata
        with pytest.raises(BadInput) as error:
            found = FileContents(opened(content, tmp_path), about)
            assembling.checkpoint(found, choose(found))
        said = str(error.value)
        assert "\n" not in said
        if damage == "extra":
            assert f"1 extra inside the trunk: {key}_scale" in said
        # A missing block of a chunk is called by its number alone.
        plain = re.sub(r"blocks\.\d\.(\d\.)", r"blocks.\1", key)
        assert key in said or plain in said, said


def test_a_file_without_its_last_block_is_no_shallower_model(tmp_path):
    whole = fx.shaped("timm:vit_small_patch16_224")
    state = {key: tensor for key, tensor in whole.items() if ".11." not in key}
    with pytest.raises(BadInput, match=r"12 missing: blocks\.11"):
        found = FileContents(opened(state, tmp_path), TrunkMetadata(method="dino"))
        assembling.checkpoint(found, choose(found))


@pytest.mark.parametrize(
    ("maker", "key", "change"),
    [
        (fx.dinov3, "rope_embed.periods", lambda t: t * 2),
        (fx.dinov3, "rope_embed.periods", torch.Tensor.to_sparse),
        (fx.dinov3, "blocks.0.attn.qkv.bias_mask", torch.ones_like),
        (fx.dinov3, "blocks.0.attn.qkv.bias_mask", torch.Tensor.to_sparse),
        (fx.dinov3_convnext, "norms.3.weight", lambda t: t + 1),
        (fx.dinov3_convnext, "norms.3.weight", torch.Tensor.to_sparse),
        (fx.dinov3_convnext, "norms.3.weight", lambda t: t.to(torch.float8_e4m3fn)),
    ],
)
def test_what_dinov3_has_beside_its_trunk_must_be_as_in_timm(
    maker, key, change, tmp_path
):
    arch = fx.CASES[maker][1]
    made = maker(fx.known(arch))
    made[key] = change(made[key])
    found = FileContents(opened(made, tmp_path), TrunkMetadata(arch=arch))
    with pytest.raises(BadInput, match=f"[12] not usable: {key.removesuffix('_mask')}"):
        assembling.checkpoint(found, choose(found))


def test_dinov3s_keys_have_no_bias_with_a_mask_or_without(tmp_path):
    arch = fx.CASES[fx.dinov3][1]
    made = fx.dinov3(fx.known(arch))
    key = "blocks.0.attn.qkv.bias"
    del made[f"{key}_mask"]
    queries, keys, values = made[key].chunk(3)
    assert keys.any() and values.any()
    found = FileContents(opened(made, tmp_path), TrunkMetadata(arch=arch))
    with pytest.raises(BadInput, match=f"1 not usable: {key}"):
        assembling.checkpoint(found, choose(found))
    made[key] = torch.cat([queries, torch.zeros_like(keys), values])
    found = FileContents(opened(made, tmp_path), TrunkMetadata(arch=arch))
    assert assembling.checkpoint(found, choose(found)).arch


def test_nothing_is_guessed(tmp_path, bad_input):
    """Where a file does not tell what it is, the line says what to say."""
    # MoCo-v3's and MAE's positions; only their heads tell them apart.
    fixed = fx.known(fx.VIT)
    fixed["pos_embed"][:, 0] = 0
    head = {"head.weight": torch.ones(3, 32), "head.bias": torch.ones(3)}
    for made in (fixed, fx.known(fx.VIT) | head):
        with pytest.raises(
            BadInput, match="no known format; say what it is with --arch timm:NAME"
        ):
            importing.read(saved(made, tmp_path))
        named = importing.read(saved(made, tmp_path), arch=fx.VIT)
        assert named.pixels == archs.default_pixels(fx.VIT)
        assert "does not say its pixels" in named.provenance["pixels_from"]
        clear = importing.read(saved(made, tmp_path), arch=fx.VIT, pixels="imagenet")
        assert clear.pixels == Pixels() and "pixels_from" not in clear.provenance
    clip = fx.clip(fx.known(fx.CASES[fx.clip][1]))
    with pytest.raises(BadInput, match="known are 768/32"):
        importing.read(saved(clip, tmp_path))
    clip = fx.clip(fx.shaped("timm:vit_base_patch32_clip_224"))
    with pytest.raises(BadInput, match="tells the activation; say it by --arch"):
        choose(FileContents(opened(clip, tmp_path)))
    out = tmp_path / "x.safetensors"
    words = ["import", str(saved(fixed, tmp_path)), "--out", str(out), "--arch"]
    assert program.main([*words, "resnet50"]) == 2
    bad_input(program.main([*words, "timm:vit_smal_patch16_224"]), "did you mean")
    assert not out.exists()


def test_i_jepas_target_is_read_by_the_mean_of_its_patches(tmp_path):
    arch = fx.CASES[fx.ijepa][1]
    file = saved(fx.ijepa(fx.known(arch)), tmp_path)
    target = importing.read(file, arch=arch)
    context = importing.read(file, arch=arch, encoder="context")
    assert (target.epochs, target.method) == (300, "ijepa")
    weight = "blocks.0.attn.qkv.weight"
    assert torch.equal(context.state_dict[weight], target.state_dict[weight] + 1)
    trunk = target.backbone().eval()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        patches = trunk.model.forward_features(pixels)
        assert patches.shape == (2, 16, 32)
        torch.testing.assert_close(trunk(pixels), patches.mean(1))


def test_a_trunk_without_a_stem_to_choose_says_so(tmp_path):
    _, arch, _, options, *_ = fx.CASES[fx.dino]
    file = saved(fx.dino(fx.known(arch)), tmp_path)
    with pytest.raises(BadInput, match="has no choice of stem; leave out --stem"):
        importing.read(file, arch=arch, stem="conv3", **options)


def test_position_embeddings_are_resized_on_request_only(tmp_path):
    arch = fx.CASES[fx.dinov2][1]
    file = saved(fx.dinov2(fx.known(arch)), tmp_path)
    plain = importing.read(file, arch=arch)
    assert plain.provenance["positions"] == "+0.1"
    with torch.no_grad(), pytest.raises(BadInput, match="pos=RULE"):
        plain.backbone().eval()(torch.ones(1, 3, 48, 48))
    asked = importing.read(file, arch=arch, pos="+0.1")
    assert torch.equal(asked.state_dict["pos_embed"], plain.state_dict["pos_embed"])
    assert asked.digest != plain.digest
    with torch.no_grad():
        assert asked.backbone().eval()(torch.ones(1, 3, 48, 48)).shape == (1, 64)


# --- what stands beside a file ---
def test_timm_says_it_in_its_configuration(tmp_path):
    from safetensors.torch import save_file

    state = fx.known("timm:test_vit")
    save_file(
        state | {"head.weight": torch.ones(3, 64)}, tmp_path / "model.safetensors"
    )
    pretrained = {"mean": [0.5] * 3, "std": [0.5] * 3, "license": "apache-2.0"}
    config = {
        "architecture": "test_vit",
        "global_pool": "avg",
        "pretrained_cfg": pretrained,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = importing.read(tmp_path / "model.safetensors")
    assert (found.arch, found.reading, found.pixels.std) == (
        "timm:test_vit",
        "mean",
        (0.5,) * 3,
    )
    assert found.provenance["licence"] == "apache-2.0"
    assert found.provenance["format"] == TIMM.name
    (tmp_path / "config.json").write_text("[" * 100)
    with pytest.raises(BadInput, match=r"config\.json: not readable"):
        importing.read(tmp_path / "model.safetensors")


def test_the_hub_says_heads_and_activation(tmp_path):
    made = fx.hub_clip(fx.shaped("timm:vit_base_patch32_clip_224"))
    vision = {"hidden_act": "quick_gelu", "num_attention_heads": 6}
    config = {"model_type": "clip", "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    held = Opened(tmp_path / "model.safetensors", "safetensors", "0" * 64, 0, made, {})
    found = FileContents(held)
    arch = "timm:vit_base_patch32_clip_quickgelu_224,num_heads=6"
    assert choose(found).arch == arch


# --- names of timm's ---
@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Put a model of timm's with known weights into the Hub's local cache."""

    def put(model):
        state = fx.known(f"timm:{model}")
        whole = state | {"head.weight": torch.ones(3, 64)}
        fx.put_in_hub(monkeypatch, tmp_path / "hub", model, whole)
        return state

    return put


def test_a_name_stands_for_the_weights_in_the_cache(cache):
    state = cache("test_vit")
    found = importing.read(Path("timm:test_vit"))
    assert all(torch.equal(found.state_dict[k], v) for k, v in state.items())
    assert (found.arch, found.name) == ("timm:test_vit", "test_vit.r160_in1k")
    assert found.pixels.mean == (0.5, 0.5, 0.5)  # of that tag
    assert importing.read("timm:test_vit.r160_in1k").digest == found.digest
    said = r"`hf download timm/test_vit2\.r160_in1k`, or use timm:test_"
    with pytest.raises(BadInput, match=said):
        importing.read("timm:test_vit2")
    with pytest.raises(BadInput, match="has no weights 'nope'; allowed: r160_in1k"):
        importing.read("timm:test_vit.nope")


def test_random_is_the_same_each_time_and_nobody_elses_dice():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one = importing.read("timm:test_convnext@random")
    assert torch.equal(torch.rand(1), expected)
    again = importing.read("timm:test_convnext@random", name="Other")
    assert (one.method, one.epochs, one.digest) == ("random", 0, again.digest)
    assert importing.read("timm:resnet18@random").arch == "resnet18"


# --- inspect, export ---
def test_inspect_and_export_of_a_trunk_of_timms(tmp_path, bad_input, capsys):
    out = tmp_path / "x.safetensors"
    away = tmp_path / "away.safetensors"
    arch = fx.CASES[fx.mae][1]
    file = saved(fx.mae(fx.known(arch)), tmp_path, "mae.pth")
    assert program.main(["import", str(file), "--out", str(out), "--arch", arch]) == 0
    report = inspecting.inspect(out)
    assert importing.read(out, reading="mean").reading == "mean"
    assert report["encoders"][0]["matched"] == 30
    assert report["encoders"][0]["problems"] == {}
    allows = {"reading": "cls", "feature_dim": 32, "size": 32, "divisor": 8}
    assert report["allows"] == allows | {"strides": [8], "positions": "size"}
    assert program.main(["inspect", str(out)]) == 0
    said = capsys.readouterr().out
    assert "images of 32 x 32 pixels; of others with `import --pos size`" in said
    assert "detection on maps at strides 8" in said
    assert (
        program.main(["export", str(out), "--format", "timm", "--out", str(away)]) == 0
    )
    assert "timm.create_model('vit_small_patch16_224'" in capsys.readouterr().out
    assert importing.read(away).digest == importing.read(out).digest
    for form in ("torchvision", "detectron2"):
        words = ["export", str(out), "--format", form, "--out", str(tmp_path / "no")]
        bad_input(
            program.main(words), f"`backbench export {out} --format timm --out F`"
        )
    assert inspecting.inspect("timm:test_convnext@random")["allows"]["strides"] == [
        4,
        8,
        16,
        32,
    ]


def test_the_manual_names_every_format():
    manual = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    rows = (*FORMATS, *TIMM_FORMATS, TIMM)
    assert [row.name for row in rows if f"`{row.name}`" not in manual] == []


@functools.cache
def _headless(model):
    with Undrawn():
        made = timm.create_model(model, num_classes=0)
    return cut_from_one_row(made).state_dict()


def headless(model):
    """Return tensors as timm's model has them, which nobody writes into."""
    return dict(_headless(model))


OTHERS = ("mixer_s16_224", "pvt_v2_b0", "swin_tiny_patch4_window7_224")


@pytest.mark.parametrize("model", OTHERS)
def test_another_model_is_not_dinos(tmp_path, model):
    file = saved(headless(model), tmp_path)
    named = importing.read(file, arch=f"timm:{model}")
    assert named.method == "unknown", "a file of this kind does not say who trained it"
    assert named.pixels.mean == timm.get_pretrained_cfg(model).mean, "the name's pixels"
    chosen = importing.read(file, arch=f"timm:{model}", pixels="half")
    assert chosen.pixels.mean[0] == 0.5


@pytest.mark.parametrize(
    ("table", "method"), [("", "dino"), ("state_dict", "ibot"), ("model", "mae")]
)
def test_a_bare_transformer_is_asked_about(tmp_path, table, method):
    state = headless("vit_tiny_patch16_224")
    file = saved({table: state} if table else state, tmp_path)
    with pytest.raises(
        BadInput, match=r"--arch timm:NAME --pixels P .*--method dino, ibot or mae"
    ):
        importing.read(file)
    assert importing.read(file, method=method).method == method


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("wide_resnet50_2", marks=pytest.mark.slow),
        "resnext50_32x4d",
        "resnet18d",
    ],
)
def test_other_resnets_are_timms(tmp_path, model):
    """Wide, grouped, deep stem: named as no trunk of ours, and loaded strictly under their name."""
    torch.manual_seed(0)
    theirs = timm.create_model(model)
    file = saved(theirs.state_dict(), tmp_path)
    with pytest.raises(BadInput, match="--arch timm:") as error:
        importing.read(file)
    assert model in str(error.value)
    checkpoint = importing.read(file, arch=f"timm:{model}", pixels="imagenet")
    x = torch.randn(1, 3, 64, 64)
    theirs.reset_classifier(0)
    with torch.no_grad():
        assert torch.allclose(
            checkpoint.backbone().eval()(x), theirs.eval()(x), atol=1e-5
        )
    state = theirs.state_dict()
    del state["layer3.1.conv2.weight"]
    with pytest.raises(BadInput, match=r"layer3\.1\.conv2\.weight"):
        importing.read(saved(state, tmp_path), arch=f"timm:{model}", pixels="imagenet")


def test_torchvisions_convnext_has_the_same_features(tmp_path):
    with Undrawn():
        theirs = torchvision.models.convnext_tiny().eval()
    cut_from_one_row(theirs)
    checkpoint = importing.read(saved(theirs.state_dict(), tmp_path))
    assert checkpoint.arch == "timm:convnext_tiny" and checkpoint.method == "supervised"
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        wanted = theirs.classifier[:2](theirs.avgpool(theirs.features(x)))
        assert torch.allclose(checkpoint.backbone().eval()(x), wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            "resnet18",
            "--reading map: resnet18 is read by 'pooled' alone; leave it out",
        ),
        ("timm:vit_tiny_patch16_224", "vit_tiny_patch16_224 has no reading 'map'"),
    ],
)
def test_a_reading_that_the_trunk_lacks_is_refused_at_import(tmp_path, model, says):
    timms = model.startswith("timm:")
    state = headless(model.removeprefix("timm:"))
    how = {"arch": model, "pixels": "half"} if timms else {}
    with pytest.raises(BadInput, match=says):
        importing.read(saved(state, tmp_path), reading="map", **how)


@pytest.mark.parametrize(
    ("key", "value", "pixels", "match"),
    [
        ("hidden_act", "relu", "half", "timm:vit_tiny_patch16_224,act_layer=relu"),
        ("rope_theta", 10000.0, "half", "'rope_theta' is 10000"),
        ("hidden_act", "gelu", None, "choose --pixels imagenet or half or clip"),
    ],
)
def test_the_hubs_configuration_is_read_or_refused(tmp_path, key, value, pixels, match):
    config = {
        "model_type": "vit",
        "num_attention_heads": 3,
        "hidden_act": "gelu",
        key: value,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = fx.hub_vit(headless("vit_tiny_patch16_224"))
    bias = (
        "encoder.layer.0.attention.attention.key.bias"  # between others of other types
    )
    state[bias] = state[bias].to(torch.float8_e4m3fn)
    file = saved(state, tmp_path, "pytorch_model.bin")
    try:
        said = importing.read(file, pixels=pixels).arch
    except BadInput as error:
        said = str(error)
    assert match in said
