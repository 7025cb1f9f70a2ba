"""The few-label probe: a logistic regression on each of many draws; the row is their mean."""

from __future__ import annotations

import numpy as np

from backbench.datasets import splits
from backbench.datasets.row import Dataset
from backbench.datasets.splits import Splits
from backbench.results import store
from backbench.results.store import Result
from backbench.runs.state import StopFlag
from backbench.stats import confidence
from transfer import fewshot, metrics, scoring
from transfer.devices import Machine
from transfer.feature_rows import FeatureRows
from transfer.features import Extractor
from transfer.probe_kind import Probe
from transfer.protocols import FewShot
from transfer.scoring import Assignment


def metric_names(p: FewShot, dataset: Dataset) -> list[str]:
    return [dataset.metric]


def refuse(p: FewShot, name: str, found: Splits) -> None:
    """A class with fewer images than shots."""
    splits.draw(found.both(), p.shots, 0, what=f"{p.shots} shots")


def measure(
    task: Assignment[FewShot], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    features = extractor.of_splits(task.splits, task.dataset.name)
    if not machine.main:
        return []
    p, name = task.protocol, task.dataset.name
    both = task.splits.both()
    chosen = fewshot.draws(both, shots=p.shots, count=p.draws, seed=task.seed)
    # The draws are the same for every checkpoint, so that checkpoints can be compared draw by draw.
    truth = np.asarray(task.splits.test.labels)
    by_class = task.dataset.metric == "mean_per_class"
    rows = []
    for trunk, train, val, test in zip(extractor.trunks, *features):
        found = fewshot.predictions(
            FeatureRows((train, val)),
            both.labels,
            test,
            chosen,
            classes=len(both.classes),
            l2=p.l2,
            max_iterations=p.max_iterations,
            tolerance=p.tolerance,
            stop=stop,
        )
        values = [
            metrics.score(task.dataset.metric, drawn, truth, len(both.classes)) for drawn in found
        ]
        stem = f"fewshot-{name}-{p.name}-s{task.seed}-{trunk.digest[:12]}"
        kept = store.keep_predictions(
            task.run,
            stem,
            manifest=task.hashes["test"],
            values=np.asarray(values),
            prediction=found.astype(np.int32),
            label=truth,
        )
        rows.append(
            scoring.row(
                task,
                trunk.checkpoint,
                metric=task.dataset.metric,
                value=float(np.mean(values)),
                ci95=confidence.of_draws(found == truth, truth if by_class else None),
                chosen=None,
                provenance={
                    "predictions": kept,
                    "draws": values,
                    "shots": p.shots,
                    "labelled_from": "train+val",
                },
            )
        )
    task.keep(rows)
    return rows


PROBE = Probe(measure=measure, metrics=metric_names, refuse=refuse)
