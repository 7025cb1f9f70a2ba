"""Outlines in their four forms: polygons (what is trained on), a small grid on a box (what a head
sees and says), a bitmap of the image, and COCO's run lengths (what is stored)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from detection.data.records import Outline, Polygon, RunLength


def rasterise(polygons: Sequence[Sequence[np.ndarray]], boxes: Tensor, size: int) -> Tensor:
    """Each object's polygons on the size x size grid of its box, boxes (n, 4): (n, size, size)
    float in {0, 1}.

    detectron2/structures/masks.py::rasterize_polygons_within_box, where torchvision's
    project_masks_on_boxes resamples bitmaps of the whole image with RoIAlign.
    """
    from pycocotools import mask

    out = torch.zeros(len(boxes), size, size)
    for i, (parts, box) in enumerate(zip(polygons, boxes.cpu().numpy())):
        w, h = box[2] - box[0], box[3] - box[1]
        moved = []
        for part in parts:
            p = np.array(part, np.float64)
            p[0::2] = (p[0::2] - box[0]) * (size / max(w, 0.1))
            p[1::2] = (p[1::2] - box[1]) * (size / max(h, 0.1))
            moved.append(p)
        out[i] = torch.from_numpy(mask.decode(mask.merge(mask.frPyObjects(moved, size, size))))
    return out.to(boxes.device)


def paste(masks: Tensor, boxes: Tensor, height: int, width: int) -> Tensor:
    """(n, M, M) probabilities on their boxes (n, 4) -> (n, height, width) bool: sampled at pixel
    centres, cut at a half, as detectron2/layers/mask_ops.py::paste_masks_in_image does.
    torchvision's paste_masks_in_image rounds the boxes to whole pixels."""
    out = torch.zeros(len(masks), height, width, dtype=torch.bool)
    for i, (mask, box) in enumerate(zip(masks.cpu(), boxes.cpu())):
        x1, y1, x2, y2 = box.tolist()
        # 1. The pixels that the box can touch, one more on each side
        left, top = max(int(x1) - 1, 0), max(int(y1) - 1, 0)
        right, bottom = min(math.ceil(x2) + 1, width), min(math.ceil(y2) + 1, height)
        # 2. Their centres on the mask, which reaches from -1 to 1
        gx = (torch.arange(left, right) + 0.5 - x1) / (x2 - x1) * 2 - 1
        gy = (torch.arange(top, bottom) + 0.5 - y1) / (y2 - y1) * 2 - 1
        grid = torch.stack(torch.meshgrid(gx, gy, indexing="xy"), -1)[None]
        # 3. Bilinear; outside of the mask is 0
        sampled = F.grid_sample(mask[None, None], grid, align_corners=False)[0, 0]
        out[i, top:bottom, left:right] = sampled >= 0.5
    return out


def encode(masks: Tensor) -> list[RunLength]:
    """(n, H, W) bool -> COCO's compressed run lengths."""
    from pycocotools import mask

    out: list[RunLength] = []
    for m in masks.numpy():
        rle = mask.encode(np.asfortranarray(m.astype(np.uint8)))
        out.append({"size": list(rle["size"]), "counts": rle["counts"].decode()})
    return out


def outlines(outline: Outline | None) -> list[Polygon]:
    """COCO polygons as they are; a run-length mask by its contours; none where there is none."""
    if not outline:
        return []
    if isinstance(outline, list):
        return outline
    import cv2
    from pycocotools import mask

    stored: object = outline
    if isinstance(outline["counts"], list):
        stored = mask.frPyObjects(outline, *outline["size"])
    contours, _ = cv2.findContours(mask.decode(stored), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    return [c.reshape(-1).tolist() for c in contours if len(c) >= 3]
