"""Names of tensors, signs of trunks that were never trained, and sizes that somebody tells."""

import math

import pytest
import torch

from backbench.weights import tensor_names
from backbench.weights.inspecting import untrained_signs
from backbench.weights.own_size import OwnSize, _of_recipe
from backbench.weights.tensor_tables import tables_of


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("conv1.weight", "stem.conv1.weight"),
        ("bn1.running_var", "stem.conv1.norm.running_var"),
        ("layer1.0.conv2.weight", "res2.0.conv2.weight"),
        ("layer4.2.bn3.bias", "res5.2.conv3.norm.bias"),
        ("layer2.0.downsample.0.weight", "res3.0.shortcut.weight"),
        ("layer2.0.downsample.1.weight", "res3.0.shortcut.norm.weight"),
    ],
)
def test_detectron2s_names(key, name):
    assert tensor_names.detectron2_name(key) == name


@pytest.mark.parametrize(
    ("key", "around", "inside"),
    [
        ("module._orig_mod.a.b", "a.b", "module._orig_mod.a.b"),
        ("a._orig_mod.module.b", "a._orig_mod.module.b", "a.b"),
        ("module.a.module.b.module.c", "a.module.b.module.c", "module.a.b.c"),
        ("my_module.a", "my_module.a", "my_module.a"),
    ],
)
def test_wrappers_stand_around_a_name_or_inside_it(key, around, inside):
    assert tensor_names.unwrapped(key) == around
    assert tensor_names.without_wrapped_parts(key) == inside


def test_many_names_are_cut_and_counted():
    assert tensor_names.first_names(["a", "b", "c"]) == "a, b, c"
    assert tensor_names.first_names("abcde") == "a, b, c and 2 more"
    assert tensor_names.first_names("abc", 1) == "a and 2 more"
    assert tensor_names.first_names(["x" * 151, "\n"]) == "x" * 150 + "..., " + r"\n"


def test_counters_and_statistics():
    for name in ("bn.running_mean", "bn.running_var"):
        assert tensor_names.is_statistic(name) and not tensor_names.is_counter(name)
    assert tensor_names.is_counter("bn.num_batches_tracked")
    assert not tensor_names.is_statistic("bn.num_batches_tracked")
    assert not tensor_names.is_statistic("running_mean.weight")


def one():
    return torch.ones(1)


def test_tables_are_found_at_any_depth_by_their_paths():
    shared = {"w": one()}
    tree = {
        "a": one(),
        3: one(),
        "text": "x",
        "model": {"b": one(), "deep": ({"c": one()}, [{"d": one()}])},
        "none": {"e": 1},
        "same": shared,
        "again": shared,
    }
    tree["itself"] = tree
    found = {path: list(tensors) for path, tensors in tables_of(tree).items()}
    assert found == {
        "": ["a"],
        "model": ["b"],
        "model.deep.0": ["c"],
        "model.deep.1.0": ["d"],
        "same": ["w"],
    }


def test_tables_are_looked_for_twenty_levels_deep():
    def nested(levels):
        tree = {"w": one()}
        for _ in range(levels):
            tree = {"x": tree}
        return tree

    assert list(tables_of(nested(20))) == [".".join("x" * 20)]
    assert tables_of(nested(21)) == {}


def test_wrapped_parts_are_named_as_if_they_were_not():
    table = tables_of({"a.module.b": one(), "c": one()})[""]
    assert list(table) == ["a.b", "c"]
    twice = tables_of({"a.module.b": one(), "a.b": one()})[""]
    assert list(twice) == ["a.module.b", "a.b"]


VARIANCE = "every running variance is 1: no batch was ever seen in training mode"
SCALE = "every convolution has the scale of its initialisation"
NORM = "every norm's weight is 1 or 0"


def convolution(factor, seed=0):
    """50 x 40 x 3 x 5, of `factor` times the deviation that torchvision gives it."""
    drawn = torch.randn(50, 40, 3, 5, generator=torch.Generator().manual_seed(seed))
    drawn = (drawn - drawn.mean()) / drawn.std()
    return drawn * math.sqrt(2 / (50 * 3 * 5)) * factor


@pytest.mark.parametrize(
    ("tensors", "signs"),
    [
        ({}, []),
        ({"a.running_var": one(), "b.running_var": torch.ones(3)}, [VARIANCE]),
        ({"a.running_var": one(), "b.running_var": torch.tensor([1, 1.1])}, []),
        ({"a.running_mean": one()}, []),
        ({"a": convolution(1.019), "b": convolution(0.981, 1)}, [SCALE]),
        ({"a": convolution(1.0), "b": convolution(1.021)}, []),
        ({"a": convolution(0.979)}, []),
        ({"a.weight": torch.zeros(2), "b.weight": torch.ones(3)}, [NORM]),
        ({"a.weight": torch.tensor([1.0, 0.0])}, [NORM]),
        ({"a.weight": torch.ones(3), "b.weight": torch.tensor([1, 0.9])}, []),
        ({"a.bias": torch.zeros(3), "b.weight": torch.ones(2, 2)}, []),
        (
            {"v.running_var": one(), "c": convolution(1.0), "w.weight": one()},
            [VARIANCE, SCALE, NORM],
        ),
    ],
)
def test_signs_of_a_trunk_that_was_never_trained(tensors, signs):
    assert untrained_signs(tensors) == signs


@pytest.mark.parametrize(
    ("recipe", "size"),
    [
        ({"views": {"crops": [{"size": 160}, {"size": 96}]}}, 160),
        ({"views": {"crops": ({"size": 1},)}}, 1),
        ({"views": {"crops": [{"size": 0}]}}, None),
        ({"views": {"crops": [{"size": "160"}]}}, None),
        ({"views": {"crops": [160]}}, None),
        ({"views": {"crops": []}}, None),
        ({"views": {"crops": "x"}}, None),
        ({"views": []}, None),
        ({}, None),
        (None, None),
    ],
)
def test_a_recipes_size_is_that_of_its_first_crops(recipe, size):
    assert _of_recipe(recipe) == size


def test_a_size_is_told_with_who_says_it():
    own = OwnSize(160, "its pretraining recipe")
    assert own.known
    said = "read at 160 pixels, its own size (its pretraining recipe)"
    assert own.told(160) == said
    said = "read at 96 pixels, away from its own size of 160 (its pretraining recipe)"
    assert own.told(96) == said
    guess = OwnSize(224, "nobody")
    assert not guess.known
    said = "read at 224 pixels; nobody says at which size it was trained"
    assert guess.told(224) == said
