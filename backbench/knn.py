"""Nearest neighbours, and classification by their weighted votes (Wu et al. 2018): nothing is trained."""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

VOTE = 1 << 48  # the largest vote; as many as 32,767 of them fit


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
    """Per k the class votes (N, classes) of `queries` (N, d) by a bank with `labels` (M,). `bank`
    is (M, d), or its parts. A neighbour of cosine similarity s votes exp(s / temperature). At most
    `rows` x `columns` similarities are held at a time. ValueError if some k exceeds M."""
    parts = [bank] if isinstance(bank, Tensor) else list(bank)
    if max(k) > (count := sum(len(part) for part in parts)):
        raise ValueError(f"k = {max(k)} neighbours of {count} images")
    device = queries.device
    blocks: list[Tensor] = []
    for part in parts:
        blocks += part.split(columns)
    near, index = nearest(queries, blocks, most=max(k), rows=rows)
    # exp((s - 1) / temperature) is the vote up to one factor, and cannot overflow. Counted in whole
    # steps: a GPU adds in any order, and only integers come to the same sum
    votes = (((near - 1).double() / temperature).exp() * VOTE).round().long()
    # Neighbours are sorted, so the first k columns are the k nearest: one search serves every k.
    voted = labels.to(device)[index]
    out = {}
    for size in k:
        score = torch.zeros(len(queries), classes, dtype=torch.int64, device=device)
        score.scatter_add_(1, voted[:, :size], votes[:, :size])
        out[size] = (score.double() / VOTE).float()
    return out


@torch.no_grad()
def nearest(
    queries: Tensor,
    blocks: Iterable[Tensor],
    *,
    most: int,
    rows: int = 1024,
    distance: Literal["cosine", "l2"] = "cosine",
) -> tuple[Tensor, Tensor]:
    """The `most` nearest in a bank of blocks to `queries` (N, d): similarities (N, most), best
    first, and places. For `l2` a similarity is q b - b b / 2, which falls as the distance rises."""
    cosine = distance == "cosine"
    queries = F.normalize(queries.float(), dim=1) if cosine else queries.float()
    # Invariant: after each block, `near` and `index` are right for what was seen of the bank so far.
    # The best of a union are among the best of its parts, so a block brings only its own to the merge.
    near = torch.empty(len(queries), 0, device=queries.device)
    index = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    seen = 0  # rows of the bank before this block
    for block in blocks:
        own = block.to(queries.device).float()
        own = F.normalize(own, dim=1) if cosine else own
        half = 0.0 if cosine else own.square().sum(1) / 2
        best_near, best_index = [], []
        for begin in range(0, len(queries), rows):
            mine = slice(begin, begin + rows)
            # 1. The block's own best for these queries, as places in the whole bank.
            similarity = queries[mine] @ own.T - half
            top, where = similarity.topk(min(most, len(own)), dim=1)
            # 2. Merged with the best so far.
            merged = torch.cat((near[mine], top), 1)
            places = torch.cat((index[mine], where + seen), 1)
            top, where = merged.topk(min(most, merged.shape[1]), dim=1)
            best_near.append(top)
            best_index.append(places.gather(1, where))
        near, index = torch.cat(best_near), torch.cat(best_index)
        seen += len(own)
    return near, index
