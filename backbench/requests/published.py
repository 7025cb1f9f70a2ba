"""`backbench paper` and `reproduce`: what was printed, and ours beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from backbench.requests.options import argument, option
from backbench.requests.places import JsonRequest


@dataclass(frozen=True, kw_only=True)
class PaperRequest(JsonRequest):
    """Show the papers' tables: measured, running, missing."""

    verb: ClassVar[str] = "paper"
    item: str | None = argument(
        "PAPER:TABLE",
        "lorac:2, arb:fig.7; all, or nothing: every table in a line",
        default=None,
    )
    runs: tuple[Path, ...] = argument(
        "RUNS", "run folders, for what is measured there", several="*", default=()
    )
    markdown: Path | None = option(
        "all of them as docs/papers.md (RUNS: records beside F)", "F", default=None
    )


@dataclass(frozen=True, kw_only=True)
class ReproduceRequest(JsonRequest):
    """Re-measure public checkpoints and compare with published results."""

    verb: ClassVar[str] = "reproduce"
    list: str | None = argument(
        "LIST",
        "short, full, vits, heads, timm-v2, a YAML file ...; without: which there are",
        default=None,
    )
    overrides: tuple[str, ...] = argument("cluster.a=b", several="*", default=())
    data: Path | None = option(
        "folder with one folder per dataset", "ROOT", default=None
    )
    files: Path = option(
        "the public files, as DIR/NAME/FILE (default: checkpoints)",
        "DIR",
        default=Path("checkpoints"),
    )
    download: bool = option(
        "fetch what is not there; else no network is used", default=False
    )
    only: tuple[str, ...] = option("some of the list's checkpoints", "NAME", default=())
    models: tuple[str, ...] = option(
        "timm's models of a list timm-... (default: those in the Hub's cache)",
        "NAME.TAG",
        default=(),
    )
    lists: Path = option(
        "folder with 1percent.txt and 10percent.txt", "DIR", default=Path("lists")
    )
    cluster: str = option("where it runs", "slurm|local|debug", default="local")
    out: Path = option("folder of runs", "RUNS", default=Path("runs/reproduce"))
    dry_run: bool = option("show files, jobs and cost only", default=False)
    check: Path | None = option(
        "check that a bundle is consistent", "ZIP", default=None
    )
