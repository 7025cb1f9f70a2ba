"""Fields that several requests share: where data and runs are, which processes work, what is said."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from backbench.requests.bounds import (
    LEAST_SEED,
    MOST_PROCESSES,
    MOST_SEED,
    MOST_SEEDS,
    MOST_WORKERS,
)
from backbench.requests.options import Request, argument, option

Accelerator = Literal["auto", "cpu", "cuda"]


def seed_option(help: str) -> int:
    """Return a field for a seed."""
    found: int = option(help, "N", default=0, least=LEAST_SEED, most=MOST_SEED)
    return found


def seeds_option() -> int:
    """Return a field for the number of trainings."""
    found: int = option(
        "train again with the next seeds, N runs in RUN/s0, RUN/s1, ...: bold needs them",
        "N",
        default=1,
        least=1,
        most=MOST_SEEDS,
    )
    return found


def workers_option() -> int | None:
    """Return a field for the number of loader workers; with 0 the process itself reads the
    images."""
    found: int | None = option(
        "loader workers per process", "N", default=None, least=0, most=MOST_WORKERS
    )
    return found


@dataclass(frozen=True, kw_only=True)
class JsonRequest(Request):
    """A request whose answer can be a JSON document."""

    json: bool = option(
        "one JSON document on standard output; all else goes to standard error",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class WeightsRequest(Request):
    """A request that reads files of weights."""

    download: bool = option(
        "fetch hf:ORG/REPO[@REVISION][:FILE] into the Hub's local cache if it is not there",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class RunRequest(Request):
    """A request that reads data, writes a run folder, and may take several processes."""

    data: Path = option("folder with one folder per dataset", "ROOT")
    out: Path = option("run folder; the same command continues it", "RUN")
    devices: int = option(
        "processes on this node (GPUs, or CPU ranks)",
        "N",
        default=1,
        least=1,
        most=MOST_PROCESSES,
    )
    nodes: int = option(
        "nodes; under Slurm start one task per device",
        "N",
        default=1,
        least=1,
        most=MOST_PROCESSES,
    )
    accelerator: Accelerator = option("auto: a GPU where there is one", default="auto")
    workers: int | None = workers_option()


@dataclass(frozen=True, kw_only=True)
class SeededRequest(JsonRequest):
    """A request whose training can be repeated with other seeds."""

    seed: int = seed_option("of the draws and the training")
    seeds: int = seeds_option()


class ProtocolsAsked(Exception):
    """`--protocol list` asks which protocols there are for a verb, its only argument."""


class ProtocolAction(argparse.Action):
    """Keep the name of a protocol; the name `list` asks for the names."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        value: Any,
        *_: object,
    ) -> None:
        if value == "list":
            raise ProtocolsAsked(parser.prog.split()[-1])
        setattr(namespace, self.dest, value)


CHECKPOINTS = "checkpoint file(s), published formats too; timm:NAME, hf:ORG/REPO from the local cache"
CHANGES = "`list` shows them; k=5 after it changes it"


def checkpoints_argument() -> tuple[Path, ...]:
    found: tuple[Path, ...] = argument("X", CHECKPOINTS)
    return found


def protocol_option(default: str, also: str = "") -> str:
    """Return a field for a protocol's name."""
    help = f"a recipe's name or file{also} (default: {default}); {CHANGES}"
    found: str = option(help, "NAME", default=default, action=ProtocolAction)
    return found


def overrides_words() -> tuple[str, ...]:
    """Return a field for the changes to a protocol, which may stand anywhere on the line."""
    found: tuple[str, ...] = argument("k=v", several="loose", default=())
    return found
