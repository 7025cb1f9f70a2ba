"""Runs Slurm's client commands (sinfo, squeue, scancel, scontrol) and returns what they say as
values. squeue, not sacct: a cluster need not have slurmdbd. What squeue no longer lists (minutes
after a job's end, MinJobAge) is forgotten, so whoever acts records it (`slurm.catch_up`)."""

import math
import os
import re
import subprocess
from collections.abc import Sequence
from typing import Literal, NamedTuple

from backbench.errors import BadInput, Failed

SCANCEL_AT_ONCE = 500  # ids in one command line


def slurm(*command: str, timeout_s: float = 30.0) -> str:
    """Run a Slurm client command, return its output; Failed with its words where it fails."""
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except FileNotFoundError:
        missing = "Slurm is not installed on this machine; use --cluster local"
        raise BadInput(f"no '{command[0]}' here: {missing}") from None
    except subprocess.TimeoutExpired:
        raise Failed(
            f"{command[0]}: no answer in {timeout_s:.0f} s; is slurmctld up?"
        ) from None
    except subprocess.CalledProcessError as error:
        words = " ".join((error.stderr or error.stdout or "").split())
        raise Failed(
            f"{command[0]}: {words[:300] or f'exit {error.returncode}'}"
        ) from error
    return ran.stdout


class Queued(NamedTuple):
    """A job in Slurm's queue."""

    state: str  # RUNNING, PENDING, CANCELLED, ...
    reason: str  # why it is pending: Dependency, Resources, ...
    uid: str  # its comment: the submission that it belongs to


def queue() -> dict[str, Queued]:
    """Return Slurm job id (12 or 12_3) -> how it stands, also of jobs that ended minutes ago."""
    # One line per element of an array (-r), of all states (-t all): number, state, reason, comment
    user = str(os.getuid())
    lines = slurm(
        "squeue", "-h", "-r", "-t", "all", "-u", user, "-o", "%i|%T|%r|%k"
    ).splitlines()
    out = {}
    for line in lines:
        fields = line.strip().split("|", 3)
        if len(fields) == 4:
            out[fields[0]] = Queued(*fields[1:])
    return out


def limits() -> tuple[int, int] | None:
    """Ask Slurm how many jobs one array may have, and how many its memory holds, of all users and
    those that ended minutes ago among them; None where it does not say."""
    try:
        answer = slurm("scontrol", "show", "config")
    except (BadInput, Failed):
        return None
    said = dict(
        re.findall(r"^(MaxArraySize|MaxJobCount)\s*=\s*(\d+)", answer, re.MULTILINE)
    )
    if len(said) != 2:
        return None
    return int(said["MaxArraySize"]) - 1, int(said["MaxJobCount"])


def own_number() -> str:
    """Return this process's job number, 12_3 in an array. The last job of an array has SLURM_JOB_ID
    12, by which Slurm means all its jobs: a requeue of that would stop its neighbours."""
    array, place = (
        os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK")
    )
    return f"{array}_{place}" if array and place else os.environ["SLURM_JOB_ID"]


def own_standing() -> Literal["running", "preempted", "ending"] | None:
    """Ask Slurm how this job stands: preempted, it was given a grace, after which it is killed; it
    may also end by going back to the queue. None where this node has no scontrol or answer."""
    try:
        answer = slurm("scontrol", "show", "job", own_number())
    except (BadInput, Failed):
        return None
    if not re.search(r"JobState=RUNNING\b", answer):
        return "ending"
    since = re.search(r"PreemptTime=(\S+)", answer)
    return "preempted" if since and since[1] not in ("None", "Unknown") else "running"


def requeue_this() -> bool:
    """Send this job back to the queue, under its number; False where that cannot be done from here."""
    try:
        slurm("scontrol", "requeue", own_number(), timeout_s=60.0)
    except (BadInput, Failed) as error:
        # From inside the job its requeue ends scontrol as well, perhaps before this process
        cause = error.__cause__
        return isinstance(cause, subprocess.CalledProcessError) and cause.returncode < 0
    return True


def end(ids: Sequence[str]) -> None:
    """Cancel jobs (12 or 12_3), those given first first."""
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
    """List every node once per partition that it is in."""
    # partition, time limit, CPUs, memory in MB, generic resources, features
    lines = slurm("sinfo", "-h", "-N", "-o", "%P|%l|%c|%m|%G|%f").splitlines()
    out = []
    for line in lines:
        name, limit, cpus, memory, gres, words = line.strip().split("|")
        # gres: "gpu:a100:4(S:0-1),gpu:2"; counts of other resources are passed over
        gpus = sum(
            int(count) for count in re.findall(r"gpu(?::[^:,()\s]+)?:(\d+)", gres)
        )
        sizes = (gpus, _count(cpus), _count(memory))
        features = frozenset(words.split(",")) - {"(null)"}
        # sinfo marks the default partition with a star
        node = Node(
            name.rstrip("*"), name.endswith("*"), _slurm_time(limit), sizes, features
        )
        out.append(node)
    return out


def _count(text: str) -> int:
    """Read 64, `64+` (nodes of one line differ) and 1.50K as a number; anything else is 0."""
    match = re.match(r"(\d+(?:\.\d+)?)(K?)", text)
    return round(float(match[1]) * (1024 if match[2] else 1)) if match else 0


def _slurm_time(text: str) -> float:
    """Read D-HH:MM:SS, HH:MM:SS or MM:SS as seconds; anything else is infinite."""
    if not re.fullmatch(r"[\d:-]+", text):
        return math.inf
    days, _, clock = text.rpartition("-")
    value = 0  # the clock's fields, from the left, in base 60
    for part in clock.split(":"):
        value = value * 60 + int(part)
    return int(days or 0) * 86400 + value
