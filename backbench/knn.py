"""Weighted k-nearest-neighbour classification (Wu et al. 2018): no training, no choice but k and the temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def knn_scores(
    queries: Tensor,
    bank: Tensor | Sequence[Tensor],
    labels: Tensor,
    *,
    classes: int,
    k: Sequence[int] = (5, 20, 200),
    temperature: float = 0.07,
    rows: int = 1024,
    columns: int = 65536,
) -> dict[int, Tensor]:
    """Per k the class votes (N, classes) of `queries` (N, d) by `bank` (M, d), or its parts, with `labels` (M,).

    Cosine similarity; a neighbour of similarity s votes exp(s / temperature), here exp((s - 1) / temperature), which
    is the same up to one factor and cannot overflow. At most `rows` x `columns` similarities are held at a time.
    Raises ValueError when some k exceeds M.
    """
    parts = [bank] if isinstance(bank, Tensor) else list(bank)
    if max(k) > (count := sum(len(part) for part in parts)):
        raise ValueError(f"k = {max(k)} neighbours of {count} images")
    device = queries.device
    queries = F.normalize(queries.float(), dim=1)
    near = torch.empty(len(queries), 0, device=device)
    index = torch.empty(len(queries), 0, dtype=torch.int64, device=device)
    offset = 0
    for block in (block for part in parts for block in part.split(columns)):
        unit = F.normalize(block.to(device).float(), dim=1)
        best_near, best_index = [], []
        for begin in range(0, len(queries), rows):
            similarity = queries[begin : begin + rows] @ unit.T
            top, where = similarity.topk(min(max(k), len(unit)), dim=1)
            merged = torch.cat((near[begin : begin + rows], top), 1)
            places = torch.cat((index[begin : begin + rows], where + offset), 1)
            top, where = merged.topk(min(max(k), merged.shape[1]), dim=1)
            best_near.append(top)
            best_index.append(places.gather(1, where))
        near, index = torch.cat(best_near), torch.cat(best_index)
        offset += len(unit)
    votes = ((near - 1) / temperature).exp()
    voted = labels.to(device)[index]
    out = {}
    for size in k:
        score = torch.zeros(len(queries), classes, device=device)
        out[size] = score.scatter_add_(1, voted[:, :size], votes[:, :size])
    return out
