"""Every format of vision transformers and ConvNeXts goes in bit-equal or is refused by name."""

import json
import re
from pathlib import Path

import pytest
import torch
from support import timm_fixtures as fx

from backbench import cli
from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights import archs, importing, inspecting
from backbench.weights.families.resnet_tables import FORMATS
from backbench.weights.families.timm_formats import TIMM, TIMM_FORMATS
from backbench.weights.family import TrunkMetadata
from backbench.weights.importing import FileContents
from backbench.weights.weight_file import Opened

MAKERS = list(fx.CASES)
# Told from others by one name or two; some of them build large models to look at
ALIKE = (fx.dinov2_giant, fx.ibot_training, fx.hub_mae, fx.hub_dinov3_convnext)
with_all_makers = pytest.mark.parametrize(
    "maker",
    [
        pytest.param(maker, marks=pytest.mark.slow if maker in ALIKE else (), id=maker.__name__)
        for maker in MAKERS
    ],
)


def opened(made, tmp_path):
    """The object as `open_file` returns it, without the file."""
    return Opened(tmp_path / "x.pth", "torch zip", "0" * 64, 0, made, {})


def refused(file, match):
    """The file does not become a checkpoint, and the line says why."""
    with pytest.raises(BadInput, match=match):
        found = FileContents(file)
        found.checkpoint(found.choose())


def saved(made, tmp_path, name="some_run.pth"):
    torch.save(made, tmp_path / name)
    return tmp_path / name


@with_all_makers
def test_goes_in_bit_equal(maker, tmp_path):
    form, arch, _, options, reading, red = fx.CASES[maker]
    state = fx.known(arch)
    # Of two layers, four cannot be read
    said = {"reading": "cls@2"} if reading == "cls@4" else {}
    checkpoint = importing.read(saved(maker(state), tmp_path), arch=arch, **options, **said)
    assert checkpoint.provenance["format"] == form
    assert checkpoint.state_dict.keys() == state.keys()
    for name, tensor in state.items():
        if name == "cls_token" and maker is fx.dinov2_registers:  # token and position, added
            assert torch.allclose(checkpoint.state_dict[name], tensor, atol=1e-6)
            continue
        assert torch.equal(checkpoint.state_dict[name], tensor), name
    assert checkpoint.pixels.mean[0] == red
    assert checkpoint.reading == said.get("reading", reading)
    assert checkpoint.provenance["licence"]
    assert checkpoint.arch == archs.canonical(arch, "native")[0]


QUICK = (fx.dino, fx.dinov2_registers, fx.convnext, fx.hub_mae)
SHAPES = [
    pytest.param(maker, marks=() if maker in QUICK else pytest.mark.slow, id=maker.__name__)
    for maker in MAKERS
    if fx.CASES[maker][2]
]


@pytest.mark.parametrize("maker", SHAPES)
def test_the_model_is_told_from_shapes(maker, tmp_path):
    form, _, arch, options, reading, _ = fx.CASES[maker]
    metadata = TrunkMetadata(method=options.get("method", ""))
    found = FileContents(opened(maker(fx.shaped(arch)), tmp_path), metadata)
    trunk = found.choose()
    assert (found.form.name, trunk.arch) == (form, archs.canonical(arch, "native")[0])
    assert not trunk.missing and not trunk.extra
    if "small" in arch or reading != "cls@4":
        assert (trunk.reading() or "pooled") == reading


def test_every_format_has_a_fixture():
    assert {row.name for row in TIMM_FORMATS} == {row[0] for row in fx.CASES.values()}


@with_all_makers
def test_damage_is_refused_by_name(maker, tmp_path):
    """One tensor missing, misspelt or of another shape: the first, one of the last block, the last."""
    arch = fx.CASES[maker][1]
    made = maker(fx.known(arch))
    metadata = TrunkMetadata(arch=arch, method=fx.CASES[maker][3].get("method", ""))
    trunk = FileContents(opened(made, tmp_path), metadata).choose()
    keys = [key for name, key in trunk.keys.items() if "bias_mask" not in name]
    middle = keys[len(keys) // 2]
    damages = [(keys[0], "missing"), (keys[0], "reshaped"), (middle, "renamed")]
    for key, damage in [*damages, (middle, "missing"), (keys[-1], "not finite")]:
        content = {k: dict(v) if isinstance(v, dict) else v for k, v in made.items()}
        table = content[trunk.table] if trunk.table else content
        value = table.pop(key)
        if damage == "renamed":
            table[f"{key[:-3]}_{key[-3:]}"] = value
        elif damage == "reshaped":
            table[key] = value[..., :1]
        elif damage == "not finite":
            table[key] = torch.full_like(value, float("nan"))
        with pytest.raises(BadInput) as error:
            found = FileContents(opened(content, tmp_path), metadata)
            found.checkpoint(found.choose())
        said = str(error.value)
        assert "\n" not in said
        # A missing block of a chunk is called by its number alone
        plain = re.sub(r"blocks\.\d\.(\d\.)", r"blocks.\1", key)
        assert key in said or plain in said, said


@with_all_makers
def test_another_tensor_inside_is_refused(maker, tmp_path):
    arch = fx.CASES[maker][1]
    made = maker(fx.known(arch))
    trunk = FileContents(opened(made, tmp_path), TrunkMetadata(arch=arch)).choose()
    table = made[trunk.table] if trunk.table else made
    block = next(k for k in trunk.keys.values() if re.search(r"(norm|ln_|block\.2).*weight", k))
    table[f"{block}_scale"] = torch.ones(3)
    found = FileContents(opened(made, tmp_path), TrunkMetadata(arch=arch))
    with pytest.raises(BadInput, match=f"1 extra inside the trunk: {block}_scale"):
        found.checkpoint(found.choose())


def test_a_file_without_its_last_block_is_no_shallower_model(tmp_path):
    state = {k: v for k, v in fx.shaped("timm:vit_small_patch16_224").items() if ".11." not in k}
    with pytest.raises(BadInput, match=r"12 missing: blocks\.11"):
        found = FileContents(opened(state, tmp_path), TrunkMetadata(method="dino"))
        found.checkpoint(found.choose())


def test_what_dinov3_masks_and_turns_must_be_as_in_timm(tmp_path):
    arch = fx.CASES[fx.dinov3][1]
    made = fx.dinov3(fx.known(arch))
    for key, value in (
        ("rope_embed.periods", made["rope_embed.periods"] * 2),
        ("blocks.0.attn.qkv.bias_mask", torch.ones(96)),
    ):
        found = FileContents(opened(made | {key: value}, tmp_path), TrunkMetadata(arch=arch))
        with pytest.raises(
            BadInput, match=r"1 not usable: (rope_embed|blocks\.0\.attn\.qkv\.bias)"
        ):
            found.checkpoint(found.choose())


def test_nothing_is_guessed(tmp_path, capsys):
    """Files that do not tell what they are: the line says what to say."""
    fixed = fx.known(fx.VIT)
    fixed["pos_embed"][:, 0] = 0  # MoCo-v3's and MAE's; their heads differ
    head = {"head.weight": torch.ones(3, 32), "head.bias": torch.ones(3)}
    for made in (fixed, fx.known(fx.VIT) | head):
        with pytest.raises(BadInput, match="no known format; say what it is with --arch timm:NAME"):
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
        FileContents(opened(clip, tmp_path)).choose()
    out = tmp_path / "x.safetensors"
    words = ["import", str(saved(fixed, tmp_path)), "--out", str(out), "--arch"]
    assert cli.main([*words, "resnet50"]) == 2
    assert cli.main([*words, "timm:vit_smal_patch16_224"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert not out.exists()


def test_a_trunk_without_a_stem_to_choose_says_so(tmp_path):
    arch, options = fx.CASES[fx.dino][1], fx.CASES[fx.dino][3]
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
    save_file(state | {"head.weight": torch.ones(3, 64)}, tmp_path / "model.safetensors")
    pretrained = {"mean": [0.5] * 3, "std": [0.5] * 3, "license": "apache-2.0"}
    config = {"architecture": "test_vit", "global_pool": "avg", "pretrained_cfg": pretrained}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = importing.read(tmp_path / "model.safetensors")
    assert (found.arch, found.reading, found.pixels.std) == ("timm:test_vit", "mean", (0.5,) * 3)
    assert found.provenance["licence"] == "apache-2.0"
    assert found.provenance["format"] == TIMM.name
    (tmp_path / "config.json").write_text("[" * 100)
    with pytest.raises(BadInput, match=r"config\.json: not readable"):
        importing.read(tmp_path / "model.safetensors")


def test_the_hub_says_heads_and_activation(tmp_path):
    made = fx.hub_clip(fx.shaped("timm:vit_base_patch32_clip_224"))
    config = {
        "model_type": "clip",
        "vision_config": {"hidden_act": "quick_gelu", "num_attention_heads": 6},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    held = Opened(tmp_path / "model.safetensors", "safetensors", "0" * 64, 0, made, {})
    found = FileContents(held)
    arch = "timm:vit_base_patch32_clip_quickgelu_224,num_heads=6"
    assert found.choose().arch == arch


# --- names of timm's ---


@pytest.fixture
def cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(model):
        import timm
        from safetensors.torch import save_file

        repository = timm.models.get_pretrained_cfg(model).hf_hub_id
        folder = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
        snapshot = folder / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("a" * 40)
        state = fx.known(f"timm:{model}")
        save_file(state | {"head.weight": torch.ones(3, 64)}, snapshot / "model.safetensors")
        return state

    return put


def test_a_name_stands_for_the_weights_in_the_cache(cache):
    state = cache("test_vit")
    found = importing.read(Path("timm:test_vit"))
    assert all(torch.equal(found.state_dict[k], v) for k, v in state.items())
    assert (found.arch, found.name) == ("timm:test_vit", "test_vit.r160_in1k")
    assert found.pixels.mean == (0.5, 0.5, 0.5)  # of that tag
    assert importing.read("timm:test_vit.r160_in1k").digest == found.digest
    with pytest.raises(
        BadInput, match=r"`hf download timm/test_vit2\.r160_in1k`, or use timm:test_"
    ):
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


def test_inspect_and_export_of_a_trunk_of_timms(tmp_path, capsys):
    out, away = tmp_path / "x.safetensors", tmp_path / "away.safetensors"
    arch = fx.CASES[fx.mae][1]
    file = saved(fx.mae(fx.known(arch)), tmp_path, "mae.pth")
    assert cli.main(["import", str(file), "--out", str(out), "--arch", arch]) == 0
    report = inspecting.inspect(out)
    assert (report["encoders"][0]["matched"], report["encoders"][0]["problems"]) == (30, {})
    allows = {"reading": "cls", "feature_dim": 32, "size": 32, "divisor": 8}
    assert report["allows"] == allows | {"strides": [8], "positions": "size"}
    assert cli.main(["inspect", str(out)]) == 0
    said = capsys.readouterr().out
    assert "images of 32 x 32 pixels; of others with `import --pos size`" in said
    assert "detection on maps at strides 8" in said
    assert cli.main(["export", str(out), "--format", "timm", "--out", str(away)]) == 0
    assert "timm.create_model('vit_small_patch16_224'" in capsys.readouterr().out
    assert importing.read(away).digest == importing.read(out).digest
    for form in ("torchvision", "detectron2"):
        words = ["export", str(out), "--format", form, "--out", str(tmp_path / "no")]
        assert cli.main(words) == 2
        assert "goes out with --format timm" in capsys.readouterr().err
    assert inspecting.inspect("timm:test_convnext@random")["allows"]["strides"] == [4, 8, 16, 32]


def test_the_manual_names_every_format():
    manual = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    rows = (*FORMATS, *TIMM_FORMATS, TIMM)
    assert [row.name for row in rows if f"`{row.name}`" not in manual] == []
