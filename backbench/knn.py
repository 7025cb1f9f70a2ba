"""Finds nearest neighbours, and classifies by their weighted votes (Wu et al. 2018).

Nothing is trained."""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# The largest vote, in whole steps. The sum of 32,767 of them fits into an int64
VOTE = 1 << 48


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
    """Return, for each k, the class votes (N, classes) of `queries` (N, d).

    `bank` is (M, d), or its parts, with `labels` (M,). A neighbour of cosine similarity s votes
    exp(s / temperature). At most `rows` x `columns` similarities are held at a time. ValueError if
    some k exceeds M."""
    parts = [bank] if isinstance(bank, Tensor) else list(bank)
    count = sum(len(part) for part in parts)
    if max(k) > count:
        raise ValueError(f"k = {max(k)} neighbours of {count} images")
    device = queries.device
    blocks: list[Tensor] = []
    for part in parts:
        blocks += part.split(columns)
    near, index = nearest(queries, blocks, most=max(k), rows=rows)
    # exp((s - 1) / temperature) is the vote up to one factor, and cannot overflow. Votes are whole
    # numbers, because a GPU adds in any order, and only of integers the sum is always the same
    votes = (((near - 1).double() / temperature).exp() * VOTE).round().long()
    # Neighbours are sorted, so the first k columns are the k nearest: one search serves every k
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
    """Find the `most` nearest to each of `queries` (N, d) in a bank that comes in blocks (m, d).

    Return their similarities (N, most), best first, and their places in the bank. For `l2` a
    similarity is q b - b b / 2, which falls as the distance rises."""
    cosine = distance == "cosine"
    queries = queries.float()
    if cosine:
        queries = F.normalize(queries, dim=1)
    # Invariant: after each block, `near` and `index` are right for what was seen of the bank so far.
    # The best of a union are among the best of its parts, so a block brings only its best to the
    # merge
    near = torch.empty(len(queries), 0, device=queries.device)
    index = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    seen = 0  # rows of the bank before this block
    for block in blocks:
        own = block.to(queries.device).float()
        half: Tensor | float
        if cosine:
            own = F.normalize(own, dim=1)
            half = 0.0
        else:
            half = own.square().sum(1) / 2
        best_near = []
        best_index = []
        for begin in range(0, len(queries), rows):
            mine = slice(begin, begin + rows)
            # 1. The block's own best for these queries
            similarity = queries[mine] @ own.T - half
            top, where = similarity.topk(min(most, len(own)), dim=1)
            # 2. Merged with the best so far, as places in the whole bank
            merged = torch.cat((near[mine], top), 1)
            places = torch.cat((index[mine], where + seen), 1)
            top, where = merged.topk(min(most, merged.shape[1]), dim=1)
            best_near.append(top)
            best_index.append(places.gather(1, where))
        near = torch.cat(best_near)
        index = torch.cat(best_index)
        seen += len(own)
    return near, index
