"""Trunks of every kind: what they give, cost and refuse, how they are named and kept."""

import json
import logging
import math

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from fvcore.nn import FlopCountAnalysis, parameter_count
from fvcore.nn.jit_handles import get_shape
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from backbench.cli import program
from backbench.detection import backbones
from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.runs.forward_clock import ForwardClock
from backbench.weights import archs
from backbench.weights.archs import build_trunk
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families import pair_trunk
from backbench.weights.families.resnet_trunk import (
    ARCHS,
    STEMS,
    build_backbone,
    trunk_shapes,
)
from backbench.weights.families.timm_trunk import resized
from backbench.weights.family import POSITION_RULES
from backbench.weights.importing import checkpoint_of
from backbench.weights.trunk import ModuleTrunk
from backbench.weights.trunk_facts import facts, of_maps
from backbench.weights.undrawn import Undrawn, without_memory

VIT = "timm:vit_tiny_patch16_224,depth=3,embed_dim=24,img_size=32,num_heads=2,patch_size=8"
ROPE = "timm:vit_small_patch16_dinov3_qkvb,depth=2,embed_dim=32,num_heads=2"
PAIR = "lab:resnet18,width=0.125"
KINDS = ("resnet18", PAIR, "timm:test_convnext", VIT, ROPE)


def randomised(arch: str, reading: str = "", seed: int = 0):
    """Build a trunk and draw every parameter: at their start LayerScale and biases hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with Undrawn():
        trunk = archs.build_trunk(arch, reading=reading).eval()
    with torch.no_grad():
        for name, parameter in trunk.named_parameters():
            drawn = torch.rand(parameter.shape, generator=generator)
            ends = ("weight", "gamma", "gamma_1", "gamma_2")
            is_scale = parameter.ndim <= 1 and name.endswith(ends)
            parameter.copy_(0.5 + drawn if is_scale else (drawn - 0.5) * 0.2)
    return trunk


@pytest.mark.parametrize("arch", KINDS)
def test_a_trunk_gives_what_it_says(arch):
    trunk = randomised(arch)
    side = 64 if trunk.size is None else trunk.size
    x = torch.rand(2, 3, side, side)
    with torch.no_grad():
        features = trunk(x)
        maps = trunk.stages(x)
        tokens = trunk.tokens(x)
        assert features.shape == (2, trunk.feature_dim)
        assert [m.shape[1] for m in maps] == list(trunk.widths)
        assert [x.shape[-1] // m.shape[-1] for m in maps] == list(trunk.strides)
        torch.testing.assert_close(tokens.permute(0, 3, 1, 2), maps[-1])
        depths = trunk.depths()
        names = {name for name, _ in trunk.named_parameters()}
        assert depths.keys() == names >= trunk.undecayed()
        assert min(depths.values()) == 0
        trunk = trunk.double()
        x = x.double()
        before = trunk(x)
        trunk.fuse()
        torch.testing.assert_close(trunk(x), before)


@pytest.mark.parametrize("arch", KINDS)
def test_a_checkpoint_of_any_trunk_is_whole_or_refused(arch, tmp_path):
    trunk = randomised(arch)
    pixels = archs.default_pixels(arch)
    kept = Checkpoint(
        arch=arch, method="random", state_dict=trunk.state_dict(), pixels=pixels
    )
    kept.save(tmp_path / "a.safetensors")
    back = Checkpoint.load(tmp_path / "a.safetensors")
    assert back.digest == kept.digest
    assert (back.arch, back.reading) == (trunk.arch, trunk.reading)
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
        kept.replace(
            state_dict={**kept.state_dict, "blocks.99.ls1.gamma": torch.ones(3)}
        )


OTHER_KINDS = (
    "resnet18,width=0.25",
    "timm:swin_tiny_patch4_window7_224,embed_dim=16",
    "timm:efficientnet_lite0",
)


@pytest.mark.parametrize("arch", [*KINDS, *OTHER_KINDS])
def test_loading_draws_no_weight_and_leaves_nothing_out(arch):
    drawn = randomised(arch)
    point = Checkpoint(
        arch=arch,
        stem=drawn.stem,
        method="random",
        state_dict=drawn.state_dict(),
        pixels=archs.default_pixels(arch),
    )
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    trunk = point.backbone()
    assert torch.equal(torch.random.get_rng_state(), before)
    # Buffers that no state dict holds are computed as in any other network
    for which in ("named_parameters", "named_buffers"):
        expected = dict(getattr(drawn, which)())
        got = dict(getattr(trunk, which)())
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor), name
    blank = point.blank()
    assert not blank.training
    assert {p.device.type for p in blank.parameters()} == {"meta"}
    assert (blank.feature_dim, blank.widths) == (trunk.feature_dim, trunk.widths)


def test_the_same_tensors_read_otherwise_are_another_row():
    state = randomised(VIT).state_dict()
    digests = set()
    for arch in (VIT, VIT.replace("heads=2", "heads=4")):
        for reading in ("cls", "mean", "cls+mean", "cls@2"):
            kept = Checkpoint(
                arch=arch, method="random", state_dict=state, reading=reading
            )
            digests.add(kept.digest)
    assert len(digests) == 8
    shuffled = "timm:vit_tiny_patch16_224,patch_size=8,num_heads=2,img_size=32,embed_dim=24,depth=3"
    kept = Checkpoint(arch=shuffled, method="random", state_dict=state)
    assert (kept.arch, kept.stem, kept.reading) == (VIT, "native", "cls")


@pytest.mark.parametrize("arch", [VIT, ROPE])
def test_readings_are_parts_of_timms_own_tokens(arch):
    trunk = randomised(arch)
    model = trunk.model
    size = trunk.size or 48
    x = torch.rand(2, 3, size, size)
    with torch.no_grad():
        tokens = model.forward_features(x)
        patches = tokens[:, model.num_prefix_tokens :].mean(1)
        cls = tokens[:, 0]
        # The layers one by one, each through the last norm
        layers = []

        def keep(module, inputs, output):
            layers.append(output)

        hooks = [block.register_forward_hook(keep) for block in model.blocks]
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
    arch = (
        "timm:vit_base_patch16_siglip_224,depth=1,embed_dim=24,img_size=32,num_heads=2"
    )
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
    whole = timm.create_model(
        "eva02_tiny_patch14_224", img_size=28, num_classes=0
    ).eval()
    assert trunk.reading == "pooled"
    whole.load_state_dict(trunk.model.state_dict(), strict=True)
    nn.init.normal_(trunk.model.fc_norm.weight)
    whole.fc_norm.weight = trunk.model.fc_norm.weight
    x = torch.rand(2, 3, 28, 28)
    assert torch.equal(trunk(x), whole(x))
    with pytest.raises(
        BadInput, match="its last norm follows the pooling; take 'pooled'"
    ):
        archs.build_trunk("timm:eva02_tiny_patch14_224", reading="cls")


def test_positions_are_resized_by_request_and_rule_only():
    with pytest.raises(
        BadInput, match=r"takes images of 32 x 32 pixels, not 48 x 48; .*pos=RULE"
    ):
        archs.build_trunk(VIT)(torch.rand(1, 3, 48, 48))
    ruled = {rule: randomised(f"{VIT},pos={rule}") for rule in POSITION_RULES}
    plain = randomised(VIT)
    small = torch.rand(1, 3, 32, 32)
    large = torch.rand(1, 3, 48, 64)
    with torch.no_grad():
        for trunk in ruled.values():
            # The stored grid needs no rule.
            assert torch.equal(trunk(small), plain(small))
        features = [trunk(large) for trunk in ruled.values()]
    for i, one in enumerate(features):
        for other in features[:i]:
            assert (one - other).abs().max() > 1e-4
    # timm resizes by `aa`
    size = {
        "img_size": 32,
        "patch_size": 8,
        "depth": 3,
        "embed_dim": 24,
        "num_heads": 2,
    }
    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=0, dynamic_img_size=True, **size
    )
    model.eval()
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ruled["aa"](large), model(large))
    with pytest.raises(BadInput, match="multiples of 8, not 50 x 64"):
        ruled["aa"](torch.rand(1, 3, 50, 64))


@pytest.mark.parametrize("rule", POSITION_RULES)
def test_rules_of_positions_sample_where_their_authors_do(rule):
    """A loop over the samples is the reference: cubic convolution, a = -0.75 as torch's bicubic."""
    torch.manual_seed(0)
    old = 6
    new = (4, 9)
    embedding = torch.randn(1, 1 + old * old, 3, dtype=torch.float64).float()
    got = resized(embedding, new, prefix=1, rule=rule)
    assert torch.equal(got[:, :1], embedding[:, :1])
    grid = embedding[0, 1:].reshape(old, old, 3).double()
    for axis, n in enumerate(new):
        step = old / (n + 0.1) if rule == "+0.1" else old / n
        wide = max(1.0, step) if rule == "aa" else 1.0
        places = [(i + 0.5) * step for i in range(n)]
        grid = torch.stack([_sample(grid, axis, at, wide, rule) for at in places], axis)
    torch.testing.assert_close(
        got[0, 1:].double(), grid.reshape(-1, 3), rtol=0, atol=1e-5
    )


def _sample(grid, axis, centre, wide, rule):
    """Sample at `centre` along an axis: samples lie at i + 0.5, weights are the kernel's."""
    size = grid.shape[axis]
    total = 0.0
    out = 0.0
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
    if x < 2:
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return 0.0


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        (
            "timm:vit_smal_patch16_224",
            "has no model 'vit_smal_patch16_224'; did you mean",
        ),
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
        net,
        feature_dim=5,
        features=lambda module, x: module(x).mean((2, 3)),
        stages=lambda module, x: [module(x)],
        strides=(4,),
        widths=(5,),
        identity="mean of maps",
    )
    kept = checkpoint_of(trunk)
    assert kept.arch == "python:TwoLayers:mean of maps" and kept.family.lasting(
        kept.arch
    )
    assert set(kept.state_dict) == set(net.state_dict())  # the module's own names
    assert kept.provenance["source"] == "module TwoLayers"
    x = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(
            kept.backbone().eval()(x), net.eval()(x).mean((2, 3))
        )
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

    one = given(mean)
    other = given(largest)
    again = given(mean)
    # Nobody said that two of them are the same.
    assert len({c.digest for c in (one, other, again)}) == 3
    assert not any(c.family.lasting(c.arch) for c in (one, other, again))
    x = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(one.backbone()(x), mean(net, x))
        torch.testing.assert_close(other.backbone()(x), largest(net, x))
    means = [given(mean, identity="mean v1").digest for _ in range(2)]
    assert means[0] == means[1] != given(largest, identity="largest v1").digest
    with pytest.raises(BadInput, match="identity is a line of text"):
        given(mean, identity="a\nb")


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
        of_grey = trunk(grey)
        of_brighter = trunk(brighter)
        of_tinted = trunk(tinted)
    # A gray picture has no colour, however bright: its colour half does not move.
    moved_by_light = (of_grey - of_brighter).abs()
    moved_by_colour = (of_grey - of_tinted).abs()
    assert moved_by_light[:, half:].max() < 0.05 * moved_by_light[:, :half].max()
    assert moved_by_light[:, half:].max() < 0.05 * moved_by_colour[:, half:].max()


def test_the_pair_is_as_wide_as_its_authors_have_it():
    sizes = {}
    for arch in ("lab:resnet50,width=0.5", "lab:resnet50"):
        with without_memory():
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


@pytest.mark.parametrize("arch", ARCHS)
def test_names_and_shapes_are_torchvisions(arch):
    with without_memory():
        theirs = getattr(torchvision.models, arch)().state_dict()
    trunk = {k: tuple(v.shape) for k, v in theirs.items() if not k.startswith("fc.")}
    assert trunk_shapes(arch) == trunk
    assert len(trunk_shapes("resnet50")) == 318


@pytest.mark.parametrize(("arch", "dim"), [("resnet18", 512), ("resnet50", 2048)])
def test_draws_and_gradients_and_stages_are_torchvisions(arch, dim):
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, arch)()
    theirs.fc = nn.Identity()
    torch.manual_seed(0)
    ours = build_backbone(arch)
    images = torch.randn(2, 3, 64, 64)
    for trunk in (theirs, ours):
        trunk(images).square().sum().backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, gradients[name]), name
        grads = parameter.grad, gradients[name].grad
        assert torch.allclose(*grads, rtol=1e-4, atol=1e-3), name
    ours.eval(), theirs.eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))
    maps = ours.stages(images)
    widths = [dim // 8, dim // 4, dim // 2, dim]
    shapes = [(2, c, side, side) for c, side in zip(widths, (16, 8, 4, 2))]
    assert [tuple(m.shape) for m in maps] == shapes
    assert ours.feature_dim == dim


def test_a_width_is_of_the_stages_and_part_of_the_name(tmp_path):
    """`resnet18,width=0.25`: a quarter of each stage's channels, below the whole stem."""
    trunk = build_trunk("resnet18,width=0.25")
    assert trunk.widths == (16, 32, 64, 128) and trunk.feature_dim == 128
    assert trunk.strides == (4, 8, 16, 32)
    assert tuple(trunk.conv1.weight.shape) == (64, 3, 7, 7)
    made = Checkpoint(arch=trunk.arch, method="random", state_dict=trunk.state_dict())
    made.save(tmp_path / "narrow.safetensors")
    read = Checkpoint.load(tmp_path / "narrow.safetensors").backbone()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(read.eval()(images), trunk.eval()(images))
    with pytest.raises(BadInput, match="unknown architecture"):
        build_trunk("resnet18,width=0.3")


@pytest.mark.parametrize(
    ("stem", "size"), [("conv3", 32), ("conv3_p0", 30), ("conv3_p2", 34)]
)
def test_small_stems_differ_in_padding_only(stem, size):
    trunk = build_backbone("resnet18", stem).eval()
    weight = trunk.conv1.weight
    assert weight.shape == (64, 3, 3, 3)
    images = torch.randn(1, 3, 32, 32)
    padding = {"conv3": 1, "conv3_p0": 0, "conv3_p2": 2}[stem]
    expected = nn.functional.conv2d(images, weight, padding=padding)
    assert torch.equal(trunk.conv1(images), expected)
    assert trunk.stages(images)[0].shape[-1] == size  # no max-pool, no stride
    assert trunk_shapes("resnet18", stem)["conv1.weight"] == (64, 3, 3, 3)


def test_zero_init_residual_zeroes_the_last_norm_of_each_block():
    trunk = build_trunk("resnet18", zero_init_residual=True)
    assert all(bool((block.bn2.weight == 0).all()) for block in trunk.layer1)
    assert all(bool((block.bn1.weight == 1).all()) for block in trunk.layer1)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(
        BadInput, match="unknown architecture 'resnet5'; did you mean 'resnet50'"
    ):
        build_backbone("resnet5")
    with pytest.raises(
        BadInput, match="unknown stem 'conv3p0'; did you mean 'conv3_p0'"
    ):
        build_backbone("resnet18", "conv3p0")
    assert set(STEMS) == {"imagenet", "conv3", "conv3_p0", "conv3_p2"}


SMALL_VIT = "timm:vit_tiny_patch16_224,depth=2,embed_dim=48,img_size=64,num_heads=3"


def _attention(inputs, outputs):
    """Count attention, which fvcore does not know: q k^T and its product with v take as many
    multiply-adds each."""
    *batch, rows, dim = get_shape(inputs[0])
    *_, columns, _ = get_shape(inputs[1])
    return 2 * torch.Size(batch).numel() * rows * columns * dim


@pytest.mark.parametrize("arch", [*KINDS[:3], SMALL_VIT, "resnet50,width=0.125"])
def test_costs_are_those_that_fvcore_counts(arch):
    trunk = archs.build_trunk(arch).eval()
    logging.getLogger("fvcore").setLevel("ERROR")
    counted = FlopCountAnalysis(trunk, torch.zeros(1, 3, 64, 64))
    counted.set_op_handle("aten::scaled_dot_product_attention", _attention)
    # Norms and pooling are no multiply-adds of matrices
    skipped = ("batch_norm", "layer_norm", "adaptive_avg_pool2d")
    theirs = sum(n for op, n in counted.by_operator().items() if op not in skipped)
    how = {"state_dict": trunk.state_dict(), "pixels": archs.default_pixels(arch)}
    checkpoint = Checkpoint(arch=arch, method="random", **how)
    found = facts(checkpoint, 64)
    assert found["parameters"] == parameter_count(trunk)[""]
    assert found["gflops"] == pytest.approx(theirs / 1e9, rel=0.01, abs=1e-4)
    assert (found["side"], found["reading"]) == (64, trunk.reading)


@pytest.mark.parametrize("patch", [14, 16])
def test_of_a_detector_the_maps_are_counted_at_the_size_that_the_trunk_sees(patch):
    side = 8 * patch
    arch = (
        SMALL_VIT.replace("img_size=64", f"img_size={side}")
        + f",patch_size={patch},pos=aa"
    )
    trunk = archs.build_trunk(arch).eval()
    kept = Checkpoint(arch=arch, method="random", state_dict=trunk.state_dict())
    # 128 x 128 pixels of the detector are 8 x 8 patches, whatever their size
    found = of_maps(kept, (128, 128), backbones.scaled)
    features = facts(kept, side)
    assert found == {k: features[k] for k in ("parameters", "gflops")} | {
        "sides": [128, 128]
    }
    twice = of_maps(kept, (128, 256), backbones.scaled)
    assert twice["gflops"] > 2 * found["gflops"] > 0


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
@pytest.mark.parametrize("stem", ["imagenet", "conv3", "conv3_p0", "conv3_p2"])
def test_a_resnet_knows_what_a_forward_pass_would_count(arch, stem):
    with without_memory():
        trunk = archs.build_trunk(arch, stem=stem).eval()
    for side in (31, 32, 65):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            trunk(torch.zeros(1, 3, side, side, device="meta"))
        assert 2 * trunk.multiply_adds(side) == counter.get_total_flops()


def test_a_module_that_cannot_be_counted_has_no_cost():
    def reading(module, x):
        return module(x).mean((2, 3)) * float(x.sum())  # reads an element

    trunk = ModuleTrunk(torch.nn.Conv2d(3, 4, 3), feature_dim=4, features=reading)
    wanted = {"reading": "pooled", "parameters": 112, "side": 32, "gflops": None}
    assert facts(checkpoint_of(trunk), 32) == wanted


def test_the_first_batch_is_not_timed(monkeypatch):
    now = iter([0.0, 90.0, 100.0, 101.0, 200.0, 203.0])
    monkeypatch.setattr(
        "backbench.runs.forward_clock.time.perf_counter", lambda: next(now)
    )
    clock = ForwardClock()
    cpu = torch.device("cpu")
    for images in (64, 64, 32):
        assert clock.rate("a") is None or images == 32
        with clock.around("a", images, cpu):
            pass
    assert clock.rate("a") == 24.0  # 96 images in 4 seconds
    assert clock.rate("b") is None


def test_rows_say_what_the_trunk_costs(tiny_root, tmp_path):
    narrow = "resnet18,width=0.125"
    for arch in (SMALL_VIT, narrow):
        trunk = archs.build_trunk(arch)
        how = {"state_dict": trunk.state_dict(), "provenance": {"name": arch[:6]}}
        kept = Checkpoint(arch=arch, method="random", **how)
        kept.save(tmp_path / f"{arch[:6]}.safetensors")
    protocol = tmp_path / "knn.yaml"
    geometry = "geometry: {resize: 64, crop: 64}"
    protocol.write_text(
        f"kind: knn\nprotocol: own-v1\nk: [5]\n{geometry}\nfeature_batch: 32\n"
    )
    files = [str(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    line = ["linear", *files, "--datasets", "digits", "--protocol", str(protocol)]
    run = tmp_path / "run"
    assert program.main([*line, "--data", str(tiny_root), "--out", str(run)]) == 0
    lines = (run / "results.jsonl").read_text().splitlines()
    rows = [json.loads(text) for text in lines]
    by_name = {row["name"]: row for row in rows}
    vit = by_name["timm:v"]
    resnet = by_name["resnet"]
    assert vit["arch"] == f"{SMALL_VIT} cls" and resnet["arch"] == narrow
    assert vit["provenance"]["trunk"]["reading"] == "cls"
    parameters = sum(parameter.numel() for parameter in trunk.parameters())
    assert resnet["provenance"]["trunk"]["parameters"] == parameters
    for row in rows:
        assert row["origin"]["images_per_second"] > 0 and row["origin"]["hardware"]
        assert row["provenance"]["trunk"]["side"] == 64
