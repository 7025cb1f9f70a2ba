"""A mask's way onto its image, straight to run lengths, against bitmaps."""

import numpy as np
import pytest
import torch
from pycocotools import mask

from detection.data.masks import encode, paste


@pytest.mark.parametrize("seed", range(8))
def test_a_part_of_an_image_in_run_lengths(seed):
    """Those of pycocotools for the whole bitmap, also where a run goes on in the next column."""
    rng = np.random.default_rng(seed)
    height, width = (int(v) for v in rng.integers(1, 12, 2))
    h, w = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
    top, left = int(rng.integers(0, height - h + 1)), int(rng.integers(0, width - w + 1))
    for part in (rng.random((h, w)) < 0.7, np.ones((h, w), bool), np.zeros((h, w), bool)):
        image = np.zeros((height, width), np.uint8)
        image[top : top + h, left : left + w] = part
        whole = mask.encode(np.asfortranarray(image))
        found = encode(part, left, top, (height, width))
        assert found == {"size": [height, width], "counts": whole["counts"].decode()}


def test_pasted_as_detectron2_does():
    pytest.importorskip("detectron2", reason="Detectron2 is not installed: `make detectron2`")
    from detectron2.layers.mask_ops import paste_masks_in_image
    from detectron2.structures import Boxes

    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(20, 28, 28, generator=generator)
    corners = torch.rand(20, 2, generator=generator) * torch.tensor([70.0, 50.0])
    sides = 1 + torch.rand(20, 2, generator=generator) * 60
    boxes = torch.cat([corners, corners + sides], 1).clamp(max=torch.tensor([90.0, 70, 90, 70]))
    theirs = paste_masks_in_image(masks, Boxes(boxes), (70, 90)).numpy()
    for ours, reference in zip(paste(masks, boxes, 70, 90), theirs, strict=True):
        # A value at a half may fall on either side.
        assert (mask.decode(ours).astype(bool) != reference).sum() <= 2
