"""Finds the probe of a kind of reading. `transfer/probes/NAME.py` holds everything of the reading
NAME: its protocol, what it costs and says, what it refuses, how it measures, and a `PROBE` that
names them. Recipes ask for it by `kind: NAME`. An installed package adds its own by an entry point
of the group `backbench.probes` (backbench/plugins.py)."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import backbench.transfer.probes
from backbench import plugins
from backbench.datasets.row import Dataset
from backbench.datasets.splits import Splits
from backbench.errors import BadInput, nearest
from backbench.records.store import Result
from backbench.runs.state import StopFlag
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.features.frozen import FrozenTrunk
from backbench.transfer.protocol import Protocol
from backbench.weights.kept_heads import KeptHead

P = TypeVar("P", bound=Protocol)
# A row, and the folder of its run
RecordedRow = tuple[Result, Path]


def metrics_of_dataset(p: Protocol, dataset: Dataset) -> list[str]:
    """Return the dataset's own metrics, as most probes have them."""
    return list(dataset.metrics)


def all_images(p: Protocol, name: str, splits: Splits, count: int) -> dict[str, int]:
    """Return the work of a probe that needs the features of all images."""
    return {"image": sum(len(images) for _, images in splits.items())}


@dataclass(frozen=True, kw_only=True)
class Probe(Generic[P]):
    """How one kind of reading measures."""

    # The dataclass that its recipes are read into
    protocol: type[P]
    # Returns the rows of all trunks of the extractor, and writes them to the run's folder.
    measure: Callable[[Assignment[P], Extractor, Machine, StopFlag], list[Result]]
    # Measures several protocols of one `stream` in one pass, and returns a list for each.
    measure_several: (
        Callable[
            [Sequence[Assignment[P]], Extractor, Machine, StopFlag], list[list[Result]]
        ]
        | None
    ) = None
    stream: Callable[[P], str] = repr
    # The metrics of the rows that it writes for each checkpoint on a dataset
    metrics: Callable[[P, Dataset], list[str]] = metrics_of_dataset
    # Gives a trunk whose features it reads from images of so many pixels
    reads: Callable[[FrozenTrunk, int], FrozenTrunk] = lambda trunk, _: trunk
    # What it will do, in words
    words: Callable[[P], str] = lambda _: ""
    # Its price on the dataset of a name for so many checkpoints, in units of work (runs/price.py)
    work: Callable[[P, str, Splits, int], Mapping[str, int]] = all_images
    # Raises BadInput for data that would fail only after hours of features.
    refuse: Callable[[P, str, Splits], None] = lambda *_: None
    # Raises BadInput for checkpoints that lack a head that it needs. Returns the heads that it
    # found, by the checkpoints' digests.
    fits: Callable[[Assignment[P]], Mapping[str, KeptHead]] = lambda _: {}
    # What its rows say together, in lines that a verb prints below them
    sayings: Callable[[Sequence[RecordedRow]], list[str]] = lambda _: []
    # True: it needs features of the test images alone.
    only_test: bool = False
    # True: it reads images with label maps (`Dataset.dense`).
    dense: bool = False
    # True: it reads images of several classes (`Dataset.multilabel`).
    multilabel: bool = False
    # True: the processes train together. False: they only share computing the features; rank 0 does
    # the rest alone, and `measure` is called there only.
    together: bool = False


def shipped_kinds() -> list[str]:
    """List the kinds of backbench's own probes: the files beside this one."""
    files = [m.name for m in pkgutil.iter_modules(backbench.transfer.probes.__path__)]
    return [name for name in files if name != "kind"]


def probe_of(kind: str) -> Probe[Protocol]:
    """Return the probe of a kind. BadInput where there is none, or an installed one is broken."""
    shipped = shipped_kinds()
    if kind in shipped:
        probe: Probe[Protocol] = importlib.import_module(
            f"backbench.transfer.probes.{kind}"
        ).PROBE
        return probe
    installed = plugins.names(plugins.PROBES, shipped)
    if kind not in installed:
        raise BadInput(f"no probe '{kind}'; {nearest(kind, [*shipped, *installed])}")
    return plugins.load(plugins.PROBES, kind, Probe)
