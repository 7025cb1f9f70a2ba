"""The proposal network of the torchvision engine: torchvision's, drawing, ranking and losing as
Detectron2's does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import boxes as box_ops

from backbench.errors import BadInput

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

LEVELS = 5  # P2 to P6


class BalancedSampler:
    """At most `size` anchors or proposals per image, up to `fraction` of them positive, drawn
    without replacement: detectron2/modeling/sampling.py::subsample_labels.

    `generators` holds one per image of the batch, so that an image's draws depend on nothing else;
    None draws from torch's global generator, in Detectron2's order.
    """

    def __init__(self, size: int, fraction: float) -> None:
        self.size, self.fraction = size, fraction
        self.generators: Sequence[torch.Generator] | None = None

    def __call__(self, labels: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Labels (A,) per image, >= 1 positive, 0 negative, -1 ignored -> boolean masks of
        positives and negatives."""
        positives: list[Tensor] = []
        negatives: list[Tensor] = []
        for i, label in enumerate(labels):
            generator = self.generators[i] if self.generators is not None else None
            positive, negative = torch.where(label >= 1)[0], torch.where(label == 0)[0]
            # What positives leave free is filled with negatives.
            n_positive = min(len(positive), int(self.size * self.fraction))
            n_negative = min(len(negative), self.size - n_positive)
            positives.append(_draw(positive, n_positive, label, generator))
            negatives.append(_draw(negative, n_negative, label, generator))
        return positives, negatives


def _draw(candidates: Tensor, n: int, label: Tensor, generator: torch.Generator | None) -> Tensor:
    """`n` of the candidates as a mask of the shape of `label`; drawn on the CPU, so that a GPU's
    run draws alike."""
    chosen = torch.randperm(len(candidates), generator=generator)[:n].to(label.device)
    mask = torch.zeros_like(label, dtype=torch.bool)
    return mask.index_fill_(0, candidates[chosen], True)


def smooth_l1(x: Tensor, y: Tensor, beta: float) -> Tensor:
    """Summed; beta 0 is L1. torchvision's losses have beta 1/9."""
    if beta == 0:
        return F.l1_loss(x, y, reduction="sum")
    return F.smooth_l1_loss(x, y, beta=beta, reduction="sum")


class FullPrecisionHead(RPNHead):
    """torchvision's, whose answers are float32 under autocast, too: boxes of a thousand pixels have
    no place in 8 or 11 bits (Box2BoxTransform.apply_deltas of Detectron2 casts them as well)."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, deltas = super().forward(x)
        return [v.float() for v in logits], [v.float() for v in deltas]


class RPN(RegionProposalNetwork):
    """torchvision's, with Detectron2's ranking and loss: (smooth) L1, both terms over `size`
    anchors per image."""

    beta = 0.0

    def filter_proposals(
        self,
        proposals: Tensor,
        objectness: Tensor,
        image_shapes: list[tuple[int, int]],
        num_anchors_per_level: list[int],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Proposals (N, A, 4) and logits (N A, 1) -> boxes (n, 4) and logits (n,) of each image,
        the surest first: find_top_rpn_proposals of
        detectron2/modeling/proposal_generator/proposal_utils.py.

        Ranked by logits, where torchvision ranks by their sigmoids: those of sure boxes are all 1.
        """
        # 1. The best of each level
        logits = objectness.detach().reshape(len(proposals), -1)
        best = self._get_top_n_idx(logits, num_anchors_per_level)
        level = torch.repeat_interleave(
            torch.arange(len(num_anchors_per_level), device=logits.device),
            torch.tensor(num_anchors_per_level, device=logits.device),
        )
        boxes_out, logits_out = [], []
        for i, shape in enumerate(image_shapes):
            boxes, sure, of_level = proposals[i, best[i]], logits[i, best[i]], level[best[i]]
            # 2. Cut to the image; what is empty then goes
            boxes = box_ops.clip_boxes_to_image(boxes, shape)
            keep = torch.where((boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1]))[0]
            boxes, sure, of_level = boxes[keep], sure[keep], of_level[keep]
            # 3. NMS within levels, then the best of all
            keep = box_ops.batched_nms(boxes, sure, of_level, self.nms_thresh)
            keep = keep[: self.post_nms_top_n()]
            boxes_out.append(boxes[keep])
            logits_out.append(sure[keep])
        return boxes_out, logits_out

    def compute_loss(
        self,
        objectness: Tensor,
        pred_bbox_deltas: Tensor,
        labels: list[Tensor],
        regression_targets: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """RPN.losses of detectron2/modeling/proposal_generator/rpn.py: both terms are divided by
        the anchors that were asked for, where torchvision divides by those that were found."""
        positives, negatives = self.fg_bg_sampler(labels)
        positive, sampled = torch.cat(positives), torch.cat(positives) | torch.cat(negatives)
        count = self.fg_bg_sampler.size * len(labels)
        target = torch.cat(labels)
        cls = F.binary_cross_entropy_with_logits(
            objectness.flatten()[sampled], target[sampled], reduction="sum"
        )
        loc = smooth_l1(
            pred_bbox_deltas[positive], torch.cat(regression_targets)[positive], self.beta
        )
        return cls / count, loc / count


def build_rpn(cfg: CfgNode) -> RPN:
    m = cfg.MODEL
    sizes, ratios = m.ANCHOR_GENERATOR.SIZES, m.ANCHOR_GENERATOR.ASPECT_RATIOS[0]
    if len(sizes) != LEVELS:
        raise BadInput(
            f"MODEL.ANCHOR_GENERATOR.SIZES: {len(sizes)} levels instead of the FPN's {LEVELS}"
        )
    levels = tuple(tuple(map(float, of_level)) for of_level in sizes)
    anchors = AnchorGenerator(levels, (tuple(ratios),) * LEVELS)
    # torchvision rounds its base anchors; Detectron2 does not.
    anchors.cell_anchors = [base_anchors(s, ratios) for s in sizes]
    # The arguments' order is torchvision's: thresholds of positives, then of negatives; Detectron2
    # has them rising.
    rpn = RPN(
        anchors,
        FullPrecisionHead(m.FPN.OUT_CHANNELS, anchors.num_anchors_per_location()[0]),
        m.RPN.IOU_THRESHOLDS[1],
        m.RPN.IOU_THRESHOLDS[0],
        m.RPN.BATCH_SIZE_PER_IMAGE,
        m.RPN.POSITIVE_FRACTION,
        {"training": m.RPN.PRE_NMS_TOPK_TRAIN, "testing": m.RPN.PRE_NMS_TOPK_TEST},
        {"training": m.RPN.POST_NMS_TOPK_TRAIN, "testing": m.RPN.POST_NMS_TOPK_TEST},
        m.RPN.NMS_THRESH,
    )
    rpn.beta = m.RPN.SMOOTH_L1_BETA
    rpn.fg_bg_sampler = BalancedSampler(m.RPN.BATCH_SIZE_PER_IMAGE, m.RPN.POSITIVE_FRACTION)
    return rpn


def base_anchors(sizes: Sequence[float], ratios: Sequence[float]) -> Tensor:
    """(sizes x ratios, 4), centred on 0: DefaultAnchorGenerator.generate_cell_anchors of
    detectron2/modeling/anchor_generator.py."""
    rows = []
    for size in sizes:
        for ratio in ratios:
            # w h = size^2 and h / w = ratio
            w = math.sqrt(size**2 / ratio)
            rows.append([-w / 2, -ratio * w / 2, w / 2, ratio * w / 2])
    return torch.tensor(rows)
