"""What the intervals cover and the tests call, on simulated columns: a small part of
`benchmarks/intervals.py`, with bounds three standard errors from what it prints."""

import numpy as np
import pytest

from backbench.results import intervals, store
from backbench.results.compare import compare
from benchmarks import intervals as simulated


@pytest.mark.parametrize("name", ["few labels, top-1", "few labels, mean per class"])
def test_few_labels_vary_by_draw_and_by_image(name):
    """Without the images a third of equals is called different here; without the draws too."""
    assert simulated.called(name, 500, 0.8, 300) <= 0.05 + 3 * 0.013
    assert simulated.called(name, 500, 0.8, 50, gap=0.05) >= 0.75
    assert 0.95 - 3 * 0.013 <= simulated.covered(name, 500, 0.8, 300) <= 0.99


@pytest.mark.parametrize("name", ["top-1", "mean per class", "three seeds", "AP (500 resamples)"])
def test_equals_are_rarely_called_different(name):
    assert simulated.called(name, 500, 0.8, 250) <= 0.05 + 3 * 0.014
    assert simulated.called(name, 500, 0.7, 20, gap=0.3) >= 0.9


@pytest.mark.parametrize("name", ["mean per class", "AP (500 resamples)", "average of twelve"])
def test_intervals_cover(name):
    assert 0.95 - 3 * 0.0126 <= simulated.covered(name, 500, 0.9, 300) <= 0.99


@pytest.mark.parametrize("n", [100, 500])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_top1_covers(n, share):
    """Exactly, by the sum over all counts."""
    assert 0.92 <= simulated.top1(n, share) <= 0.985


def test_all_right_is_no_certainty():
    assert intervals.of_hits(np.ones(100, bool)) == pytest.approx((97.53, 100), abs=0.01)
    assert intervals.of_hits(np.zeros(100, bool)) == pytest.approx((0, 2.47), abs=0.01)
    low, high = intervals.of_draws(np.ones((20, 100), bool))
    assert 90 < low < 99
    assert high == 100


def test_equals_stay_tied():
    """Of five equal trunks one is above the others now and then; that it was chosen is counted."""
    out = simulated._left_out("top-1", 500, 5, 100, 0.0)
    assert np.mean(np.array(out) > 0) <= 0.05 + 3 * 0.022


def test_few_label_files_are_compared_over_draws_and_images(tmp_path):
    """What the probe keeps is what is read."""
    label = np.arange(300) % 10
    p = simulated.Population(0)
    files = []
    for name, hits in zip("ab", p.drawn(2, 300, 0.6, 20, gap=0.2)):
        prediction = np.where(hits, label, (label + 1) % 10)
        kept = store.keep_predictions(
            tmp_path,
            name,
            manifest="m",
            prediction=prediction,
            label=label,
            values=100 * hits.mean(1),
        )
        files.append([tmp_path / kept])
    for metric in ("top1", "mean_per_class"):
        found = compare(files[1], files[0], metric)
        assert found is not None
        assert found.paired == "draws and images"
        assert found.real
        assert found.value == pytest.approx(20, abs=8)
