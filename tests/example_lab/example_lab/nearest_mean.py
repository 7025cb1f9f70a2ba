"""A reading: each test image has the class whose mean training feature is nearest."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backbench.records.store import Result
from backbench.runs.state import StopFlag
from backbench.transfer import keeping, scoring
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.keeping import CheckpointPredictions
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocol import Protocol


@dataclass(frozen=True, kw_only=True)
class NearestMean(Protocol):
    """Nearest class mean by Euclidean distance."""

    unit: bool = True  # whether features are brought to unit length first


def distances(bank: Tensor, labels: Tensor, queries: Tensor, classes: int) -> Tensor:
    """Bank (N, d), labels (N,), queries (M, d) -> distances to the classes' means (M, classes)."""
    means = torch.stack([bank[labels == c].mean(0) for c in range(classes)])
    return torch.cdist(queries, means)


def measure(
    task: Assignment[NearestMean],
    extractor: Extractor,
    machine: Machine,
    stop: StopFlag,
) -> list[Result]:
    features = extractor.of_splits(task.splits, task.dataset.name)
    both = task.splits.both()
    measured = []
    for trunk, train, val, test in zip(extractor.trunks, *features):
        stop.end_here("between two checkpoints")
        bank = torch.cat((train, val))
        queries = test
        if task.protocol.unit:
            bank = F.normalize(bank)
            queries = F.normalize(queries)
        far = distances(bank, torch.tensor(both.labels), queries, len(both.classes))
        one = CheckpointPredictions(
            checkpoint=trunk.checkpoint, ranking=scoring.rank_classes(-far)
        )
        measured.append(one)
    return keeping.write(task, measured)


PROBE = Probe(
    protocol=NearestMean,
    measure=measure,
    words=lambda p: "means of unit features" if p.unit else "means of features",
)
