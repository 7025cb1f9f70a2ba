"""Makes Faster, Mask and Keypoint R-CNN with FPN from torchvision's parts, equal to Detectron2's.

With the weights copied across, FPN features, anchors, proposals, boxes, scores, targets and losses
are equal (tests/detection/test_parity.py, and the table in docs/detection.md). torchvision's own
defaults differ in base anchors (rounded), RoIAlign (not aligned), FPN (no norm), losses (smooth L1,
beta 1/9), mask targets (resampled bitmaps), head initialisation, top-k and input resize. Here each
is Detectron2's, and rcnn/, data/images.py and data/masks.py say so at the lines.

Four things differ:
- Images are padded to the largest of the global batch, not of one GPU's share, and losses are
  normalised over the global batch, so that a run does not depend on the number of processes.
- All images of a batch are drawn in groups of four of one orientation; Detectron2 groups per loader
  worker.
- fg/bg sampling draws from a generator per image, Detectron2 from the global one.
- There is no CIoU, no Cascade and no C4: other keys and values are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchvision.ops import boxes as box_ops

from backbench.detection import backbones, dialect
from backbench.detection.backbones import FPN, RESNET_FPN, SIMPLE
from backbench.detection.data.dataset_dicts import Detection, ImageRecord
from backbench.detection.data.images import (
    ResizeAndFlip,
    TrainImages,
    TrainSample,
    TrainTarget,
    load_image,
    resized,
    shortest_edge,
    to_uint8,
)
from backbench.detection.data.masks import paste
from backbench.detection.dialect import Given, Value
from backbench.detection.engine import DetectionEngine
from backbench.detection.rcnn.detector import Detector
from backbench.errors import BadInput
from backbench.parallel import distributed, loading
from backbench.parallel.loading import Unreadable
from backbench.runs import seeding

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

# Keys of the dialect -> the only values of them that this engine implements
IMPLEMENTED: dict[str, tuple[Value, ...]] = {
    "MODEL.META_ARCHITECTURE": ("GeneralizedRCNN",),
    "MODEL.BACKBONE.NAME": (RESNET_FPN, FPN, SIMPLE),
    **backbones.WHOLE_TRUNK,
    "MODEL.RESNETS.DEPTH": (18, 34, 50, 101, 152),
    "MODEL.FPN.NORM": ("SyncBN", "BN", "LN", ""),
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


class TorchvisionEngine(DetectionEngine):
    name = "torchvision"
    model: Detector

    @staticmethod
    def read_config(given: Given) -> CfgNode:
        # First, because a config of other heads has other keys, too, which say less
        for key, allowed in IMPLEMENTED.items():
            if key not in given.values:
                continue
            value = given.values[key]
            if isinstance(value, tuple):
                value = list(value)
            if value not in allowed:
                raise BadInput(
                    f"{given.path}: {key} is {value!r}; the torchvision engine has "
                    f"{' or '.join(map(repr, allowed))} "
                    "(Detectron2 may have it: --engine detectron2)"
                )
        return dialect.embedded(given)

    def build(self) -> Detector:
        # A fresh trunk is drawn before the heads, as it always was: a seed keeps their weights.
        point = self.checkpoint
        trunk = point.family.build(point.arch, point.stem, point.reading)
        trunk.load_state_dict(dict(point.state_dict), strict=True)
        return Detector(self.cfg, trunk, point.pixels).to(self.device)

    def build_optimizer(self) -> torch.optim.Optimizer:
        return backbones.optimizer(self.model, self.model.backbone.body, self.cfg)

    def start(self, records: Sequence[ImageRecord], first: int, last: int) -> None:
        augment = ResizeAndFlip.of(self.cfg, self.seed)
        cores = loading.cores(distributed.world_size())
        self.batches: Iterator[list[TrainSample] | Unreadable] = loading.batches(
            TrainImages(
                records,
                augment,
                self.flip_map,
                self.task,
                bitmasks=self.cfg.INPUT.MASK_FORMAT == "bitmask",
            ),
            self.slots(records, first, last),
            workers=min(self.cfg.DATALOADER.NUM_WORKERS, cores),
            pin=self.device.type == "cuda",
            collate=list,
        )
        self.spread()

    def losses(self) -> dict[str, Tensor]:
        batch = next(self.batches)
        if isinstance(batch, Unreadable):
            raise BadInput(batch.error)
        images = []
        targets = []
        for sample in batch:
            images.append(sample["image"])
            # Polygons stay on the CPU, where they are rasterised.
            target: TrainTarget = {**sample["target"]}
            target["boxes"] = distributed.sent(target["boxes"], self.device)
            target["labels"] = distributed.sent(target["labels"], self.device)
            if "keypoints" in target:
                target["keypoints"] = distributed.sent(target["keypoints"], self.device)
            targets.append(target)
        # Whatever is drawn for an image depends on its place in the run, not on the rank that has
        # it.
        for name, sampler in self.model.samplers().items():
            sampler.generators = [
                seeding.generator(self.seed, name, sample["iteration"], sample["slot"])
                for sample in batch
            ]
        return self.parallel(images, targets)

    def step(self) -> dict[str, Tensor]:
        self.parallel.train()
        with self.amp.autocast():
            losses = self.losses()
        total = torch.stack([value.float() for value in losses.values()]).sum()
        self.amp.descend(total, self.optimizer)
        return {k: v.detach() for k, v in losses.items()}

    @torch.no_grad()
    def stages(self, x: Tensor) -> list[Tensor]:
        self.model.eval()
        return self.model.backbone.body.stages(x.to(self.device))

    def read(self, record: ImageRecord) -> Tensor:
        """Read an image at the size of testing: uint8 (3, H, W)."""
        height, width = shortest_edge(
            record["height"],
            record["width"],
            self.cfg.INPUT.MIN_SIZE_TEST,
            self.cfg.INPUT.MAX_SIZE_TEST,
        )
        return to_uint8(resized(load_image(record), height, width))

    @torch.no_grad()
    def detect(self, image: Tensor, record: ImageRecord) -> list[Detection]:
        self.model.eval()
        height, width = image.shape[-2:]
        return to_coco(self.model([image])[0], record, height, width)


def to_coco(
    detections: Mapping[str, Tensor], record: ImageRecord, height: int, width: int
) -> list[Detection]:
    """Turn the heads' detections on a (height, width) image into COCO results on the original.

    The tensors are those of RCNNHeads. Boxes that are empty after clipping are left out, as in
    detectron2/modeling/postprocessing.py::detector_postprocess.
    """
    detections = {k: v.cpu() for k, v in detections.items()}
    # 1. Boxes, in pixels of the file
    scale_x = record["width"] / width
    scale_y = record["height"] / height
    boxes = detections["boxes"] * torch.tensor([scale_x, scale_y, scale_x, scale_y])
    boxes = box_ops.clip_boxes_to_image(boxes, (record["height"], record["width"]))
    has_area = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    keep = torch.where(has_area)[0]
    out: list[Detection] = []
    for i in keep.tolist():
        x1, y1, x2, y2 = boxes[i].tolist()
        item: Detection = {
            "image_id": record["image_id"],
            "category_id": int(detections["labels"][i]) - 1,  # 0 is the background
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "score": float(detections["scores"][i]),
        }
        out.append(item)
    # 2. Masks, moved from their boxes to the whole image
    if "masks" in detections:
        pasted = paste(
            detections["masks"][keep], boxes[keep], record["height"], record["width"]
        )
        for item, outline in zip(out, pasted):
            item["segmentation"] = outline
    # 3. Keypoints, turned from positions back to pixel indices, as COCO stores them
    if "keypoints" in detections:
        scale = torch.tensor([scale_x, scale_y, 1.0])
        half = torch.tensor([0.5, 0.5, 0.0])
        for item, points in zip(out, detections["keypoints"][keep]):
            item["keypoints"] = (points * scale - half).flatten().tolist()
    return out
