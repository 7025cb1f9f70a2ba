"""A module of one's own as a trunk, and the words of `import` that do not exist."""

import pytest
import torch
from torch import nn

from backbench.errors import BadInput
from backbench.weights import archs, importing
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.families import architectures
from backbench.weights.trunk import ModuleTrunk


def pooled(module, x):
    return module(x).mean((2, 3))


def named(trunk):
    """A trunk as `evaluate` has it, which gives it a name."""
    trunk.arch = "module:mine"
    return trunk


def test_a_module_is_read_as_it_is_said():
    module = nn.Conv2d(3, 5, 3, padding=1)
    trunk = named(
        ModuleTrunk(module, feature_dim=5, features=pooled, size=8, divisor=2)
    )
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(trunk(x), pooled(module, x))
    assert (trunk.feature_dim, trunk.size, trunk.divisor) == (5, 8, 2)
    with pytest.raises(BadInput, match="has no maps: detection needs `stages`"):
        trunk.stages(x)
    with pytest.raises(
        BadInput, match="does not say which layers its parameters are of"
    ):
        trunk.depths()


def test_before_it_has_a_name_it_is_called_by_its_class():
    with pytest.raises(BadInput, match=r"^Flatten gives features"):
        ModuleTrunk(nn.Flatten(), feature_dim=5)(torch.rand(2, 3, 2, 2))


def test_features_of_another_shape_are_refused():
    wrong = named(ModuleTrunk(nn.Flatten(), feature_dim=5))
    with pytest.raises(
        BadInput, match=r"gives features \(2, 12\) for 2 images, not \(2, 5\)"
    ):
        wrong(torch.rand(2, 3, 2, 2))
    maps = named(ModuleTrunk(nn.Identity(), feature_dim=3))
    with pytest.raises(BadInput, match="say how to read it by `features`"):
        maps(torch.rand(2, 3, 2, 2))


def test_what_is_no_tensor_is_refused():
    twice = ModuleTrunk(
        nn.Flatten(), feature_dim=12, features=lambda net, x: (net(x), x)
    )
    with pytest.raises(
        BadInput,
        match=r"^Flatten gives features as a tuple, not as a tensor; say which",
    ):
        twice(torch.rand(2, 3, 2, 2))


def test_no_identity_may_be_written_as_none():
    trunk = ModuleTrunk(nn.Flatten(), feature_dim=12, identity=None)
    assert importing.checkpoint_of(trunk).arch.startswith("python:Flatten~")


def test_maps_come_with_their_strides_and_widths():
    def stages(module, x):
        return [module(x)]

    module = nn.Conv2d(3, 5, 3, padding=1)
    given = {"feature_dim": 5, "features": pooled, "stages": stages}
    trunk = ModuleTrunk(module, strides=(1,), widths=(5,), **given)
    x = torch.rand(1, 3, 8, 8)
    (found,) = trunk.stages(x)
    torch.testing.assert_close(found, module(x))
    layers = trunk.layers(x)
    assert (layers.what, layers.class_tokens) == ("stage", [])
    torch.testing.assert_close(layers.feature, trunk(x))
    for strides, widths in (((), ()), ((1,), ()), ((1, 2), (5,))):
        with pytest.raises(
            BadInput, match="come with one stride and one width for each map"
        ):
            ModuleTrunk(module, strides=strides, widths=widths, **given)
    with pytest.raises(BadInput, match="come with one stride and one width"):
        ModuleTrunk(module, feature_dim=5, strides=(1,), widths=(5,))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pixels": "other"}, "--pixels other: expected "),
        ({"pos": "other"}, r"--pos other: expected \+0.1, aa, size"),
        ({"reading": "other"}, "reading 'other': expected cls"),
        (
            {"arch": "resnet50"},
            "--arch resnet50: a trunk of this kind is known by its tensors",
        ),
    ],
)
def test_words_that_do_not_exist_are_said_before_a_file_is_opened(
    tmp_path, given, says
):
    file = tmp_path / "a.pth"
    torch.save({"x": torch.zeros(1)}, file)
    with pytest.raises(BadInput, match=says):
        importing.read(file, **given)


def test_random_weights_are_the_same_each_time():
    one = importing.read("timm:test_convnext@random")
    torch.rand(3)
    other = importing.read("timm:test_convnext@random")
    assert one.digest == other.digest
    assert (one.method, one.epochs, one.arch) == ("random", 0, "timm:test_convnext")


def test_the_index_keeps_a_networks_digest_where_shapes_are_alike(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(architectures, "INDEX", tmp_path / "index.tsv")
    rows = [
        architectures.IndexRow("timm", "a", 3, "same", "n1", "first"),
        architectures.IndexRow("timm", "b", 3, "same", "n2", "second"),
        architectures.IndexRow("timm", "c", 4, "other", "n3", "third"),
    ]
    architectures.write(rows)
    lines = (tmp_path / "index.tsv").read_text().split("\n")
    assert lines == [
        "library\tname\ttensors\tshapes\tnames\tnetwork",
        "timm\ta\t3\tsame\tn1\tfirst",
        "timm\tb\t3\tsame\tn2\tsecond",
        "timm\tc\t4\tother\tn3\t",
        "",
    ]


def test_one_of_our_own_files_holds_one_trunk(tmp_path):
    arch = "resnet18,width=0.125"
    file = tmp_path / "x.safetensors"
    state = archs.build_trunk(arch).state_dict()
    Checkpoint(arch=arch, method="moco", epochs=3, state_dict=state).save(file)
    for given in (
        {"encoder": "trunk"},
        {"stem": "imagenet"},
        {"arch": "timm:test_vit"},
        {"pixels": "imagenet"},
    ):
        with pytest.raises(BadInput) as error:
            importing.read(file, **given)
        assert str(error.value) == (
            f"{file}: a backbench checkpoint holds one trunk; leave out the choice of encoder, stem,"
            " arch and pixels"
        )
    with pytest.raises(BadInput, match="is read by 'pooled' alone, not by 'cls'"):
        importing.read(file, reading="cls")
    with pytest.raises(BadInput, match=f"^{arch} takes images of any size; leave out"):
        importing.read(file, pos="aa")
    plain = importing.read(file, reading="pooled")
    assert (plain.method, plain.epochs, plain.name) == ("moco", 3, "moco")
    said = importing.read(
        file, method="byol", epochs=7, name="mine", published=("a", "b")
    )
    assert (said.method, said.epochs, said.name) == ("byol", 7, "mine")
    assert dict(said.provenance) == {"name": "mine", "published": ["a", "b"]}
    assert importing.read(file, published="c").provenance["published"] == "c"


@pytest.mark.parametrize("given", ["encoder", "stem", "arch"])
def test_a_name_of_weights_names_one_trunk(given):
    name = "timm:test_convnext@random"
    with pytest.raises(BadInput) as error:
        importing.read(name, **{given: "timm:test_vit"})
    assert str(error.value) == (
        f"{name}: names one trunk; leave out the choice of encoder, stem, arch"
    )
    drawn = importing.read(name, name="mine", published="c")
    assert dict(drawn.provenance) == {"name": "mine", "published": "c"}


def test_new_names_are_those_of_a_model():
    with pytest.raises(BadInput) as error:
        importing.read("x.pth", rename="by-order")
    said = "x.pth: --rename by-order: say whose names it gets, by --arch"
    assert str(error.value) == said
