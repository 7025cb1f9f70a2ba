"""Which numbers `rescore` takes, why it leaves one out, and the lines that it prints."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.records import a_result

from backbench.board.board import Measurement
from backbench.cli import rescore
from backbench.errors import BadInput
from backbench.records import predictions
from backbench.requests.runs import RescoreRequest


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, True),
        ({"task": "knn", "metric": "top5_k20"}, True),
        ({"metric": "mean_per_class"}, True),
        ({"metric": "nll"}, False),
        ({"split": "val"}, False),
        ({"task": "calibration"}, False),
        ({"task": "clean_test"}, False),
        ({"task": "faster_rcnn", "split": "val", "metric": "bbox_AP"}, False),
    ],
)
def test_a_share_of_test_images_can_be_counted_again(changes, counts):
    row = a_result(provenance={}, **changes)
    assert rescore._counts_hits(row) == counts


def of(*datasets):
    return [
        Measurement(a_result(dataset=name, provenance={}), Path("r"))
        for name in datasets
    ]


def request(dataset=None):
    return RescoreRequest(
        runs=(Path("runs/a"), Path("runs/b")), list=Path("x"), dataset=dataset
    )


def test_a_list_names_the_images_of_one_dataset():
    measured = of("pets", "dtd", "pets")
    chosen = rescore._of_dataset(measured, request("pets"))
    assert chosen == [measured[0], measured[2]]
    assert rescore._of_dataset(of("dtd", "dtd"), request()) == of("dtd", "dtd")
    assert rescore._of_dataset([], request("pets")) == []
    with pytest.raises(BadInput) as refused:
        rescore._of_dataset(measured, request())
    assert str(refused.value) == (
        "runs/a runs/b: numbers of dtd, pets; say whose images the list names, by --dataset"
    )
    with pytest.raises(BadInput) as refused:
        rescore._of_dataset(measured, request("cars"))
    assert str(refused.value) == "--dataset cars: the runs have numbers of dtd, pets"


def test_a_number_without_what_it_needs_is_left_out_and_others_are_looked_at(
    tmp_path, caplog
):
    hits = {"prediction": np.array([0, 1]), "label": np.array([0, 1])}
    kept = predictions.keep(tmp_path, "kept", manifest="m", **hits)
    boxes = predictions.keep(tmp_path, "boxes", manifest="m", label=hits["label"])
    rows = []
    for name, told in (
        ("none", {}),
        ("gone", {"predictions": "predictions/gone.npz"}),
        ("boxes", {"predictions": boxes}),
        ("kept", {"predictions": kept}),
    ):
        rows.append(a_result(name=name, provenance=told))
    measured = [Measurement(row, tmp_path) for row in rows]
    assert rescore.rescore(SimpleNamespace(), measured) == []
    where = f"{rows[0].column}: left out:"
    lost = "its predictions were not kept; measure it again"
    without = "the list of its test images is not in its run; measure it again"
    assert caplog.messages == [
        f"{tmp_path}: none, {where} {lost}",
        f"{tmp_path}: gone, {where} {lost}",
        f"{tmp_path}: boxes, {where} {lost}",
        f"{tmp_path}: kept, {where} {without}",
    ]


def test_a_list_is_told_once_and_each_number_in_a_line(capsys):
    first = {"digest": 64 * "1", "of": 9, "copies": 3, "wrong": 2, "relabelled": 1}
    second = {**first, "digest": 64 * "2", "of": 8, "copies": 0}
    about = {"task": "clean_test", "dataset": "a dataset"}
    rows = [
        a_result(
            metric="clean_top1_11111111",
            value=81.256,
            ci95=(80.0, 82.504),
            provenance={"left_out": first},
            **about,
        ),
        a_result(
            metric="change_top1_11111111",
            value=0.75,
            ci95=None,
            provenance={"left_out": first},
            **about,
        ),
        a_result(
            name="another",
            metric="clean_mean_per_class_22222222",
            value=100.0,
            ci95=(90.0, 100.0),
            provenance={"left_out": second},
            **about,
        ),
    ]
    rescore._show(rows)
    columns = [row.column for row in rows]
    width = len(columns[2])
    assert width > max(map(len, columns[:2]))
    assert capsys.readouterr().out.splitlines() == [
        "list 11111111: of 9 test images 3 copies and 2 with a wrong label are left out,"
        " 1 are scored by their right label",
        "list 22222222: of 8 test images 0 copies and 2 with a wrong label are left out,"
        " 1 are scored by their right label",
        f"x                    {columns[0]:<{width}}   81.26 [80.00, 82.50]",
        f"x                    {columns[1]:<{width}}   +0.75 no interval: too few images"
        " decide",
        f"another              {columns[2]}  100.00 [90.00, 100.00]",
    ]
