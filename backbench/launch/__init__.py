"""Grids of jobs: what is missing, where it runs, how it stands."""

from __future__ import annotations

import sys
from typing import Any


def __getattr__(name: str) -> Any:
    """Slurm jobs that version 0.1 queued name their classes by where they stood then: here, and in backbench.grid."""
    if name != "SlurmTask":
        raise AttributeError(f"module 'backbench.launch' has no attribute '{name}'")
    from backbench.launch import grid
    from backbench.launch.verb import SlurmTask

    sys.modules.setdefault("backbench.grid", grid)
    return SlurmTask
