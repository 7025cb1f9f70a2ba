"""Few labels per class: the draws are seeded, balanced, and the same for every checkpoint."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from backbench.images.image_list import ImageList
from transfer import probe_fewshot
from transfer.features import FeatureRows
from transfer.protocols import FewShot


def images(classes=4, per=10):
    paths = tuple(f"{c}/{i}.png" for c in range(classes) for i in range(per))
    labels = tuple(c for c in range(classes) for _ in range(per))
    return ImageList(Path("/d"), paths, labels, tuple(map(str, range(classes))))


def test_draws_are_balanced_seeded_and_different():
    drawn = probe_fewshot.draws(images(), shots=2, count=20, seed=0)
    assert drawn == probe_fewshot.draws(images(), shots=2, count=20, seed=0)
    assert len({tuple(d) for d in drawn}) == 20 and drawn != probe_fewshot.draws(
        images(), shots=2, count=20, seed=1
    )
    assert all(
        Counter(images().labels[i] for i in d) == Counter(dict.fromkeys(range(4), 2)) for d in drawn
    )


@pytest.mark.parametrize("separation", [0.0, 8.0])
def test_accuracy_is_chance_without_and_full_with_separation(separation):
    found = images(per=50)
    torch.manual_seed(0)
    labels = torch.tensor(found.labels)
    features = torch.randn(200, 16)
    features[range(200), labels] += separation
    chosen = probe_fewshot.draws(found, shots=2, count=5, seed=0)
    protocol = FewShot(kind="fewshot", protocol="test", max_iterations=200)
    predicted, gradient = probe_fewshot.predictions(
        FeatureRows((features,)), found.labels, features, chosen, classes=4, p=protocol
    )
    assert predicted.shape == (5, 200) and gradient <= protocol.tolerance
    mean = 100 * (predicted == labels.numpy()).mean()
    assert mean > 95 if separation else 15 < mean < 45
