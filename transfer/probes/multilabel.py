"""The reading of images that show several classes: a logistic regression for each class against all
others, scored by mean average precision."""

from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.multilabel import IGNORED, PRESENT, MultiLabelList
from backbench.records import label_tables
from backbench.records.store import Result
from backbench.requests.bounds import Positive, Repeats
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag
from backbench.runs.terminal import log
from backbench.transfer import keeping, logreg, scoring
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.logreg import Fit
from backbench.transfer.probes.kind import Probe
from backbench.transfer.probes.logreg import LogReg
from backbench.transfer.protocol import Protocol


@dataclass(frozen=True, kw_only=True)
class MultiLabel(LogReg):
    """Logistic regression of each class against all others, for a path of penalties from the
    strongest down; one penalty for all classes is chosen by mean AP on val.

    The objective of a class is the sum of cross-entropies of two outputs, the class and the rest, +
    l2 / 2 of their squared weights: scikit-learn's binary one with C = 2 / l2. An image that is
    ignored for a class is not in that class's fit."""

    l2: tuple[float, float, Repeats] = (1e-2, 1e6, 9)
    # A weak penalty leaves the objective nearly flat, and scores still move
    tolerance: Positive = 1e-7


@dataclass
class Heads:
    """The fits of all classes at one penalty."""

    fits: list[Fit | None] = field(default_factory=list)

    @property
    def gradient(self) -> float:
        return max((fit.gradient for fit in self.fits if fit is not None), default=0.0)

    def scores(self, features: Tensor, chunk: int) -> np.ndarray:
        """Return how surely each image (N, d) shows each class: (N, C)."""
        columns = []
        for fit in self.fits:
            if fit is None:
                columns.append(torch.zeros(len(features)))
                continue
            logits = fit.logits(features, chunk)
            columns.append(logits[:, 1] - logits[:, 0])
        return torch.stack(columns, 1).numpy()


def refuse(p: Protocol, name: str, found: Splits) -> None:
    """Raise BadInput where no class can be learned, chosen by, or scored."""
    for split, part in found.items():
        table = cast(MultiLabelList, part).table()
        shown = (table == PRESENT).any(0)
        if not (shown & (table != PRESENT).any(0)).any():
            content = "no image shows a class"
            if shown.any():
                content = "each class is in all images or in none"
            raise BadInput(
                f"{name}: {split}: {content}, so there is nothing to tell apart; add images that"
                " show a class, and others that do not"
            )


def measure(
    task: Assignment[MultiLabel],
    extractor: Extractor,
    machine: Machine,
    stop: StopFlag,
) -> list[Result]:
    p = task.protocol
    features = extractor.of_splits(task.splits, task.dataset.name)
    tables = [cast(MultiLabelList, part).table() for _, part in task.splits.items()]
    of_train, of_val, of_test = tables
    fit = partial(
        logreg.fit,
        classes=2,
        device=machine.device,
        chunk=p.chunk,
        max_iterations=p.max_iterations,
        tolerance=p.tolerance,
    )
    classes = of_train.shape[1]
    count = (len(p.penalties) + 1) * classes * len(extractor.trunks)
    progress = Progress(task.run, count, f"{task.dataset.name} heads", unit="fit")

    def heads(
        features: list[Tensor], table: np.ndarray, l2: float, start: Heads | None
    ) -> Heads:
        """Fit every class that some of these images show and some do not."""
        x = torch.cat(features)
        found = Heads()
        for label in range(classes):
            stop.end_here("within a fit; the checkpoint begins again")
            kept = torch.from_numpy(table[:, label] != IGNORED)
            y = torch.from_numpy(table[:, label] == PRESENT)[kept].long()
            one: Fit | None = None
            if 0 < int(y.sum()) < len(y):
                warm = None if start is None else start.fits[label]
                one = fit([(x[kept], y)], l2=l2, start=warm)
            found.fits.append(one)
            progress.advance()
        return found

    rows = []
    for trunk, train, val, test in zip(extractor.trunks, *features):
        # 1. The path on train, strongest penalty first; each is scored on val
        scores: list[float] = []
        paths: list[Heads] = []
        for l2 in p.penalties:
            start = paths[-1] if paths else None
            paths.append(heads([train], of_train, l2, start))
            said = paths[-1].scores(val, p.chunk)
            scores.append(label_tables.values(said, of_val)[task.dataset.metric])
        # 2. The best penalty is fitted again on train + val, from where it ended on train alone
        best = scoring.best_of(scores)
        l2 = p.penalties[best]
        both = np.concatenate((of_train, of_val))
        final = heads([train, val], both, l2, paths[best])
        # 3. The one look at test
        arrays = label_tables.kept(
            final.scores(test, p.chunk), of_test, task.hashes["test"]
        )
        gradient = max(*(path.gradient for path in paths), final.gradient)
        converged = gradient <= p.tolerance
        if not converged:
            log.warning(
                f"{trunk.checkpoint.name} on {task.dataset.name}: not converged within"
                f" {p.max_iterations} iterations (gradient {gradient:.1e}); the row says so and"
                f" never leads; `backbench linear ... --protocol {p.recipe}"
                f" max_iterations={10 * p.max_iterations}` may help"
            )
        chosen = {
            "l2": l2,
            "on": "val",
            "trained_on": "train+val",
            "scores": {f"{v:g}": score for v, score in zip(p.penalties, scores)},
            "at_edge": scoring.warn_edge(
                task, trunk.checkpoint, "penalty", l2, p.penalties, scores=scores
            ),
            "converged": converged,
            "gradient": gradient,
        }
        rows += keeping.write_tables(task, trunk.checkpoint, arrays, chosen)
    return rows


def work(p: MultiLabel, name: str, found: Splits, count: int) -> dict[str, int]:
    """Return the number of images, and of the fits of all classes of `count` checkpoints."""
    images = sum(len(part) for _, part in found.items())
    fits = (len(p.penalties) + 1) * len(found.train.classes) * count
    return {"image": images, "fit": fits}


PROBE = Probe(
    protocol=MultiLabel,
    measure=measure,
    refuse=refuse,
    words=lambda p: (
        f"each class against all others, best of {len(p.penalties)} penalties"
    ),
    work=work,
    multilabel=True,
)
