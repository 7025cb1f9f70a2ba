"""VOC's AP of draws by hand, and of more draws than are computed at once."""

import numpy as np
import pytest
import torch

from backbench.detection import voc_ap
from backbench.detection.voc_ap import VocDetections, VocObjects


def detections(*rows):
    """Detections (image, score, box)."""
    image, scores, boxes = zip(*rows, strict=True)
    return VocDetections(np.array(image), np.array(scores), np.array(boxes, float))


def objects(*boxes, difficult=()):
    hard = np.array([n in difficult for n in range(len(boxes))])
    return VocObjects(np.array(boxes, float), hard)


BOX, OTHER, FAR = [1, 1, 20, 10], [31, 1, 50, 10], [61, 61, 70, 70]
NEARER = [1, 1, 20, 14]  # 200 of 280 pixels: above 0.7, below 0.75


def aps(found, truths, draws, *, elevens=False):
    weights = torch.tensor(draws, dtype=torch.float64)
    return voc_ap.aps(found, truths, weights, elevens=elevens)


def test_an_ap_follows_from_hits_and_misses():
    """In the order of scores: a hit, a miss, the same object again, the other object."""
    found = detections((0, 0.9, BOX), (1, 0.8, FAR), (0, 0.7, BOX), (0, 0.6, OTHER))
    truths = {0: objects(BOX, OTHER)}
    # Precision is 1 up to a recall of a half, then a half
    (of_all,) = aps(found, truths, [[1, 1, 0]])
    assert of_all.tolist() == pytest.approx([0.75] * 10)
    (of_all,) = aps(found, truths, [[1, 1, 0]], elevens=True)
    assert of_all.tolist() == pytest.approx([(6 + 5 * 0.5) / 11] * 10)
    # The image twice, without the other's miss: 2 of 2, then 4 of 6
    twice, none, beside = aps(found, truths, [[2, 0, 0], [0, 3, 0], [0, 0, 1]])
    assert twice.tolist() == pytest.approx([0.5 + 0.5 * 4 / 6] * 10)
    assert none.tolist() == beside.tolist() == [0] * 10


def test_a_difficult_object_is_neither_hit_nor_miss():
    found = detections((0, 0.9, BOX), (0, 0.8, BOX), (0, 0.7, OTHER))
    truths = {0: objects(BOX, OTHER, difficult=(0,))}
    assert aps(found, truths, [[1]]).tolist() == [[1] * 10]
    assert aps(found, truths, [[1]], elevens=True).tolist() == [[1] * 10]
    # Both objects are difficult, so there is none to find
    truths = {0: objects(BOX, OTHER, difficult=(0, 1))}
    assert aps(found, truths, [[1]]).tolist() == [[0] * 10]
    assert aps(found, truths, [[1]], elevens=True).tolist() == [[0] * 10]


def test_a_hit_overlaps_by_more_than_the_threshold():
    """Corners are inclusive: 20 x 10 pixels of 20 x 14."""
    found = detections((0, 0.9, NEARER))
    (of_all,) = aps(found, {0: objects(FAR, BOX)}, [[1]])
    assert of_all.tolist() == [0.5] * 5 + [0] * 5
    half = detections((0, 0.9, [1, 1, 20, 20]))
    (of_all,) = aps(half, {0: objects(BOX)}, [[1]])
    assert of_all.tolist() == [0] * 10


@pytest.mark.parametrize("elevens", [False, True])
def test_many_draws_are_as_each_alone(elevens):
    rng = np.random.default_rng(0)
    truths = {
        n: objects(BOX, OTHER, difficult=(0,) if n == 2 else ()) for n in range(4)
    }
    rows = []
    for _ in range(30):
        near = np.array([BOX, OTHER, FAR][rng.integers(3)]) + rng.integers(-3, 4, 4)
        rows.append((int(rng.integers(5)), float(rng.random()), near))
    found = detections(*rows)
    draws = rng.integers(0, 3, (2 * voc_ap.CHUNK + 7, 5)).tolist()
    together = aps(found, truths, draws, elevens=elevens)
    assert together.shape == (2 * voc_ap.CHUNK + 7, 10)
    for place in (0, 49, 50, 51, 99, 100, 106):
        (alone,) = aps(found, truths, draws[place : place + 1], elevens=elevens)
        assert torch.equal(together[place], alone)
        assert alone[0] > 0
    assert len(together[:, 0].unique()) > 50


def test_the_evaluators_lines_are_rounded_and_count_from_one():
    found = [
        {
            "image_id": "b",
            "category_id": 2,
            "bbox": [0.04, 9.96, 5, 7],
            "score": 0.12345,
        },
        {"image_id": "a", "category_id": 0, "bbox": [3, 4, 10, 20], "score": 1.0},
        {"image_id": "a", "category_id": 2, "bbox": [0, 0, 1, 1], "score": 0.9996},
    ]
    assert voc_ap.lines_by_label(found) == {
        2: ["b 0.123 1.0 11.0 5.0 17.0", "a 1.000 1.0 1.0 1.0 1.0"],
        0: ["a 1.000 4.0 5.0 13.0 24.0"],
    }
