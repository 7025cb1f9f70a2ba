"""Finds out how every job stands, and shows it, without writing anything.

There are three witnesses: what is on record in RUNS/.launch, Slurm's queue, and locks held by live
processes of this machine. `Snapshot._by_rules` says which of them counts when. `slurm.catch_up`
takes a snapshot and writes down what Slurm will forget.
"""

import dataclasses
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backbench.errors import BadInput, Failed
from backbench.launch.job import Job, finished
from backbench.launch.records import Ledger, Record, Status, Submission
from backbench.launch.slurm_client import Queued, queue
from backbench.runs.run_progress import read_progress, seconds

StateName = Literal[
    "done",
    "running",
    "queued",
    "waiting",
    "blocked",
    "failed",
    "cancelled",
    "stopped",
    "lost",
]
ACTIVE: tuple[StateName, ...] = ("running", "queued", "waiting")
UNSUCCESSFUL: tuple[StateName, ...] = ("failed", "blocked", "cancelled", "lost")

# Slurm's states of jobs that have not begun, and of those that have begun and not ended
_PENDING = {
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESIZING",
    "SUSPENDED",
}
_RUNNING = {"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED"}
# Slurm's state of a job that ended without a word of its own -> State.cause
_CAUSES = {
    "OUT_OF_MEMORY": "out of memory",
    "TIMEOUT": "out of time",
    "DEADLINE": "out of time",
    "NODE_FAIL": "node failed",
    "BOOT_FAIL": "node failed",
}

MOST_ROWS = 40  # that `status_text` shows of one state
MOST_KINDS = 20
SILENT_S = 30.0  # without news of a run, which writes its progress once a second


@dataclass(frozen=True)
class State:
    """How a job stands: `waiting` for another job, say, or `blocked` by one that failed."""

    name: StateName
    detail: str = ""
    # Why a job is lost: not submitted, never started, killed, out of memory, out of time, node
    # failed, failed, forgotten
    cause: str = ""


class Snapshot:
    """Everything known about RUNS at one moment: records, statuses, the queue, each job's state."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.records = ledger.records()
        self.statuses = ledger.statuses()
        self.queue: dict[str, Queued] = {}
        self.trouble = ""  # why Slurm was asked and did not answer
        # Submissions that have no numbers on record, with the numbers that the queue shows
        self.unnumbered: list[Submission] = []
        self.pool = ledger.pool()
        # 1. Slurm is asked only where an array has a job that has not written down its end. Where
        #    all is over, a look is fast, and needs no Slurm.
        open_arrays: dict[str, Submission] = {}  # by uid
        for name, record in self.records.items():
            is_over = self.status(name)["state"] in ("done", "failed", "cancelled")
            if record.submission.kind == "slurm" and not is_over:
                open_arrays[record.submission.uid] = record.submission
        if open_arrays:
            try:
                self.queue = queue()
            except (Failed, BadInput) as error:
                self.trouble = str(error)
        # 2. The arrays whose launcher died before it knew their numbers
        for submission in open_arrays.values():
            if not submission.ids:
                self._recognise(submission)
        # 3. The state of every job
        self.states: dict[str, State] = {}
        try:
            for name in self.records:
                self._state(name)
        except RecursionError:
            raise BadInput(
                f"{ledger.root}/submissions: hundreds of jobs, each before the one that it needs,"
                " which no grid writes; remove that record"
            ) from None

    def active_ids(self) -> dict[str, str]:
        """Return job name -> Slurm's number, of the jobs that are on Slurm now."""
        out = {}
        for name, record in self.records.items():
            if record.id and self.states[name].name in ACTIVE:
                out[name] = record.id
        return out

    def on_slurm(self, record: Record) -> bool:
        """Say if the queue has this number with our comment; other clusters count from 1, too."""
        queued = self.queue.get(record.id or "")
        return queued is not None and queued.uid == record.submission.uid

    def status(self, name: str) -> Status:
        return self.statuses.get(name, {"name": name, "state": "new", "attempts": []})

    def _recognise(self, submission: Submission) -> None:
        """Number, in memory, an array whose launcher died before it knew the numbers.

        Slurm shows the submission's uid as the comment of every job. `slurm.adopt` writes the
        numbers down.
        """
        mine = []
        for number, queued in self.queue.items():
            if queued.uid == submission.uid:
                mine.append(number)
        if not mine:
            return
        if len(submission.jobs) == 1:
            ids = mine[:1]  # submitit submits a single job as itself, not as an array
        else:
            # By position, as some jobs may have ended and left the queue already
            array = mine[0].split("_")[0]
            ids = [f"{array}_{i}" for i in range(len(submission.jobs))]
        numbered = dataclasses.replace(submission, ids=tuple(ids))
        self.unnumbered.append(numbered)
        for job, number in zip(submission.jobs, ids):
            # Unless the job was submitted again since
            if self.records[job.name].submission is submission:
                self.records[job.name] = Record(job, numbered, number)

    def _state(self, name: str) -> State:
        """Return the state of one job; those that it needs are looked at first, each once."""
        if name not in self.states:
            # No grid writes a circle of needs, but one must not hang this.
            self.states[name] = State("waiting")
            state = self._by_rules(self.records[name])
            if state.name == "running" and not state.detail:
                state = State("running", _progress(self.ledger.runs / name))
            self.states[name] = state
        return self.states[name]

    def _by_rules(self, record: Record) -> State:
        """Return a job's state, by the first rule that applies, in order of weight."""
        job = record.job
        is_slurms = record.submission.kind == "slurm"
        status = self.status(job.name)
        was = status["state"]
        reason = status.get("reason") or ""
        # Submitted again with a clean slate, and not begun since
        if was == "queued" and status.get("forgiven", 0) == len(status["attempts"]):
            was = "new"
        # 1. What the job itself wrote as its good end is so, whatever the queue still shows.
        if was == "done":
            return State("done")
        # 2. Slurm knows what has not ended. It counts before the other endings, as a job that
        #    somebody requeued by hand still has the status of its former life.
        on_slurm = self._state_on_slurm(record, was)
        if on_slurm is not None:
            return on_slurm
        # 3. The job's own bad endings. A mark is a cancellation that the job has not noticed yet.
        if was == "failed":
            return State("failed", reason)
        if was == "cancelled" or self.ledger.cancelled(job):
            return State("cancelled")
        # 4. A job of this machine lives while its lock is held; otherwise a status "running" is a
        #    dead process's. What a living pool has on its list and has not started is queued.
        if not is_slurms:
            if was == "running" and self.ledger.running(job):
                return State("running")
            if self.pool and record.submission.uid.startswith(self.pool):
                if job.needs or job.after:
                    return State("waiting", self._waits_for(job))
                return State("queued")
        # 5. Nobody is at work on it. Its files may be there all the same (it was killed after the
        #    last write, or they were made by hand): they count more than the jobs it needs.
        if finished(job, self.ledger.runs):
            return State("done")
        blocked = self._blocked(job)
        if blocked is not None:
            return blocked
        # 6. It began, and ended in good order (saved, to be continued), or without a word.
        if was in ("stopped", "queued"):
            return State("stopped", "started, not there any more")
        if was != "new":
            return State("lost", "started, not there any more", "killed")
        # 7. It is lost before its process could write a word.
        if not is_slurms:
            return State("lost", "its launcher ended first", "never started")
        if record.id is None:
            return State(
                "lost", "sbatch was not done with it, or failed", "not submitted"
            )
        if self.ledger.wrapper_line(record) is None:
            return State(
                "lost", "Slurm knows it no longer and it wrote nothing", "forgotten"
            )
        return State("lost", "", "never started")

    def _state_on_slurm(self, record: Record, was: str) -> State | None:
        """Return what Slurm's queue says; None where it adds nothing to the other rules."""
        has_ended = was in ("failed", "cancelled")
        queued = self.queue.get(record.id or "")
        # 1. The queue has not this job.
        if queued is None or not self.on_slurm(record):
            if record.submission.kind != "slurm" or not self.trouble or has_ended:
                return None
            # Slurm did not answer: the last known state is better than taking the job for lost.
            return State(
                "running" if was == "running" else "queued", "squeue does not answer"
            )
        # 2. It has not ended.
        if queued.state in _PENDING:
            if "Dependency" in queued.reason:
                return State("waiting", self._waits_for(record.job))
            return State("queued", queued.reason)
        if has_ended:  # its last process is on the way out
            return None
        if queued.state in _RUNNING:
            return State("running")
        # 3. It has ended. Somebody cancelled it, or Slurm did, because what it needs has failed.
        if queued.state == "CANCELLED":
            return self._blocked(record.job) or State("cancelled")
        # A job that saved its state in good order, and whose node could not requeue it, goes on
        # when it is submitted again.
        if queued.state == "COMPLETED" or was in ("stopped", "queued"):
            return None
        cause = _CAUSES.get(queued.state, "failed")
        if was == "new":
            cause = "never started"
        return State("lost", f"Slurm says {queued.state.lower()}", cause)

    def _waits_for(self, job: Job) -> str:
        """Name the first job that it waits for, and say how many more there are."""
        names = []
        for name in (*job.needs, *job.after):
            if name in self.records and self._state(name).name in ACTIVE:
                names.append(name)
        if not names:
            return ""
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"for {names[0]}{more}"

    def root_cause(self, name: str) -> str:
        """Return the job at the root of why this one is blocked: it failed by itself."""
        while self.states[name].name == "blocked":
            needs = [n for n in self.records[name].job.needs if n in self.records]
            name = next(n for n in needs if self.states[n].name in UNSUCCESSFUL)
        return name

    def _blocked(self, job: Job) -> State | None:
        for name in job.needs:
            if name in self.records and self._state(name).name in UNSUCCESSFUL:
                return State("blocked", f"{name} {self._state(name).name}")
        return None


def _progress(run: Path) -> str:
    """Show RUN/progress.json, if the run wrote one."""
    note = read_progress(run)
    if note is None:
        return ""
    text = f"{note['what']} {note['done']}/{note['total']} {note['unit']}s"
    if note["eta_s"] is not None and note["done"] < note["total"]:
        silent_s = time.time() - note["time"]
        left_s = note["eta_s"] - silent_s
        # Where the time is up by its last note, it is late, or its part of the run is over.
        if left_s >= 1:
            text += f", ETA {seconds(left_s)}"
        elif silent_s > SILENT_S:
            text += f", no news for {seconds(silent_s)}"
    return text


def counted(counts: Counter[str]) -> list[str]:
    return [f"{count} {name}" for name, count in sorted(counts.items())]


def status_text(snapshot: Snapshot, width: int = 160) -> str:
    """Show the counts, every running and failed job, and one line per kind of the rest."""
    order = (
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
    jobs: dict[str, list[str]] = {name: [] for name in order}
    for job, state in snapshot.states.items():
        jobs[state.name].append(job)
    counts = [f"{len(those)} {name}" for name, those in jobs.items() if those]
    lines = [
        "  ".join(counts) or f"{snapshot.ledger.runs}: no jobs were submitted here"
    ]
    if snapshot.trouble:
        lines.append(f"! {snapshot.trouble}")
    # 1. Job by job, what people look for
    for name in ("running", "failed", "lost", "cancelled"):
        for job in jobs[name][:MOST_ROWS]:
            word = f"{name:9}"
            if cause := snapshot.states[job].cause:
                word += f" {cause + ':':15}"
            lines.append(f"{word} {job}  {_detail(snapshot, job)}"[:width])
        if len(jobs[name]) > MOST_ROWS:
            lines.append(f"{name:9} ... and {len(jobs[name]) - MOST_ROWS} more")
    # 2. What is blocked, by the job that failed
    roots = Counter(snapshot.root_cause(job) for job in jobs["blocked"])
    for root, count in roots.most_common(MOST_ROWS):
        lines.append(
            f"blocked   {count} behind {root}  {snapshot.states[root].name}"[:width]
        )
    # 3. The rest, by kind
    for name in ("waiting", "queued", "stopped"):
        kinds = Counter(snapshot.records[job].job.like for job in jobs[name])
        for like, count in kinds.most_common(MOST_KINDS):
            lines.append(f"{name:9} {count} x {like}")
    return "\n".join(lines)


def _detail(snapshot: Snapshot, name: str) -> str:
    """Return the state's detail, and the log's last line where that says more."""
    state = snapshot.states[name]
    if state.name not in ("failed", "lost"):
        return state.detail
    record = snapshot.records[name]
    last = snapshot.ledger.last_line(record.job)
    if last is None and state.name == "lost":
        # Its command never ran: what Slurm's script said
        last = snapshot.ledger.wrapper_line(record)
    if not last or last in state.detail:
        return state.detail
    return f"{state.detail} | {last}" if state.detail else last
