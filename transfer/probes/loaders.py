"""Measures what the loader is worth, by nearest neighbours of one trunk.

All images are loaded by Pillow (the usual loader), by OpenCV, by torch, and written as JPEG once
more. Each loader is a row, and none is chosen; `records/loaders.py` tells how far they are apart."""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field

from backbench.datasets.row import Dataset
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.loaders import LOADERS, USUAL, Loader
from backbench.knn import knn_scores
from backbench.records import loaders
from backbench.records.store import Result
from backbench.requests.bounds import Count, Positive
from backbench.runs.state import StopFlag
from backbench.transfer import keeping, scoring
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.keeping import CheckpointPredictions
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocol import Geometry, LoadedGeometry, Protocol


@dataclass(frozen=True, kw_only=True)
class LoaderProbe(Protocol):
    """Weighted nearest neighbours, as in Knn, by each loader."""

    loaders: Annotated[tuple[Loader, ...], Field(min_length=2)] = LOADERS
    k: Count = 20
    temperature: Positive = 0.07

    def __post_init__(self) -> None:
        if USUAL not in self.loaders:
            raise ValueError(f"loaders are compared with {USUAL}; add it")
        if len(set(self.loaders)) < len(self.loaders):
            raise ValueError(f"loaders name one twice: {', '.join(self.loaders)}")


def refuse(p: LoaderProbe, name: str, splits: Splits) -> None:
    """Raise BadInput if there are fewer images than neighbours."""
    count = len(splits.train) + len(splits.val)
    if p.k > count:
        raise BadInput(
            f"{name}: k = {p.k} neighbours of {count} images;"
            f" write k={min(5, count)} behind the protocol"
        )


def measure(
    task: Assignment[LoaderProbe],
    extractor: Extractor,
    machine: Machine,
    stop: StopFlag,
) -> list[Result]:
    p = task.protocol
    labels = torch.tensor(task.splits.train.labels + task.splits.val.labels)
    measured = []
    for loader in p.loaders:
        by_loader = replace(extractor, geometry=loaded(task.geometry, loader))
        name = f"{task.dataset.name} {loader}"
        features = by_loader.of_splits(task.splits, name)
        for trunk, train, val, test in zip(extractor.trunks, *features):
            stop.end_here("between two checkpoints")
            votes = knn_scores(
                test.to(machine.device),
                (train, val),
                labels,
                classes=len(task.splits.train.classes),
                k=(p.k,),
                temperature=p.temperature,
            )
            one = CheckpointPredictions(
                checkpoint=trunk.checkpoint,
                ranking=scoring.rank_classes(votes[p.k]),
                provenance={
                    "k": p.k,
                    "temperature": p.temperature,
                    "bank": "train+val",
                },
                suffix=loaders.suffix(loader),
            )
            measured.append(one)
    return keeping.write(task, measured)


def loaded(geometry: Geometry, loader: Loader) -> Geometry:
    """Return the geometry by a loader. That of the usual one is plain: its features are shared with
    other readings."""
    if loader == USUAL:
        return geometry
    return LoadedGeometry(
        loader=loader,
        resize=geometry.resize,
        crop=geometry.crop,
        interpolation=geometry.interpolation,
        square=geometry.square,
    )


def metrics(p: LoaderProbe, dataset: Dataset) -> list[str]:
    """List the metrics by each loader: top1_pil, top1_opencv, ..."""
    return [
        metric + loaders.suffix(loader)
        for loader in p.loaders
        for metric in dataset.metrics
    ]


def work(p: LoaderProbe, name: str, found: Splits, count: int) -> dict[str, int]:
    """Return the number of images: each loader reads all of them."""
    images = sum(len(part) for _, part in found.items())
    return {"image": images * len(p.loaders)}


PROBE = Probe(
    protocol=LoaderProbe,
    measure=measure,
    metrics=metrics,
    refuse=refuse,
    words=lambda p: f"by {', '.join(p.loaders)}, k = {p.k}",
    work=work,
    sayings=loaders.sayings,
)
