"""Compares AP on resamples with the plain loop over a list in which images are written out."""

import numpy as np
import pytest

from backbench.stats import coco_ap


def plain_ap(hits, misses, objects):
    """Compute AP of ranked detections one after another, in COCOeval.accumulate's steps."""
    true = np.cumsum(hits).astype(float)
    false = np.cumsum(misses).astype(float)
    precision = (true / (true + false + np.spacing(1))).tolist()
    for i in range(len(precision) - 1, 0, -1):
        precision[i - 1] = max(precision[i - 1], precision[i])
    read_off = np.zeros(101)
    first = np.searchsorted(true / objects, np.linspace(0, 1, 101), side="left")
    for r, place in enumerate(first):
        if place < len(precision):
            read_off[r] = precision[place]
    return read_off.mean()


def random_case(rng):
    """Return a category's ranked detections, with ties of score between images, ignored detections
    that differ by threshold, and images without detections or objects."""
    images = int(rng.integers(1, 40))
    detections = int(rng.choice([0, 1, 5, 60, 400]))
    image = rng.integers(0, images, detections)
    # Few scores, so that many are equal: of equals the first image's come first
    score = rng.integers(0, 9, detections)
    image = image[np.lexsort((image, -score))]
    quality = rng.random(detections)
    hit = quality < np.linspace(rng.random(), 0, 4)[:, None]
    ignored = rng.random((4, detections)) < rng.choice([0, 0.02, 0.5])
    # Hits alone, which leave no recall to be missed, or more objects than hits
    truths = np.bincount(image[hit[0]], minlength=images).astype(float)
    truths += rng.choice([0, 1, 20]) * (rng.random(images) < 0.5)
    return coco_ap.RankedDetections(image, hit & ~ignored, ~hit & ~ignored, truths)


@pytest.mark.parametrize(
    "block,counts", [(coco_ap.BLOCK, np.int32), (700, np.int32), (700, np.int64)]
)
def test_equals_the_plain_loop_bit_by_bit(monkeypatch, block, counts):
    monkeypatch.setattr(coco_ap, "BLOCK", block)
    rng = np.random.default_rng(5)
    compared = 0
    for _ in range(60):
        ranked = random_case(rng)
        images = len(ranked.truths)
        drawn = rng.integers(0, images, (7, images))
        weights = np.stack([np.bincount(d, minlength=images) for d in drawn])
        weights[0] = 0  # no image at all: a draw without hits between others
        weights = weights[rng.permutation(7)].astype(counts)
        found = coco_ap.aps(ranked, weights)
        assert found.shape == (7, 4)
        for draw, weight in enumerate(weights):
            objects = weight @ ranked.truths
            if objects == 0:
                continue
            copies = np.repeat(np.arange(len(ranked.image)), weight[ranked.image])
            for t in range(4):
                hits, misses = ranked.hit[t, copies], ranked.miss[t, copies]
                # Copies of one detection are one hit of several: between them nothing is read off
                assert found[draw, t] == plain_ap(hits, misses, objects)
                compared += 1
    assert compared > 1000


def test_a_category_without_objects_has_no_precision():
    none = np.zeros((1, 3), bool)
    ranked = coco_ap.RankedDetections(np.array([0, 0, 1]), none, ~none, np.zeros(2))
    assert (coco_ap.aps(ranked, np.ones((5, 2), np.intp)) == 0).all()
