"""`backbench doctor`: what is installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from backbench.requests.options import option
from backbench.requests.places import JsonRequest


@dataclass(frozen=True, kw_only=True)
class DoctorRequest(JsonRequest):
    """Say what is installed here and what that allows."""

    verb: ClassVar[str] = "doctor"
    data: Path = option(
        "folder with one folder per dataset", "ROOT", default=Path("data")
    )
