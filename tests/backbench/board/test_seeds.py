"""Several seeds of a reading that has nothing random in it are one measurement, and no interval
over seeds is narrower than that over the images."""

import pytest
from support.records import a_result

from backbench.board.board import collect
from backbench.results import store

KNN = {"task": "knn", "metric": "top1_k20", "protocol": "knn-demo-v1"}


def cell_of(folder, *rows):
    for seed, row in enumerate(rows):
        store.append(folder / f"s{seed}", [a_result(seed=seed, **row)])
    board = collect([folder])
    (cell,) = [board.cell(board.rows[0], column) for column in board.columns]
    return cell


def test_seeds_that_can_only_agree_are_one_measurement(tmp_path):
    once = {**KNN, "value": 70.0, "ci95": (57.4, 80.1)}
    cell = cell_of(tmp_path, once, once)
    assert (cell.value, cell.ci95) == (70.0, (57.4, 80.1))
    assert "one measurement" in cell.note


def test_seeds_that_agree_by_chance_are_no_surer_than_the_images(tmp_path):
    trained = {"value": 70.0, "ci95": (57.4, 80.1)}
    cell = cell_of(tmp_path, trained, trained, trained)
    assert cell.ci95 == pytest.approx((57.4, 80.1))


def test_seeds_that_differ_keep_their_own_interval(tmp_path):
    cell = cell_of(
        tmp_path, {"value": 60.0, "ci95": (59.0, 61.0)}, {"value": 80.0, "ci95": (79.0, 81.0)}
    )
    assert cell.ci95[0] < 50 and cell.ci95[1] > 90
