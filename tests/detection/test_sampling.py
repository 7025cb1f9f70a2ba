"""Draws, anchors and levels of our proposal network and heads, by hand."""

from types import SimpleNamespace

import pytest
import torch
from fvcore.common.config import CfgNode

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


# ---- What a config builds

SIZES = [[8.0 * 2**level, 12.0 * 2**level] for level in range(5)]


def a_config():
    """A config in which no two numbers are alike."""
    model = {
        "FPN": {"OUT_CHANNELS": 8},
        "ANCHOR_GENERATOR": {"SIZES": SIZES, "ASPECT_RATIOS": [[0.5, 1.0, 2.0]]},
        "RPN": {
            "IOU_THRESHOLDS": [0.25, 0.65],
            "BATCH_SIZE_PER_IMAGE": 31,
            "POSITIVE_FRACTION": 0.4,
            "PRE_NMS_TOPK_TRAIN": 11,
            "PRE_NMS_TOPK_TEST": 12,
            "POST_NMS_TOPK_TRAIN": 13,
            "POST_NMS_TOPK_TEST": 14,
            "NMS_THRESH": 0.72,
            "SMOOTH_L1_BETA": 0.3,
        },
        "ROI_HEADS": {
            "NUM_CLASSES": 4,
            "IOU_THRESHOLDS": [0.55],
            "BATCH_SIZE_PER_IMAGE": 21,
            "POSITIVE_FRACTION": 0.35,
            "SCORE_THRESH_TEST": 0.07,
            "NMS_THRESH_TEST": 0.45,
        },
        "ROI_BOX_HEAD": {"POOLER_RESOLUTION": 3, "FC_DIM": 16, "SMOOTH_L1_BETA": 0.2},
        "ROI_MASK_HEAD": {"POOLER_RESOLUTION": 5, "CONV_DIM": 12, "NUM_CONV": 3},
        "ROI_KEYPOINT_HEAD": {
            "POOLER_RESOLUTION": 6,
            "CONV_DIMS": (9, 10),
            "NUM_KEYPOINTS": 7,
        },
        "MASK_ON": True,
        "KEYPOINT_ON": True,
    }
    return CfgNode({"MODEL": model, "TEST": {"DETECTIONS_PER_IMAGE": 17}})


def test_proposals_are_as_the_config_says():
    made = rpn.build_rpn(a_config())
    assert made.beta == 0.3
    assert (made.fg_bg_sampler.size, made.fg_bg_sampler.fraction) == (31, 0.4)
    matcher = made.proposal_matcher
    assert (matcher.low_threshold, matcher.high_threshold) == (0.25, 0.65)
    assert matcher.allow_low_quality_matches
    assert made.nms_thresh == 0.72
    for mode, kept in ((True, (11, 13)), (False, (12, 14))):
        made.train(mode)
        assert (made.pre_nms_top_n(), made.post_nms_top_n()) == kept
    assert made.head.cls_logits.weight.shape[:2] == (6, 8)
    cells = made.anchor_generator.cell_anchors
    for cell, sizes in zip(cells, SIZES, strict=True):
        assert torch.equal(cell, rpn.base_anchors(sizes, [0.5, 1.0, 2.0]))


def test_heads_are_as_the_config_says():
    made = roi_heads.build_heads(a_config())
    assert made.beta == 0.2
    assert (made.fg_bg_sampler.size, made.fg_bg_sampler.fraction) == (21, 0.35)
    matcher = made.proposal_matcher
    assert (matcher.low_threshold, matcher.high_threshold) == (0.55, 0.55)
    assert not matcher.allow_low_quality_matches
    assert made.box_coder.weights == (10.0, 10.0, 5.0, 5.0)
    assert (made.score_thresh, made.nms_thresh) == (0.07, 0.45)
    assert made.detections_per_img == 17
    pools = (made.box_roi_pool, made.mask_roi_pool, made.keypoint_roi_pool)
    assert [pool.size for pool in pools] == [3, 5, 6]
    shapes = {name: tuple(x.shape) for name, x in made.named_parameters()}
    assert shapes["box_head.fc6.weight"] == (16, 8 * 3 * 3)
    assert shapes["box_predictor.cls_score.weight"] == (5, 16)
    assert shapes["box_predictor.bbox_pred.weight"] == (4 * 5, 16)
    layers = [shapes[f"mask_head.{n}.0.weight"][:2] for n in range(3)]
    assert layers == [(12, 8), (12, 12), (12, 12)]
    assert shapes["mask_predictor.mask_fcn_logits.weight"] == (5, 12, 1, 1)
    convolutions = [
        shape[:2]
        for name, shape in shapes.items()
        if name.startswith("keypoint_head") and len(shape) == 4
    ]
    assert convolutions == [(9, 8), (10, 9)]
    assert shapes["keypoint_predictor.kps_score_lowres.weight"][:2] == (10, 7)


def test_the_surest_boxes_of_each_level_are_proposed_by_their_logits():
    """Two levels of three anchors; the sigmoid of all is 1 in float32."""
    made = rpn.build_rpn(a_config()).eval()
    made._pre_nms_top_n = {"testing": 2}
    made._post_nms_top_n = {"testing": 2}
    apart = [[40.0 * n, 0, 40.0 * n + 20, 10] for n in range(6)]
    apart[4] = [300.0, 5, 330, 9]  # beside an image of 200 x 30 pixels
    logits = torch.tensor([[50.0, 70, 60, 90, 99, 80]]).reshape(-1, 1)
    boxes, sure = made.filter_proposals(
        torch.tensor([apart]), logits, [(30, 200)], [3, 3]
    )
    # Of the first level 1 and 2, of the second 3 and 4, of which 4 is empty when cut
    assert sure[0].tolist() == [90, 70]
    assert boxes[0].tolist() == [apart[3], apart[1]]
