"""What a trunk says of itself, built without memory: sizes, maps, layers, and what does not decay; and
how a ResNet is told in a file."""

import pytest
import torch

from backbench.errors import BadInput
from backbench.images.preprocess import HALF, Pixels
from backbench.weights import archs
from backbench.weights.families import resnet_names
from backbench.weights.families.resnet_names import ResNetInFile, find_trunks
from backbench.weights.families.resnet_trunk import trunk_shapes
from backbench.weights.family import Format, TrunkMetadata

SMALL = "embed_dim=24,num_heads=2,depth=2"
VIT = f"timm:vit_tiny_patch16_224,img_size=32,{SMALL},patch_size=8"
VIT_SORTED = "timm:vit_tiny_patch16_224,depth=2,embed_dim=24,img_size=32,num_heads=2,patch_size=8"
DINOV2 = f"timm:vit_small_patch14_reg4_dinov2,img_size=28,{SMALL}"
SIGLIP = f"timm:vit_base_patch16_siglip_224,img_size=32,{SMALL}"


def built(arch, **how):
    with torch.device("meta"):
        return archs.build_trunk(arch, **how)


@pytest.mark.parametrize(
    ("arch", "trained", "only", "divisor"),
    [
        (VIT, 32, 32, 8),
        (f"{VIT},pos=aa", 32, None, 8),
        ("timm:test_convnext", 160, None, 1),
        # Windows that are cut for one size
        ("timm:swin_tiny_patch4_window7_224,img_size=112", 112, 112, 1),
        ("resnet18", None, None, 1),
    ],
)
def test_the_sizes_of_a_trunks_images(arch, trained, only, divisor):
    trunk = built(arch)
    assert (trunk.trained_size, trunk.size) == (trained, only)
    assert trunk.divisor == divisor
    for height, width in ((224, 224), (256, 256), (32, 32), (112, 112), (256, 224)):
        fits = only is None or (height, width) == (only, only)
        if fits:
            trunk.refuse_size(height, width)
            continue
        with pytest.raises(BadInput) as error:
            trunk.refuse_size(height, width)
        said = f"{trunk.arch} takes images of {only} x {only} pixels, not {height} x {width}; "
        assert str(error.value) == said + trunk.other_sizes()


def test_other_sizes_are_read_by_another_name():
    assert built(VIT).other_sizes() == (
        f"read it at its own size, or as {VIT_SORTED},pos=RULE (a file: `backbench import FILE --arch"
        f" {VIT_SORTED},pos=RULE`), which resizes its position embeddings (RULE is +0.1 or aa or size)"
    )
    swin = "timm:swin_tiny_patch4_window7_224,img_size=112"
    assert built(swin).other_sizes() == (
        f"use a protocol of that size, or name the trunk with img_size ({swin},img_size=N)"
    )
    assert built("resnet18").other_sizes() == "use a protocol of that size"


@pytest.mark.parametrize(
    ("arch", "strides", "widths", "layers"),
    [
        ("timm:test_convnext", (4, 8, 16, 32), (24, 32, 48, 64), [0, 1, 2, 3]),
        # The stem's map, of stride 2, is none of these
        ("timm:resnet18", (4, 8, 16, 32), (64, 128, 256, 512), [1, 2, 3, 4]),
        # Of blocks with one stride the last is the map, and each is a layer
        ("timm:mixer_s16_224", (16,), (512,), None),
    ],
)
def test_the_maps_of_timms_other_models(arch, strides, widths, layers):
    trunk = built(arch)
    assert (trunk.strides, trunk.widths) == (strides, widths)
    assert trunk.layer_indices == layers
    assert trunk.token_dim == widths[-1]
    assert trunk.memory_format == torch.channels_last


def test_a_model_with_a_hidden_layer_in_its_head_gives_that():
    trunk = built("timm:vgg11")
    assert (trunk.feature_dim, trunk.widths[-1]) == (4096, 512)


# Layers and decay


def of_resnet18(name):
    stage, block, *_ = name.split(".")
    if not stage.startswith("layer"):
        return 0
    return 2 * int(stage[-1]) - 1 + int(block)


def of_transformer(name):
    """The last norm is in the last block's layer, and pooling by attention behind it."""
    part, _, rest = name.removeprefix("model.").partition(".")
    if part == "blocks":
        return int(rest.partition(".")[0]) + 1
    return {"norm": 2, "attn_pool": 3}.get(part, 0)


@pytest.mark.parametrize(
    ("arch", "layer"),
    [
        ("resnet18,width=0.25", of_resnet18),
        ("lab:resnet18,width=0.5", lambda name: of_resnet18(name.partition(".")[2])),
        (VIT, of_transformer),
        (DINOV2, of_transformer),
        (SIGLIP, of_transformer),
    ],
)
def test_parameters_have_the_layers_of_their_blocks(arch, layer):
    trunk = built(arch)
    names = [name for name, _ in trunk.named_parameters()]
    assert trunk.depths() == {name: layer(name) for name in names}


@pytest.mark.parametrize(
    ("arch", "others"),
    [
        (VIT, ["cls_token", "pos_embed"]),
        (DINOV2, ["cls_token", "pos_embed", "reg_token"]),
        (SIGLIP, ["pos_embed", "attn_pool.latent"]),
        ("timm:test_convnext", []),
        ("resnet18,width=0.25", []),
    ],
)
def test_norms_biases_scales_and_tokens_do_not_decay(arch, others):
    trunk = built(arch)
    vectors = {name for name, each in trunk.named_parameters() if each.ndim <= 1}
    assert trunk.undecayed() == vectors | {f"model.{name}" for name in others}


# ResNets in files


def shapes(arch="resnet18", prefix="", rename=lambda key: key):
    return {
        prefix + rename(key): torch.empty(shape, device="meta")
        for key, shape in trunk_shapes(arch).items()
    }


def found(**tables):
    trunks = find_trunks(tables, TrunkMetadata())
    return [(each.table, each.prefix, each.dialect, each.arch) for each in trunks]


@pytest.mark.parametrize("arch", ["resnet18", "resnet34", "resnet50", "resnet152"])
def test_a_resnet_is_told_by_the_names_of_its_tensors(arch):
    for dialect in resnet_names.DIALECTS:
        table = shapes(arch, "net.", dialect.rename)
        wanted = [("model", "net.", dialect.name, arch)]
        assert found(model=table) == wanted
        counted = {key: each for key, each in table.items() if "num_batches" not in key}
        assert found(model=counted) == wanted


def test_half_of_its_tensors_make_a_resnet():
    """Without counters a ResNet-18 has 100: 20 convolutions, and four of each norm."""
    whole = {key: each for key, each in shapes().items() if "num_batches" not in key}
    assert len(whole) == 100
    keys = list(whole)
    assert found(t={key: whole[key] for key in keys[:51]})
    assert not found(t={key: whole[key] for key in keys[:50]})


def test_what_a_resnet_has_not_is_left_over_inside_or_beside_it():
    inside = [
        "conv2.weight",
        "layer1.0.gate",
        "downsample0.x",
        "layer1.0.bn1.num_batches",
    ]
    beside = [
        "fc.weight",
        "encoder.layer9.weight",
        "queue",
        "x.queue_ptr",
        "mlp.0.bias",
    ]
    table = shapes() | {key: torch.empty(3) for key in (*inside, *beside)}
    other = shapes(prefix="momentum.")
    first, second = find_trunks({"": table | other}, TrunkMetadata())
    assert list(first.extra) == inside
    assert (second.prefix, second.extra) == ("momentum.", ())
    kept = first.head_keys(table | other, ("momentum.",))
    assert kept == [*inside, beside[0], beside[1], beside[4]]


def of_small(**more):
    how = {"table": "", "prefix": "", "dialect": "torchvision", "arch": "resnet18"}
    how |= {"names": resnet_names.DIALECTS[0], "conv1": (64, 3, 3, 3)}
    return ResNetInFile(**how | more)


def test_the_stem_is_told_by_the_first_convolution_and_its_padding_by_nobody():
    large, small = of_small(conv1=(64, 3, 7, 7)), of_small()
    assert (large.stem(), small.stem()) == ("imagenet", None)
    assert large.shapes()["conv1.weight"] == (64, 3, 7, 7)
    assert small.shapes()["conv1.weight"] == (64, 3, 3, 3)
    assert large.stem("imagenet") == "imagenet"
    assert small.stem("conv3_p0") == "conv3_p0"
    for trunk, wanted in ((large, "conv3"), (small, "imagenet")):
        with pytest.raises(BadInput) as error:
            trunk.stem(wanted)
        said = f"its conv1 has shape {trunk.conv1}, not '{wanted}'"
        assert str(error.value) == said
    with pytest.raises(BadInput, match="unknown stem 'conv4'"):
        small.stem("conv4")


def test_a_format_knows_padding_and_pixels_of_small_images():
    half = Pixels(HALF, HALF)
    how = {"name": "x", "source": "", "method": "", "encoders": {"trunk": ("",)}}
    plain = Format(pixels=half, **how)
    both = Format(pixels=half, small_pixels=Pixels(), conv3="conv3_p2", **how)
    large = (64, 3, 7, 7)
    assert of_small(form=both).stem() == "conv3_p2"
    assert of_small(form=both, conv1=large).stem() == "imagenet"
    assert of_small(form=plain).stem() is None
    assert of_small(form=both).pixels() == Pixels()
    assert of_small(form=both, conv1=large).pixels() == half
    assert of_small(form=plain).pixels() == half
    assert of_small().pixels() == Pixels()


# Names


@pytest.mark.parametrize(
    ("arch", "dialect", "printed"),
    [
        ("resnet50", "torchvision", "resnet50"),
        ("resnet18,width=0.25", "torchvision", "resnet18,width=0.25"),
        ("lab:resnet50,width=0.5", "its own", "resnet50"),
        (VIT, "timm's", VIT),
        ("timm:test_convnext", "timm's convnext", "timm:test_convnext"),
    ],
)
def test_a_trunk_is_called_by_its_project_and_by_papers(arch, dialect, printed):
    family = archs.family_of(arch)
    assert (family.dialect(arch), family.name_in_papers(arch)) == (dialect, printed)
    assert family.lasting(arch)


def test_a_trunk_has_one_name_whatever_is_left_out():
    assert archs.canonical("lab:resnet50") == ("lab:resnet50,width=1", "imagenet")
    assert archs.canonical("lab:resnet50,width=1", "conv3")[1] == "conv3"
    assert archs.canonical("timm:test_vit") == ("timm:test_vit", "native")
    with pytest.raises(
        BadInput, match=r"^timm:test_vit has no stem 'conv3', only its own; leave out"
    ):
        archs.canonical("timm:test_vit", "conv3")
    timms = archs.family_of(VIT)
    assert timms.with_options(VIT, {"pos": "aa", "img_size": "48"}) == (
        VIT_SORTED.replace("img_size=32", "img_size=48").replace(
            "patch_size=8", "patch_size=8,pos=aa"
        )
    )
    with pytest.raises(BadInput) as error:
        archs.family_of("resnet5")
    assert str(error.value) == (
        "unknown architecture 'resnet5'; did you mean 'resnet50'?, or timm:NAME"
    )


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("resnet18@random", "timm:resnet18@random"),
        ("vit_small_patch16_224.augreg_in1k", "timm:vit_small_patch16_224.augreg_in1k"),
        ("convnext_tiny", "timm:convnext_tiny"),
        ("efficientnet_b0_ns", ""),
        ("x.pth", ""),
    ],
)
def test_a_word_may_be_meant_as_timms_weights(word, meant):
    assert archs.meant_by(word) == meant
    assert archs.is_name(f"timm:{word}") and archs.is_name(f"hf:{word}")
    assert not archs.is_name(word) and not archs.is_name(f"lab:{word}")


SMALL_CONV1 = (
    " with conv1 = Conv2d(3, 64, 3, padding={0}, bias=False) and maxpool = Identity()"
)


@pytest.mark.parametrize(
    ("arch", "stem", "calls"),
    [
        (
            "resnet50",
            "imagenet",
            {
                "torchvision": "fc = Identity()",
                "timm": "timm.create_model('resnet50', num_classes=0)",
                "detectron2": "MODEL.RESNETS.DEPTH 50 MODEL.RESNETS.STRIDE_IN_1X1 False",
            },
        ),
        (
            "resnet18",
            "conv3_p2",
            {
                "torchvision": "fc = Identity()" + SMALL_CONV1.format(2),
                "timm": "timm.create_model('resnet18', num_classes=0)"
                + SMALL_CONV1.format(2),
                "detectron2": None,
            },
        ),
        (
            "resnet18,width=0.5",
            "imagenet",
            {"torchvision": None, "timm": None, "detectron2": None},
        ),
        (
            "timm:test_convnext",
            "native",
            {
                "torchvision": None,
                "timm": "timm.create_model('test_convnext', num_classes=0)",
                "detectron2": None,
            },
        ),
    ],
)
def test_how_other_libraries_load_a_trunk(arch, stem, calls):
    family = archs.family_of(arch)
    assert {each: family.loaded_by(arch, stem, each) for each in calls} == calls
