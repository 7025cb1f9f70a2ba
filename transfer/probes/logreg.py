"""The logistic-regression probe: a path of penalties, the best on val fitted on train + val."""

from functools import partial
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from backbench.datasets.splits import Splits
from backbench.records.store import Result
from backbench.runs.run_progress import Progress
from backbench.runs.state import StopFlag, load_state, save_state
from backbench.runs.terminal import log
from backbench.transfer import head_scores, logreg, scoring
from backbench.transfer.devices import Machine
from backbench.transfer.features.extractor import Extractor
from backbench.transfer.head_scores import ROWS
from backbench.transfer.logreg import Fit
from backbench.transfer.probes.kind import Probe
from backbench.transfer.protocols import LogReg
from backbench.transfer.scoring import Assignment, CheckpointPredictions
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.kept_heads import KeptHead


class PathState(TypedDict, total=False):
    """How far one trunk's path is, as it is saved after each fit."""

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
    features = extractor.of_splits(task.splits, task.dataset.name)
    p = task.protocol
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
    # By digest of the trunk; a run that was stopped goes on behind the last penalty that it saved.
    state = load_state(task.state_file) if task.state_file.exists() else {}
    measured = []
    for trunk, train, val, test in zip(extractor.trunks, *features):
        start: PathState = {"scores": [], "gradients": [], "best": -1.0}
        path: PathState = state.setdefault(trunk.digest, start)
        last = Fit.at(path["weight"], path["bias"]) if "weight" in path else None
        # 1. The penalties that are left on train, strongest first, each scored on val. A fit starts
        #    where the one before ended: neighbouring penalties have near minima, and the strongest
        #    is the easiest from nothing.
        moments, on_train = None, [(train, y_train)]
        if len(train) >= train.shape[1]:
            moments = logreg.second_moments(on_train, machine.device, p.chunk)
        done, what = len(path["scores"]), f"{task.dataset.name} logreg"
        progress = Progress(task.run, len(p.penalties), what, unit="fit", done=done)
        for l2 in p.penalties[done:]:
            within = partial(stop.end_here, f"within l2 {l2:g}, which will begin again")
            last = fit(on_train, l2=l2, start=last, moments=moments, between=within)
            ranking = scoring.rank_classes(last.logits(val, p.chunk))
            score = _record(task, path, last, ranking[:, 0], np.asarray(y_val))
            save_state(task.state_file, dict(state))
            progress.advance(1, l2=l2, val=score)
            stop.end_here(f"after l2 {l2:g}")
        # 2. The best penalty again on train + val, from where it ended on train alone.
        l2 = p.penalties[scoring.best_of(path["scores"])]
        warm = Fit.at(path["best_weight"], path["best_bias"])
        within = partial(stop.end_here, f"within l2 {l2:g}, which will begin again")
        both = [*on_train, (val, y_val)]
        final = fit(both, l2=l2, start=warm, moments=moments, between=within)
        # 3. Its temperature is that of its twin, which saw nothing of val.
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
            provenance=scoring.keep_trained(
                task, trunk.checkpoint, head, of_test, chosen
            ),
        )
        measured.append(one)
    return scoring.write(task, measured)


def _temperature(
    task: Assignment[LogReg], checkpoint: Checkpoint, twin: Fit, val: Tensor
) -> float | None:
    """The temperature of a fit on train alone; what it says of val is kept."""
    labels = task.splits.val.labels
    logits = twin.logits(val, task.protocol.chunk).split(ROWS)
    temperature = head_scores.fit_temperature(logits, labels)
    scores = head_scores.compact(logits, labels, temperature)
    if scores is not None:
        scoring.keep_scores(
            task, checkpoint, _kept(twin, temperature).digest, scores, "val"
        )
    return temperature


def _kept(fit: Fit, temperature: float | None) -> KeptHead:
    weight, bias = fit.weight.float().cpu().clone(), fit.bias.float().cpu().clone()
    return KeptHead(
        weight, bias, temperature, None if temperature is None else "hold-out, twin"
    )


def _choice(
    task: Assignment[LogReg],
    checkpoint: Checkpoint,
    path: PathState,
    l2: float,
    final: Fit,
) -> dict[str, object]:
    """The choice of the penalty, as the row tells it; warns of fits that did not converge."""
    p, gradient = task.protocol, max(*path["gradients"], final.gradient)
    converged = gradient <= p.tolerance
    if not converged:
        log.warning(
            f"{checkpoint.name} on {task.dataset.name}: not converged within"
            f" {p.max_iterations} iterations (gradient {gradient:.1e}, tolerance"
            f" {p.tolerance:g}); the row says so and never leads; `--protocol"
            f" {task.protocol.name} max_iterations={10 * p.max_iterations}` may help"
        )
    return {
        "l2": l2,
        "on": "val",
        "trained_on": "train+val",
        "scores": {f"{v:g}": score for v, score in zip(p.penalties, path["scores"])},
        "at_edge": scoring.warn_edge(task, checkpoint, "penalty", l2, p.penalties),
        "converged": converged,
        "gradient": gradient,
    }


def _record(
    task: Assignment[LogReg],
    path: PathState,
    last: Fit,
    predicted: Tensor,
    label: np.ndarray,
) -> float:
    """Note the `last` fit of a path, with its predictions on val; returns their score."""
    classes = len(task.splits.train.classes)
    score = scoring.score(task.dataset.metric, predicted.numpy(), label, classes)
    path["scores"].append(score)
    path["gradients"].append(last.gradient)
    path["weight"], path["bias"] = last.weight.cpu(), last.bias.cpu()
    if score > path["best"]:  # of equal scores the stronger penalty
        path["best"] = score
        path["best_weight"], path["best_bias"] = path["weight"], path["bias"]
    return score


def _work(p: LogReg, name: str, splits: Splits, count: int) -> dict[str, int]:
    """Images, and the fits of a path for each of `count` checkpoints."""
    images = sum(len(part) for _, part in splits.items())
    return {"image": images, "fit": len(p.penalties) * count}


PROBE = Probe(
    measure=measure,
    words=lambda p: f"best of {len(p.penalties)} penalties by val",
    work=_work,
)
