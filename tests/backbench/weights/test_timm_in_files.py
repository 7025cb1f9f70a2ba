"""What is made of a transformer's or ConvNeXt's tensors in a file, and of the classifier beside it."""

import hashlib
from types import SimpleNamespace

import pytest
import torch

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels
from backbench.weights.families import file_classifier, timm_classifier, timm_files
from backbench.weights.families.timm_classifier import OwnHead
from backbench.weights.families.timm_files import TimmInFile
from backbench.weights.families.timm_layouts import Piece, layouts
from backbench.weights.families.timm_models import TimmFamily
from backbench.weights.family import NATIVE, Format, TrunkMetadata

VIT = "timm:vit_tiny_patch16_224,img_size=32,embed_dim=24,num_heads=2,depth=1,patch_size=8"
CONVNEXT = "timm:test_convnext"
FAMILY = TimmFamily()


def form(**more):
    how = {"name": "theirs", "source": "", "method": "", "encoders": {"trunk": ("",)}}
    return Format(**how | more)


def in_file(arch=VIT, local=(), **more):
    names = {name: f"net.{name}" for name in local}
    how = {"metadata": TrunkMetadata(), "form": None, "keys": names, **more}
    return TimmInFile(
        table="model",
        prefix="net.",
        dialect="timm's",
        arch=arch,
        family=FAMILY,
        layout=layouts()[0],
        local=names,
        **how,
    )


# What is told of it


THEIRS = form(
    licence="theirs",
    positions="aa",
    positions_with_registers="size",
    reading="cls",
    readings={24: "cls@4", 48: "mean"},
    pixels=Pixels((0.1,) * 3, (0.2,) * 3),
)


def test_decisions_that_are_not_in_the_file_are_told():
    assert in_file().provenance() == {}
    mine = TrunkMetadata(licence="mine", source="config.json")
    assert in_file(metadata=mine).provenance() == {
        "licence": "mine",
        "told by": "config.json",
    }
    assert in_file(form=THEIRS).provenance() == {"licence": "theirs", "positions": "aa"}
    both = in_file(form=THEIRS, metadata=mine, local=["x.reg_token"], folds=True)
    assert both.provenance() == {
        "licence": "mine",
        "told by": "config.json",
        "positions": "size",
        "changed": "the class token's position is added to it, as timm's model has it",
    }
    one_rule = form(positions="aa")
    registers = in_file(form=one_rule, local=["register_tokens"])
    assert registers.provenance() == {"positions": "aa"}
    # A ConvNeXt has no positions
    assert in_file(CONVNEXT, form=THEIRS).provenance() == {"licence": "theirs"}


def test_a_reading_is_the_one_asked_for_or_its_authors_for_this_width():
    asked = TrunkMetadata(reading="mean")
    assert in_file(form=THEIRS, metadata=asked).reading() == "mean"
    assert in_file(metadata=asked).reading() == "mean" and in_file().reading() == ""
    assert in_file(form=THEIRS).reading() == "cls@4"
    wider = VIT.replace("embed_dim=24", "embed_dim=36")
    assert in_file(wider, form=THEIRS).reading() == "cls"
    width = FAMILY.tensors(CONVNEXT, NATIVE)["head.norm.weight"].shape[0]
    of_convnext = form(reading="cls", readings={width: "pooled"})
    assert in_file(CONVNEXT, form=of_convnext).reading() == "pooled"


def test_pixels_are_the_formats_or_those_of_a_named_model():
    named = TrunkMetadata(arch=VIT)
    usual = FAMILY.default_pixels(VIT)
    assert in_file(form=THEIRS, metadata=named).pixels() == THEIRS.pixels != usual
    asks = form(pixels=THEIRS.pixels, asks=("activation", "pixels"))
    assert in_file(form=asks, metadata=named).pixels() == usual
    assert in_file(form=asks).pixels() is None
    assert in_file(metadata=named).pixels() == usual and in_file().pixels() is None


# Which model it is

SIZE = "embed_dim=24,num_heads=2,depth=1,patch_size=8"
BARE = f"timm:vit_tiny_patch16_224,img_size=32,{SIZE}"
MODELS = {
    "36/8": "vit_small_patch8_224",
    "24/8": f"vit_tiny_patch16_224,img_size=32,{SIZE}",
    "24/14": "vit_base_patch14_dinov2",
}


def identified(known, without=(), rows=17, **more):
    """The name of the model of a file of the small transformer's tensors."""
    tensors = {}
    for name, each in FAMILY.tensors(BARE, NATIVE).items():
        if name not in without:
            tensors[f"net.{name}"] = each
    tensors["net.pos_embed"] = torch.empty(1, rows, 24, device="meta")
    local = [key.removeprefix("net.") for key in tensors]
    trunk = in_file(arch="", local=local, form=known, **more)
    return trunk.identified(tensors).arch


def options_of(arch):
    model, *options = arch.split(",")
    return model, dict(each.split("=") for each in options)


def test_a_formats_model_is_that_of_width_and_patch():
    known = form(timm=MODELS)
    assert options_of(identified(known)) == options_of(BARE)
    # Of a larger image, and with what a file beside it says
    told = TrunkMetadata(options={"num_heads": "4", "eps": "0.1"})
    model, options = options_of(identified(known, rows=26, metadata=told))
    assert model == "timm:vit_tiny_patch16_224"
    assert options == {
        "img_size": "40",
        "embed_dim": "24",
        "num_heads": "4",
        "depth": "1",
        "patch_size": "8",
        "eps": "0.1",
    }
    # A model that is named counts, and needs no format
    named = TrunkMetadata(arch="timm:vit_tiny_patch16_224")
    for each in (known, None):
        assert identified(each, metadata=named) == "timm:vit_tiny_patch16_224"


def test_a_file_without_patches_is_the_first_model_of_its_width():
    assert options_of(identified(form(timm=MODELS), ["patch_embed.proj.weight"])) == (
        options_of(BARE)
    )


def test_the_activation_of_a_clip_is_told_by_somebody():
    known = form(timm={"24/8": f"vit_base_patch16_{{}}_224,img_size=32,{SIZE}"})
    for activation, model in (("quick_gelu", "clip_quickgelu"), ("gelu", "clip")):
        told = TrunkMetadata(activation=activation)
        arch = identified(known, metadata=told)
        assert arch.startswith(f"timm:vit_base_patch16_{model}_224,")
    for activation in ("", "relu"):
        with pytest.raises(BadInput) as error:
            identified(known, metadata=TrunkMetadata(activation=activation))
        assert str(error.value).startswith(
            "format theirs: neither the file nor one beside it tells the activation; say it by --arch"
        )


@pytest.mark.parametrize(
    ("models", "says"),
    [
        (
            {"36/8": "a", "24/16": "b"},
            ", format theirs, of width and patch 24/8; known are 36/8, 24/16; say which model it is"
            " with --arch timm:NAME",
        ),
        (
            {},
            ", in no known format; say what it is with --arch timm:NAME --pixels P (and --reading), or"
            " whose it is with --method dino, ibot or mae, in `backbench import FILE --out"
            " X.safetensors`",
        ),
    ],
)
def test_a_model_that_no_format_has_is_asked_for(models, says):
    with pytest.raises(BadInput) as error:
        identified(form(timm=models))
    said = str(error.value)
    place = "holds 'model: net.' (cls_token, pos_embed and "
    assert said.startswith(place) and said.endswith(f"more){says}")


def places(tensors, arch=""):
    metadata = TrunkMetadata(arch=arch)
    found = timm_files.find(FAMILY, {"t": tensors}, metadata, None)
    return [(each.prefix, each.dialect, len(each.local)) for each in found]


def test_a_trunk_is_found_by_its_blocks_or_by_the_names_of_a_model():
    blocks = {f"a.{name}": each for name, each in FAMILY.tensors(BARE, NATIVE).items()}
    assert len([name for name in blocks if ".blocks." in name]) == 12
    assert places(blocks) == [("a.", "timm's", len(blocks))]
    fewer = {name: blocks[name] for name in blocks if not name.endswith("fc2.bias")}
    assert places(fewer) == []
    # By half of a model's names, where no layout fits
    names = [f"x.{name}" for name in FAMILY.tensors("timm:vgg11", NATIVE)]
    assert len(names) == 20
    half = dict.fromkeys(names[:10])
    assert places(half, "timm:vgg11") == [("x.", "timm's", 10)]
    assert places(half) == places(dict.fromkeys(names[:9]), "timm:vgg11") == []
    longer = {"x" * 300 + name: None for name in half}
    assert places(longer, "timm:vgg11") == []


def test_blocks_of_chunks_are_counted_on_and_a_second_one_keeps_its_name():
    own = FAMILY.tensors(BARE, NATIVE)
    tensors = {}
    for name, each in own.items():
        tensors[name.replace("blocks.0.", "blocks.1.0.")] = each
    tensors["blocks.0.0.norm1.weight"] = torch.empty(24, device="meta")
    (layout,) = [each for each in layouts() if each.chunked][:1]
    assert layout.local("blocks.1.0.norm1.weight") == "blocks.0.norm1.weight"
    (found,) = timm_files.find(FAMILY, {"t": tensors}, TrunkMetadata(), None)
    names = {key: name for name, key in found.local.items()}
    assert names["blocks.1.0.norm1.weight"] == "blocks.0.norm1.weight"
    assert names["blocks.0.0.norm1.weight"] == "blocks.0.0.norm1.weight"


# Its tensors


def test_blocks_are_found_below_any_prefix_of_a_short_name():
    def prefixes(key):
        names = {
            layout.name: prefix for prefix, layout in timm_files._block_prefixes(key)
        }
        return names.get("timm's")

    assert prefixes("blocks.0.norm1.weight") == ""
    assert prefixes("module.net.blocks.7") == "module.net."
    assert prefixes("net.blocks.1.blocks.2.weight") == "net.", "the outer ones"
    assert prefixes("myblocks.0.weight") is prefixes("blocks.x.weight") is None
    longest = "blocks.0." + "x" * 291
    assert prefixes(longest) == "" and prefixes(longest + "x") is None


def test_tensors_are_joined_cut_and_shaped_as_timms():
    sources = {
        "norm.weight": [Piece("a", (24,))],
        "norm.bias": [Piece("b", (72,), 1, 2, 3)],
        "blocks.0.attn.qkv.bias": [Piece(name, (24,)) for name in "qkv"],
        "blocks.0.attn.qkv.weight": [Piece("a", (24,)), Piece("gone", (24,))],
        "cls_token": [Piece("token", (24,))],
    }
    trunk = in_file(local=["a", "b", "q", "k", "v", "token"], sources=sources)
    draw = torch.Generator().manual_seed(0)
    tensors = {f"net.{n}": torch.randn(24, generator=draw) for n in ("a", "q", "token")}
    tensors["net.b"] = torch.arange(72.0, requires_grad=True)
    tensors["net.k"] = torch.ones(24, dtype=torch.bfloat16)
    tensors["net.v"] = torch.full((24,), 2, dtype=torch.float16)
    made = trunk.assembled(tensors)
    assert made.keys() == sources.keys() - {"blocks.0.attn.qkv.weight"}
    assert torch.equal(made["norm.weight"], tensors["net.a"])
    assert made["norm.bias"].tolist() == list(range(24, 48))
    assert not made["norm.bias"].requires_grad
    joined = torch.cat([tensors["net.q"], torch.ones(24), torch.full((24,), 2.0)])
    assert torch.equal(made["blocks.0.attn.qkv.bias"], joined)
    assert torch.equal(made["cls_token"], tensors["net.token"].view(1, 1, 24))
    assert trunk.shapes() == {
        "a": (24,),
        "b": (72,),
        "q": (24,),
        "k": (24,),
        "v": (24,),
        "gone": (24,),
        "token": (24,),
    }


def test_a_folded_position_goes_into_the_class_token():
    deit3 = VIT.replace("vit_tiny", "deit3_small")
    own = FAMILY.tensors(deit3, NATIVE)
    trunk = timm_files._fitted(in_file(deit3, local=list(own), folds=True))
    assert trunk.shapes()["pos_embed"] == (1, 17, 24)
    tensors = {f"net.{name}": torch.zeros(each.shape) for name, each in own.items()}
    tensors["net.cls_token"] = torch.ones(1, 1, 24, dtype=torch.float16)
    tensors["net.pos_embed"] = torch.arange(17.0).view(1, 17, 1).expand(1, 17, 24) + 5
    made = trunk.assembled(tensors)
    assert made["cls_token"].unique().tolist() == [6]
    assert made["pos_embed"][0, :, 3].tolist() == [float(n) for n in range(6, 22)]


def test_other_keys_are_heads_or_left_over_inside():
    others = ["head.weight", "blocks.7.gate", "masked_embed", "norm.scale", "text.bias"]
    own = list(FAMILY.tensors(VIT, NATIVE))

    def sorted_by(known):
        trunk = timm_files._fitted(in_file(local=[*own, *others], form=known))
        assert list(trunk.keys) == own
        assert trunk.keys["cls_token"] == "net.cls_token"
        return trunk.heads, trunk.extra

    below = [f"net.{name}" for name in others]
    heads, extra = sorted_by(None)
    assert heads == (below[0], below[2], below[4]) and extra == (below[1], below[3])
    # A known format has nothing below its prefix but what it names
    heads, extra = sorted_by(form(beside=("masked_*", "text.*")))
    assert heads == (below[2], below[4])
    assert extra == (below[0], below[1], below[3])
    assert sorted_by(timm_files.TIMM)[1] == (below[1], below[3])


@pytest.mark.parametrize(
    ("periods", "usual"),
    [
        ([1.0, 10.0], True),
        ([1.0, 100 ** (1 / 3), 100 ** (2 / 3)], True),
        ([1.009, 10.0], True),
        ([1.011, 10.0], False),
        ([[1.0, 10.0]], False),
        ([], True),
    ],
)
def test_usual_periods_are_powers_of_a_hundred(periods, usual):
    assert timm_files._usual_periods(torch.tensor(periods)) == usual


@pytest.mark.parametrize(
    ("bias", "mask", "masked"),
    [
        ([5, 5, 0, 0, 5, 5], None, True),
        ([5, 5, 0, 1, 5, 5], None, False),
        ([5, 5, 5, 5, 5, 5], [1, 1, 0, 0, 1, 1], True),
        ([5, 5, 5, 5, 5, 5], [1, 0, 0, 0, 1, 1], False),
        ([5, 5, 5, 5, 5, 5], [1, 1, 1, 0, 1, 1], False),
        ([5, 5, 5, 5, 5, 5], [1, 1, 0, 0, 0, 1], False),
        ([5, 5, 0, 0, 5, 5], [1, 0, 1], False),
    ],
)
def test_the_bias_of_keys_alone_is_masked(bias, mask, masked):
    tensor = None if mask is None else torch.tensor(mask)
    assert timm_files._keys_are_masked(torch.tensor(bias), tensor) == masked


def test_what_timms_model_does_not_have_must_be_as_it_computes():
    bias = torch.tensor([5.0, 5, 0, 1, 5, 5])
    tensors = {
        "net.blocks.0.attn.qkv.bias": bias,
        "net.blocks.1.attn.qkv.bias": bias,
        "net.norms.3.weight": torch.ones(2),
        "net.norms.3.bias": torch.ones(2),
        "net.norm.weight": torch.ones(2),
        "net.other.weight": torch.ones(2).to_sparse(),
        "net.blocks.2.attn.qkv.bias_mask": torch.ones(2).to_sparse(),
        "net.blocks.3.attn.qkv.bias": bias.to_sparse(),
    }
    names = [key.removeprefix("net.") for key in tensors]
    thirds = {"a": [Piece("blocks.0.attn.qkv.bias", (6,), 0, 1, 3)]}
    thirds["b"] = [Piece("blocks.1.attn.qkv.bias", (6,))]
    # `wholeness` names those of the trunk itself whose elements are not in the file
    own = {"blocks.3.attn.qkv.bias": "net.blocks.3.attn.qkv.bias"}
    trunk = in_file(local=names, sources=thirds, keys=own)
    assert trunk.contradictions(tensors) == [
        "net.blocks.0.attn.qkv.bias (not its keys' third alone is masked)",
        "net.blocks.2.attn.qkv.bias_mask (its elements are not all in the file)",
    ]
    tensors["net.norm.weight"] = torch.zeros(2)
    assert trunk.contradictions(tensors)[1] == (
        "net.norms.3.weight (differs from net.norm.weight, whose copy it should be)"
    )


# Its classifier


def linear(name, classes=7, width=24, bias=True):
    out = {f"{name}.weight": torch.empty(classes, width, device="meta")}
    if bias:
        out[f"{name}.bias"] = torch.empty(classes, device="meta")
    return out


def classifier(*tensors, prefix="a.net.", trunk=()):
    table = {}
    for each in tensors:
        table |= each
    return file_classifier.found(VIT, prefix, table, trunk)


HEAD = {"head.weight", "head.bias"}


def test_a_classifier_stands_below_the_trunks_prefix_or_around_it():
    for place, name in (
        ("a.net.", "head"),
        ("a.net.", "fc"),
        ("a.", "classifier"),
        ("", "head"),
        ("", "_fc"),
        ("a.net.", "head.3"),
    ):
        found = classifier(linear(place + name), linear("other.fc"))
        assert found.classes == 7
        assert found.names == {
            f"{place}{name}.weight": "head.weight",
            f"{place}{name}.bias": "head.bias",
        }
    assert file_classifier._prefixes_around("a.b.") == ["a.b.", "a.", ""]
    assert file_classifier._prefixes_around("") == [""]


@pytest.mark.parametrize(
    "tensors",
    [
        (linear("other.fc"),),
        (linear("fc"), linear("linear")),
        (linear("a.net.fc"), linear("classifier")),
        (linear("fc", bias=False),),
        (linear("a.net.head", bias=False),),
        (linear("a.net.head") | {"a.net.head.bias": torch.empty(8, device="meta")},),
        (linear("fc", width=25),),
        (linear("fc") | {"fc.bias": torch.empty(8, device="meta")},),
        (linear("fc", classes=0),),
        ({"fc.weight": torch.empty(7)},),
        (linear("fc", classes=1_000_001),),
    ],
)
def test_what_is_no_single_layer_of_that_shape_is_no_classifier(tensors):
    assert classifier(*tensors) is None


def test_tensors_of_the_trunk_are_no_classifier():
    head = linear("a.net.head")
    assert classifier(head, trunk=["a.net.head.weight"]) is None
    assert classifier(head, trunk=["a.net.norm.weight"]).classes == 7


def test_some_numbers_of_classes_are_tried():
    """A projector's layers come first; of more than three, the head's number is not tried."""
    projector = [linear(f"a.net.fc.{n}", 2 + n, 24) for n in range(4)]
    assert classifier(*projector[:3], linear("a.net.head")).classes == 7
    assert classifier(*projector, linear("a.net.head")) is None


def checkpoint(arch=VIT, heads=None, **more):
    how = {"stem": "imagenet", "provenance": {}, "pixels": Pixels(), "name": "mine"}
    return SimpleNamespace(arch=arch, heads=heads or {}, **how | more)


def test_an_own_head_has_the_models_names_and_all_its_tensors():
    head = linear("head")
    found = timm_classifier.own_head(checkpoint(heads=head | linear("fc")))
    assert (found.classes, found.tensors.keys()) == (7, HEAD)
    assert timm_classifier.own_head(checkpoint(heads=linear("fc"))) is None
    of_resnet = linear("fc", width=512)
    found = timm_classifier.own_head(checkpoint("resnet18", of_resnet))
    assert (found.classes, found.tensors.keys()) == (7, {"fc.weight", "fc.bias"})
    for arch, stem in (("resnet18", "conv3"), ("resnet18,width=0.5", "imagenet")):
        other = checkpoint(arch, of_resnet, stem=stem)
        assert timm_classifier.own_head(other) is None
    for no_fc in (
        linear("fc", width=2048),
        linear("fc", bias=False),
        linear("fc.0", width=512),
        linear("fc", classes=0, width=512),
        of_resnet | {"fc.bias": torch.empty(8, device="meta")},
    ):
        assert timm_classifier.own_head(checkpoint("resnet18", no_fc)) is None
    assert timm_classifier.own_head(checkpoint("resnet50", linear("fc", width=2048)))
    tensors = {"head.weight": torch.ones(2, 3), "head.bias": torch.zeros(2)}
    content = (
        b"head/bias"
        + bytes(8)
        + b"head/weight"
        + tensors["head.weight"].numpy().tobytes()
    )
    assert OwnHead(2, tensors).digest == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("classes", "says"),
    [
        (7, "'mine': its own head has 7 classes, not ImageNet's 1000; use a head that"),
        (
            1000,
            f"'mine': {VIT} is changed, and its own head is for timm's vit_tiny_patch",
        ),
    ],
)
def test_a_head_of_another_model_or_set_does_not_answer(classes, says):
    with pytest.raises(BadInput) as error:
        timm_classifier.classifier(checkpoint(heads=linear("head", classes)))
    assert str(error.value).startswith(says)


def test_weights_are_evaluated_as_timm_has_them_and_a_strangers_file_as_usual():
    half = Pixels((0.5,) * 3, (0.25,) * 3)

    def how(test_size=True, **more):
        about = timm_classifier.evaluation(checkpoint(**more), test_size=test_size)
        return about["input_size"], about["crop_pct"], about["interpolation"]

    name = "convnext_tiny.in12k_ft_in1k"
    timms = {"arch": "timm:convnext_tiny", "provenance": {"timm_weights": name}}
    assert how(**timms) == ((3, 288, 288), 1.0, "bicubic")
    assert how(test_size=False, **timms) == ((3, 224, 224), 0.95, "bicubic")
    with pytest.raises(BadInput) as error:
        how(pixels=half, **timms)
    assert str(error.value) == (
        f"'mine' has other pixels than timm's {name}; import it without --pixels"
    )
    # Without timm's weights, timm's usual size of that model, and the file's own pixels
    usual, crop, _ = how(arch="timm:convnext_tiny", pixels=half)
    assert (usual, crop) == ((3, 224, 224), 0.95)
    assert how(arch="resnet18", pixels=half) == ((3, 224, 224), 0.875, "bilinear")
    for arch in ("resnet18", "timm:convnext_tiny"):
        stranger = checkpoint(arch, pixels=half)
        about = timm_classifier.evaluation(stranger, test_size=True)
        assert (about["mean"], about["std"]) == (half.mean, half.std)
