"""Makes torchvision's heads pool, learn and predict as Detectron2's.

Losses are normalised by counts of the global batch (see `per_rank`), not of one GPU's share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.keypoint_rcnn import (
    KeypointRCNNHeads,
    KeypointRCNNPredictor,
)
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import (
    RoIHeads,
    heatmaps_to_keypoints,
    keypoints_to_heatmap,
)
from torchvision.ops import roi_align

from backbench.detection.data.images import TrainTarget
from backbench.detection.data.masks import crop, rasterise
from backbench.detection.rcnn.rpn import BalancedSampler, smooth_l1, true_indices
from backbench.errors import BadInput
from backbench.parallel import distributed

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode


def per_rank(count: int, device: torch.device) -> Tensor:
    """Return the mean of a count over ranks. The sum over ranks counts as 1 at least, so that nothing is
    divided by 0.

    A rank divides the sum of its losses by it, and DDP takes the mean over ranks. The result is the
    global sum over the global count.
    """
    value = torch.full((), count, dtype=torch.float32, device=device)
    return distributed.mean_over_ranks(value).clamp(min=1 / distributed.world_size())


class LevelPool(nn.Module):
    """Detectron2's ROIPooler: aligned RoIAlign with adaptive sampling, each box pooled from the
    level that fits its size. torchvision's MultiScaleRoIAlign is not aligned: it is off by half a
    pixel of the map."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, features: Mapping[str, Tensor], boxes: list[Tensor]) -> Tensor:
        """Pool the boxes (n, 4) of each image from P2..P5, each (N, C, H, W): (sum n, C, size, size)."""
        maps = [features[k] for k in ("0", "1", "2", "3")]
        # 1. The rows of roi_align: image, x1, y1, x2, y2
        flat = torch.cat(boxes)
        image = torch.cat([b.new_full((len(b), 1), i) for i, b in enumerate(boxes)])
        rois = torch.cat([image, flat], 1)
        # 2. The level of each box, by Eq. 1 of FPN (arXiv:1612.03144): a side of 224 pixels belongs
        #    on P4. P2 to P5 are numbered from 0 here.
        side = ((flat[:, 2] - flat[:, 0]) * (flat[:, 3] - flat[:, 1])).sqrt()
        pyramid_level = torch.floor(4 + torch.log2(side / 224 + 1e-8)).clamp(2, 5)
        level = pyramid_level.to(torch.int64) - 2
        # 3. Level by level, each result goes back to its box's row.
        out = maps[0].new_zeros(len(flat), maps[0].shape[1], self.size, self.size)
        rows_of_level = true_indices([level == i for i in range(len(maps))])
        for i, (feature, rows) in enumerate(zip(maps, rows_of_level)):
            scale = 1 / 2 ** (i + 2)
            pooled = roi_align(
                feature, rois[rows], self.size, scale, sampling_ratio=0, aligned=True
            )
            out = out.index_put((rows,), pooled.to(out.dtype))
        return out


class RCNNHeads(RoIHeads):
    """torchvision's heads with Detectron2's losses, targets and post-processing.

    In the shapes below, R is the number of proposals of the whole batch and C that of classes. The
    background is class 0 here; in Detectron2 it is the last.
    """

    beta = 0.0

    def has_mask(self) -> bool:
        # If it were True, torchvision's check_targets would ask for bitmaps; ours are polygons.
        return False

    def subsample(self, labels: list[Tensor]) -> list[Tensor]:
        return [drawn.sampled for drawn in self.fg_bg_sampler(labels)]

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[TrainTarget] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        if not self.training:
            return self._detect(features, proposals, image_shapes), {}
        assert targets is not None
        proposals, matched, labels, regression = self.select_training_samples(
            proposals, targets
        )
        logits, deltas = self._boxes(features, proposals)
        losses = box_losses(
            logits, deltas, torch.cat(labels), torch.cat(regression), self.beta
        )
        # The other heads learn from the positive proposals alone: from their boxes, and from the
        # objects that they matched.
        positive = true_indices([label > 0 for label in labels])
        boxes = [p[i] for p, i in zip(proposals, positive)]
        objects = [m[i] for m, i in zip(matched, positive)]
        if self.mask_predictor is not None:
            classes = torch.cat([label[i] for label, i in zip(labels, positive)])
            losses["loss_mask"] = self._mask_loss(
                features, boxes, objects, classes, targets
            )
        if self.keypoint_predictor is not None:
            losses["loss_keypoint"] = self._keypoint_loss(
                features, boxes, objects, targets
            )
        return [], losses

    def _boxes(
        self, features: dict[str, Tensor], proposals: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute logits and deltas, in float32 under autocast, too: see FullPrecisionHead."""
        pooled = self.box_roi_pool(features, proposals)
        logits, deltas = self.box_predictor(self.box_head(pooled))
        return logits.float(), deltas.float()

    def _mask_loss(
        self,
        features: dict[str, Tensor],
        boxes: list[Tensor],
        objects: list[Tensor],
        classes: Tensor,
        targets: list[TrainTarget],
    ) -> Tensor:
        """Compute the loss of R positive proposals; only the mask of the object's class is taught."""
        pooled = self.mask_roi_pool(features, boxes)
        logits = self.mask_predictor(self.mask_head(pooled)).float()  # (R, 1 + C, M, M)
        # On a GPU the indices of all images are waited for at once.
        on_cpu = torch.cat(objects).cpu().split([len(indices) for indices in objects])
        # (R, M, M) in {0, 1}
        if "bitmaps" in targets[0]:
            parts = []
            for indices, target, of_image in zip(on_cpu, targets, boxes):
                parts.append(
                    crop(target["bitmaps"], indices, of_image, logits.shape[-1])
                )
            goal = torch.cat(parts)
        else:
            polygons = []
            for indices, target in zip(on_cpu, targets):
                polygons += [target["polygons"][i] for i in indices.tolist()]
            goal = rasterise(polygons, torch.cat(boxes), logits.shape[-1])
        own_class = logits[torch.arange(len(classes), device=logits.device), classes]
        loss = F.binary_cross_entropy_with_logits(
            own_class, goal.to(own_class), reduction="sum"
        )
        # The last term is a gradient of zeros for a batch without any object: DDP waits for a
        # gradient on each rank.
        return loss / per_rank(goal.numel(), logits.device) + 0 * logits.sum()

    def _keypoint_loss(
        self,
        features: dict[str, Tensor],
        boxes: list[Tensor],
        objects: list[Tensor],
        targets: list[TrainTarget],
    ) -> Tensor:
        # 1. A proposal without a visible keypoint in it has nothing to teach:
        #    select_proposals_with_visible_keypoints of detectron2/modeling/roi_heads/roi_heads.py.
        points = [target["keypoints"][mine] for mine, target in zip(objects, targets)]
        teaches = [visible_inside(p, b) for p, b in zip(points, boxes)]
        keep = true_indices(teaches)
        kept_boxes = [of_image[i] for of_image, i in zip(boxes, keep)]
        kept_points = [of_image[i] for of_image, i in zip(points, keep)]
        pooled = self.keypoint_roi_pool(features, kept_boxes)
        # (R, K, M, M)
        heatmaps = self.keypoint_predictor(self.keypoint_head(pooled)).float()
        # 2. Each visible keypoint is a classification of M x M places. The loss is divided by the
        #    number of visible ones: Detectron2's NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS, on by default.
        place, valid = keypoints_to_heatmap(
            torch.cat(kept_points), torch.cat(kept_boxes), heatmaps.shape[-1]
        )
        visible = torch.where(valid.flatten())[0]
        logits = heatmaps.flatten(2).flatten(0, 1)[visible]
        loss = F.cross_entropy(logits, place.flatten()[visible], reduction="sum")
        # The last term is a gradient of zeros, as in _mask_loss.
        return loss / per_rank(len(visible), heatmaps.device) + 0 * heatmaps.sum()

    def _detect(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        shapes: list[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        """Return the n detections of each image.

        They are boxes (n, 4), scores (n,) and labels (n,) from 1. With a mask head there are masks
        (n, M, M), probabilities on the detection's own box, with a keypoint head keypoints
        (n, K, 3).
        """
        logits, deltas = self._boxes(features, proposals)
        boxes, scores, labels = self.postprocess_detections(
            logits, deltas, proposals, shapes
        )
        out: list[dict[str, Tensor]] = []
        for b, s, c in zip(boxes, scores, labels):
            out.append({"boxes": b, "scores": s, "labels": c})
        counts = [len(b) for b in boxes]
        if self.mask_predictor is not None:
            pooled = self.mask_roi_pool(features, boxes)
            logits = self.mask_predictor(self.mask_head(pooled))
            rows = torch.arange(len(logits), device=logits.device)
            of_class = logits[rows, torch.cat(labels)].sigmoid()
            for detections, masks in zip(out, of_class.split(counts)):
                detections["masks"] = masks
        if self.keypoint_predictor is not None:
            pooled = self.keypoint_roi_pool(features, boxes)
            heatmaps = self.keypoint_predictor(self.keypoint_head(pooled))
            for detections, maps in zip(out, heatmaps.split(counts)):
                keypoints, _ = heatmaps_to_keypoints(maps, detections["boxes"])
                detections["keypoints"] = keypoints
        return out


def box_losses(
    logits: Tensor, deltas: Tensor, labels: Tensor, regression: Tensor, beta: float
) -> dict[str, Tensor]:
    """Compute the losses of classes and of boxes.

    Takes logits (R, 1 + C), deltas (R, 4 + 4 C), labels (R,), where 0 is the background, and the
    regression's targets (R, 4). As in FastRCNNOutputLayers.losses, the boxes' loss, too, is divided
    by the number of all proposals.
    """
    count = per_rank(len(labels), logits.device)
    positive = torch.where(labels > 0)[0]
    own_class = deltas.reshape(len(deltas), -1, 4)[positive, labels[positive]]
    return {
        "loss_cls": F.cross_entropy(logits, labels, reduction="sum") / count,
        "loss_box_reg": smooth_l1(own_class, regression[positive], beta) / count,
    }


def visible_inside(points: Tensor, boxes: Tensor) -> Tensor:
    """Return (n,): whether one of a row's keypoints (n, K, 3) is visible and inside its box (n, 4)."""
    x, y, visible = points.unbind(-1)
    inside = (
        (x >= boxes[:, :1])
        & (x <= boxes[:, 2:3])
        & (y >= boxes[:, 1:2])
        & (y <= boxes[:, 3:])
    )
    return (inside & (visible >= 1)).any(1)


def build_heads(cfg: CfgNode) -> RCNNHeads:
    """Build the heads that MODEL.ROI_HEADS and the config's head groups describe."""
    roi = cfg.MODEL.ROI_HEADS
    box = cfg.MODEL.ROI_BOX_HEAD
    channels = cfg.MODEL.FPN.OUT_CHANNELS
    classes = roi.NUM_CLASSES + 1  # with the background
    # Detectron2 has one threshold: a proposal is an object's or it is background.
    if len(roi.IOU_THRESHOLDS) != 1:
        raise BadInput(
            f"MODEL.ROI_HEADS.IOU_THRESHOLDS {roi.IOU_THRESHOLDS}: this engine has one, as [0.5]; give"
            " one, or add --engine detectron2"
        )
    (overlap,) = roi.IOU_THRESHOLDS
    heads = RCNNHeads(
        LevelPool(box.POOLER_RESOLUTION),
        TwoMLPHead(channels * box.POOLER_RESOLUTION**2, box.FC_DIM),
        FastRCNNPredictor(box.FC_DIM, classes),
        fg_iou_thresh=overlap,
        bg_iou_thresh=overlap,
        batch_size_per_image=roi.BATCH_SIZE_PER_IMAGE,
        positive_fraction=roi.POSITIVE_FRACTION,
        bbox_reg_weights=None,  # the default, (10, 10, 5, 5), is Detectron2's, too
        score_thresh=roi.SCORE_THRESH_TEST,
        nms_thresh=roi.NMS_THRESH_TEST,
        detections_per_img=cfg.TEST.DETECTIONS_PER_IMAGE,
    )
    heads.beta = box.SMOOTH_L1_BETA
    heads.fg_bg_sampler = BalancedSampler(
        roi.BATCH_SIZE_PER_IMAGE, roi.POSITIVE_FRACTION
    )
    if cfg.MODEL.MASK_ON:
        mask = cfg.MODEL.ROI_MASK_HEAD
        heads.mask_roi_pool = LevelPool(mask.POOLER_RESOLUTION)
        heads.mask_head = MaskRCNNHeads(channels, [mask.CONV_DIM] * mask.NUM_CONV, 1)
        heads.mask_predictor = MaskRCNNPredictor(mask.CONV_DIM, mask.CONV_DIM, classes)
    if cfg.MODEL.KEYPOINT_ON:
        keypoint = cfg.MODEL.ROI_KEYPOINT_HEAD
        heads.keypoint_roi_pool = LevelPool(keypoint.POOLER_RESOLUTION)
        heads.keypoint_head = KeypointRCNNHeads(channels, list(keypoint.CONV_DIMS))
        heads.keypoint_predictor = KeypointRCNNPredictor(
            keypoint.CONV_DIMS[-1], keypoint.NUM_KEYPOINTS
        )
    initialise(heads)
    return heads


def initialise(heads: RCNNHeads) -> None:
    """Draw fresh weights as Detectron2 does; torchvision leaves most layers at PyTorch's defaults."""
    for name, parameter in heads.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif name.startswith("box_head"):
            # box_head.py uses fvcore's c2_xavier_fill for its fc layers, which is this.
            nn.init.kaiming_uniform_(parameter, a=1)
        elif name.startswith("box_predictor.cls_score"):
            nn.init.normal_(parameter, std=0.01)  # fast_rcnn.py
        elif name.startswith(
            ("box_predictor.bbox_pred", "mask_predictor.mask_fcn_logits")
        ):
            nn.init.normal_(parameter, std=0.001)  # fast_rcnn.py, mask_head.py
        else:
            # The convolutions of mask_head.py and keypoint_head.py
            nn.init.kaiming_normal_(parameter, mode="fan_out", nonlinearity="relu")
