"""What RUNS/.launch says, believed no further than it must be.

A folder of runs is often shared, and whoever can write there can write a record. So a record is
checked where it is read, and nothing that it says becomes a command, a set-up or an environment:
those come from a cluster's file, which is one of ours or is named on the command line.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from backbench.errors import BadInput
from backbench.launch.clusters import ROWS, Cluster, read_cluster
from backbench.launch.job import Job
from backbench.recipes import config
from backbench.runs.terminal import log
from backbench.untrusted import printable

# Keys of a cluster that decide how many and how large, never what is run
HARMLESS = ("jobs", "max_array", "signal_s", "gpus", "resources")
VERBS = tuple(row for row in ROWS if row != "default")
OURS = ".launch"  # below RUNS
LONGEST = 2000  # bytes of a job's name, which is a folder's
STATES = ("new", "queued", "running", "done", "failed", "stopped", "cancelled")


@functools.cache  # once for each: records are read again at every look
def left_out(path: str, why: str) -> None:
    log.warning(f"{printable.shown(path, 300)}: left out: {why}")


def submission(data: Mapping[str, Any], uid: str) -> dict[str, Any]:
    """The fields of a Submission, its jobs made. ValueError for what no launcher wrote."""
    if data.get("uid") != uid or not re.fullmatch(r"[\w-]{1,80}", uid):
        raise ValueError("its uid is not its file's name")
    for key in ("grid", "cluster", "kind"):
        _text(key, data.get(key))
    if data["kind"] not in ("slurm", "local", "debug"):
        raise ValueError("'kind' is none of slurm, local, debug")
    _number("time", data.get("time"))
    jobs = data.get("jobs")
    if not isinstance(jobs, list):
        raise ValueError("'jobs' is no list")
    ids = _texts("ids", data.get("ids", []))
    if len(ids) not in (0, len(jobs)) or not all(re.fullmatch(r"\d+(_\d+)?", id) for id in ids):
        raise ValueError("'ids' are not Slurm's numbers, one for each job")
    if not re.fullmatch(r"[\w.+-]*", data["grid"]):
        raise ValueError("'grid' is no grid's name")
    overrides = _texts("cluster_overrides", data.get("cluster_overrides"))
    if data.get("at_once") is not None:
        _whole("at_once", data["at_once"])
    made = tuple(map(_job, jobs))
    return {**data, "ids": ids, "cluster_overrides": overrides, "jobs": made}


def _job(data: Any) -> Job:
    if not isinstance(data, Mapping):
        raise ValueError("a job is no group of keys")
    for key in ("argv", "cells", "needs", "after"):
        _texts(key, data.get(key))
    for key in ("name", "like"):
        _text(key, data.get(key))
    _inside(data["name"])
    if data.get("makes") is not None:
        _text("makes", data["makes"])
        _inside(data["makes"])
    if not data["argv"] or data["argv"][0] not in VERBS:
        raise ValueError(f"'{data['argv'][:1]}' is no verb of a grid")
    _whole("expects", data.get("expects", 1))
    if not isinstance(data.get("resources", {}), Mapping):
        raise ValueError("'resources' is no group of keys")
    for key in ("costs", "arch"):
        if data.get(key) is not None:
            _text(key, data[key])
    _number("units", data.get("units", 1.0))
    return Job.from_json(data)


def status(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """A status file's content. ValueError for what no attempt wrote."""
    _text("name", data.get("name"))
    if data.get("state") not in STATES:
        raise ValueError(f"'state' is none of {', '.join(STATES)}")
    attempts = data.get("attempts")
    if not isinstance(attempts, list) or not all(isinstance(a, Mapping) for a in attempts):
        raise ValueError("'attempts' is no list of attempts")
    for attempt in attempts:
        _attempt(attempt)
    _said("reason", data.get("reason"))
    if data.get("forgiven") is not None:
        _whole("forgiven", data["forgiven"], least=0)
    if data.get("reason"):
        data = {**data, "reason": printable.shown(data["reason"], 1000)}
    return data


def _attempt(attempt: Mapping[str, Any]) -> None:
    _number("start", attempt.get("start"))
    if attempt.get("end") is not None:
        _number("end", attempt["end"])
    for key in ("how", "reason", "host", "at", "place", "machine", "gpu_ids"):
        _said(key, attempt.get(key))
    _whole("gpus", attempt.get("gpus", 0), least=0)
    _whole("pid", attempt.get("pid", 2), least=2)  # 0 and -1 are many processes, 1 is all of them


def _said(key: str, value: Any) -> None:
    """What a program said, or nothing: of any length and with any characters, for it is `shown`."""
    if not isinstance(value, str | None):
        raise ValueError(f"'{key}' is no text")


def _text(key: str, value: Any) -> None:
    if not isinstance(value, str) or len(value) > 4096:
        raise ValueError(f"'{key}' is no text")
    if found := printable.control_in(value):
        raise ValueError(f"'{key}' holds the control character {found}")


def _texts(key: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ValueError(f"'{key}' is no list")
    for value in values:
        _text(key, value)
    return tuple(values)


def _number(key: str, value: Any) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not -1e12 <= value <= 1e12:  # which nan is not
        raise ValueError(f"'{key}' is no number")


def _whole(key: str, value: Any, least: int = 1) -> None:
    if type(value) is not int or not least <= value < 1 << 31:
        raise ValueError(f"'{key}' is no whole number from {least} on")


def _inside(name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or path.parts[0] == OURS:
        raise ValueError(f"'{printable.shown(name, 80)}' is not below RUNS")
    if len(os.fsencode(name)) > LONGEST or max(len(os.fsencode(p)) for p in path.parts) > 255:
        raise ValueError(f"'{printable.shown(name, 80)}' is too long for a folder's name")


# --- what a record may still decide when its jobs are submitted again ---


def cluster_of(
    file: str, overrides: Sequence[str], given: Cluster | None, given_overrides: Sequence[str] = ()
) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster that jobs were submitted to, and its overrides. BadInput where only the record
    says so: then the command line has to.

    `given` is the cluster of the command line; it stands for its own file.
    """
    path = Path(file)
    named = given is not None and Path(given.file).resolve() == path.resolve()
    shipped = path.resolve().parent == (config.configs_dir() / "clusters").resolve()
    if not (named or shipped):
        raise BadInput(
            f"these jobs were submitted to the cluster {printable.shown(file, 200)}; what a record in"
            " RUNS says never becomes a command: name it, --cluster FILE"
        )
    said = {text.partition("=")[0] for text in given_overrides}
    kept = []
    for text in overrides:
        key = text.partition("=")[0]
        if key in said:
            continue
        if key.split(".")[0] not in HARMLESS:
            raise BadInput(
                f"these jobs were submitted with cluster.{printable.shown(key, 80)} changed; what a"
                " record in RUNS says never becomes a command: say it again, cluster."
                f"{printable.shown(text, 200)}"
            )
        kept.append(text)
    together = (*kept, *given_overrides)
    return read_cluster(path, together), together


def check_command(job: Job, runs: Path) -> None:
    """BadInput for a stored command that no grid's job has: it must write to the job's own folder,
    said once and plainly.

    What it may read is no more than what a grid may name. Its verb was checked when it was read;
    the words before it, the environment and the resources' names come from the cluster.
    """
    own = [runs / job.name, *([runs / job.makes] if job.makes else [])]
    again = "`backbench launch run` with its grid makes it anew"
    out = [value for word, value in zip(job.argv, job.argv[1:]) if word == "--out"]
    # argparse takes the last of several, and Detectron2's own key stands for it too
    others = [w for w in job.argv[1:] if w in ("OUTPUT_DIR", "--") or w.startswith("--out=")]
    if len(out) != 1 or others:
        said = printable.shown(others[0] if others else f"{len(out)} x --out", 80)
        raise BadInput(f"{job.name}: its stored command says where it writes by {said}; {again}")
    if Path(out[0]).resolve() not in [path.resolve() for path in own]:
        raise BadInput(
            f"{job.name}: its stored command writes to {printable.shown(out[0], 200)}, outside of its"
            f" own folder below {runs}; {again}"
        )
