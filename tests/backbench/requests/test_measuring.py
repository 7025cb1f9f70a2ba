"""The request that measures a task holds what it was made of, whatever its verb."""

from pathlib import Path

import pytest

from backbench.errors import BadInput
from backbench.requests.measuring import measuring_request
from backbench.tasks import VERBS

PLACE = {"data": Path("images"), "out": Path("run"), "seed": 3, "workers": 2}


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "detect"])
def test_a_request_holds_what_it_is_made_of(verb):
    file = Path("model.pth")
    made = measuring_request(verb, [file], dataset="dtd", percent=10, **PLACE)
    assert made.verb == verb
    files = getattr(made, "checkpoints", None) or (made.checkpoint,)
    assert files == (file,)
    for name, value in PLACE.items():
        assert getattr(made, name) == value, name


@pytest.mark.parametrize(("seed", "kept"), [(3, 3), (0, None)])
def test_a_detector_keeps_its_configs_seed_unless_there_is_another(seed, kept):
    place = {**PLACE, "seed": seed}
    made = measuring_request("detect", [Path("model.pth")], recipe="a_config", **place)
    assert (made.verb, made.config_file, made.seed) == ("detect", "a_config", kept)
    assert (made.checkpoint, made.data) == (Path("model.pth"), PLACE["data"])
    assert made.out == PLACE["out"] and made.resume


def test_a_verb_that_measures_nothing_is_refused():
    with pytest.raises(BadInput, match="'rank' measures nothing"):
        measuring_request("rank", [Path("model.pth")], **PLACE)


FILES = [Path("one.pth"), Path("two.pth")]
WHOLE = {
    **PLACE,
    "dataset": "dtd",
    "recipe": "mine",
    "overrides": ["k=5"],
    "percent": 10,
    "lists": Path("lists"),
    "accelerator": "cpu",
}
SEVERAL = {"checkpoints": tuple(FILES)}
PROBED = {"protocol": "mine", "overrides": ("k=5",), "accelerator": "cpu"}


@pytest.mark.parametrize(
    ("verb", "holds"),
    [
        ("linear", {**SEVERAL, **PROBED, "datasets": "dtd"}),
        ("ood", {**SEVERAL, **PROBED, "datasets": "dtd"}),
        ("analyze", {**SEVERAL, "recipe": "mine", "dataset": "dtd"}),
        (
            "semisup",
            {**PROBED, "dataset": "dtd", "percent": 10, "lists": Path("lists")}
            | {"checkpoint": FILES[0]},
        ),
        ("finetune", {**PROBED, "dataset": "dtd", "checkpoint": FILES[0]}),
    ],
)
def test_each_verb_takes_what_it_can(verb, holds):
    made = measuring_request(verb, FILES, **WHOLE)
    assert {name: getattr(made, name) for name in holds} == holds
    # Without a recipe it is the verb's own, unchanged
    own = measuring_request(verb, FILES, **WHOLE | {"recipe": None})
    if verb == "analyze":
        assert own.recipe == "analyze"
    else:
        assert own.overrides == () and own.protocol != "mine"


def test_a_detector_reads_a_folder_of_boxes_by_an_engine():
    made = measuring_request("detect", FILES, engine="torchvision", **WHOLE)
    assert (made.dataset, made.engine, made.checkpoint) == (
        "dtd",
        "torchvision",
        FILES[0],
    )
    assert measuring_request("detect", FILES, **PLACE).dataset is None
