"""The nearest-neighbour probe: train + val vote on every test image; nothing is chosen."""

import torch

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.knn import knn_scores
from backbench.records.store import Result
from backbench.runs.state import StopFlag
from backbench.transfer import scoring
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocols import Knn
from backbench.transfer.scoring import Assignment, CheckpointPredictions


def refuse(p: Knn, name: str, splits: Splits) -> None:
    """BadInput if there are fewer images than neighbours."""
    count = len(splits.train) + len(splits.val)
    if max(p.k) > count:
        ks = ",".join(str(k) for k in p.k if k <= count) or "1"
        raise BadInput(
            f"{name}: k = {max(p.k)} neighbours of {count} images; write --protocol knn k={ks}"
        )


def measure(
    task: Assignment[Knn], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    features = extractor.of_splits(task.splits, task.dataset.name)
    p = task.protocol
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
    return scoring.write(task, measured)


PROBE = Probe(
    measure=measure,
    # For every k: top1_k5, top1_k20, ...
    metrics=lambda p, dataset: [
        f"{metric}_k{k}" for k in p.k for metric in dataset.metrics
    ],
    refuse=refuse,
    words=lambda p: f"k = {', '.join(map(str, p.k))}",
)
