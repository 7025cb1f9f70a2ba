"""The colours of segmentation's training pictures, as mmseg's PhotoMetricDistortion changes them."""

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as F

from backbench.transfer.features.dense_views import distorted

# Nine numbers: whether and how much of brightness, contrast, saturation, hue; and the order
NOTHING = [0.9, 0.5, 0.9, 0.5, 0.9, 0.5, 0.9, 0.5, 0.9]
BRIGHTNESS, CONTRAST, SATURATION, HUE = 0, 2, 4, 6


def changed(**places):
    """The numbers with these steps on: place -> how much."""
    u = list(NOTHING)
    for place, much in places.items():
        index = {"brightness": 0, "contrast": 2, "saturation": 4, "hue": 6}.get(place)
        if index is None:
            u[8] = much
        else:
            u[index], u[index + 1] = 0.1, much
    return u


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)


def clipped(values):
    return np.clip(values, 0, 255).astype(np.uint8)


def test_nothing_may_happen(pixels):
    np.testing.assert_array_equal(distorted(pixels, NOTHING, 0.05), pixels)


@pytest.mark.parametrize(
    ("much", "offset"), [(0.0, -32), (0.5, 0), (0.75, 16), (1.0, 32)]
)
def test_brightness_moves_by_at_most_32(pixels, much, offset):
    found = distorted(pixels, changed(brightness=much), 0.05)
    np.testing.assert_array_equal(found, clipped(pixels.astype(float) + offset))


@pytest.mark.parametrize("order", [0.1, 0.9])
@pytest.mark.parametrize(("much", "factor"), [(0.0, 0.5), (0.5, 1.0), (1.0, 1.5)])
def test_contrast_scales_from_a_half_to_one_and_a_half(pixels, much, factor, order):
    found = distorted(pixels, changed(contrast=much, order=order), 0.05)
    np.testing.assert_array_equal(found, clipped(pixels.astype(np.float32) * factor))


def channels(pixels):
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def test_saturation_and_hue_are_torchvisions(pixels):
    found = distorted(pixels, changed(saturation=0.9), 0.05)
    expected = F.adjust_saturation(channels(pixels), 1.4).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(found, expected)
    found = distorted(pixels, changed(hue=0.75), 0.05)
    expected = F.adjust_hue(channels(pixels), 0.025).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(found, expected)


def test_contrast_stands_before_or_behind_the_colours(pixels):
    both = {"contrast": 1.0, "saturation": 0.0}
    first = distorted(pixels, changed(**both, order=0.1), 0.05)
    last = distorted(pixels, changed(**both, order=0.9), 0.05)
    brighter = clipped(pixels.astype(np.float32) * 1.5)
    expected = F.adjust_saturation(channels(brighter), 0.5).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(first, expected)
    assert (first != last).any()


def test_each_step_happens_with_probability_one_half(pixels):
    """The numbers are from 0 to 1: below a half it happens."""
    for place in (BRIGHTNESS, CONTRAST, SATURATION, HUE):
        u = list(NOTHING)
        u[place], u[place + 1] = 0.49, 0.95
        assert (distorted(pixels, u, 0.2) != pixels).any()
        u[place] = 0.5
        np.testing.assert_array_equal(distorted(pixels, u, 0.2), pixels)
