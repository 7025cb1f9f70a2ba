"""RUNS/.launch: what was submitted, how each job stands, its log, and who is at work here.

    submissions/<uid>.json   one array of Slurm, or one list of this machine's pool; written before
                             anything starts
    status/<key>.json        one per job that ever started, written by the job itself
    logs/<key>.log           what the job printed (<key>.N.log: rank N of a job of several tasks)
    cancel/<key>             a mark: the job shall not start again
    locks/<key>              held by the process that runs the job
    launcher.lock            held by whoever submits to Slurm
    pool.lock                held by whoever runs jobs on this machine
    submitit/<uid>/          submitit's own files of one array
    meet/<key>-<start>/      where the tasks of one job find each other (`slurm_task`)

A launcher that dies leaves all of this behind; the next one reads it, asks squeue, and goes on.
Reading writes nothing.

Whoever can write to RUNS can write a record. Each is therefore parsed into the types below, or left
out with a warning, and nothing in it becomes a command, a set-up or an environment: those come from
a cluster's file (`clusters.recorded_cluster`).
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Self,
    TypeVar,
)

from annotated_types import Interval
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from backbench.errors import BadInput, Failed
from backbench.launch import locks
from backbench.launch.job import LARGEST, Amount, Job, Kind
from backbench.runs import atomic, failures
from backbench.runs.terminal import log
from backbench.untrusted import jsons, printable

if TYPE_CHECKING:
    from backbench.launch.clusters import Cluster

OURS = ".launch"  # below RUNS
LONGEST_NAME = 2000  # bytes of a job's name, which is a folder's
T = TypeVar("T")

# How the last attempt left the job: what its status file says. `queued` means that it failed or
# was preempted and is to start again. How the job stands *now* also depends on Slurm's queue, on
# live processes and on other jobs: that is `view.State`.
StatusName = Literal[
    "new", "queued", "running", "done", "failed", "stopped", "cancelled"
]


class AttemptNote(TypedDict, total=False):
    """One attempt at a job, as it stands in a status file."""

    start: Required[Amount]  # seconds since 1970
    end: Amount | None  # None: not over, or killed
    host: str
    # The process above the command. As an argument of `kill`, 0 and -1 would mean many processes,
    # and 1 is the parent of all.
    pid: Annotated[int, Interval(ge=2, le=LARGEST)]
    place: str  # slurm:12_3, local
    gpus: int
    machine: str  # the options that told the verb of its GPUs and nodes
    gpu_ids: str  # CUDA_VISIBLE_DEVICES
    how: str  # `attempt.Ending.how`, or "killed"
    reason: str | None
    at: str | None  # where the run was, by its progress file


class Status(TypedDict):
    """These are the keys of status/<key>.json."""

    name: str
    state: StatusName
    reason: NotRequired[str | None]
    attempts: list[AttemptNote]
    # This many attempts were made before the last retry. They no longer count.
    forgiven: NotRequired[int]


def spent_seconds(status: Status) -> float:
    """Return the seconds of all attempts together; of one that goes on, until now."""
    now = time.time() if status["state"] == "running" else 0.0
    spent = 0.0
    for attempt in status["attempts"]:
        start = attempt["start"]
        end = attempt.get("end")
        if end is None:
            # 0 s where the job is not running: nobody knows how long a killed attempt took
            end = max(now, start)
        spent += end - start
    return spent


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One array of Slurm, or one list of a pool of this machine."""

    uid: str
    grid: str
    cluster: str  # file of the cluster
    cluster_overrides: tuple[str, ...]
    kind: Kind
    time: Amount
    jobs: tuple[Job, ...]
    # Slurm's numbers, one per job. The record is written without them before sbatch, and again
    # with them after it.
    ids: tuple[str, ...] = ()

    @classmethod
    def to(cls, cluster: "Cluster", grid: str, uid: str, jobs: Sequence[Job]) -> Self:
        """Make the record of jobs that are about to be submitted."""
        return cls(
            uid=uid,
            grid=grid,
            cluster=cluster.file,
            cluster_overrides=cluster.overrides,
            kind=cluster.kind,
            time=time.time(),
            jobs=tuple(jobs),
        )


@dataclass(frozen=True)
class Record:
    """A job as it was submitted last, with Slurm's number for it once that is known."""

    job: Job
    submission: Submission
    id: str | None


class Ledger:
    """The files of RUNS/.launch, by what they mean."""

    def __init__(self, runs: str | Path) -> None:
        self.runs = Path(runs).resolve()
        self.root = self.runs / OURS

    # What was submitted

    def write_submission(self, submission: Submission) -> None:
        # In one line: with thousands of jobs, indenting would take longer than all the rest.
        text = json.dumps(dataclasses.asdict(submission))
        atomic.write_text(self.submission_file(submission), text + "\n")

    def records(self) -> dict[str, Record]:
        """Return job name -> its latest submission."""
        submissions = []
        for path in (self.root / "submissions").glob("*.json"):
            submission = _read(path, _parse_submission)
            if submission is not None:
                submissions.append(submission)
        # In the order of time, so that the last of a job's submissions stays
        submissions.sort(key=lambda submission: submission.time)
        out: dict[str, Record] = {}
        for submission in submissions:
            ids = submission.ids or (None,) * len(submission.jobs)
            for job, number in zip(submission.jobs, ids):
                out[job.name] = Record(job, submission, number)
        return out

    def submission_file(self, submission: Submission) -> Path:
        return self.root / "submissions" / f"{submission.uid}.json"

    # How a job stands

    def status(self, job: Job) -> Status:
        """Return its status; state "new" for a job that never started."""
        status = _read(self._file("status", job, ".json"), _parse_status)
        if status is None:
            return {"name": job.name, "state": "new", "attempts": []}
        return status

    def statuses(self) -> dict[str, Status]:
        """Return job name -> status, for every job that ever started."""
        out = {}
        for path in (self.root / "status").glob("*.json"):
            status = _read(path, _parse_status)
            if status is not None:
                out[status["name"]] = status
        return out

    def write_status(self, job: Job, status: Status) -> bool:
        """Write it, or say on stderr why not (a full disk) and return False.

        Such an error is not raised, because it must end no job that may yet succeed.
        """
        try:
            atomic.write_json(self._file("status", job, ".json"), status)
        except OSError as error:
            print(f"{job.name}: status not written: {error}", file=sys.stderr)
            return False
        return True

    def forgive(self, job: Job) -> None:
        """Forget earlier failures and a cancellation, before a retry."""
        self._file("cancel", job).unlink(missing_ok=True)
        status = self.status(job)
        if status["state"] == "new":
            return
        # The failures stay on record: `forgiven` is how many attempts are no longer counted.
        status["state"] = "queued"
        status["reason"] = None
        status["forgiven"] = len(status["attempts"])
        self.write_status(job, status)

    def cancelled(self, job: Job) -> bool:
        return self._file("cancel", job).exists()

    def mark_cancelled(self, job: Job) -> None:
        file = self._file("cancel", job)
        failures.make_folder(file.parent)
        file.touch()

    # What a job said

    def log(self, job: Job, rank: int = 0) -> Path:
        return self._file("logs", job, f".{rank}.log" if rank else ".log")

    def last_line(self, job: Job, rank: int = 0) -> str | None:
        """Return the last line of its log that says something."""
        for line in _last_lines(self.log(job, rank)):
            # Every attempt begins with its command, behind `$ `. That is ours, not the job's.
            if not line.startswith("$ "):
                return line[:300]
        return None

    def submitit(self, submission: Submission) -> Path:
        """Return submitit's folder, one for each submission.

        submitit names its files by Slurm's numbers, and another cluster counts from 1 as well.
        """
        return self.root / "submitit" / submission.uid

    def wrapper_line(self, record: Record) -> str | None:
        """Return the last line that Slurm's script printed around the job, None for no line."""
        lines = _last_lines(self.submitit(record.submission) / f"{record.id}_0_log.out")
        for line in lines:
            # srun and slurmstepd only repeat that something ended; why stands before.
            if not line.startswith(("srun: ", "slurmstepd: ")):
                return line
        return lines[0] if lines else None

    def _file(self, folder: str, job: Job, suffix: str = "") -> Path:
        return self.root / folder / f"{job.key}{suffix}"

    # Who is at work here

    def running(self, job: Job) -> bool:
        """Say whether a live process holds the job's lock."""
        return locks.holder(self._file("locks", job)) is not None

    def runs_it(self, pid: int, job: Job) -> bool:
        """Say whether this process of this machine has the job's lock open.

        A number in a status file is not enough to send a signal to somebody's process.
        """
        if not Path("/proc/self/fd").is_dir():
            # Not Linux: the lock is held, and this is its host. There is no more to know.
            return True
        with contextlib.suppress(OSError):
            lock = self._file("locks", job).stat()
            for file in Path(f"/proc/{pid}/fd").iterdir():
                # An entry may be a socket, or closed by now
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(file.stat(), lock):
                        return True
        return False

    def alone(
        self, job: Job, patience_s: float = 90.0
    ) -> contextlib.AbstractContextManager[int]:
        """Hold the job's lock, given as a file descriptor; a child that inherits it holds it on."""
        refusal = Failed(
            f"{job.name}: another process has run it for {patience_s:.0f} s"
        )
        file = self._file("locks", job)
        return locks.hold(file, refusal, patience_s, without_locks=True)

    def submitting(self) -> contextlib.AbstractContextManager[int]:
        """Hold the lock of whoever submits: two launchers would submit the same jobs."""
        refusal = BadInput(f"{self.runs}: another launcher is submitting; wait for it")
        return self._at_work(self.root / "launcher.lock", refusal)

    def running_pool(self, number: str) -> contextlib.AbstractContextManager[int]:
        """Hold the lock of this machine's pool, with the pool's number in it."""
        refusal = BadInput(
            f"{self.runs}: another launcher is running jobs here; wait for it or choose"
            " another --out"
        )
        return self._at_work(self.root / "pool.lock", refusal, text=number)

    @contextlib.contextmanager
    def _at_work(
        self, lock: Path, refusal: Exception, *, text: str = ""
    ) -> Iterator[int]:
        """Hold a lock. If nothing was recorded meanwhile, its file and the folders made for it are removed."""
        made = [each for each in self.root.parents if not each.exists()]
        try:
            with locks.hold(lock, refusal, text=text) as number:
                try:
                    yield number
                finally:
                    if list(self.root.iterdir()) == [lock]:
                        lock.unlink()
        finally:
            # The file is closed only now. Some file systems list it until then, so folders go last
            with contextlib.suppress(OSError):  # one of them is in use by now
                for folder in (self.root, *made):
                    folder.rmdir()

    def pool(self) -> str | None:
        """Return the number of the pool that runs jobs here: its submissions' uids begin with it."""
        return locks.holder(self.root / "pool.lock")


def _last_lines(path: Path) -> list[str]:
    """Return the lines of a log that say something, the last one first, from its last 4 KiB."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = []
    for line in re.split(r"[\r\n]+", text):  # a progress line ends in a carriage return
        if line.strip():
            lines.append(line.strip())
    return lines[::-1]


# Parsing: what is no record of ours is named and left out.


def _read(path: Path, parse: Callable[[object, Path], T]) -> T | None:
    """Read one record; None where there is none, or where no launcher or attempt wrote it."""
    try:
        return parse(jsons.read(path), path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        # The first lines of pydantic's message name the key and what is wrong there.
        words = " ".join(str(error).split("\n", 3)[:3])
        _warn(str(path), printable.shown(words, 200))
        return None


@functools.cache  # Records are read again at every look; each is warned of once.
def _warn(path: str, why: str) -> None:
    log.warning(f"{printable.shown(path, 300)}: left out: {why}")


@functools.cache
def _parser_of(cls: Any) -> Callable[[object], Any]:
    """Return pydantic's parser of a type. pydantic is imported only where there is a record."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls).validate_python


def _parse_submission(data: object, path: Path) -> Submission:
    # Each attempt is a Python of its own, which reads no submission and needs no list of the tasks
    from backbench.launch.clusters import GRID_VERBS

    control = printable.control_below(data)
    if control:
        key, character = control
        raise ValueError(f"'{key}' holds the control character {character}")
    parse = _parser_of(Submission)
    submission: Submission = parse(data)
    if submission.uid != path.stem or not re.fullmatch(r"[\w-]{1,80}", submission.uid):
        raise ValueError("its uid is not its file's name")
    if not re.fullmatch(r"[\w.+-]*", submission.grid):
        raise ValueError("'grid' is no grid's name")
    if not all(re.fullmatch(r"\d+(_\d+)?", number) for number in submission.ids):
        raise ValueError("'ids' are not Slurm's numbers")
    if len(submission.ids) not in (0, len(submission.jobs)):
        raise ValueError("'ids' are not one for each job")
    for job in submission.jobs:
        if not job.argv or job.verb not in GRID_VERBS:
            raise ValueError(f"'{job.argv[:1]}' is no verb of a grid")
        _check_below_runs(job.name)
        if job.makes is not None:
            _check_below_runs(job.makes)
    return submission


def _parse_status(data: object, path: Path) -> Status:
    parse = _parser_of(Status)
    status: Status = parse(data)
    if status.get("reason"):
        status["reason"] = printable.shown(str(status["reason"]), 1000)
    return status


def _check_below_runs(name: str) -> None:
    """Raise ValueError for a name that is no folder below RUNS, or that is the launcher's own."""
    path = PurePosixPath(name)
    parts = path.parts
    shown = printable.shown(name, 80)
    if path.is_absolute() or not parts or ".." in parts or parts[0] == OURS:
        raise ValueError(f"'{shown}' is not below RUNS")
    longest_part = max(len(os.fsencode(part)) for part in parts)
    if longest_part > 255 or len(os.fsencode(name)) > LONGEST_NAME:
        raise ValueError(f"'{shown}' is too long for a folder's name")
