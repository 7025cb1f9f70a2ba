"""What one kind of linear probe is: its task's row in backbench/tasks.py says its `kind`, and
`transfer/probe_<kind>.py` holds the rest as `PROBE`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from backbench.datasets.row import Dataset
from backbench.datasets.splits import Splits
from backbench.results.store import Result
from backbench.runs.state import StopFlag
from transfer.devices import Machine
from transfer.features import Extractor
from transfer.protocols import Protocol
from transfer.scoring import Assignment

P = TypeVar("P", bound=Protocol)


def _metrics_of_the_dataset(p: Protocol, dataset: Dataset) -> list[str]:
    return list(dataset.metrics)


def _accept(p: Protocol, name: str, found: Splits) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Probe(Generic[P]):
    # The rows of all trunks of the extractor, written to the run's folder
    measure: Callable[[Assignment[P], Extractor, Machine, StopFlag], list[Result]]
    # The metrics of the rows that it writes for each checkpoint
    metrics: Callable[[P, Dataset], list[str]] = _metrics_of_the_dataset
    # Raises BadInput for data that would fail only after hours of features
    refuse: Callable[[P, str, Splits], None] = _accept
    # Whether the processes train together too; otherwise they only share
    # computing the features, and rank 0 does the rest alone
    together: bool = False


def probe_of(kind: str) -> Probe[Any]:
    """The probe of a `kind` that backbench/tasks.py has."""
    probe = importlib.import_module(f"transfer.probe_{kind}").PROBE
    assert isinstance(probe, Probe)
    return probe
