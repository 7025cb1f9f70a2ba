"""Result: one measured number, one JSON line in RUN/results.jsonl, appended once and never edited.

Predictions are kept beside the numbers (`keep_predictions`), so that two checkpoints can be compared image by image.
docs/results.md describes both files.
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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backbench.errors import BadInput, nearest
from backbench.runs import atomic
from backbench.runs.folder import PREDICTIONS, RESULTS_FILE, RUN_FILE
from backbench.tasks import TASKS

SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class Result:
    """One number with all that must be known to compare it. Values and intervals are in percent where the metric is.

    `checkpoint` is the digest; `value` None means undefined (an AP with no ground truth). `chosen` holds what was
    selected on validation data and on which split; `provenance` what is needed to repeat the number; `origin` is filled
    by `append` with the command, code, versions, hardware and time of this very measurement. Two results are equal when
    all but their origin is.
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
    chosen: dict[str, Any] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict, compare=False)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise BadInput(f"result with unknown task '{self.task}'; {nearest(self.task, TASKS)}")
        if self.value is not None and not math.isfinite(self.value):
            object.__setattr__(self, "value", None)
        if self.ci95 is not None:
            finite = all(math.isfinite(v) for v in self.ci95)
            object.__setattr__(self, "ci95", (self.ci95[0], self.ci95[1]) if finite else None)

    @property
    def column(self) -> str:
        """The leaderboard column this number belongs to: task/dataset/metric@protocol[+engine]."""
        engine = f"+{self.engine}" if self.engine else ""
        return f"{self.task}/{self.dataset}/{self.metric}@{self.protocol}{engine}"


def append(run: str | Path, results: Iterable[Result]) -> None:
    """Append to RUN/results.jsonl: one locked, synced write, so many jobs may share the file and none is torn."""
    stamp = _origin(Path(run))
    lines = "".join(
        json.dumps({**dataclasses.asdict(r), "origin": {**stamp, **r.origin}}, sort_keys=True)
        + "\n"
        for r in results
    )
    if not lines:
        return
    path = Path(run) / RESULTS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)  # lockf also works over NFS
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            lines = "\n" + lines  # a writer died in the middle of a line: keep it apart from ours
        data = lines.encode()
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:  # a full disk: half of a run's rows would pass for all of them
            os.ftruncate(descriptor, size)
            raise
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _origin(run: Path) -> dict[str, Any]:
    """Where and when these numbers are made; the command is the one that opened the run folder."""
    stamp: dict[str, Any] = {"recorded": round(time.time(), 3), **_here()}
    try:
        opened = json.loads((run / RUN_FILE).read_text())
    except (OSError, json.JSONDecodeError):
        return stamp
    return stamp | {key: opened[key] for key in ("command", "cwd") if key in opened}


@functools.cache
def _here() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in ("backbench", "torch", "torchvision"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"code": code_revision(), "versions": versions, "hardware": hardware()}


@functools.cache
def code_revision() -> str:
    """The commit that this code is at, marked when files differ from it; the version where there is no repository."""
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        try:
            git = ["git", "-C", str(root)]
            commit = subprocess.run(
                [*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=20, check=True
            )
            changed = subprocess.run(
                [*git, "diff", "--quiet", "HEAD"], capture_output=True, timeout=60, check=False
            )
            return commit.stdout.strip() + ("+changes" if changed.returncode else "")
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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{os.cpu_count()} x {name}"


def keep_predictions(run: str | Path, name: str, **arrays: Any) -> str:
    """Write RUN/predictions/NAME.npz and return its path relative to RUN, for `provenance["predictions"]`.

    `manifest` (str) is the digest of the test list; two files are compared only when theirs are equal. Beside it one of
        prediction, label (N,) int, and hits5 (N,) bool where top-5 is reported: one entry per test image, in the order
            of the manifest;
        values (D,): one value in percent per draw or fold, in the order of the draws (fewshot);
        bootstrap (B,): the metric on B resamples of the test images, drawn from the manifest's digest alone, one array
            per metric named bootstrap_<metric> (detection).
    """
    import io

    import numpy as np

    if "manifest" not in arrays:
        raise ValueError("predictions need the manifest's digest")
    relative = f"{PREDICTIONS}/{name.replace('/', '_')}.npz"
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    atomic.write_bytes(Path(run) / relative, buffer.getvalue())
    return relative


def files_below(path: str | Path) -> list[Path]:
    """Every results file at or below `path`, sorted. Raises BadInput where there is nothing at `path`."""
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise BadInput(f"{path}: no such run folder or results file")
    files: list[Path] = []
    seen: set[str] = set()
    for folder, subfolders, names in os.walk(
        path, followlinks=True
    ):  # runs are often links to a scratch disk
        real = str(Path(folder).resolve())
        if real in seen:
            subfolders.clear()
        elif RESULTS_FILE in names:
            files.append(Path(folder) / RESULTS_FILE)
        seen.add(real)
    return sorted(files)


def read_file(file: Path) -> Iterator[Result | str]:
    """Each line as a Result, or as one line of text about why it could not be read."""
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield parse(json.loads(line))
        except ValueError:
            yield f"{file}:{number}: truncated line, not counted: {line[:60].decode(errors='replace')}"
        except (BadInput, TypeError, KeyError, AttributeError) as error:
            yield f"{file}:{number}: {error}"


def read(path: str | Path) -> tuple[list[Result], list[str]]:
    """All results below `path` (a file or a folder), and one line about each line that could not be read."""
    lines = [line for file in files_below(path) for line in read_file(file)]
    return [x for x in lines if isinstance(x, Result)], [x for x in lines if isinstance(x, str)]


def _from_1(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 did not say where and when a number was made."""
    return {**data, "schema": 2, "origin": {}}


MIGRATIONS = {1: _from_1}


def parse(data: dict[str, Any]) -> Result:
    """One decoded JSON line as a Result, brought to this schema; an unknown schema is refused by name."""
    schema = data.get("schema")
    while schema in MIGRATIONS:
        data = MIGRATIONS[schema](data)
        schema = data["schema"]
    if schema != SCHEMA:
        raise BadInput(f"result of schema {schema}, not counted; this version reads 1 to {SCHEMA}")
    if data.get("ci95") is not None:
        data = {**data, "ci95": tuple(data["ci95"])}
    return Result(**data)
