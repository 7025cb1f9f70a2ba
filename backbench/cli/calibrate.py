"""`backbench calibrate`: calibration and selective prediction of measured heads.

No image is read: the numbers follow from RUN/scores, and become rows of that run.
"""

import dataclasses
from pathlib import Path

from backbench.board.board import read_verified
from backbench.errors import BadInput
from backbench.records import kept_scores, store
from backbench.records.result_line import Result
from backbench.requests.options import Outcome
from backbench.requests.runs import CalibrateRequest
from backbench.runs.terminal import log
from backbench.tasks import TASKS
from backbench.untrusted import printable

TASK = next(name for name, task in TASKS.items() if task.from_scores)
# Keys of the source row's provenance that describe its predictions; a calibration's row has none of them
_OF_PREDICTIONS = ("predictions", "per_class", "confusion")
_CHOSEN = ("on", "converged", "gradient")


def run(request: CalibrateRequest) -> Outcome:
    """Run the verb `calibrate`."""
    rows: list[Result] = []
    for runs in request.runs:
        for file in store.files_below(runs):
            rows += of_run(file)
    if not rows:
        where = ", ".join(map(str, request.runs))
        raise BadInput(
            f"{where}: no run with scores below; `backbench linear` keeps them, by SGD and logreg"
        )
    for r in rows:
        interval = f" [{r.ci95[0]:.3f}, {r.ci95[1]:.3f}]" if r.ci95 else ""
        print(
            f"{printable.shown(r.name, 40):<16} {r.column:<60} {r.value:9.3f}{interval}"
        )
    return Outcome(document=rows)


def of_run(file: Path) -> list[Result]:
    """Return the rows that the scores beside a results file give; those that are new are appended
    to it."""
    # 1. The files of scores, each with the first result that was computed from it.
    problems: list[str] = []
    of_scores: dict[str, Result] = {}
    for result, _ in read_verified([file], problems):
        name = result.facts.get("scores")
        if name is not None and result.task != TASK:
            of_scores.setdefault(name, result)
    for problem in problems:
        log.warning(printable.shown(problem, 1000))
    # 2. A row for each metric that they give.
    rows = []
    for name, source in of_scores.items():
        arrays = kept_scores.load(file.parent / name)
        if arrays is None:
            continue
        differs = kept_scores.owner(arrays, source)  # "checkpoint", "head", ...
        if differs:
            log.warning(
                f"{file.parent / name}: scores of another {differs}; measure them again"
            )
            continue
        provenance = {
            k: v for k, v in source.provenance.items() if k not in _OF_PREDICTIONS
        }
        if "temperature" in arrays:
            provenance["fitted_temperature"] = float(arrays["temperature"])
        chosen = {k: v for k, v in (source.chosen or {}).items() if k in _CHOSEN}
        for metric in kept_scores.names(arrays):
            value, ci95 = kept_scores.value(arrays, metric)
            row = dataclasses.replace(
                source,
                task=TASK,
                metric=metric,
                value=value,
                ci95=ci95,
                chosen=chosen,
                provenance=provenance,
                origin={},
            )
            rows.append(row)
    store.append(file.parent, rows, skip_known=True)
    return rows
