"""Predictions of one checkpoint on one test split -> kept files and Result rows, with intervals."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from backbench.recipes import config, fast
from backbench.results import store
from backbench.results.store import Origin, Result
from backbench.runs import atomic
from backbench.runs.folder import RESULTS_FILE, STATES
from backbench.runs.terminal import log
from backbench.stats import confidence
from backbench.untrusted import printable
from transfer import metrics
from transfer.protocols import Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from backbench.datasets.row import Dataset
    from backbench.datasets.splits import Splits
    from backbench.weights.checkpoint import Checkpoint

# The kind of protocol: what measures an Assignment[Sgd] finds an Sgd in it.
Kind_co = TypeVar("Kind_co", bound=Protocol, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Assignment(Generic[Kind_co]):
    """What is to be measured: one protocol on one dataset, in one run folder, by one seed."""

    run: Path
    task: str
    dataset: Dataset
    splits: Splits
    hashes: Mapping[str, str]  # of the manifests, by split
    protocol: Kind_co
    seed: int

    @property
    def state_file(self) -> Path:
        """Where what is begun on this dataset is kept until its rows are there."""
        return self.run / STATES / f"{self.dataset.name}.state"

    def done(
        self, checkpoints: Iterable[Checkpoint], metric: Sequence[str]
    ) -> dict[str, list[Result]]:
        """Digest -> RUN's rows of it, for the checkpoints whose `metric` rows are all there."""
        mine = (self.task, self.dataset.name, self.protocol.name, self.seed)
        by_digest: dict[str, list[Result]] = {}
        for r in recorded(self.run):
            if (r.task, r.dataset, r.protocol, r.seed) == mine:
                by_digest.setdefault(r.checkpoint, []).append(r)
        out = {}
        for checkpoint in checkpoints:
            digest = checkpoint.digest
            own = by_digest.get(digest, [])
            if {r.metric for r in own} >= set(metric):
                out[digest] = own
        return out

    def pending(self, checkpoints: Iterable[Checkpoint], metric: Sequence[str]) -> list[Checkpoint]:
        """The checkpoints that still have to be measured."""
        checkpoints = list(checkpoints)
        done = self.done(checkpoints, metric)
        return [c for c in checkpoints if c.digest not in done]

    def keep(self, rows: Sequence[Result]) -> None:
        """Append what is not there yet: a run that was killed between two rows completes them."""
        store.append_missing(self.run, rows)


def recorded(run: Path) -> list[Result]:
    """The rows that RUN already has, without unreadable lines."""
    file = run / RESULTS_FILE
    if not file.exists():
        return []
    return [r for r in store.read_file(file) if isinstance(r, Result)]


@dataclass(frozen=True, kw_only=True)
class CheckpointPredictions:
    """What one checkpoint says of the test images."""

    checkpoint: Checkpoint
    ranking: Tensor  # (N, up to 5): the best classes, best first; -1 for none
    chosen: dict[str, object] | None = None
    provenance: dict[str, object] = field(default_factory=dict)
    suffix: str = ""  # of the metric, where one protocol gives several: _k20


def rank_classes(logits: Tensor) -> Tensor:
    """(N, C) -> the five best classes (N, min(5, C)); -1 where a head has diverged."""
    import torch

    # nan would rank before every number, and a diverged head would seem to have an opinion.
    ranking = logits.topk(min(5, logits.shape[1]), dim=1).indices.cpu()
    broken = ~torch.isfinite(logits).all(1).cpu()
    ranking[broken] = -1
    return ranking


# Rows


@dataclass(frozen=True)
class _OnTest:
    """What one checkpoint predicted of each test image (N,), and what is right."""

    prediction: NDArray[np.int64]
    label: NDArray[np.int64]
    hits5: NDArray[np.bool_]  # whether the label is among the five best

    @staticmethod
    def of(ranking: Tensor, labels: Sequence[int]) -> _OnTest:
        ranked = ranking.numpy().astype(np.int64)
        label = np.asarray(labels, dtype=np.int64)
        return _OnTest(ranked[:, 0], label, (ranked == label[:, None]).any(1))


def write(task: Assignment[Protocol], measured: Sequence[CheckpointPredictions]) -> list[Result]:
    """Append a row per metric and checkpoint, with predictions and pictures beside them."""
    rows: list[Result] = []
    for one in measured:
        found = _OnTest.of(one.ranking, task.splits.test.labels)
        kept = _keep_beside(task, one, found)
        for metric in task.dataset.metrics:
            value, ci95 = _value(task, metric, found)
            rows.append(
                row(
                    task,
                    one.checkpoint,
                    metric=metric + one.suffix,
                    value=value,
                    ci95=ci95,
                    chosen=one.chosen,
                    provenance={**kept, **one.provenance},
                )
            )
    task.keep(rows)
    return rows


def _value(
    task: Assignment[Protocol], metric: str, found: _OnTest
) -> tuple[float, tuple[float, float]]:
    """A metric in percent, with its interval."""
    label, classes = found.label, len(task.splits.test.classes)
    hits: NDArray[np.bool_] = found.prediction == label
    if metric == "top5":
        hits, value = found.hits5, 100.0 * float(found.hits5.mean())
    else:
        value = metrics.score(metric, found.prediction, label, classes)
    return value, confidence.of_hits(hits, label if metric == "mean_per_class" else None)


def _keep_beside(
    task: Assignment[Protocol], one: CheckpointPredictions, found: _OnTest
) -> dict[str, object]:
    """The files beside the rows, in RUN/{predictions,per_class,confusion};
    returns their paths for the provenance."""
    name, names = task.dataset.name, task.splits.test.classes
    protocol = task.protocol.name + one.suffix
    stem = f"{task.task}-{name}-{protocol}-s{task.seed}-{one.checkpoint.digest[:12]}"
    top5 = {"hits5": found.hits5} if "top5" in task.dataset.metrics else {}
    kept = store.keep_predictions(
        task.run,
        stem,
        manifest=task.hashes["test"],
        prediction=found.prediction,
        label=found.label,
        **top5,
    )

    right, total = metrics.per_class(found.prediction, found.label, len(names))
    table = f"per_class/{stem}.csv"
    _write_per_class(task.run / table, names, right.tolist(), total.tolist())

    matrix = metrics.confusion(found.prediction, found.label, len(names))
    picture = f"confusion/{stem}.png"
    title = f"{one.checkpoint.name}: {task.task} on {name}"
    metrics.confusion_picture(matrix, names, title, task.run / picture)
    return {"predictions": kept, "per_class": table, "confusion": picture}


def row(
    task: Assignment[Protocol],
    checkpoint: Checkpoint,
    *,
    metric: str,
    value: float,
    ci95: tuple[float, float] | None,
    chosen: dict[str, object] | None,
    provenance: Mapping[str, object],
    split: str = "test",
) -> Result:
    from backbench.weights import trunk_facts

    return Result(
        checkpoint=checkpoint.digest,
        name=checkpoint.name,
        method=checkpoint.method,
        arch=checkpoint.trunk,
        epochs=checkpoint.epochs,
        task=task.task,
        dataset=task.dataset.name,
        split=split,
        metric=metric,
        value=value,
        ci95=ci95,
        protocol=task.protocol.name,
        seed=task.seed,
        chosen=chosen,
        provenance={
            **fast.of_trunk(checkpoint.provenance),
            "recipe": config.to_dict(task.protocol),
            "manifests": dict(task.hashes),
            "images": {name: len(images) for name, images in task.splits.items()},
            "labelled": task.splits.labelled,
            "val": "held out of train" if task.splits.held_out else "official",
            "notes": list(task.splits.notes),
            "trunk": trunk_facts.facts(checkpoint, task.protocol.geometry.crop),
            **provenance,
        },
        origin=_speed(checkpoint),
    )


def _speed(checkpoint: Checkpoint) -> Origin:
    """What was measured of the trunk while this number was made: nothing where its features came
    from the cache."""
    from backbench.runs.forward_clock import clock

    rate = clock.rate(checkpoint.digest)
    return {} if rate is None else {"images_per_second": rate}


def _write_per_class(
    path: Path, names: Sequence[str], right: Sequence[int], total: Sequence[int]
) -> None:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("class", "images", "right", "accuracy"))
    for name, good, count in zip(names, right, total):
        table.writerow(
            (printable.spreadsheet(name), count, good, f"{100 * good / count:.2f}" if count else "")
        )
    atomic.write_text(path, text.getvalue())


def show(rows: Iterable[Result]) -> None:
    """One line per number, on standard output."""
    for r in rows:
        value, interval = "undefined", ""
        if r.value is not None:
            value = f"{r.value:6.2f}%"
        if r.ci95:
            interval = f" [{r.ci95[0]:.2f}, {r.ci95[1]:.2f}]"
        print(
            f"{r.name:<16} {r.task:<10} {r.dataset:<12} {r.metric:<16} {value}{interval} "
            f" {r.protocol}{_choice(r)}"
        )


def _choice(r: Result) -> str:
    """`  lr 1 chosen on val`, where the row has a rate or penalty."""
    chosen = r.chosen or {}
    for what in ("lr", "l2"):
        if chosen.get(what) is not None:
            on = f" chosen on {chosen['on']}" if chosen.get("on") else ""
            return f"  {what} {chosen[what]:g}{on}"
    return ""


# Choices


def best_of(scores: Sequence[float]) -> int:
    """The place of the best score, of equal ones the first: the
    smallest rate, the strongest penalty."""
    return max(range(len(scores)), key=lambda i: scores[i])


def warn_edge(
    task: Assignment[Protocol],
    checkpoint: Checkpoint,
    what: str,
    best: float,
    grid: Sequence[float],
) -> bool:
    """Say so when the best value is the first or last of its grid: a better one may lie outside."""
    edge = len(grid) > 1 and best in (min(grid), max(grid))
    if edge:
        which = "largest" if best == max(grid) else "smallest"
        log.warning(
            f"{checkpoint.name} on {task.dataset.name}:"
            f" the best {what} {best:g} is the {which} of the grid;"
            " a better one may lie outside it"
        )
    return edge
