"""Result: one measured number, one JSON line in RUN/results.jsonl, appended once and never edited.

Predictions are kept beside the numbers (`keep_predictions`), so that two checkpoints can be
compared image by image. docs/results.md describes both files.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from backbench.errors import BadInput, nearest
from backbench.results.row_schema import check
from backbench.runs import atomic, failures
from backbench.runs.folder import OWED_FILE, PREDICTIONS, RESULTS_FILE, RUN_FILE
from backbench.tasks import TASKS
from backbench.untrusted import jsons, opening, printable, walking

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

SCHEMA = 2
LARGEST_FILE = 4 * opening.GIGABYTE  # of results: a million of them
Line = dict[str, Any]  # one decoded JSON object, before anything is known of it


class Origin(TypedDict, total=False):
    """Where and when a number was made. Older lines lack some of it, or all."""

    command: str | list[str]
    cwd: str
    code: str  # commit or version
    versions: Mapping[str, str]
    hardware: str
    recorded: float  # seconds since 1970, UTC
    images_per_second: float  # through the frozen trunk alone, on this hardware
    # Of merged records (backbench merge): whose it is, and who else measured this number
    lab: str
    also: list[dict[str, object]]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One number with all that must be known to compare it, in percent where the metric is.

    `checkpoint` is the digest; `value` None means undefined (an AP with no ground truth). `chosen`
    holds what was selected on validation data and on which split; `provenance` what is needed to
    repeat the number; `origin` is filled by `append`. Two results are equal when all but their
    origin is.
    """

    checkpoint: str
    name: str
    method: str
    arch: str
    epochs: int | None
    task: str
    dataset: str
    split: str
    metric: str
    value: float | None
    ci95: tuple[float, float] | None = None
    protocol: str
    engine: str | None = None
    seed: int = 0
    chosen: Mapping[str, object] | None = None
    provenance: Mapping[str, object] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin, compare=False)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise BadInput(f"result with unknown task '{self.task}'; {nearest(self.task, TASKS)}")
        # JSON has no nan: what is not finite is undefined. `frozen` is for everybody after this.
        if self.value is not None and not math.isfinite(self.value):
            object.__setattr__(self, "value", None)
        if self.ci95 is not None:
            low, high = self.ci95
            finite = math.isfinite(low) and math.isfinite(high)
            object.__setattr__(self, "ci95", (low, high) if finite else None)

    @property
    def column(self) -> str:
        """The leaderboard column this number belongs to: task/dataset/metric@protocol[+engine]."""
        engine = f"+{printable.part(self.engine)}" if self.engine else ""
        what = "/".join(map(printable.part, (self.task, self.dataset, self.metric)))
        return f"{what}@{printable.part(self.protocol)}{engine}"


def append(run: str | Path, results: Iterable[Result]) -> None:
    """Append to RUN/results.jsonl: one locked, synced write, so that many jobs may share the file
    and none is torn."""
    _append(Path(run), results, twice=True)


def append_missing(run: str | Path, results: Iterable[Result]) -> None:
    """The same, without the numbers that the file has already: what another run, or an earlier one
    that was killed, had written is not written again."""
    _append(Path(run), results, twice=False)


def _append(run: Path, results: Iterable[Result], *, twice: bool) -> None:
    stamp = _origin(run)
    lines = [(_number(dataclasses.asdict(r)), _line(r, stamp)) for r in results]
    if not lines:
        return
    path = run / RESULTS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)  # lockf also works over NFS
        # Read under the lock: of two that come at once, the second sees the first one's rows. By
        # this descriptor: closing another one of the same file would give the lock away.
        known = set() if twice else _numbers(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
        new = "".join(line for number, line in lines if number not in known)
        if new:
            with failures.naming(path):
                _write_whole(descriptor, new.encode())
    finally:
        os.close(descriptor)


class NumberKey(NamedTuple):
    """What tells one number of a run from another: two lines with one of these are the same."""

    checkpoint: object
    task: object
    dataset: object
    split: object
    metric: object
    protocol: object
    engine: object
    seed: object


def _number(data: Mapping[str, Any]) -> NumberKey:
    """Whose value a line is."""
    return NumberKey(*(data.get(key) for key in NumberKey._fields))


def numbers(run: str | Path) -> set[NumberKey]:
    """What RUN/results.jsonl has a line of, each number once; lines that cannot be read have none."""
    try:
        return _numbers(opening.read_bytes(Path(run) / RESULTS_FILE, most=LARGEST_FILE))
    except OSError:
        return set()


def _numbers(content: bytes) -> set[NumberKey]:
    found = set()
    for line in content.split(b"\n"):
        try:
            number = _number(jsons.decode(line))
            if number.checkpoint and number.dataset:
                found.add(number)
        except (ValueError, AttributeError, TypeError):
            continue  # torn, damaged, or no texts in it: no result; the leaderboard reports it
    return found


def owe(run: str | Path, rows: int) -> None:
    """RUN will have this many rows when it is done: written down before the first one is."""
    path = Path(run) / OWED_FILE
    if owed(run) != rows:
        atomic.write_json(path, {"rows": rows})


def owed(run: str | Path) -> int | None:
    """How many rows RUN must deliver; None where it did not say so (runs before that was asked)."""
    try:
        rows = jsons.read(Path(run) / OWED_FILE)["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return rows if isinstance(rows, int) else None


def complete(run: str | Path) -> bool:
    """Whether RUN has every row that it owes; at least one, where it did not say how many."""
    return len(numbers(run)) >= max(1, owed(run) or 1)


def _line(result: Result, stamp: Origin) -> str:
    """The result as its line of JSON; what its own origin says goes before `stamp`."""
    data = dataclasses.asdict(result)
    data["origin"] = {**stamp, **result.origin}
    return json.dumps(data, sort_keys=True) + "\n"


def _write_whole(descriptor: int, data: bytes) -> None:
    """All of `data` at the end of the locked file, on disk; or nothing of it and an OSError."""
    size = os.fstat(descriptor).st_size
    # A writer may have died in the middle of a line: keep what it left apart from ours.
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        data = b"\n" + data
    try:
        while data:  # a write may take only part of what it is given
            data = data[os.write(descriptor, data) :]
    except OSError:  # a full disk: half of a run's rows would pass for all of them
        os.ftruncate(descriptor, size)
        raise
    os.fsync(descriptor)


def _origin(run: Path) -> Origin:
    """Where and when these numbers are made; the command is the one that opened the run folder."""
    stamp: Origin = {"recorded": round(time.time(), 3), **_here()}
    try:
        opened = jsons.read(run / RUN_FILE)
    except (OSError, ValueError):
        return stamp
    for key in ("command", "cwd"):
        if key in opened:
            stamp[key] = opened[key]
    return stamp


@functools.cache
def _here() -> Origin:
    """What stays the same while this process lives."""
    versions = {"python": platform.python_version()}
    for package in ("backbench", "torch", "torchvision"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"code": code_revision(), "versions": versions, "hardware": hardware()}


@functools.cache
def code_revision() -> str:
    """The commit that this code is at, marked when files differ from it; the version where there is
    no repository."""
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        git = ["git", "-C", str(root)]
        at, changed = [*git, "rev-parse", "HEAD"], [*git, "diff", "--quiet", "HEAD"]
        try:
            commit = subprocess.run(at, capture_output=True, text=True, timeout=20, check=True)
            differs = subprocess.run(changed, capture_output=True, timeout=60, check=False)
            return commit.stdout.strip() + ("+changes" if differs.returncode else "")
        except (OSError, subprocess.SubprocessError):
            pass
    try:
        return f"backbench {importlib.metadata.version('backbench')}"
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def hardware() -> str:
    """The GPU when this process uses one, or the CPU's name."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{os.cpu_count()} x {_cpu_name()}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name") and ":" in line:
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def keep_predictions(run: str | Path, name: str, **arrays: ArrayLike) -> str:
    """Write RUN/predictions/NAME.npz; returns its path relative to RUN, for
    `provenance["predictions"]`.

    `manifest` (str) is the digest of the test list; two files are compared only when theirs are
    equal. Beside it one of
        prediction, label (N,) int, and hits5 (N,) bool where top-5 is reported: one entry per test
            image, in the order of the manifest;
        values (D,): one value in percent per draw or fold, in the order of the draws (fewshot);
        bootstrap (B,): the metric on B resamples of the test images, drawn from the manifest's
            digest alone, one array per metric named bootstrap_<metric> (detection).
    """
    import io

    import numpy as np

    if "manifest" not in arrays:
        raise ValueError("predictions need the manifest's digest")
    relative = f"{PREDICTIONS}/{name.replace('/', '_')}.npz"
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # one name is numpy's own
    atomic.write_bytes(Path(run) / relative, buffer.getvalue())
    return relative


def files_below(path: str | Path) -> list[Path]:
    """Every results file at or below `path`, sorted. Raises BadInput where `path` is nothing."""
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise BadInput(f"{path}: no such run folder or results file")
    # Links are followed, since runs often lie on a scratch disk
    found = walking.files(path, follow=True)
    return sorted(file for file in found if file.name == RESULTS_FILE)


def read_file(file: Path) -> Iterator[Result | str]:
    """Each line as a Result, or as one line of text about why it could not be read."""
    where = printable.shown(str(file), 300)
    try:
        # A FIFO in the place of a file would keep its reader waiting
        opened = opening.open_regular(file, most=LARGEST_FILE)
    except OSError as error:
        yield f"{where}: not read: {error.strerror}"
        return
    with opened:
        for number, line in enumerate(opened, 1):
            if not line.strip():
                continue
            try:
                yield parse(jsons.decode(line))
            except ValueError as error:
                start = printable.shown(line.rstrip(b"\n")[:60].decode(errors="replace"))
                # What does not end as JSON ends was cut off; what is too deep is whole
                what = "truncated line" if isinstance(error, json.JSONDecodeError) else str(error)
                yield f"{where}:{number}: {printable.shown(what)}, not counted: {start}"
            except (BadInput, TypeError, KeyError, AttributeError) as error:
                yield f"{where}:{number}: {printable.shown(str(error))}"


def read(path: str | Path) -> tuple[list[Result], list[str]]:
    """All results below `path` (file or folder), and a line about each that could not be read."""
    results: list[Result] = []
    problems: list[str] = []
    for file in files_below(path):
        for line in read_file(file):
            if isinstance(line, Result):
                results.append(line)
            else:
                problems.append(line)
    return results, problems


def _from_1(data: Line) -> Line:
    """Schema 1 did not say where and when a number was made."""
    return {**data, "schema": 2, "origin": {}}


MIGRATIONS = {1: _from_1}


def parse(data: Line) -> Result:
    """One decoded JSON line as a Result of this schema; an unknown schema is refused by name."""
    # One step at a time, from each schema to the next; what no step leads to SCHEMA is unknown.
    if not isinstance(data, dict):
        raise BadInput(f"a {type(data).__name__}, not a result")
    schema = data.get("schema")
    while type(schema) is int and schema in MIGRATIONS:
        data = MIGRATIONS[schema](data)
        schema = data["schema"]
    if schema != SCHEMA:
        said = f"{schema!s:.20}"
        raise BadInput(f"result of schema {said}, not counted; this version reads 1 to {SCHEMA}")
    check(data)
    for key in ("provenance", "origin"):
        if data.get(key) is None:
            data = {**data, key: {}}
    return Result(**data)
