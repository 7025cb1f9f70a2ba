"""Label curves: nested draws, the few-label probe's own points, and what the rows say together."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from support.records import a_result, rows_of

from backbench.cli.program import main
from backbench.images.image_list import ImageList
from backbench.records import label_curve, predictions
from backbench.stats import confidence
from backbench.transfer.probes import fewshot
from backbench.transfer.probes import label_curve as probe_label_curve
from backbench.transfer.probes.label_curve import LabelCurve
from backbench.verify import verification

SMALL = {"resize": 32, "crop": 32}


def command(root, trunks, out, recipe):
    line = ["linear", *map(str, trunks), "--datasets", "classes", "--data", str(root)]
    line += ["--workers", "0"]
    return [*line, "--out", str(out), "--protocol", str(recipe), "--accelerator", "cpu"]


def recipe_file(folder, kind, **keys):
    file = folder / f"{kind}.yaml"
    recipe = {"kind": kind, "protocol": f"{kind}-x-v1", "geometry": SMALL, **keys}
    file.write_text(json.dumps(recipe))
    return file


def test_draws_are_nested_and_those_of_the_few_label_probe():
    paths = tuple(f"{c}/{i}.png" for c in range(3) for i in range(12))
    labels = tuple(c for c in range(3) for _ in range(12))
    images = ImageList(Path("/d"), paths, labels, ("0", "1", "2"))
    p = LabelCurve(kind="label_curve", protocol="x", labels=(1, 2, 5), draws=4)
    drawn = probe_label_curve.nested_draws(images, p, 7)
    for few, more in ((1, 2), (2, 5)):
        assert drawn[few] == fewshot.draws(images, shots=few, count=4, seed=7)
        for one, other in zip(drawn[few], drawn[more]):
            assert set(one) < set(other)
    assert len({tuple(one) for one in drawn[5]}) == 4
    assert drawn[label_curve.ALL] == [list(range(36))]


@pytest.fixture
def noisy(trees):
    """Pictures of two classes that no trunk tells apart for sure."""
    root = trees("classes", sizes=(("train", 7), ("val", 3), ("test", 10)))
    rng = np.random.default_rng(0)
    for file in sorted(root.rglob("*.png")):
        with Image.open(file) as picture:
            size = picture.size[::-1]
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
    return root


def test_points_are_rows_that_verify_and_repeat_the_few_label_probe(
    noisy, two_trunks, tmp_path, capsys
):
    keys = {"labels": [1, 2, 5], "draws": 4}
    curve = recipe_file(tmp_path, "label_curve", **keys)
    few = recipe_file(tmp_path, "fewshot", shots=2, draws=4)
    out = tmp_path / "run"
    assert main(command(noisy, two_trunks, out, curve)) == 0
    said = capsys.readouterr().out
    assert "label curve of classes: with 1 label a class" in said
    assert main(command(noisy, two_trunks, out, curve)) == 0
    rows = rows_of(out)
    points = ["1", "2", "5", "_all"]
    metrics = [f"top1_labels{point}" for point in points]
    assert [r.metric for r in rows] == metrics * 2
    assert {r.provenance["labels_per_class"] for r in rows} == {1, 2, 5, 10}
    assert all(r.ci95[0] <= r.value <= r.ci95[1] for r in rows)
    verdicts = verification.of_run(rows, out)
    assert {v.level for v in verdicts} == {verification.FROM_LIST}
    # The point of two labels is what the few-label probe measures
    assert main(command(noisy, two_trunks, tmp_path / "few", few)) == 0
    of_two = [r for r in rows if r.metric == "top1_labels2"]
    for row, other in zip(of_two, rows_of(tmp_path / "few")):
        assert row.checkpoint == other.checkpoint
        assert row.provenance["draws"] == other.provenance["draws"]
        assert (row.value, row.ci95) == (other.value, other.ci95)
    assert len({r.value for r in rows}) > 2, "the pictures are hard"


def test_points_that_a_class_has_not_are_refused_by_linear_and_left_out_by_evaluate(
    noisy, trunk, tmp_path, bad_input, monkeypatch
):
    file = recipe_file(tmp_path, "label_curve")
    said = "labels = 500 of each class, and 'circle' has 10 images; write --protocol"
    status = main(command(noisy, [trunk], tmp_path / "run", file))
    bad_input(status, said, "label_curve labels=1,2,5,10\n")
    file = recipe_file(tmp_path, "label_curve", labels=[5, 2])
    status = main(command(noisy, [trunk], tmp_path / "run", file))
    bad_input(status, "labels must grow from point to point, not (5, 2)")
    assert not (tmp_path / "run").exists()
    monkeypatch.chdir(tmp_path)
    line = ["evaluate", str(trunk), "label_curve", "--data", str(noisy / "classes")]
    assert main([*line, "--size", "32", "--workers", "0", "--out", "out"]) == 0
    # Ten labels are all that there are
    points = ["1", "2", "5", "_all"]
    assert [r.metric for r in rows_of(tmp_path / "out")] == [
        f"top1_labels{point}" for point in points
    ]


@pytest.mark.parametrize("metric", ["top1", "mean_per_class"])
def test_a_points_interval_is_of_its_datasets_metric(monkeypatch, metric):
    written = {}
    monkeypatch.setattr(
        probe_label_curve.keeping,
        "write_plain",
        lambda *given, **more: written.update(more, values=given[2]),
    )
    label = np.repeat([0, 1], [30, 10])
    predicted = np.tile(label, (4, 1))
    predicted[:, 35:] = 0  # half of the rarer class is wrong
    predicted[0, :3] = 1
    test = SimpleNamespace(classes=("a", "b"), labels=label.tolist())
    task = SimpleNamespace(
        dataset=SimpleNamespace(metric=metric),
        splits=SimpleNamespace(train=range(8), val=range(2), test=test),
    )
    probe_label_curve.write_point(task, None, 5, predicted, None)
    by_class = label if metric == "mean_per_class" else None
    assert written["ci95"] == confidence.of_draws(predicted == label, by_class)
    value, about = written["values"][metric]
    assert written["ci95"][0] < value < written["ci95"][1]
    assert (about["labels_per_class"], written["suffix"]) == (5, "_labels5")


def rows_of_curves(folder, accuracies, draws=6, images=400):
    """Rows of checkpoints by name, each with a curve of such shares of right images."""
    rows = []
    label = np.arange(images) % 4
    for name, curve in accuracies.items():
        for labels, share in curve.items():
            number = 50.0 if labels is label_curve.ALL else labels
            right = np.arange(images) < round(share * images)
            prediction = np.where(right, label, label + 1)
            if labels is not label_curve.ALL:
                prediction = np.stack([prediction] * draws)
            kept = predictions.keep(
                folder,
                f"{name}-{labels}",
                manifest="m",
                label=label,
                prediction=prediction,
            )
            provenance = {"predictions": kept, "labels_per_class": number}
            row = a_result(
                name=name,
                checkpoint=name * 8,
                task="label_curve",
                dataset="mine",
                metric="top1" + label_curve.suffix(labels),
                provenance=provenance,
            )
            rows.append((row, folder))
    return rows


def test_two_curves_are_told_in_words(tmp_path):
    rows = rows_of_curves(
        tmp_path,
        {"b": {1: 0.2, 5: 0.4, None: 0.6}, "a": {1: 0.4, 5: 0.9, None: 0.95}},
    )
    one, five, saved = label_curve.sayings(rows)
    assert one.startswith(
        "label curve of mine: with 1 label a class a reaches what b needs 5 ["
    )
    assert one.endswith("] for")
    assert five.endswith(
        "with 5 labels a class a reaches what b does not reach with all 50"
    )
    # 0.6 is two fifths of the way from 0.4 to 0.9: 5 ** 0.4 = 1.9
    assert "b with all its labels, 50 a class, does as well as a with 1.9 [" in saved


def test_curves_of_two_protocols_are_told_apart(tmp_path):
    """One of them alone has fewer points; the other's are none of its own."""
    curves = {"b": {1: 0.2, 5: 0.4, None: 0.6}, "a": {1: 0.4, 5: 0.9, None: 0.95}}
    for name in ("usual", "changed"):
        (tmp_path / name).mkdir()
    rows = rows_of_curves(tmp_path / "usual", curves)
    more = {"b": {2: 0.9, None: 0.95}, "a": {2: 0.2, None: 0.4}}
    others = []
    for row, folder in rows_of_curves(tmp_path / "changed", more):
        others.append((replace(row, protocol="label-curve-mine"), folder))
    alone = [*label_curve.sayings(rows), *label_curve.sayings(others)]
    assert label_curve.sayings([*rows, *others]) == alone


def test_of_three_curves_the_best_is_compared_with_each(tmp_path):
    curves = {"a": {1: 0.4, None: 0.8}, "b": {1: 0.3, None: 0.6}}
    curves["c"] = {1: 0.2, None: 0.3}
    lines = label_curve.sayings(rows_of_curves(tmp_path, curves))
    assert len(lines) == 2
    assert "b with all its labels" in lines[0] and "as a with 7.1 [" in lines[0]
    assert "c with all its labels" in lines[1]
    assert "as a with fewer than 1 [fewer than 1, " in lines[1]


def test_a_curve_whose_points_were_scored_on_other_lists_says_nothing(tmp_path):
    curves = {"a": {1: 0.4, 5: 0.7, None: 0.9}, "b": {1: 0.2, 5: 0.4, None: 0.6}}
    rows = rows_of_curves(tmp_path, curves)
    last, folder = rows[2]  # of the better curve
    file = folder / last.provenance["predictions"]
    np.savez(file, **{**np.load(file), "manifest": "another"})
    assert label_curve.sayings(rows) == []


def test_curves_of_other_points_or_one_curve_alone_say_nothing(tmp_path):
    alone = rows_of_curves(tmp_path, {"a": {1: 0.4, None: 0.8}})
    assert label_curve.sayings(alone) == []
    other = rows_of_curves(tmp_path, {"b": {2: 0.3, None: 0.6}})
    assert label_curve.sayings(alone + other) == []
    assert label_curve.sayings([]) == []
