"""The logistic-regression probe: a path of penalties, the best on val fitted on train + val."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from backbench.results.store import Result
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag, load_state, save_state
from transfer import logreg, metrics, scoring
from transfer.devices import Machine
from transfer.features import Extractor
from transfer.logreg import Fit, LabelledFeatures
from transfer.probe_kind import Probe
from transfer.protocols import LogReg
from transfer.scoring import Assignment, CheckpointPredictions, best_of


class PathState(TypedDict, total=False):
    """How far one trunk's path is, as it is saved after each fit."""

    scores: list[float]  # on val; their number is that of the penalties that are done
    converged: list[bool]
    best: float  # of the scores
    weight: Tensor  # where the last fit ended
    bias: Tensor
    best_weight: Tensor  # where the fit of the best score ended
    best_bias: Tensor


def measure(
    task: Assignment[LogReg], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    features = extractor.of_splits(task.splits, task.dataset.name)
    if not machine.main:
        return []
    p = task.protocol
    path = PenaltyPath(task, machine, stop)
    y_train = torch.tensor(task.splits.train.labels)
    y_val = torch.tensor(task.splits.val.labels)
    # By digest of the trunk; a run that was stopped goes on behind the last penalty that it saved.
    state = load_state(task.state_file) if task.state_file.exists() else {}
    measured = []
    for trunk, train, val, test in zip(extractor.trunks, *features):
        mine: PathState = state.setdefault(
            trunk.digest, {"scores": [], "converged": [], "best": -1.0}
        )
        # 1. The whole path on train, each fit scored on val.
        path.follow(mine, (train, y_train), (val, y_val), state)
        # 2. The best penalty again on train + val, from where it ended on train alone.
        l2 = p.penalties[best_of(mine["scores"])]
        warm = path.fit_at(mine["best_weight"], mine["best_bias"])
        final = path.fit([(train, y_train), (val, y_val)], l2, warm)
        # 3. The one look at test.
        ranking = scoring.rank_classes(final.logits(test, p.chunk))
        choice: dict[str, object] = {
            "l2": l2,
            "on": "val",
            "trained_on": "train+val",
            "scores": {f"{v:g}": score for v, score in zip(p.penalties, mine["scores"])},
            "at_edge": scoring.warn_edge(task, trunk.checkpoint, "penalty", l2, p.penalties),
            "converged": all(mine["converged"]) and final.converged,
        }
        measured.append(
            CheckpointPredictions(checkpoint=trunk.checkpoint, ranking=ranking, chosen=choice)
        )
    return scoring.write(task, measured)


@dataclass(frozen=True)
class PenaltyPath:
    """The fits of one dataset, on one machine."""

    task: Assignment[LogReg]
    machine: Machine
    stop: StopFlag

    def fit(self, parts: list[LabelledFeatures], l2: float, start: Fit | None) -> Fit:
        p = self.task.protocol
        return logreg.fit(
            parts,
            l2=l2,
            start=start,
            classes=len(self.task.splits.train.classes),
            device=self.machine.device,
            chunk=p.chunk,
            max_iterations=p.max_iterations,
            tolerance=p.tolerance,
            between=partial(self.stop.end_here, f"within l2 {l2:g}, which will begin again"),
        )

    def fit_at(self, weight: Tensor, bias: Tensor) -> Fit:
        return Fit.at(weight.to(self.machine.device), bias.to(self.machine.device))

    def follow(
        self,
        mine: PathState,
        train: LabelledFeatures,
        val: LabelledFeatures,
        state: dict[str, PathState],
    ) -> None:
        """The penalties that are left, strongest first, into `mine`, which is a part of `state`.

        `state` is saved after each. Raises Preempted within or after a fit when a signal came.
        """
        # Each fit starts where the one before ended: neighbouring penalties have near minima, and
        # the strongest is the easiest from nothing.
        task, p = self.task, self.task.protocol
        last = self.fit_at(mine["weight"], mine["bias"]) if "weight" in mine else None
        done = len(mine["scores"])
        what = f"{task.dataset.name} logreg"
        progress = Progress(task.run, len(p.penalties), what, unit="fit", done=done)
        for l2 in p.penalties[done:]:
            last = self.fit([train], l2, last)
            score = self._score(last, val)
            mine["scores"].append(score)
            mine["converged"].append(last.converged)
            mine["weight"], mine["bias"] = last.weight.cpu(), last.bias.cpu()
            if score > mine["best"]:  # of equal scores the stronger penalty
                mine["best"] = score
                mine["best_weight"], mine["best_bias"] = mine["weight"], mine["bias"]
            save_state(task.state_file, dict(state))
            progress.advance(1, l2=l2, val=score)
            self.stop.end_here(f"after l2 {l2:g}")

    def _score(self, found: Fit, val: LabelledFeatures) -> float:
        features, labels = val
        logits = found.logits(features, self.task.protocol.chunk)
        prediction = scoring.rank_classes(logits)[:, 0].numpy()
        classes = len(self.task.splits.train.classes)
        return metrics.score(self.task.dataset.metric, prediction, np.asarray(labels), classes)


PROBE = Probe(measure=measure)
