"""Result: one measured number, one JSON line in RUN/results.jsonl, appended once and never edited."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backbench.errors import BadInput, nearest

SCHEMA = 1
FILE = "results.jsonl"
TASKS = (
    "linear",
    "logreg",
    "knn",
    "fewshot",
    "semi_1pct",
    "semi_10pct",
    "finetune",
    "faster_rcnn",
    "mask_rcnn",
    "keypoint_rcnn",
    "analyze",
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One number with all that must be known to compare it. Values and intervals are in percent where the metric is.

    `checkpoint` is the digest; `value` None means undefined (an AP with no ground truth). `chosen` holds what was
    selected on validation data and on which split; `provenance` what is needed to repeat the number.
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
    lines = "".join(json.dumps(dataclasses.asdict(r), sort_keys=True) + "\n" for r in results)
    if not lines:
        return
    path = Path(run) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)  # lockf also works over NFS
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            lines = "\n" + lines  # a writer died in the middle of a line: keep it apart from ours
        data = lines.encode()
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: str | Path) -> tuple[list[Result], list[str]]:
    """All results below `path` (a file or a folder), and one line about each line that could not be read."""
    path = Path(path)
    files = sorted(path.rglob(FILE)) if path.is_dir() else [path]
    if not path.exists():
        raise BadInput(f"{path}: no such run folder or results file")
    out: list[Result] = []
    problems: list[str] = []
    for file in files:
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            if not line.strip():
                continue
            try:
                out.append(parse(json.loads(line)))
            except json.JSONDecodeError:
                problems.append(f"{file}:{number}: truncated line, not counted: {line[:60]}")
            except (BadInput, TypeError, KeyError) as error:
                problems.append(f"{file}:{number}: {error}")
    return out, problems


def parse(data: dict[str, Any]) -> Result:
    """One decoded JSON line as a Result; another schema is refused by name."""
    schema = data.get("schema")
    if schema != SCHEMA:
        raise BadInput(f"result of schema {schema}; this version reads {SCHEMA}")
    if data.get("ci95") is not None:
        data = {**data, "ci95": tuple(data["ci95"])}
    return Result(**data)
