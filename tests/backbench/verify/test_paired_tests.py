"""Kept predictions are paired only where they tell of the same images."""

import numpy as np
import pytest

from backbench.records import predictions
from backbench.stats import paired_differences, training_noise
from backbench.verify import column_noise
from backbench.verify.paired_tests import compare, of_draws


def keep(run, name, manifest="m", **arrays):
    return run / predictions.keep(run, name, manifest=manifest, **arrays)


def test_files_pair_only_on_the_same_test_list(tmp_path):
    rng = np.random.default_rng(0)
    label = rng.integers(0, 10, 300)
    other = np.where(rng.random(300) < 0.3, label, 11)
    a = keep(tmp_path, "a", prediction=label, label=label)
    b = keep(tmp_path, "b", prediction=other, label=label)
    elsewhere = keep(tmp_path, "c", manifest="n", prediction=other, label=label)
    relabelled = keep(tmp_path, "d", prediction=other, label=label[::-1].copy())
    (tmp_path / "broken.npz").write_bytes(b"not a zip")
    found = compare([a], [b], "top1")
    assert found.real
    assert found.value > 60
    assert found.paired == "images"
    for bad in (
        elsewhere,
        relabelled,
        tmp_path / "broken.npz",
        tmp_path / "missing.npz",
    ):
        assert compare([a], [bad], "top1") is None
    assert compare([a], [b], "top5") is None, "hits5 was not kept"
    assert compare([a], [b], "bbox_AP") is None
    assert compare([a, a], [b], "top1") is None


def test_resamples_pair(tmp_path):
    rng = np.random.default_rng(0)
    a, b = (
        keep(tmp_path, n, bootstrap_AP=rng.normal(40, 1, 500), images=500) for n in "ab"
    )
    noise = compare([a], [b], "AP")
    assert (noise.paired, noise.real) == ("resamples", False)
    told = compare([a], [b], "AP", value=0.5)
    assert told.value == pytest.approx(0.5), "the numbers' own difference is known"
    assert sum(told.ci95) / 2 == pytest.approx(0.5)
    bare = keep(tmp_path, "c", bootstrap_AP=rng.normal(40, 1, 500))
    assert compare([a], [bare], "AP") is None, (
        "it does not say how many images there were"
    )


def test_the_images_part_of_seeds_is_that_of_the_metric(tmp_path):
    rng = np.random.default_rng(0)
    # Three images in four are of class 0
    label = np.sort(rng.integers(0, 12, 400) // 9)
    hits = rng.random((2, 400)) < np.where(label, 0.5, 0.99)
    files = [
        keep(tmp_path, str(n), prediction=label + 5 * ~h, label=label)
        for n, h in enumerate(hits)
    ]
    of_classes = column_noise.seeds_of([80, 81], files, "mean_per_class")
    assert of_classes.by_images == pytest.approx(
        training_noise.by_images(hits * 1.0, label)
    )
    assert (
        of_classes.by_images
        > 2 * column_noise.seeds_of([80, 81], files, "top1").by_images
        > 0
    )


LABEL = np.arange(40) % 4
AP = np.linspace(30, 50, 500)
NO_PREDICTIONS = {
    "type": {"prediction": LABEL.astype("U3"), "label": LABEL},
    "dimensions": {"prediction": LABEL.reshape(2, 2, 10), "label": LABEL},
    "no-image": {"prediction": LABEL[:0], "label": LABEL[:0]},
    "no-draw": {"prediction": np.zeros((0, 40), int), "label": LABEL},
    "no-value": {"values": AP[:0]},
    "one-value": {"values": np.float64(50)},
    "nan-value": {"values": np.array([50.0, np.nan])},
    "infinite-ap": {"bootstrap_top1": np.array([*AP, np.inf]), "images": 40},
    "table-of-ap": {"bootstrap_top1": AP.reshape(2, 250), "images": 40},
    "images-0": {"bootstrap_top1": AP, "images": 0},
    "images-listed": {"bootstrap_top1": AP, "images": [1, 2]},
    "images-nan": {"bootstrap_top1": AP, "images": np.nan},
}


@pytest.mark.parametrize("case", NO_PREDICTIONS)
def test_what_cannot_be_predictions_is_left_out(tmp_path, case, caplog):
    both = [keep(tmp_path, name, **NO_PREDICTIONS[case]) for name in "ab"]
    assert compare(both[:1], both[1:], "top1") is None
    assert "a.npz: predictions left out: '" in caplog.text


def test_lists_of_other_lengths_do_not_pair(tmp_path):
    """One manifest says one list: who else names it lies, and is compared with nobody."""
    a = keep(tmp_path, "a", prediction=LABEL, label=LABEL, hits5=LABEL > 0)
    b = keep(tmp_path, "b", prediction=LABEL + 1, label=LABEL, hits5=LABEL > 1)
    short = keep(
        tmp_path, "c", prediction=LABEL[:7], label=LABEL[:7], hits5=LABEL[:7] > 0
    )
    unlabelled = keep(tmp_path, "d", hits5=LABEL[:7] > 0)
    for metric in ("top1", "top5", "mean_per_class"):
        assert compare([a], [b], metric) is not None
        assert compare([a], [short], metric) is None
        assert compare([a, short], [b, short], metric) is None, (
            "the seeds' lists differ"
        )
        assert compare([a, unlabelled], [b, unlabelled], metric) is None
    many = keep(tmp_path, "e", bootstrap_AP=AP, images=40)
    few = keep(tmp_path, "f", bootstrap_AP=AP[:200], images=40)
    assert compare([many, few], [many, few], "AP") is None


def test_a_resample_may_have_no_ap(tmp_path):
    gap = np.where(np.arange(500) % 9, AP, np.nan)
    a, b = (
        keep(tmp_path, n, bootstrap_AP=gap + i, images=40) for i, n in enumerate("ab")
    )
    found = compare([b], [a], "AP")
    assert found.value == pytest.approx(1)


def test_seeds_are_averaged_image_by_image(tmp_path):
    label = np.zeros(100, int)
    right = keep(tmp_path, "1", prediction=label, label=label)
    wrong = keep(tmp_path, "2", prediction=label + 1, label=label)
    found = compare([right, wrong], [wrong, wrong], "top1")
    assert found.value == pytest.approx(50.0)


def test_three_seeds_with_the_same_score_are_finite(tmp_path):
    """Each seed differs on other images; what one seed left undefined changes nothing of it."""
    label = np.zeros(300, int)
    files_a = []
    files_b = []
    for seed in range(3):
        won = np.ones(300, int)
        won[40 * seed : 40 * seed + 60] = 0
        lost = np.ones(300, int)
        lost[200:230] = 0
        files_a.append(keep(tmp_path, f"a{seed}", prediction=won, label=label))
        files_b.append(keep(tmp_path, f"b{seed}", prediction=lost, label=label))
    found = compare(files_a, files_b, "top1")
    assert found.value == pytest.approx(10)
    assert 2 < found.ci95[1] - found.ci95[0] < 60


def test_class_means_are_read_from_files(tmp_path):
    label = np.array([0] * 90 + [1] * 10)
    a = keep(tmp_path, "a", prediction=label, label=label)
    b = keep(tmp_path, "b", prediction=np.where(label == 1, 5, label), label=label)
    for metric, value in (("mean_per_class", 50), ("top1", 10)):
        found = compare([a], [b], metric)
        assert found.value == pytest.approx(value)


def test_as_many_files_are_held_as_the_bytes_allow(tmp_path, monkeypatch):
    read = predictions._read
    reads = []

    def noted(path):
        reads.append(path)
        return read(path)

    held = predictions._Latest()
    monkeypatch.setattr(predictions._Latest, "BYTES", 40_000)
    monkeypatch.setattr(predictions, "_latest", held)
    monkeypatch.setattr(predictions, "_read", noted)
    ones = np.ones(1000, int)
    files = [keep(tmp_path, str(n), prediction=n * ones, label=ones) for n in range(3)]
    for n in (0, 1, 0, 2, 0, 1):
        assert (predictions.load(files[n])["prediction"] == n).all()
    assert reads == [files[n] for n in (0, 1, 2, 1)], "the one that was used last stays"
    assert list(held.held) == [files[0], files[1]] and held.used <= 40_000
    monkeypatch.setattr(predictions._Latest, "BYTES", 10)
    small = predictions._Latest()
    assert small.get(files[0]) and not small.held
    assert small.get(tmp_path / "none.npz") is None


def test_only_hits_of_all_seeds_tell_the_images_part(tmp_path):
    draw = np.random.default_rng(1)
    label = np.zeros(50, int)
    hits = draw.random((2, 3, 50)) < 0.7
    plain = [
        keep(tmp_path, f"p{n}", prediction=1 * h[0], label=label)
        for n, h in enumerate(hits)
    ]
    drawn = [
        keep(tmp_path, f"d{n}", prediction=1 * h, label=label)
        for n, h in enumerate(hits)
    ]
    values = draw.normal(40, 1, (2, 500))
    of_ap = [
        keep(tmp_path, f"r{n}", bootstrap_AP=v, images=9) for n, v in enumerate(values)
    ]
    seeds = [70.0, 71.0]
    known = column_noise.seeds_of(seeds, plain, "top1")
    right = 1.0 - hits[:, 0]
    assert known == (seeds, pytest.approx(training_noise.by_images(right)))
    assert known.by_images > 0
    by_resamples = training_noise.by_resamples(values, 9)
    assert column_noise.seeds_of(seeds, of_ap, "AP") == (
        seeds,
        pytest.approx(by_resamples),
    )
    # Draws of labels, a seed that kept nothing, and one without its file say nothing
    for files in (drawn, plain[:1], [plain[0], tmp_path / "none.npz"]):
        assert column_noise.seeds_of(seeds, files, "top1") == (seeds, 0.0)


def test_published_noise_is_of_one_protocol_dataset_and_metric():
    def found(seeds=(), choice=0.0, **changes):
        about = {
            "protocol": "detection-1x-v1",
            "dataset": "coco2017",
            "metric": "segm_AP",
        }
        return column_noise.measured_or_published(
            seeds, **about | changes, choice=choice
        )

    published = found()
    assert (published.seed_variance, published.excess, published.df) == (
        pytest.approx(0.15**2),
        pytest.approx(0.15**2),
        4,
    )
    assert published.source == "published, COCO FPN schedules"
    for other in ({"protocol": "x"}, {"dataset": "cells"}, {"metric": "segm_AP50"}):
        assert found(**other).df == 0
    # As many degrees of freedom measured here go before, and are at least the choice's noise
    measured = [training_noise.Seeds([40.0, 41.0, 42.0], 0.0)] * 2
    assert found(measured[:1]).source == published.source
    assert (found(measured).df, found(measured).excess) == (4, pytest.approx(1.0))
    assert found(measured, choice=9.0).excess == 9.0


def test_means_over_seeds_are_compared_over_images_and_trainings(tmp_path):
    label = np.zeros(200, int)
    draw = np.random.default_rng(2)
    hits = draw.random((5, 200)) < 0.7
    files = [
        keep(tmp_path, str(n), prediction=1 - h, label=label)
        for n, h in enumerate(hits)
    ]
    noise = training_noise.TrainingNoise(1.0, 0.5, 6)
    # Three trainings against two, of means image by image
    gap = hits[:3].mean(0) - hits[3:].mean(0)
    of_images = paired_differences.of_images(gap)
    expected = training_noise.over_trainings(of_images, noise, 3, 2)
    assert compare(files[:3], files[3:], "top1", noise) == expected
    assert compare(files[:3], files[3:], "top1") is None
    # Without the noise, seeds are draws
    draws = paired_differences.of_draws_and_images(1.0 * hits[:2] - hits[3:])
    assert compare(files[:2], files[3:], "top1") == draws


def test_predictions_of_several_draws_are_known(tmp_path):
    label = np.arange(6) % 2
    for draws, prediction in ((False, label), (True, np.stack([label] * 3))):
        file = keep(tmp_path, f"draws-{draws}", prediction=prediction, label=label)
        assert of_draws(file, "top1") == draws
    assert not of_draws(tmp_path / "none.npz", "top1")
