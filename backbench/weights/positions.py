"""Position embeddings for another grid of patches, by the rule of those who trained them.

Every rule is bicubic; they differ in where the samples lie and in what is done before (features of
a ViT at 224 instead of 518 pixels move by up to 2% from one rule to another):

    +0.1   the scale is (n + 0.1) / M, no antialiasing: DINO, iBOT, DINOv2 without registers
           (facebookresearch/dinov2: dinov2/models/vision_transformer.py, interpolate_pos_encoding)
    aa     to the size, antialiased: DINOv2 with registers, timm
    size   to the size, no antialiasing: MAE (facebookresearch/mae: util/pos_embed.py), Detectron2
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

RULES = ("+0.1", "aa", "size")
_OFFSET = 0.1


def resized(embedding: Tensor, grid: tuple[int, int], *, prefix: int, rule: str) -> Tensor:
    """(1, prefix + s * s, D) of a square grid -> (1, prefix + h * w, D) for `grid` = (h, w).

    The first `prefix` embeddings are the class token's and its like's: they stay.
    """
    first, patches = embedding[:, :prefix], embedding[:, prefix:]
    side = round(patches.shape[1] ** 0.5)
    if grid == (side, side):
        return embedding
    # 1. (1, s * s, D) -> (1, D, s, s), in float32: weights in bf16 would lose their places
    maps = patches.float().reshape(1, side, side, -1).permute(0, 3, 1, 2)
    # 2. The new grid
    if rule == "+0.1":
        scale = tuple((n + _OFFSET) / side for n in grid)
        maps = F.interpolate(maps, scale_factor=scale, mode="bicubic", antialias=False)
        assert maps.shape[-2:] == grid, f"{maps.shape[-2:]} instead of {grid}"
    else:
        maps = F.interpolate(maps, size=grid, mode="bicubic", antialias=rule == "aa")
    # 3. Back in a row
    rows = maps.permute(0, 2, 3, 1).reshape(1, grid[0] * grid[1], -1).to(embedding.dtype)
    return torch.cat([first, rows], dim=1)
