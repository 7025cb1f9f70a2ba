"""Converts outlines between four forms: polygons (trained on), a small grid on a box (what a head
sees and says), a bitmap of the image, and COCO's run lengths (stored)."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.detection.data.dataset_dicts import Outline, Polygon, RunLength
from backbench.parallel import distributed


def rasterise(
    polygons: Sequence[Sequence[np.ndarray]], boxes: Tensor, size: int
) -> Tensor:
    """Draw each object's polygons on the size x size grid of its box, boxes (n, 4): (n, size, size)
    float in {0, 1}. detectron2/structures/masks.py::rasterize_polygons_within_box, where
    torchvision's project_masks_on_boxes resamples bitmaps of the whole image with RoIAlign."""
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
        out[i] = torch.from_numpy(
            mask.decode(mask.merge(mask.frPyObjects(moved, size, size)))
        )
    return distributed.sent(out, boxes.device)


def paste(masks: Tensor, boxes: Tensor, height: int, width: int) -> list[RunLength]:
    """(n, M, M) probabilities on boxes (n, 4) -> COCO's compressed run lengths, sampled at pixel
    centres and cut at a half: detectron2/layers/mask_ops.py::paste_masks_in_image (torchvision's
    rounds boxes to whole pixels). Only a box's own pixels are looked at: whole bitmaps for 100
    masks, made and read again, cost more than the masks (benchmarks/detectors.txt)."""
    out: list[RunLength] = []
    for mask, box in zip(masks.cpu(), boxes.cpu()):
        x1, y1, x2, y2 = box.tolist()
        # 1. The pixels that the box can touch, one more on each side: none of a box that is empty or
        #    beside the image
        left, top = max(int(x1) - 1, 0), max(int(y1) - 1, 0)
        right, bottom = min(math.ceil(x2) + 1, width), min(math.ceil(y2) + 1, height)
        w, h = max(right - left, 0) * (x2 > x1), max(bottom - top, 0) * (y2 > y1)
        # 2. Their centres on the mask, which reaches from -1 to 1
        gx = (torch.arange(left, left + w) + 0.5 - x1) / (x2 - x1) * 2 - 1
        gy = (torch.arange(top, top + h) + 0.5 - y1) / (y2 - y1) * 2 - 1
        grid = torch.stack((gx.expand(h, w), gy[:, None].expand(h, w)), -1)[None]
        # 3. Bilinear; outside of the mask is 0
        sampled = F.grid_sample(mask[None, None], grid, align_corners=False)[0, 0]
        out.append(encode((sampled >= 0.5).numpy(), left, top, (height, width)))
    return out


def encode(part: np.ndarray, left: int, top: int, size: tuple[int, int]) -> RunLength:
    """Encode a (h, w) bool part of an otherwise empty image of (height, width) `size` as COCO's
    compressed run lengths, which count pixels down the columns, zeros first."""
    from pycocotools import mask

    height, width = size
    # 1. Where a run of ones begins and where it has ended, in turn: column behind column, each with
    #    a zero before and behind it
    columns = np.zeros((part.shape[1], part.shape[0] + 2), bool)
    columns[:, 1:-1] = part.T
    row = columns.reshape(-1)
    change = np.flatnonzero(row[1:] != row[:-1])
    # 2. Counted from the first pixel of the image
    column, pixel = np.divmod(change, part.shape[0] + 2)
    edges = (left + column) * height + top + pixel
    # 3. A run that ends at the bottom goes on in the next column: both edges are one place.
    if len(edges) > 2:
        joined = np.flatnonzero(edges[2::2] == edges[1:-1:2])
        edges = np.delete(edges, np.concatenate([2 * joined + 1, 2 * joined + 2]))
    counts = np.diff(edges, prepend=0, append=height * width).tolist()
    if counts[-1] == 0:  # ones up to the last pixel
        counts.pop()
    rle = mask.frPyObjects({"size": [height, width], "counts": counts}, height, width)
    return {"size": list(rle["size"]), "counts": rle["counts"].decode()}


def outlines(outline: Outline | None) -> list[Polygon]:
    """An outline as polygons: COCO's polygons unchanged, a run-length mask by its contours."""
    if not outline:
        return []
    if isinstance(outline, list):
        return outline
    import cv2
    from pycocotools import mask

    run_lengths: object = outline
    if isinstance(outline["counts"], list):
        run_lengths = mask.frPyObjects(outline, *outline["size"])
    contours, _ = cv2.findContours(
        mask.decode(run_lengths), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE
    )
    return [c.reshape(-1).tolist() for c in contours if len(c) >= 3]
