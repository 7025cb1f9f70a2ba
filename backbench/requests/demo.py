"""`backbench demo`: the whole path on embedded data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from backbench.requests.options import Request, option


@dataclass(frozen=True, kw_only=True)
class DemoRequest(Request):
    """Walk the whole path on embedded data, from pretraining to the leaderboard."""

    verb: ClassVar[str] = "demo"
    size: Literal["tiny", "full"] = option(
        "tiny: every stage in under 90 s", default="full"
    )
    out: Path = option("folder of its data and runs", "DIR", default=Path("runs/demo"))

    # Its own jobs: commands with + between them, run one after another in one process
    chain: tuple[str, ...] = option("", several="rest", hidden=True, default=())
