"""Metrics against their definitions, intervals against image-by-image resampling."""

from types import SimpleNamespace

import numpy as np
import pytest

from transfer import scoring

LABEL = np.array([0, 0, 0, 0, 1, 1, 2])
PREDICTION = np.array([0, 0, 0, 1, 1, 0, -1])


def test_accuracies_by_hand():
    assert scoring.score("top1", PREDICTION, LABEL, 3) == pytest.approx(100 * 4 / 7)
    three = scoring.score("mean_per_class", PREDICTION, LABEL, 3)
    assert three == pytest.approx(100 * (3 / 4 + 1 / 2 + 0) / 3)
    assert scoring.score("mean_per_class", PREDICTION, LABEL, 5) == three
    right, total = scoring.per_class(PREDICTION, LABEL, 3)
    assert right.tolist() == [3, 1, 0] and total.tolist() == [4, 2, 1]


def test_confusion_leaves_undefined_predictions_out():
    assert scoring.confusion(PREDICTION, LABEL, 3).tolist() == [[3, 1, 0], [1, 1, 0], [0, 0, 0]]


def test_of_equal_scores_the_first_is_chosen_and_both_ends_of_a_grid_are_edges(caplog):
    assert scoring.best_of([3.0, 7.0, 7.0, 1.0]) == 1
    task = SimpleNamespace(dataset=SimpleNamespace(name="dtd"))
    grid = [0.1, 1.0, 10.0]
    edges = [scoring.warn_edge(task, SimpleNamespace(name="x"), "rate", v, grid) for v in grid]
    assert edges == [True, False, True]
    assert "0.1 is the smallest" in caplog.text and "10 is the largest" in caplog.text


def test_picture_is_a_png():
    matrix = scoring.confusion(PREDICTION, LABEL, 3)
    assert scoring.confusion_picture(matrix, ("a", "b", "c"), "t").startswith(b"\x89PNG")
