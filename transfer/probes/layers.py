"""The best layer: every layer of a trunk is read by each pooling, in one pass over the images, and a
logistic regression is fitted on each. Val chooses the layer, the pooling and the penalty; test sees the
chosen reading and the usual one, once. `records/layers.py` tells how far they are apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from backbench.datasets.row import Dataset
from backbench.records import layers
from backbench.records.store import Result
from backbench.requests.bounds import Count, Positive
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.transfer import keeping, logreg, scoring
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.features.frozen import FrozenTrunk
from backbench.transfer.features.layer_cells import LayerCell
from backbench.transfer.keeping import CheckpointPredictions
from backbench.transfer.logreg import Fit, LabelledFeatures
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocol import Protocol


@dataclass(frozen=True, kw_only=True)
class LayerProbe(Protocol):
    """Logistic regression on each cell. Its features have zero mean and unit variance on the images
    that are fitted, and are divided by the root of their number: so one grid of penalties serves
    layers of all widths and scales."""

    # As in LogReg; of equal scores the first counts
    l2: Annotated[tuple[Positive, ...], Field(min_length=1)] = (10, 1, 0.1, 0.01, 0.001)
    max_iterations: Count = 1000
    tolerance: Positive = 1e-5
    chunk: Count = 65536

    def __post_init__(self) -> None:
        if self.head:
            raise ValueError("reads the layers of the trunk; leave out head")


@dataclass(frozen=True)
class LabelledSplit:
    """Features (N, all columns) of a split, and its labels (N,)."""

    features: Tensor
    labels: Tensor


@dataclass(frozen=True)
class CellScale:
    """The mean and the spread of each feature of a cell (d,)."""

    cell: LayerCell
    mean: Tensor
    spread: Tensor

    @staticmethod
    def of(cell: LayerCell, parts: Sequence[LabelledSplit], chunk: int) -> "CellScale":
        """Measure them over all parts, in double precision."""
        count = sum(len(part.labels) for part in parts)
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            for rows in part.features.split(chunk):
                total = total + rows[:, cell.columns].double().sum(0)
        mean = total / count
        squares = torch.zeros_like(mean)
        for part in parts:
            for rows in part.features.split(chunk):
                squares += (rows[:, cell.columns].double() - mean).square().sum(0)
        spread = (squares / count).sqrt()
        # A feature that is the same everywhere stays 0
        spread[spread == 0] = 1.0
        return CellScale(cell, mean, spread * len(mean) ** 0.5)

    def __call__(self, features: Tensor) -> Tensor:
        """Map (N, all columns) to (N, d) of the cell."""
        centred = features[:, self.cell.columns].double() - self.mean
        return (centred / self.spread).float()

    def labelled(self, split: LabelledSplit) -> LabelledFeatures:
        return self(split.features), split.labels


def measure(
    task: Assignment[LayerProbe], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    p = task.protocol
    features = extractor.of_splits(task.splits, task.dataset.name)
    # Digest of the trunk -> the scores on val of its cells, one for each penalty. A stopped run goes
    # on behind the last cell that it saved
    state = load_state(task.state_file) if task.state_file.exists() else {}
    measured = []
    for trunk, *of_splits in zip(extractor.trunks, *features):
        train, val, test = (
            LabelledSplit(found, torch.tensor(images.labels))
            for found, (_, images) in zip(of_splits, task.splits.items())
        )
        assert trunk.of_layers is not None
        scores: dict[str, list[float]] = state.setdefault(trunk.digest, {})
        cells = trunk.of_layers.in_order
        fit = partial(
            logreg.fit,
            classes=len(task.splits.train.classes),
            device=machine.device,
            chunk=p.chunk,
            max_iterations=p.max_iterations,
            tolerance=p.tolerance,
            between=partial(stop.end_here, "within a layer, which will begin again"),
        )
        # 1. Each cell by itself: a path of penalties on train, scored on val.
        progress = Progress(
            task.run,
            len(cells) * len(p.l2),
            f"{trunk.checkpoint.name} layers of {task.dataset.name}",
            unit="fit",
            done=len(scores) * len(p.l2),
        )
        for cell in cells[len(scores) :]:
            scores[cell.name] = _path(task, cell, train, val, fit)
            save_state(task.state_file, dict(state))
            progress.advance(len(p.l2), val=max(scores[cell.name]))
        # 2. The cell that is best on val, and the usual one, are fitted again on train + val. Test is
        #    looked at once by each.
        best = {name: max(of_cell) for name, of_cell in scores.items()}
        winner = cells[scoring.best_of([best[cell.name] for cell in cells])]
        for cell, suffix in ((winner, ""), (trunk.of_layers.usual, layers.USUAL)):
            l2 = p.l2[scoring.best_of(scores[cell.name])]
            scale = CellScale.of(cell, [train, val], p.chunk)
            fitted = fit([scale.labelled(train), scale.labelled(val)], l2=l2)
            logits = fitted.logits(scale(test.features), p.chunk)
            chosen: dict[str, object] = {
                "l2": l2,
                "on": "val",
                "trained_on": "train+val",
            }
            if not suffix:
                chosen |= {
                    layers.READING: cell.name,
                    layers.USUAL_READING: trunk.of_layers.usual.name,
                    "scores": best,
                }
            if fitted.gradient > p.tolerance:
                chosen |= {"converged": False, "gradient": fitted.gradient}
            one = CheckpointPredictions(
                checkpoint=trunk.checkpoint,
                ranking=scoring.rank_classes(logits),
                chosen=chosen,
                suffix=suffix,
            )
            measured.append(one)
    return keeping.write(task, measured)


def _path(
    task: Assignment[LayerProbe],
    cell: LayerCell,
    train: LabelledSplit,
    val: LabelledSplit,
    fit: partial[Fit],
) -> list[float]:
    """Return the scores on val of a cell, one for each penalty. A fit starts where the one before
    ended."""
    p = task.protocol
    scale = CellScale.of(cell, [train], p.chunk)
    on_train = [scale.labelled(train)]
    on_val, label = scale.labelled(val)
    scores = []
    last = None
    for l2 in p.l2:
        last = fit(on_train, l2=l2, start=last)
        predicted = scoring.rank_classes(last.logits(on_val, p.chunk))[:, 0].numpy()
        score = scoring.score(
            task.dataset.metric,
            predicted,
            np.asarray(label),
            len(task.splits.train.classes),
        )
        scores.append(score)
    return scores


def metrics(p: LayerProbe, dataset: Dataset) -> list[str]:
    """List the metrics of the chosen reading, then those of the usual one."""
    return [*dataset.metrics, *(metric + layers.USUAL for metric in dataset.metrics)]


def reads(trunk: FrozenTrunk, side: int) -> FrozenTrunk:
    return trunk.with_layers(side)


# Its price is the images alone: the fits depend on the trunk, and are told when they begin.
PROBE = Probe(
    protocol=LayerProbe,
    measure=measure,
    metrics=metrics,
    reads=reads,
    words=lambda p: (
        f"the best layer and pooling by val, {len(p.l2)} penalties for each"
    ),
    sayings=layers.sayings,
)
