"""`backbench launch`: the jobs of a grid that are missing, on Slurm (through submitit) or on this machine.

RUNS/.launch holds one record per submission, written before anything is submitted and completed after, and one status
per job, written by the job. A launcher that dies leaves both; the next one reads them, asks squeue, and goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from backbench import config
from backbench.errors import EXIT_FAILED, EXIT_PREEMPTED, BadInput, Failed, nearest
from backbench.launch.attempt import Attempt, Pool, Store, last_line
from backbench.launch.grid import Grid, Job, expand, finished, read_grid
from backbench.runs import atomic
from backbench.runs.folder import PROGRESS_FILE, log, seconds
from backbench.runs.state import StopFlag
from backbench.tasks import VERBS

# --- clusters ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one job asks for, per node where it can differ. `cpus` are per task, `hours` the time limit."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus: int = 0
    nodes: int = 1
    tasks_per_node: int = (
        1  # more than one: Slurm starts every rank; one: the verb starts its own processes
    )
    cpus: int = 1
    memory_gb: float | None = None
    hours: float | None = None
    accelerator: Literal["cpu", "cuda"] | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if min(self.nodes, self.tasks_per_node, self.cpus) < 1 or self.gpus < 0:
            raise ValueError("nodes, tasks_per_node and cpus must be at least 1, gpus at least 0")
        if self.nodes > 1 and self.tasks_per_node != max(1, self.gpus):
            raise ValueError(
                f"several nodes need one task per GPU: tasks_per_node {max(1, self.gpus)}"
            )
        if self.hours is not None and not self.hours > 0:
            raise ValueError(f"hours must be more than 0, not {self.hours}")

    @property
    def devices(self) -> int:
        return self.tasks_per_node if self.tasks_per_node > 1 else max(1, self.gpus)

    def options(self, verb: str) -> tuple[str, ...]:
        """How the verb is told what it has been given."""
        if verb in ("import", "export"):
            return ()
        if verb == "detect":
            return ("--num-gpus", str(self.devices)) if self.devices > 1 else ()
        out: list[str] = []
        for flag, value, usual in (("--devices", self.devices, 1), ("--nodes", self.nodes, 1)):
            out += [flag, str(value)] if value != usual else []
        out += ["--accelerator", self.accelerator] if self.accelerator else []
        out += ["--workers", str(self.workers)] if self.workers is not None else []
        return tuple(out)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """configs/clusters/*.yaml. `resources` has a row `default` and rows by verb, each over the default."""

    name: str
    kind: Literal["slurm", "local", "debug"]
    jobs: int = 2  # at a time: of each array on Slurm, in all on this machine
    max_array: int = 1000
    signal_s: int = 120  # how long before the end of its time a job is told to save
    command: str | None = (
        None  # what stands before the verb, as `apptainer exec --nv X.sif python -m backbench`
    )
    setup: tuple[str, ...] = ()  # shell lines before the job
    env: dict[str, str] = field(default_factory=dict)
    gpus: int = 0  # of this machine, for kind local
    sbatch: dict[str, Any] = field(default_factory=dict)  # further sbatch options, as they are
    resources: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    _known: dict[tuple[str, str], Resources] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.jobs < 1 or self.max_array < 1:
            raise ValueError("jobs and max_array must be at least 1")
        object.__setattr__(self, "_known", {})

    def asks(self, job: Job) -> Resources:
        """The resources of one job: the cluster's defaults, its row for the verb, then the grid's own."""
        key = (job.verb, json.dumps(job.resources, sort_keys=True))
        if key not in self._known:
            row = config.merge(self.resources.get("default", {}), self.resources.get(job.verb, {}))
            where = f"{self.file}: resources of {job.like}"
            self._known[key] = config.build(
                Resources, config.merge(row, job.resources), where=where
            )
        return self._known[key]


# Options of sbatch that come from `resources`, or by which jobs are found and brought back
OURS = {
    *(
        "account",
        "array",
        "comment",
        "constraint",
        "cpus-per-task",
        "dependency",
        "error",
        "gpus-per-node",
        "job-name",
    ),
    *(
        "kill-on-invalid-dep",
        "mem",
        "nodes",
        "ntasks-per-node",
        "open-mode",
        "output",
        "partition",
        "qos",
        "requeue",
    ),
    *("signal", "time"),
}
BUSY = "{}: another launcher is submitting; wait for it"
ROWS = ("default", "pretrain", "import", "export", *VERBS)


def read_cluster(name: str | Path, overrides: Sequence[str] = ()) -> Cluster:
    """A cluster by path or by name; two files that claim one name are refused, for job numbers would be mixed up."""
    path = config.find_recipe(name, "clusters")
    data = {"name": path.stem, **config.apply_overrides(config.read_recipe(path), overrides)}
    cluster = config.build(Cluster, {**data, "file": str(path)}, where=str(path))
    for row, values in cluster.resources.items():
        if row not in ROWS:
            raise BadInput(f"{path}: unknown key 'resources.{row}'; {nearest(row, ROWS)}")
        config.build(Resources, values or {}, where=f"{path}: resources.{row}")
    if taken := sorted(OURS & {key.replace("_", "-") for key in cluster.sbatch}):
        raise BadInput(
            f"{path}: 'sbatch.{taken[0]}' is set by the launcher itself, from `resources` or for its own use"
        )
    for other in sorted((config.configs_dir() / "clusters").glob("*.yaml")):
        if other.resolve() != path.resolve():
            known = config.read_recipe(other).get("name", other.stem)
            if known == cluster.name:
                raise BadInput(
                    f"two clusters are called '{cluster.name}': {path} and {other}; give one another `name:`"
                )
    return cluster


@dataclass(frozen=True)
class Node:
    partition: str
    default: bool
    limit_s: float
    cpus: int
    memory_mb: int
    gpus: int
    features: frozenset[str]


def slurm(*command: str, timeout_s: float = 30.0) -> str:
    """The output of one Slurm client command; Failed with its own words when it does not answer."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except FileNotFoundError:
        raise BadInput(
            f"no '{command[0]}' here: Slurm is not installed on this machine; use --cluster local"
        ) from None
    except subprocess.TimeoutExpired:
        raise Failed(
            f"{command[0]} did not answer within {timeout_s:.0f} s; is slurmctld up?"
        ) from None
    except subprocess.CalledProcessError as error:
        said = " ".join((error.stderr or error.stdout or "").split())
        raise Failed(f"{command[0]}: {said[:300] or f'exit {error.returncode}'}") from None
    return done.stdout


def slurm_nodes() -> list[Node]:
    nodes = []
    for line in slurm("sinfo", "-h", "-N", "-o", "%P|%l|%c|%m|%G|%f").splitlines():
        name, limit, cpus, memory, gres, features = line.strip().split("|")
        gpus = sum(int(n) for n in re.findall(r"gpu(?::[^:,()\s]+)?:(\d+)", gres))
        found = frozenset(f for f in features.split(",") if f != "(null)")
        cores, megabytes = (int(re.sub(r"\D", "", n) or 0) for n in (cpus, memory))
        nodes.append(
            Node(
                name.rstrip("*"),
                name.endswith("*"),
                _slurm_time(limit),
                cores,
                megabytes,
                gpus,
                found,
            )
        )
    return nodes


def _slurm_time(text: str) -> float:
    """D-HH:MM:SS, HH:MM:SS or MM:SS in seconds; infinite for the rest."""
    if not re.fullmatch(r"[\d:-]+", text):
        return math.inf
    days, _, clock = text.rpartition("-")
    value = 0
    for part in clock.split(":"):
        value = value * 60 + int(part)
    return int(days or 0) * 86400 + value


def check_resources(cluster: Cluster, jobs: Iterable[Job]) -> None:
    """Refuse what could never start: BadInput that names the job, what it asks for and what there is."""
    wanted: dict[Resources, str] = {}
    for job in jobs:
        wanted.setdefault(cluster.asks(job), job.like)
    if cluster.kind != "slurm":
        for asked, like in wanted.items():
            if asked.nodes > 1:
                raise BadInput(
                    f"{cluster.file}: {like} asks for {asked.nodes} nodes; '{cluster.name}' is one machine"
                )
            if cluster.gpus and asked.gpus > cluster.gpus:
                raise BadInput(
                    f"{cluster.file}: {like} asks for {asked.gpus} GPUs; this machine has {cluster.gpus}"
                )
        return
    nodes = slurm_nodes()
    for asked, like in wanted.items():
        where = f"{cluster.file}: {like}"
        if asked.hours is None:
            raise BadInput(f"{where} has no `hours`; write them down in resources.default")
        names = {n.partition for n in nodes}
        if asked.partition is not None and asked.partition not in names:
            raise BadInput(
                f"{where} asks for partition '{asked.partition}'; {nearest(asked.partition, names)}"
            )
        rows = [
            n
            for n in nodes
            if (n.default if asked.partition is None else n.partition == asked.partition)
        ]
        if not rows:
            raise BadInput(
                f"{where} names no partition and Slurm has no default; allowed: {', '.join(sorted(names))}"
            )
        name = rows[0].partition
        needs = (
            ("gpus", asked.gpus, max(n.gpus for n in rows)),
            ("cpus x tasks_per_node", asked.cpus * asked.tasks_per_node, max(n.cpus for n in rows)),
            ("memory_gb", asked.memory_gb or 0, max(n.memory_mb for n in rows) / 1024),
            ("hours", asked.hours, max(n.limit_s for n in rows) / 3600),
            ("nodes", asked.nodes, len(rows)),
        )
        for what, number, most in needs:
            if number > most:
                raise BadInput(
                    f"{where} asks for {what} {number:g}; partition '{name}' has at most {most:g}"
                )
        features = frozenset[str]().union(*(n.features for n in rows))
        if (
            asked.constraint
            and re.fullmatch(r"\w+", asked.constraint)
            and asked.constraint not in features
        ):
            offered = (
                nearest(asked.constraint, features) if features else "its nodes have no features"
            )
            raise BadInput(
                f"{where} asks for constraint '{asked.constraint}' in partition '{name}'; {offered}"
            )
        together = [
            n
            for n in rows
            if n.gpus >= asked.gpus
            and n.cpus >= asked.cpus * asked.tasks_per_node
            and n.memory_mb >= (asked.memory_gb or 0) * 1024
            and (
                not asked.constraint
                or not re.fullmatch(r"\w+", asked.constraint)
                or asked.constraint in n.features
            )
        ]
        if len(together) < asked.nodes:
            raise BadInput(
                f"{where}: no {asked.nodes} node(s) of partition '{name}' have all that it asks for at once"
            )


# --- what was submitted ------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Submission:
    """One array (or one pool's list). Written with empty `ids` before sbatch, again with them after it."""

    uid: str
    grid: str
    cluster: str  # file of the cluster
    cluster_overrides: tuple[str, ...]
    kind: str
    time: float
    jobs: list[Job]
    ids: list[str] = field(default_factory=list)  # Slurm's, one per job

    @staticmethod
    def read(path: Path) -> Submission | None:
        try:
            data = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            return None
        data["jobs"] = [Job.from_json(j) for j in data["jobs"]]
        data["cluster_overrides"] = tuple(data["cluster_overrides"])
        return Submission(**data)

    def write(self, store: Store) -> None:
        """One line of JSON: with thousands of jobs, indenting would cost more than all the rest."""
        text = json.dumps(dataclasses.asdict(self))
        atomic.write_text(store.root / "submissions" / f"{self.uid}.json", text + "\n")


@dataclass
class Record:
    """A job as it was submitted last."""

    job: Job
    submission: Submission
    id: str | None


def read_records(store: Store) -> dict[str, Record]:
    """Job name -> its latest submission."""
    found = [Submission.read(p) for p in (store.root / "submissions").glob("*.json")]
    out: dict[str, Record] = {}
    for submission in sorted((s for s in found if s is not None), key=lambda s: s.time):
        for i, job in enumerate(submission.jobs):
            out[job.name] = Record(job, submission, submission.ids[i] if submission.ids else None)
    return out


@dataclass(frozen=True)
class State:
    """done | running | queued | waiting (for another job) | blocked | failed | cancelled | stopped | lost"""

    name: str
    detail: str = ""


ACTIVE = ("running", "queued", "waiting")
_PENDING = (
    "PENDING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "CONFIGURING",
    "RESIZING",
    "SUSPENDED",
)
_RUNNING = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED")


def queue() -> dict[str, tuple[str, str, str]]:
    """Slurm job id (12 or 12_3) -> (state, reason, our submission's uid); jobs that ended minutes ago are still there.

    squeue, not sacct: a cluster need not have slurmdbd.
    """
    out = {}
    for line in slurm(
        "squeue", "-h", "-r", "-t", "all", "-u", str(os.getuid()), "-o", "%i|%T|%r|%k"
    ).splitlines():
        fields = line.strip().split("|", 3)
        if len(fields) == 4:
            out[fields[0]] = (fields[1], fields[2], fields[3])
    return out


class View:
    """Everything known about RUNS at one moment: records, statuses, the queue."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.records = read_records(store)
        self.statuses = store.statuses()
        self.trouble = ""
        self.queue: dict[str, tuple[str, str, str]] = {}
        open_ones = {r.submission.uid for r in self.records.values() if self._is_open(r)}
        on_slurm = [r.submission for r in self.records.values() if r.submission.uid in open_ones]
        if any(s.kind == "slurm" for s in on_slurm):
            try:
                self.queue = queue()
            except (Failed, BadInput) as error:
                self.trouble = str(error)
            self._adopt(open_ones)
        self.pool = _held(store.root / "pool.lock")
        self._states: dict[str, State] = {}

    def _is_open(self, record: Record) -> bool:
        return self.statuses.get(record.job.name, {}).get("state") not in (
            "done",
            "failed",
            "cancelled",
        )

    def _adopt(self, open_ones: set[str]) -> None:
        """Arrays that reached Slurm although their launcher died before it could write down the numbers."""
        unnumbered = {
            r.submission.uid: r.submission
            for r in self.records.values()
            if r.submission.kind == "slurm"
        }
        for uid, submission in unnumbered.items():
            if submission.ids or uid not in open_ones:
                continue
            mine = [job_id for job_id, (_, _, comment) in self.queue.items() if comment == uid]
            if len(submission.jobs) == 1:
                submission.ids = mine[:1]
            elif mine:
                array = mine[0].split("_")[0]
                submission.ids = [f"{array}_{i}" for i in range(len(submission.jobs))]
            if submission.ids:
                _complete_pickles(self.store, submission)
                submission.write(self.store)
                for record in self.records.values():
                    if record.submission is submission:
                        record.id = submission.ids[submission.jobs.index(record.job)]

    def state(self, name: str) -> State:
        if name not in self._states:
            self._states[name] = State("waiting")  # a circle cannot be, but must not hang
            self._states[name] = self._state(self.records[name])
        return self._states[name]

    def _state(self, record: Record) -> State:
        job, status = record.job, self.statuses.get(record.job.name, {})
        was, reason = status.get("state"), status.get("reason") or ""
        if was == "done":
            return State("done")
        in_queue = self.queue.get(record.id or "")
        if in_queue is not None and in_queue[2] == record.submission.uid:
            slurm_state, why, _ = in_queue
            if slurm_state in _PENDING:
                return (
                    State("waiting", self._waits_for(job))
                    if "Dependency" in why
                    else State("queued", why)
                )
            if slurm_state in _RUNNING and was not in ("failed", "cancelled"):
                return State("running", _eta(self.store, job))
            if was not in ("failed", "cancelled"):
                blocked = self._blocked(job)
                if slurm_state == "CANCELLED":
                    return blocked or State("cancelled")
                if slurm_state != "COMPLETED":
                    return State("lost", f"Slurm says {slurm_state.lower()}")
        elif (
            record.submission.kind == "slurm"
            and self.trouble
            and was not in ("failed", "cancelled")
        ):
            return State("running" if was == "running" else "queued", "squeue does not answer")
        if was == "failed":
            return State("failed", reason)
        if was == "cancelled" or self.store.cancelled(job):
            return State("cancelled")
        if record.submission.kind != "slurm":
            if was == "running" and self.store.running(job):
                return State("running", _eta(self.store, job))
            if self.pool and record.submission.uid.startswith(self.pool):
                return (
                    State("waiting", self._waits_for(job))
                    if job.needs or job.after
                    else State("queued")
                )
        if finished(job, self.store.runs):
            return State("done")
        blocked = self._blocked(job)
        if blocked is not None:
            return blocked
        return State(
            "stopped" if was in ("stopped", "queued") else "lost",
            "started, not there any more" if was else "",
        )

    def _waits_for(self, job: Job) -> str:
        names = [
            n
            for n in (*job.needs, *job.after)
            if n in self.records and self.state(n).name in ACTIVE
        ]
        return (
            f"for {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            if names
            else ""
        )

    def _blocked(self, job: Job) -> State | None:
        for name in job.needs:
            if name in self.records and self.state(name).name in (
                "failed",
                "blocked",
                "cancelled",
                "lost",
            ):
                return State("blocked", f"{name} {self.state(name).name}")
        return None

    def settle(self) -> None:
        """Write down what Slurm forgets after minutes: that a job was cancelled."""
        for name, record in self.records.items():
            status = self.statuses.get(name, {"name": name, "attempts": []})
            if self.state(name).name == "cancelled" and status.get("state") != "cancelled":
                self.store.write_status(
                    record.job, {**status, "state": "cancelled", "reason": None}
                )


def _held(path: Path) -> str | None:
    """What the process that holds this lock wrote into it; None when nobody does."""
    if not path.exists():
        return None
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.seek(0)
            return handle.read().strip() or "?"
    return None


@contextlib.contextmanager
def _hold(path: Path, text: str, refusal: str) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(refusal) from None
        handle.truncate(0)
        handle.write(text)
        handle.flush()
        yield


def _eta(store: Store, job: Job) -> str:
    """What RUN/progress.json says, if the run wrote one."""
    try:
        state = json.loads((store.runs / job.name / PROGRESS_FILE).read_text())
        left = state["eta_s"]
        ends = (
            ""
            if left is None
            else f", ETA {seconds(max(0.0, left - (time.time() - state['time'])))}"
        )
        return f"{state['what']} {state['done']}/{state['total']} {state['unit']}s{ends}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


# --- Slurm -------------------------------------------------------------------------------------------------------


@dataclass
class SlurmTask(Attempt):
    """One task of a Slurm job, run by submitit. Task 0 keeps the status; the others only run their rank.

    Slurm's signal before the end of time, or at preemption, reaches submitit, which calls `checkpoint` and requeues.
    A plain `scontrol requeue` or a lost node starts the job anew without a word: it then continues from its own files.
    """

    tasks: int = 1

    watches_clock: ClassVar[bool] = False  # Slurm does

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rank = 0

    def __call__(self) -> str:
        import submitit

        environment = submitit.JobEnvironment()
        self.place = f"slurm:{environment.job_id}"
        self._rank = environment.global_rank if self.tasks > 1 else 0
        signal.signal(signal.SIGTERM, lambda *_: self.ask_to_stop("stopped", signal.SIGTERM))
        if self.tasks > 1:
            self._meet()
        if self._rank:
            signal.signal(signal.SIGUSR2, lambda *_: self.ask_to_stop("preempted"))
            return self._follow()
        outcome = self.run()
        if (
            outcome == "stopped"
        ):  # preempted: USR2 follows, and `checkpoint` requeues; or cancelled: SIGKILL does
            time.sleep(
                3
            )  # no longer: after a node failure Slurm starts the job anew within seconds
        elif outcome == "again":
            # Nothing is left to save; and where a job lingers beyond its requeue, Slurm drains the node.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            subprocess.run(["scontrol", "requeue", environment.job_id], check=True, timeout=60)
            time.sleep(60)  # Slurm ends this process
        if outcome != "done":
            raise Failed(f"{self.job.name}: {outcome}: {self.store.status(self.job).get('reason')}")
        return outcome

    def checkpoint(self) -> Any:
        """Called by submitit at the signal: save, then be requeued, unless the job has failed for good."""
        import submitit

        # Slurm looks at the clock once a minute, so its signal may come that much too early.
        timed_out = (
            self.limit_s is not None
            and time.time() > self._begun() + self.limit_s - self.grace_s - 60
        )
        outcome = self.finish_now("time limit" if timed_out else "preempted")
        if outcome in ("failed", "cancelled"):
            return None
        return submitit.helpers.DelayedSubmission(self)  # done too: Slurm must see the job end well

    def _begun(self) -> float:
        attempts = self._status.get("attempts", [])
        return attempts[-1]["start"] if attempts else time.time()

    @property
    def _log(self) -> Path:
        return self.store.log(self.job, self._rank)

    def _folder(self) -> Path:
        """Where the tasks of this start of this job meet."""
        start = f"{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        return self.store.root / "meet" / f"{self.job.key}-{start}"

    def _meet(self) -> None:
        """Agree on a free port of task 0's node; a requeued job finds one anew."""
        file = self._folder() / "address.json"
        if self._rank == 0:
            alone = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) == 1
            with socket.socket() as probe:
                probe.bind(("", 0))
                address = {
                    "host": "127.0.0.1" if alone else socket.gethostname(),
                    "port": probe.getsockname()[1],
                }
            atomic.write_json(file, address)
        else:
            end = time.monotonic() + 120
            while not file.exists():
                if time.monotonic() > end:
                    raise Failed(f"rank {self._rank}: task 0 did not come up within 120 s")
                time.sleep(0.1)
            address = json.loads(file.read_text())
        self.env |= {"MASTER_ADDR": str(address["host"]), "MASTER_PORT": str(address["port"])}

    def _environment(self) -> dict[str, str]:
        if self.tasks == 1:
            return super()._environment()
        return {
            **super()._environment(),
            **{k: v for k, v in os.environ.items() if k.startswith("SLURM")},
        }

    def _follow(self) -> str:
        self._start_child()
        code = self._wait()
        how, reason = ("", None) if code in (0, EXIT_PREEMPTED) else self._meaning(code)
        if how in ("failed", "bad input"):
            what = {"how": how, "reason": f"rank {self._rank}: {reason}"}
            atomic.write_json(self._folder() / f"failed-{self._rank}", what)
        return f"rank {self._rank}: exit {code}"

    def _sibling_failure(self) -> tuple[str, str] | None:
        if self.tasks == 1 or self._rank:
            return None
        for file in self._folder().glob("failed-*"):
            what = json.loads(file.read_text())
            return what["how"], what["reason"]
        return None


def _attempt(cls: type[Attempt], job: Job, cluster: Cluster, store: Store, **more: Any) -> Any:
    asked = cluster.asks(job)
    return cls(
        job=job,
        runs=str(store.runs),
        command=tuple(shlex.split(cluster.command)) if cluster.command else (),
        machine=asked.options(job.verb),
        env=dict(cluster.env),
        gpus=asked.gpus,
        limit_s=asked.hours * 3600 if asked.hours else None,
        grace_s=_grace(cluster, asked),
        **more,
    )


def _grace(cluster: Cluster, asked: Resources) -> float:
    """Seconds between the signal and the end: the cluster's, but at most half of a short job's time."""
    return min(float(cluster.signal_s), asked.hours * 1800 if asked.hours else math.inf)


def arrays(
    cluster: Cluster, jobs: Sequence[Job]
) -> Iterator[tuple[list[Job], tuple[str, ...], tuple[int, ...]]]:
    """Jobs that may go to Slurm as one array: (jobs, names they need, numbers of earlier arrays they come after).

    One array has one set of resources and dependencies; `needs` stay exact, `after` is widened to whole arrays.
    """
    names = {job.name for job in jobs}
    level: dict[str, int] = {}
    for job in jobs:  # needs and after come earlier in the list
        before = [level[n] for n in (*job.needs, *job.after) if n in level]
        level[job.name] = 1 + max(before, default=-1)
    number_of: dict[str, int] = {}
    number = 0
    for depth in range(max(level.values(), default=-1) + 1):
        groups: dict[Any, list[Job]] = defaultdict(list)
        for job in jobs:
            if level[job.name] == depth:
                after = tuple(sorted({number_of[n] for n in job.after if n in names}))
                groups[cluster.asks(job), tuple(sorted(job.needs)), after].append(job)
        for (_, needs, after), members in groups.items():
            for start in range(0, len(members), cluster.max_array):
                part = members[start : start + cluster.max_array]
                number_of.update({job.name: number for job in part})
                number += 1
                yield part, needs, after


def submit_slurm(
    store: Store,
    cluster: Cluster,
    jobs: Sequence[Job],
    view: View,
    *,
    grid: str,
    overrides: Sequence[str],
) -> int:
    """Submit the jobs as arrays; returns how many arrays. Each is on record before Slurm hears of it."""
    ids: dict[str, str] = {
        n: r.id for n, r in view.records.items() if r.id and view.state(n).name in ACTIVE
    }
    array_ids: list[str] = []
    here: dict[str, Job] = {}
    for job in jobs:  # needs come earlier in the list
        elsewhere = [n for n in job.needs if n not in ids and n not in here]
        if elsewhere:
            log.info(
                f"left out: {job.name} waits for {elsewhere[0]}, which is not on this Slurm; run this again later"
            )
        else:
            here[job.name] = job
    for part, needs, after in arrays(cluster, list(here.values())):
        submission = Submission(
            uid=uuid.uuid4().hex[:12],
            grid=grid,
            cluster=cluster.file,
            cluster_overrides=tuple(overrides),
            kind="slurm",
            time=time.time(),
            jobs=part,
        )
        submission.write(store)
        wait_for = [f"afterok:{ids[n]}" for n in needs if n in ids]
        wait_for += [f"afterany:{array_ids[n]}" for n in after]
        submission.ids = _sbatch(store, cluster, submission, ",".join(wait_for))
        submission.write(store)
        ids.update(zip((job.name for job in part), submission.ids))
        array_ids.append(submission.ids[0].split("_")[0])
    return len(array_ids)


def _sbatch(store: Store, cluster: Cluster, submission: Submission, dependency: str) -> list[str]:
    import submitit

    asked = cluster.asks(submission.jobs[0])
    # A folder per submission: another cluster would number its jobs from 1 again and find this one's results.
    executor = submitit.SlurmExecutor(
        store.root / "submitit" / submission.uid, max_num_timeout=1_000_000
    )
    parameters: dict[str, Any] = {
        "job_name": f"backbench-{submission.grid}",
        "comment": submission.uid,
        "nodes": asked.nodes,
        "ntasks_per_node": asked.tasks_per_node,
        "cpus_per_task": asked.cpus,
        "srun_args": [
            f"--cpus-per-task={asked.cpus}"
        ],  # from Slurm 22.05 on, srun no longer takes over sbatch's
        "gpus_per_node": asked.gpus or None,
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "constraint": asked.constraint,
        "mem": f"{math.ceil(asked.memory_gb * 1024)}M" if asked.memory_gb else None,
        "time": math.ceil(asked.hours * 60) if asked.hours else None,
        "signal_delay_s": int(_grace(cluster, asked)),
        "array_parallelism": cluster.jobs,
        "setup": list(cluster.setup) or None,
        "dependency": dependency or None,
        "stderr_to_stdout": True,
        "additional_parameters": {"requeue": True, "kill-on-invalid-dep": "yes", **cluster.sbatch},
    }
    executor.update_parameters(**{k: v for k, v in parameters.items() if v is not None})
    try:
        jobs = executor.submit_array(_tasks(store, cluster, submission))
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        (store.root / "submissions" / f"{submission.uid}.json").unlink(missing_ok=True)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise Failed(
            f"sbatch refused {submission.jobs[0].like}: {lines[-1] if lines else error}"
        ) from None
    return [job.job_id for job in jobs]


def _tasks(store: Store, cluster: Cluster, submission: Submission) -> list[SlurmTask]:
    out = []
    for job in submission.jobs:
        asked = cluster.asks(job)
        out.append(
            _attempt(SlurmTask, job, cluster, store, tasks=asked.nodes * asked.tasks_per_node)
        )
    return out


def _complete_pickles(store: Store, submission: Submission) -> None:
    """Give the jobs of an array whose launcher died during sbatch the files that submitit writes after it."""
    import submitit

    cluster = read_cluster(submission.cluster, submission.cluster_overrides)
    folder = store.root / "submitit" / submission.uid
    for job_id, task in zip(submission.ids, _tasks(store, cluster, submission)):
        path = submitit.core.utils.JobPaths(folder, job_id=job_id).submitted_pickle
        if not path.exists():
            delayed = submitit.helpers.DelayedSubmission(task)
            delayed.set_timeout(math.ceil((task.limit_s or 300) / 60), 1_000_000)
            with atomic.atomic_path(path) as temporary:
                delayed.dump(temporary)


# --- the actions -------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """The verb `launch`."""
    actions = {"run": run_grid, "status": show_status, "retry": retry, "cancel": cancel}
    return actions[args.action](args)


@dataclass
class Plan:
    """What a grid comes to: the jobs to submit, and the others with how they stand."""

    new: list[Job]
    known: dict[str, State]
    waiting: list[str]


def make_plan(grid: Grid, view: View, *, where: str, data: Path | None, watching: bool) -> Plan:
    claimed = {cell: name for name, record in view.records.items() for cell in record.job.cells}
    expansion = expand(
        grid, view.store.runs, where=where, data=data, claimed=claimed, watching=watching
    )
    known: dict[str, State] = {name: view.state(name) for name in expansion.packed}
    new = []
    again = (
        "cancelled",
        "stopped",
        "lost",
        "blocked",
    )  # blocked ones stay out below while what they need has failed
    for job in expansion.jobs:
        if job.name in view.records:
            state = view.state(job.name)
            done = state.name == "done" and finished(job, view.store.runs)
            if done or state.name not in (*again, "done"):
                known[job.name] = state
                continue
        elif finished(job, view.store.runs):
            known[job.name] = State("done")
            continue
        new.append(job)
    new += [view.records[n].job for n in expansion.packed if known[n].name in again]
    for job in new:
        known.pop(job.name, None)
    return Plan(_without_done(_possible(new, known, view), known, view), known, expansion.waiting)


def _possible(new: list[Job], known: dict[str, State], view: View) -> list[Job]:
    """Leave out what needs a job that failed; its state says so."""
    out: list[Job] = []
    for job in new:
        for name in job.needs:
            state = known.get(name) or (view.state(name) if name in view.records else None)
            if (
                name not in {j.name for j in out}
                and state is not None
                and state.name in ("failed", "blocked")
            ):
                known[job.name] = State("blocked", f"{name} {state.name}")
                break
        else:
            out.append(job)
    return out


def _without_done(new: list[Job], known: Mapping[str, State], view: View) -> list[Job]:
    """Dependencies that are over need no mention."""
    names = {job.name for job in new}

    def pending(name: str) -> bool:
        state = known.get(name) or (view.state(name) if name in view.records else None)
        return name in names or (state is not None and state.name in ACTIVE)

    return [
        dataclasses.replace(
            job,
            needs=tuple(filter(pending, job.needs)),
            after=tuple(n for n in job.after if n in names),
        )
        for job in new
    ]


def run_grid(args: argparse.Namespace) -> int:
    mine = [text.removeprefix("cluster.") for text in args.overrides if text.startswith("cluster.")]
    grid = read_grid(
        args.grid, [text for text in args.overrides if not text.startswith("cluster.")]
    )
    cluster = read_cluster(args.cluster, mine)
    where = f"grid {args.grid}"
    store = Store(args.out)
    if args.dry_run:
        view = View(store)
        plan = make_plan(grid, view, where=where, data=args.data, watching=True)
        check_resources(cluster, plan.new)
        _print_plan(plan, cluster, view)
        return 0
    if cluster.kind == "slurm":
        seen: set[str] = (
            set()
        )  # by this watcher: what was cancelled or lost since is not its to submit again

        def look() -> None:
            with _hold(store.root / "launcher.lock", "", BUSY.format(store.runs)):
                view = View(store)
                view.settle()
                plan = make_plan(grid, view, where=where, data=args.data, watching=args.watch)
                plan.new = [job for job in plan.new if job.name not in seen]
                check_resources(cluster, plan.new)
                _start_over(store, plan.new)
                count = submit_slurm(store, cluster, plan.new, view, grid=grid.name, overrides=mine)
                seen.update(name for name, record in View(store).records.items() if record.id)
            _say(plan, f"submitted in {count} arrays")

        look()
        if not args.watch:
            return 0
        with StopFlag() as stop:
            while True:
                print(status_text(View(store)))
                if _sleep(stop, args.interval):
                    log.info("stopped watching; the jobs go on")
                    return 0
                try:
                    look()
                except (
                    Failed,
                    BadInput,
                ) as error:  # Slurm does not answer, another launcher submits
                    log.warning("%s; looking again in %.0f s", error, args.interval)

    def missing() -> list[Job]:
        view = View(store)
        plan = make_plan(grid, view, where=where, data=args.data, watching=args.watch)
        check_resources(cluster, plan.new)
        said = (
            f"to run, {cluster.jobs} at a time" if cluster.kind == "local" else "to run, one by one"
        )
        if plan.new or not args.watch:
            _say(plan, said)
        return plan.new

    interval = args.interval if args.watch else None
    return _run_here(store, cluster, missing, grid=grid.name, overrides=mine, interval=interval)


def _sleep(stop: StopFlag, interval: float) -> bool:
    end = time.monotonic() + interval
    while time.monotonic() < end and not stop.requested:
        time.sleep(0.1)
    return bool(stop.requested)


def _start_over(store: Store, jobs: Iterable[Job]) -> None:
    for job in jobs:
        store.forgive(job)


def _run_here(
    store: Store,
    cluster: Cluster,
    find: Callable[[], list[Job]],
    *,
    grid: str,
    overrides: Sequence[str],
    interval: float | None = None,
) -> int:
    """kind local: N processes at a time; kind debug: one job after the other, its output on the terminal.

    `find` gives the jobs to run; with an `interval` it is asked again and again, and only a signal ends this.
    """
    number = uuid.uuid4().hex[:12]
    refusal = (
        f"{store.runs}: another launcher is running jobs here; wait for it or choose another --out"
    )
    with _hold(store.root / "pool.lock", number, refusal), StopFlag() as stop:
        pool = Pool(store.runs, at_once=cluster.jobs, gpus=cluster.gpus)
        view = View(store)
        for name, record in view.records.items():  # of a launcher that was killed
            if (
                record.submission.kind == "local"
                and view.statuses.get(name, {}).get("state") == "running"
            ):
                job = dataclasses.replace(record.job, needs=(), after=())
                pool.adopt(_attempt(Attempt, job, cluster, store))
        looked = -math.inf
        looks = 0
        while True:
            if looks == 0 or (interval is not None and time.monotonic() - looked > interval):
                looked = time.monotonic()
                jobs = [job for job in find() if job.name not in pool.outcomes]
                if jobs:
                    Submission(
                        uid=f"{number}-{looks}",
                        grid=grid,
                        cluster=cluster.file,
                        cluster_overrides=tuple(overrides),
                        kind=cluster.kind,
                        time=time.time(),
                        jobs=jobs,
                    ).write(store)
                looks += 1
                for job in jobs:
                    store.forgive(job)
                if cluster.kind == "debug":
                    return _debug(store, cluster, jobs)
                for job in jobs:
                    pool.add(_attempt(Attempt, job, cluster, store))
            pool.step()
            if stop.requested:
                pool.stop()
                log.info(
                    f"stopped by {stop.requested}: running jobs have saved; the same command continues"
                )
                return EXIT_PREEMPTED
            if not pool.busy and interval is None:
                break
            time.sleep(0.05)
        counts = Counter(pool.outcomes.values())
        log.info(", ".join(f"{n} {what}" for what, n in sorted(counts.items())) or "nothing to do")
        return EXIT_FAILED if set(counts) - {"done"} else 0


def _debug(store: Store, cluster: Cluster, jobs: Sequence[Job]) -> int:
    for job in jobs:
        log.info(f"start  {job.name}")
        outcome = _attempt(Attempt, job, cluster, store, show=True).run()
        if outcome != "done":
            raise Failed(f"{job.name}: {outcome}: {store.status(job).get('reason')}")
    return 0


def _say(plan: Plan, what: str) -> None:
    counts = Counter(state.name for state in plan.known.values())
    rest = "".join(f", {n} {name}" for name, n in sorted(counts.items()))
    log.info(f"{len(plan.new)} jobs {what if plan.new else 'missing'}{rest}")
    if counts["failed"]:
        log.info("`backbench launch retry` starts the failed ones again")
    for path in plan.waiting:
        log.info(
            f"waiting for {path}: no {path}/backbone.safetensors yet; run this again when it is there, or --watch"
        )


def estimates(view: View) -> dict[str, float]:
    """`like` (and verb) -> median seconds of the finished jobs of that kind, per checkpoint."""
    took: dict[str, list[float]] = defaultdict(list)
    for name, status in view.statuses.items():
        if status.get("state") == "done" and name in view.records:
            job = view.records[name].job
            spent = (
                sum((a.get("end") or a["start"]) - a["start"] for a in status["attempts"])
                / job.expects
            )
            took[job.like].append(spent)
            took[f"verb {job.verb}"].append(spent)
    return {like: statistics.median(values) for like, values in took.items()}


def _print_plan(plan: Plan, cluster: Cluster, view: View) -> None:
    known = estimates(view)
    gpu_hours = hours = 0.0
    guessed: Counter[str] = Counter()
    lines = []
    for number, (members, needs, after) in enumerate(arrays(cluster, plan.new)):
        asked = cluster.asks(members[0])
        place = (
            f"{asked.nodes} node(s) x {asked.gpus} GPUs, {asked.cpus * asked.tasks_per_node} CPUs"
        )
        waits = "".join(f", after {n}" for n in [*needs, *(f"array {n}" for n in after)])
        lines.append(
            f"array {number}: {len(members)} jobs on {asked.partition or cluster.name}, {place}{waits}"
        )
        for job in members:
            cost = known.get(job.like, known.get(f"verb {job.verb}"))
            if cost is None:
                guessed[job.like] += 1
            else:
                hours += cost * job.expects / 3600
                gpu_hours += cost * job.expects / 3600 * asked.gpus * asked.nodes
            lines.append(f"  {job.name}  {'?' if cost is None else seconds(cost * job.expects)}")
    counts = Counter(state.name for state in plan.known.values())
    for name, state in plan.known.items():
        lines.append(f"skipped ({state.name}): {name}")
    for path in plan.waiting:
        lines.append(f"waiting for a checkpoint: {path}")
    unknown = (
        f"; {guessed.total()} jobs of {len(guessed)} kinds never ran here, so they are not counted"
        if guessed
        else ""
    )
    lines.append(
        f"{len(plan.new)} jobs, {counts['done']} skipped as done, {sum(counts.values()) - counts['done']} others"
    )
    lines.append(
        f"estimated from past runs: {gpu_hours:.2f} GPU-hours, {hours:.2f} job-hours{unknown}"
    )
    atomic.write_text(view.store.root / "plan.txt", "\n".join(lines) + "\n")
    sys.stdout.write("\n".join(lines) + "\n")


# --- status, retry, cancel ---------------------------------------------------------------------------------------


def status_text(view: View, width: int = 160) -> str:
    """Counts, every running and failed job, and one line per kind of the rest."""
    states = {name: view.state(name) for name in view.records}
    counts = Counter(s.name for s in states.values())
    shown = (
        "running",
        "failed",
        "blocked",
        "lost",
        "cancelled",
        "stopped",
        "waiting",
        "queued",
        "done",
    )
    lines = [
        "  ".join(f"{counts[name]} {name}" for name in shown if counts[name])
        or "no jobs were submitted here"
    ]
    if view.trouble:
        lines.append(f"! {view.trouble}")
    for name in ("running", "failed", "blocked", "lost", "cancelled"):
        rows = [(job, s) for job, s in states.items() if s.name == name]
        for job, state in rows[:40]:
            detail = state.detail
            if name in ("failed", "lost"):
                last = last_line(view.store.log(view.records[job].job)) or ""
                detail = detail if last in detail else f"{detail} | {last}" if detail else last
            lines.append(f"{name:9} {job}  {detail}"[:width])
        if len(rows) > 40:
            lines.append(f"{name:9} ... and {len(rows) - 40} more")
    for name in ("waiting", "queued", "stopped"):
        kinds = Counter(view.records[job].job.like for job, s in states.items() if s.name == name)
        lines += [f"{name:9} {n} x {like}" for like, n in kinds.most_common(20)]
    return "\n".join(lines)


def show_status(args: argparse.Namespace) -> int:
    store = Store(args.out)
    if args.json:
        view = View(store)
        view.settle()
        states = {n: dataclasses.asdict(view.state(n)) for n in view.records}
        print(json.dumps(states, indent=1))
        return 0
    live = sys.stdout.isatty() and not args.once
    with StopFlag() as stop:
        while True:
            view = View(store)
            view.settle()
            text = status_text(view, os.get_terminal_size().columns if live else 400)
            sys.stdout.write(("\x1b[H\x1b[2J" if live else "") + text + "\n")
            sys.stdout.flush()
            active = any(view.state(n).name in ACTIVE for n in view.records)
            if not live or not active or _sleep(stop, 2.0):
                return 0


def _chosen(view: View, patterns: Sequence[str]) -> list[str]:
    """Job names that match one of the patterns (part of the name); all without patterns."""
    names = [n for n in view.records if not patterns or any(p in n for p in patterns)]
    if patterns and not names:
        raise BadInput(f"no job's name holds '{patterns[0]}'; `backbench launch status` lists them")
    return names


def retry(args: argparse.Namespace) -> int:
    """Failed, blocked, cancelled and lost jobs go where they were submitted first, with a clean slate."""
    store = Store(args.out)
    again = ("failed", "blocked", "cancelled", "lost", "stopped")
    here: list[Callable[[], int]] = []
    with _hold(store.root / "launcher.lock", "", BUSY.format(store.runs)):
        view = View(store)
        chosen = [n for n in _chosen(view, args.names) if view.state(n).name in again]
        by_cluster: dict[Any, list[Job]] = defaultdict(list)
        for name in chosen:
            submission = view.records[name].submission
            by_cluster[submission.cluster, submission.cluster_overrides, submission.grid].append(
                view.records[name].job
            )
        for (file, overrides, grid), jobs in by_cluster.items():
            cluster = read_cluster(file, overrides)
            check_resources(cluster, jobs)
            left = _without_done(jobs, {}, view)
            if cluster.kind == "slurm":
                _start_over(store, jobs)
                count = submit_slurm(store, cluster, left, view, grid=grid, overrides=overrides)
                log.info(f"{len(jobs)} jobs submitted again in {count} arrays")
            else:
                here.append(
                    partial(
                        _run_here,
                        store,
                        cluster,
                        partial(list, left),
                        grid=grid,
                        overrides=overrides,
                    )
                )
    code = max((run() for run in here), default=0)
    if not chosen:
        log.info("no job failed, was lost or was cancelled")
    return code


def cancel(args: argparse.Namespace) -> int:
    """Stop jobs for good: queued ones never start, running ones are told to save and end."""
    store = Store(args.out)
    view = View(store)
    chosen = [
        n for n in _chosen(view, args.names) if view.state(n).name in (*ACTIVE, "stopped", "lost")
    ]
    ids: set[str] = set()
    for name in chosen:
        record = view.records[name]
        store.mark_cancelled(record.job, on=True)
        if record.submission.kind == "slurm" and record.id:
            ids.add(record.id)
        elif store.running(record.job):
            attempt = view.statuses[name]["attempts"][-1]
            if attempt.get("host") != socket.gethostname():
                log.warning(
                    "%s runs on %s: cancel it there, or it ends by itself",
                    name,
                    attempt.get("host"),
                )
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(attempt["pid"]), signal.SIGTERM)
    mixed = {r.id.split("_")[0] for r in view.records.values() if r.id and r.id not in ids}
    arrays_of = sorted({i.split("_")[0] if i.split("_")[0] not in mixed else i for i in ids})
    for start in range(0, len(arrays_of), 500):
        slurm("scancel", *arrays_of[start : start + 500])
    log.info(f"{len(chosen)} jobs cancelled")
    return 0
