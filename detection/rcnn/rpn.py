"""The proposal network of the torchvision engine: torchvision's, with Detectron2's rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import boxes as box_ops

from backbench.errors import BadInput
from backbench.parallel import distributed

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

LEVELS = 5  # P2 to P6


class Drawn(NamedTuple):
    """The indices of the drawn anchors or proposals of one image, rising."""

    positive: Tensor
    sampled: Tensor  # both positive and negative


class BalancedSampler:
    """Draws at most `size` anchors or proposals per image without replacement, at most `fraction` of
    them positive: detectron2/modeling/sampling.py::subsample_labels.

    `generators`, one per image, make its draws independent of all else. With None it draws from
    torch's global generator, in Detectron2's order.
    """

    def __init__(self, size: int, fraction: float) -> None:
        self.size = size
        self.fraction = fraction
        self.generators: Sequence[torch.Generator] | None = None

    def __call__(self, labels: Sequence[Tensor]) -> list[Drawn]:
        """Draw from labels (A,) of each image: >= 1 is positive, 0 negative, -1 ignored."""
        is_positive = [label >= 1 for label in labels]
        is_negative = [label == 0 for label in labels]
        # On a GPU, reading a number waits for it: all counts are read at once.
        sums = [mask.sum() for mask in (*is_positive, *is_negative)]
        counts = torch.stack(sums).tolist()
        positives = counts[: len(labels)]
        negatives = counts[len(labels) :]
        out = []
        for i in range(len(labels)):
            generator = None
            if self.generators is not None:
                generator = self.generators[i]
            # Negatives fill what positives leave free.
            n_positive = min(positives[i], int(self.size * self.fraction))
            n_negative = min(negatives[i], self.size - n_positive)
            positive = _draw(is_positive[i], positives[i], n_positive, generator)
            negative = _draw(is_negative[i], negatives[i], n_negative, generator)
            sampled = torch.cat([positive, negative]).sort().values
            out.append(Drawn(positive, sampled))
        return out


def _draw(
    mask: Tensor, count: int, wanted: int, generator: torch.Generator | None
) -> Tensor:
    """Draw `wanted` of the `count` indices where the mask is true, and return them rising.

    It draws on the CPU, so that a run on a GPU draws the same.
    """
    chosen = torch.randperm(count, generator=generator)[:wanted].sort().values
    return _nth_true(distributed.sent(chosen, mask.device), mask)


def _nth_true(numbers: Tensor, mask: Tensor) -> Tensor:
    """Return, for each number n, the index where the mask (A,) is true for the n-th time, from 0."""
    # That index is the first up to which n + 1 are true.
    return torch.searchsorted(mask.cumsum(0), numbers + 1)


def true_indices(masks: Sequence[Tensor]) -> list[Tensor]:
    """Return the indices where each mask (n,) is true; a GPU is waited for once for all masks."""
    counts = torch.stack([mask.sum() for mask in masks]).tolist()
    out = []
    for count, mask in zip(counts, masks):
        out.append(_nth_true(torch.arange(count, device=mask.device), mask))
    return out


class QuietMatcher(Matcher):
    """torchvision's Matcher, but its step for low-quality matches does not wait for the GPU."""

    def set_low_quality_matches_(
        self, matches: Tensor, all_matches: Tensor, match_quality_matrix: Tensor
    ) -> None:
        """Keep, for each object, the anchors that overlap it most, however little that is.

        The matrix (objects, anchors) holds the overlaps.
        """
        best = match_quality_matrix.amax(1, keepdim=True)
        chosen = (match_quality_matrix == best).any(0)
        matches.copy_(torch.where(chosen, all_matches, matches))


def smooth_l1(x: Tensor, y: Tensor, beta: float) -> Tensor:
    """Compute the smooth L1 loss, summed; beta 0 is L1. torchvision's losses have beta 1/9."""
    if beta == 0:
        return F.l1_loss(x, y, reduction="sum")
    return F.smooth_l1_loss(x, y, beta=beta, reduction="sum")


class FullPrecisionHead(RPNHead):
    """torchvision's head, but its outputs are float32 under autocast, too: the 8 or 11 bits of
    half precision cannot hold boxes of a thousand pixels (Box2BoxTransform.apply_deltas of
    Detectron2 casts them as well)."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, deltas = super().forward(x)
        return [v.float() for v in logits], [v.float() for v in deltas]


class RPN(RegionProposalNetwork):
    """torchvision's network with Detectron2's ranking of proposals and Detectron2's losses."""

    beta = 0.0

    def filter_proposals(
        self,
        proposals: Tensor,
        objectness: Tensor,
        image_shapes: list[tuple[int, int]],
        num_anchors_per_level: list[int],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Choose proposals, as find_top_rpn_proposals of
        detectron2/modeling/proposal_generator/proposal_utils.py.

        Takes proposals (N, A, 4) and logits (N A, 1). Returns boxes (n, 4) and logits (n,) of each
        image, the surest first. They are ranked by logits: torchvision ranks by the sigmoids, which
        are all 1 for sure boxes.
        """
        # 1. The best of each level
        logits = objectness.detach().reshape(len(proposals), -1)
        best = self._get_top_n_idx(logits, num_anchors_per_level)
        levels = []
        for number, anchors in enumerate(num_anchors_per_level):
            levels.append(torch.full((anchors,), number, device=logits.device))
        level = torch.cat(levels)
        # 2. They are cut to the image; those that are empty then go.
        cut = []
        for i, shape in enumerate(image_shapes):
            cut.append(box_ops.clip_boxes_to_image(proposals[i, best[i]], shape))
        has_area = [(b[:, 2] > b[:, 0]) & (b[:, 3] > b[:, 1]) for b in cut]
        boxes_out = []
        logits_out = []
        for i, kept in enumerate(true_indices(has_area)):
            kept_boxes = cut[i][kept]
            kept_logits = logits[i, best[i]][kept]
            kept_levels = level[best[i]][kept]
            # 3. NMS within each level, then the best of all levels
            after_nms = box_ops.batched_nms(
                kept_boxes, kept_logits, kept_levels, self.nms_thresh
            )
            top = after_nms[: self.post_nms_top_n()]
            boxes_out.append(kept_boxes[top])
            logits_out.append(kept_logits[top])
        return boxes_out, logits_out

    def compute_loss(
        self,
        objectness: Tensor,
        pred_bbox_deltas: Tensor,
        labels: list[Tensor],
        regression_targets: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Compute the losses of objectness and of boxes, as RPN.losses of
        detectron2/modeling/proposal_generator/rpn.py.

        Both are divided by the number of anchors that were asked for; torchvision divides by those
        that were found.
        """
        # Indices in an image become indices in the batch.
        positives = []
        sampled = []
        for i, drawn in enumerate(self.fg_bg_sampler(labels)):
            first = i * len(labels[0])
            positives.append(drawn.positive + first)
            sampled.append(drawn.sampled + first)
        positive_indices = torch.cat(positives)
        sampled_indices = torch.cat(sampled)
        loss_objectness = F.binary_cross_entropy_with_logits(
            objectness.flatten()[sampled_indices],
            torch.cat(labels)[sampled_indices],
            reduction="sum",
        )
        loss_boxes = smooth_l1(
            pred_bbox_deltas[positive_indices],
            torch.cat(regression_targets)[positive_indices],
            self.beta,
        )
        count = self.fg_bg_sampler.size * len(labels)
        return loss_objectness / count, loss_boxes / count


def build_rpn(cfg: CfgNode) -> RPN:
    """Build the proposal network that MODEL.RPN and MODEL.ANCHOR_GENERATOR describe."""
    rpn_cfg = cfg.MODEL.RPN
    sizes = cfg.MODEL.ANCHOR_GENERATOR.SIZES
    of_levels = cfg.MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS
    if len(of_levels) != 1:
        raise BadInput(
            f"MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS {of_levels}: this engine has one list for all"
            " levels, as [[0.5, 1.0, 2.0]]; give one, or add --engine detectron2"
        )
    (ratios,) = of_levels
    if len(sizes) != LEVELS:
        raise BadInput(
            f"MODEL.ANCHOR_GENERATOR.SIZES: {len(sizes)} levels instead of the FPN's {LEVELS}"
        )
    level_sizes = tuple(tuple(map(float, of_level)) for of_level in sizes)
    anchors = AnchorGenerator(level_sizes, (tuple(ratios),) * LEVELS)
    # torchvision rounds its base anchors; Detectron2 does not.
    anchors.cell_anchors = [base_anchors(of_level, ratios) for of_level in sizes]
    channels = cfg.MODEL.FPN.OUT_CHANNELS
    if len(rpn_cfg.IOU_THRESHOLDS) != 2:
        raise BadInput(
            f"MODEL.RPN.IOU_THRESHOLDS {rpn_cfg.IOU_THRESHOLDS}: this engine has two, as [0.3, 0.7];"
            " give two, or add --engine detectron2"
        )
    background_threshold, foreground_threshold = rpn_cfg.IOU_THRESHOLDS
    rpn = RPN(
        anchors,
        FullPrecisionHead(channels, anchors.num_anchors_per_location()[0]),
        fg_iou_thresh=foreground_threshold,
        bg_iou_thresh=background_threshold,
        batch_size_per_image=rpn_cfg.BATCH_SIZE_PER_IMAGE,
        positive_fraction=rpn_cfg.POSITIVE_FRACTION,
        pre_nms_top_n={
            "training": rpn_cfg.PRE_NMS_TOPK_TRAIN,
            "testing": rpn_cfg.PRE_NMS_TOPK_TEST,
        },
        post_nms_top_n={
            "training": rpn_cfg.POST_NMS_TOPK_TRAIN,
            "testing": rpn_cfg.POST_NMS_TOPK_TEST,
        },
        nms_thresh=rpn_cfg.NMS_THRESH,
    )
    rpn.proposal_matcher = QuietMatcher(
        foreground_threshold, background_threshold, allow_low_quality_matches=True
    )
    rpn.beta = rpn_cfg.SMOOTH_L1_BETA
    rpn.fg_bg_sampler = BalancedSampler(
        rpn_cfg.BATCH_SIZE_PER_IMAGE, rpn_cfg.POSITIVE_FRACTION
    )
    return rpn


def base_anchors(sizes: Sequence[float], ratios: Sequence[float]) -> Tensor:
    """Make the anchors of one level, (sizes x ratios, 4), centred on 0.

    They are those of generate_cell_anchors of DefaultAnchorGenerator in
    detectron2/modeling/anchor_generator.py.
    """
    rows = []
    for size in sizes:
        for ratio in ratios:
            # width * height = size ** 2 and height / width = ratio
            width = math.sqrt(size**2 / ratio)
            height = ratio * width
            rows.append([-width / 2, -height / 2, width / 2, height / 2])
    return torch.tensor(rows)
