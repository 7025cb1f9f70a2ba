"""`backbench errors`: what each kind of error costs measured detectors, in points of AP50.

No image is read: the numbers follow from RUN/predictions.json and the annotations, and become rows
of that run. Two checkpoints are printed beside each other, with the interval of their difference.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from backbench.board.board import Measurement, read_verified
from backbench.errors import BadInput
from backbench.records import ap_errors, data_manifests, predictions, store
from backbench.records.predictions import Arrays
from backbench.records.result_line import Result
from backbench.requests.options import Outcome
from backbench.requests.runs import ErrorsRequest
from backbench.runs.folder import PREDICTIONS
from backbench.runs.terminal import log
from backbench.stats.ap_errors import ERRORS, Outcomes
from backbench.tasks import TASKS
from backbench.untrusted import printable
from backbench.verify import paired_tests

# Task -> the task of its errors
EXPLAINED = {task.explains: name for name, task in TASKS.items() if task.explains}
# What is true of an AP, and not of an error's cost
_OF_AP = ("per_category",)
_WIDTH = 24  # of a printed column
_ALIKE = 1e-6  # percent: an AP50 computed again


class Explained(NamedTuple):
    """The new rows of one run, and what is kept beside them."""

    run: Path
    name: str  # of the file of outcomes
    arrays: Arrays
    ap50: Mapping[str, Result]  # kind -> the row that is explained
    rows: list[Result]


def run(request: ErrorsRequest) -> Outcome:
    """Run the verb `errors`."""
    # 1. All numbers are made before the first file is written: a run that does not fit changes none
    measured = _measured(request.runs)
    if not measured:
        where = ", ".join(map(str, request.runs))
        raise BadInput(
            f"{where}: no run of Faster or Mask R-CNN with an AP50; measure one by"
            " `backbench detect`"
        )
    explained, left_out = explain(measured, request.data)
    if not explained:
        raise BadInput("; ".join(left_out))
    for line in left_out:
        log.warning(line)
    # 2. Outcomes come first: a run that was killed before its rows makes both again
    for one in explained:
        predictions.keep(one.run, one.name, **one.arrays)
        store.append(one.run, one.rows, skip_known=True)
    _show(explained)
    return Outcome(document=[row for one in explained for row in one.rows])


def _measured(runs: Sequence[Path]) -> dict[Path, dict[str, Measurement]]:
    """Read the AP50 of each kind of each run that verification accepts."""
    problems: list[str] = []
    files = sorted({file for below in runs for file in store.files_below(below)})
    found: dict[Path, dict[str, Measurement]] = {}
    for one in read_verified(files, problems):
        kind, _, metric = one.result.metric.rpartition("_")
        if one.result.task in EXPLAINED and metric == "AP50":
            found.setdefault(one.run, {})[kind] = one
    for problem in problems:
        log.warning(printable.shown(problem, 1000))
    return found


def explain(
    measured: Mapping[Path, Mapping[str, Measurement]], data: Path | None
) -> tuple[list[Explained], list[str]]:
    """Make the rows of each run, and say of each that has none why it is left out."""
    from backbench.detection import kept_detections, tide
    from backbench.detection.data.split import Split

    explained = []
    left_out = []
    splits: dict[tuple[str, str, str], Split] = {}
    for run, by_kind in measured.items():
        first = next(iter(by_kind.values())).result
        detections = kept_detections.read(run)
        why = kept_detections.refuses(first)
        if detections is None:
            why = "its detections were not kept; measure it again"
        elif not detections:
            why = "it detected nothing, so no error can be explained; train it longer"
        if detections is None or why:
            left_out.append(f"{printable.shown(str(run), 300)}: left out: {why}")
            continue
        key = (first.task, first.dataset, str(first.facts["val"]))
        if key not in splits:
            splits[key] = kept_detections.scored_split(first, run, data)
        kept_detections.refuse_others(run, splits[key], detections)
        # 1. What became of each detection. These are the run's own, if they have its AP50
        outcomes = {}
        for kind, one in by_kind.items():
            if kind in tide.KINDS and one.result.value is not None:
                outcomes[kind] = tide.outcomes(splits[key], detections, kind)
                again = ap_errors.ap50(outcomes[kind])
                if abs(again - one.result.value) > _ALIKE:
                    raise BadInput(
                        f"{run}: its kept detections have {kind}_AP50 {again:.4f}, its results"
                        f" {one.result.value:.4f}; measure it again"
                    )
        if not outcomes:
            left_out.append(
                f"{printable.shown(str(run), 300)}: left out: its AP50 is undefined, as nothing that"
                " was scored has an object"
            )
            continue
        # 2. Its rows
        explained.append(_rows(run, by_kind, outcomes))
    return explained, left_out


def _rows(
    run: Path, by_kind: Mapping[str, Measurement], outcomes: Mapping[str, Outcomes]
) -> Explained:
    """Make the rows of a run from what became of its detections."""
    rows = []
    ap50 = {kind: one.result for kind, one in by_kind.items() if kind in outcomes}
    first = next(iter(ap50.values()))
    kept_ap = Path(str(first.facts["predictions"]))
    manifest = data_manifests.scored_list(first)
    assert manifest is not None, "a detector's row"
    arrays = ap_errors.kept(outcomes, manifest)
    name = ap_errors.file_stem(kept_ap.stem)
    for kind, source in ap50.items():
        for error in ERRORS:
            metric = ap_errors.metric_name(kind, error)
            provenance = {k: v for k, v in source.provenance.items() if k not in _OF_AP}
            provenance["predictions"] = f"{PREDICTIONS}/{name}.npz"
            provenance["errors"] = ap_errors.count(arrays, metric)
            row = dataclasses.replace(
                source,
                task=EXPLAINED[source.task],
                metric=metric,
                value=ap_errors.value(arrays, metric),
                ci95=None,
                provenance=provenance,
                origin={},
            )
            rows.append(row)
    return Explained(run, name, arrays, ap50, rows)


class _Table(NamedTuple):
    """Holds what the columns of one printed table share."""

    task: str
    dataset: str
    protocol: str
    engine: str | None
    val: str
    kind: str


def _show(explained: Sequence[Explained]) -> None:
    """Print a table for each kind of AP50 on each list of boxes, with a column for each run. Two runs
    get a column for their difference."""
    tables: dict[_Table, list[Explained]] = {}
    for one in explained:
        for kind, ap50 in one.ap50.items():
            of = (ap50.task, ap50.dataset, ap50.protocol, ap50.engine)
            table = _Table(*of, str(ap50.facts["val"]), kind)
            tables.setdefault(table, []).append(one)
    for table, runs in tables.items():
        print(_title(table, list(tables)))
        heads = []
        values = []
        names = _names(table.kind, runs)
        for one, name in zip(runs, names):
            ap50 = one.ap50[table.kind]
            heads.append(f"  {_cut(name)}".rjust(_WIDTH))
            values.append(f"{ap50.value:{_WIDTH}.2f}")
        between = "   difference" if len(runs) == 2 else ""
        print(f"{'points of AP50':<16}{''.join(heads)}{between}")
        print(f"{'AP50':<16}{''.join(values)}")
        for error in ERRORS:
            print(_line(table.kind, error, runs))


def _cut(name: str) -> str:
    """Cut a name to what fits above a column."""
    most = _WIDTH - 2
    if len(name) > most:
        name = f"{name[: most - 3]}..."
    return printable.shown(name)


def _title(table: _Table, tables: Sequence[_Table]) -> str:
    """Write what a table is of, with as much as tells it from the others."""

    def same(*keys: str) -> bool:
        """Return whether another table is alike in all of these."""
        wanted = [getattr(table, key) for key in keys]
        alike = [[getattr(other, key) for key in keys] for other in tables]
        return alike.count(wanted) > 1

    parts = [f"{TASKS[table.task].title} on {printable.shown(table.dataset, 40)}"]
    parts.append(table.kind)
    if same("task", "dataset", "kind"):
        parts.append(printable.shown(table.protocol, 60))
        if table.engine:
            parts.append(printable.shown(table.engine, 20))
    if same("task", "dataset", "kind", "protocol", "engine"):
        parts.append(f"boxes {printable.shown(table.val[:8])}")
    return f"{', '.join(parts)}:"


def _names(kind: str, runs: Sequence[Explained]) -> list[str]:
    """Return the checkpoints' names; where two share one, they are numbered, and each number's run
    is printed."""
    names = [one.ap50[kind].name for one in runs]
    if len(set(names)) == len(names):
        return names
    for number, one in enumerate(runs, 1):
        print(f"({number}) {printable.shown(str(one.run), 300)}")
    return [f"({number}) {name}" for number, name in enumerate(names, 1)]


def _line(kind: str, error: str, runs: Sequence[Explained]) -> str:
    """Write what a kind of error costs each run, with the number of such errors in brackets."""
    metric = ap_errors.metric_name(kind, error)
    cells = []
    for one in runs:
        count = ap_errors.count(one.arrays, metric)
        cells.append(
            f"{ap_errors.value(one.arrays, metric):.2f} ({count})".rjust(_WIDTH)
        )
    line = f"{error:<16}{''.join(cells)}"
    if len(runs) != 2:
        return line
    first, second = (one.run / PREDICTIONS / f"{one.name}.npz" for one in runs)
    difference = paired_tests.compare([first], [second], metric)
    if difference is None:
        return line
    low, high = difference.ci95
    return f"{line}   {difference.value:+.2f} [{low:+.2f}, {high:+.2f}]"
