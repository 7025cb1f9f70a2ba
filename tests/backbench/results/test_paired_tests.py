"""Paired tests on simulated predictions with known truth: noise is not called a difference, a real
one is."""

import numpy as np
import pytest
from scipy.stats import binom, binomtest, norm

from backbench.results import store
from backbench.results.paired_tests import (
    compare,
    of_draws,
    of_images,
    of_resamples,
    seeds_interval,
    tied_with_first,
)

IMAGES = 720


def two(rng, gap, *, classes=10, images=IMAGES):
    """Hits (N,) of two checkpoints whose true accuracies are 70% and 70% + gap, on images with a
    shared difficulty."""
    hard = rng.normal(size=images)
    scale = 2**0.5  # of the sum of two unit normals
    edges = [scale * norm.ppf(1 - share) for share in (0.7, 0.7 + gap)]
    hits = [hard + rng.normal(size=images) > edge for edge in edges]
    return hits[0], hits[1], rng.integers(0, classes, size=images)


def called(gap, *, mean_per_class, repeats=400, images=IMAGES, seed=0):
    """Share of repeats in which the difference is called real, and in which it is called real the
    wrong way round."""
    rng = np.random.default_rng(seed)
    real = wrong = covered = 0
    for _ in range(repeats):
        a, b, label = two(rng, gap, images=images)
        d = of_images(b.astype(float) - a, label if mean_per_class else None)
        real += d.real
        wrong += d.real and d.value < 0
        covered += d.ci95[0] <= 100 * gap <= d.ci95[1]
    return real / repeats, wrong / repeats, covered / repeats


@pytest.mark.parametrize("mean_per_class", [False, True])
def test_noise_is_called_at_most_one_time_in_twenty(mean_per_class, capsys):
    false, _, covered = called(0.0, mean_per_class=mean_per_class)
    powers = {
        gap: called(gap, mean_per_class=mean_per_class, repeats=150)[0]
        for gap in (0.02, 0.05, 0.10)
    }
    with capsys.disabled():
        shown = ", ".join(f"{100 * gap:.0f} points {power:.0%}" for gap, power in powers.items())
        kind = "mean per class" if mean_per_class else "top-1"
        print(
            f"\n{kind}, {IMAGES} images: false positives {false:.1%}, interval covers {covered:.1%}, power at {shown}"
        )
    assert false <= 0.05
    assert covered >= 0.93
    assert powers[0.02] < powers[0.05] < powers[0.10]
    assert powers[0.10] > 0.95


@pytest.mark.slow
def test_best_of_many_equals_is_rarely_called_best(tmp_path, capsys):
    """Bold needs the highest to beat each other one, so choosing the highest after the fact does
    not raise the rate."""
    rng = np.random.default_rng(1)
    for k in (2, 3, 6):
        bold = 0
        for _ in range(3000):
            hard = rng.normal(size=IMAGES)
            hits = sorted(
                (hard + rng.normal(size=IMAGES) > -0.74 for _ in range(k)), key=np.sum, reverse=True
            )
            bold += all(of_images(hits[0].astype(float) - other).real for other in hits[1:])
        with capsys.disabled():
            print(f"\n{k} equal checkpoints: one is called best in {bold / 3000:.1%} of tables")
        assert bold / 3000 <= 0.05


@pytest.mark.slow
def test_draws_and_resamples_hold_their_rate(capsys):
    rng = np.random.default_rng(2)
    draws = sum(of_draws(rng.normal(size=20) * 3).real for _ in range(2000)) / 2000
    rates = {}
    for images in (40, 150):
        called = 0
        for _ in range(1500):
            a, b, _ = two(rng, 0.0, images=images)
            d = b.astype(float) - a
            called += of_resamples(
                100 * d[rng.integers(0, images, size=(500, images))].mean(1)
            ).real
        rates[images] = called / 1500
    with capsys.disabled():
        print(f"\nfalse positives: draws {draws:.1%}, resamples {rates}")
    assert draws <= 0.06  # exact at 5% for normal draws; 2000 repeats are good to half a point
    assert max(rates.values()) <= 0.05


def test_the_sign_test_is_mcnemars():
    """Without a part of the probability of what was observed: the exact test called fewer than 3% of equal
    pairs different where errors are rare, at any number of images."""
    d = np.array([1.0] * 14 + [-1.0] * 4 + [0.0] * 100)
    exact = binomtest(4, 18, 0.5).pvalue
    assert of_images(d).p == pytest.approx(exact - 2 * 0.35 * binom.pmf(4, 18, 0.5))
    assert of_images(d).value == pytest.approx(100 * 10 / 118)
    assert of_images(-d).value == pytest.approx(-100 * 10 / 118)
    assert of_images(-d).p == of_images(d).p


def test_class_means_weigh_classes_alike():
    label = np.array([0] * 90 + [1] * 10)
    d = np.zeros(100)
    d[90:] = 1  # all ten of the small class
    assert of_images(d, label).value == pytest.approx(50.0)
    assert of_images(d).value == pytest.approx(10.0)


def test_nobody_disagrees():
    d = of_images(np.zeros(500))
    assert (d.value, d.p, d.real) == (0.0, 1.0, False)
    assert d.ci95[0] < 0 < d.ci95[1]


def keep(run, name, manifest="m", **arrays):
    return run / store.keep_predictions(run, name, manifest=manifest, **arrays)


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
    assert found is not None
    assert found.real
    assert found.value > 60
    assert found.paired == "images"
    for bad in (elsewhere, relabelled, tmp_path / "broken.npz", tmp_path / "missing.npz"):
        assert compare([a], [bad], "top1") is None
    assert compare([a], [b], "top5") is None, "hits5 was not kept"
    assert compare([a], [b], "bbox_AP") is None
    assert compare([a, a], [b], "top1") is None


def test_draws_and_resamples_pair(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.normal(80, 3, size=20)
    a, b = (
        keep(tmp_path, "a", values=base + 2),
        keep(tmp_path, "b", values=base + rng.normal(0, 0.5, size=20)),
    )
    found = compare([a], [b], "top1")
    assert found is not None
    assert (found.paired, found.n, found.real) == ("draws", 20, True)
    c, d = (
        keep(tmp_path, "c", bootstrap_bbox_AP=rng.normal(40, 1, 500)),
        keep(tmp_path, "d", bootstrap_bbox_AP=rng.normal(40, 1, 500)),
    )
    noise = compare([c], [d], "bbox_AP")
    assert noise is not None
    assert (noise.paired, noise.real) == ("resamples", False)


LABEL = np.arange(40) % 4
AP = np.linspace(30, 50, 500)
NO_PREDICTIONS = {
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
    short = keep(tmp_path, "c", prediction=LABEL[:7], label=LABEL[:7], hits5=LABEL[:7] > 0)
    unlabelled = keep(tmp_path, "d", hits5=LABEL[:7] > 0)
    for metric in ("top1", "top5", "mean_per_class"):
        assert compare([a], [b], metric) is not None
        assert compare([a], [short], metric) is None
        assert compare([a, short], [b, short], metric) is None, "the seeds' lists differ"
        assert compare([a, unlabelled], [b, unlabelled], metric) is None
    many, few = keep(tmp_path, "e", bootstrap_AP=AP), keep(tmp_path, "f", bootstrap_AP=AP[:200])
    assert compare([many, few], [many, few], "AP") is None


def test_a_resample_may_have_no_ap(tmp_path):
    gap = np.where(np.arange(500) % 9, AP, np.nan)
    a, b = (keep(tmp_path, n, bootstrap_AP=gap + i, images=40) for i, n in enumerate("ab"))
    found = compare([b], [a], "AP")
    assert found is not None
    assert found.value == pytest.approx(1)


def test_seeds_are_averaged_image_by_image(tmp_path):
    label = np.zeros(100, int)
    right, wrong = label, label + 1
    one = keep(tmp_path, "1", prediction=right, label=label)
    two_ = keep(tmp_path, "2", prediction=wrong, label=label)
    found = compare([one, two_], [two_, two_], "top1")
    assert found is not None
    assert found.value == pytest.approx(50.0)


def test_three_seeds_with_the_same_score_are_finite(tmp_path):
    """Each seed differs on other images; what one seed left undefined changes nothing of it."""
    label = np.zeros(300, int)
    pairs = []
    for seed in range(3):
        won, lost = np.ones(300, int), np.ones(300, int)
        won[40 * seed : 40 * seed + 60] = 0
        lost[200:230] = 0
        pairs.append(
            [
                keep(tmp_path, f"{n}{seed}", prediction=p, label=label)
                for n, p in (("a", won), ("b", lost))
            ]
        )
    found = compare([a for a, _ in pairs], [b for _, b in pairs], "top1")
    assert found is not None
    assert found.value == pytest.approx(10)
    assert 2 < found.ci95[1] - found.ci95[0] < 60


def test_interval_over_seeds():
    assert seeds_interval([70.0]) is None
    low, high = seeds_interval([70.0, 71.0, 72.0])
    assert (low + high) / 2 == pytest.approx(71.0)
    assert (high - low) / 2 == pytest.approx(4.3027 / 3**0.5, rel=1e-4)


def test_older_numpy_counts_coins_alike(monkeypatch):
    """Numpy 1.26 has no bitwise_count."""
    rng = np.random.default_rng(4)
    label, d = rng.integers(0, 5, 400), rng.integers(-1, 2, 400).astype(float)
    newer = of_images(d, label)
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert of_images(d, label) == newer


def test_the_highest_of_many_is_one_of_all_pairs():
    assert tied_with_first([0.04]) == 0, "one pair"
    assert tied_with_first([0.9, 0.02]) == 2, "three pairs, so 0.06"
    assert tied_with_first([0.9, 0.001]) == 1, "who is told apart is out, and the rest is looked at"
    assert tied_with_first([0.04, 0.001]) == 0, "with one pair left"


def test_class_means_are_read_from_files(tmp_path):
    label = np.array([0] * 90 + [1] * 10)
    files = [
        keep(tmp_path, name, prediction=np.where(label == 1, right, label), label=label)
        for name, right in (("a", 1), ("b", 5))
    ]
    for metric, value in (("mean_per_class", 50), ("top1", 10)):
        found = compare([files[0]], [files[1]], metric)
        assert found is not None
        assert found.value == pytest.approx(value)
