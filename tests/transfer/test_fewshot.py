"""Few labels: draws are seeded, balanced, everybody's; metrics against their definitions."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from backbench.images.image_list import ImageList
from transfer import probe_fewshot, scoring
from transfer.features import FeatureRows
from transfer.protocols import FewShot


def images(classes=4, per=10):
    paths = tuple(f"{c}/{i}.png" for c in range(classes) for i in range(per))
    labels = tuple(c for c in range(classes) for _ in range(per))
    return ImageList(Path("/d"), paths, labels, tuple(map(str, range(classes))))


def test_draws_are_balanced_seeded_and_different():
    drawn = probe_fewshot.draws(images(), shots=2, count=20, seed=0)
    assert drawn == probe_fewshot.draws(images(), shots=2, count=20, seed=0)
    other = probe_fewshot.draws(images(), shots=2, count=20, seed=1)
    assert len({tuple(d) for d in drawn}) == 20 and drawn != other
    for draw in drawn:
        assert Counter(images().labels[i] for i in draw) == Counter(dict.fromkeys(range(4), 2))


@pytest.mark.parametrize("separation", [0.0, 8.0])
def test_accuracy_is_chance_without_and_full_with_separation(separation):
    found = images(per=50)
    torch.manual_seed(0)
    labels = torch.tensor(found.labels)
    features = torch.randn(200, 16)
    features[range(200), labels] += separation
    chosen = probe_fewshot.draws(found, shots=2, count=5, seed=0)
    protocol = FewShot(kind="fewshot", protocol="test", max_iterations=200)
    given = (FeatureRows((features,)), found.labels, features, chosen)
    predicted, gradient = probe_fewshot.predictions(*given, classes=4, p=protocol)
    assert predicted.shape == (5, 200) and gradient <= protocol.tolerance
    mean = 100 * (predicted == labels.numpy()).mean()
    assert mean > 95 if separation else 15 < mean < 45


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
