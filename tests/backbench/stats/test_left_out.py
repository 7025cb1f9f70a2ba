"""The change of a score without flawed images: its value, its interval, and where it has none."""

import math

import numpy as np
import pytest
from sklearn.metrics import recall_score

from backbench.stats import left_out


def drawn(rng, *, images=2000, share=0.05, on_kept=0.8, on_flawed=0.4, draws=1):
    """Hits (D, N) and the flawed images (N,) of a test set."""
    flawed = rng.random(images) < share
    hard = rng.random(images)
    luck = rng.normal(scale=0.05, size=(draws, images))
    hits = hard + luck < np.where(flawed, on_flawed, on_kept)
    return hits, flawed


def test_the_interval_is_that_of_a_product_of_shares():
    """Without relabelled images the change is the flawed share times a difference of shares."""
    hits, flawed = drawn(np.random.default_rng(0))
    found = left_out.change(hits, hits, ~flawed, flawed)
    n = len(flawed)
    share = flawed.mean()
    kept, left = hits[0, ~flawed].mean(), hits[0, flawed].mean()
    assert found.value == pytest.approx(100 * share * (kept - left))
    # The delta method, with three independent counts
    variance = (kept - left) ** 2 * share * (1 - share) / n
    variance += share**2 * kept * (1 - kept) / (n * (1 - share))
    variance += share**2 * left * (1 - left) / (n * share)
    low, high = found.ci95
    assert (high - low) / 2 == pytest.approx(196 * math.sqrt(variance), rel=1e-3)
    assert (high + low) / 2 == pytest.approx(found.value)


def test_a_mean_per_class_is_that_of_sklearn():
    rng = np.random.default_rng(1)
    label = rng.integers(0, 5, 600)
    hits, flawed = drawn(rng, images=600, share=0.2)
    prediction = np.where(hits[0], label, (label + 1) % 5)
    found = left_out.change(
        hits, hits, ~flawed, flawed, classes=label, clean_classes=label
    )
    clean = recall_score(label[~flawed], prediction[~flawed], average="macro")
    full = recall_score(label, prediction, average="macro")
    assert found.value == pytest.approx(100 * (clean - full))


@pytest.mark.parametrize(
    ("draws", "by_class"), [(1, False), (1, True), (3, False), (8, False)]
)
def test_the_interval_covers_the_change(draws, by_class):
    """On new test sets, of which others are flawed. benchmarks/left_out.py tries many more."""
    rng = np.random.default_rng(2)
    true = 100 * 0.05 * (0.8 - 0.4)
    covered = 0
    for _ in range(500):
        hits, flawed = drawn(rng, draws=draws)
        label = rng.integers(0, 5, len(flawed)) if by_class else None
        found = left_out.change(
            hits, hits, ~flawed, flawed, classes=label, clean_classes=label
        )
        covered += found.ci95[0] <= true <= found.ci95[1]
    assert 0.92 <= covered / 500 <= 0.98


def test_too_few_images_give_no_interval():
    hits, flawed = drawn(np.random.default_rng(3))
    few = flawed & (flawed.cumsum() < left_out.FEWEST_FLAWED)
    found = left_out.change(hits, hits, ~few, few)
    assert found.ci95 is None and np.isfinite(found.value)
    # Many are flawed, and all but two of 2,000 images are right: two errors decide
    right = np.ones_like(hits)
    right[0, [0, 1]] = False
    assert left_out.change(right, right, ~flawed, flawed).ci95 is None
    # An image with another label counts as flawed, though it is kept
    other = hits ^ flawed
    assert left_out.change(hits, other, np.ones_like(flawed), flawed).ci95 is not None


def test_small_classes_give_no_interval():
    """Four images of a class say too little of how far it varies."""
    hits, flawed = drawn(np.random.default_rng(4), images=400, share=0.2)
    label = np.arange(400) % 100
    few = left_out.change(
        hits, hits, ~flawed, flawed, classes=label, clean_classes=label
    )
    assert few.ci95 is None
    label = np.arange(400) % 10
    many = left_out.change(
        hits, hits, ~flawed, flawed, classes=label, clean_classes=label
    )
    assert many.ci95 is not None


def test_two_draws_give_no_interval():
    """They say too little of how far a third would move the score."""
    hits, flawed = drawn(np.random.default_rng(5), draws=3)
    two = left_out.change(hits[:2], hits[:2], ~flawed, flawed)
    assert two.ci95 is None and np.isfinite(two.value)
    assert left_out.change(hits, hits, ~flawed, flawed).ci95 is not None


def test_each_class_has_its_own_factor_to_new_images():
    """n / (n - 1), of the images of a class that are kept."""
    kept = np.array([True, True, True, False, True, True, True])
    classes = np.array([5, 5, 5, 5, 7, 7, 9])
    fewest, factor = left_out._class_sizes(kept, classes)
    assert fewest == 1
    np.testing.assert_allclose(factor, [1.5, 1.5, 1.5, 1.5, 2, 2, 1])
    fewest, factor = left_out._class_sizes(kept, None)
    assert fewest == 6
    np.testing.assert_allclose(factor, np.full(7, 1.2))


def test_hits_are_moved_by_the_mean_of_their_class():
    hits = np.array([[1.0, 0, 1, 1, 0], [1.0, 1, 0, 1, 0]])
    weight = np.array([0.1, 0.3, 0.1, 0.25, 0.25])
    classes = np.array([4, 4, 4, 9, 9])
    found = left_out._from_mean(hits, weight, classes)
    for row, moved in zip(hits, found):
        for label in (4, 9):
            of = classes == label
            mean = (weight[of] * row[of]).sum() / weight[of].sum()
            np.testing.assert_allclose(moved[of], row[of] - mean)
    whole = left_out._from_mean(hits, weight, None)
    np.testing.assert_allclose(whole, hits - hits @ weight[:, None])
    # Images that are left out move nothing, and divide by nothing
    none = left_out._from_mean(hits, np.array([0, 0, 0, 0.5, 0.5]), classes)
    np.testing.assert_allclose(none[:, :3], hits[:, :3])


def test_an_image_of_the_rarer_kind_is_of_it_in_some_draws_only():
    # Right in all draws, in half of them, and in none: three of four hits are right
    hits = np.array([[1, 1, 1, 1, 0, 1, 1, 1], [1, 1, 1, 0, 1, 0, 1, 1]], bool)
    wrong = [0.5, 0.5, 0.5]
    assert left_out._squared_move_of_rare_image(hits) == pytest.approx(
        np.mean(np.square(wrong))
    )
    # Of misses the hits are the rarer kind
    assert left_out._squared_move_of_rare_image(~hits) == pytest.approx(
        np.mean(np.square(wrong))
    )
    uneven = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]], bool)
    assert left_out._squared_move_of_rare_image(uneven) == pytest.approx(
        (1 + (1 / 3) ** 2) / 2
    )
    assert left_out._squared_move_of_rare_image(hits[:1]) == 1
    assert left_out._squared_move_of_rare_image(np.ones((2, 3), bool)) == 1
