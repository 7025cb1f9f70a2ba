"""One job: a command of the suite, and how anyone can see that it has been done."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backbench.recipes import config
from backbench.results import store


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command of the suite. `name` is unique and is its run folder below RUNS.

    `cells` are the (checkpoint, evaluation) pairs it delivers: one run may serve several
    checkpoints. It is done when the file `makes` exists, or else when its results.jsonl has all
    rows that the run owes, of `expects` (checkpoint, dataset) pairs. `needs` must have succeeded
    before it starts, `after` should be over (they fill a cache). `like` names its kind.

    What it costs is told by jobs of the same `costs` (a fingerprint of the recipe and data, without
    what changes no time) on trunks of the same `arch`, times `units`: epochs of a pretraining,
    iterations of a detector, checkpoints of another evaluation. None: not known, as for jobs of older records.
    """

    name: str
    argv: tuple[str, ...]
    like: str
    cells: tuple[str, ...]
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    makes: str | None = None
    expects: int = 1
    resources: Mapping[str, object] = field(default_factory=dict)  # over the cluster's for its verb
    costs: str | None = None
    arch: str | None = None
    units: float = 1.0

    @property
    def verb(self) -> str:
        return self.argv[0]

    @property
    def key(self) -> str:
        """The name as a short file name."""
        return config.fingerprint(self.name)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Job:
        lists = {k: tuple(data[k]) for k in ("argv", "cells", "needs", "after")}
        return Job(**{**data, **lists})


def finished(job: Job, runs: Path) -> bool:
    """Whether the run folder already holds what the job delivers."""
    if job.makes is not None:
        return (runs / job.makes).is_file()
    run = runs / job.name
    # The run says how many rows it owes; one of an older version at least a row for every pair of
    # checkpoint and dataset
    pairs = {(number.checkpoint, number.dataset) for number in store.numbers(run)}
    return len(pairs) >= job.expects and store.complete(run)
