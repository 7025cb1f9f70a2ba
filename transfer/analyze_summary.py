"""RUN/analysis.json as types: what `backbench analyze` draws its
pictures from. null stands for what is undefined."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypedDict

from transfer.feature_statistics import HistogramSummary

TRUNK, PROJECTOR = "trunk", "projector"  # the two spaces


class MinMaxSummary(TypedDict):
    """CLLR's Theorem 1: per number of dimensions the contrast
    and the relative variance of distances."""

    dims: list[int]
    contrast: list[float | None]
    variance: list[float | None]


class SpaceCurves(TypedDict):
    histograms: dict[str, HistogramSummary]  # of the statistics of an image's views
    within: HistogramSummary  # distances between images of one class
    between: HistogramSummary
    spectrum: list[float | None]  # shares of the variance
    min_max: MinMaxSummary
    min_max_gaussian: MinMaxSummary


class SpaceSummary(SpaceCurves):
    """One checkpoint in one space."""

    name: str  # as figures call it
    checkpoint: str
    method: str
    space: str
    dim: int
    numbers: dict[str, float | None]


class CheckpointCurve(TypedDict):
    """metrics.jsonl of a checkpoint's pretraining, as the means of some 300 bins."""

    checkpoint: str
    step: list[int]  # the last of each bin
    terms: dict[str, list[float | None]]


class TrainingCurve(CheckpointCurve):
    name: str


class Summary(TypedDict):
    dataset: str
    images: int
    augmentations: int
    spaces: list[SpaceSummary]
    training: list[TrainingCurve]


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def all_finite(values: Iterable[float]) -> list[float | None]:
    return [finite(value) for value in values]
