"""What rows that belong together say in words: layers, loaders and label curves."""

import dataclasses
import math

import numpy as np
import pytest
from support.records import a_result

from backbench.records import label_curve, layers, loaders, paired_rows, predictions
from backbench.records.paired_rows import KeptRow
from backbench.stats import paired_differences
from backbench.stats.labels_needed import BELOW, BEYOND, LabelsNeeded

# Three images in four are of class 0
LABEL = np.repeat([0, 1], [30, 10])


def kept_row(run, stem, right, *, manifest="m", label=LABEL, **changes):
    """A row whose predictions are right on these images, the first of each class."""
    of_zero, of_one = right
    hit = np.concatenate([np.arange(30) < of_zero, np.arange(10) < of_one])
    prediction = np.where(hit, label, label + 5)
    file = predictions.keep(
        run, stem, manifest=manifest, label=label, prediction=prediction
    )
    about = {"dataset": "mine", "ci95": None, "provenance": {"predictions": file}}
    return KeptRow(a_result(**about | changes), run)


def test_the_gain_of_two_rows_is_paired_by_images_or_by_classes(tmp_path):
    step = np.zeros(40)
    step[20:24] = 1  # four more of class 0
    step[32:35] = -1  # three less of class 1
    for metric, classes in (("top1", None), ("mean_per_class", LABEL)):
        one = kept_row(tmp_path, f"a{metric}", (24, 2), metric=metric)
        other = kept_row(tmp_path, f"b{metric}", (20, 5), metric=metric)
        expected = paired_differences.of_images(step, classes)
        assert paired_rows.difference(one, other) == expected
        low, high = expected.ci95
        value = 2.5 if metric == "top1" else 100 * (4 / 30 - 3 / 10) / 2
        said = f"{value:+.2f} [{low:.2f}, {high:.2f}]"
        assert paired_rows.told(one, other) == said
    drawn = predictions.keep(
        tmp_path, "draws", manifest="m", label=LABEL, prediction=np.zeros((2, 40), int)
    )
    apart = [
        kept_row(tmp_path, "list", (20, 5), manifest="n"),
        kept_row(tmp_path, "labels", (20, 5), label=LABEL[::-1].copy()),
        KeptRow(a_result(provenance={}), tmp_path),
        KeptRow(a_result(provenance={"predictions": drawn}), tmp_path),
    ]
    row = kept_row(tmp_path, "row", (24, 2))
    for unlike in apart:
        assert paired_rows.difference(row, unlike) is None
        assert paired_rows.told(unlike, row) == ""


# ---- layers


def test_readings_are_sorted_into_a_grid_of_layers_and_poolings():
    scores = {
        "block 10 max": 40,
        "block 2 cls": 50.25,
        "block 2 max": 30.0,
        "usual": 61.0,
        "block 3 sum": 1.0,
        "Block 3 cls": 1.0,
        "block 3 mean": math.nan,
        "block 4 mean": "5",
        "stage 12345 cls": 1.0,
    }
    grid = layers.grid(scores)
    assert grid.layers == ("block 2", "block 10")
    assert grid.poolings == ("cls", "max")
    assert grid.alone == {"usual": 61.0}
    assert grid.scores == {
        ("block 10", "max"): 40.0,
        ("block 2", "cls"): 50.25,
        ("block 2", "max"): 30.0,
    }
    assert layers._grid(scores) == [
        "  % on val         cls       max",
        "  block 2         50.2      30.0",
        "  block 10         nan      40.0",
        "  usual           61.0",
    ]


def test_each_checkpoint_of_each_run_is_told_beside_its_own_usual_reading(tmp_path):
    rows = []
    for run, name, best, usual in (
        ("r1", "vit", (30, 10), (20, 4)),
        ("r2", "vit", (24, 4), (20, 4)),
        ("r1", "resnet", (28, 8), (28, 8)),
    ):
        folder = tmp_path / run
        value = 100 * sum(best) / 40
        reading = "block 1 cls" if best != usual else "usual"
        scores = {"block 1 cls": value, "usual": 9.0}
        chosen = {"reading": reading, "usual_reading": "usual", "scores": scores}
        about = {"task": "layers", "name": name, "checkpoint": name}
        one = kept_row(
            folder,
            f"{name}-best",
            best,
            metric="top1",
            value=value,
            chosen=chosen,
            **about,
        )
        other = kept_row(folder, f"{name}-usual", usual, metric="top1_usual", **about)
        rows += [other, one] if name == "vit" else [one, other]
    top5 = dataclasses.replace(rows[0].row, metric="top5")
    said = layers.sayings([*rows, KeptRow(top5, tmp_path)])
    first = [line for line in said if line.startswith("layers of")]
    gains = []
    for more in (16, 4):
        low, high = paired_differences.of_images(np.arange(40) < more).ci95
        gains.append(f"{100 * more / 40:+.2f} [{low:.2f}, {high:.2f}]")
    assert first == [
        "layers of mine: vit is read best by block 1 cls: 100.00%,"
        f" {gains[0]} against its usual reading",
        "layers of mine: vit is read best by block 1 cls: 70.00%,"
        f" {gains[1]} against its usual reading",
        "layers of mine: resnet is read best by its usual reading: 90.00%",
    ]
    assert len(said) == 3 * 4


# ---- loaders


def test_loaders_are_told_against_the_usual_one(tmp_path):
    def read_by(loader, name, right, **changes):
        about = {"task": "loaders", "name": name, "checkpoint": name}
        value = 100 * sum(right) / 40
        about |= {"metric": f"top1_{loader}", "value": value}
        return kept_row(tmp_path, f"{name}-{loader}", right, **about | changes)

    rows = [
        read_by("opencv", "vit", (22, 4)),
        read_by("pil", "vit", (20, 4), ci95=(50.0, 70.126)),
        read_by("pil", "resnet", (30, 10)),
        read_by("opencv", "resnet", (10, 10), provenance={}),
        read_by("pil", "alone", (30, 10)),
        read_by("opencv", "without", (30, 10)),
        read_by("opencv", "undefined", (30, 10), value=None),
        read_by("pil", "undefined", (30, 10)),
        read_by("pil", "other", (30, 10), metric="top5_pil"),
        read_by("opencv", "other", (30, 10), metric="top5_opencv"),
    ]
    low, high = paired_differences.of_images(np.arange(40) < 2).ci95
    assert loaders.sayings(rows) == [
        "loaders of mine: vit has 60.00% [50.00, 70.13] by pil; 2 loaders spread over 5.00 points",
        f"  opencv  +5.00 [{low:.2f}, {high:.2f}]",
        "loaders of mine: resnet has 100.00% by pil; 2 loaders spread over 50.00 points",
        "  opencv  its predictions were not kept",
    ]


# ---- label curves


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (1.0, "1"),
        (3.44, "3.4"),
        (9.94, "9.9"),
        (9.99, "10"),
        (10.0, "10"),
        (10.4, "10"),
        (230.6, "231"),
        (BEYOND, "more than all"),
    ],
)
def test_labels_are_counted_in_two_digits(labels, text):
    assert label_curve._needed(LabelsNeeded(labels, None), 1) == text


def test_what_is_needed_is_told_with_its_ends():
    below = LabelsNeeded(BELOW, (BELOW, 2.5))
    assert label_curve._needed(below, 2) == "fewer than 2 [fewer than 2, 2.5]"
    beyond = LabelsNeeded(30.0, (10.0, BEYOND))
    assert label_curve._needed(beyond, 1) == "30 [10, more than all]"


def test_points_are_told_until_one_is_out_of_reach():
    labels = [1, 2, 5, 10, 20.5]
    needs = [
        LabelsNeeded(2.5, (2.0, 4.0)),
        LabelsNeeded(BEYOND, (10.0, BEYOND)),
        LabelsNeeded(BEYOND, (BEYOND, BEYOND)),
        LabelsNeeded(9.0, None),
    ]
    said = label_curve._reached(labels, "a", "b", needs)
    assert said == [
        "with 1 label a class a reaches what b needs 2.5 [2, 4] for",
        "with 2 labels a class a reaches what b does not reach with all 20"
        " (its interval begins at 10)",
        "with 5 labels a class a reaches what b does not reach with all 20",
    ]
    # Without an interval nothing is known of the later points
    few = label_curve._reached(labels, "a", "b", [LabelsNeeded(BEYOND, None), needs[3]])
    assert few == ["with 1 label a class a reaches what b does not reach with all 20"]
    assert label_curve._reached(labels, "a", "b", needs[3:]) == [
        "with 1 label a class a reaches what b needs 9 for"
    ]


def curve_rows(
    run, name, shares, *, draws=1, metric="top1", labels=(1, 5, None), **more
):
    """Points of a checkpoint that is right on such shares of both classes' images."""
    rows = []
    for count, (of_zero, of_one) in zip(labels, shares, strict=True):
        hit = np.concatenate([np.arange(30) < of_zero, np.arange(10) < of_one])
        prediction = np.where(hit, LABEL, LABEL + 5)
        if count is not None:
            prediction = np.stack([prediction] * draws)
        file = predictions.keep(
            run, f"{name}-{count}", manifest="m", label=LABEL, prediction=prediction
        )
        number = 50.0 if count is None else count
        about = {"predictions": file, "labels_per_class": number}
        row = a_result(
            name=name,
            checkpoint=name,
            task="label_curve",
            dataset="mine",
            metric=metric + label_curve.suffix(count),
            provenance=about,
            **more,
        )
        rows.append((row, run))
    return rows


def test_few_draws_are_told_without_an_interval(tmp_path):
    rows = curve_rows(tmp_path, "a", [(9, 3), (27, 9), (30, 10)])
    rows += curve_rows(tmp_path, "b", [(3, 1), (9, 3), (15, 5)])
    assert label_curve.sayings(rows) == [
        "label curve of mine: with 1 label a class a reaches what b needs 5 for",
        "label curve of mine: with 5 labels a class a reaches what b does not reach with all 50",
        # 0.5 is a third of the way from 0.3 to 0.9: 5 ** (1 / 3) = 1.7
        "label curve of mine: b with all its labels, 50 a class, does as well as a with 1.7",
    ]


def test_a_curve_of_class_means_counts_the_rarer_class_as_much(tmp_path):
    # Class means: 0.5, 0.75 and 1; of all images 0.75, 0.875 and 1
    above = [(30, 0), (30, 5), (30, 10)]
    # Class means: 0.25, 0.5 and 0.5
    below = [(15, 0), (30, 0), (30, 0)]
    rows = curve_rows(tmp_path, "a", above, metric="mean_per_class")
    rows += curve_rows(tmp_path, "b", below, metric="mean_per_class")
    assert label_curve.sayings(rows) == [
        "label curve of mine: with 1 label a class a reaches what b needs 5 for",
        "label curve of mine: with 5 labels a class a reaches what b does not reach with all 50",
        "label curve of mine: b with all its labels, 50 a class, does as well as a with 1",
    ]


def test_what_is_no_point_of_a_curve_is_passed_over(tmp_path):
    good = curve_rows(tmp_path, "a", [(9, 3), (27, 9), (30, 10)])
    good += curve_rows(tmp_path, "b", [(3, 1), (9, 3), (15, 5)])
    said = label_curve.sayings(good)
    row, run = good[0]
    odd = [
        (dataclasses.replace(row, metric="top5_labels1"), run),
        (dataclasses.replace(row, provenance={"labels_per_class": 2}), run),
        (
            dataclasses.replace(
                row, provenance={**row.provenance, "labels_per_class": "2"}
            ),
            run,
        ),
    ]
    assert label_curve.sayings([*odd, *good]) == said
    # Other seeds have curves of their own
    seeds = [(dataclasses.replace(one, seed=1), folder) for one, folder in good]
    assert label_curve.sayings([*good, *seeds]) == [*said, *said]
    # Draws of unlike numbers are no curve
    uneven = curve_rows(tmp_path, "c", [(30, 10)], labels=[1], draws=3)
    uneven += curve_rows(tmp_path, "c", [(30, 10)], labels=[5], draws=2)
    uneven += curve_rows(tmp_path, "c", [(30, 10)], labels=[None])
    assert label_curve.sayings([*good, *uneven]) == said
