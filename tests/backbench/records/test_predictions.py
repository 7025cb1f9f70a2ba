"""Kept predictions of a stranger: what cannot be any is left out with its reason."""

import zipfile

import numpy as np
import pytest

from backbench.records import predictions
from backbench.records.result_line import LARGEST
from backbench.runs import seeding
from backbench.stats import resampling

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


@pytest.mark.parametrize(
    ("metric", "right"),
    [
        ("top1", [True, True, False]),
        ("top1_k20", [True, True, False]),
        ("mean_per_class", [True, True, False]),
        ("top5", [True, True, True]),
        ("top5_k20", [True, True, True]),
        ("bbox_AP", None),
    ],
)
def test_hits_are_of_the_best_class_or_of_the_five_best(metric, right):
    found = predictions.hits(WHOLE, metric)
    assert (None if found is None else found.tolist()) == right
    for gone in ("prediction", "label"):
        rest = {name: array for name, array in WHOLE.items() if name != gone}
        is_known = metric.startswith("top5")
        assert (predictions.hits(rest, metric) is not None) == is_known


def test_counts_of_pixels_are_scored_on_resamples_as_image_lists_written_out(tmp_path):
    file = predictions.keep(tmp_path, "a/b", **COUNTS)
    assert file == "predictions/a_b.npz"
    found = predictions.load(tmp_path / file)
    assert int(found["images"]) == 2
    seed = seeding.seed_of("images", "a" * 64, 2)
    counts = resampling.image_counts(seed, 2)
    names = ("intersection", "predicted", "labelled")
    for n, (first, second) in enumerate(counts.astype(int)):
        i, p, w = (first * COUNTS[name][0] + second * COUNTS[name][1] for name in names)
        assert found["bootstrap_pixel_acc"][n] == pytest.approx(100 * i.sum() / w.sum())
        shares = [i[c] / (p[c] + w[c] - i[c]) for c in range(2)]
        assert found["bootstrap_miou"][n] == pytest.approx(100 * np.mean(shares))
        recalls = i / w
        assert found["bootstrap_macc"][n] == pytest.approx(100 * recalls.mean())
    with pytest.raises(ValueError, match="predictions need the manifest's digest"):
        predictions.keep(tmp_path, "x", prediction=np.zeros(3))


def test_a_score_may_be_as_large_as_any_number_of_a_row(read):
    at_most = {"values": np.array([LARGEST, -LARGEST])}
    assert read(WHOLE | at_most)[0] is not None
    above = {"values": np.array([LARGEST * 1.0001])}
    found, said = read(WHOLE | above)
    assert found is None and "holds a value that is no score" in said


def test_a_file_that_unpacks_to_too_much_is_left_out(tmp_path, caplog, monkeypatch):
    file = tmp_path / "a.npz"
    np.savez_compressed(file, **WHOLE, mine=np.zeros(1000))
    packed = file.stat().st_size
    unpacked = sum(member.file_size for member in zipfile.ZipFile(file).infolist())
    assert packed < unpacked
    for most, fits in ((unpacked, True), (unpacked - 1, False)):
        monkeypatch.setattr(predictions.opening, "GIGABYTE", most)
        found = predictions.read_arrays(file, "scores", lambda arrays: None)
        assert (found is not None) == fits
    assert caplog.text.count("scores left out: more than 1 GB when unpacked") == 1
