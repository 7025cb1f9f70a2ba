"""Predictions of one checkpoint on one test split -> kept files and Result rows, with intervals."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbench.results import store
from backbench.results.store import Result
from backbench.runs import atomic, seeding
from backbench.runs.folder import RESULTS_FILE, log
from transfer import metrics

if TYPE_CHECKING:
    from torch import Tensor

    from backbench.datasets.catalog import Dataset
    from backbench.datasets.splits import Splits
    from backbench.weights.checkpoint import Checkpoint
    from transfer.config import Protocol


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is measured: one protocol on one dataset, in one run folder, by one seed."""

    run: Path
    task: str
    dataset: Dataset
    splits: Splits
    hashes: Mapping[str, str]  # of the manifests, by split
    protocol: Protocol
    seed: int

    def done(
        self, checkpoints: Iterable[Checkpoint], metric: Sequence[str]
    ) -> dict[str, list[Result]]:
        """Digest -> the rows that RUN already has, for the checkpoints whose `metric` rows are all there."""
        file = self.run / RESULTS_FILE
        rows = [r for r in store.read_file(file) if isinstance(r, Result)] if file.exists() else []
        mine = [
            r
            for r in rows
            if (r.task, r.dataset, r.protocol, r.seed)
            == (self.task, self.dataset.name, self.protocol.name, self.seed)
        ]
        out = {}
        for checkpoint in checkpoints:
            own = [r for r in mine if r.checkpoint == checkpoint.digest]
            if {r.metric for r in own} >= set(metric):
                out[checkpoint.digest] = own
        return out

    def pending(self, checkpoints: Iterable[Checkpoint], metric: Sequence[str]) -> list[Checkpoint]:
        """The checkpoints that still have to be measured."""
        checkpoints = list(checkpoints)
        done = self.done(checkpoints, metric)
        return [c for c in checkpoints if c.digest not in done]

    def keep(self, rows: Sequence[Result]) -> None:
        """Append what is not there yet: a run that was killed between two lines of one result completes it."""
        file = self.run / RESULTS_FILE
        there = [r for r in store.read_file(file) if isinstance(r, Result)] if file.exists() else []
        known = {(r.checkpoint, r.column, r.seed) for r in there}
        store.append(self.run, [r for r in rows if (r.checkpoint, r.column, r.seed) not in known])


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The predictions of one checkpoint. `ranking` (N, up to 5) are the best classes, best first; -1 for none."""

    checkpoint: Checkpoint
    ranking: Tensor
    chosen: dict[str, Any] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    suffix: str = ""  # of the metric, where one protocol gives several: _k20


def rank_classes(logits: Tensor) -> Tensor:
    """(N, C) -> the five best classes (N, min(5, C)), -1 where a row of scores is not finite (a diverged head)."""
    import torch

    ranking = logits.topk(min(5, logits.shape[1]), dim=1).indices.cpu()
    broken = ~torch.isfinite(logits).all(1).cpu()
    ranking[broken] = -1
    return ranking


def write(task: Task, measured: Sequence[Measured]) -> list[Result]:
    """Keep predictions, per-class accuracies and a confusion picture, and append one row per metric and checkpoint."""
    import numpy as np

    rows: list[Result] = []
    dataset, test = task.dataset, task.splits.test
    classes = len(test.classes)
    label = np.asarray(test.labels, dtype=np.int64)
    for one in measured:
        checkpoint, digest = one.checkpoint, one.checkpoint.digest
        ranking = one.ranking.numpy().astype(np.int64)
        prediction = ranking[:, 0]
        hits5 = (ranking == label[:, None]).any(1)
        stem = f"{task.task}-{dataset.name}-{task.protocol.name}{one.suffix}-s{task.seed}-{digest[:12]}"
        arrays = {"prediction": prediction, "label": label}
        if "top5" in dataset.metrics:
            arrays["hits5"] = hits5
        kept = store.keep_predictions(task.run, stem, manifest=task.hashes["test"], **arrays)
        right, total = metrics.per_class(prediction, label, classes)
        _write_per_class(
            task.run / "per_class" / f"{stem}.csv", test.classes, right.tolist(), total.tolist()
        )
        picture = task.run / "confusion" / f"{stem}.png"
        title = f"{checkpoint.name}: {task.task} on {dataset.name}"
        metrics.confusion_picture(
            metrics.confusion(prediction, label, classes), test.classes, title, picture
        )
        for metric in dataset.metrics:
            hits = hits5 if metric == "top5" else prediction == label
            value = (
                100.0 * float(hits.mean())
                if metric == "top5"
                else metrics.score(metric, prediction, label, classes)
            )
            seed = seeding.seed_of("bootstrap", task.hashes["test"])  # alike for all checkpoints
            interval = metrics.bootstrap_ci(
                metric, hits, label, classes, resamples=task.protocol.bootstrap, seed=seed
            )
            rows.append(
                row(
                    task,
                    checkpoint,
                    metric=metric + one.suffix,
                    value=value,
                    ci95=interval,
                    chosen=one.chosen,
                    provenance={
                        "predictions": kept,
                        "per_class": f"per_class/{stem}.csv",
                        "confusion": f"confusion/{stem}.png",
                        **one.provenance,
                    },
                )
            )
    task.keep(rows)
    return rows


def row(
    task: Task,
    checkpoint: Checkpoint,
    *,
    metric: str,
    value: float,
    ci95: tuple[float, float] | None,
    chosen: dict[str, Any] | None,
    provenance: Mapping[str, Any],
) -> Result:
    from backbench import config

    return Result(
        checkpoint=checkpoint.digest,
        name=checkpoint.name,
        method=checkpoint.method,
        arch=checkpoint.arch,
        epochs=checkpoint.epochs,
        task=task.task,
        dataset=task.dataset.name,
        split="test",
        metric=metric,
        value=value,
        ci95=ci95,
        protocol=task.protocol.name,
        seed=task.seed,
        chosen=chosen,
        provenance={
            "recipe": config.to_dict(task.protocol),
            "manifests": dict(task.hashes),
            "images": {name: len(images) for name, images in task.splits.items()},
            "val": "held out of train" if task.splits.held_out else "official",
            "notes": list(task.splits.notes),
            **provenance,
        },
    )


def _write_per_class(
    path: Path, names: Sequence[str], right: Sequence[int], total: Sequence[int]
) -> None:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("class", "images", "right", "accuracy"))
    for name, good, count in zip(names, right, total):
        table.writerow((name, count, good, f"{100 * good / count:.2f}" if count else ""))
    atomic.write_text(path, text.getvalue())


def show(rows: Iterable[Result]) -> None:
    """One line per number, on standard output."""
    for r in rows:
        interval = f" [{r.ci95[0]:.2f}, {r.ci95[1]:.2f}]" if r.ci95 else ""
        rate = (r.chosen or {}).get("lr", (r.chosen or {}).get("l2"))
        how = ""
        if rate is not None and r.chosen is not None:
            what = "lr" if "lr" in r.chosen else "l2"
            how = (
                f"  {what} {rate:g} chosen on {r.chosen['on']}"
                if r.chosen.get("on")
                else f"  {what} {rate:g}"
            )
        value = "undefined" if r.value is None else f"{r.value:6.2f}%"
        print(
            f"{r.name:<16} {r.task:<10} {r.dataset:<12} {r.metric:<16} {value}{interval}  {r.protocol}{how}"
        )


def warn_edge(
    task: Task, checkpoint: Checkpoint, what: str, best: float, grid: Sequence[float]
) -> bool:
    """Say so when the best value is the first or last of its grid: a better one may lie outside."""
    edge = len(grid) > 1 and best in (min(grid), max(grid))
    if edge:
        which = "largest" if best == max(grid) else "smallest"
        log.warning(
            f"{checkpoint.name} on {task.dataset.name}: the best {what} {best:g} is the {which} of the grid;"
            " a better one may lie outside it"
        )
    return edge
