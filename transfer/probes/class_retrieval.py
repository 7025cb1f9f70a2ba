"""Each test image is a query for the others of its class among all test images; nothing is trained.

`r1` is the share of queries whose nearest image is of their class. `map_r` is the mean of MAP@R
(Musgrave et al., arXiv:2003.08505): with R other images of the query's class, the sum of the
precision at those ranks up to R that hold one of them, over R. An image that is alone in its class
is no query, but the others may find it.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.records.store import Result
from backbench.runs.state import StopFlag
from backbench.transfer import keeping
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocol import Protocol

METRICS = ("r1", "map_r")


@dataclass(frozen=True, kw_only=True)
class ClassRetrieval(Protocol):
    """The other test images of a query's class, found by cosine similarity."""


def refuse(p: ClassRetrieval, name: str, splits: Splits) -> None:
    """Raise BadInput if no class has two test images."""
    if len(set(splits.test.labels)) == len(splits.test):
        raise BadInput(
            f"{name}: no class has two test images, so there is nothing to retrieve"
        )


@torch.no_grad()
def retrieve(
    features: Tensor, labels: Tensor, rows: int = 512
) -> tuple[Tensor, Tensor]:
    """Return two float64 tensors (N,) for features (N, d) and labels (N,): whether the nearest other
    image is of an image's class, and its average precision at R. Both are nan for an image that is alone in
    its class. Similarity is the cosine in float64, and of equal ones the first image is nearer.
    `rows` queries are compared at a time."""
    unit = F.normalize(features.double(), dim=1)
    others = torch.bincount(labels)[labels] - 1  # R of each image
    most = int(others.max())
    rank = torch.arange(1, most + 1, device=labels.device, dtype=torch.float64)
    nearest = []
    precisions = []
    for begin in range(0, len(unit), rows):
        mine = slice(begin, begin + rows)
        # 1. The image itself is left out by its place: a copy of it is another image.
        similarity = unit[mine] @ unit.T
        similarity.diagonal(begin).fill_(-torch.inf)
        order = similarity.sort(dim=1, descending=True, stable=True).indices[:, :most]
        # 2. Precision at each rank is summed over the ranks up to R that are right. For an image
        #    that is alone, R is 0 and the quotient 0 / 0 is nan.
        right = labels[order] == labels[mine, None]
        precision = right.cumsum(1) / rank
        counted = right & (rank <= others[mine, None])
        precisions.append((precision * counted).sum(1) / others[mine])
        nearest.append(right[:, 0])
    average = torch.cat(precisions)
    hit = torch.cat(nearest).double()
    return torch.where(average.isnan(), torch.nan, hit), average


def measure(
    task: Assignment[ClassRetrieval],
    extractor: Extractor,
    machine: Machine,
    stop: StopFlag,
) -> list[Result]:
    test = task.splits.test
    found = extractor(test, f"{task.dataset.name} test features")
    labels = torch.tensor(test.labels, device=machine.device)
    rows = []
    for trunk, features in zip(extractor.trunks, found):
        stop.end_here("between two checkpoints")
        trunk.verify()
        values = {}
        arrays = {}
        by_metric = retrieve(features.to(machine.device), labels)
        for metric, of_queries in zip(METRICS, by_metric):
            scores = of_queries.cpu().numpy()
            queries = int((~np.isnan(scores)).sum())
            values[metric] = (100 * float(np.nanmean(scores)), {"queries": queries})
            arrays[f"queries_{metric}"] = scores
        rows += keeping.write_plain(task, trunk.checkpoint, values, arrays)
    return rows


PROBE = Probe(
    protocol=ClassRetrieval,
    measure=measure,
    metrics=lambda *_: list(METRICS),
    refuse=refuse,
    words=lambda _: "each test image among the others",
    work=lambda p, name, splits, count: {"image": len(splits.test)},
    only_test=True,
)
