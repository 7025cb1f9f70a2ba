"""timm's printed counts of right images, and verdicts on measured ones."""

import pytest
from support.records import a_result
from timm.data import resolve_data_config
from timm.models import get_pretrained_cfg

from backbench.published import reproduction_lists, timm_scores
from backbench.published.judge import judge_count, judge_list
from backbench.records import store

MODEL = ("resnet50.a1_in1k", 288, "imagenet-v2-matched")
SAME = {"images": 10_000, "crop_pct": 1.0, "interpolation": "bicubic"}


def test_the_counts_are_the_printed_percents():
    scores = timm_scores.scores()
    assert len(scores) == 6 * 1556
    # 1266, and one that stands in A's csv alone
    assert len({model for model, _, _ in scores}) == 1267
    assert len([1 for _, _, name in scores if name != "imagenet-val"]) == 7780
    for score in scores.values():
        assert 0 <= score.right <= score.printed.images
    # As results/*.csv print them
    for key, printed in (
        (MODEL, "69.690"),
        (("resnet18.tv_in1k", 224, "imagenet-v2-matched"), "57.350"),
        (("resnet50.tv_in1k", 224, "imagenet-real"), "82.969"),
        (("resnet50.tv_in1k", 224, "imagenet-sketch"), "24.064"),
        (("resnet50.tv_in1k", 224, "imagenet-r"), "36.157"),
    ):
        assert f"{scores[key].top1:.3f}" == printed
    # timm's csv has another in its place
    assert ("resnet50.tv_in1k", 224, "imagenet-a") not in scores


@pytest.mark.parametrize(
    ("changed", "off", "word"),
    [
        ({}, 0, "within"),
        ({}, 60, "within"),
        ({}, -61, "outside"),
        ({"crop_pct": 0.9995}, 0, "within"),
        ({"crop_pct": 0.998}, 0, "unlike"),
        ({"interpolation": "bilinear"}, 0, "unlike"),
        ({"images": 9_999}, 0, "unlike"),
    ],
)
def test_a_count_is_judged_within_the_sets_tolerance(changed, off, word):
    score = timm_scores.scores()[MODEL]
    found, why = judge_count(score, right=score.right + off, **{**SAME, **changed})
    assert found == word
    assert bool(why) == (word == "unlike")


@pytest.mark.slow
def test_every_count_can_be_measured_as_it_was_printed():
    """By the two protocols of `backbench reproduce timm-*`: timm's sizes for tests and training."""
    for (model, size, dataset), score in timm_scores.scores().items():
        about = get_pretrained_cfg(model).to_dict()
        two_sizes = len(timm_scores.of_model(model, dataset)) > 1
        verdicts = set()
        for test_size in (True, False) if two_sizes else (True,):
            way = resolve_data_config({}, pretrained_cfg=about, use_test_size=test_size)
            if way["input_size"][-1] == size:
                found, _ = judge_count(
                    score,
                    right=score.right,
                    images=score.printed.images,
                    crop_pct=way["crop_pct"],
                    interpolation=way["interpolation"],
                )
                verdicts.add(found)
        # timm says 0.9 of the FasterNets, and printed what they do at 1
        expected = "unlike" if model.startswith("fasternet_") else "within"
        assert verdicts == {expected}, (model, size, dataset)


def test_the_testbeds_counts_are_its_percents():
    """As robustness_top1s.csv prints them, to the digits of a float32."""
    printed = {
        ("resnet50_swav", "imagenet-sketch"): 18.927470,
        ("resnet50_swav", "imagenet-v2-top"): 77.01,
        ("resnet50_simsiam", "imagenet-r"): 28.446667,
        ("resnet50_simclrv2_linear_probe_tf_port", "imagenet-val"): 70.84,
        ("resnet50", "imagenet-a"): 0.0,
    }
    for (model, dataset), percent in printed.items():
        assert timm_scores.testbed()[model, 224, dataset].top1 == pytest.approx(
            percent, abs=1e-6
        )
    # The supervised ResNet is timm's resnet50.tv_in1k: two people counted the same weights
    for dataset in timm_scores.SETS.keys() - {"imagenet-a", "imagenet-real"}:
        theirs = timm_scores.scores()["resnet50.tv_in1k", 224, dataset]
        ours = timm_scores.testbed()["resnet50", 224, dataset]
        allowed = theirs.printed.tolerance * theirs.printed.images / 100
        assert abs(ours.right - theirs.right) <= allowed


def test_a_count_of_an_unknown_file_is_not_judged():
    score = timm_scores.testbed()["resnet50_simsiam", 224, "imagenet-a"]
    found, why = judge_count(
        score,
        right=score.right,
        images=7500,
        crop_pct=0.875,
        interpolation="bilinear",
    )
    assert found == "unlike"
    assert "which of SimSiam's files" in why


# What a row of resnet50.a1_in1k on imagenet-a at 288 pixels has changed; all but the first of these
# rows are about something else
ROWS = {
    "it": {},
    "another rule": {"recipe": {"kind": "ood", "rule": "all"}},
    "another size": {"own_geometry": {"input_size": [3, 224, 224]}},
    "another set": {"dataset": "imagenet-v2-matched"},
    "another model": {"checkpoint": "b" * 64},
    "another metric": {"metric": "top5"},
    "a kept head": {"own_geometry": None},
}


@pytest.mark.parametrize("name", ROWS)
def test_a_count_is_judged_by_its_own_measurement(tmp_path, name):
    changes = dict(ROWS[name])
    about = {
        "recipe": {"kind": "ood", "rule": "subset"},
        "own_geometry": {
            "input_size": [3, 288, 288],
            "crop_pct": 1.0,
            "interpolation": "bicubic",
        },
        "right": {"top1": 1000, "top5": 2000},
        "images": {"train": 0, "val": 0, "test": 7500},
    }
    for key in about.keys() & changes.keys():
        change = changes.pop(key)
        if change is None:
            del about[key]
        else:
            about[key] = {**about[key], **change}
    row = {
        "task": "ood",
        "dataset": "imagenet-a",
        "protocol": "own-subset",
        "value": 100 / 7.5,
    }
    store.append(tmp_path, [a_result(**{**row, **changes}, provenance=about)])
    listed = reproduction_lists.timm_list("timm-a", ["resnet50.a1_in1k"])
    covered = {"resnet50.a1_in1k": {("ood", "imagenet-a")}}
    lines = judge_list(listed, covered, {"resnet50.a1_in1k": "a" * 64}, [tmp_path])
    values = [line.measured for line in lines]  # of 224 and 288 pixels
    expected = {"it": [None, 100 / 7.5], "another size": [100 / 7.5, None]}
    assert values == expected.get(name, [None, None])


def test_a_list_measures_models_of_two_sizes_twice():
    names = ["resnet18.tv_in1k", "resnet50.a1_in1k"]
    first, second = reproduction_lists.timm_list("timm-a", names).parts
    assert first.only == tuple(names)
    assert second.only == ("resnet50.a1_in1k",)
    protocols = [part.evaluate[0]["protocol"] for part in (first, second)]
    assert protocols == ["ood_own", "ood_own_train_size"]
    (only,) = reproduction_lists.timm_list("timm-a", names[:1]).parts
    assert only.only == ("resnet18.tv_in1k",)
