"""`backbench linear` and `backbench ood`: readings of frozen trunks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from backbench.requests.options import option
from backbench.requests.places import (
    RunRequest,
    SeededRequest,
    WeightsRequest,
    checkpoints_argument,
    overrides_words,
    protocol_option,
)


@dataclass(frozen=True, kw_only=True)
class LinearRequest(WeightsRequest, RunRequest, SeededRequest):
    """Train frozen-backbone probes; attentive ones, retrieval, clusters and segmentation too."""

    verb: ClassVar[str] = "linear"
    checkpoints: tuple[Path, ...] = checkpoints_argument()
    datasets: str = option("all = the 12 of LORAC's Table 2", "NAME,...|all")
    protocol: str = protocol_option(
        "lorac", ", or several NAME,NAME, or `own`: each checkpoint's own probe"
    )
    overrides: tuple[str, ...] = overrides_words()

    @classmethod
    def more_help(cls) -> str:
        # Imported here: other verbs' words are parsed without the tasks
        from backbench import tasks

        return (
            "what readings cost (a run says its own counts and, once it is timed, minutes):\n"
            + tasks.prices("linear")
        )


@dataclass(frozen=True, kw_only=True)
class OodRequest(WeightsRequest, RunRequest, SeededRequest):
    """Try ImageNet's heads on other pictures: V2, A, R, Sketch, ReaL, ObjectNet."""

    verb: ClassVar[str] = "ood"
    checkpoints: tuple[Path, ...] = checkpoints_argument()
    datasets: str = option("see `data list`", "NAME,...")
    heads: Path | None = option(
        "where kept heads are looked for (default: the runs beside RUN)",
        "RUNS",
        default=None,
    )
    protocol: str = protocol_option("ood")
    overrides: tuple[str, ...] = overrides_words()
