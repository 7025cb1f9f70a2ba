"""Average precision of several labels an image: by loops, and as torchmetrics has it."""

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import multilabel_average_precision

from backbench.stats import label_ranking


def loop_precisions(score, present):
    """VOC's rules for one class, threshold by threshold; equal scores are taken together."""
    thresholds = sorted(set(score), reverse=True)
    points = []
    for threshold in thresholds:
        taken = [i for i in range(len(score)) if score[i] >= threshold]
        hits = sum(bool(present[i]) for i in taken)
        points.append((hits, hits / len(taken)))
    images = sum(map(bool, present))
    area = before = 0
    for hits, precision in points:
        area += (hits - before) / images * precision
        before = hits
    eleven = 0
    for tenth in range(11):
        reached = [p for hits, p in points if 10 * hits >= tenth * images]
        eleven += max(reached, default=0) / 11
    return area, eleven


def case(seed):
    """Random scores, in every other case with ties, and what is present and scored."""
    rng = np.random.default_rng(seed)
    images, classes = int(rng.integers(2, 40)), int(rng.integers(2, 6))
    score = rng.normal(size=(images, classes))
    if seed % 2:
        score = np.round(score)
    present = rng.random((images, classes)) < rng.uniform(0.1, 0.7)
    scored = rng.random((images, classes)) < 0.8
    return score, present, scored


def test_three_hundred_random_cases_equal_the_loop():
    for seed in range(300):
        score, present, scored = case(seed)
        areas, elevens = [], []
        for label in range(score.shape[1]):
            kept = scored[:, label]
            if present[kept, label].any():
                both = loop_precisions(score[kept, label], present[kept, label])
                areas.append(both[0])
                elevens.append(both[1])
        found = label_ranking.mean_precisions(score, present, scored)
        if not areas:
            assert np.isnan(found["map"]).all() and np.isnan(found["map11"]).all()
            continue
        assert found["map"][0] == pytest.approx(np.mean(areas), abs=1e-12)
        assert found["map11"][0] == pytest.approx(np.mean(elevens), abs=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_the_area_is_that_of_torchmetrics(seed):
    score, present, scored = case(seed)
    # torchmetrics wants probabilities, and a mark where an image is not scored
    ranks = np.unique(score, return_inverse=True)[1].reshape(score.shape)
    probability = torch.from_numpy((ranks + 1) / (ranks.max() + 2))
    label = torch.from_numpy(np.where(scored, present, -1))
    theirs = multilabel_average_precision(
        probability, label, score.shape[1], average="none", ignore_index=-1
    )
    there = (present & scored).any(0)
    if there.any():
        found = label_ranking.mean_precisions(score, present, scored)
        reference = float(np.atleast_1d(theirs.numpy())[there].mean())
        assert found["map"][0] == pytest.approx(reference, abs=1e-6)


def test_a_recall_of_three_tenths_is_reached_by_three_of_ten():
    """3 / 10 and 3 * 0.1 differ in the last bit; VOC's first recalls must not depend on it."""
    score = -np.arange(13.0)[:, None]
    present = np.array([1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1], bool)[:, None]
    found = label_ranking.mean_precisions(score, present, np.ones_like(present))
    _, eleven = loop_precisions(score[:, 0], present[:, 0])
    assert found["map11"][0] == pytest.approx(eleven, abs=1e-12)
    # Four recalls (0 to 0.3) are read at precision 1, seven at 10 of 13
    assert eleven == pytest.approx((4 + 7 * 10 / 13) / 11)


@pytest.mark.parametrize("seed", range(20))
def test_a_draw_is_the_list_with_images_as_often_as_drawn(seed):
    score, present, scored = case(seed)
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(len(score), np.full(len(score), 1 / len(score)), size=4)
    drawn = label_ranking.mean_precisions(score, present, scored, counts)
    for draw, times in enumerate(counts):
        copies = np.repeat(np.arange(len(score)), times)
        whole = label_ranking.mean_precisions(
            score[copies], present[copies], scored[copies]
        )
        for name in label_ranking.METRICS:
            np.testing.assert_allclose(drawn[name][draw], whole[name][0], atol=1e-12)


@pytest.mark.parametrize("at_once", [4_000_000, 30, 1])
def test_a_draw_of_images_is_scored_as_their_list_written_out(monkeypatch, at_once):
    """In blocks of all draws, of some, and of one; the third class is in few draws."""
    monkeypatch.setattr(label_ranking, "_AT_ONCE", at_once)
    rng = np.random.default_rng(3)
    score = np.round(rng.normal(size=(9, 3)), 1)
    present = rng.random((9, 3)) < 0.5
    present[:, 2] = np.arange(9) == 4
    scored = rng.random((9, 3)) < 0.8
    scored[4, 2] = True
    counts = np.stack(
        [np.bincount(rng.integers(0, 9, 9), minlength=9) for _ in range(7)]
    )
    counts[3] = 0
    found = label_ranking.mean_precisions(score, present, scored, counts)
    for draw, count in enumerate(counts):
        images = np.repeat(np.arange(9), count)
        both = []
        for label in range(3):
            kept = images[scored[images, label]]
            if present[kept, label].any():
                both.append(loop_precisions(score[kept, label], present[kept, label]))
        for name, values in zip(
            label_ranking.METRICS, np.transpose(both) if both else [[], []]
        ):
            mean = np.mean(values) if both else np.nan
            assert found[name][draw] == pytest.approx(mean, nan_ok=True)
    assert np.isnan(found["map"]).sum() == 1
