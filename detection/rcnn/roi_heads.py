"""Makes torchvision's heads pool, learn and predict as Detectron2's. Losses are divided by the
global batch's mean share (see `per_rank`), not by what one GPU's share holds."""

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
from backbench.detection.data.masks import rasterise
from backbench.detection.rcnn.rpn import BalancedSampler, smooth_l1, true_indices
from backbench.parallel import distributed

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode


def per_rank(count: int, device: torch.device) -> Tensor:
    """The mean of a count over ranks: that of sum / count is then the global batch's mean."""
    value = torch.full((), count, dtype=torch.float32, device=device)
    return distributed.mean_over_ranks(value).clamp(min=1 / distributed.world_size())


class LevelPool(nn.Module):
    """Detectron2's ROIPooler: aligned RoIAlign, adaptive sampling, each box from the level of its
    size. Features P2..P5 (N, C, H, W), boxes per image (n, 4) -> (sum n, C, size, size).
    torchvision's MultiScaleRoIAlign is not aligned: it is off by half a pixel of the map."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, features: Mapping[str, Tensor], boxes: list[Tensor]) -> Tensor:
        maps = [features[k] for k in ("0", "1", "2", "3")]
        # 1. (image, x1, y1, x2, y2) of every box
        flat = torch.cat(boxes)
        image = torch.cat([b.new_full((len(b), 1), i) for i, b in enumerate(boxes)])
        rois = torch.cat([image, flat], 1)
        # 2. Its level, P2 is 0. Eq. 1 of FPN (arXiv:1612.03144): 224 pixels belong on level 4.
        side = ((flat[:, 2] - flat[:, 0]) * (flat[:, 3] - flat[:, 1])).sqrt()
        level = (
            torch.floor(4 + torch.log2(side / 224 + 1e-8)).clamp(2, 5).to(torch.int64)
            - 2
        )
        # 3. Pooled level by level, each result back to its box's row
        out = maps[0].new_zeros(len(flat), maps[0].shape[1], self.size, self.size)
        of_level = true_indices([level == i for i in range(len(maps))])
        for i, (feature, here) in enumerate(zip(maps, of_level)):
            zoom = 1 / 2 ** (i + 2)
            pooled = roi_align(
                feature, rois[here], self.size, zoom, sampling_ratio=0, aligned=True
            )
            out = out.index_put((here,), pooled.to(out.dtype))
        return out


class RCNNHeads(RoIHeads):
    """torchvision's parts with Detectron2's losses, targets and post-processing. R proposals of the
    whole batch, C classes and the background, which is class 0 here and the last in Detectron2."""

    beta = 0.0

    def has_mask(
        self,
    ) -> bool:  # torchvision's check_targets asks for bitmaps; ours are polygons
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
        # The other heads learn from the positive proposals alone: their boxes, the objects that
        # they matched.
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
        """Logits and deltas in float32, under autocast, too: see FullPrecisionHead."""
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
        """Only the object's own class is taught. R positive proposals of the whole batch."""
        pooled = self.mask_roi_pool(features, boxes)
        logits = self.mask_predictor(self.mask_head(pooled)).float()  # (R, 1 + C, M, M)
        polygons = []
        # On a GPU the host waits once for all images' numbers
        on_cpu = torch.cat(objects).cpu().split([len(numbers) for numbers in objects])
        for numbers, target in zip(on_cpu, targets):
            polygons += [target["polygons"][j] for j in numbers.tolist()]
        goal = rasterise(
            polygons, torch.cat(boxes), logits.shape[-1]
        )  # (R, M, M) in {0, 1}
        chosen = logits[torch.arange(len(classes), device=logits.device), classes]
        loss = F.binary_cross_entropy_with_logits(
            chosen, goal.to(chosen), reduction="sum"
        )
        # Without any object there is a gradient all the same, of zeros: DDP waits for one on each
        # rank.
        return loss / per_rank(goal.numel(), logits.device) + 0 * logits.sum()

    def _keypoint_loss(
        self,
        features: dict[str, Tensor],
        boxes: list[Tensor],
        objects: list[Tensor],
        targets: list[TrainTarget],
    ) -> Tensor:
        # A proposal without a visible keypoint in it has nothing to teach:
        # select_proposals_with_visible_keypoints of detectron2/modeling/roi_heads/roi_heads.py.
        marked = [target["keypoints"][mine] for mine, target in zip(objects, targets)]
        keep = true_indices([visible_inside(m, b) for m, b in zip(marked, boxes)])
        kept = [of_image[i] for of_image, i in zip(boxes, keep)]
        points = [of_image[i] for of_image, i in zip(marked, keep)]
        pooled = self.keypoint_roi_pool(features, kept)
        heat = self.keypoint_predictor(
            self.keypoint_head(pooled)
        ).float()  # (R, K, M, M)
        # Cross-entropy over each visible keypoint's M x M places, divided by the visible ones:
        # Detectron2's choice where NORMALIZE_LOSS_BY_VISIBLE_KEYPOINTS is on, its default
        place, valid = keypoints_to_heatmap(
            torch.cat(points), torch.cat(kept), heat.shape[-1]
        )
        visible = torch.where(valid.flatten())[0]
        maps = heat.flatten(2).flatten(0, 1)[visible]
        loss = F.cross_entropy(maps, place.flatten()[visible], reduction="sum")
        return (
            loss / per_rank(len(visible), heat.device) + 0 * heat.sum()
        )  # as in _mask_loss

    def _detect(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        shapes: list[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        """Return each image's n detections: boxes (n, 4), scores (n,), labels (n,) from 1; masks
        (n, M, M), probabilities on the detection's own box; keypoints (n, K, 3)."""
        logits, deltas = self._boxes(features, proposals)
        boxes, scores, labels = self.postprocess_detections(
            logits, deltas, proposals, shapes
        )
        out = [
            {"boxes": b, "scores": s, "labels": c}
            for b, s, c in zip(boxes, scores, labels)
        ]
        counts = [len(b) for b in boxes]
        if self.mask_predictor is not None:
            logits = self.mask_predictor(
                self.mask_head(self.mask_roi_pool(features, boxes))
            )
            rows = torch.arange(len(logits), device=logits.device)
            of_class = logits[rows, torch.cat(labels)].sigmoid()
            for detections, masks in zip(out, of_class.split(counts)):
                detections["masks"] = masks
        if self.keypoint_predictor is not None:
            pooled = self.keypoint_roi_pool(features, boxes)
            heat = self.keypoint_predictor(self.keypoint_head(pooled))
            for detections, maps in zip(out, heat.split(counts)):
                detections["keypoints"] = heatmaps_to_keypoints(
                    maps, detections["boxes"]
                )[0]
        return out


def box_losses(
    logits: Tensor, deltas: Tensor, labels: Tensor, regression: Tensor, beta: float
) -> dict[str, Tensor]:
    """logits (R, 1 + C), deltas (R, 4 + 4 C), labels (R,), 0 the background, regression (R, 4). As
    in FastRCNNOutputLayers.losses, the boxes' loss, too, is divided by all proposals."""
    count = per_rank(len(labels), logits.device)
    positive = torch.where(labels > 0)[0]
    chosen = deltas.reshape(len(deltas), -1, 4)[positive, labels[positive]]
    return {
        "loss_cls": F.cross_entropy(logits, labels, reduction="sum") / count,
        "loss_box_reg": smooth_l1(chosen, regression[positive], beta) / count,
    }


def visible_inside(points: Tensor, boxes: Tensor) -> Tensor:
    """(n,) True for a box of (n, 4) with a visible keypoint of (n, K, 3) inside it."""
    x, y, visible = points.unbind(-1)
    inside = (
        (x >= boxes[:, :1])
        & (x <= boxes[:, 2:3])
        & (y >= boxes[:, 1:2])
        & (y <= boxes[:, 3:])
    )
    return (inside & (visible >= 1)).any(1)


def build_heads(cfg: CfgNode) -> RCNNHeads:
    m = cfg.MODEL
    channels, classes = m.FPN.OUT_CHANNELS, m.ROI_HEADS.NUM_CLASSES + 1
    box, mask, keypoint = m.ROI_BOX_HEAD, m.ROI_MASK_HEAD, m.ROI_KEYPOINT_HEAD
    overlap = m.ROI_HEADS.IOU_THRESHOLDS[0]
    heads = RCNNHeads(
        LevelPool(box.POOLER_RESOLUTION),
        TwoMLPHead(channels * box.POOLER_RESOLUTION**2, box.FC_DIM),
        FastRCNNPredictor(box.FC_DIM, classes),
        fg_iou_thresh=overlap,
        bg_iou_thresh=overlap,
        batch_size_per_image=m.ROI_HEADS.BATCH_SIZE_PER_IMAGE,
        positive_fraction=m.ROI_HEADS.POSITIVE_FRACTION,
        bbox_reg_weights=None,  # (10, 10, 5, 5) in both
        score_thresh=m.ROI_HEADS.SCORE_THRESH_TEST,
        nms_thresh=m.ROI_HEADS.NMS_THRESH_TEST,
        detections_per_img=cfg.TEST.DETECTIONS_PER_IMAGE,
    )
    heads.beta = box.SMOOTH_L1_BETA
    heads.fg_bg_sampler = BalancedSampler(
        m.ROI_HEADS.BATCH_SIZE_PER_IMAGE, m.ROI_HEADS.POSITIVE_FRACTION
    )
    if m.MASK_ON:
        heads.mask_roi_pool = LevelPool(mask.POOLER_RESOLUTION)
        heads.mask_head = MaskRCNNHeads(channels, [mask.CONV_DIM] * mask.NUM_CONV, 1)
        heads.mask_predictor = MaskRCNNPredictor(mask.CONV_DIM, mask.CONV_DIM, classes)
    if m.KEYPOINT_ON:
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
            # c2_xavier_fill of fvcore, which box_head.py uses for its fc layers, is Caffe2's
            # XavierFill.
            nn.init.kaiming_uniform_(parameter, a=1)
        elif name.startswith("box_predictor.cls_score"):
            nn.init.normal_(parameter, std=0.01)  # fast_rcnn.py
        elif name.startswith(
            ("box_predictor.bbox_pred", "mask_predictor.mask_fcn_logits")
        ):
            nn.init.normal_(parameter, std=0.001)  # fast_rcnn.py, mask_head.py
        else:  # the convolutions of mask_head.py and keypoint_head.py
            nn.init.kaiming_normal_(parameter, mode="fan_out", nonlinearity="relu")
