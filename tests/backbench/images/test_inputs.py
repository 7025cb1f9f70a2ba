"""What a trunk reads: 8-bit pixels become numbers by the checkpoint's statistics."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from backbench.images.preprocess import Pixels, normalise, to_input

MEAN = (0.1, 0.4, 0.7)
STD = (0.2, 0.25, 0.5)
# Two pictures, higher than wide
PICTURES = np.random.default_rng(0).integers(0, 256, (2, 7, 5, 3), dtype=np.uint8)


def by_hand(pictures, order):
    """(..., H, W, 3) -> (..., 3, H, W), in float64."""
    channels = pictures if order == "RGB" else pictures[..., ::-1]
    return np.moveaxis((channels / 255 - MEAN) / STD, -1, -3)


@pytest.mark.parametrize("order", ["RGB", "BGR"])
def test_pixels_are_scaled_ordered_and_normalised(order):
    pixels = Pixels(MEAN, STD, order)
    wanted = torch.from_numpy(by_hand(PICTURES, order)).float()
    last = torch.from_numpy(PICTURES).permute(0, 3, 1, 2)  # as decoders leave them
    first = last.contiguous()
    slowly = normalise(first, pixels)
    torch.testing.assert_close(slowly, wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(normalise(last, pixels), slowly)
    assert torch.equal(normalise(last[0], pixels), slowly[0])
    # Views that were finished on a device are floats
    assert torch.equal(normalise(last.float(), pixels), slowly)


@pytest.mark.parametrize("order", ["RGB", "BGR"])
def test_a_picture_or_an_array_becomes_an_input(order):
    pixels = Pixels(MEAN, STD, order)
    array = PICTURES[1].copy()
    wanted = torch.from_numpy(by_hand(array, order)).float()
    for image in (array, Image.fromarray(array)):
        made = to_input(image, pixels)
        assert made.dtype == torch.float32
        torch.testing.assert_close(made, wanted, rtol=1e-6, atol=1e-6)
    assert (array == PICTURES[1]).all()


def test_the_usual_statistics_are_imagenets():
    assert Pixels() == Pixels((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "RGB")
    assert Pixels((0, 1, 0), (1, 1, 2)).std == (1, 1, 2)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"mean": (0.5, 0.5)}, r"mean must be three finite numbers, not \(0.5, 0.5\)"),
        ({"mean": (0.5, 0.5, math.nan)}, "mean must be three finite numbers"),
        ({"mean": ("0.5", 0.5, 0.5)}, "mean must be three finite numbers"),
        ({"std": (0.5, 0.5, 0.5, 0.5)}, "std must be three finite numbers"),
        ({"std": (0.5, math.inf, 0.5)}, "std must be three finite numbers"),
        ({"std": (0.5, 0.5, 0)}, r"std must be above 0, not \(0.5, 0.5, 0\)"),
        ({"std": (-0.5, 0.5, 0.5)}, "std must be above 0"),
        ({"order": "rgb"}, "order must be RGB or BGR, not rgb"),
    ],
)
def test_statistics_that_are_none_are_refused(values, says):
    with pytest.raises(ValueError, match=says):
        Pixels(**values)
