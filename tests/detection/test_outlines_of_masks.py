"""Polygons of an outline, whichever way a file writes it."""

import numpy as np
import pytest
from pycocotools import mask as mask_api

from backbench.detection.data import masks, outlines


def area(polygon):
    points = np.array(polygon).reshape(-1, 2)
    x, y = points.T
    return abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2


@pytest.mark.parametrize("outline", [None, [], {}])
def test_no_outline_has_no_polygon(outline):
    assert masks.outlines(outline) == []


def test_polygons_stay_as_they_are():
    polygons = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]
    assert masks.outlines(polygons) is polygons


@pytest.mark.parametrize("plain", [False, True])
def test_run_lengths_become_the_contours_of_their_parts(plain):
    mask = np.zeros((30, 40), np.uint8)
    mask[5:15, 10:30] = 1
    mask[20:28, 2:8] = 1
    mask[1, 1] = 1  # a single pixel is no polygon
    run_lengths = mask_api.encode(np.asfortranarray(mask))
    if plain:
        flat = mask.T.reshape(-1)
        change = np.flatnonzero(np.diff(flat)) + 1
        counts = np.diff([0, *change, flat.size]).tolist()
        run_lengths = {"size": [30, 40], "counts": counts}
    found = masks.outlines(run_lengths)
    # From the middle of a border's pixel to that of the other
    assert sorted(area(polygon) for polygon in found) == [5 * 7, 9 * 19]
    for polygon in found:
        assert len(polygon) >= 6 and all(isinstance(value, int) for value in polygon)


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (1, 1), (2, 5)])
def test_run_lengths_of_thin_images_have_a_box(shape):
    height, width = shape
    mask = np.zeros(shape, np.uint8)
    rows = slice(height // 3, max(1, height - height // 3))
    columns = slice(width // 3, max(1, width - width // 3))
    mask[rows, columns] = 1
    run_lengths = mask_api.encode(np.asfortranarray(mask))
    expected = mask_api.toBbox(run_lengths).tolist()
    in_file = {"size": [height, width], "counts": run_lengths["counts"].decode()}
    assert outlines.bounding_box(in_file) == expected
