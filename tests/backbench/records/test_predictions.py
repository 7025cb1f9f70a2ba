"""Kept predictions of a stranger: what cannot be any is left out with its reason."""

import numpy as np
import pytest

from backbench.records import predictions

WHOLE = {
    "manifest": np.array("a" * 64),
    "prediction": np.array([0, 1, 2]),
    "label": np.array([0, 1, 1]),
    "hits5": np.array([True, True, True]),
}
# Two images of two classes: of 10 pixels each, 6 and 7 are right
COUNTS = {
    "manifest": np.array("a" * 64),
    "intersection": np.array([[4, 2], [7, 0]]),
    "predicted": np.array([[5, 5], [9, 1]]),
    "labelled": np.array([[7, 3], [7, 3]]),
}


@pytest.fixture
def read(tmp_path, caplog):
    """read(arrays): what is read of a file of these arrays, and what was said of it."""

    def arrays_of(arrays):
        file = tmp_path / "a.npz"
        np.savez(
            file, **{name: each for name, each in arrays.items() if each is not None}
        )
        caplog.clear()
        return predictions.read_arrays(
            file, "predictions", predictions._refuse
        ), caplog.text

    return arrays_of


@pytest.mark.parametrize("arrays", [WHOLE, COUNTS])
def test_predictions_are_what_was_kept(read, arrays):
    found, said = read(arrays)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    assert said == ""


def test_a_file_that_is_not_there_says_nothing(tmp_path, caplog):
    file = tmp_path / "b.npz"
    assert predictions.read_arrays(file, "predictions", predictions._refuse) is None
    assert caplog.text == ""
    file.write_bytes(b"no zip")
    assert predictions.read_arrays(file, "predictions", predictions._refuse) is None
    assert f"{file}: predictions left out: " in caplog.text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"manifest": None}, "no manifest"),
        ({"manifest": np.array(3)}, "'manifest' is of type int64"),
        ({"label": np.array([0, 1])}, "have different lengths"),
        ({"label": np.array(["a", "b", "c"])}, "'label' is of type <U1"),
        ({"label": np.array([[0, 1, 2]])}, "'label' has 2 dimensions"),
        ({"prediction": np.zeros((1, 1, 3), int)}, "'prediction' has 3 dimensions"),
        (
            {"hits5": np.array([], bool), "label": None, "prediction": None},
            "'hits5' is empty",
        ),
        ({"images": np.array(0)}, "'images' is no number of images"),
        ({"images": np.array(3.0)}, "'images' is no number of images"),
        (
            {"values": np.array([50.0, np.nan])},
            "'values' holds a value that is no score",
        ),
        (
            {"values": np.array([50.0, np.inf])},
            "'values' holds a value that is no score",
        ),
        (
            {"bootstrap_AP": np.array([np.inf, 3.0])},
            "'bootstrap_AP' holds a value that is no",
        ),
    ],
)
def test_what_cannot_be_predictions_is_left_out(read, change, says):
    found, said = read(WHOLE | change)
    assert found is None
    assert "predictions left out: " in said and says in said


def test_a_resample_may_have_no_score_and_other_arrays_may_be_anything(read):
    drawn = {"bootstrap_AP": np.array([np.nan, 3.0]), "mine": np.array([[np.inf]])}
    found, said = read(WHOLE | drawn)
    assert found is not None and said == ""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"labelled": None}, "no three tables of images and classes"),
        ({"labelled": np.array([[7, 3]])}, "no three tables"),
        ({"labelled": np.array([[7.0, 3.0], [7.0, 3.0]])}, "no three tables"),
        (
            {
                name: COUNTS[name][0]
                for name in ("intersection", "predicted", "labelled")
            },
            "no three",
        ),
        (
            {"intersection": np.array([[4, 2], [8, 0]])},
            "more pixels are right than there are",
        ),
        (
            {"intersection": np.array([[6, 2], [7, 0]])},
            "more pixels are right than there are",
        ),
        (
            {"intersection": np.array([[-1, 2], [7, 0]])},
            "more pixels are right than there are",
        ),
        (
            {"predicted": np.array([[5, 5], [9, 2]])},
            "other numbers of pixels are predicted",
        ),
    ],
)
def test_counts_of_pixels_add_up(read, change, says):
    found, said = read(COUNTS | change)
    assert found is None
    assert says in said
