"""Which probe is a checkpoint's own, and how a trunk's recipe is told beside its numbers."""

import pytest

from backbench.datasets import catalog
from backbench.errors import BadInput
from backbench.recipes import config, fast, own_probe

NAMED = {"probe": {"dtd": "lorac", "pets": "./mine.yaml"}, "method": {"name": "jcl"}}


@pytest.mark.parametrize(
    ("recipe", "dataset", "probe"),
    [
        (NAMED, "dtd", "lorac"),
        (NAMED, "pets", "./mine.yaml"),
        # What it does not name, its method decides
        (NAMED, "imagenet100", "imagenet100_jcl"),
        (NAMED, "cars", None),
        ({"method": {"name": "nobody"}}, "imagenet", "imagenet_grid"),
        ({"method": "jcl"}, "imagenet100", None),
        ({"probe": "lorac"}, "dtd", None),
        ({}, "imagenet", "imagenet_grid"),
    ],
)
def test_a_recipe_names_its_probe_or_its_method_does(recipe, dataset, probe):
    assert own_probe.of_recipe(recipe, dataset) == probe


def test_a_strangers_recipe_chooses_no_file():
    assert own_probe.of_recipe(NAMED, "dtd", "x.pth") == "lorac"
    with pytest.raises(BadInput) as refused:
        own_probe.of_recipe(NAMED, "pets", "x.pth")
    assert str(refused.value) == (
        "x.pth: its probe, './mine.yaml', is no name under configs/transfer; give a file of"
        " yours by hand, --protocol FILE"
    )


def test_a_checkpoints_recipe_goes_before_its_method():
    def of(method, dataset, **provenance):
        return own_probe.of_checkpoint("x.pth", method, provenance, dataset)

    assert of("moco", "imagenet") == "imagenet_moco"
    assert of("moco", "imagenet", recipe=NAMED) == "imagenet_moco"
    assert of("moco", "imagenet100", recipe=NAMED) == "imagenet100_jcl"
    assert of("arb", "cifar10", recipe={"method": {"name": "x"}}) == "arb_cifar"
    assert of("arb", "cifar10", recipe="jcl") == "arb_cifar"
    with pytest.raises(BadInput) as refused:
        of("moco", "cars", recipe=NAMED)
    assert str(refused.value) == (
        "x.pth: neither its recipe nor its method 'moco' has a probe of its own for cars;"
        " give --protocol NAME"
    )


def test_a_recipe_says_what_it_was_trained_on():
    assert own_probe.pretrained_on({"data": {"dataset": "imagenet"}}) == "imagenet"
    assert own_probe.pretrained_on({"data": {"dataset": "a\x1b"}}) == "a\\x1b"
    for recipe in (None, {}, {"data": "imagenet"}, {"data": {"dataset": None}}):
        assert own_probe.pretrained_on(recipe) is None


def test_a_trunks_provenance_adds_its_flat_recipe_and_its_data():
    recipe = {"data": {"dataset": "imagenet"}, "epochs": 2}
    flat = {"data.dataset": "imagenet", "epochs": 2}
    of_recipe = {"pretraining": flat, "trained_on": ["imagenet"]}
    assert fast.of_trunk({"recipe": recipe}) == of_recipe
    # What is said beside the recipe goes before
    own = {"recipe": recipe, "trained_on": ["dtd:test"]}
    assert fast.of_trunk(own) == {**of_recipe, "trained_on": ["dtd:test"]}
    assert fast.of_trunk({"recipe": {}, "trained_on": []}) == {}
    assert fast.of_trunk({"recipe": "x", "trained_on": ["a"]}) == {"trained_on": ["a"]}


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"views.pipeline": "fast", "precision": "bf16"}, "fast"),
        (
            {"views.pipeline": "fast", "precision": "fp16"},
            "views.pipeline=fast, precision=fp16",
        ),
        ({"views.pipeline": "fast"}, "views.pipeline=fast"),
        ({"precision": "tf32", "compile": "cuda"}, "precision=tf32"),
        ({"views.pipeline": "reference", "precision": "fp32"}, ""),
        ("x", ""),
    ],
)
def test_the_word_says_what_is_not_the_papers(keys, word):
    assert fast.word({"pretraining": keys}) == word
    assert fast.word({}) == ""


def test_a_recipe_that_demands_a_precision_is_not_computed_in_another():
    spelled = [
        "views.pipeline=fast",
        "precision=bf16",
        "channels_last=true",
        "compile=cuda",
    ]
    assert fast.spelled() == spelled
    assert fast.overrides({"precision": "bf16"}, ["lr=1"], "x") == [*spelled, "lr=1"]
    assert fast.overrides({}, [], "x") == spelled
    by_hand = ["precision=fp32"]
    assert fast.overrides({"precision": "fp16"}, by_hand, "x") == [*spelled, *by_hand]
    with pytest.raises(BadInput) as refused:
        fast.overrides({"precision": "fp32"}, ["lr=1"], "x.yaml")
    assert str(refused.value) == (
        "x.yaml: the recipe demands precision fp32, and --fast computes in bf16; leave --fast"
        " out, or give precision=... by hand"
    )


def test_every_method_has_probes_that_are_shipped_for_datasets_that_are_known():
    tables = [*own_probe.BY_METHOD.items(), ("any", own_probe.ANY_METHOD)]
    for method, probes in tables:
        assert set(probes) <= set(catalog.DATASETS), method
        assert set(probes.values()) <= set(config.recipe_names("transfer")), method
