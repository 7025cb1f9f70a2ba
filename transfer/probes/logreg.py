"""The logistic-regression probe fits a path of penalties on train, chooses one on val, and fits
that again on train + val."""

import math
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from backbench.datasets.splits import Splits
from backbench.records.store import Result
from backbench.requests.bounds import Count, Positive, Repeats
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.runs.terminal import log
from backbench.transfer import head_scores, keeping, logreg, scoring
from backbench.transfer.assignment import Assignment
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.head_scores import ROWS
from backbench.transfer.keeping import CheckpointPredictions
from backbench.transfer.logreg import Fit
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocol import Protocol
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.kept_heads import KeptHead


@dataclass(frozen=True, kw_only=True)
class LogReg(Protocol):
    """Multinomial logistic regression by L-BFGS, for a path of penalties from the strongest down.
    The objective is the sum of cross-entropies + l2 / 2 ||W||^2; the bias is not penalised."""

    # The smallest penalty, the largest, and how many there are, evenly spaced in their logarithms
    l2: tuple[float, float, Repeats] = (1e-6, 1e5, 45)
    max_iterations: Count = 1000
    tolerance: Positive = 1e-5  # on the largest gradient entry of the mean objective
    chunk: Count = 65536  # rows of features in working memory at a time

    def __post_init__(self) -> None:
        low, high, count = self.l2
        if not 0 < low <= high < math.inf or count < 1:
            raise ValueError(
                f"l2 is the smallest and the largest penalty, above 0, and how many, not {self.l2}"
            )

    @property
    def penalties(self) -> list[float]:
        """All penalties, the strongest first."""
        smallest, largest, count = self.l2
        if count == 1:
            return [largest]
        low = math.log10(smallest)
        high = math.log10(largest)
        return [10 ** (high - (high - low) * i / (count - 1)) for i in range(count)]


class PathState(TypedDict, total=False):
    """The part of one trunk's path that is done, as it is saved after each fit."""

    scores: list[float]  # on val, one for each penalty that is done
    gradients: list[float]  # where the fits ended
    best: float  # of the scores
    weight: Tensor  # where the last fit ended
    bias: Tensor
    best_weight: Tensor  # where the fit of the best score ended
    best_bias: Tensor


def measure(
    task: Assignment[LogReg], extractor: Extractor, machine: Machine, stop: StopFlag
) -> list[Result]:
    p = task.protocol
    features = extractor.of_splits(task.splits, task.dataset.name)
    y_train = torch.tensor(task.splits.train.labels)
    y_val = torch.tensor(task.splits.val.labels)
    fit = partial(
        logreg.fit,
        classes=len(task.splits.train.classes),
        device=machine.device,
        chunk=p.chunk,
        max_iterations=p.max_iterations,
        tolerance=p.tolerance,
    )
    # Digest of the trunk -> its PathState. A stopped run goes on behind the last penalty that it
    # saved.
    state = load_state(task.state_file) if task.state_file.exists() else {}
    measured = []
    for trunk, train, val, test in zip(extractor.trunks, *features):
        start: PathState = {"scores": [], "gradients": [], "best": -1.0}
        path: PathState = state.setdefault(trunk.digest, start)
        last = None
        if "weight" in path:
            last = Fit.at(path["weight"], path["bias"])
        # 1. The penalties that are left on train, strongest first, each scored on val. A fit starts
        #    where the one before ended: neighbouring penalties have near minima, and the strongest
        #    is the easiest from nothing.
        on_train = [(train, y_train)]
        moments = None
        if len(train) >= train.shape[1]:
            moments = logreg.second_moments(on_train, machine.device, p.chunk)
        done = len(path["scores"])
        progress = Progress(
            task.run,
            len(p.penalties),
            f"{task.dataset.name} logreg",
            unit="fit",
            done=done,
        )
        for l2 in p.penalties[done:]:
            within = partial(stop.end_here, f"within l2 {l2:g}, which will begin again")
            last = fit(on_train, l2=l2, start=last, moments=moments, between=within)
            ranking = scoring.rank_classes(last.logits(val, p.chunk))
            predicted = ranking[:, 0].numpy()
            score = _record(task, path, last, predicted, np.asarray(y_val))
            save_state(task.state_file, dict(state))
            progress.advance(1, l2=l2, val=score)
            stop.end_here(f"after l2 {l2:g}")
        # 2. The best penalty is fitted again on train + val, from where it ended on train alone.
        l2 = p.penalties[scoring.best_of(path["scores"])]
        warm = Fit.at(path["best_weight"], path["best_bias"])
        within = partial(stop.end_here, f"within l2 {l2:g}, which will begin again")
        both = [*on_train, (val, y_val)]
        final = fit(both, l2=l2, start=warm, moments=moments, between=within)
        # 3. Its temperature is that of its twin, the fit on train alone, which saw nothing of val.
        temperature = _temperature(task, trunk.checkpoint, warm, val)
        # 4. The one look at test.
        logits = final.logits(test, p.chunk)
        of_test = head_scores.compact(
            logits.split(ROWS), task.splits.test.labels, temperature
        )
        chosen = _choice(task, trunk.checkpoint, path, l2, final)
        head = _kept(final, temperature)
        one = CheckpointPredictions(
            checkpoint=trunk.checkpoint,
            ranking=scoring.rank_classes(logits),
            chosen=chosen,
            provenance=keeping.keep_trained(
                task, trunk.checkpoint, head, of_test, chosen
            ),
        )
        measured.append(one)
    return keeping.write(task, measured)


def _temperature(
    task: Assignment[LogReg], checkpoint: Checkpoint, twin: Fit, val: Tensor
) -> float | None:
    """Return the temperature of a fit on train alone, and keep its scores on val."""
    labels = task.splits.val.labels
    logits = twin.logits(val, task.protocol.chunk).split(ROWS)
    temperature = head_scores.fit_temperature(logits, labels)
    scores = head_scores.compact(logits, labels, temperature)
    if scores is not None:
        keeping.keep_scores(
            task, checkpoint, _kept(twin, temperature).digest, scores, "val"
        )
    return temperature


def _kept(fit: Fit, temperature: float | None) -> KeptHead:
    return KeptHead(
        fit.weight.float().cpu().clone(),
        fit.bias.float().cpu().clone(),
        temperature,
        None if temperature is None else "hold-out, twin",
    )


def _choice(
    task: Assignment[LogReg],
    checkpoint: Checkpoint,
    path: PathState,
    l2: float,
    final: Fit,
) -> dict[str, object]:
    """Return how the penalty was chosen, as the row says it; warn of fits that did not converge."""
    p = task.protocol
    gradient = max(*path["gradients"], final.gradient)
    converged = gradient <= p.tolerance
    if not converged:
        log.warning(
            f"{checkpoint.name} on {task.dataset.name}: not converged within"
            f" {p.max_iterations} iterations (gradient {gradient:.1e}, tolerance"
            f" {p.tolerance:g}); the row says so and never leads; `backbench linear ... --protocol"
            f" {p.recipe} max_iterations={10 * p.max_iterations}` may help"
        )
    return {
        "l2": l2,
        "on": "val",
        "trained_on": "train+val",
        "scores": {f"{v:g}": score for v, score in zip(p.penalties, path["scores"])},
        "at_edge": scoring.warn_edge(
            task, checkpoint, "penalty", l2, p.penalties, scores=path["scores"]
        ),
        "converged": converged,
        "gradient": gradient,
    }


def _record(
    task: Assignment[LogReg],
    path: PathState,
    last: Fit,
    predicted: np.ndarray,
    label: np.ndarray,
) -> float:
    """Add the `last` fit to a path, with its predictions on val; return their score."""
    classes = len(task.splits.train.classes)
    score = scoring.score(task.dataset.metric, predicted, label, classes)
    path["scores"].append(score)
    path["gradients"].append(last.gradient)
    path["weight"] = last.weight.cpu()
    path["bias"] = last.bias.cpu()
    if score > path["best"]:  # so that of equal scores the stronger penalty stays
        path["best"] = score
        path["best_weight"] = path["weight"]
        path["best_bias"] = path["bias"]
    return score


def _work(p: LogReg, name: str, splits: Splits, count: int) -> dict[str, int]:
    """Return the number of images, and of the fits of a path for each of `count` checkpoints."""
    images = sum(len(part) for _, part in splits.items())
    return {"image": images, "fit": len(p.penalties) * count}


PROBE = Probe(
    protocol=LogReg,
    measure=measure,
    words=lambda p: f"best of {len(p.penalties)} penalties by val",
    work=_work,
)
