"""RUNS/.launch: what was submitted, how each job stands, its log, and who is at work here.

    submissions/<uid>.json   one array or one pool's list; written before anything starts
    status/<key>.json        one per job that ever started, written by the job itself
    logs/<key>.log           what it printed (<key>.N.log: rank N of a job of several tasks)
    cancel/<key>             a mark: it shall not start again
    locks/<key>              held by the process that runs it
    launcher.lock pool.lock  held by whoever submits to Slurm, or runs jobs on this machine

A launcher that dies leaves all of this; the next one reads it, asks squeue, and goes on. Reading
writes nothing. Whoever can write to RUNS can write a record, so each is parsed into the types
below, or left out with a warning. Nothing in it becomes a command, a set-up or an environment:
those come from a cluster's file (`clusters.recorded_cluster`).
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Any, Literal, NotRequired, Required, Self, TypeVar

from annotated_types import Interval
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from backbench.errors import BadInput, Failed
from backbench.launch.clusters import ROWS, Cluster, Kind
from backbench.launch.job import LARGEST, Amount, Job
from backbench.runs import atomic
from backbench.runs.terminal import log
from backbench.untrusted import jsons, printable

OURS = ".launch"  # below RUNS
LONGEST_NAME = 2000  # bytes of a job's name, which is a folder's
T = TypeVar("T")
LOOK_S = 0.5  # a look holds a lock for microseconds: whoever wants it tries for so long

# How the last attempt left the job: what its status file says. `queued` is "again": it failed or
# was preempted and is to start anew. How the job stands *now* also depends on Slurm's queue, on
# live processes and on other jobs: that is `view.State`.
StatusName = Literal[
    "new", "queued", "running", "done", "failed", "stopped", "cancelled"
]


class AttemptNote(TypedDict, total=False):
    """One attempt, as it stands in a status file. `end` None: not over."""

    start: Required[Amount]  # seconds since 1970
    end: Amount | None
    host: str
    # Of the process above the command: 0 and -1 are many processes, 1 is all of them
    pid: Annotated[int, Interval(ge=2, le=LARGEST)]
    place: str  # slurm:12_3, local
    gpus: int
    machine: str  # the options by which the verb was told of it
    gpu_ids: str  # CUDA_VISIBLE_DEVICES
    how: str  # of `attempt.Ending`; or killed
    reason: str | None
    at: str | None  # where the run was, by its progress file


class Status(TypedDict):
    """status/<key>.json."""

    name: str
    state: StatusName
    reason: NotRequired[str | None]
    attempts: list[AttemptNote]
    forgiven: NotRequired[
        int
    ]  # so many attempts lie before the last retry and no longer count


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One array (or one pool's list). On record without `ids` before sbatch, with them after it."""

    uid: str
    grid: str
    cluster: str  # file of the cluster
    cluster_overrides: tuple[str, ...]
    kind: Kind
    time: Amount
    jobs: tuple[Job, ...]
    ids: tuple[str, ...] = ()  # Slurm's, one per job

    @classmethod
    def to(cls, cluster: Cluster, grid: str, uid: str, jobs: Sequence[Job]) -> Self:
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
        # One line of JSON: with thousands of jobs, indenting would cost more than all the rest
        text = json.dumps(dataclasses.asdict(submission))
        atomic.write_text(self.submission_file(submission), text + "\n")

    def records(self) -> dict[str, Record]:
        """Return job name -> its latest submission."""
        files = (self.root / "submissions").glob("*.json")
        submissions = filter(None, (_read(path, _parse_submission) for path in files))
        # In order of time, so that of a job's submissions the last one stays
        out: dict[str, Record] = {}
        for submission in sorted(submissions, key=lambda s: s.time):
            ids = submission.ids or (None,) * len(submission.jobs)
            for job, number in zip(submission.jobs, ids):
                out[job.name] = Record(job, submission, number)
        return out

    def submission_file(self, submission: Submission) -> Path:
        return self.root / "submissions" / f"{submission.uid}.json"

    # How a job stands

    def status(self, job: Job) -> Status:
        """Return its status; state "new" for a job that never started."""
        new: Status = {"name": job.name, "state": "new", "attempts": []}
        return _read(self._file("status", job, ".json"), _parse_status) or new

    def statuses(self) -> dict[str, Status]:
        """Return job name -> status, for every job that ever started."""
        out = {}
        for path in (self.root / "status").glob("*.json"):
            status = _read(path, _parse_status)
            if status is not None:
                out[status["name"]] = status
        return out

    def write_status(self, job: Job, status: Status) -> bool:
        """Write it, or return False (a full disk), which ends no job that may yet succeed."""
        try:
            atomic.write_json(self._file("status", job, ".json"), status)
        except OSError as error:
            print(f"{job.name}: status not written: {error}", file=sys.stderr)
            return False
        return True

    def forgive(self, job: Job) -> None:
        """Before a retry: earlier failures no longer count, and a cancellation is over."""
        # They stay on record all the same: `forgiven` is how many of them lie behind
        self._file("cancel", job).unlink(missing_ok=True)
        status = self.status(job)
        if status["state"] != "new":
            status |= {
                "state": "queued",
                "reason": None,
                "forgiven": len(status["attempts"]),
            }
            self.write_status(job, status)

    def cancelled(self, job: Job) -> bool:
        return self._file("cancel", job).exists()

    def mark_cancelled(self, job: Job) -> None:
        file = self._file("cancel", job)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    def log(self, job: Job, rank: int = 0) -> Path:
        return self._file("logs", job, f".{rank}.log" if rank else ".log")

    def last_line(self, job: Job, rank: int = 0) -> str | None:
        """Return the last line of its log that says something."""
        # `$ ` begins the command, which is the first line of every attempt
        lines = _last_lines(self.log(job, rank))
        return next((line[:300] for line in lines if not line.startswith("$ ")), None)

    def submitit(self, submission: Submission) -> Path:
        """Return submitit's folder for one submission: other clusters count jobs from 1, too."""
        return self.root / "submitit" / submission.uid

    def wrapper_line(self, record: Record) -> str | None:
        """Return the last line that Slurm's script printed around the job; None where it is empty.
        srun and Slurm only repeat that something ended: what was said before counts."""
        lines = _last_lines(self.submitit(record.submission) / f"{record.id}_0_log.out")
        own = [
            line for line in lines if not line.startswith(("srun: ", "slurmstepd: "))
        ]
        return next(iter(own or lines), None)

    def _file(self, folder: str, job: Job, suffix: str = "") -> Path:
        return self.root / folder / f"{job.key}{suffix}"

    # Who is at work here

    def running(self, job: Job) -> bool:
        """Say whether a live process holds the job's lock."""
        return _holder(self._file("locks", job)) is not None

    def runs_it(self, pid: int, job: Job) -> bool:
        """Say whether this process of this machine has the job's lock open: a number in a status
        file is not enough to send a signal to somebody's process."""
        if not Path(
            "/proc/self/fd"
        ).is_dir():  # not Linux: the lock is held, and this is its host
            return True
        with contextlib.suppress(OSError):
            lock = self._file("locks", job).stat()
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(
                    FileNotFoundError
                ):  # closed meanwhile, or a socket
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
        return _hold(self._file("locks", job), refusal, patience_s, without=True)

    def submitting(self) -> contextlib.AbstractContextManager[int]:
        """Hold the lock of whoever submits: two launchers would submit the same jobs."""
        refusal = BadInput(f"{self.runs}: another launcher is submitting; wait for it")
        return _hold(self.root / "launcher.lock", refusal)

    def running_pool(self, number: str) -> contextlib.AbstractContextManager[int]:
        """Hold the lock of this machine's pool; its number is for whoever looks (`pool`)."""
        wait = "wait for it or choose another --out"
        refusal = BadInput(
            f"{self.runs}: another launcher is running jobs here; {wait}"
        )
        return _hold(self.root / "pool.lock", refusal, text=number)

    def pool(self) -> str | None:
        """Return the number of the pool that runs jobs here: its submissions' uids begin with it."""
        return _holder(self.root / "pool.lock")


def _lock(handle: IO[str], kind: int = fcntl.LOCK_EX, *, without: bool) -> bool:
    """Try the lock; `without` is the answer for a file system without locks."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN) and without
    return True


def _holder(path: Path) -> str | None:
    """Return what the process that holds this lock wrote into it; None when nobody does. A shared
    lock changes nothing, works on NFS, and two who look are not taken for holders."""
    try:
        with path.open() as handle:
            free = _lock(handle, fcntl.LOCK_SH, without=True)
            return None if free else handle.read().strip() or "?"
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _hold(
    path: Path,
    refusal: Exception,
    patience_s: float = LOOK_S,
    *,
    text: str = "",
    without: bool = False,
) -> Iterator[int]:
    """Hold a lock and write `text` into it; raises `refusal` where another process keeps it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + patience_s
    # The lock is the truth, the text only says whose it is: a killed launcher leaves it behind
    with path.open("a+") as handle:
        while not _lock(handle, without=without):
            if time.monotonic() > end:
                raise refusal
            time.sleep(min(0.2, patience_s / 25))
        handle.truncate(0)
        handle.write(text)
        handle.flush()
        yield handle.fileno()


def _last_lines(path: Path) -> list[str]:
    """Return the lines of a log that say something, the last one first, from its last 4 KiB."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    # A progress line ends in a carriage return
    return list(filter(None, map(str.strip, reversed(re.split(r"[\r\n]+", text)))))


# Parsing: what is no record of ours is named and left out


def _read(path: Path, parse: Callable[[object, Path], T]) -> T | None:
    """Read one record; None where there is none, or where no launcher or attempt wrote it."""
    try:
        return parse(jsons.read(path), path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        # pydantic's message has a line for the key and one for what is wrong there
        words = " ".join(str(error).split("\n", 3)[:3])
        _warn(str(path), printable.shown(words, 200))
        return None


@functools.cache  # once for each: records are read again at every look
def _warn(path: str, why: str) -> None:
    log.warning(f"{printable.shown(path, 300)}: left out: {why}")


@functools.cache
def _typed(cls: Any) -> Callable[[object], Any]:
    """Return pydantic's parser of a type, which is imported only where there is a record."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls).validate_python


def _parse_submission(data: object, path: Path) -> Submission:
    if control := printable.control_below(data):
        raise ValueError(f"'{control[0]}' holds the control character {control[1]}")
    submission: Submission = _typed(Submission)(data)
    if submission.uid != path.stem or not re.fullmatch(r"[\w-]{1,80}", submission.uid):
        raise ValueError("its uid is not its file's name")
    if not re.fullmatch(r"[\w.+-]*", submission.grid):
        raise ValueError("'grid' is no grid's name")
    if not all(re.fullmatch(r"\d+(_\d+)?", number) for number in submission.ids):
        raise ValueError("'ids' are not Slurm's numbers")
    if len(submission.ids) not in (0, len(submission.jobs)):
        raise ValueError("'ids' are not one for each job")
    for job in submission.jobs:
        if not job.argv or job.verb not in ROWS[1:]:
            raise ValueError(f"'{job.argv[:1]}' is no verb of a grid")
        _check_below_runs(job.name)
        if job.makes is not None:
            _check_below_runs(job.makes)
    return submission


def _parse_status(data: object, path: Path) -> Status:
    status: Status = _typed(Status)(data)
    if status.get("reason"):
        status["reason"] = printable.shown(str(status["reason"]), 1000)
    return status


def _check_below_runs(name: str) -> None:
    """Raise ValueError for a name that is no folder below RUNS, or that is the launcher's own."""
    path = PurePosixPath(name)
    if (
        path.is_absolute()
        or ".." in path.parts
        or not path.parts
        or path.parts[0] == OURS
    ):
        raise ValueError(f"'{printable.shown(name, 80)}' is not below RUNS")
    if (
        len(os.fsencode(name)) > LONGEST_NAME
        or max(len(os.fsencode(p)) for p in path.parts) > 255
    ):
        raise ValueError(
            f"'{printable.shown(name, 80)}' is too long for a folder's name"
        )
