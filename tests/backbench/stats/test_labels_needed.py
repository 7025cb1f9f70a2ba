"""The labels that a curve needs, by hand and on simulated curves whose true number is known."""

import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from backbench.stats import labels_needed, paired_differences
from backbench.stats.labels_needed import BELOW, BEYOND

LABELS = [1, 10, 100]


def shares(*right, draws=5, images=1000):
    """Hits (P, D, N) of which each point has a share, the same images in all draws."""
    hits = np.zeros((len(right), draws, images), dtype=bool)
    for point, share in enumerate(right):
        hits[point, :, : round(share * images)] = True
    return hits


@pytest.mark.parametrize(
    ("target", "needed"),
    [
        (0.2, 1),
        (0.4, 10),
        # Half of the way in accuracy is half of the way in the logarithm
        (0.3, math.sqrt(10)),
        (0.6, 10 * math.sqrt(10)),
        (0.8, 100),
        (0.1, BELOW),
        (0.9, BEYOND),
    ],
)
def test_a_curve_is_interpolated_on_the_logarithm_of_its_labels(target, needed):
    found = labels_needed.compare(shares(target)[0], shares(0.2, 0.4, 0.8), LABELS)
    assert found.value == pytest.approx(needed, rel=1e-6)
    low, high = found.ci95
    assert low <= found.value * (1 + 1e-6) and found.value <= high * (1 + 1e-6)


def test_of_a_curve_that_falls_again_the_first_number_counts():
    curve = shares(0.2, 0.6, 0.5)
    found = labels_needed.compare(shares(0.6)[0], curve, LABELS)
    assert found.value == pytest.approx(10)
    assert labels_needed.compare(shares(0.5)[0], curve, LABELS).value < 10


def test_ends_out_of_reach_are_said_and_few_draws_have_no_interval():
    far_below = labels_needed.compare(shares(0.05)[0], shares(0.5, 0.6, 0.7), LABELS)
    assert (far_below.value, far_below.ci95) == (BELOW, (BELOW, BELOW))
    far_above = labels_needed.compare(shares(0.95)[0], shares(0.5, 0.6, 0.7), LABELS)
    assert (far_above.value, far_above.ci95) == (BEYOND, (BEYOND, BEYOND))
    for draws in (1, 2):
        target, *curve = shares(0.55, 0.5, 0.6, 0.7, draws=draws)
        few = labels_needed.compare(target, np.stack(curve), LABELS)
        assert few.ci95 is None and few.value == pytest.approx(math.sqrt(10))


@pytest.mark.parametrize("draws", [3, 4])
def test_the_interval_ends_where_the_paired_test_turns(draws):
    """Between two points the test is that of four mixtures of their hits."""
    rng = np.random.default_rng(2)
    hard = rng.random(80)
    target = (hard + rng.random((draws, 80))) / 2 < 0.6
    curve = (hard + rng.random((3, draws, 80))) / 2 < [[[0.4]], [[0.55]], [[0.75]]]
    logs = []
    ratios = []
    for before, behind in ((0, 1), (1, 2)):
        for quarter in range(4):
            share = quarter / 4
            mixed = (1 - share) * curve[before] + share * curve[behind]
            gap = mixed - target
            found = paired_differences.of_draws_and_images(gap)
            logs.append(np.interp(before + share, [0, 1, 2], np.log(LABELS)))
            ratios.append(found.value / (found.ci95[1] - found.value))
    last = paired_differences.of_draws_and_images(1.0 * curve[2] - target)
    logs.append(math.log(100))
    ratios.append(last.value / (last.ci95[1] - last.value))
    # The test stops to say worse behind the last mixture below -1, and says better behind the last
    # one below 1
    ends = []
    for half_widths in (-1, 1):
        before = sum(ratio < half_widths for ratio in ratios) - 1
        assert ratios[before] < half_widths < ratios[before + 1]
        part = slice(before, before + 2)
        ends.append(math.exp(np.interp(half_widths, ratios[part], logs[part])))
    found = labels_needed.compare(target, curve, LABELS)
    assert found.ci95 == pytest.approx(ends)


def test_class_means_count_a_rare_class_as_much():
    # Class 1 has a tenth of the images, and the curve is right on all of it from the second point
    classes = np.repeat([0, 1], [900, 100])
    rare = classes == 1
    nothing = np.zeros(1000, dtype=bool)
    curve = np.stack([np.stack([one] * 5) for one in (nothing, rare, ~nothing)])
    target = np.stack([nothing | (np.arange(1000) < 450)] * 5)
    plain = labels_needed.compare(target, curve, LABELS)
    by_class = labels_needed.compare(target, curve, LABELS, classes)
    assert plain.value == pytest.approx(10 * 10 ** ((0.45 - 0.1) / 0.9))
    assert by_class.value == pytest.approx(math.sqrt(10))


def test_the_interval_holds_the_true_number_in_95_of_100_repeats():
    """A hit is a sum of normals above 0: of the point, the draw, the image and both."""
    rng = np.random.default_rng(5)
    spreads = (0.15, 0.8, 0.6)  # of a draw, an image and both
    whole = math.sqrt(sum(s**2 for s in spreads))
    points = [0.3, 0.5, 0.65, 0.72]
    centre = ndtri(points) * whole
    labels = [1, 5, 25, 125]
    true = 5 * 5 ** ((0.6 - 0.5) / (0.65 - 0.5))
    too_high = 0
    too_low = 0
    repeats = 1000
    for _ in range(repeats):
        draw = spreads[0] * rng.normal(size=(2, 1, 8, 1))
        image = spreads[1] * rng.normal(size=(1, 1, 1, 300))
        both = spreads[2] * rng.normal(size=(5, 8, 300))
        curve = centre[:, None, None] + draw[0] + image[0] + both[:4] > 0
        target = ndtri(0.6) * whole + draw[1, 0] + image[0, 0] + both[4] > 0
        low, high = labels_needed.compare(target, curve, labels).ci95
        too_high += true < low
        too_low += high < true
    assert ndtr(centre / whole) == pytest.approx(points)
    # 2.5% each, and three standard errors of 1000 repeats
    assert 0.01 <= too_high / repeats <= 0.04
    assert 0.01 <= too_low / repeats <= 0.04
