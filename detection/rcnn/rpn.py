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
    """The drawn anchors or proposals of one image, as rising indices."""

    positive: Tensor
    sampled: Tensor  # positives and negatives


class BalancedSampler:
    """Draws at most `size` anchors or proposals per image without replacement, up to `fraction`
    positive: detectron2/modeling/sampling.py::subsample_labels. `generators`, one per image, make
    its draws independent of all else; None draws from torch's global one, in Detectron2's order."""

    def __init__(self, size: int, fraction: float) -> None:
        self.size, self.fraction = size, fraction
        self.generators: Sequence[torch.Generator] | None = None

    def __call__(self, labels: Sequence[Tensor]) -> list[Drawn]:
        """Labels (A,) per image, >= 1 positive, 0 negative, -1 ignored. The host waits once for a GPU."""
        masks = [mask for label in labels for mask in (label >= 1, label == 0)]
        counts = torch.stack([mask.sum() for mask in masks]).tolist()
        out = []
        for i in range(len(labels)):
            generator = self.generators[i] if self.generators is not None else None
            positives, negatives = counts[2 * i : 2 * i + 2]
            # What positives leave free is filled with negatives.
            n_positive = min(positives, int(self.size * self.fraction))
            n_negative = min(negatives, self.size - n_positive)
            positive = _draw(masks[2 * i], positives, n_positive, generator)
            negative = _draw(masks[2 * i + 1], negatives, n_negative, generator)
            out.append(Drawn(positive, torch.cat([positive, negative]).sort().values))
        return out


def _draw(
    mask: Tensor, count: int, n: int, generator: torch.Generator | None
) -> Tensor:
    """Draw `n` of the `count` indices where the mask is true, in rising order. It draws on the CPU,
    so that a run on a GPU draws alike."""
    chosen = torch.randperm(count, generator=generator)[:n].sort().values
    return _nth_true(distributed.sent(chosen, mask.device), mask)


def _nth_true(numbers: Tensor, mask: Tensor) -> Tensor:
    """For each number n, the index where the mask (A,) is true for the n-th time, counted from 0."""
    # Up to that place, and not before it, one more than `number` are true
    return torch.searchsorted(mask.cumsum(0), numbers + 1)


def true_indices(masks: Sequence[Tensor]) -> list[Tensor]:
    """The indices where each mask (n,) is true; on a GPU the host waits once for all masks."""
    counts = torch.stack([mask.sum() for mask in masks]).tolist()
    numbers = [torch.arange(n, device=mask.device) for n, mask in zip(counts, masks)]
    return [_nth_true(those, mask) for those, mask in zip(numbers, masks)]


class QuietMatcher(Matcher):
    """torchvision's Matcher with a step for low-quality matches that does not wait for the GPU."""

    def set_low_quality_matches_(
        self, matches: Tensor, all_matches: Tensor, match_quality_matrix: Tensor
    ) -> None:
        """Keep, for each object, the anchors that overlap it most, however little that is; the
        matrix (objects, anchors) holds the overlaps."""
        best = match_quality_matrix.amax(1, keepdim=True)
        chosen = (match_quality_matrix == best).any(0)
        matches.copy_(torch.where(chosen, all_matches, matches))


def smooth_l1(x: Tensor, y: Tensor, beta: float) -> Tensor:
    """Smooth L1 loss, summed; beta 0 is L1. torchvision's losses have beta 1/9."""
    if beta == 0:
        return F.l1_loss(x, y, reduction="sum")
    return F.smooth_l1_loss(x, y, beta=beta, reduction="sum")


class FullPrecisionHead(RPNHead):
    """torchvision's head with float32 outputs, under autocast, too: 8 or 11 bits cannot hold boxes
    of a thousand pixels (Box2BoxTransform.apply_deltas of Detectron2 casts them as well)."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, deltas = super().forward(x)
        return [v.float() for v in logits], [v.float() for v in deltas]


class RPN(RegionProposalNetwork):
    """torchvision's network; Detectron2's ranking, (smooth) L1 and `size` anchors an image."""

    beta = 0.0

    def filter_proposals(
        self,
        proposals: Tensor,
        objectness: Tensor,
        image_shapes: list[tuple[int, int]],
        num_anchors_per_level: list[int],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Proposals (N, A, 4), logits (N A, 1) -> boxes (n, 4), logits (n,) of each image, the
        surest first, as find_top_rpn_proposals of
        detectron2/modeling/proposal_generator/proposal_utils.py. Ranked by logits: torchvision
        ranks by their sigmoids, and those of sure boxes are all 1."""
        # 1. The best of each level
        logits = objectness.detach().reshape(len(proposals), -1)
        best = self._get_top_n_idx(logits, num_anchors_per_level)
        counts = enumerate(num_anchors_per_level)
        level = torch.cat(
            [torch.full((n,), k, device=logits.device) for k, n in counts]
        )
        # 2. Cut to the image; what is empty then goes
        cut = [
            box_ops.clip_boxes_to_image(proposals[i, best[i]], shape)
            for i, shape in enumerate(image_shapes)
        ]
        left = true_indices([(b[:, 2] > b[:, 0]) & (b[:, 3] > b[:, 1]) for b in cut])
        boxes_out, logits_out = [], []
        for i, there in enumerate(left):
            boxes, sure = cut[i][there], logits[i, best[i]][there]
            # 3. NMS within levels, then the best of all
            keep = box_ops.batched_nms(
                boxes, sure, level[best[i]][there], self.nms_thresh
            )
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
        # Places in the whole batch
        drawn, anchors = self.fg_bg_sampler(labels), len(labels[0])
        positive = torch.cat(
            [of_image.positive + i * anchors for i, of_image in enumerate(drawn)]
        )
        sampled = torch.cat(
            [of_image.sampled + i * anchors for i, of_image in enumerate(drawn)]
        )
        count = self.fg_bg_sampler.size * len(labels)
        target = torch.cat(labels)
        cls = F.binary_cross_entropy_with_logits(
            objectness.flatten()[sampled], target[sampled], reduction="sum"
        )
        loc = smooth_l1(
            pred_bbox_deltas[positive],
            torch.cat(regression_targets)[positive],
            self.beta,
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
    rpn.proposal_matcher = QuietMatcher(
        m.RPN.IOU_THRESHOLDS[1], m.RPN.IOU_THRESHOLDS[0], allow_low_quality_matches=True
    )
    rpn.beta = m.RPN.SMOOTH_L1_BETA
    rpn.fg_bg_sampler = BalancedSampler(
        m.RPN.BATCH_SIZE_PER_IMAGE, m.RPN.POSITIVE_FRACTION
    )
    return rpn


def base_anchors(sizes: Sequence[float], ratios: Sequence[float]) -> Tensor:
    """Make (sizes x ratios, 4), centred on 0, as generate_cell_anchors of DefaultAnchorGenerator in
    detectron2/modeling/anchor_generator.py does."""
    rows = []
    for size in sizes:
        for ratio in ratios:
            # w h = size^2 and h / w = ratio
            w = math.sqrt(size**2 / ratio)
            rows.append([-w / 2, -ratio * w / 2, w / 2, ratio * w / 2])
    return torch.tensor(rows)
