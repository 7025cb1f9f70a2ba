"""What a job will cost, by jobs that ended here: of the same recipe, data, trunk and machine, scaled
by its units: epochs, iterations or checkpoints. Where none did nothing is guessed, for across
recipes a guess is off by any factor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from backbench.launch.clusters import Cluster
from backbench.launch.grid import Evaluation
from backbench.launch.job import Job
from backbench.launch.records import AttemptNote, Record, Status
from backbench.launch.view import Snapshot
from backbench.recipes import config
from backbench.recipes.own_probe import OWN
from backbench.runs.run_progress import read_progress
from backbench.weights import header

# Of a pretraining's recipe, what decides how long an epoch takes. Of its method's keys, those that
# are no fractions: sizes, queues, counts; a temperature or a weight takes no time.
_DECIDE = ("arch", "stem", "precision", "batch_size", "accumulate", "views", "data", "knn_every")
# Of an evaluation's options, what does not decide it: other seeds, and the lists' folder
_DO_NOT_DECIDE = ("pretrained_on", "seeds", "lists", "pack", "resources")
# Of a detector's config, what decides the iterations and not how long one takes
_LENGTH = ("SOLVER.MAX_ITER", "SOLVER.STEPS", "SOLVER.WARMUP_ITERS", "SOLVER.BASE_LR", "SEED")
ENOUGH = 0.02  # of its steps: from there on a pretraining on the way tells how long it takes
# A detector that trains so much longer than one that was seen: of that one's time too much was
# scoring, which takes as long for both
TOO_FAR = 20.0


def pretraining_costs(recipe: Mapping[str, Any], root: str) -> str:
    """`Job.costs`, per epoch."""
    decides: dict[str, Any] = {key: recipe.get(key) for key in _DECIDE}
    # Not among the others: what was told without it, and is without it, stays known
    if recipe.get("compile"):
        decides["compile"] = recipe["compile"]
    method = recipe.get("method") or {}
    decides["method"] = {k: v for k, v in method.items() if not isinstance(v, float)}
    return config.fingerprint(["pretrain", decides, root])


def evaluation_costs(evaluation: Evaluation, root: str) -> str:
    """`Job.costs`, per unit of `evaluation_units`."""
    options = dataclasses.asdict(evaluation)
    for name in _DO_NOT_DECIDE:
        del options[name]
    if evaluation.protocol not in (None, OWN):
        options["protocol"] = _protocol(str(evaluation.protocol))
    if evaluation.config is not None:
        keys, options["args"] = _detector(evaluation.config, evaluation.args)
        options["config"] = {key: keys[key] for key in keys if key not in _LENGTH}
    return config.fingerprint([options, root])


def evaluation_units(evaluation: Evaluation) -> float:
    """Of one checkpoint: the iterations of a detector, else one. 0 where nobody can say."""
    if evaluation.config is None:
        return 1.0
    keys, _ = _detector(evaluation.config, evaluation.args)
    iterations = keys.get("SOLVER.MAX_ITER", 0)
    return float(iterations) if isinstance(iterations, int) else 0.0


def _detector(name: str, args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(a config's keys, MODEL.RPN.NMS_THRESH -> 0.7, with the overrides among the arguments of
    `detect`; the other arguments)."""
    keys = dict(_config_file(config.find_recipe(name, "detection").resolve()))
    others: list[str] = []
    words = iter(args)
    for word in words:
        if re.fullmatch(r"[A-Z][A-Z0-9_.]*", word):
            keys[word] = _plain(next(words, ""))
        else:
            others.append(word)
    return keys, others


def _plain(text: str) -> object:
    return int(text) if text.isdecimal() else text


@functools.cache
def _config_file(path: Path) -> dict[str, Any]:
    return config.read_detector(path)


@functools.cache
def _protocol(name: str) -> dict[str, Any]:
    """What it says, for a lab's own file may change under its name."""
    return dict(config.read_recipe(config.find_recipe(name, "transfer")))


class _Kind(NamedTuple):
    """Jobs of one kind take the same time for each of their units."""

    costs: str
    arch: str | None
    cluster: str  # its file
    gpus: int
    machine: str  # the options by which the verb is told of it


class Estimates:
    """Of the jobs that a snapshot knows: seconds per unit of each kind, as a median."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.runs = snapshot.ledger.runs
        # (units done, seconds for each) of every job
        found: dict[_Kind, list[tuple[float, float]]] = defaultdict(list)
        for name, status in snapshot.statuses.items():
            record = snapshot.records.get(name)
            if record is None or not status["attempts"]:
                continue
            kind = _kind_of_attempt(record, status["attempts"][-1])
            share = self._share(record.job, status)
            if kind is not None and share is not None:
                done = record.job.units * share
                found[kind].append((done, _spent(status) / done))
        self._seen = dict(found)

    def seconds(self, job: Job, cluster: Cluster) -> float | None:
        """What is left of the job will take so long on this cluster; None where nobody knows."""
        asked = cluster.asks(job)
        gpus = min(asked.gpus, cluster.gpus) if cluster.kind == "local" else asked.gpus
        options = " ".join(asked.options(job.verb))
        kind = _kind(job, cluster.file, gpus, options)
        furthest = TOO_FAR if job.verb == "detect" else math.inf
        seen = self._seen.get(kind, []) if kind is not None else []
        per_unit = [each for done, each in seen if job.units <= done * furthest]
        if not per_unit:
            return None
        made = _made(self.runs, job) or 0.0
        return statistics.median(per_unit) * job.units * (1.0 - made)

    def _share(self, job: Job, status: Status) -> float | None:
        """How much of the job its attempts have done; None where that cannot be told."""
        if status["state"] == "done":
            return 1.0
        made = _made(self.runs, job)
        return made if made is not None and made >= ENOUGH else None


def _made(runs: Path, job: Job) -> float | None:
    """The share of its steps that a pretraining has made. Other verbs have several parts, and their
    progress is of one of them."""
    note = read_progress(runs / job.name) if job.verb == "pretrain" else None
    if note is None or not note["total"]:
        return None
    return min(1.0, note["done"] / note["total"])


def _spent(status: Status) -> float:
    """Seconds of all its attempts; of one that goes on, until now."""
    spent = 0.0
    for attempt in status["attempts"]:
        end = attempt.get("end")
        if end is None:
            end = time.time() if status["state"] == "running" else attempt["start"]
        spent += end - attempt["start"]
    return spent


def _kind_of_attempt(record: Record, attempt: AttemptNote) -> _Kind | None:
    cluster = record.submission.cluster
    return _kind(record.job, cluster, attempt.get("gpus", 0), attempt.get("machine", ""))


def _kind(job: Job, cluster: str, gpus: int, machine: str) -> _Kind | None:
    if job.costs is None or job.units <= 0:
        return None
    arch = job.arch
    # Detection's trunk is named by its config; files are converted at the speed of the disk
    if arch is None and job.verb not in ("detect", "import", "export"):
        arch = _arch_of_file(job)
        if arch is None:
            return None
    return _Kind(job.costs, arch, cluster, gpus, machine)


def _arch_of_file(job: Job) -> str | None:
    """Of the first checkpoint on its command line, if it is there by now."""
    for word in job.argv[1:]:
        if word.endswith(".safetensors"):
            arch = header.about(Path(word)).get("arch")
            return arch if isinstance(arch, str) else None
    return None
