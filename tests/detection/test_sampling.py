"""Draws, anchors and levels of our proposal network and heads, by hand."""

from types import SimpleNamespace

import pytest
import torch

from backbench.detection.rcnn import roi_heads, rpn
from backbench.errors import BadInput


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def draw(*labels, size=6, fraction=0.5, seeds=None):
    sampler = rpn.BalancedSampler(size, fraction)
    sampler.generators = seeds
    return sampler([torch.tensor(of_image) for of_image in labels])


@pytest.mark.parametrize(
    ("labels", "positives", "negatives"),
    [
        ([1] * 9 + [0] * 9, 3, 3),
        ([2, 1] + [0] * 9, 2, 4),
        ([1] * 9 + [0], 3, 1),
        ([0] * 9, 0, 6),
        ([1] * 9, 3, 0),
        ([-1] * 9, 0, 0),
    ],
)
def test_negatives_fill_what_positives_leave_free(labels, positives, negatives):
    (drawn,) = draw(labels)
    of = [labels[i] for i in drawn.positive.tolist()]
    assert len(of) == positives and all(label >= 1 for label in of)
    sampled = drawn.sampled.tolist()
    assert sampled == sorted(set(sampled))
    assert sum(labels[i] >= 1 for i in sampled) == positives
    assert sum(labels[i] == 0 for i in sampled) == negatives
    assert len(sampled) == positives + negatives
    assert set(drawn.positive.tolist()) <= set(sampled)


def test_each_image_has_its_own_counts_and_draws():
    first = [1, -1, 0, 1, 0, 0, 1, 0, 1, 1]
    second = [0, 0, -1, 1, 0, 0, 0, 0, 0, 0]
    both = draw(first, second, seeds=generators(1, 2))
    for labels, drawn, seed in zip((first, second), both, (1, 2), strict=True):
        (alone,) = draw(labels, seeds=generators(seed))
        assert torch.equal(drawn.sampled, alone.sampled)
        assert torch.equal(drawn.positive, alone.positive)
    assert both[1].positive.tolist() == [3]
    # All are drawn as often
    counts = torch.zeros(10)
    for seed in range(300):
        (drawn,) = draw(first, seeds=generators(seed))
        counts[drawn.sampled] += 1
    assert counts[1] == 0
    positive = counts[[0, 3, 6, 8, 9]]
    assert positive.sum() == 900 and positive.min() > 130
    assert counts[[2, 4, 5, 7]].sum() == 900


def test_indices_of_several_masks():
    masks = [[True, False, True], [False] * 4, [True], [False, True]]
    found = rpn.true_indices([torch.tensor(mask) for mask in masks])
    assert [indices.tolist() for indices in found] == [[0, 2], [], [0], [1]]


def test_a_smooth_loss_is_quadratic_below_beta():
    x, y = torch.tensor([0.0, 1, 4]), torch.tensor([0.5, 3, 1])
    assert float(rpn.smooth_l1(x, y, 0.0)) == 5.5
    # 0.5^2 / 2 / 1, then each less a half
    assert float(rpn.smooth_l1(x, y, 1.0)) == 0.125 + 1.5 + 2.5


def test_anchors_have_the_area_of_their_size_and_the_ratio():
    found = rpn.base_anchors([32, 10], [0.5, 1, 2])
    assert found.shape == (6, 4)
    for row, (size, ratio) in zip(
        found, [(s, r) for s in (32, 10) for r in (0.5, 1, 2)], strict=True
    ):
        x1, y1, x2, y2 = row.tolist()
        assert (x1, y1) == (-x2, -y2)
        width, height = x2 - x1, y2 - y1
        assert width * height == pytest.approx(size**2)
        assert height / width == pytest.approx(ratio)


def test_each_object_keeps_the_anchors_that_overlap_it_most():
    overlaps = torch.tensor([[0.6, 0.1, 0.2, 0.0], [0.1, 0.25, 0.2, 0.25]])
    matcher = rpn.QuietMatcher(0.7, 0.3, allow_low_quality_matches=True)
    # No overlap is a match by itself; equals are kept both
    assert matcher(overlaps).tolist() == [0, 1, -1, 1]


def test_five_levels_are_needed():
    anchors = SimpleNamespace(SIZES=[[32]] * 4, ASPECT_RATIOS=[[1.0]])
    cfg = SimpleNamespace(MODEL=SimpleNamespace(RPN=None, ANCHOR_GENERATOR=anchors))
    with pytest.raises(BadInput) as error:
        rpn.build_rpn(cfg)
    said = "MODEL.ANCHOR_GENERATOR.SIZES: 4 levels instead of the FPN's 5"
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("width", "height", "level"),
    [
        (10, 10, 0),
        (111, 111, 0),
        (112, 112, 1),
        (223, 223, 1),
        (224, 224, 2),
        (112, 448, 2),
        (56, 448, 1),
        (447, 447, 2),
        (448, 448, 3),
        (900, 900, 3),
    ],
)
def test_a_box_is_pooled_from_the_level_of_its_size_in_its_image(width, height, level):
    """Every map holds its own level, and the image's number."""
    maps = {}
    for number in range(4):
        side = 1024 // 2 ** (number + 2)
        filled = torch.full((2, 1, side, side), float(number))
        filled[1] += 100
        maps[str(number)] = filled
    box = torch.tensor([[50.0, 60, 50 + width, 60 + height]])
    small = torch.tensor([[5.0, 5, 20, 20]])
    pooled = roi_heads.LevelPool(3)(maps, [torch.cat([small, box]), box])
    assert pooled.shape == (3, 1, 3, 3)
    found = [of_box.round().unique().tolist() for of_box in pooled]
    assert found == [[0], [level], [100 + level]]


def test_a_sum_is_divided_by_one_at_least():
    device = torch.device("cpu")
    counts = [roi_heads.per_rank(count, device).item() for count in (0, 1, 7)]
    assert counts == [1, 1, 7]
