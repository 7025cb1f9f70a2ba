"""Measures the runs of a plan in this process: the images are decoded once for all readings."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from backbench.datasets import catalog
from backbench.evaluation.plan import EvaluationPlan, PlannedRun, read_lists
from backbench.parallel import gpus
from backbench.records import store
from backbench.records.store import Result
from backbench.requests.analyze import AnalyzeRequest
from backbench.requests.detect import DetectRequest
from backbench.requests.finetune import FinetuneRequest, SemisupRequest
from backbench.requests.probe import LinearRequest, OodRequest
from backbench.requests.runs import CalibrateRequest
from backbench.runs.terminal import log
from backbench.tasks import TASKS


def refuse(plan: EvaluationPlan) -> None:
    """Raise BadInput for what a run would refuse: a request, the machine, or the lists of
    images."""
    for run in plan.runs:
        _refuse(run)
    read_lists(plan)


def measure(plan: EvaluationPlan) -> list[Result]:
    """Measure what is missing; return the rows of the wanted tasks, in their order."""
    with contextlib.redirect_stdout(io.StringIO()):  # the rows are returned
        # 1. Probes of frozen features: one price, and features that one has computed serve all
        _measure_probes([run for run in plan.runs if is_probe(run)], plan)
        # 2. Whole trainings, one after another
        for run in plan.runs:
            if not is_probe(run):
                _measure_training(run)
        # 3. What follows from kept scores
        if any(TASKS[task.task].from_scores for task in plan.wanted):
            from backbench.cli import calibrate

            calibrate.run(CalibrateRequest(runs=(plan.out,)))
    return _rows_of(plan)


def _refuse(run: PlannedRun) -> None:
    """Raise BadInput for a request that its program cannot do."""
    match run.request:
        case LinearRequest() | OodRequest() | SemisupRequest() | FinetuneRequest():
            from backbench.transfer import protocols

            protocols.check(run.request)
            gpus.refuse_missing(run.request.accelerator)
        case AnalyzeRequest():
            from backbench.transfer.analysis import protocol

            protocol.check_analysis(run.request)
        case DetectRequest():
            from backbench.detection import dialect

            dialect.check(run.request)


def is_probe(run: PlannedRun) -> bool:
    return isinstance(run.request, LinearRequest | OodRequest)


def _measure_probes(runs: list[PlannedRun], plan: EvaluationPlan) -> None:
    if not runs:
        return
    from backbench.transfer import linear
    from backbench.transfer.devices import start_for

    planned = []
    for run in runs:
        assert isinstance(run.request, LinearRequest | OodRequest)
        planned.append(linear.plan_run(run.request, run.checkpoints, plan.images))
    assert isinstance(runs[0].request, LinearRequest | OodRequest)
    linear.measure_runs(planned, start_for(runs[0].request))


def _measure_training(run: PlannedRun) -> None:
    match run.request:
        case SemisupRequest():
            from backbench.transfer import finetune

            finetune.run_semisup(run.request, run.checkpoints[0])
        case FinetuneRequest():
            from backbench.transfer import finetune

            finetune.run(run.request, run.checkpoints[0])
        case AnalyzeRequest():
            from backbench.transfer.analysis import analyze

            analyze.run(run.request, run.checkpoints)
        case DetectRequest():
            from backbench.detection import train_net

            train_net.run(run.request)


def sayings(plan: EvaluationPlan) -> list[str]:
    """Return the sentences that sum up each probe over all of its runs."""
    rows: list[tuple[Result, Path]] = []
    for run in plan.runs:
        if is_probe(run):
            found, _ = store.read(run.out)
            rows += [(row, run.out) for row in found if row.seed == plan.seed]
    if not rows:
        return []
    from backbench.transfer import linear

    return linear.sayings(rows)


def _rows_of(plan: EvaluationPlan) -> list[Result]:
    """Read the rows of the wanted tasks, in their order."""
    digests = {checkpoint.digest for checkpoint in plan.checkpoints}
    rows: list[Result] = []
    for task in plan.wanted:
        if TASKS[task.task].from_scores:
            datasets = catalog.names(task.dataset)
            found, _ = store.read(plan.out)
            for row in found:
                same = row.task == task.task and row.dataset in datasets
                if same and row.checkpoint in digests and row.seed == plan.seed:
                    rows.append(row)
            continue
        for run in plan.of(task):
            found, problems = store.read(run.out)
            for problem in problems:
                log.warning(problem)
            rows += [row for row in found if row.seed == plan.seed]
    return rows
