"""RUNS/.launch: what was submitted, how each job stands, its log, and who is at work here.

    submissions/<uid>.json   one array or one pool's list; written before anything starts
    status/<key>.json        one per job that ever started, written by the job itself
    logs/<key>.log           what it printed (<key>.N.log: rank N of a job of several tasks)
    cancel/<key>             a mark: it shall not start again
    locks/<key>              held by the process that runs it
    launcher.lock pool.lock  held by whoever submits to Slurm, or runs jobs on this machine

A launcher that dies leaves all of this; the next one reads it, asks squeue, and goes on. Reading
writes nothing and creates nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NotRequired, TypedDict, cast

from backbench.errors import BadInput, Failed
from backbench.launch import stored
from backbench.launch.clusters import Cluster
from backbench.launch.job import Job
from backbench.runs import atomic
from backbench.untrusted import jsons, printable

LOOK_S = 0.5  # a look holds a lock for some microseconds: whoever wants it tries for so long

# How the last attempt left the job: what its status file says. `queued` is "again": it failed or
# was preempted and is to start anew. How the job stands *now* also depends on Slurm's queue, on
# live processes and on other jobs: that is `view.State`.
StatusName = Literal["new", "queued", "running", "done", "failed", "stopped", "cancelled"]


class AttemptNote(TypedDict, total=False):
    """One attempt, as it stands in a status file. `start` is always there; `end` None: not over."""

    start: float  # seconds since 1970
    end: float | None
    host: str
    pid: int  # of the process above the command
    place: str  # slurm:12_3, local
    gpus: int
    machine: str  # the options by which the verb was told of it
    gpu_ids: str  # CUDA_VISIBLE_DEVICES
    how: str  # of `verdict.Ending`; or killed
    reason: str | None
    at: str | None  # where the run was, by its progress file


class Status(TypedDict):
    """status/<key>.json."""

    name: str
    state: StatusName
    reason: NotRequired[str | None]
    attempts: list[AttemptNote]
    forgiven: NotRequired[int]  # so many attempts lie before the last retry and no longer count


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One array (or one pool's list). On record without `ids` before sbatch, with them after it."""

    uid: str
    grid: str
    cluster: str  # file of the cluster
    cluster_overrides: tuple[str, ...]
    kind: str
    time: float
    jobs: tuple[Job, ...]
    ids: tuple[str, ...] = ()  # Slurm's, one per job
    at_once: int | None = None  # jobs of this array at a time; None: the cluster's `jobs`


@dataclass(frozen=True)
class Target:
    """Where jobs are submitted, and for which grid: a record of them tells the next launcher."""

    cluster: Cluster
    overrides: tuple[str, ...]  # of the cluster
    grid: str  # its name

    def submission(self, uid: str, jobs: Sequence[Job]) -> Submission:
        return Submission(
            uid=uid,
            grid=self.grid,
            cluster=self.cluster.file,
            cluster_overrides=self.overrides,
            kind=self.cluster.kind,
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
        self.root = self.runs / stored.OURS

    # What was submitted

    def write_submission(self, submission: Submission) -> None:
        """One line of JSON: with thousands of jobs, indenting would cost more than all the rest."""
        data = dataclasses.asdict(submission)
        # A record of an older version stays as it was: what it does not say is not said for it
        for part, new in ((data, ("at_once",)), *((j, ("costs", "arch")) for j in data["jobs"])):
            for key in new:
                if part[key] is None:
                    del part[key]
        for job in data["jobs"]:
            if "costs" not in job:
                del job["units"]
        text = json.dumps(data)
        atomic.write_text(self._submission(submission.uid), text + "\n")

    def drop_submission(self, submission: Submission) -> None:
        """Nothing came of it: Slurm refused it."""
        self._submission(submission.uid).unlink(missing_ok=True)

    def records(self) -> dict[str, Record]:
        """Job name -> its latest submission."""
        found = []
        for path in (self.root / "submissions").glob("*.json"):
            data = _read_json(path)
            if data is None:
                stored.left_out(str(path), "no JSON that can be read")
                continue
            try:
                found.append(Submission(**stored.submission(data, path.stem)))
            except (ValueError, TypeError, KeyError) as error:
                stored.left_out(str(path), f"no submission ({printable.shown(str(error), 120)})")
        # In order of time, so that of a job's submissions the last one stays
        out: dict[str, Record] = {}
        for submission in sorted(found, key=lambda s: s.time):
            ids = submission.ids or (None,) * len(submission.jobs)
            for job, number in zip(submission.jobs, ids):
                out[job.name] = Record(job, submission, number)
        return out

    def _submission(self, uid: str) -> Path:
        return self.root / "submissions" / f"{uid}.json"

    # How a job stands

    def status(self, job: Job) -> Status:
        """State "new" for a job that never started."""
        status = _status(str(self._file("status", job, ".json")))
        if status is None:
            return {"name": job.name, "state": "new", "attempts": []}
        return status

    def statuses(self) -> dict[str, Status]:
        """Job name -> status, for every job that ever started."""
        out = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root / "status") as entries:
            for entry in entries:
                if entry.name.endswith(".json") and (status := _status(entry.path)):
                    out[status["name"]] = status
        return out

    def write_status(self, job: Job, status: Status) -> None:
        """A status that cannot be written (a full disk) must not end the job that it speaks of."""
        try:
            atomic.write_json(self._file("status", job, ".json"), status)
        except OSError as error:
            print(f"{job.name}: status not written: {error}", file=sys.stderr)

    def forgive(self, job: Job) -> None:
        """Before a retry: earlier failures no longer count, and a cancellation is over."""
        # They stay on record all the same: `forgiven` is how many of them lie behind
        self.mark_cancelled(job, on=False)
        status = self.status(job)
        if status["state"] != "new":
            status |= {"state": "queued", "reason": None, "forgiven": len(status["attempts"])}
            self.write_status(job, status)

    def cancelled(self, job: Job) -> bool:
        return self._file("cancel", job).exists()

    def mark_cancelled(self, job: Job, *, on: bool) -> None:
        file = self._file("cancel", job)
        if on:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        else:
            file.unlink(missing_ok=True)

    def log(self, job: Job, rank: int = 0) -> Path:
        return self._file("logs", job, f".{rank}.log" if rank else ".log")

    def last_line(self, job: Job, rank: int = 0) -> str | None:
        """The last line of its log that says something."""
        # A progress line ends in a carriage return; `$ ` begins the command, which is the first
        # line of every attempt.
        for line in _last_lines(self.log(job, rank)):
            if not line.startswith("$ "):
                return line[:300]
        return None

    def submitit(self, submission: Submission) -> Path:
        """submitit's files. One folder per submission: another cluster would number its jobs from 1
        again, and find this one's results."""
        return self.root / "submitit" / submission.uid

    def wrapper_line(self, record: Record) -> str | None:
        """The last line of what Slurm's script printed around the job; None where it is empty.

        srun and Slurm only repeat that something ended, so what was said before them counts more.
        """
        found = list(_last_lines(self.submitit(record.submission) / f"{record.id}_0_log.out"))
        said = [line for line in found if not line.startswith(("srun: ", "slurmstepd: "))]
        return next(iter(said or found), None)

    def _file(self, folder: str, job: Job, suffix: str = "") -> Path:
        return self.root / folder / f"{job.key}{suffix}"

    # Who is at work here

    def running(self, job: Job) -> bool:
        """Whether a live process holds the job's lock."""
        return _held(self._file("locks", job)) is not None

    def runs_it(self, pid: int, job: Job) -> bool:
        """Whether this process of this machine has the job's lock open: what a status says is not
        enough to send a signal to somebody's process."""
        files = Path(f"/proc/{pid}/fd")
        if not Path("/proc/self/fd").is_dir():  # not Linux: the lock is held, and this is its host
            return True
        with contextlib.suppress(OSError):
            lock = self._file("locks", job).stat()
            for file in files.iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile, or a socket
                    if os.path.samestat(file.stat(), lock):
                        return True
        return False

    @contextlib.contextmanager
    def alone(self, job: Job, patience_s: float = 90.0) -> Iterator[int]:
        """Hold the job's lock, given as a file descriptor.

        Two processes never run one job, also when it was requeued before its old process ended. A
        child that inherits the descriptor holds the lock for as long as it lives.
        """
        file = self._file("locks", job)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as handle:
            if not _patiently(lambda: _lock(handle, without=True), patience_s, pause_s=0.2):
                raise Failed(
                    f"{job.name}: another process has been running it for {patience_s:.0f} s"
                )
            yield handle.fileno()

    @contextlib.contextmanager
    def submitting(self) -> Iterator[None]:
        """One launcher at a time: two would submit the same jobs."""
        refusal = f"{self.runs}: another launcher is submitting; wait for it"
        with _hold(self.root / "launcher.lock", "", refusal):
            yield

    @contextlib.contextmanager
    def running_pool(self, number: str) -> Iterator[None]:
        """One pool at a time; its number is for whoever looks (`pool`)."""
        refusal = (
            f"{self.runs}: another launcher is running jobs here; wait for it or choose another"
            " --out"
        )
        with _hold(self.root / "pool.lock", number, refusal):
            yield

    def pool(self) -> str | None:
        """The number of the pool that runs jobs here: its submissions' uids begin with it."""
        return _held(self.root / "pool.lock")


def _lock(handle: IO[str], kind: int = fcntl.LOCK_EX, *, without: bool) -> bool:
    """Whether the lock was to be had; `without` is the answer for a file system without locks."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN) and without
    return True


def _held(path: Path) -> str | None:
    """What the process that holds this lock wrote into it; None when nobody does.

    Asked by a shared lock on a file opened for reading: it changes nothing, works on NFS, and two
    who look do not take each other for the holder.
    """
    try:
        with path.open() as handle:
            free = _lock(handle, fcntl.LOCK_SH, without=True)
            return None if free else handle.read().strip() or "?"
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _hold(path: Path, text: str, refusal: str) -> Iterator[None]:
    """Hold a lock and write `text` into it; BadInput where another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The lock is the truth, the text only says whose it is: a killed launcher leaves it behind
    with path.open("a+") as handle:
        if not _patiently(lambda: _lock(handle, without=False), LOOK_S, pause_s=0.02):
            raise BadInput(refusal)
        handle.truncate(0)
        handle.write(text)
        handle.flush()
        yield


def _patiently(condition: Callable[[], bool], patience_s: float, *, pause_s: float) -> bool:
    """Whether the condition came true within `patience_s`."""
    end = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
    return True


def _last_lines(path: Path) -> Iterator[str]:
    """The lines of a log that say something, the last one first; of its last 4 KiB, for logs grow
    long."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return
    for line in reversed(re.split(r"[\r\n]+", text)):
        if line.strip():
            yield line.strip()


def _status(path: str) -> Status | None:
    """A status file; None where there is none, or none that an attempt wrote, which is said."""
    data = _read_json(path)
    if data is None:
        if os.path.lexists(path):
            stored.left_out(path, "no JSON that can be read")
        return None
    try:
        return cast(Status, stored.status(data))
    except ValueError as error:
        stored.left_out(path, f"no status ({printable.shown(str(error), 120)})")
        return None


def _read_json(path: str | Path) -> dict[str, Any] | None:
    try:
        value = jsons.read(path)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
