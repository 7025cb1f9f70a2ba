"""`backbench launch run`, `status`, `retry` and `cancel`: grids of jobs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from backbench.requests.options import Request, argument, option
from backbench.requests.places import JsonRequest


@dataclass(frozen=True, kw_only=True)
class LaunchPlace(Request):
    """Where the runs of a launcher are."""

    out: Path = option("folder of all runs", "RUNS", default=Path("runs"))
    data: Path | None = option(
        "folder with one folder per dataset", "ROOT", default=None
    )


@dataclass(frozen=True, kw_only=True)
class LaunchRunRequest(LaunchPlace):
    """submit the jobs of a grid that are missing"""

    verb: ClassVar[str] = "launch run"
    grid: str = argument("GRID", "a YAML file, or a name under configs/grids")
    overrides: tuple[str, ...] = argument("a.b=c", several="*", default=())
    cluster: str = option(
        "or a name under configs/clusters", "slurm|local|debug", default="local"
    )
    dry_run: bool = option("print the jobs, submit nothing", default=False)
    data_later: bool = option(
        "go on without datasets that are not here: the nodes have them, or they come",
        default=False,
    )
    watch: bool = option(
        "stay, show the status, pick up new checkpoints", default=False
    )
    interval: float = option(
        "seconds between looks of --watch", "S", default=30.0, least=0.1, most=86_400
    )


@dataclass(frozen=True, kw_only=True)
class LaunchStatusRequest(LaunchPlace, JsonRequest):
    """a table of the jobs"""

    verb: ClassVar[str] = "launch status"
    once: bool = option("print it once, also on a terminal", default=False)


@dataclass(frozen=True, kw_only=True)
class NamedJobs(LaunchPlace):
    """Some of the jobs that a launcher has submitted."""

    names: tuple[str, ...] = argument(
        "NAME", "only jobs whose name holds this", several="*", default=()
    )
    cluster: str | None = option(
        "where the jobs went, if it is a file of your own", "FILE", default=None
    )


@dataclass(frozen=True, kw_only=True)
class LaunchRetryRequest(NamedJobs):
    """submit failed, lost and cancelled jobs again"""

    verb: ClassVar[str] = "launch retry"


@dataclass(frozen=True, kw_only=True)
class LaunchCancelRequest(NamedJobs):
    """stop queued and running jobs"""

    verb: ClassVar[str] = "launch cancel"
