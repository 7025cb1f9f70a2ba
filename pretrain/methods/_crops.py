"""Multi-crop: views of one resolution go through the network in one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def forward_crops(network: Callable[[Tensor], Tensor], views: Sequence[Tensor]) -> list[Tensor]:
    """V views (n, 3, h, w) -> V outputs (n, d); neighbours of equal size share one forward pass."""
    out: list[Tensor] = []
    start = 0
    for stop in range(1, len(views) + 1):
        if stop == len(views) or views[stop].shape != views[start].shape:
            out += network(torch.cat(list(views[start:stop]))).chunk(stop - start)
            start = stop
    return out
