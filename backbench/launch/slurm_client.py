"""Runs Slurm's client commands (sinfo, squeue, scancel, scontrol) and returns their answers as values.

squeue is asked, not sacct: a cluster need not have slurmdbd. squeue lists a job for some minutes
after its end (MinJobAge), so whoever acts records what it says (`slurm.catch_up`).
"""

import math
import os
import re
import subprocess
from collections.abc import Sequence
from typing import Literal, NamedTuple

from backbench.errors import BadInput, Failed

SCANCEL_AT_ONCE = 500  # ids in one command line


def slurm(*command: str, timeout_s: float = 30.0) -> str:
    """Run a command of Slurm's and return its output.

    Raises BadInput where Slurm is not installed, Failed, with the command's words, where it fails.
    """
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except FileNotFoundError:
        raise BadInput(
            f"no '{command[0]}' here: Slurm is not installed on this machine; use"
            " --cluster local"
        ) from None
    except subprocess.TimeoutExpired:
        raise Failed(
            f"{command[0]}: no answer in {timeout_s:.0f} s; is slurmctld up?"
        ) from None
    except subprocess.CalledProcessError as error:
        words = " ".join((error.stderr or error.stdout or "").split())[:300]
        if not words:
            words = f"exit {error.returncode}"
        raise Failed(f"{command[0]}: {words}") from error
    return ran.stdout


class Queued(NamedTuple):
    """A job in Slurm's queue."""

    state: str  # RUNNING, PENDING, CANCELLED, ...
    reason: str  # why it is pending: Dependency, Resources, ...
    uid: str  # its comment: the submission that it belongs to


def queue() -> dict[str, Queued]:
    """Return Slurm's job number (12 or 12_3) -> how it stands, also for jobs that ended recently."""
    user = str(os.getuid())
    # One line per job of an array (-r), in all states (-t all): number, state, reason, comment
    answer = slurm("squeue", "-h", "-r", "-t", "all", "-u", user, "-o", "%i|%T|%r|%k")
    out = {}
    for line in answer.splitlines():
        fields = line.strip().split("|", 3)
        if len(fields) == 4:
            out[fields[0]] = Queued(*fields[1:])
    return out


def limits() -> tuple[int, int] | None:
    """Return how many jobs one array may have, and how many Slurm holds; None for no answer.

    Slurm's limit on the jobs that it holds counts those of all users, and those that ended recently.
    """
    try:
        answer = slurm("scontrol", "show", "config")
    except (BadInput, Failed):
        return None
    said = dict(
        re.findall(r"^(MaxArraySize|MaxJobCount)\s*=\s*(\d+)", answer, re.MULTILINE)
    )
    if len(said) != 2:
        return None
    # MaxArraySize is one more than the largest index of a job in an array.
    return int(said["MaxArraySize"]) - 1, int(said["MaxJobCount"])


def standing(number: str) -> Literal["running", "preempted", "ending"] | None:
    """Ask Slurm how a job stands that runs here; None where this node has no scontrol or answer.

    A job that is "preempted" was given a grace, after which Slurm kills it. One that is "ending"
    may come back: a requeue ends it as well.
    """
    try:
        answer = slurm("scontrol", "show", "job", number)
    except (BadInput, Failed):
        return None
    if not re.search(r"JobState=RUNNING\b", answer):
        return "ending"
    since = re.search(r"PreemptTime=(\S+)", answer)
    if since is None or since[1] in ("None", "Unknown"):
        return "running"
    return "preempted"


def requeue(number: str) -> bool:
    """Send the job that this process is in back to the queue; False where that fails from here."""
    try:
        slurm("scontrol", "requeue", number, timeout_s=60.0)
    except (BadInput, Failed) as error:
        # The requeue of its own job kills scontrol as well, perhaps before it kills this process.
        cause = error.__cause__
        return isinstance(cause, subprocess.CalledProcessError) and cause.returncode < 0
    return True


def end(ids: Sequence[str]) -> None:
    """Cancel jobs (12 or 12_3), in the order given."""
    for start in range(0, len(ids), SCANCEL_AT_ONCE):
        slurm("scancel", *ids[start : start + SCANCEL_AT_ONCE])


class Node(NamedTuple):
    """A node as one partition offers it."""

    partition: str
    default: bool  # whether its partition is where jobs go that name none
    limit_s: float
    sizes: tuple[int, int, int]  # GPUs, CPUs, MB of memory
    features: frozenset[str]


def nodes() -> list[Node]:
    """List every node once for each partition that it is in."""
    # Partition, time limit, CPUs, memory in MB, generic resources, features
    answer = slurm("sinfo", "-h", "-N", "-o", "%P|%l|%c|%m|%G|%f")
    out = []
    for line in answer.splitlines():
        name, limit, cpus, memory, generic, features = line.strip().split("|")
        # Generic resources look like "gpu:a100:4(S:0-1),gpu:2"; others than GPUs are passed over.
        gpus = 0
        for count in re.findall(r"gpu(?::[^:,()\s]+)?:(\d+)", generic):
            gpus += int(count)
        node = Node(
            partition=name.rstrip("*"),
            default=name.endswith("*"),  # sinfo marks the default partition with a star
            limit_s=_slurm_time(limit),
            sizes=(gpus, _count(cpus), _count(memory)),
            features=frozenset(features.split(",")) - {"(null)"},
        )
        out.append(node)
    return out


def _count(text: str) -> int:
    """Read 64, `64+` (nodes of one line differ) and 1.50K as a number; anything else is 0."""
    match = re.match(r"(\d+(?:\.\d+)?)(K?)", text)
    if match is None:
        return 0
    return round(float(match[1]) * (1024 if match[2] else 1))


def _slurm_time(text: str) -> float:
    """Read D-HH:MM:SS, HH:MM:SS or MM:SS as seconds; anything else is infinite."""
    if not re.fullmatch(r"[\d:-]+", text):
        return math.inf
    days, _, clock = text.rpartition("-")
    value = 0  # the clock's fields, from the left, in base 60
    for part in clock.split(":"):
        value = value * 60 + int(part)
    return int(days or 0) * 86400 + value
