"""Logistic regression is scikit-learn's, in pieces and from a warm start; few labels; metrics."""

import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.utils._python_dispatch import TorchDispatchMode

from backbench.errors import Preempted
from backbench.images.image_list import ImageList
from backbench.runs.state import StopFlag
from backbench.transfer import drawing, logreg, scoring
from backbench.transfer.features.extractor import FeatureRows
from backbench.transfer.probes import fewshot as probe_fewshot
from backbench.transfer.probes.fewshot import FewShot


def problem(n=400, d=20, classes=5, seed=0):
    draw = np.random.Generator(np.random.PCG64(seed))
    centres = draw.normal(size=(classes, d))
    y = draw.integers(0, classes, n)
    x = centres[y] + 1.5 * draw.normal(size=(n, d))
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def objective(weight, bias, x, y, l2):
    """Return the mean over samples of what ours and scikit-learn's minimise, in float64."""
    logits = x.double() @ weight.double().T + bias.double()
    loss = torch.nn.functional.cross_entropy(logits, y, reduction="sum")
    return float((loss + 0.5 * l2 * weight.double().square().sum()) / len(y))


@pytest.mark.parametrize("l2", [1e-2, 1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_agrees_with_scikit_learn(l2, dtype):
    x, y = problem()
    ours = logreg.fit([(x, y)], classes=5, l2=l2, dtype=dtype, tolerance=1e-7)
    theirs = LogisticRegression(C=1 / l2, max_iter=5000, tol=1e-8)
    theirs.fit(x.double().numpy(), y.numpy())
    weight = torch.tensor(theirs.coef_)
    bias = torch.tensor(theirs.intercept_)
    reference = objective(weight, bias, x, y, l2)
    found = objective(ours.weight, ours.bias, x, y, l2)
    assert found == pytest.approx(reference, rel=1e-4)
    assert ours.loss == pytest.approx(reference, rel=1e-4)
    # Single precision may break a tie of the two best classes.
    fresh = x + torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    top = np.sort(theirs.decision_function(fresh.double().numpy()), 1)
    tie = 1e-9 if dtype == torch.float64 else 1e-2
    clear = top[:, -1] - top[:, -2] > tie
    assert clear.mean() > 0.98
    predicted = ours.logits(fresh).argmax(1).numpy()
    same = predicted == theirs.predict(fresh.double().numpy())
    assert same[clear].all()


def test_parts_and_chunks_are_one_problem():
    x, y = problem()
    whole = logreg.fit([(x, y)], classes=5, l2=1.0, dtype=torch.float64)
    halves = [(x[:150], y[:150]), (x[150:], y[150:])]
    parts = logreg.fit(halves, classes=5, l2=1.0, dtype=torch.float64, chunk=64)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-7)
    torch.testing.assert_close(parts.weight, whole.weight, rtol=1e-3, atol=1e-4)


def test_a_warm_start_takes_fewer_iterations_to_the_same_place():
    x, y = problem()
    near = logreg.fit([(x, y)], classes=5, l2=1.5)
    cold = logreg.fit([(x, y)], classes=5, l2=1.0)
    warm = logreg.fit([(x, y)], classes=5, l2=1.0, start=near)
    assert warm.iterations < cold.iterations
    assert warm.loss == pytest.approx(cold.loss, rel=1e-4)


def test_a_signal_ends_a_fit_between_two_iterations():
    stop = StopFlag()
    calls = []

    def between():
        calls.append(1)
        stop.requested = "SIGTERM" if len(calls) == 3 else None
        stop.end_here("within a fit")

    x, y = problem()
    with pytest.raises(Preempted, match="stopped by SIGTERM within a fit"):
        logreg.fit([(x, y)], classes=5, l2=1.0, between=between)
    assert len(calls) == 3


class LargestTensor(TorchDispatchMode):
    """The number of entries of the largest tensor that any operation gives."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for one in found if isinstance(found, list | tuple) else [found]:
            if isinstance(one, torch.Tensor):
                self.entries = max(self.entries, one.numel())
        return found


def test_working_memory_does_not_grow_with_the_number_of_rows(tmp_path):
    """Features mapped from disk: 16 times the rows, the same peak beside them."""
    peaks = []
    for n in (4096, 65536):
        path = tmp_path / f"{n}.npy"
        draw = np.random.Generator(np.random.PCG64(0))
        np.save(path, draw.normal(size=(n, 64)).astype(np.float32))
        x = torch.from_numpy(np.load(path, mmap_mode="c"))
        y = torch.arange(n) % 3
        tracemalloc.start()
        with LargestTensor() as largest:
            logreg.fit([(x, y)], classes=3, l2=1.0, max_iterations=2, chunk=2048)
        peaks.append((largest.entries, tracemalloc.get_traced_memory()[1]))
        tracemalloc.stop()
    (few_entries, few_bytes), (many_entries, many_bytes) = peaks
    assert few_entries == many_entries == 2048 * 64, "a chunk is in memory at a time"
    assert many_bytes < 2 * few_bytes + 100_000


@pytest.mark.parametrize(("n", "step"), [(79, 1), (159, 1), (160, 2), (400, 5)])
def test_moments_are_over_about_four_images_for_each_feature(n, step):
    x, y = problem(n=n)
    found = logreg.second_moments([(x, y)], torch.device("cpu"), chunk=64)
    z = torch.nn.functional.pad(x[::step], (0, 1), value=1.0).double()
    torch.testing.assert_close(
        found.mean.double(), z.T @ z / len(z), rtol=1e-4, atol=1e-4
    )


def transformer_like(n=900, d=48, classes=6, seed=0):
    """Features as a transformer's: a large common part, scales from 1e-3 to 10, correlations."""
    draw = np.random.Generator(np.random.PCG64(seed))
    y = draw.integers(0, classes, n)
    inner = draw.normal(size=(classes, d))[y] + 2 * draw.normal(size=(n, d))
    mixed = inner @ np.linalg.qr(draw.normal(size=(d, d)))[0] * np.logspace(-3, 1, d)
    x = mixed @ np.linalg.qr(draw.normal(size=(d, d)))[0] + 5
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


@pytest.mark.parametrize("l2", [10.0, pytest.param(1e-2, marks=pytest.mark.slow), 1e-5])
def test_ill_conditioned_features_converge(l2):
    """scikit-learn's Newton solver finds the same minimum; plain L-BFGS stopped far from it."""
    x, y = transformer_like()
    ours = logreg.fit([(x, y)], classes=6, l2=l2)
    assert ours.converged and ours.gradient <= 1e-5
    exact = LogisticRegression(C=1 / l2, solver="newton-cholesky", tol=1e-9)
    exact.fit(x.double().numpy(), y.numpy())
    weight = torch.tensor(exact.coef_)
    bias = torch.tensor(exact.intercept_)
    assert ours.loss <= objective(weight, bias, x, y, l2) + 2e-4
    found = objective(ours.weight, ours.bias, x, y, l2)
    assert found == pytest.approx(ours.loss, abs=1e-4)


@pytest.mark.parametrize("size", [100, 300])
def test_large_features_that_others_explain_are_not_alike(size):
    """Each alone differs little from what the features before it say, so its Cholesky pivot is small."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(500, 60))
    y = draw.integers(0, 5, 500)
    for j in (30, 45, 59):
        x[:, j] += x[:, :j] @ (size * draw.normal(size=j) / j**0.5)
    parts = [(torch.tensor(x, dtype=torch.float32), torch.tensor(y))]
    fitted = None
    for l2 in (1e3, 1e2, 10.0, 1.0):
        fitted = logreg.fit(parts, classes=5, l2=l2, start=fitted)
        assert fitted.converged
        assert fitted.iterations < 60


def test_features_of_another_scale_are_the_same_problem():
    """A thousandth of the features with a millionth of the penalty has the same minimum."""
    x, y = transformer_like()
    large = logreg.fit([(x, y)], classes=6, l2=1e-2)
    small = logreg.fit([(x / 1000, y)], classes=6, l2=1e-8)
    assert small.loss == pytest.approx(large.loss, abs=1e-4)


def test_more_dimensions_than_images_is_the_same_problem():
    x, y = problem(n=40, d=120)
    ours = logreg.fit([(x, y)], classes=5, l2=0.1)
    theirs = LogisticRegression(C=10, max_iter=5000, tol=1e-8)
    theirs.fit(x.double().numpy(), y.numpy())
    np.testing.assert_allclose(ours.weight.numpy(), theirs.coef_, atol=5e-3)
    warm = logreg.fit([(x, y)], classes=5, l2=0.1, start=ours)
    assert warm.converged and ours.converged
    np.testing.assert_allclose(warm.weight.numpy(), theirs.coef_, atol=5e-3)


def test_too_few_iterations_are_said():
    x, y = transformer_like()
    ours = logreg.fit([(x, y)], classes=6, l2=1e-4, max_iterations=3)
    assert not ours.converged and ours.gradient > 1e-5


@pytest.mark.parametrize("scale", [1, 100])
def test_a_start_next_to_the_minimum_is_brought_there(scale):
    """From there the gradient is so small that the line search used to take no step."""
    draw = torch.Generator().manual_seed(4)
    y = torch.arange(39) % 3
    x = torch.randn(39, 64, generator=draw) * torch.rand(64, generator=draw)
    x += 18 * torch.rand(64, generator=draw)
    x += 0.5 * torch.randn(3, 64, generator=draw)[y]
    same = {"classes": 3, "l2": 10.0 * scale**2, "dtype": torch.float64}
    near = logreg.fit([(scale * x, y)], **same, tolerance=1e-6)
    ours = logreg.fit([(scale * x, y)], **same, start=near, tolerance=1e-7)
    assert near.converged and near.gradient > 1e-7
    assert ours.converged


def images(classes=4, per=10):
    paths = tuple(f"{c}/{i}.png" for c in range(classes) for i in range(per))
    labels = tuple(c for c in range(classes) for _ in range(per))
    return ImageList(Path("/d"), paths, labels, tuple(map(str, range(classes))))


def test_draws_are_balanced_seeded_and_different():
    drawn = probe_fewshot.draws(images(), shots=2, count=20, seed=0)
    assert drawn == probe_fewshot.draws(images(), shots=2, count=20, seed=0)
    other = probe_fewshot.draws(images(), shots=2, count=20, seed=1)
    assert len({tuple(d) for d in drawn}) == 20
    assert drawn != other
    for draw in drawn:
        by_class = Counter(images().labels[i] for i in draw)
        assert by_class == {0: 2, 1: 2, 2: 2, 3: 2}


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
    assert predicted.shape == (5, 200)
    assert gradient <= protocol.tolerance
    mean = 100 * (predicted == labels.numpy()).mean()
    if separation:
        assert mean > 95
    else:
        assert 15 < mean < 45


def test_accuracies_and_confusion_by_hand():
    label = np.array([0, 0, 0, 0, 1, 1, 2])
    prediction = np.array([0, 0, 0, 1, 1, 0, -1])
    assert scoring.score("top1", prediction, label, 3) == pytest.approx(100 * 4 / 7)
    three = scoring.score("mean_per_class", prediction, label, 3)
    assert three == pytest.approx(100 * (3 / 4 + 1 / 2 + 0) / 3)
    assert scoring.score("mean_per_class", prediction, label, 5) == three
    right, total = scoring.per_class(prediction, label, 3)
    assert right.tolist() == [3, 1, 0]
    assert total.tolist() == [4, 2, 1]
    # Predictions of no class are left out.
    matrix = scoring.confusion(prediction, label, 3)
    assert matrix.tolist() == [[3, 1, 0], [1, 1, 0], [0, 0, 0]]
    picture = drawing.confusion_picture(matrix, ("a", "b", "c"), "t")
    assert picture.startswith(b"\x89PNG")


def test_of_equal_scores_the_first_is_chosen_and_both_ends_of_a_grid_are_edges(caplog):
    assert scoring.best_of([3.0, 7.0, 7.0, 1.0]) == 1
    task = SimpleNamespace(dataset=SimpleNamespace(name="dtd"))
    checkpoint = SimpleNamespace(name="x")
    grid = [0.1, 1.0, 10.0]

    def at_edge(best, *scores):
        return scoring.warn_edge(task, checkpoint, "rate", best, grid, scores=scores)

    assert at_edge(0.1, 9.0, 2.0, 1.0) and at_edge(10.0, 1.0, 2.0, 9.0)
    assert not at_edge(1.0, 1.0, 9.0, 2.0)
    assert "0.1 is the smallest" in caplog.text and "10 is the largest" in caplog.text
    # Nothing better is likely outside where another scores the same, or can be where all is right
    caplog.clear()
    assert at_edge(0.1, 7.0, 7.0, 7.0) and at_edge(0.1, 100.0, 2.0, 1.0)
    assert caplog.text == ""
