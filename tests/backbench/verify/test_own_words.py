"""What a row says of itself, without its kept files: its identity, its range, its choice."""

import time

import pytest
from support.records import a_result

from backbench.verify import verification


def why(tmp_path, *rows):
    """The reasons for which these rows of one file do not stand."""
    return [verdict.why for verdict in verification.of_run(rows, tmp_path)]


def a_row(facts=None, **changes):
    images = {"train": 400, "val": 100, "test": 200}
    about = {"images": images, **(facts or {})}
    whole = {"value": 50.0, "ci95": None, "provenance": about, "protocol": "x-v1"}
    return a_result(**whole | changes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"checkpoint": "a" * 63}, "' is no digest"),
        ({"checkpoint": "A" * 64}, "' is no digest"),
        ({"origin": {"recorded": time.time()}}, ""),
        (
            {"origin": {"recorded": -1.0}},
            "it was recorded in the future or before 1970",
        ),
        (
            {"origin": {"recorded": time.time() + 90_000}},
            "it was recorded in the future",
        ),
        ({"value": None}, ""),
        ({"value": None, "ci95": (1.0, 2.0)}, "an undefined value has no interval"),
        ({"value": 100.0}, ""),
        ({"value": 0.0}, ""),
        ({"value": -0.5}, "-0.5 is no percentage"),
        ({"value": 100.5}, "100.5 is no percentage"),
        ({"ci95": (49.0, 51.0)}, ""),
        (
            {"ci95": (50.5, 51.0)},
            "its interval [50.5000, 51.0000] does not hold its value",
        ),
        ({"ci95": (49.0, 49.5)}, "does not hold its value 50.0000"),
        (
            {"value": 0.5, "ci95": (-0.5, 1.0)},
            "its interval [-0.5000, 1.0000] leaves 0 to 100",
        ),
        ({"value": 99.5, "ci95": (99.0, 100.5)}, "leaves 0 to 100"),
        # 200 images
        ({"value": 50.5}, ""),
        ({"value": 50.25}, "50.25 is no share of 200 images"),
        ({"value": 50.25, "metric": "mean_per_class"}, ""),
        # Scored on train: 500
        ({"value": 50.2, "metric": "train_top1", "split": "train"}, ""),
        (
            {"value": 50.1, "metric": "train_top1", "split": "train"},
            "no share of 500 images",
        ),
    ],
)
def test_a_number_that_no_measurement_gives(tmp_path, change, says):
    (found,) = why(tmp_path, a_row(**change))
    assert says in found
    assert bool(found) == bool(says)


def test_what_only_describes_features_may_have_any_value(tmp_path):
    row = a_row(task="analyze", metric="nuclear_norm", value=-3.5, ci95=(-4.0, 200.0))
    assert why(tmp_path, row) == [""]


@pytest.mark.parametrize(
    ("facts", "value", "says"),
    [
        ({"draws": [40.0, 60.0]}, 50.0, ""),
        ({"draws": [40.0, 60.0], "recipe": {"draws": 2}}, 50.0, ""),
        (
            {"draws": [40.0, 60.0], "recipe": {"draws": 3}},
            50.0,
            "it has 2 draws, its recipe 3",
        ),
        (
            {"draws": [40.0, 60.0]},
            50.5,
            "it says 50.5, the mean of its draws is another",
        ),
        ({"draws": []}, 50.0, "the mean of its draws is another"),
        # Of two draws a share is of 400 images
        ({"draws": [50.0, 50.5]}, 50.25, ""),
    ],
)
def test_a_number_is_the_mean_of_its_draws(tmp_path, facts, value, says):
    (found,) = why(tmp_path, a_row(facts, task="fewshot", value=value))
    assert says in found and bool(found) == bool(says)


SGD = {"kind": "sgd", "lr": [0.1, 1.0]}
CHOSEN = {"lr": 1.0, "on": "val", "scores": {"0.1": 40.0, "1": 45.0}}


def chosen(recipe=SGD, **changes):
    given = {
        key: value for key, value in (CHOSEN | changes).items() if value is not ...
    }
    return {"facts": {"recipe": recipe}, "chosen": given}


DECAYS = SGD | {"weight_decays": [0.0, 0.1]}
BY_BOTH = {"0.1 wd 0": 1.0, "0.1 wd 0.1": 2.0, "1 wd 0": 4.0, "1 wd 0.1": 3.0}
L2 = {"kind": "logreg", "l2": [0.01, 100.0, 3]}
BY_L2 = {"100": 3.0, "1": 5.0, "0.01": 4.0}
NEIGHBOURS = {"kind": "seg_knn", "k": [3, 5], "distances": ["cosine"]}
BY_K = {"3 cosine": 5.0, "5 cosine": 4.0}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (chosen(), ""),
        (chosen(scores=...), ""),
        (chosen(scores={}), ""),
        (chosen(lr=...), ""),  # nothing was chosen
        (chosen(lr=3.0), "its lr 3 is not on its recipe's grid (0.1, 1)"),
        (chosen(lr=0.1), "its lr 0.1 is not the best of its scores, 1 is"),
        (chosen(scores={"0.1": 45.0, "1": 45.0}), "not the best of its scores, 0.1 is"),
        (chosen(scores={"0.1": 45.0, "1": 45.0}, lr=0.1), ""),
        (chosen(scores={"1": 45.0}), "scores"),
        (chosen(scores={"0.1": -1.0, "1": 45.0}), "one of its scores is no percentage"),
        (chosen(scores={"0.1": 4.0, "1": 101.0}), "one of its scores is no percentage"),
        (chosen(on="test"), "it says 50.0, it was chosen on test with 45.0"),
        (chosen(on="test", scores={"0.1": 40.0, "1": 50.0}), ""),
        (chosen(choice_noise=0.5), ""),
        (
            chosen(choice_noise=-1),
            "its choice_noise '-1' is no number of points from 0 to",
        ),
        (chosen(choice_noise="x"), "its choice_noise 'x' is no number"),
        (chosen(choice_noise=101), "is no number of points"),
        (chosen(lr_used=2.0, batch_size=512, reference_batch=256), ""),
        (
            chosen(lr_used=1.0, batch_size=512, reference_batch=256),
            "its rate as used is 2, it",
        ),
        # Without a grid the best of equals is as good
        (chosen({}, scores={"0.1": 45.0, "1": 45.0}), ""),
        (chosen({}, lr=0.1), "is not the best of its scores, 1 is"),
        (chosen(DECAYS, weight_decay=0.0, scores=BY_BOTH), ""),
        (
            chosen(DECAYS, weight_decay=0.1, scores=BY_BOTH),
            "1 wd 0.1 is not the best of its",
        ),
        (
            chosen(DECAYS, weight_decay=0.3, scores=BY_BOTH),
            "1 wd 0.3 is not on its recipe's",
        ),
        (chosen(L2, lr=..., l2=1.0, scores=BY_L2), ""),
        (
            chosen(L2, lr=..., l2=2.0, scores=BY_L2),
            "its l2 2 is not on its recipe's grid (100",
        ),
        (
            chosen(L2, lr=..., l2=0.01, scores=BY_L2),
            "its l2 0.01 is not the best of its",
        ),
        (
            chosen(L2 | {"l2": [1, 2, 10**5]}, lr=..., l2=1.0),
            "its recipe has 100000 penalties",
        ),
        (chosen(NEIGHBOURS, lr=..., k=3, distance="cosine", scores=BY_K), ""),
        (
            chosen(NEIGHBOURS, lr=..., k=5, distance="cosine", scores=BY_K),
            "5 cosine is not the",
        ),
        (
            chosen(NEIGHBOURS, lr=..., k=3, distance="l2", scores=BY_K),
            "3 l2 is not on its",
        ),
    ],
)
def test_a_choice_is_the_best_on_the_recipes_grid(tmp_path, row, says):
    (found,) = why(tmp_path, a_row(**row))
    assert says in found, found
    assert bool(found) == bool(says), found


# Rows beside one another


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"top1": 50.0, "top5": 50.0}, False),
        ({"top1": 50.5, "top5": 50.0}, True),
        ({"top1_k20": 50.5, "top5_k20": 50.0}, True),
        ({"top1_k10": 50.5, "top5_k20": 50.0}, False),
        ({"top1": 50.5, "top5": None}, False),
    ],
)
def test_a_top1_is_not_above_its_top5(tmp_path, values, wrong):
    rows = [a_row(metric=metric, value=value) for metric, value in values.items()]
    found = why(tmp_path, *rows)
    assert [bool(each) for each in found] == [wrong] * 2
    if wrong:
        assert "is above top5" in found[0]
    # Another seed's rows are another number's
    rows[0] = a_row(metric=rows[0].metric, value=rows[0].value, seed=1)
    assert why(tmp_path, *rows) == ["", ""]


@pytest.mark.parametrize(
    ("low", "high", "wrong"),
    [(40.0, 40.0, False), (40.05, 40.0, False), (40.2, 40.0, True)],
)
def test_a_stricter_overlap_gives_no_more_but_by_chance(tmp_path, low, high, wrong):
    about = {"task": "faster_rcnn", "dataset": "coco2017", "split": "val"}
    for metric in ("bbox_AP", "bbox_AP75"):
        rows = [a_row(metric=metric, value=low, **about)]
        rows.append(a_row(metric="bbox_AP50", value=high, **about))
        assert [bool(each) for each in why(tmp_path, *rows)] == [wrong] * 2


def test_a_file_of_predictions_is_one_numbers(tmp_path):
    rows = [
        a_row({"predictions": "predictions/a.npz"}),
        a_row({"predictions": "predictions/./a.npz"}, metric="top5", value=60.0),
        a_row({"predictions": "predictions//a.npz"}, seed=1),
    ]
    assert why(tmp_path, *rows) == [
        "",
        "",
        "its predictions 'predictions//a.npz' are another number's",
    ]


def test_a_value_of_another_type_is_no_measurement(tmp_path):
    (found,) = why(tmp_path, a_row({"draws": ["x", "y"]}))
    assert found.startswith("it cannot be computed again (")
