"""The nearest-neighbour probe: train + val vote on every test image; nothing is chosen."""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from backbench.datasets.row import Dataset
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.knn import knn_scores
from backbench.records.store import Result
from backbench.requests.bounds import Count, Positive
from backbench.runs.state import StopFlag
from backbench.transfer import keeping, scoring
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.keeping import CheckpointPredictions
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocol import Protocol


@dataclass(frozen=True, kw_only=True)
class Knn(Protocol):
    """Weighted k-nearest neighbours by cosine similarity, weights exp(similarity / temperature)."""

    k: Annotated[tuple[Count, ...], Field(min_length=1)] = (5, 20, 200)
    temperature: Positive = 0.07


def refuse(p: Knn, name: str, splits: Splits) -> None:
    """Raise BadInput if there are fewer images than neighbours."""
    count = len(splits.train) + len(splits.val)
    if max(p.k) > count:
        possible = [str(k) for k in p.k if k <= count] or ["1"]
        raise BadInput(
            f"{name}: k = {max(p.k)} neighbours of {count} images;"
            f" write k={','.join(possible)} behind the protocol"
        )


def measure(
    task: Assignment[Knn], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    p = task.protocol
    features = extractor.of_splits(task.splits, task.dataset.name)
    labels = torch.tensor(task.splits.train.labels + task.splits.val.labels)
    measured = []
    for trunk, train, val, test in zip(extractor.trunks, *features):
        stop.end_here("between two checkpoints")
        votes = knn_scores(
            test.to(machine.device),
            (train, val),
            labels,
            classes=len(task.splits.train.classes),
            k=p.k,
            temperature=p.temperature,
        )
        # Every k is a row of its own: none is chosen.
        for k in p.k:
            one = CheckpointPredictions(
                checkpoint=trunk.checkpoint,
                ranking=scoring.rank_classes(votes[k]),
                provenance={"k": k, "temperature": p.temperature, "bank": "train+val"},
                suffix=f"_k{k}",
            )
            measured.append(one)
    return keeping.write(task, measured)


def metrics(p: Knn, dataset: Dataset) -> list[str]:
    """List the metrics for every k: top1_k5, top1_k20, ..."""
    return [f"{metric}_k{k}" for k in p.k for metric in dataset.metrics]


PROBE = Probe(
    protocol=Knn,
    measure=measure,
    metrics=metrics,
    refuse=refuse,
    words=lambda p: f"k = {', '.join(map(str, p.k))}",
)
