"""`backbench merge A B --out C`: the records of several labs as one folder of runs.

C/<lab>/<run>/results.jsonl has the lines that count, each with `lab` in its origin; what was
measured twice is one line, of the measurement recorded last, with the others under `also`. Every
record is held to what it kept; what does not fit is named and left out. With --public, which also
makes sense of one lab's records, they say nothing of the machines' folders.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from backbench.board import redact
from backbench.board.board import Column, Measurement
from backbench.errors import BadInput
from backbench.results import column_keys, resamples, store
from backbench.results.predictions import load
from backbench.results.store import Origin, Result
from backbench.runs import atomic
from backbench.runs.folder import RESULTS_FILE
from backbench.runs.terminal import log
from backbench.untrusted import printable

_DIGEST = re.compile(r"[0-9a-f]{64}")
_LAB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}")
_ALIKE = 1e-6  # percent: a value computed again from what was kept
TOLD = ("lab", "value", "ci95", "recorded", "code", "hardware", "command")  # of the other origins


class Lab(NamedTuple):
    name: str
    folder: Path


class LabRecord(NamedTuple):
    """One line of one lab, and its run folder below the lab's."""

    lab: str
    measurement: Measurement
    below: Path


def run(args: argparse.Namespace) -> int:
    """The verb `merge`."""
    labs = _labs(args.folders)
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise BadInput(f"{args.out}: is there already; --out needs a new folder")
    if any(args.out.resolve().is_relative_to(lab.folder.resolve()) for lab in labs):
        raise BadInput(f"{args.out}: lies in a folder that is merged; choose another --out")
    problems: list[str] = []
    records = [record for lab in labs for record in _fitting(lab, problems)]
    if not records:
        raise BadInput(f"no {RESULTS_FILE} with a record that fits below {', '.join(args.folders)}")
    merged = _merged(records, problems)
    _write(args.out, merged, hide=args.public)
    for problem in problems:
        log.warning(printable.shown(problem, 1000))
    twice = sum("also" in r.measurement.result.origin for r in merged)
    labs_said = f"{len(labs)} lab{'s' * (len(labs) > 1)}"
    print(
        f"{len(records)} records of {labs_said}: {len(merged)} numbers, {twice} of them measured"
        f" more than once, {len(problems)} lines to look at; backbench leaderboard {args.out}"
    )
    return 0


def _labs(given: Sequence[str]) -> list[Lab]:
    """NAME=FOLDER, or a folder that is called as its lab."""
    labs = []
    for text in given:
        name, equals, folder = text.partition("=")
        path = Path(folder if equals else text)
        name = name if equals else path.resolve().name
        if not _LAB.fullmatch(name):
            raise BadInput(f"'{printable.shown(name)}' is no lab's name; give NAME=FOLDER")
        labs.append(Lab(name, path))
    names = [lab.name for lab in labs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(f"two folders are called '{twice}'; give NAME=FOLDER")
    return labs


def _fitting(lab: Lab, problems: list[str]) -> Iterator[LabRecord]:
    """The records of a lab that fit what they kept; the others are named."""
    for file in store.files_below(lab.folder):
        for line in store.read_file(file):
            if isinstance(line, str):
                problems.append(line)
                continue
            measurement = Measurement(line, file.parent)
            why = misfit(measurement)
            if why is None:
                whose = line.origin.get("lab") or lab.name
                below = Path(os.path.relpath(file.parent, lab.folder))
                yield LabRecord(str(whose), measurement, lab.name / below)
            else:
                what = f"{line.name}: {line.column}, seed {line.seed}"
                problems.append(f"{what} ({file}) is left out: {why}")


def misfit(measurement: Measurement) -> str | None:
    """Why a record cannot be what was measured: its digests, and its value where that can be
    computed again from the predictions it kept. None where everything fits."""
    result, run = measurement
    if not _DIGEST.fullmatch(result.checkpoint):
        return f"checkpoint '{printable.shown(result.checkpoint, 20)}' is no digest"
    name = result.provenance.get("predictions")
    arrays = load(run / str(name)) if name else None
    if arrays is None:
        return None
    manifests = result.provenance.get("manifests")
    test = manifests.get("test") if isinstance(manifests, dict) else None
    said = [str(one) for one in (result.provenance.get("manifest"), test) if one]
    if said and str(arrays["manifest"]) not in said:
        return f"its predictions are of list {str(arrays['manifest'])[:12]}, it says {said[0][:12]}"
    again = resamples.value_again(arrays, result.metric)
    if again is not None and (result.value is None or abs(again - result.value) > _ALIKE):
        return f"it says {result.value}, its predictions give {again:.4f}"
    return None


def _merged(records: Sequence[LabRecord], problems: list[str]) -> list[LabRecord]:
    """One record for each number, in the order in which they came."""
    found = column_keys.of_rows([record.measurement.result for record in records])
    numbers: dict[tuple[object, ...], list[LabRecord]] = {}
    strange: set[str] = set()
    for record, place in zip(records, found, strict=True):
        r = record.measurement.result
        column = Column(r.task, r.dataset, r.metric, place.protocol, r.engine, place.split)
        numbers.setdefault((r.checkpoint, column, r.seed), []).append(record)
        if not place.plain and (said := f"{record.lab}: {column.name}") not in strange:
            strange.add(said)
            problems.append(
                f"{said}: its recipe or its lists are not the usual ones of that name; a column apart"
            )
    return [_newest(same, problems) for same in numbers.values()]


def _newest(same: Sequence[LabRecord], problems: list[str]) -> LabRecord:
    """The record that counts, with the origins of the others; those that disagree are named."""
    ordered = sorted(same, key=lambda record: record.measurement.recorded)
    *others, newest = ordered
    result = newest.measurement.result
    also = []
    for other in others:
        if other.measurement.result == result and other.lab == newest.lab:
            continue  # a copy of the line
        if not agree(other.measurement.result, result):
            a, b = other.measurement.result, result
            problems.append(
                f"{result.name}: {result.column}: {other.lab} measured {a.value}, {newest.lab}"
                f" {b.value}; their intervals do not hold one another. {newest.lab}'s counts"
            )
        also.append(_told(other))
    origin: Origin = {**result.origin, "lab": newest.lab}
    if also:
        origin["also"] = [*origin.get("also", []), *also]
    changed = dataclasses.replace(result, origin=origin)
    return newest._replace(measurement=newest.measurement._replace(result=changed))


def agree(a: Result, b: Result) -> bool:
    """Whether one's interval holds the other's value; without intervals, whether they are equal."""
    if a.value is None or b.value is None:
        return a.value == b.value
    if abs(a.value - b.value) <= _ALIKE:
        return True
    held = (a.ci95, b.value), (b.ci95, a.value)
    return any(ci95 is not None and ci95[0] <= value <= ci95[1] for ci95, value in held)


def _told(record: LabRecord) -> dict[str, object]:
    result = record.measurement.result
    about = {**result.origin, "lab": record.lab, "value": result.value, "ci95": result.ci95}
    return {key: about[key] for key in TOLD if about.get(key) is not None}


def _write(out: Path, merged: Sequence[LabRecord], *, hide: bool) -> None:
    """Each run's lines in one write, after the predictions that they name; `hide`: what they say of
    the machine's folders."""
    runs: dict[Path, list[LabRecord]] = {}
    for record in merged:
        runs.setdefault(record.below, []).append(record)
    for below, records in runs.items():
        target = out / below
        lines = []
        for record in records:
            result, run = record.measurement
            name = result.provenance.get("predictions")
            if name and load(run / str(name)) is not None:
                copy = target / str(name)
                if not copy.resolve().is_relative_to(out.resolve()):
                    raise BadInput(f"{run}: predictions '{name}' lie outside of their run")
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(run / str(name), copy)
            line = dataclasses.asdict(result)
            line = redact.shown(line) if hide else line
            lines.append(json.dumps(line, sort_keys=True) + "\n")
        atomic.write_text(target / RESULTS_FILE, "".join(lines))
