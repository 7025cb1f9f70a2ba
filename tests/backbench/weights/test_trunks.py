"""Trunks of every kind: what they give, how they are named and kept, and what they refuse."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights import archs
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families import pair_trunk
from backbench.weights.families.timm_trunk import resized
from backbench.weights.family import POSITION_RULES
from backbench.weights.modules import checkpoint_of
from backbench.weights.trunk import ModuleTrunk

VIT = "timm:vit_tiny_patch16_224,depth=3,embed_dim=24,img_size=32,num_heads=2,patch_size=8"
ROPE = "timm:vit_small_patch16_dinov3_qkvb,depth=2,embed_dim=32,num_heads=2"
PAIR = "lab:resnet18,width=0.125"
KINDS = ("resnet18", PAIR, "timm:test_convnext", VIT, ROPE)


def randomised(arch: str, reading: str = "", seed: int = 0):
    """With every parameter drawn: at their start LayerScale and biases hide what is wrong."""
    generator = torch.Generator().manual_seed(seed)
    trunk = archs.build_trunk(arch, reading=reading).eval()
    with torch.no_grad():
        for name, parameter in trunk.named_parameters():
            drawn = torch.rand(parameter.shape, generator=generator)
            scale = parameter.ndim <= 1 and name.endswith(("weight", "gamma", "gamma_1", "gamma_2"))
            parameter.copy_(0.5 + drawn if scale else (drawn - 0.5) * 0.2)
    return trunk


@pytest.mark.parametrize("arch", KINDS)
def test_a_trunk_gives_what_it_says(arch):
    trunk = randomised(arch)
    side = 64 if trunk.size is None else trunk.size
    x = torch.rand(2, 3, side, side)
    with torch.no_grad():
        features, maps, tokens = trunk(x), trunk.stages(x), trunk.tokens(x)
        assert features.shape == (2, trunk.feature_dim)
        assert [m.shape[1] for m in maps] == list(trunk.widths)
        assert [x.shape[-1] // m.shape[-1] for m in maps] == list(trunk.strides)
        torch.testing.assert_close(tokens.permute(0, 3, 1, 2), maps[-1])
        depths, names = trunk.depths(), {name for name, _ in trunk.named_parameters()}
        assert depths.keys() == names >= trunk.undecayed()
        assert min(depths.values()) == 0
        trunk, x = trunk.double(), x.double()
        before = trunk(x)
        trunk.fuse()
        torch.testing.assert_close(trunk(x), before)


@pytest.mark.parametrize("arch", KINDS)
def test_a_checkpoint_of_any_trunk_is_whole_or_refused(arch, tmp_path):
    trunk = randomised(arch)
    pixels = archs.default_pixels(arch)
    kept = Checkpoint(arch=arch, method="random", state_dict=trunk.state_dict(), pixels=pixels)
    kept.save(tmp_path / "a.safetensors")
    back = Checkpoint.load(tmp_path / "a.safetensors")
    assert (back.digest, back.arch, back.reading) == (kept.digest, trunk.arch, trunk.reading)
    side = trunk.size or 64
    x = torch.rand(2, 3, side, side)
    with torch.no_grad():
        assert torch.equal(back.backbone().eval()(x), trunk(x))
    for name in list(kept.state_dict)[:: max(1, len(kept.state_dict) // 5)]:
        fewer = {k: v for k, v in kept.state_dict.items() if k != name}
        if not name.endswith("num_batches_tracked"):
            with pytest.raises(BadInput, match="missing"):
                kept.replace(state_dict=fewer)
    with pytest.raises(BadInput, match="not part of the trunk"):
        kept.replace(state_dict={**kept.state_dict, "blocks.99.ls1.gamma": torch.ones(3)})


def test_the_same_tensors_read_otherwise_are_another_row():
    state = randomised(VIT).state_dict()
    digests = {
        Checkpoint(arch=arch, method="random", state_dict=state, reading=reading).digest
        for arch in (VIT, VIT.replace("heads=2", "heads=4"))
        for reading in ("cls", "mean", "cls+mean", "cls@2")
    }
    assert len(digests) == 8
    # One way to write a name
    shuffled = "timm:vit_tiny_patch16_224,patch_size=8,num_heads=2,img_size=32,embed_dim=24,depth=3"
    kept = Checkpoint(arch=shuffled, method="random", state_dict=state)
    assert (kept.arch, kept.stem, kept.reading) == (VIT, "native", "cls")


@pytest.mark.parametrize("arch", [VIT, ROPE])
def test_readings_are_parts_of_timms_own_tokens(arch):
    trunk = randomised(arch)
    model, size = trunk.model, trunk.size or 48
    x = torch.rand(2, 3, size, size)
    with torch.no_grad():
        tokens = model.forward_features(x)
        patches = tokens[:, model.num_prefix_tokens :].mean(1)
        cls = tokens[:, 0]
        # The layers one by one, each through the last norm
        layers = []
        hooks = [
            b.register_forward_hook(lambda m, i, out: layers.append(out)) for b in model.blocks
        ]
        model.forward_features(x)
        for hook in hooks:
            hook.remove()
        last = [model.norm(layer)[:, 0] for layer in layers]
    wanted = {
        "cls": cls,
        "mean": patches,
        "cls+mean": torch.cat([cls, patches], 1),
        "cls@2": torch.cat(last[-2:], 1),
        "cls@2+mean": torch.cat([*last[-2:], patches], 1),
    }
    for reading, feature in wanted.items():
        other = archs.build_trunk(arch, reading=reading).eval()
        other.load_state_dict(trunk.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(other(x), feature, rtol=1e-5, atol=1e-6)


def test_attention_pooling_is_read_by_its_own_name():
    arch = "timm:vit_base_patch16_siglip_224,depth=1,embed_dim=24,img_size=32,num_heads=2"
    trunk = randomised(arch)
    assert trunk.reading == "map"
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(trunk(x), trunk.model(x))
    with pytest.raises(BadInput, match="no class token"):
        archs.build_trunk(arch, reading="cls")


def test_a_norm_behind_the_pooling_is_part_of_the_feature():
    """`fc_norm` of EVA-02 and others, whose files have no other last norm."""
    trunk = archs.build_trunk("timm:eva02_tiny_patch14_224,img_size=28").eval()
    whole = timm.create_model("eva02_tiny_patch14_224", img_size=28, num_classes=0).eval()
    assert trunk.reading == "pooled"
    whole.load_state_dict(trunk.model.state_dict(), strict=True)
    nn.init.normal_(trunk.model.fc_norm.weight)
    whole.fc_norm.weight = trunk.model.fc_norm.weight
    x = torch.rand(2, 3, 28, 28)
    assert torch.equal(trunk(x), whole(x))
    with pytest.raises(BadInput, match="its last norm follows the pooling; take 'pooled'"):
        archs.build_trunk("timm:eva02_tiny_patch14_224", reading="cls")


def test_positions_are_resized_by_request_and_rule_only():
    with pytest.raises(BadInput, match=r"takes images of 32 x 32 pixels, not 48 x 48; .*pos=RULE"):
        archs.build_trunk(VIT)(torch.rand(1, 3, 48, 48))
    ruled = {rule: randomised(f"{VIT},pos={rule}") for rule in POSITION_RULES}
    plain = randomised(VIT)
    small, large = torch.rand(1, 3, 32, 32), torch.rand(1, 3, 48, 64)
    with torch.no_grad():
        for trunk in ruled.values():  # the stored grid needs no rule
            assert torch.equal(trunk(small), plain(small))
        features = [trunk(large) for trunk in ruled.values()]
    for i, one in enumerate(features):
        for other in features[:i]:
            assert (one - other).abs().max() > 1e-4
    # timm resizes by `aa`
    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=0, img_size=32, patch_size=8, depth=3, embed_dim=24,
        num_heads=2, dynamic_img_size=True,
    ).eval()  # fmt: skip
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ruled["aa"](large), model(large))
    with pytest.raises(BadInput, match="multiples of 8, not 50 x 64"):
        ruled["aa"](torch.rand(1, 3, 50, 64))


@pytest.mark.parametrize("rule", POSITION_RULES)
def test_rules_of_positions_sample_where_their_authors_do(rule):
    """Against a loop over the samples: cubic convolution with a = -0.75, as torch's bicubic."""
    torch.manual_seed(0)
    old, new = 6, (4, 9)
    embedding = torch.randn(1, 1 + old * old, 3, dtype=torch.float64).float()
    got = resized(embedding, new, prefix=1, rule=rule)
    assert torch.equal(got[:, :1], embedding[:, :1])
    grid = embedding[0, 1:].reshape(old, old, 3).double()
    for axis, n in enumerate(new):
        step = old / (n + 0.1) if rule == "+0.1" else old / n
        wide = max(1.0, step) if rule == "aa" else 1.0
        places = [(i + 0.5) * step for i in range(n)]
        grid = torch.stack([_sample(grid, axis, at, wide, rule) for at in places], axis)
    torch.testing.assert_close(got[0, 1:].double(), grid.reshape(-1, 3), rtol=0, atol=1e-5)


def _sample(grid, axis, centre, wide, rule):
    """The value at `centre` along an axis: samples lie at i + 0.5, weights are the kernel's."""
    size, total, out = grid.shape[axis], 0.0, 0.0
    reach = math.ceil(2 * wide) + 1
    a = -0.5 if rule == "aa" else -0.75  # torch's antialiased kernel is PIL's
    for i in range(math.floor(centre) - reach, math.floor(centre) + reach + 1):
        weight = _cubic((i + 0.5 - centre) / wide, a)
        if weight:
            if rule == "aa" and not 0 <= i < size:
                continue  # antialiased: what is outside does not count
            out = out + weight * grid.select(axis, min(max(i, 0), size - 1))
            total += weight
    return out / total


def _cubic(x, a):
    x = abs(x)
    if x < 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("timm:vit_smal_patch16_224", "has no model 'vit_smal_patch16_224'; did you mean"),
        ("timm:hf-hub:timm/x", "has no model"),
        ("timm:../etc", "has no model"),
        ("timm:test_vit,colour=3", "'colour=3' is none of img_size"),
        ("timm:test_vit,depth=0", "expected a whole number from 1 to 200"),
        ("timm:test_vit,depth=99999999999", "expected a whole number from 1 to 200"),
        ("timm:test_vit,depth=60000", "from 1 to 200"),
        ("timm:test_convnext,depths=2-60000-2-2", "from 1 to 200"),
        ("timm:test_convnext,dims=" + "-".join("8" * 40), "a number for each stage"),
        ("timm:test_vit,pos=nearest", "expected .0.1 or aa or size"),
        ("timm:test_convnext,pos=aa", "no position embeddings"),
        ("timm:test_convnext,num_heads=3", "cannot be built"),
        ("timm:test_vit,num_heads=7", "cannot be built"),
        ("lab:vgg", "expected lab:ARCH,width=W"),
        ("lab:resnet50,width=0.3", "expected lab:ARCH,width=W"),
        ("python:Net", "a module that was given from Python"),
        ("vgg", "unknown architecture 'vgg'"),
    ],
)
def test_names_that_are_no_trunk_are_refused_in_one_line(arch, message):
    with pytest.raises(BadInput, match=message) as caught:
        archs.build_trunk(arch)
    assert "\n" not in str(caught.value)


def test_a_module_of_ones_own_is_a_trunk_in_this_process():
    class TwoLayers(nn.Sequential):
        pass

    net = TwoLayers(nn.Conv2d(3, 5, 4, stride=4), nn.BatchNorm2d(5))
    trunk = ModuleTrunk(
        net, feature_dim=5, features=lambda module, x: module(x).mean((2, 3)),
        stages=lambda module, x: [module(x)], strides=(4,), widths=(5,), identity="mean of maps",
    )  # fmt: skip
    kept = checkpoint_of(trunk)
    assert kept.arch == "python:TwoLayers:mean of maps" and kept.family.lasting(kept.arch)
    assert set(kept.state_dict) == set(net.state_dict())  # the module's own names
    x = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(kept.backbone().eval()(x), net.eval()(x).mean((2, 3)))
    wrong = ModuleTrunk(nn.Conv2d(3, 5, 4), feature_dim=5)
    wrong.arch = "python:Wrong"
    with pytest.raises(BadInput, match="say how to read it by `features`"):
        wrong(x)


def test_modules_of_one_class_are_one_row_only_under_one_identity():
    net = nn.Conv2d(3, 5, 4)

    def given(how, **identity):
        return checkpoint_of(ModuleTrunk(net, feature_dim=5, features=how, **identity))

    def mean(module, x):
        return module(x).mean((2, 3))

    def largest(module, x):
        return module(x).amax((2, 3))

    one, other, again = given(mean), given(largest), given(mean)
    assert len({c.digest for c in (one, other, again)}) == 3, "nobody said that two are the same"
    assert not any(c.family.lasting(c.arch) for c in (one, other, again))
    x = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(one.backbone()(x), mean(net, x))
        torch.testing.assert_close(other.backbone()(x), largest(net, x))
    means = [given(mean, identity="mean v1").digest for _ in range(2)]
    assert means[0] == means[1] != given(largest, identity="largest v1").digest
    with pytest.raises(BadInput, match="identity is a line of text"):
        given(mean, identity="a\nb")


# --- CMC's pair ---


def test_lab_has_the_values_of_known_colours():
    """Of red, green, blue, white and a gray, by the CIE's formulas for sRGB under D65."""
    known = {
        (255, 0, 0): (53.241, 80.092, 67.203),
        (0, 255, 0): (87.735, -86.183, 83.179),
        (0, 0, 255): (32.297, 79.188, -107.860),
        (255, 255, 255): (100.0, 0.0, 0.0),
        (119, 119, 119): (50.034, 0.0, 0.0),
        (2, 2, 2): (0.548, 0.0, 0.0),
    }
    for colour, wanted in known.items():
        pixel = (torch.tensor(colour, dtype=torch.float64) / 255).view(1, 3, 1, 1)
        found = pair_trunk.rgb_to_lab(pixel).flatten()
        exact = torch.tensor(wanted, dtype=torch.float64)
        torch.testing.assert_close(found, exact, rtol=0, atol=0.01)


def test_the_halves_of_the_pair_see_luminance_and_colour_alone():
    trunk = randomised(PAIR)
    half = trunk.feature_dim // 2
    grey = torch.rand(1, 1, 32, 32).expand(1, 3, 32, 32) * 0.5 + 0.2
    brighter = grey + 0.2
    tinted = grey * torch.tensor([1.3, 1.0, 0.7]).view(1, 3, 1, 1)
    with torch.no_grad():
        of_grey, of_brighter, of_tinted = trunk(grey), trunk(brighter), trunk(tinted)
    # A gray picture has no colour, however bright: its colour half does not move
    moved_by_light = (of_grey - of_brighter).abs()
    moved_by_colour = (of_grey - of_tinted).abs()
    assert moved_by_light[:, half:].max() < 0.05 * moved_by_light[:, :half].max()
    assert moved_by_light[:, half:].max() < 0.05 * moved_by_colour[:, half:].max()


def test_the_pair_is_as_wide_as_its_authors_have_it():
    sizes = {}
    for arch in ("lab:resnet50,width=0.5", "lab:resnet50"):
        with torch.device("meta"):
            trunk = archs.build_trunk(arch)
        sizes[arch] = (trunk.feature_dim, sum(p.numel() for p in trunk.parameters()))
    assert sizes["lab:resnet50,width=0.5"][0] == 2048
    dim, count = sizes["lab:resnet50"]
    assert dim == 4096
    assert round(count / 1e6) == 47  # LORAC, Table 1; JCL, Table 1
    with pytest.raises(BadInput, match="mean is 0 and their std 1"):
        state = randomised(PAIR).state_dict()
        Checkpoint(arch=PAIR, method="cmc", state_dict=state, pixels=Pixels())


def test_a_pair_of_pixels_that_is_normalised_by_the_trunk_is_near_zero():
    trunk = archs.build_trunk(PAIR)
    luminance, colour = trunk.split(torch.rand(4, 3, 16, 16))
    assert luminance.shape == (4, 1, 16, 16)
    assert colour.shape == (4, 2, 16, 16)
    both = torch.cat([luminance, colour], 1)
    assert both.abs().max() <= 1.001
    assert F.mse_loss(both.mean((0, 2, 3)), torch.zeros(3)) < 0.1
