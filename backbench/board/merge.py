"""`backbench merge A B --out C`: the records of several labs as one folder of runs.

C/<lab>/<run>/results.jsonl has the lines that count, with `lab` in their origin. A number that was
measured twice is one line: the last recorded, with the others under `also`. Records that fail
verification (verify/verification.py) are named and left out. C/lists/<sha256>.tsv.gz has each list
of test images once, paths and labels, so labels beside predictions can be checked without trusting
a sender. Records of Every Eval Ever are read, too; nothing is kept beside them, so they are unbacked
and never lead. With --public, useful for one lab too, the lines name no folder of a machine.
"""

import dataclasses
import gzip
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from backbench.board import every_eval_ever
from backbench.board.board import Column, Measurement, read_verified
from backbench.errors import BadInput
from backbench.records import column_keys, kept_scores, store
from backbench.records.predictions import Arrays, load
from backbench.records.public_lines import without_folders
from backbench.records.result_line import Origin, Result
from backbench.requests.runs import MergeRequest
from backbench.runs import atomic, failures
from backbench.runs.folder import RESULTS_FILE
from backbench.runs.terminal import log
from backbench.untrusted import printable
from backbench.verify import verification

_LAB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}")
_ALIKE = 1e-6  # percent: equal values
# The keys of another measurement of the same number that stand under `also`
ALSO_KEYS = ("lab", "value", "ci95", "recorded", "code", "hardware", "command")


class Lab(NamedTuple):
    name: str
    folder: Path


class LabRecord(NamedTuple):
    """One line of one lab, and its run folder below the lab's."""

    lab: str
    measurement: Measurement
    below: Path


def run(request: MergeRequest) -> None:
    """Run the verb `merge`."""
    # 1. The labs, and a folder that is new.
    labs = _labs(request.folders)
    if request.out.exists() and (
        not request.out.is_dir() or any(request.out.iterdir())
    ):
        raise BadInput(f"{request.out}: is there already; --out needs a new folder")
    for lab in labs:
        if request.out.resolve().is_relative_to(lab.folder.resolve()):
            raise BadInput(
                f"{request.out}: lies in a folder that is merged; choose another --out"
            )
    # 2. The records that follow from what they kept; `problems` names the others.
    problems: list[str] = []
    records = []
    for lab in labs:
        folder = lab.folder.parent if lab.folder.is_file() else lab.folder
        files = store.files_below(lab.folder)
        files += [
            file
            for file in every_eval_ever.files_below(lab.folder)
            if file not in files
        ]
        for measurement in read_verified(files, problems):
            measured_by = measurement.result.origin.get("lab") or lab.name
            below = Path(lab.name) / os.path.relpath(measurement.run, folder)
            records.append(LabRecord(measured_by, measurement, below))
    if not records:
        raise BadInput(
            f"no {RESULTS_FILE} with a record that fits below {', '.join(request.folders)}"
            + (f"; {problems[0]}" if problems else "")
        )
    # 3. One line for each number.
    merged = _newest_of_each(records, problems)
    _write(request.out, merged, hide=request.public)
    for problem in problems:
        log.warning(printable.shown(problem, 1000))
    twice = sum("also" in record.measurement.result.origin for record in merged)
    labs_said = "1 lab" if len(labs) == 1 else f"{len(labs)} labs"
    print(
        f"{len(records)} records of {labs_said}: {len(merged)} numbers, {twice} of them measured"
        f" more than once, {len(problems)} lines to look at; backbench leaderboard"
        f" {shlex.quote(str(request.out))}"
    )


def _labs(given: Sequence[str]) -> list[Lab]:
    """Parse NAME=FOLDER, or a folder that has its lab's name."""
    labs: dict[str, Lab] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals:
            folder = text
            name = Path(text).resolve().name
        if not _LAB.fullmatch(name):
            raise BadInput(
                f"'{printable.shown(name)}' is no lab's name; give NAME=FOLDER"
            )
        if name in labs:
            raise BadInput(f"two folders are called '{name}'; give NAME=FOLDER")
        labs[name] = Lab(name, Path(folder))
    return list(labs.values())


def _newest_of_each(
    records: Sequence[LabRecord], problems: list[str]
) -> list[LabRecord]:
    """Return one record for each number, in the order in which they came."""
    keys = column_keys.of_rows([record.measurement.result for record in records])
    numbers: dict[tuple[object, ...], list[LabRecord]] = {}
    named: set[str] = set()
    for record, key in zip(records, keys, strict=True):
        r = record.measurement.result
        column = Column(r.task, r.dataset, r.metric, key.protocol, r.engine, key.split)
        numbers.setdefault((r.checkpoint, column, r.seed), []).append(record)
        where = f"{record.lab}: {column.name}"
        if not key.unmarked and where not in named:
            named.add(where)
            problems.append(
                f"{where}: its recipe or its lists are not the usual ones of that name;"
                " a column apart"
            )
    return [_newest(same, problems) for same in numbers.values()]


def _newest(same: Sequence[LabRecord], problems: list[str]) -> LabRecord:
    """Return the record that counts, with the origins of the others; those that disagree are
    named."""
    *others, newest = sorted(same, key=lambda record: record.measurement.recorded)
    result = newest.measurement.result
    also = []
    for other in others:
        theirs = other.measurement.result
        if theirs == result and other.lab == newest.lab:
            continue  # a copy of the line
        if not agree(theirs, result):
            problems.append(
                f"{result.name}: {result.column}: {other.lab} measured {theirs.value},"
                f" {newest.lab} {result.value}; their intervals do not hold one another."
                f" {newest.lab}'s counts"
            )
        about = {
            **theirs.origin,
            "lab": other.lab,
            "value": theirs.value,
            "ci95": theirs.ci95,
        }
        also.append(
            {key: about[key] for key in ALSO_KEYS if about.get(key) is not None}
        )
    origin: Origin = {**result.origin, "lab": newest.lab}
    del origin["verified"]  # whoever reads the line verifies it
    if also:
        origin["also"] = [*origin.get("also", []), *also]
    changed = dataclasses.replace(result, origin=origin)
    return newest._replace(measurement=newest.measurement._replace(result=changed))


def agree(a: Result, b: Result) -> bool:
    """Return True where one's interval holds the other's value; without intervals, where they are
    equal."""
    if a.value is None or b.value is None:
        return a.value == b.value
    if abs(a.value - b.value) <= _ALIKE:
        return True
    return _holds(a.ci95, b.value) or _holds(b.ci95, a.value)


def _holds(interval: tuple[float, float] | None, value: float) -> bool:
    return interval is not None and interval[0] <= value <= interval[1]


def _write(out: Path, merged: Sequence[LabRecord], *, hide: bool) -> None:
    """Write each run's lines after the predictions that they name; `hide` removes folders."""
    runs: dict[Path, list[LabRecord]] = {}
    for record in merged:
        runs.setdefault(record.below, []).append(record)
    for below, records in runs.items():
        target = out / below
        lines = []
        for record in records:
            result, run = record.measurement
            facts = result.facts
            kept = [
                _copy_kept(facts.get("predictions"), load, run, target, out),
                _copy_kept(facts.get("scores"), kept_scores.load, run, target, out),
            ]
            if any(kept):
                _keep_list(result, run, out)
            line = dataclasses.asdict(result)
            if hide:
                line = without_folders(line)
            lines.append(json.dumps(line, sort_keys=True) + "\n")
        atomic.write_text(target / RESULTS_FILE, "".join(lines))


def _copy_kept(
    name: str | None,
    read: Callable[[Path], Arrays | None],
    run: Path,
    target: Path,
    out: Path,
) -> bool:
    """Copy RUN/name to TARGET/name if `read` can read it; returns whether it could."""
    if name is None or read(run / name) is None:
        return False
    copy = target / name
    # A link in the run could lead the name elsewhere.
    if not copy.resolve().is_relative_to(out.resolve()):
        raise BadInput(f"{run}: '{name}' lies outside of their run")
    failures.make_folder(copy.parent)
    shutil.copyfile(run / name, copy)
    return True


def _keep_list(result: Result, run: Path, out: Path) -> None:
    """Write OUT/lists/<sha256>.tsv.gz, if the row's list is in its run or its corpus."""
    manifest = (result.facts.get("manifests") or {}).get("test") or ""
    kept = out / verification.LISTS / f"{manifest}.tsv.gz"
    if not manifest or kept.exists():
        return
    files = verification.list_files(result, run)
    content = verification.list_content(manifest, files)
    if content is not None:
        atomic.write_bytes(kept, gzip.compress(content, mtime=0))
