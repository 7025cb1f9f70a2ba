"""Kept predictions scored again, and on resamples, against sums written out here."""

import numpy as np
import pytest

from backbench.records import predictions
from backbench.stats import resampling
from backbench.verify import resamples

LABEL = np.array([0] * 6 + [1] * 2)
# Right are 5 of the six and 1 of the two
PREDICTION = np.array([0, 0, 0, 0, 0, 1, 1, 0])


def keep(run, name, manifest="m", **arrays):
    return run / predictions.keep(run, name, manifest=manifest, **arrays)


def test_the_value_of_kept_predictions_is_found_again(tmp_path):
    kept = predictions.load(keep(tmp_path, "a", prediction=PREDICTION, label=LABEL))
    assert resamples.value_again(kept, "top1") == pytest.approx(75.0)
    by_class = 100 * (5 / 6 + 1 / 2) / 2
    assert resamples.value_again(kept, "mean_per_class") == pytest.approx(by_class)
    assert resamples.value_again(kept, "top5") is None, "hits5 was not kept"


def test_a_move_has_the_spread_of_new_images(tmp_path):
    draw = np.random.default_rng(0)
    label = draw.integers(0, 3, 400)
    prediction = np.where(draw.random(400) < 0.8, label, 3)
    file = keep(tmp_path, "a", prediction=prediction, label=label)
    moved = resamples.moved([file], "top1")
    assert moved.shape == (resampling.COUNT,)
    assert moved.mean() == pytest.approx(0, abs=1e-9)
    assert moved.std() == pytest.approx(100 * (0.8 * 0.2 / 400) ** 0.5, rel=0.2)
    # The mean over seeds that agree moves as one of them
    again = keep(tmp_path, "b", prediction=prediction, label=label)
    np.testing.assert_allclose(resamples.moved([file, again], "top1"), moved)
    # Rows are compared resample by resample, so the images of one list are drawn alike
    wrong = keep(tmp_path, "c", prediction=np.where(label == 0, 0, 3), label=label)
    right = keep(tmp_path, "d", prediction=np.where(label == 0, 3, label), label=label)
    opposite = resamples.moved([wrong], "top1") + resamples.moved([right], "top1")
    np.testing.assert_allclose(opposite, 0, atol=1e-9)
    other = keep(tmp_path, "e", "another", prediction=prediction, label=label)
    assert not np.allclose(resamples.moved([other], "top1"), moved)


def test_a_detectors_resamples_are_widened_by_their_number_of_images(tmp_path):
    drawn = np.random.default_rng(0).normal(40, 1, resampling.AP_COUNT)
    file = keep(tmp_path, "a", bootstrap_AP=drawn, images=5)
    moved = resamples.moved([file], "AP")
    first = drawn[: resampling.COUNT]
    np.testing.assert_allclose(moved, (first - first.mean()) * (5 / 4) ** 0.5)


@pytest.mark.parametrize("wrong", ["few", "not finite", "no number of images"])
def test_resamples_that_do_not_tell_are_left_out(tmp_path, wrong):
    drawn = np.random.default_rng(0).normal(40, 1, resampling.COUNT)
    arrays = {"bootstrap_AP": drawn, "images": 50}
    if wrong == "few":
        arrays["bootstrap_AP"] = drawn[:-1]
    elif wrong == "not finite":
        drawn[7] = np.nan
    else:
        del arrays["images"]
    file = keep(tmp_path, "a", **arrays)
    whole = keep(tmp_path, "b", bootstrap_AP=np.nan_to_num(drawn, nan=40.0), images=50)
    assert resamples.moved([whole], "AP") is not None
    assert resamples.moved([file], "AP") is None
    assert resamples.moved([whole, file], "AP") is None
    assert resamples.moved([], "AP") is None
