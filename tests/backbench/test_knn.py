"""Weighted kNN against a plain loop, whole or in blocks."""

import math

import pytest
import torch

from backbench.knn import knn_scores


def by_hand(queries, bank, labels, *, classes, k, temperature):
    out = torch.zeros(len(queries), classes, dtype=torch.float64)
    for i, q in enumerate(queries.double()):
        scores = [float(q @ b / (q.norm() * b.norm())) for b in bank.double()]
        similarity = list(zip(scores, map(int, labels)))
        for s, y in sorted(similarity, reverse=True)[:k]:
            out[i, y] += math.exp((s - 1) / temperature)
    return out


@pytest.mark.parametrize("columns", [7, 65536])
def test_votes(columns):
    torch.manual_seed(0)
    bank, labels, queries = torch.randn(50, 8), torch.randint(0, 4, (50,)), torch.randn(9, 8)
    how = {"classes": 4, "k": (1, 5, 20), "temperature": 0.07, "rows": 4, "columns": columns}
    found = knn_scores(queries, (bank[:30], bank[30:]), labels, **how)
    for k in (1, 5, 20):
        expected = by_hand(queries, bank, labels, classes=4, k=k, temperature=0.07)
        torch.testing.assert_close(found[k].double(), expected, rtol=1e-4, atol=1e-9)


def test_scale_of_the_features_does_not_matter_and_k_is_limited():
    torch.manual_seed(0)
    bank, labels = torch.randn(20, 8), torch.arange(20) % 3
    a = knn_scores(bank * 100, bank, labels, classes=3, k=(5,))[5]
    b = knn_scores(bank, bank * 1e-3, labels, classes=3, k=(5,))[5]
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-9)
    with pytest.raises(ValueError, match="k = 21 neighbours of 20 images"):
        knn_scores(bank, bank, labels, classes=3, k=(21,))


def test_votes_are_added_exactly():
    """To the last digit of float32, so that the order, which on a GPU is any, cannot matter."""
    torch.manual_seed(0)
    # Along the axes, so that a similarity is one of the query's entries
    bank, labels = torch.eye(8).repeat(50, 1), torch.arange(400) % 3
    queries = torch.nn.functional.normalize(torch.randn(50, 8))
    found = knn_scores(queries, bank, labels, classes=3, k=(400,))[400]
    near = torch.nn.functional.normalize(queries) @ bank.T
    votes = ((near - 1).double() / 0.07).exp()
    for label in range(3):
        exact = [math.fsum(row) for row in votes[:, labels == label].tolist()]
        assert torch.equal(found[:, label], torch.tensor(exact, dtype=torch.float64).float())
