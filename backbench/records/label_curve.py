"""The rows of label curves: what their metrics are called, and how many labels they save.

A row is one point of a checkpoint's curve (transfer/probes/label_curve.py). `sayings` compares curves
by the predictions that were kept beside their points."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from backbench.records import predictions
from backbench.records.predictions import Arrays
from backbench.records.result_line import Result
from backbench.stats import labels_needed
from backbench.stats.labels_needed import BELOW, BEYOND, LabelsNeeded

TASK = "label_curve"
ALL = None  # the point with all labels
LABELS = "labels_per_class"  # in a row's provenance
_METRIC = re.compile(r"(top1|mean_per_class)_labels(\d+|_all)")
Curve = dict[float, Arrays]  # labels per class -> what was kept beside the point


def suffix(labels: int | None) -> str:
    """Return what the metric of a point ends with: top1_labels5, top1_labels_all."""
    return "_labels_all" if labels is ALL else f"_labels{labels}"


def sayings(rows: Sequence[tuple[Result, Path]]) -> list[str]:
    """Say what labels the best of several checkpoints saves, a line for each comparison.

    `rows` are points of curves, each with the folder of its run. Two checkpoints are compared at
    every point, more only by what the best one needs to do as well as each other with all labels."""
    curves: dict[tuple[str, str, str, int], dict[str, Curve]] = defaultdict(dict)
    names: dict[str, str] = {}
    for row, run in rows:
        if not _METRIC.fullmatch(row.metric):
            continue
        kept = predictions.load(run / str(row.facts.get("predictions")))
        labels = row.provenance.get(LABELS)
        if kept is None or not isinstance(labels, int | float):
            continue
        metric = row.metric.partition("_labels")[0]
        together = curves[row.dataset, row.protocol, metric, row.seed]
        together.setdefault(row.checkpoint, {})[float(labels)] = kept
        names[row.checkpoint] = row.name
    lines = []
    for (dataset, _, metric, _), of_checkpoint in curves.items():
        lines += _of_dataset(dataset, metric, of_checkpoint, names)
    return lines


def _of_dataset(
    dataset: str,
    metric: str,
    curves: Mapping[str, Curve],
    names: Mapping[str, str],
) -> list[str]:
    """Say what the best curve of a dataset saves against each other one on the same points."""
    hits = {}
    for checkpoint, curve in curves.items():
        found = _hits(curve)
        if found is not None:
            hits[checkpoint] = found
    if len(hits) < 2:
        return []
    # A mean over the points is the area below the curve on the logarithm of its labels
    best = max(hits, key=lambda checkpoint: hits[checkpoint].mean())
    labels = sorted(curves[best])
    kept = curves[best][labels[0]]
    classes = kept["label"] if metric == "mean_per_class" else None
    lines = []
    for other, of_other in hits.items():
        same_points = labels == sorted(curves[other])
        if other == best or not same_points or not _same_images(kept, curves[other]):
            continue
        if len(hits) == 2:
            needs = [
                labels_needed.compare(target, of_other, labels, classes)
                for target in hits[best][:-1]
            ]
            lines += _reached(labels, names[best], names[other], needs)
        saved = labels_needed.compare(of_other[-1], hits[best], labels, classes)
        if saved.value < BEYOND:
            lines.append(
                f"{names[other]} with all its labels, {_count(labels[-1])} a class, does as well as"
                f" {names[best]} with {_needed(saved, labels[0])}"
            )
    return [f"label curve of {dataset}: {line}" for line in lines]


def _reached(
    labels: Sequence[float], a: str, b: str, needs: Sequence[LabelsNeeded]
) -> list[str]:
    """Say for each point of `a`'s curve but the last how many labels `b` needs to be as good."""
    lines = []
    for at, need in zip(labels[:-1], needs):
        with_labels = "1 label" if at == 1 else f"{_count(at)} labels"
        if need.value < BEYOND:
            lines.append(
                f"with {with_labels} a class {a} reaches what {b} needs"
                f" {_needed(need, labels[0])} for"
            )
            continue
        line = (
            f"with {with_labels} a class {a} reaches what {b} does not reach with all"
            f" {_count(labels[-1])}"
        )
        if need.ci95 is None or need.ci95[0] == BEYOND:
            # If b cannot reach a at this point, it cannot at the later ones, either
            lines.append(line)
            break
        lines.append(f"{line} (its interval begins at {_count(need.ci95[0])})")
    return lines


def _hits(curve: Curve) -> np.ndarray | None:
    """Return the hits (P, D, N) of a curve; a point of one fit has them for every draw. None if the
    points are not of the same images."""
    by_point = []
    for labels in sorted(curve):
        kept = curve[labels]
        right = predictions.hits(kept, "top1")
        if right is None or not _same_images(kept, curve):
            return None
        by_point.append(np.atleast_2d(right))
    draws = max(len(right) for right in by_point)
    if any(len(right) not in (1, draws) for right in by_point):
        return None
    wide = [np.broadcast_to(right, (draws, right.shape[1])) for right in by_point]
    return np.stack(wide)


def _same_images(kept: Arrays, curve: Curve) -> bool:
    """Return True if all points of a curve were scored on the images of `kept`."""
    for other in curve.values():
        same_list = str(other["manifest"]) == str(kept["manifest"])
        if not same_list or not np.array_equal(other["label"], kept["label"]):
            return False
    return True


def _needed(need: LabelsNeeded, first: float) -> str:
    """Write a number of labels with its interval: 23 [15, 40]. `first` is the first point's."""
    ends = [need.value, *(need.ci95 or ())]
    texts = []
    for end in ends:
        texts.append(f"fewer than {_count(first)}" if end == BELOW else _count(end))
    if need.ci95 is None:
        return texts[0]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"


def _count(labels: float) -> str:
    """Write labels per class: 3.4, 23, or that all are too few."""
    if labels == BEYOND:
        return "more than all"
    return f"{labels:.1f}".removesuffix(".0") if labels < 10 else f"{labels:.0f}"
