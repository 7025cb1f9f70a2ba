"""Each test image looks for the others of its class among all test images; nothing is trained.

`r1` is the share of queries whose nearest image is of their class. `map_r` is the mean of MAP@R
(Musgrave et al., arXiv:2003.08505): with R other images of the query's class, the sum of the
precision at those ranks up to R that hold one of them, over R. An image that is alone in its class
is no query, but the others may find it.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.records.store import Result
from backbench.runs.state import StopFlag
from backbench.transfer import scoring
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocols import ClassRetrieval
from backbench.transfer.scoring import Assignment


def refuse(p: ClassRetrieval, name: str, splits: Splits) -> None:
    """BadInput if no class has two test images."""
    if len(set(splits.test.labels)) == len(splits.test):
        raise BadInput(
            f"{name}: no class has two test images, so there is nothing to retrieve"
        )


@torch.no_grad()
def retrieve(
    features: Tensor, labels: Tensor, rows: int = 512
) -> tuple[Tensor, Tensor]:
    """Features (N, d), labels (N,) -> per image (N,): is the nearest other one of its class, and
    its average precision at R (nan if alone). Cosine in float64; ties go to the first."""
    unit = F.normalize(features.double(), dim=1)
    others = torch.bincount(labels)[labels] - 1  # R of each image
    rank = torch.arange(
        1, int(others.max()) + 1, device=labels.device, dtype=torch.float64
    )
    nearest, precisions = [], []
    for begin in range(0, len(unit), rows):
        mine = slice(begin, begin + rows)
        # 1. The image itself is left out by its place: a copy of it is another image.
        similarity = unit[mine] @ unit.T
        similarity.diagonal(begin).fill_(-torch.inf)
        order = similarity.sort(dim=1, descending=True, stable=True).indices[
            :, : len(rank)
        ]
        # 2. Precision at each rank, summed over the ranks that count: those up to R that are right.
        right = labels[order] == labels[mine, None]
        precision = right.cumsum(1) / rank
        counted = right & (rank <= others[mine, None])
        precisions.append((precision * counted).sum(1) / others[mine])
        nearest.append(right[:, 0])
    average = torch.cat(precisions)
    return torch.where(average.isnan(), torch.nan, torch.cat(nearest).double()), average


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
        values, arrays = {}, {}
        for metric, scores in zip(
            METRICS, retrieve(features.to(machine.device), labels)
        ):
            kept = arrays[f"queries_{metric}"] = scores.cpu().numpy()
            about = {"queries": int((~np.isnan(kept)).sum())}
            values[metric] = 100 * float(np.nanmean(kept)), about
        rows += scoring.write_plain(task, trunk.checkpoint, values, arrays)
    return rows


METRICS = ("r1", "map_r")


PROBE = Probe(
    measure=measure,
    metrics=lambda *_: list(METRICS),
    refuse=refuse,
    words=lambda _: "each test image among the others",
    work=lambda p, name, splits, count: {"image": len(splits.test)},
    only_test=True,
)
