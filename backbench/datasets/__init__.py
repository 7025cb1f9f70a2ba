"""Datasets: one row each (`backbench.datasets.DATASETS`), how it is read, and its splits.

catalog       finds a dataset by name and loads its splits (row, catalog.toml: what a row holds)
readers       one reader for each shipped dataset (cifar_stl10, imagenet_sets)
box_labels    boxes as the classes that an image shows
splits        draws, names and checks splits
walk, copies  what two splits must not share: files, contents, pictures that look alike
availability  what a command line needs, before anything heavy is imported
packing, detection_check   what `backbench data` does beside these
embedded      the demo's data, made from scikit-learn's digits
"""

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
