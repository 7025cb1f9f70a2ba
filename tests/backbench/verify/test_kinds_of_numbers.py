"""Numbers of every kind are computed again from what was kept, and each untruth has its own words."""

import dataclasses
import math

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score
from support.records import a_result, digest_of

from backbench.images.multilabel import IGNORED, PRESENT
from backbench.records import ap_errors, kept_scores, label_tables, predictions
from backbench.runs import seeding
from backbench.stats import confidence, resampling
from backbench.stats.ap_errors import (
    BACKGROUND,
    ERRORS,
    HIT,
    LOCATION,
    NO_CLASS,
    Outcomes,
    costs,
)
from backbench.stats.ap_errors import IGNORED as IN_CROWD
from backbench.verify import verification
from backbench.verify.verification import FROM_KEPT, FROM_LIST, UNBACKED

LABEL = np.array([0, 0, 1, 1, 2])


def listed(run, lines):
    """Write a test list into a run; return its digest."""
    text = "".join(line + "\n" for line in lines)
    (run / "manifests").mkdir(exist_ok=True)
    (run / "manifests" / "mine-test.tsv").write_text(text)
    return digest_of(text)


def row_of(run, manifest="m", stem="x", arrays=None, **changes):
    """A row without an interval, whose predictions are these arrays."""
    file = predictions.keep(run, stem, manifest=manifest, **(arrays or {}))
    about = {"dataset": "mine", "ci95": None, "provenance": {"predictions": file}}
    return a_result(**about | changes)


def verdict(run, row):
    (found,) = verification.of_run([row], run)
    assert bool(found.why) <= (found.level == UNBACKED)
    return found.why or found.level


def with_facts(row, **facts):
    return dataclasses.replace(row, provenance={**row.provenance, **facts})


# ---- label maps


COUNTS = {
    "intersection": np.array([[4, 2], [7, 0], [1, 1]]),
    "predicted": np.array([[5, 5], [9, 1], [8, 2]]),
    "labelled": np.array([[7, 3], [7, 3], [2, 8]]),
}
# Of each metric: the value of all three images, by class: 12 of 26 and 3 of 19 pixels
MAPS = {
    "miou": 100 * (12 / 26 + 3 / 19) / 2,
    "pixel_acc": 100 * 15 / 30,
    "macc": 100 * (12 / 16 + 3 / 14) / 2,
}


@pytest.mark.parametrize("metric", MAPS)
def test_scores_of_label_maps_follow_from_counts_of_pixels(tmp_path, metric):
    value = MAPS[metric]
    row = row_of(
        tmp_path, arrays=COUNTS, task="segmentation", metric=metric, value=value
    )
    arrays = predictions.load(tmp_path / row.provenance["predictions"])
    drawn = arrays[f"bootstrap_{metric}"]
    assert len(drawn) == resampling.COUNT and drawn.std() > 1
    interval = None
    if metric != "macc":
        interval = confidence.of_resamples(value / 100, drawn / 100, 3)
    row = dataclasses.replace(row, ci95=interval)
    assert verdict(tmp_path, row) == FROM_KEPT
    assert verdict(tmp_path, with_facts(row, images={"test": 3})) == FROM_KEPT
    other = with_facts(row, images={"train": 3, "test": 4})
    assert verdict(tmp_path, other) == "its counts are of 3 images, its list has 4"
    assert verdict(tmp_path, dataclasses.replace(row, value=40.0)) == (
        f"it says 40.0, its counts of pixels give {value:.4f}"
    )
    claimed = dataclasses.replace(row, ci95=(10.0, 90.0))
    said = verdict(tmp_path, claimed)
    if interval is None:
        assert said == "its interval is (10.0, 90.0), what was kept gives None"
    else:
        low, high = interval
        shown = f"[{low:.4f}, {high:.4f}]"
        assert said == (
            f"its interval is [10.0000, 90.0000], what was kept gives {shown}"
        )
        bare = verdict(tmp_path, dataclasses.replace(row, ci95=None))
        assert bare.startswith("its interval is None, what was kept gives (")


# ---- retrieval and clusters


def test_scores_of_queries_are_averaged_over_classes_of_several_images(tmp_path):
    manifest = listed(tmp_path, [f"{n}.png\t{label}" for n, label in enumerate(LABEL)])
    queries = np.array([1.0, 0.0, 0.5, 1.0, np.nan])
    about = {"task": "class_retrieval", "metric": "map_r"}
    arrays = {"label": LABEL, "queries_map_r": queries}
    row = row_of(tmp_path, manifest, arrays=arrays, value=62.5, **about)
    assert verdict(tmp_path, row) == FROM_LIST
    assert verdict(tmp_path, dataclasses.replace(row, value=62.4)) == (
        "it says 62.4, its predictions give 62.5000"
    )
    claimed = dataclasses.replace(row, ci95=(60.0, 65.0))
    assert verdict(tmp_path, claimed) == (
        "its interval is (60.0, 65.0), what was kept gives None"
    )
    assert verdict(tmp_path, with_facts(row, images={"test": 6})) == (
        "its predictions are of 5 images, its list has 6"
    )
    # What nobody kept backs nothing
    assert verdict(tmp_path, dataclasses.replace(row, metric="r1")) == UNBACKED
    odd = {
        "elsewhere": (
            LABEL,
            [1.0, 0.0, 0.5, 1.0, 0.0],
            "its queries are not the images whose class has others",
        ),
        "none": (
            np.arange(5),
            [np.nan] * 5,
            "no class has two test images, so there is no query",
        ),
        "above": (
            LABEL,
            [1.0, 0.0, 0.5, 1.01, np.nan],
            "one of its queries' scores is not between 0 and 1",
        ),
        "below": (
            LABEL,
            [1.0, -0.01, 0.5, 1.0, np.nan],
            "one of its queries' scores is not between 0 and 1",
        ),
        "labels": (
            LABEL[::-1].copy(),
            [np.nan, 1.0, 0.0, 0.5, 1.0],
            "the labels beside its predictions are not those of its list of images",
        ),
    }
    for name, (label, scores, why) in odd.items():
        arrays = {"label": label, "queries_map_r": np.array(scores)}
        forged = row_of(tmp_path, manifest, name, arrays=arrays, value=62.5, **about)
        assert verdict(tmp_path, forged) == why


def test_clusters_are_matched_with_classes_again(tmp_path, monkeypatch):
    label = np.array([0, 0, 1, 1, 2, 2])
    cluster = np.array([1, 1, 0, 2, 2, 2])
    arrays = {"label": label, "cluster": cluster}
    # Cluster 1 is class 0 and cluster 2 class 2, so cluster 0 is class 1
    values = {
        "cluster_acc": 100 * 5 / 6,
        "ari": 100 * adjusted_rand_score(label, cluster),
    }
    for metric, value in values.items():
        row = row_of(
            tmp_path, arrays=arrays, task="cluster", metric=metric, value=value
        )
        assert verdict(tmp_path, row) == FROM_KEPT
        wrong = verdict(tmp_path, dataclasses.replace(row, value=value - 0.1))
        assert wrong.endswith(f", its predictions give {value:.4f}")
    assert verdict(tmp_path, dataclasses.replace(row, metric="purity")) == UNBACKED
    monkeypatch.setattr(verification, "_MOST_CLUSTERS", 3)
    assert verdict(tmp_path, row) == FROM_KEPT
    monkeypatch.setattr(verification, "_MOST_CLUSTERS", 2)
    assert verdict(tmp_path, row) == UNBACKED
    monkeypatch.setattr(verification, "_MOST_HITS", 6)
    monkeypatch.setattr(verification, "_MOST_CLUSTERS", 3)
    assert verdict(tmp_path, row) == FROM_KEPT
    monkeypatch.setattr(verification, "_MOST_HITS", 5)
    assert verdict(tmp_path, row) == UNBACKED


# ---- scores of a head


def test_calibration_is_computed_again_from_scores(tmp_path):
    label = np.array([0, 1, 1], dtype=np.uint8)
    manifest = listed(tmp_path, [f"{n}.png\t{one}" for n, one in enumerate(label)])
    # Two classes, each as likely as the other: a loss of log 2 for every image
    half = np.zeros((3, 2))
    arrays = {
        "logits": half,
        "classes": np.array([[0, 1]] * 3, dtype=np.uint8),
        "label": label,
        "label_logit": np.zeros(3),
        "logsumexp": np.full(3, math.log(2)),
        "square": np.full(3, 0.5),
    }
    of = {"checkpoint": "a" * 64, "head": "h", "protocol": "linear-demo-v1"}

    def keep(stem, **changes):
        return kept_scores.keep(
            tmp_path, stem, arrays, manifest=manifest, **of | changes
        )

    value = math.log(2)
    row = a_result(
        task="calibration",
        dataset="mine",
        metric="nll",
        value=value,
        ci95=(value, value),
        provenance={"scores": keep("x"), "head_sha256": "h"},
    )
    assert verdict(tmp_path, row) == FROM_LIST
    # The columns of a rule's logits are not the labels of the list
    assert verdict(tmp_path, with_facts(row, recipe={"rule": "all"})) == FROM_KEPT
    assert verdict(tmp_path, dataclasses.replace(row, value=0.5, ci95=None)) == (
        "it says 0.5, its scores give 0.693147"
    )
    assert verdict(tmp_path, dataclasses.replace(row, ci95=None)).startswith(
        "its interval is None"
    )
    assert verdict(tmp_path, with_facts(row, head_sha256="g")) == (
        "its scores 'scores/x.npz' are another head's"
    )
    theirs = keep("y", checkpoint="b" * 64)
    assert verdict(tmp_path, with_facts(row, scores=theirs)) == (
        "its scores 'scores/y.npz' are another checkpoint's"
    )
    # Nothing that was kept, or no temperature, or no file, backs nothing
    unfitted = dataclasses.replace(row, metric="nll_t")
    without = dataclasses.replace(row, provenance={"head_sha256": "h"})
    gone = with_facts(row, scores="scores/z.npz")
    assert [verdict(tmp_path, one) for one in (unfitted, without, gone)] == [
        UNBACKED
    ] * 3


# ---- images that show several classes


TABLE = np.array([[1, 0], [0, 1], [2, 1], [0, 0]], dtype=np.uint8)
SCORE = np.array([[0.9, 0.1], [0.8, 0.3], [0.7, 0.2], [0.1, 0.25]])


def test_a_score_of_several_labels_follows_from_the_kept_tables(tmp_path):
    lines = ["a\t0", "b\t1", "c\t0?,1", "d\t"]
    manifest = listed(tmp_path, lines)
    arrays = label_tables.kept(SCORE, TABLE, manifest)
    del arrays["manifest"]
    # Class 0: its image is first. Class 1: ranks 1 and 3 of 0.3, 0.25, 0.2, 0.1
    value = 100 * (1 + (1 + 2 / 3) / 2) / 2
    about = {"task": "multilabel", "metric": "map", "value": value}
    row = row_of(tmp_path, manifest, arrays=arrays, **about)
    interval = confidence.of_resamples(value / 100, arrays["bootstrap_map"] / 100, 4)
    row = dataclasses.replace(row, ci95=interval)
    assert verdict(tmp_path, row) == FROM_LIST
    assert verdict(tmp_path, with_facts(row, images={"test": 5})) == (
        "its scores are of 4 images, its list has 5"
    )
    assert verdict(tmp_path, dataclasses.replace(row, value=90.0)) == (
        f"it says 90.0, its scores give {value:.4f}"
    )
    bare = verdict(tmp_path, dataclasses.replace(row, ci95=None))
    assert bare.startswith("its interval is None, what was kept gives ")
    (tmp_path / "manifests" / "mine-test.tsv").unlink()
    assert verdict(tmp_path, row) == FROM_KEPT
    other = listed(tmp_path, ["a\t0", "b\t1", "c\t1", "d\t"])
    forged = row_of(tmp_path, other, "y", arrays=arrays, **about)
    # The resamples depend on the list, so they are of another one
    assert verdict(tmp_path, forged) == "its resamples are not those of its scores"
    drawn = label_tables.kept(SCORE, TABLE, other)
    del drawn["manifest"]
    forged = row_of(tmp_path, other, "z", arrays=drawn, **about)
    interval = confidence.of_resamples(value / 100, drawn["bootstrap_map"] / 100, 4)
    assert verdict(tmp_path, dataclasses.replace(forged, ci95=interval)) == (
        "the classes beside its scores are not those of its list of images"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"score": None}, "its file does not say which classes its images show"),
        ({"table": None}, "its file does not say which classes its images show"),
        (
            {"score": SCORE[:, :1]},
            "its scores and its classes are no two tables of one",
        ),
        ({"score": SCORE[0]}, "its scores and its classes are no two tables of one"),
        ({"table": TABLE.astype(int)}, "its scores and its classes are no two tables"),
        (
            {"score": np.where(SCORE > 0.8, np.nan, SCORE)},
            "its scores are no numbers of",
        ),
        ({"score": SCORE[:0], "table": TABLE[:0]}, "its scores are no numbers of"),
        ({"table": TABLE + np.uint8(1)}, "its classes are not those of its images"),
        ({"images": np.array(5)}, "its classes are not those of its images"),
        ({"bootstrap_map": None}, "its resamples are not those of its scores"),
        ({"score": SCORE[::-1]}, "its resamples are not those of its scores"),
    ],
)
def test_tables_of_a_stranger_are_looked_at_in_turn(change, says):
    arrays = {**label_tables.kept(SCORE, TABLE, "m"), **change}
    arrays = {name: each for name, each in arrays.items() if each is not None}
    found = label_tables.fault(arrays, "map")
    assert found.startswith(says) and bool(found) == bool(says)
    no_metric = label_tables.fault(label_tables.kept(SCORE, TABLE, "m"), "top1")
    assert no_metric == "its file does not say which classes its images show"


def test_scores_on_resamples_are_those_of_lists_written_out():
    arrays = label_tables.kept(SCORE, TABLE, "m")
    counts = resampling.image_counts(seeding.seed_of("images", "m", 4), 4)
    for metric in ("map", "map11"):
        for drawn, count in zip(arrays[f"bootstrap_{metric}"], counts[:40]):
            images = np.repeat(np.arange(4), count)
            again = label_tables.values(arrays["score"][images], TABLE[images])
            assert drawn == pytest.approx(again[metric], nan_ok=True)


def test_as_many_scores_are_read_as_the_bound_says(monkeypatch):
    arrays = label_tables.kept(SCORE, TABLE, "m")
    monkeypatch.setattr(label_tables, "_MOST", 8)
    assert label_tables.fault(arrays, "map") == ""
    monkeypatch.setattr(label_tables, "_MOST", 7)
    assert label_tables.fault(arrays, "map").startswith("its scores are no numbers")
    assert (PRESENT, IGNORED) == (1, 2)


# ---- detectors


def outcomes(**changes):
    """Three images with an object each: a hit, a box beside its object, one on nothing."""
    whole = {
        "images": 3,
        "image": np.array([0, 1, 2]),
        "category": np.array([0, 0, 1]),
        "fault": np.array([HIT, LOCATION, BACKGROUND]),
        "mended": np.array([NO_CLASS, 0, NO_CLASS]),
        "object_image": np.array([0, 1, 2]),
        "object_category": np.array([0, 0, 1]),
        "object_missed": np.array([0, 0, 1]),
    }
    return Outcomes(**whole | changes)


def of_errors(run, found, stem="x", **changes):
    arrays = ap_errors.kept({"bbox": found}, "m")
    del arrays["manifest"]
    about = {"task": "faster_rcnn_errors", "split": "val", "metric": "bbox_location"}
    return row_of(run, arrays=arrays, stem=stem, **about | changes)


def test_costs_of_errors_follow_from_kept_verdicts(tmp_path):
    # Class 0 has one of two objects: its AP50 is 51 of 101 recalls, and all once the box is moved.
    # Class 1 has none, so the mean over both rises by half of the difference
    cost = 100 * (1 - 51 / 101) / 2
    row = of_errors(tmp_path, outcomes(), value=cost)
    assert verdict(tmp_path, row) == FROM_KEPT
    assert verdict(tmp_path, with_facts(row, val="cells:ab:3")) == FROM_KEPT
    assert verdict(tmp_path, with_facts(row, val="cells:ab:4")) == (
        "its detections are of 3 images, its list has 4"
    )
    assert verdict(tmp_path, dataclasses.replace(row, value=1.0)) == (
        f"it says 1.0, its detections give {cost:.4f}"
    )
    assert verdict(tmp_path, dataclasses.replace(row, ci95=(0.0, 90.0))) == (
        "its interval is (0.0, 90.0), what was kept gives None"
    )
    # All that class 1 lacks is its missed object, which is no longer counted
    missed = dataclasses.replace(row, metric="bbox_missed", value=0.0)
    assert verdict(tmp_path, missed) == FROM_KEPT


def test_the_ap50_is_of_the_classes_that_a_draw_has():
    # One of three objects: the recalls up to a third are read off at it
    one = outcomes(category=np.zeros(3, int), object_category=np.zeros(3, int))
    assert ap_errors.ap50(one) == pytest.approx(100 * 34 / 101)
    # Of the first two images alone class 0 has one of two; of the last one, class 1 has none
    draws = np.array([[1, 1, 0], [0, 0, 1], [0, 0, 0]])
    found = costs(outcomes(), draws)["location"]
    assert found == pytest.approx([100 * 50 / 101, 0, np.nan], nan_ok=True)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("bbox_class", True),
        ("segm_missed", True),
        ("keypoints_class", False),
        ("bbox_AP50", False),
        ("class", False),
    ],
)
def test_costs_are_of_boxes_and_masks(metric, expected):
    assert ap_errors.is_cost(metric) == expected


def test_errors_are_counted_by_their_kind():
    found = outcomes(
        images=4,
        image=np.array([0, 1, 2, 2, 3]),
        category=np.zeros(5, int),
        fault=np.array([HIT, LOCATION, BACKGROUND, LOCATION, HIT]),
        mended=np.array([-1, 0, -1, -1, -1]),
        object_missed=np.array([1, 0, 1]),
    )
    arrays = ap_errors.kept({"bbox": found, "segm": outcomes()}, "m")
    counted = {
        metric: ap_errors.count(arrays, metric)
        for metric in ("bbox_location", "bbox_missed", "bbox_class", "segm_location")
    }
    assert counted == {
        "bbox_location": 2,
        "bbox_missed": 2,
        "bbox_class": 0,
        "segm_location": 1,
    }
    assert ap_errors.file_stem("bbox-s0") == "errors-bbox-s0"


OUTSIDE = "its file names images that are not among its 3"
UNKNOWN = "its file names classes or errors that there are not"
UNSAID = "its file does not say what became of each bbox"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fault": np.array([HIT, LOCATION])}, UNSAID),
        ({"fault": np.array([0.0, 2.0, 5.0])}, UNSAID),
        ({"object_missed": np.array([[0, 0, 1]])}, UNSAID),
        ({"image": np.array([0, 1, 3])}, OUTSIDE),
        ({"image": np.array([-1, 1, 2])}, OUTSIDE),
        ({"object_image": np.array([0, 1, 3])}, OUTSIDE),
        ({"category": np.array([0, -1, 1])}, UNKNOWN),
        ({"object_category": np.array([0, -1, 1])}, UNKNOWN),
        ({"mended": np.array([-2, 0, -1])}, UNKNOWN),
        ({"fault": np.array([-1, LOCATION, BACKGROUND])}, UNKNOWN),
        ({"fault": np.array([HIT, LOCATION, 7])}, UNKNOWN),
        ({"fault": np.array([HIT, LOCATION, IN_CROWD])}, ""),
        ({"object_missed": np.array([0, 0, 2])}, UNKNOWN),
        ({"object_missed": np.array([0, -1, 1])}, UNKNOWN),
        (
            {
                "object_image": np.array([0]),
                "object_category": np.array([0]),
                "object_missed": np.array([0]),
                "fault": np.array([HIT, HIT, BACKGROUND]),
            },
            "its file has more hits than objects",
        ),
        (
            {
                "object_image": np.zeros(0, int),
                "object_category": np.zeros(0, int),
                "object_missed": np.zeros(0, int),
            },
            "its file has no object",
        ),
    ],
)
def test_outcomes_that_no_detections_give_are_named(change, says):
    arrays = ap_errors.kept({"bbox": outcomes()}, "m")
    arrays |= {f"bbox_{name}": array for name, array in change.items()}
    assert ap_errors.fault(arrays, "bbox_location") == says
    no_cost = "'bbox_AP' is no error of a detection"
    assert ap_errors.fault(arrays, "bbox_AP") == no_cost


def test_costs_on_resamples_are_of_the_draws_of_the_list_file_after_file():
    """All that was scored on a list of images is drawn alike."""
    seed = seeding.seed_of("images", "m", 3)
    counts = resampling.image_counts(seed, 3)
    kept = []
    for found in (outcomes(), outcomes(fault=np.array([BACKGROUND, HIT, HIT]))):
        arrays = ap_errors.kept({"bbox": found}, "m")
        drawn = costs(found, counts)
        for error in ERRORS:
            np.testing.assert_array_equal(
                arrays[f"bootstrap_bbox_{error}"], drawn[error]
            )
        kept.append(arrays)
    for arrays in (*kept, kept[0]):
        assert ap_errors.fault(arrays, "bbox_background") == ""
    other = "bootstrap_bbox_background"
    forged = {**kept[1], other: kept[0][other]}
    assert ap_errors.fault(forged, "bbox_background").startswith(
        "its resamples are not"
    )


def test_a_detector_may_find_nothing_and_a_draw_may_have_no_object():
    none = np.zeros(0, int)
    silent = outcomes(image=none, category=none, fault=none, mended=none)
    one = {name: np.array([0]) for name in ("image", "category", "missed")}
    alone = outcomes(**{f"object_{name}": array for name, array in one.items()})
    for found in (silent, alone):
        arrays = ap_errors.kept({"bbox": found}, "m")
        assert ap_errors.fault(arrays, "bbox_missed") == ""
    assert np.isnan(arrays["bootstrap_bbox_missed"]).any(), (
        "draws without the first image"
    )


def test_classes_and_images_of_outcomes_have_bounds(monkeypatch):
    arrays = ap_errors.kept({"bbox": outcomes()}, "m")
    too_many = "its file has more classes or images than any list of boxes"
    for name, enough in (("_MOST_CLASSES", 2), ("_MOST_IMAGES", 3)):
        monkeypatch.setattr(ap_errors, name, enough)
        assert ap_errors.fault(arrays, "bbox_class") == ""
        monkeypatch.setattr(ap_errors, name, enough - 1)
        assert ap_errors.fault(arrays, "bbox_class") == too_many
        monkeypatch.setattr(ap_errors, name, enough)


def test_an_ap_lies_near_the_mean_of_its_resamples(tmp_path):
    """Of 36 images: at most 0.75 of their spread below the AP, and 2.25 above."""
    drawn = 40.0 + np.tile([1.0, -1.0], resampling.AP_COUNT // 2)
    about = {"task": "faster_rcnn", "metric": "bbox_AP", "split": "val"}

    def of_value(value, stem="x", **arrays):
        whole = {"bootstrap_bbox_AP": drawn, "images": 36, **arrays}
        whole = {name: array for name, array in whole.items() if array is not None}
        row = row_of(tmp_path, stem=stem, arrays=whole, value=value, **about)
        if value is None:
            return row
        interval = confidence.of_resamples(value / 100, drawn / 100, 36)
        return dataclasses.replace(row, ci95=interval)

    for value, fits in ((40.74, True), (40.76, False), (37.76, True), (37.74, False)):
        said = verdict(tmp_path, of_value(value))
        why = f"it says {value:.4f}, its resamples have a mean of 40.0000"
        assert said == (FROM_KEPT if fits else why)
    row = of_value(40.0)
    assert verdict(tmp_path, with_facts(row, val="cells:ab:36")) == FROM_KEPT
    assert verdict(tmp_path, with_facts(row, val="cells:ab:40")) == (
        "its resamples are of 36 images, its list has 40"
    )
    assert verdict(tmp_path, with_facts(row, val="a file")) == FROM_KEPT
    few = of_value(40.0, "few", bootstrap_bbox_AP=drawn[:-1])
    assert verdict(tmp_path, few) == "it has 499 resamples of 500"
    assert verdict(tmp_path, of_value(None)) == UNBACKED
    assert verdict(tmp_path, of_value(40.0, "bare", images=None)) == UNBACKED
    undefined = of_value(40.0, "nan", bootstrap_bbox_AP=drawn * np.nan)
    assert verdict(tmp_path, undefined) == UNBACKED
    claimed = dataclasses.replace(row, ci95=(30.0, 50.0))
    assert verdict(tmp_path, claimed).startswith("its interval is [30.0000, 50.0000]")


# ---- shares of right images


def test_kept_draws_are_as_many_as_planned_with_the_values_that_are_said(tmp_path):
    label = np.array([0, 0, 1, 1])
    prediction = np.array([[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 1, 0]])
    values = [100.0, 50.0, 75.0]
    arrays = {"label": label, "prediction": prediction, "values": np.array(values)}
    row = row_of(
        tmp_path,
        arrays=arrays,
        task="fewshot",
        value=75.0,
        ci95=confidence.of_draws(prediction == label),
    )
    assert verdict(tmp_path, row) == FROM_KEPT
    told = with_facts(row, draws=values, recipe={"draws": 3}, images={"test": 4})
    assert verdict(tmp_path, told) == FROM_KEPT
    assert verdict(tmp_path, with_facts(row, recipe={"draws": 4})) == (
        "its predictions are of 3 draws, its recipe has 4"
    )
    assert verdict(tmp_path, with_facts(row, images={"test": 5})) == (
        "its predictions are of 4 images, its list has 5"
    )
    for draws in ([100.0, 50.0], [100.0, 75.0, 50.0]):
        assert verdict(tmp_path, with_facts(row, draws=draws)) == (
            f"its {len(draws)} draws are not the 3 of its predictions"
        )


def test_a_list_may_lie_in_the_run_or_in_a_corpus_above_it(tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "_lists", {})
    run = tmp_path / "lab" / "run"
    row = a_result(dataset="a/b", provenance={})
    assert verification.list_files(row, run) == (run / "manifests" / "a%2Fb-test.tsv",)
    named = with_facts(row, manifests={"test": "c" * 64})
    files = verification.list_files(named, run)
    name = f"{'c' * 64}.tsv.gz"
    folders = [run, tmp_path / "lab", tmp_path]
    assert list(files[1:4]) == [folder / "lists" / name for folder in folders]
    assert len(files) <= 9
    # A name that is no digest could lead anywhere
    odd = with_facts(row, manifests={"test": "../x"})
    assert len(verification.list_files(odd, run)) == 1
    run.mkdir(parents=True)
    digest = listed(run, ["a\t3", "b\t0"])
    paths = [tmp_path / "none", run / "manifests" / "mine-test.tsv"]
    assert verification.list_content(digest, paths) == b"a\t3\nb\t0\n"
    assert verification.list_content("d" * 64, paths) is None
    assert verification._labels(digest, paths).tolist() == [3, 0]
    # Once read, it need not lie there
    assert verification._labels(digest, []).tolist() == [3, 0]
    monkeypatch.setattr(verification, "_LONGEST_KEPT_LIST", 1)
    monkeypatch.setattr(verification, "_lists", {})
    assert verification._labels(digest, paths).tolist() == [3, 0]
    assert verification._labels(digest, []) is None


def test_five_best_alone_back_a_top5(tmp_path):
    """A file may say which images are right by their five best, and not by which class."""
    five_best = np.array([1, 1, 0, 1], dtype=bool)
    row = row_of(
        tmp_path,
        arrays={"hits5": five_best},
        task="linear",
        metric="top5",
        value=75.0,
        ci95=confidence.of_hits(five_best),
    )
    assert verdict(tmp_path, row) == FROM_KEPT
    assert "75" in verdict(tmp_path, dataclasses.replace(row, value=50.0))
