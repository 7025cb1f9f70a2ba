"""What the page draws of single readings: label curves, layers, the errors of detectors."""

import dataclasses
import json

import numpy as np
import pytest
from support import boards
from support.records import a_result, digest_of, held
from support.tab import CHROMIUM, tab

from backbench.board import overall, page_readings
from backbench.board.board import Cell, Measurement, fill
from backbench.records import ap_errors, predictions
from backbench.stats import paired_differences
from backbench.stats.ap_errors import BACKGROUND, ERRORS, HIT, LOCATION, Outcomes

LABEL = np.arange(200) % 4
SCORES = {
    "block 2 cls": 55.0,
    "block 10 cls": 60.0,
    "block 2 mean": 65.0,
    "block 10 mean": 62.0,
    "cls@4": 58.0,  # no layer, no pooling: not drawn
    "usual": 59.0,
}


def kept(run, stem, share):
    """Keep predictions of which so many are right; returns their file."""
    right = np.arange(200) < round(200 * share)
    prediction = np.where(right, LABEL, LABEL + 1)
    return predictions.keep(run, stem, manifest="m", label=LABEL, prediction=prediction)


def layer_rows(run, name="vit", share=0.7):
    about = {"l2": 1, "on": "val", "usual_reading": "usual"}
    rows = []
    for metric, of in (("top1", share), ("top1_usual", share - 0.1)):
        chosen = dict(about)
        if metric == "top1":
            chosen |= {"reading": "block 2 mean", "scores": SCORES}
        row = a_result(
            checkpoint=digest_of(name),
            name=name,
            task="layers",
            dataset="mine",
            metric=metric,
            value=100 * of,
            protocol="layers-own-v1",
            chosen=chosen,
            provenance={
                **held("layers", "mine", "layers-own-v1"),
                "predictions": kept(run, f"{name}-{metric}", of),
            },
        )
        rows.append(Measurement(row, run))
    return rows


def error_rows(run, name, ap50, misplaced):
    """A detector's AP50 on twenty images, of which `misplaced` have a box beside its object."""
    fault = np.full(20, HIT)
    fault[:misplaced] = LOCATION
    fault[-2:] = BACKGROUND
    outcomes = Outcomes(
        images=20,
        image=np.arange(20),
        category=np.zeros(20, np.int64),
        fault=fault,
        mended=np.where(fault == LOCATION, 0, -1),
        object_image=np.arange(20),
        object_category=np.zeros(20, np.int64),
        object_missed=np.zeros(20, np.int64),
    )
    arrays = ap_errors.kept({"bbox": outcomes}, "m")
    file = predictions.keep(run, f"{name}-errors", **arrays)
    where = {
        "checkpoint": digest_of(name),
        "name": name,
        "dataset": "cells",
        "split": "val",
        "protocol": "detection-x",
        "engine": "torchvision",
        "ci95": None,
    }
    ap = a_result(
        task="faster_rcnn", metric="bbox_AP50", value=ap50, provenance={}, **where
    )
    rows = [Measurement(ap, run)]
    for error in ERRORS:
        metric = ap_errors.metric_name("bbox", error)
        row = a_result(
            task="faster_rcnn_errors",
            metric=metric,
            value=ap_errors.value(arrays, metric),
            provenance={"predictions": file},
            **where,
        )
        rows.append(Measurement(row, run))
    return rows


def curve_rows(run, name, values):
    rows = []
    for labels, value in values.items():
        row = a_result(
            checkpoint=digest_of(name),
            name=name,
            task="label_curve",
            dataset="mine",
            metric=f"top1_labels{labels}",
            value=value,
            protocol="label-curve-own-v1",
            provenance={
                **held("label_curve", "mine", "label-curve-own-v1"),
                "labels_per_class": 40 if labels == "_all" else labels,
            },
        )
        rows.append(Measurement(row, run))
    return rows


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    run = tmp_path_factory.mktemp("readings")
    rows = layer_rows(run)
    rows += error_rows(run, "good", 80.0, misplaced=2)
    rows += error_rows(run, "poor", 60.0, misplaced=12)
    rows += curve_rows(run, "vit", {1: 30.0, 10: 50.0, "_all": 60.0})
    rows += curve_rows(run, "rn", {10: 20.0, "_all": 25.0})
    rows += curve_rows(run, "one point", {10: 20.0})
    return fill(rows)


def test_a_grid_is_what_the_row_says_and_its_gain_is_paired(board):
    (one,) = page_readings.layers_of(board)
    assert board.rows[one.row].name == "vit"
    assert board.columns[one.column].metric == "top1"
    assert one.layers == ["block 2", "block 10"]
    assert one.scores == {"cls": [55.0, 60.0], "mean": [65.0, 62.0]}
    assert (one.chosen, one.chosen_score) == ("block 2 mean", 65.0)
    assert (one.usual, one.usual_score) == ("usual", 59.0)
    moved = np.repeat([0.0, 1.0, 0.0], [120, 20, 60])
    expected = paired_differences.of_images(moved)
    assert one.gain == pytest.approx(10)
    assert (one.low, one.high) == pytest.approx(expected.ci95, abs=1e-3)


def test_a_grid_without_its_usual_reading_has_no_gain(tmp_path):
    best, _ = layer_rows(tmp_path)
    (one,) = page_readings.layers_of(fill([best]))
    assert one.value == 70 and one.usual_value is None and one.gain is None
    # What stands in somebody else's row may be anything
    for scores in ({}, {"block x mean": 1.0}, {"block 2 mean": "high"}):
        chosen = {**best.result.chosen, "scores": scores}
        row = dataclasses.replace(best.result, chosen=chosen)
        assert page_readings.layers_of(fill([Measurement(row, tmp_path)])) == []


def test_costs_stand_beside_the_ap50_that_they_explain(board):
    (one,) = page_readings.errors_of(board)
    assert board.columns[one.ap].metric == "bbox_AP50"
    assert list(one.costs) == list(ERRORS)
    for error, column in one.costs.items():
        assert board.columns[column].metric == f"bbox_{error}"


def test_a_curve_has_its_points_by_their_labels(board):
    found = page_readings.label_curves_of(board)
    rn, vit = sorted(found, key=lambda curve: len(curve.labels))
    assert (board.rows[vit.row].name, vit.labels) == ("vit", [1, 10, 40])
    assert (board.rows[rn.row].name, rn.labels) == ("rn", [10, 40])
    metrics = [board.columns[k].metric for k in vit.columns]
    assert metrics == ["top1_labels1", "top1_labels10", "top1_labels_all"]


def test_curves_alone_are_compared_by_what_they_save(tmp_path):
    """The answer said that nothing could be compared, below two curves of the same points."""
    rows = []
    for name, shares in (("good", (0.5, 0.8)), ("poor", (0.3, 0.6))):
        values = {1: 100 * shares[0], "_all": 100 * shares[1]}
        points = curve_rows(tmp_path, name, values)
        for (row, _), share in zip(points, shares, strict=True):
            row.provenance["predictions"] = kept(
                tmp_path, f"{name}-{row.metric}", share
            )
        rows += points
    said = overall.sentences(fill(rows), [])
    assert said[0].startswith("Label curve of mine: with 1 label a class good reaches")
    alone = [one for one in rows if one.result.name == "good"]
    assert "nothing to compare it with" in overall.sentences(fill(alone), [])[0]


def test_each_reading_stands_beside_its_own_run_and_seed(tmp_path):
    """Two runs and two seeds; one of the usual readings has no partner."""
    rows = []
    for seed, folder in ((0, "one"), (1, "two")):
        run = tmp_path / folder
        best, usual = layer_rows(run)
        for one in (best, usual):
            rows.append(Measurement(dataclasses.replace(one.result, seed=seed), run))
    (best, usual), (_, of_other) = rows[:2], rows[2:]
    beside = page_readings._beside
    both = Cell(60.0, parts=[of_other, usual])
    assert beside(best, both) is usual
    assert beside(best, Cell(60.0, parts=[of_other])) is None
    elsewhere = Measurement(usual.result, tmp_path / "two")
    assert beside(best, Cell(60.0, parts=[elsewhere])) is None
    assert beside(best, None) is None


def test_only_readings_with_a_value_and_a_number_of_labels_are_drawn(tmp_path):
    rows = curve_rows(tmp_path, "vit", {1: 30.0, 10: None, "_all": 60.0})
    rows += curve_rows(tmp_path, "rn", {1: 20.0, 10: 25.0})
    for row, _ in rows:
        if row.name == "rn":
            row.provenance["labels_per_class"] = 0 if row.value == 20 else 10
    (one,) = page_readings.label_curves_of(fill(rows))
    assert one.labels == [1, 40]
    good = error_rows(tmp_path, "good", 80.0, misplaced=2)
    # Without the AP50 that they explain, costs stand alone; undefined ones do not stand
    kinds = [one.result.metric.removeprefix("bbox_") for one in good[1:]]
    undefined = dataclasses.replace(good[2].result, value=None)
    board = fill([*good[3:], Measurement(undefined, tmp_path)])
    (one,) = page_readings.errors_of(board)
    assert one.ap is None
    assert list(one.costs) == [kind for kind in ERRORS if kind in kinds[2:]]


# ---- in a browser


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with tab() as opened:
        yield opened


def count(browser, which):
    return browser.see(f"document.querySelectorAll({json.dumps(which)}).length")


@pytest.mark.parametrize("width", [1280, 390])
def test_readings_are_drawn(browser, board, tmp_path, width):
    boards.write_whole_page(board, tmp_path / "l.html")
    browser.open(tmp_path / "l.html", width)
    browser.see("paintAll()")
    assert browser.see("document.documentElement.scrollWidth") == width
    # 1. Two poolings of two layers, the usual reading as a line, and a ring around the best
    assert count(browser, "#layers-list path.line") == 2
    assert count(browser, "#layers-list g.s circle") == 4
    rings = "[...document.querySelectorAll('#layers-list svg > circle')]"
    highest = "[...document.querySelectorAll('#layers-list g.s circle')]"
    ys = "Math.min(...{}.map(c => +c.getAttribute('cy')))"
    ring = browser.see(f"{rings}.map(c => +c.getAttribute('cy'))")
    assert ring == [browser.see(ys.format(highest))]
    words = browser.see("document.querySelector('#layers-list figcaption').innerText")
    assert words.startswith("vit: block 2 mean was chosen; 70.00 top-1 on the test")
    assert "+10.00 (5." in words and words.endswith("against its usual reading")
    legend = browser.see("document.getElementById('layers-legend').innerText")
    assert [name.strip() for name in legend.split("\n")] == [
        "cls",
        "mean",
        "the usual reading",
        "chosen",
    ]
    # 2. A bar for each kind of error of each detector, as high as its cost
    heights = browser.see(
        "[...document.querySelectorAll('#errors-chart g.s')].map("
        "g => [...g.querySelectorAll('rect')].map(r => +r.getAttribute('height')))"
    )
    costs = browser.see(
        "['good', 'poor'].map(name => Object.values(DATA.errors[0].costs)"
        ".map(k => valueAt(k, rows.find(row => row.label === name).index)))"
    )
    assert [len(bars) for bars in heights] == [6, 6]
    location = list(ERRORS).index("location")
    most = costs[1][location]
    assert most > costs[0][location] > 0
    ratio = heights[0][location] / heights[1][location]
    assert ratio == pytest.approx(costs[0][location] / most, rel=1e-3)
    table = browser.see("document.getElementById('errors-table').innerText")
    assert "its difference from good's, with the 95% interval" in table
    # 3. A name of the legend switches its bars off
    browser.click("#errors-chart .legend button")
    assert count(browser, "#errors-chart rect") == 6
    # 4. Curves of labels
    assert count(browser, "#labels-chart path.line") == 2
    assert count(browser, "#labels-chart circle") == 5


def test_nothing_is_drawn_where_nothing_was_measured(browser, page):
    browser.open(page, 1280)
    for name in ("labels", "layers", "errors"):
        assert browser.see(f"document.getElementById('{name}').hidden")
        assert count(browser, f'#nav a[href="#{name}"]') == 0
