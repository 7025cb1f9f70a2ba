"""Converts outlines between four forms: polygons (which are trained on), a small grid on a box
(which a mask head predicts), a bitmap of the image (trained on by INPUT.MASK_FORMAT bitmask), and
COCO's run lengths (which are stored)."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import roi_align

from backbench.detection.data.dataset_dicts import Outline, Polygon, RunLength
from backbench.parallel import distributed


def rasterise(
    polygons: Sequence[Sequence[np.ndarray]], boxes: Tensor, size: int
) -> Tensor:
    """Draw each object's polygons on the size x size grid of its box.

    Takes boxes (n, 4) and returns (n, size, size) float in {0, 1}. This is
    detectron2/structures/masks.py::rasterize_polygons_within_box; torchvision's
    project_masks_on_boxes resamples bitmaps of the whole image with RoIAlign instead.
    """
    from pycocotools import mask

    out = torch.zeros(len(boxes), size, size)
    for i, (object_polygons, box) in enumerate(zip(polygons, boxes.cpu().numpy())):
        width = box[2] - box[0]
        height = box[3] - box[1]
        on_grid = []
        for polygon in object_polygons:
            points = np.array(polygon, np.float64)
            points[0::2] = (points[0::2] - box[0]) * (size / max(width, 0.1))
            points[1::2] = (points[1::2] - box[1]) * (size / max(height, 0.1))
            on_grid.append(points)
        run_lengths = mask.merge(mask.frPyObjects(on_grid, size, size))
        out[i] = torch.from_numpy(mask.decode(run_lengths))
    return distributed.sent(out, boxes.device)


def bitmap(
    outline: Sequence[np.ndarray] | RunLength,
    height: int,
    width: int,
    *,
    mirrored: bool = False,
) -> np.ndarray:
    """Draw an object on an image of this size: bool (height, width).

    Polygons are in its pixels, and mirrored already. Run lengths are in those of the file: they are
    resized to the nearest pixel and then mirrored, as ResizeTransform.apply_segmentation does in
    detectron2/data/transforms.
    """
    from PIL import Image
    from pycocotools import mask

    if not isinstance(outline, dict):
        run_lengths = mask.frPyObjects(list(outline), height, width)
        return mask.decode(mask.merge(run_lengths)).astype(bool)
    pixels = Image.fromarray(mask.decode(outline))
    if pixels.size != (width, height):
        pixels = pixels.resize((width, height), Image.Resampling.NEAREST)
    drawn = np.asarray(pixels).astype(bool)
    return drawn[:, ::-1] if mirrored else drawn


def crop(bitmaps: Tensor, of_box: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Sample bitmaps (n, H, W) bool on the size x size grids of boxes (R, 4).

    `of_box` (R,) says which bitmap each box wants. Returns (R, size, size) float in {0, 1}. This is
    detectron2/structures/masks.py::BitMasks.crop_and_resize.
    """
    on_boxes = boxes.cpu()
    rows = torch.cat([of_box.cpu()[:, None].to(on_boxes), on_boxes], 1)
    sampled = roi_align(
        bitmaps[:, None].float(), rows, size, 1.0, sampling_ratio=0, aligned=True
    )
    return distributed.sent((sampled[:, 0] >= 0.5).float(), boxes.device)


def paste(masks: Tensor, boxes: Tensor, height: int, width: int) -> list[RunLength]:
    """Turn (n, M, M) probabilities on boxes (n, 4) into COCO's compressed run lengths.

    The mask is sampled at the centres of pixels and cut at a half, as in
    detectron2/layers/mask_ops.py::paste_masks_in_image (torchvision's rounds boxes to whole
    pixels). Only the pixels of a box are sampled: making whole bitmaps for 100 masks and reading
    them again takes longer than the masks themselves (benchmarks/detectors.txt).
    """
    out: list[RunLength] = []
    for mask, box in zip(masks.cpu(), boxes.cpu()):
        x1, y1, x2, y2 = box.tolist()
        # 1. The pixels that the box can touch, and one more on each side. A box that is empty, or
        #    lies beside the image, has none.
        left = max(int(x1) - 1, 0)
        top = max(int(y1) - 1, 0)
        right = min(math.ceil(x2) + 1, width)
        bottom = min(math.ceil(y2) + 1, height)
        w = max(right - left, 0) if x2 > x1 else 0
        h = max(bottom - top, 0) if y2 > y1 else 0
        # 2. Their centres in the coordinates of the mask, which reaches from -1 to 1
        grid_x = (torch.arange(left, left + w) + 0.5 - x1) / (x2 - x1) * 2 - 1
        grid_y = (torch.arange(top, top + h) + 0.5 - y1) / (y2 - y1) * 2 - 1
        grid = torch.stack((grid_x.expand(h, w), grid_y[:, None].expand(h, w)), -1)
        # 3. Bilinear sampling, which reads 0 outside the mask
        sampled = F.grid_sample(mask[None, None], grid[None], align_corners=False)[0, 0]
        out.append(encode((sampled >= 0.5).numpy(), left, top, (height, width)))
    return out


def encode(part: np.ndarray, left: int, top: int, size: tuple[int, int]) -> RunLength:
    """Encode a bool part (h, w) of an otherwise empty image as COCO's compressed run lengths.

    `size` is the image's (height, width), and (left, top) is where the part lies in it. Run lengths
    count pixels down the columns, zeros first.
    """
    from pycocotools import mask

    height, width = size
    # 1. Put column behind column, each with a zero before and behind it. Then the places where the
    #    value changes are, in turn, the beginning of a run of ones and its end.
    columns = np.zeros((part.shape[1], part.shape[0] + 2), bool)
    columns[:, 1:-1] = part.T
    row = columns.reshape(-1)
    change = np.flatnonzero(row[1:] != row[:-1])
    # 2. Count these places from the first pixel of the image.
    column, pixel = np.divmod(change, part.shape[0] + 2)
    edges = (left + column) * height + top + pixel
    # 3. A run that ends at the bottom of the image may go on at the top of the next column. Its end
    #    and the next beginning are then one place, and no edge.
    if len(edges) > 2:
        joined = np.flatnonzero(edges[2::2] == edges[1:-1:2])
        edges = np.delete(edges, np.concatenate([2 * joined + 1, 2 * joined + 2]))
    counts = np.diff(edges, prepend=0, append=height * width).tolist()
    if counts[-1] == 0:
        # The last pixel is a one, so no zeros follow.
        counts.pop()
    rle = mask.frPyObjects({"size": [height, width], "counts": counts}, height, width)
    return {"size": list(rle["size"]), "counts": rle["counts"].decode()}


def outlines(outline: Outline | None) -> list[Polygon]:
    """Return an outline's polygons: COCO's unchanged, those of a run-length mask from its contours."""
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
