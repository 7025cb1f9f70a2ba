"""A kind of linear probe is a file `transfer/probes/<kind>.py` with a `PROBE`, a task of that `kind`
in backbench/tasks.toml, and a protocol, a dataclass in `transfer/protocols.py`."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from backbench.datasets.row import Dataset
from backbench.datasets.splits import Splits
from backbench.records.store import Result
from backbench.runs.state import StopFlag
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.protocols import Protocol
from backbench.transfer.scoring import Assignment
from backbench.weights.kept_heads import KeptHead

P = TypeVar("P", bound=Protocol)


@dataclass(frozen=True, kw_only=True)
class Probe(Generic[P]):
    """How one kind of probe measures."""

    # The rows of all trunks of the extractor, written to the run's folder
    measure: Callable[[Assignment[P], Extractor, Machine, StopFlag], list[Result]]
    # The same for several protocols of one `stream` in one pass, a list for each
    measure_several: (
        Callable[
            [Sequence[Assignment[P]], Extractor, Machine, StopFlag], list[list[Result]]
        ]
        | None
    ) = None
    stream: Callable[[P], str] = repr
    # The metrics of the rows that it writes for each checkpoint
    metrics: Callable[[P, Dataset], list[str]] = lambda _, dataset: list(
        dataset.metrics
    )
    # What it will do, in words, and how many units of work that is on a dataset (runs/price.py):
    # beside the features of all its images, which most probes need
    words: Callable[[P], str] = lambda _: ""
    work: Callable[[P, str, Splits, int], Mapping[str, int]] = (
        lambda p, name, splits, count: {
            "image": sum(len(images) for _, images in splits.items())
        }
    )
    # Raises BadInput for data that would fail only after hours of features
    refuse: Callable[[P, str, Splits], None] = lambda *_: None
    # True: it needs features of the test images alone
    only_test: bool = False
    # True: it reads images with label maps (`Dataset.dense`)
    dense: bool = False
    # The same for checkpoints that lack what it needs. Returns the kept heads, by their digests
    fits: Callable[[Assignment[P]], Mapping[str, KeptHead]] = lambda _: {}
    # True: the processes train together. False: they only share computing the features; rank 0 does
    # the rest alone, and `measure` is called there only
    together: bool = False


def probe_of(kind: str) -> Probe[Protocol]:
    """The probe of a `kind` that backbench/tasks.toml has."""
    probe: Probe[Protocol] = importlib.import_module(
        f"backbench.transfer.probes.{kind}"
    ).PROBE
    return probe
