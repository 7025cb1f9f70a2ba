"""Datasets: one row each (`backbench.datasets.DATASETS`), how it is read, and its splits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backbench.datasets.catalog import DATASETS

__all__ = ["DATASETS"]


def __getattr__(name: str) -> object:
    """Load the table when it is first used: `DATASETS` is what programs outside import."""
    if name != "DATASETS":
        raise AttributeError(f"module 'backbench.datasets' has no attribute '{name}'")
    from backbench.datasets.catalog import DATASETS

    return DATASETS
