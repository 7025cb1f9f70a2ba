"""How long a job will take, by jobs of the same command that ended here.

The same command means: the same recipe, options and data on the same kind of trunk, cluster and
machine. Where none has run nothing is guessed, for across recipes a guess is off by any factor.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from pathlib import Path

from backbench.launch.clusters import Cluster, Resources
from backbench.launch.job import Job, command_kind
from backbench.launch.records import Status
from backbench.launch.view import Snapshot
from backbench.runs.run_progress import read_progress
from backbench.weights import header

# Overrides of a pretraining that change nothing about the time of one epoch: temperatures and
# weights of the method, rates, names
_NO_MATTER = re.compile(
    r"(epochs|name|expected)=.*|optim\.\w*lr=.*|method\.[\w.]+=-?(\d+\.\d*|\d*e-?\d+|inf)",
    re.DOTALL,
)
ENOUGH = 0.02  # share of its steps from which a pretraining on its way tells how long it takes

CostKind = tuple[object, ...]  # jobs of one kind take the same time for each of their units


class Estimates:
    """Seconds per unit of each kind of job that a snapshot knows: the median over its jobs."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.runs = snapshot.ledger.runs
        self._per_unit: dict[CostKind, list[float]] = defaultdict(list)
        for name, status in snapshot.statuses.items():
            record = snapshot.records.get(name)
            if record is None or not status["attempts"]:
                continue
            attempt = status["attempts"][-1]
            machine = (attempt.get("gpus", 0), attempt.get("machine", ""))
            kind = _kind(record.job, (record.submission.cluster, *machine))
            share = 1.0 if status["state"] == "done" else _share_made(self.runs, record.job)
            if kind is not None and share >= ENOUGH:
                self._per_unit[kind].append(spent_seconds(status) / (record.job.units * share))

    def seconds(self, job: Job, resources: Resources, cluster: Cluster) -> float | None:
        """Return how long the rest of the job takes on this cluster; None where nobody knows."""
        gpus = min(resources.gpus, cluster.gpus) if cluster.kind == "local" else resources.gpus
        kind = _kind(job, (cluster.file, gpus, " ".join(resources.options(job.verb))))
        per_unit = self._per_unit.get(kind) if kind is not None else None
        if not per_unit:
            return None
        return statistics.median(per_unit) * job.units * (1.0 - _share_made(self.runs, job))


def _kind(job: Job, machine: CostKind) -> CostKind | None:
    """Return what the time of one unit depends on; None where the trunk is not known yet."""
    arch = job.arch
    # A detector's trunk is named by its config; files are converted at the speed of the disk
    if arch is None and job.verb not in ("detect", "import", "export"):
        arch = _arch_of_file(job)
        if arch is None:
            return None
    if job.units <= 0:
        return None
    words = [word for word in command_kind(job.argv) if not _NO_MATTER.fullmatch(word)]
    return (*words, arch, *machine)


def _arch_of_file(job: Job) -> str | None:
    """Return the trunk of the first checkpoint on the command line, if it is there by now."""
    for word in job.argv[1:]:
        if word.endswith(".safetensors"):
            arch = header.about(Path(word)).get("arch")
            return arch if isinstance(arch, str) else None
    return None


def _share_made(runs: Path, job: Job) -> float:
    """Return the share of its steps that a pretraining has made, by its own progress file.

    Other verbs have several parts, and their progress is of one of them: 0.
    """
    note = read_progress(runs / job.name) if job.verb == "pretrain" else None
    if note is None or not note["total"]:
        return 0.0
    return min(1.0, note["done"] / note["total"])


def spent_seconds(status: Status) -> float:
    """Return the seconds of all attempts; of one that goes on, until now."""
    spent = 0.0
    for attempt in status["attempts"]:
        end = attempt.get("end")
        if end is None:
            end = time.time() if status["state"] == "running" else attempt["start"]
        spent += end - attempt["start"]
    return spent
