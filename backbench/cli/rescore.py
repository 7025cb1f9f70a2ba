"""`backbench rescore`: scores of measured checkpoints on a clean test set.

No image is read: the numbers follow from RUN/predictions and a list, and become rows of that run.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from backbench.board.board import Measurement, read_verified
from backbench.errors import BadInput
from backbench.records import clean_test, predictions, store
from backbench.records.clean_test import CleanList, TestImages
from backbench.records.predictions import Arrays
from backbench.records.result_line import Result
from backbench.requests.options import Outcome
from backbench.requests.runs import RescoreRequest
from backbench.runs.folder import PREDICTIONS
from backbench.runs.terminal import log
from backbench.tasks import TASKS
from backbench.untrusted import printable
from backbench.verify import verification

# What is true of a number of the full set, and not of the clean one
_OF_FULL = ("predictions", "scores", "per_class", "confusion", "draws")
_CHOSEN = ("on", "converged", "gradient")


class Rescored(NamedTuple):
    """The new rows of one file of predictions, and what is kept beside them."""

    run: Path
    name: str  # of the file of predictions
    arrays: Arrays
    rows: list[Result]


def run(request: RescoreRequest) -> Outcome:
    """Run the verb `rescore`."""
    clean = clean_test.read_list(request.list)
    # 1. All numbers are made before the first file is written: a list that does not fit one of the
    #    runs changes none
    measured = _of_dataset(_measured(request.runs), request)
    rescored = rescore(clean, measured)
    if not rescored:
        where = ", ".join(map(str, request.runs))
        raise BadInput(
            f"{where}: no number has kept predictions of classes; measure again, as by"
            " `backbench linear`"
        )
    # 2. Predictions come first: a run that was killed before its rows makes both again
    for one in rescored:
        predictions.keep(one.run, one.name, **one.arrays)
        store.append(one.run, one.rows, skip_known=True)
    rows = [row for one in rescored for row in one.rows]
    _show(rows)
    return Outcome(document=rows)


def _measured(runs: Sequence[Path]) -> list[Measurement]:
    """Read the numbers of these runs that verification accepts and that classes were predicted for."""
    problems: list[str] = []
    files = sorted({file for below in runs for file in store.files_below(below)})
    found = read_verified(files, problems)
    for problem in problems:
        log.warning(printable.shown(problem, 1000))
    return [one for one in found if _counts_hits(one.result)]


def _counts_hits(r: Result) -> bool:
    """Return whether a number is a share of test images, or a mean of such shares over classes."""
    task = TASKS[r.task]
    of_classes = r.metric.startswith(("top1", "top5", "mean_per_class"))
    return of_classes and not task.follows and r.split == task.split == "test"


def _of_dataset(
    measured: Sequence[Measurement], request: RescoreRequest
) -> list[Measurement]:
    """Choose the numbers of the dataset whose images the list names."""
    datasets = sorted({one.result.dataset for one in measured})
    named = ", ".join(printable.shown(name, 40) for name in datasets)
    if request.dataset is None:
        if len(datasets) > 1:
            runs = " ".join(map(str, request.runs))
            raise BadInput(
                f"{runs}: numbers of {named}; say whose images the list names, by --dataset"
            )
        return list(measured)
    if datasets and request.dataset not in datasets:
        raise BadInput(f"--dataset {request.dataset}: the runs have numbers of {named}")
    return [one for one in measured if one.result.dataset == request.dataset]


def rescore(clean: CleanList, measured: Sequence[Measurement]) -> list[Rescored]:
    """Make the rows that a list gives for these numbers; a line of warning for each that has none."""
    of_list: dict[str, Mapping[str, np.ndarray]] = {}  # by digest of the test list
    found: dict[tuple[Path, str], Rescored] = {}
    for result, run in measured:
        name = result.facts.get("predictions")
        arrays = None if name is None else predictions.load(run / name)
        if name is None or arrays is None or "prediction" not in arrays:
            _leave_out(result, run, "its predictions were not kept; measure it again")
            continue
        # 1. What the list says of the images of this test set, which many numbers share
        manifest = str(arrays["manifest"])
        if manifest not in of_list:
            images = _test_images(result, run, manifest)
            if images is None:
                _leave_out(
                    result,
                    run,
                    "the list of its test images is not in its run; measure it again",
                )
                continue
            of_list[manifest] = clean_test.place(clean, images, result.dataset)
        said = of_list[manifest]
        # 2. The predictions once more, with what is said of their images
        digest = clean_test.digest(manifest, said)
        if (run, name) not in found:
            kept = {
                key: arrays[key]
                for key in ("manifest", "prediction", "label", "hits5")
                if key in arrays
            }
            stem = clean_test.file_stem(digest, Path(name).stem)
            found[run, name] = Rescored(run, stem, {**kept, **said}, [])
        one = found[run, name]
        why = clean_test.unscored(one.arrays, result.metric)
        if why:
            _leave_out(result, run, why)
            continue
        # 3. The score, and its difference from the full one
        for kind in clean_test.KINDS:
            metric = clean_test.metric_name(kind, result.metric, digest)
            one.rows.append(_row(result, metric, clean, digest, one))
    return [one for one in found.values() if one.rows]


def _leave_out(result: Result, run: Path, why: str) -> None:
    log.warning(
        f"{printable.shown(str(run), 300)}: {printable.shown(result.name, 40)},"
        f" {result.column}: left out: {why}"
    )


def _test_images(result: Result, run: Path, manifest: str) -> TestImages | None:
    """Read the list of test images of that digest, from the run or a corpus above it."""
    files = verification.list_files(result, run)
    content = verification.list_content(manifest, files)
    return None if content is None else TestImages.of(manifest, content)


def _row(
    source: Result, metric: str, clean: CleanList, digest: str, one: Rescored
) -> Result:
    """Make a row of the clean test set from the row of the full one."""
    value, ci95 = clean_test.value(one.arrays, metric)
    provenance = {k: v for k, v in source.provenance.items() if k not in _OF_FULL}
    provenance["predictions"] = f"{PREDICTIONS}/{one.name}.npz"
    provenance["full"] = {"task": source.task, "metric": source.metric}
    provenance["left_out"] = {
        **clean_test.counts(one.arrays),
        "digest": digest,
        "list": clean.file.name,
        "list_sha256": clean.sha256,
    }
    chosen = {k: v for k, v in (source.chosen or {}).items() if k in _CHOSEN}
    return dataclasses.replace(
        source,
        task=clean_test.TASK,
        metric=metric,
        value=value,
        ci95=ci95,
        chosen=chosen,
        provenance=provenance,
        origin={},
    )


def _show(rows: Sequence[Result]) -> None:
    """Print what was left out, once for each test list, then a line for each number."""
    lists = {}
    for r in rows:
        left_out = r.provenance["left_out"]
        assert isinstance(left_out, dict)
        lists[left_out["digest"]] = left_out
    for digest, said in lists.items():
        print(
            f"list {digest[:8]}: of {said['of']} test images {said['copies']} copies and"
            f" {said['wrong']} with a wrong label are left out, {said['relabelled']} are scored by"
            " their right label"
        )
    widest = max(len(r.column) for r in rows)
    for r in rows:
        kind = clean_test.full_metric(r.metric)[0]
        shown = f"{r.value:+7.2f}" if kind == clean_test.CHANGE else f"{r.value:7.2f}"
        interval = "no interval: too few images decide"
        if r.ci95 is not None:
            interval = f"[{r.ci95[0]:.2f}, {r.ci95[1]:.2f}]"
        print(
            f"{printable.shown(r.name, 40):<20} {r.column:<{widest}} {shown} {interval}"
        )
