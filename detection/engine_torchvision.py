"""Faster, Mask and Keypoint R-CNN with FPN from torchvision's parts, configured and completed to be Detectron2's.

What is equal, with the weights copied across: FPN features, anchors, proposals, boxes, scores, targets and losses (see
tests/detection/test_parity.py and the table in docs/detection.md). torchvision's own defaults differ in base anchors
(rounded), RoIAlign (not aligned), FPN (no norm), losses (smooth L1, beta 1/9), mask targets (resampled bitmaps), head
initialisation, top-k and input resize; here each is Detectron2's.

What differs on purpose or by nature:
- images are padded to the largest of the global batch, not of one GPU's share, and losses are normalised over the
  global batch, so that a run does not depend on the number of processes (Detectron2 normalises per GPU);
- all images of a batch are drawn in groups of four of one orientation, Detectron2 groups per loader worker;
- fg/bg sampling draws from a generator per image, Detectron2 from the global one;
- no mixed precision, no CIoU, no Cascade, no C4: other keys and values are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import (
    RoIHeads,
    heatmaps_to_keypoints,
    keypoints_to_heatmap,
)
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import boxes as box_ops
from torchvision.ops import roi_align
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from backbench.errors import BadInput
from backbench.images.preprocess import Pixels, normalise
from backbench.runs import distributed, seeding
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.resnet import Trunk
from detection.data import coco

# Keys of the dialect whose other values this engine does not implement.
FIXED: dict[str, tuple[Any, ...]] = {
    "MODEL.META_ARCHITECTURE": ("GeneralizedRCNN",),
    "MODEL.BACKBONE.NAME": ("build_resnet_fpn_backbone",),
    "MODEL.BACKBONE.FREEZE_AT": (0,),
    "MODEL.RESNETS.DEPTH": (18, 34, 50, 101, 152),
    "MODEL.RESNETS.NORM": ("SyncBN", "BN"),
    "MODEL.RESNETS.STRIDE_IN_1X1": (False,),
    "MODEL.RESNETS.OUT_FEATURES": (["res2", "res3", "res4", "res5"],),
    "MODEL.FPN.IN_FEATURES": (["res2", "res3", "res4", "res5"],),
    "MODEL.FPN.NORM": ("SyncBN", "BN", ""),
    "MODEL.RPN.IN_FEATURES": (["p2", "p3", "p4", "p5", "p6"],),
    "MODEL.ROI_HEADS.NAME": ("StandardROIHeads",),
    "MODEL.ROI_HEADS.IN_FEATURES": (["p2", "p3", "p4", "p5"],),
    "MODEL.ROI_BOX_HEAD.NAME": ("FastRCNNConvFCHead",),
    "MODEL.ROI_BOX_HEAD.NORM": ("",),
    "MODEL.ROI_BOX_HEAD.NUM_FC": (2,),
    "MODEL.ROI_MASK_HEAD.NAME": ("MaskRCNNConvUpsampleHead",),
    "MODEL.ROI_MASK_HEAD.NORM": ("",),
    "MODEL.ROI_KEYPOINT_HEAD.NAME": ("KRCNNConvDeconvUpsampleHead",),
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": ("choice", "range"),
    "INPUT.RANDOM_FLIP": ("horizontal", "none"),
}


def check(cfg: Any, where: Any) -> None:
    """Refuse by name the values that this engine does not implement."""
    for key, allowed in FIXED.items():
        node = cfg
        for part in key.split("."):
            node = node[part]
        value = list(node) if isinstance(node, tuple) else node
        if value not in allowed:
            raise BadInput(
                f"{where}: {key} is {value!r}; the torchvision engine has {' or '.join(map(repr, allowed))} "
                "(Detectron2 may have it: --engine detectron2)"
            )


class Sampler:
    """At most `size` anchors or proposals per image, up to `fraction` of them positive, drawn without replacement.

    `generators` holds one per image of the batch; None draws from torch's global generator, in Detectron2's order.
    """

    def __init__(self, size: int, fraction: float) -> None:
        self.size, self.fraction = size, fraction
        self.generators: Sequence[torch.Generator] | None = None

    def __call__(self, labels: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Labels (A,) per image, >= 1 positive, 0 negative, -1 ignored -> boolean masks of positives and negatives."""
        positives: list[Tensor] = []
        negatives: list[Tensor] = []
        for i, label in enumerate(labels):
            generator = self.generators[i] if self.generators is not None else None
            positive, negative = torch.where(label >= 1)[0], torch.where(label == 0)[0]
            n_positive = min(len(positive), int(self.size * self.fraction))
            n_negative = min(len(negative), self.size - n_positive)
            for out, candidates, n in (
                (positives, positive, n_positive),
                (negatives, negative, n_negative),
            ):
                chosen = candidates[
                    torch.randperm(len(candidates), generator=generator)[:n].to(label.device)
                ]
                out.append(torch.zeros_like(label, dtype=torch.bool).index_fill_(0, chosen, True))
        return positives, negatives


def smooth_l1(x: Tensor, y: Tensor, beta: float) -> Tensor:
    """Summed; beta 0 is L1."""
    return (
        F.l1_loss(x, y, reduction="sum")
        if beta == 0
        else F.smooth_l1_loss(x, y, beta=beta, reduction="sum")
    )


def per_rank(count: int | Tensor, device: torch.device) -> Tensor:
    """The mean over ranks of a count, so that the mean over ranks of sum / count is the global batch's mean."""
    value = torch.as_tensor(count, dtype=torch.float32, device=device).detach()
    return distributed.mean_over_ranks(value).clamp(min=1 / distributed.world_size())


class RPN(RegionProposalNetwork):
    """torchvision's, with Detectron2's ranking and loss: (smooth) L1, both terms over `size` anchors per image."""

    beta = 0.0

    def filter_proposals(
        self,
        proposals: Tensor,
        objectness: Tensor,
        image_shapes: list[Any],
        num_anchors_per_level: list[int],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The best of each level, then NMS within levels, ranked by logits: the sigmoids of sure boxes are all 1."""
        scores = objectness.detach().reshape(len(proposals), -1)
        best = self._get_top_n_idx(scores, num_anchors_per_level)
        level = torch.repeat_interleave(
            torch.arange(len(num_anchors_per_level), device=scores.device),
            torch.tensor(num_anchors_per_level, device=scores.device),
        )
        boxes_out, scores_out = [], []
        for i, shape in enumerate(image_shapes):
            boxes, logits, of_level = proposals[i, best[i]], scores[i, best[i]], level[best[i]]
            boxes = box_ops.clip_boxes_to_image(boxes, shape)
            keep = torch.where((boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1]))[0]
            boxes, logits, of_level = boxes[keep], logits[keep], of_level[keep]
            keep = box_ops.batched_nms(boxes, logits, of_level, self.nms_thresh)[
                : self.post_nms_top_n()
            ]
            boxes_out.append(boxes[keep])
            scores_out.append(logits[keep])
        return boxes_out, scores_out

    def compute_loss(
        self,
        objectness: Tensor,
        pred_bbox_deltas: Tensor,
        labels: list[Tensor],
        regression_targets: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
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


class Pool(nn.Module):
    """Detectron2's ROIPooler: aligned RoIAlign with adaptive sampling, each box from the level of its size.

    Features P2..P5 (N, C, H, W), boxes per image (n, 4) -> (sum n, C, size, size).
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(
        self, features: Mapping[str, Tensor], boxes: list[Tensor], shapes: Any = None
    ) -> Tensor:
        maps = [features[k] for k in ("0", "1", "2", "3")]
        flat = torch.cat(boxes)
        image = torch.repeat_interleave(
            torch.arange(len(boxes), device=flat.device),
            torch.tensor([len(b) for b in boxes], device=flat.device),
        )
        rois = torch.cat([image[:, None].to(flat.dtype), flat], 1)
        side = ((flat[:, 2] - flat[:, 0]) * (flat[:, 3] - flat[:, 1])).sqrt()
        # Eq. 1 of FPN (arXiv:1612.03144): 224 pixels belong on level 4.
        level = torch.floor(4 + torch.log2(side / 224 + 1e-8)).clamp(2, 5).to(torch.int64) - 2
        out = maps[0].new_zeros(len(flat), maps[0].shape[1], self.size, self.size)
        for i, feature in enumerate(maps):
            here = torch.where(level == i)[0]
            pooled = roi_align(feature, rois[here], self.size, 1 / 2 ** (i + 2), 0, True)
            out = out.index_put((here,), pooled.to(out.dtype))
        return out


class Heads(RoIHeads):
    """torchvision's parts with Detectron2's losses, targets and post-processing."""

    beta = 0.0

    def has_mask(self) -> bool:  # torchvision's check_targets asks for bitmaps; ours are polygons
        return False

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Any]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        if not self.training:
            return self._detect(features, proposals, image_shapes), {}
        proposals, matched, labels, regression = self.select_training_samples(proposals, targets)
        assert targets is not None
        logits, deltas = self.box_predictor(
            self.box_head(self.box_roi_pool(features, proposals, image_shapes))
        )
        losses = box_losses(logits, deltas, torch.cat(labels), torch.cat(regression), self.beta)
        positive = [torch.where(label > 0)[0] for label in labels]
        if self.mask_predictor is not None:
            boxes = [p[i] for p, i in zip(proposals, positive)]
            mask_logits = self.mask_predictor(
                self.mask_head(self.mask_roi_pool(features, boxes, image_shapes))
            )
            classes = torch.cat([label[i] for label, i in zip(labels, positive)])
            goal = [
                rasterise([t["polygons"][j] for j in m[i].tolist()], b, mask_logits.shape[-1])
                for t, m, i, b in zip(targets, matched, positive, boxes)
            ]
            losses["loss_mask"] = mask_loss(mask_logits, torch.cat(goal), classes)
        if self.keypoint_predictor is not None:
            boxes, points = [], []
            for p, t, m, i in zip(proposals, targets, matched, positive):
                mine = t["keypoints"][m[i]]
                keep = visible_inside(mine, p[i])
                boxes.append(p[i][keep])
                points.append(mine[keep])
            heat = self.keypoint_predictor(
                self.keypoint_head(self.keypoint_roi_pool(features, boxes, image_shapes))
            )
            losses["loss_keypoint"] = keypoint_loss(heat, torch.cat(boxes), torch.cat(points))
        return [], losses

    def _detect(
        self, features: dict[str, Tensor], proposals: list[Tensor], shapes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        logits, deltas = self.box_predictor(
            self.box_head(self.box_roi_pool(features, proposals, shapes))
        )
        boxes, scores, labels = self.postprocess_detections(logits, deltas, proposals, shapes)
        out = [{"boxes": b, "scores": s, "labels": c} for b, s, c in zip(boxes, scores, labels)]
        counts = [len(b) for b in boxes]
        if self.mask_predictor is not None:
            mask_logits = self.mask_predictor(
                self.mask_head(self.mask_roi_pool(features, boxes, shapes))
            )
            rows = torch.arange(len(mask_logits), device=mask_logits.device)
            for o, m in zip(out, mask_logits[rows, torch.cat(labels)].sigmoid().split(counts)):
                o["masks"] = m  # (n, 28, 28), each on its own box
        if self.keypoint_predictor is not None:
            heat = self.keypoint_predictor(
                self.keypoint_head(self.keypoint_roi_pool(features, boxes, shapes))
            )
            for o, h in zip(out, heat.split(counts)):
                o["keypoints"] = heatmaps_to_keypoints(h, o["boxes"])[0]  # (n, K, 3)
        return out


def box_losses(
    logits: Tensor, deltas: Tensor, labels: Tensor, regression: Tensor, beta: float
) -> dict[str, Tensor]:
    """logits (R, 1 + C), deltas (R, 4 (1 + C)), labels (R,) with 0 the background, regression (R, 4)."""
    count = per_rank(len(labels), logits.device)
    positive = torch.where(labels > 0)[0]
    chosen = deltas.reshape(len(deltas), -1, 4)[positive, labels[positive]]
    return {
        "loss_cls": F.cross_entropy(logits, labels, reduction="sum") / count,
        "loss_box_reg": smooth_l1(chosen, regression[positive], beta) / count,
    }


def mask_loss(logits: Tensor, goal: Tensor, classes: Tensor) -> Tensor:
    """logits (R, 1 + C, M, M), goal (R, M, M) in {0, 1}, classes (R,)."""
    count = per_rank(goal.numel(), logits.device)
    chosen = logits[torch.arange(len(classes), device=logits.device), classes]
    return (
        F.binary_cross_entropy_with_logits(chosen, goal.to(chosen), reduction="sum") / count
        + 0 * logits.sum()
    )


def keypoint_loss(heat: Tensor, boxes: Tensor, points: Tensor) -> Tensor:
    """Cross-entropy over each visible keypoint's M x M places; heat (R, K, M, M), boxes (R, 4), points (R, K, 3)."""
    place, valid = keypoints_to_heatmap(points, boxes, heat.shape[-1])
    valid = torch.where(valid.flatten())[0]
    count = per_rank(len(valid), heat.device)
    loss = F.cross_entropy(
        heat.flatten(2).flatten(0, 1)[valid], place.flatten()[valid], reduction="sum"
    )
    return loss / count + 0 * heat.sum()


def visible_inside(points: Tensor, boxes: Tensor) -> Tensor:
    """Which proposals have a visible keypoint inside them: the others teach the keypoint head nothing."""
    x, y, visible = points.unbind(-1)
    inside = (x >= boxes[:, :1]) & (x <= boxes[:, 2:3]) & (y >= boxes[:, 1:2]) & (y <= boxes[:, 3:])
    return (inside & (visible >= 1)).any(1)


def rasterise(polygons: Sequence[Sequence[Any]], boxes: Tensor, size: int) -> Tensor:
    """Each object's polygons on the size x size grid of its box: (n, size, size), as Detectron2's PolygonMasks do."""
    import numpy as np
    from pycocotools import mask as masks

    out = torch.zeros(len(boxes), size, size)
    for i, (parts, box) in enumerate(zip(polygons, boxes.cpu().numpy())):
        w, h = box[2] - box[0], box[3] - box[1]
        moved = []
        for part in parts:
            p = np.array(part, np.float64)
            p[0::2] = (p[0::2] - box[0]) * (size / max(w, 0.1))
            p[1::2] = (p[1::2] - box[1]) * (size / max(h, 0.1))
            moved.append(p)
        out[i] = torch.from_numpy(masks.decode(masks.merge(masks.frPyObjects(moved, size, size))))
    return out.to(boxes.device)


def paste(masks: Tensor, boxes: Tensor, height: int, width: int) -> Tensor:
    """(n, M, M) probabilities on their boxes -> (n, height, width) bool: sampled at pixel centres, cut at a half."""
    out = torch.zeros(len(masks), height, width, dtype=torch.bool)
    for i, (mask, box) in enumerate(zip(masks.cpu(), boxes.cpu())):
        x1, y1, x2, y2 = box.tolist()
        left, top = max(int(x1) - 1, 0), max(int(y1) - 1, 0)
        right, bottom = min(math.ceil(x2) + 1, width), min(math.ceil(y2) + 1, height)
        gx = (torch.arange(left, right) + 0.5 - x1) / (x2 - x1) * 2 - 1
        gy = (torch.arange(top, bottom) + 0.5 - y1) / (y2 - y1) * 2 - 1
        grid = torch.stack(torch.meshgrid(gx, gy, indexing="xy"), -1)[None]
        out[i, top:bottom, left:right] = (
            F.grid_sample(mask[None, None], grid, align_corners=False)[0, 0] >= 0.5
        )
    return out


class Detector(nn.Module):
    """The whole network. Training: (images uint8, targets) -> losses; evaluation: images -> detections."""

    def __init__(self, cfg: Any, trunk: Trunk, pixels: Pixels) -> None:
        super().__init__()
        self.pixels = pixels
        m = cfg.MODEL
        channels = [
            trunk.feature_dim // 8,
            trunk.feature_dim // 4,
            trunk.feature_dim // 2,
            trunk.feature_dim,
        ]
        self.backbone = BackboneWithFPN(
            trunk,
            {"layer1": "0", "layer2": "1", "layer3": "2", "layer4": "3"},
            channels,
            m.FPN.OUT_CHANNELS,
            extra_blocks=LastLevelMaxPool(),
            norm_layer=nn.BatchNorm2d if m.FPN.NORM else None,
        )
        if m.RESNETS.NORM == "SyncBN":
            distributed.convert_sync_batchnorm(self.backbone.body)
        if m.FPN.NORM == "SyncBN":
            distributed.convert_sync_batchnorm(self.backbone.fpn)
        self.rpn = _rpn(m)
        self.roi_heads = _heads(m, cfg.TEST.DETECTIONS_PER_IMAGE)

    def batch(self, images: Sequence[Tensor]) -> ImageList:
        """uint8 (3, h, w) each -> one float batch, padded with zeros to a multiple of 32 and to all ranks' largest."""
        device = self.roi_heads.box_predictor.cls_score.weight.device
        sizes = [(int(i.shape[-2]), int(i.shape[-1])) for i in images]
        height, width = (math.ceil(max(s[k] for s in sizes) / 32) * 32 for k in (0, 1))
        if self.training and distributed.world_size() > 1:
            largest = distributed.gather_without_gradient(
                torch.tensor([[height, width]], device=device)
            ).amax(0)
            height, width = int(largest[0]), int(largest[1])
        out = torch.zeros(len(images), 3, height, width, device=device)
        for i, image in enumerate(images):
            out[i, :, : image.shape[-2], : image.shape[-1]] = normalise(
                image.to(device), self.pixels
            )
        return ImageList(out, sizes)

    def forward(self, images: Sequence[Tensor], targets: list[dict[str, Any]] | None = None) -> Any:
        batch = self.batch(images)
        features = self.backbone(batch.tensors)
        proposals, rpn_losses = self.rpn(batch, features, targets)
        detections, losses = self.roi_heads(features, proposals, batch.image_sizes, targets)
        if not self.training:
            return detections
        return {
            "loss_rpn_cls": rpn_losses["loss_objectness"],
            "loss_rpn_loc": rpn_losses["loss_rpn_box_reg"],
            **losses,
        }

    def samplers(self) -> tuple[Sampler, Sampler]:
        return self.rpn.fg_bg_sampler, self.roi_heads.fg_bg_sampler


def _rpn(m: Any) -> RPN:
    sizes, ratios = m.ANCHOR_GENERATOR.SIZES, m.ANCHOR_GENERATOR.ASPECT_RATIOS
    if len(sizes) != 5:
        raise BadInput(f"MODEL.ANCHOR_GENERATOR.SIZES: {len(sizes)} levels instead of the FPN's 5")
    anchors = AnchorGenerator(
        tuple(tuple(float(v) for v in s) for s in sizes), tuple(tuple(ratios[0]) for _ in range(5))
    )
    # torchvision rounds its base anchors; Detectron2 does not.
    anchors.cell_anchors = [_base_anchors(s, ratios[0]) for s in sizes]
    rpn = RPN(
        anchors,
        RPNHead(m.FPN.OUT_CHANNELS, anchors.num_anchors_per_location()[0]),
        m.RPN.IOU_THRESHOLDS[1],
        m.RPN.IOU_THRESHOLDS[0],
        m.RPN.BATCH_SIZE_PER_IMAGE,
        m.RPN.POSITIVE_FRACTION,
        {"training": m.RPN.PRE_NMS_TOPK_TRAIN, "testing": m.RPN.PRE_NMS_TOPK_TEST},
        {"training": m.RPN.POST_NMS_TOPK_TRAIN, "testing": m.RPN.POST_NMS_TOPK_TEST},
        m.RPN.NMS_THRESH,
    )
    rpn.beta = m.RPN.SMOOTH_L1_BETA
    rpn.fg_bg_sampler = Sampler(m.RPN.BATCH_SIZE_PER_IMAGE, m.RPN.POSITIVE_FRACTION)
    return rpn


def _base_anchors(sizes: Sequence[float], ratios: Sequence[float]) -> Tensor:
    rows = []
    for size in sizes:
        for ratio in ratios:
            w = math.sqrt(size**2 / ratio)
            rows.append([-w / 2, -ratio * w / 2, w / 2, ratio * w / 2])
    return torch.tensor(rows)


def _heads(m: Any, detections: int) -> Heads:
    channels, classes = m.FPN.OUT_CHANNELS, m.ROI_HEADS.NUM_CLASSES + 1
    box, mask, keypoint = m.ROI_BOX_HEAD, m.ROI_MASK_HEAD, m.ROI_KEYPOINT_HEAD
    heads = Heads(
        Pool(box.POOLER_RESOLUTION),
        TwoMLPHead(channels * box.POOLER_RESOLUTION**2, box.FC_DIM),
        FastRCNNPredictor(box.FC_DIM, classes),
        m.ROI_HEADS.IOU_THRESHOLDS[0],
        m.ROI_HEADS.IOU_THRESHOLDS[0],
        m.ROI_HEADS.BATCH_SIZE_PER_IMAGE,
        m.ROI_HEADS.POSITIVE_FRACTION,
        None,  # (10, 10, 5, 5) in both
        m.ROI_HEADS.SCORE_THRESH_TEST,
        m.ROI_HEADS.NMS_THRESH_TEST,
        detections,
    )
    heads.beta = box.SMOOTH_L1_BETA
    heads.fg_bg_sampler = Sampler(m.ROI_HEADS.BATCH_SIZE_PER_IMAGE, m.ROI_HEADS.POSITIVE_FRACTION)
    if m.MASK_ON:
        heads.mask_roi_pool = Pool(mask.POOLER_RESOLUTION)
        heads.mask_head = MaskRCNNHeads(channels, [mask.CONV_DIM] * mask.NUM_CONV, 1)
        heads.mask_predictor = MaskRCNNPredictor(mask.CONV_DIM, mask.CONV_DIM, classes)
    if m.KEYPOINT_ON:
        heads.keypoint_roi_pool = Pool(keypoint.POOLER_RESOLUTION)
        heads.keypoint_head = KeypointRCNNHeads(channels, list(keypoint.CONV_DIMS))
        heads.keypoint_predictor = KeypointRCNNPredictor(
            keypoint.CONV_DIMS[-1], keypoint.NUM_KEYPOINTS
        )
    _initialise(heads)
    return heads


def _initialise(heads: Heads) -> None:
    """Detectron2's: fc xavier (c2's, uniform), class scores N(0.01), boxes and mask predictor N(0.001), convs MSRA."""
    for name, parameter in heads.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif name.startswith("box_head"):
            nn.init.kaiming_uniform_(parameter, a=1)
        elif name.startswith("box_predictor.cls_score"):
            nn.init.normal_(parameter, std=0.01)
        elif name.startswith(("box_predictor.bbox_pred", "mask_predictor.mask_fcn_logits")):
            nn.init.normal_(parameter, std=0.001)
        else:
            nn.init.kaiming_normal_(parameter, mode="fan_out", nonlinearity="relu")


class Engine:
    """What train_net's loop asks of an engine."""

    name = "torchvision"

    def __init__(
        self,
        cfg: Any,
        checkpoint: Checkpoint,
        *,
        flip_map: Sequence[int],
        task: str,
        seed: int,
        device: torch.device,
    ) -> None:
        self.cfg, self.task, self.seed, self.device, self.flip_map = (
            cfg,
            task,
            seed,
            device,
            flip_map,
        )
        seeding.seed_everything(seed, "detector")
        self.model: Detector = Detector(cfg, checkpoint.backbone(), checkpoint.pixels).to(device)
        self.optimizer = torch.optim.SGD(
            parameter_groups(self.model, cfg.SOLVER.WEIGHT_DECAY, cfg.SOLVER.WEIGHT_DECAY_NORM),
            lr=cfg.SOLVER.BASE_LR,
            momentum=cfg.SOLVER.MOMENTUM,
        )
        self.parallel: nn.Module = self.model

    def start(self, records: Sequence[Mapping[str, Any]], first: int, last: int) -> None:
        """Open the stream of batches at iteration `first`."""
        i = self.cfg.INPUT
        augment = coco.Augment(
            tuple(i.MIN_SIZE_TRAIN),
            i.MAX_SIZE_TRAIN,
            i.RANDOM_FLIP == "horizontal",
            self.seed,
            i.MIN_SIZE_TRAIN_SAMPLING,
        )
        order = coco.Order(
            records,
            self.cfg.SOLVER.IMS_PER_BATCH,
            self.seed,
            grouped=self.cfg.DATALOADER.ASPECT_RATIO_GROUPING,
        )
        rank, world = distributed.rank(), distributed.world_size()
        self.loader = torch.utils.data.DataLoader(
            coco.TrainImages(records, augment, self.flip_map, self.task),
            batch_sampler=coco.Slots(order, first=first, last=last, rank=rank, world=world),
            num_workers=self.cfg.DATALOADER.NUM_WORKERS,
            collate_fn=list,
        )
        self.batches: Iterator[list[dict[str, Any]]] = iter(self.loader)
        if world > 1 and self.parallel is self.model:
            ids = [self.device.index] if self.device.type == "cuda" else None
            self.parallel = nn.parallel.DistributedDataParallel(
                self.model, device_ids=ids, broadcast_buffers=False
            )

    def losses(self) -> dict[str, Tensor]:
        """The next batch's losses, in training mode."""
        batch = next(self.batches)
        for name, sampler in zip(("rpn", "roi"), self.model.samplers()):
            sampler.generators = [
                seeding.generator(self.seed, name, b["iteration"], b["slot"]) for b in batch
            ]
        targets = [
            {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in b["target"].items()}
            for b in batch
        ]
        return self.parallel([b["image"] for b in batch], targets)

    def step(self) -> dict[str, Tensor]:
        losses = self.losses()
        self.optimizer.zero_grad(set_to_none=True)
        torch.stack(list(losses.values())).sum().backward()
        self.optimizer.step()
        return {k: v.detach() for k, v in losses.items()}

    def stages(self, x: Tensor) -> list[Tensor]:
        """C2..C5 of a normalised batch, in evaluation mode."""
        self.model.eval()
        with torch.no_grad():
            return list(self.model.backbone.body(x.to(self.device)).values())

    @torch.no_grad()
    def predict(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One image's detections in COCO's format, labels contiguous from 0, in the pixels of the file."""
        self.model.eval()
        image = coco.load_image(record)
        height, width = coco.shortest_edge(
            record["height"],
            record["width"],
            self.cfg.INPUT.MIN_SIZE_TEST,
            self.cfg.INPUT.MAX_SIZE_TEST,
        )
        found = self.model([coco.to_uint8(coco.resized(image, height, width))])[0]
        return to_coco(found, record, height, width)


def to_coco(
    found: Mapping[str, Tensor], record: Mapping[str, Any], height: int, width: int
) -> list[dict[str, Any]]:
    """Detections on the (height, width) image as COCO results on the original one; empty boxes are left out."""
    found = {k: v.cpu() for k, v in found.items()}
    sx, sy = record["width"] / width, record["height"] / height
    boxes = found["boxes"] * torch.tensor([sx, sy, sx, sy])
    boxes = box_ops.clip_boxes_to_image(boxes, (record["height"], record["width"]))
    keep = torch.where((boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1]))[0]
    outlines = None
    if "masks" in found:
        outlines = encode(
            paste(found["masks"][keep], boxes[keep], record["height"], record["width"])
        )
    out = []
    for n, i in enumerate(keep.tolist()):
        x1, y1, x2, y2 = boxes[i].tolist()
        item = {
            "image_id": record["image_id"],
            "category_id": int(found["labels"][i]) - 1,
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "score": float(found["scores"][i]),
        }
        if outlines is not None:
            item["segmentation"] = outlines[n]
        if "keypoints" in found:
            # Back from positions to pixel indices, as COCO stores them.
            points = found["keypoints"][i] * torch.tensor([sx, sy, 1.0]) - torch.tensor(
                [0.5, 0.5, 0.0]
            )
            item["keypoints"] = points.flatten().tolist()
        out.append(item)
    return out


def encode(masks: Tensor) -> list[dict[str, Any]]:
    """(n, H, W) bool -> COCO's compressed run lengths."""
    import numpy as np
    from pycocotools import mask

    out = []
    for m in masks.numpy():
        rle = mask.encode(np.asfortranarray(m.astype(np.uint8)))
        out.append({"size": list(rle["size"]), "counts": rle["counts"].decode()})
    return out


def parameter_groups(model: nn.Module, decay: float, norm_decay: float) -> list[dict[str, Any]]:
    """All parameters with `decay`, those of norm layers with `norm_decay`."""
    norms: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for module in model.modules():
        mine = (
            norms
            if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.GroupNorm | nn.LayerNorm)
            else others
        )
        mine += list(module.parameters(recurse=False))
    return [
        {"params": others, "weight_decay": decay},
        {"params": norms, "weight_decay": norm_decay},
    ]
