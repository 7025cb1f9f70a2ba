"""Datasets: one row each (`backbench.datasets.catalog.DATASETS`), how it is read, and its splits."""
