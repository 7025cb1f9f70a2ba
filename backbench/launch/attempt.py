"""One attempt at a job: its command as a child process, with its status, its log and signals.

This is a job's life, as its status file tells it. `_begin` makes the first step of an attempt and
`_conclude` the last; between them run the child and `_meaning`, which reads its exit status.

    new, queued, stopped -> running    another attempt begins; without one where a mark says
                                       cancelled, or where the job was done all along
    running -> done                    exit 0, and the files are there
    running -> queued                  "again": preempted, out of time, or failed and worth another
                                       attempt; whoever ran it starts it anew
    running -> failed                  bad input, or `decide` says that it failed often enough
    running -> stopped                 told to save by its launcher, or by Slurm, which ends
    running -> cancelled               it ended under a mark
    failed, stopped, cancelled -> queued    `Ledger.forgive`: by `retry` or (not failed) by `run`

A killed process leaves `running` behind, with nobody at the lock; the next attempt notes that.
"""

import contextlib
import os
import pickle
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Literal, NamedTuple, Self

from backbench.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_PREEMPTED, Failed
from backbench.launch.clusters import Cluster
from backbench.launch.job import Job, finished
from backbench.launch.records import AttemptNote, Ledger, Status, StatusName
from backbench.runs.run_progress import read_progress

EXIT_STOPPED = 3  # an attempt's process: cancelled, not to be started again
PEER_LOST = re.compile(
    "gloo|nccl|connection|socket|broken pipe|timed? ?out", re.IGNORECASE
)
SAME_REASON = (
    3  # a job that fails this often for the same reason, without progress, stops
)
ANY_REASON = 6  # and so does one that fails this often without progress at all
PEER_S = 5.0  # seconds until this rank can read why another one failed
# A command that ends by one of these had no handler for it yet: nothing was lost, nothing failed
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)

Outcome = Literal["done", "failed", "again", "stopped", "cancelled"]

# How the attempt's own process (`main`) tells its outcome to the pool above it; others EXIT_PREEMPTED
EXITS = {"done": 0, "failed": EXIT_FAILED, "cancelled": EXIT_STOPPED}


class Ending(NamedTuple):
    """How an attempt ended: a code that `decide` uses, and a reason for people."""

    how: str  # done, failed, bad input, preempted, time limit, stopped, lost peer
    reason: str | None


@dataclass
class Attempt:
    """Runs a job's command as a child process, once, and writes down how it went. It can be pickled
    before it starts. A signal to this process is handed to the child, which saves and exits 75.
    `command` stands before the verb, `machine` are options for the place (--devices). After
    `grace_s` a child that has not saved is killed (earlier saves stay)."""

    job: Job
    ledger: Ledger
    command: tuple[str, ...] = ()
    machine: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    gpus: int = 0
    grace_s: float = 60.0
    tasks: int = 1  # of the same job, which work together
    place: str = "local"  # written beside the attempt: slurm:12_3, local
    show: bool = False  # the child's output to the terminal, not to the log

    def __post_init__(self) -> None:
        self._rank = 0  # of this task in its Slurm job
        self._child: subprocess.Popen[bytes] | None = None
        self._stop: tuple[str, float] | None = (
            None  # why the child was asked to stop, and when
        )
        self._sibling: Ending | None = None  # how another task of the job failed
        self._status: Status = {"name": self.job.name, "state": "new", "attempts": []}

    @classmethod
    def on(cls, cluster: Cluster, job: Job, ledger: Ledger) -> Self:
        """Make the attempt at a job as this cluster runs it."""
        resources = cluster.resources_for(job)
        return cls(
            job=job,
            ledger=ledger,
            command=tuple(shlex.split(cluster.command or "")),
            machine=resources.options(job.verb),
            env=dict(cluster.env),
            gpus=resources.gpus,
            grace_s=cluster.grace_s(resources),
            show=cluster.kind == "debug",
        )

    def run(self) -> Outcome:
        """Make the whole attempt: lock, child, status."""
        with self.ledger.alone(self.job) as lock:
            if (over := self._begin()) is not None:
                return over
            try:
                self._start_child(lock)
            except OSError as error:
                return self._conclude(Ending("failed", f"not started: {error}"))
            return self._conclude(self._meaning(self._wait()))

    def ask_to_stop(self, why: str, number: signal.Signals = signal.SIGUSR2) -> None:
        """Hand a signal to the child; it saves its state and exits 75. The first reason counts."""
        self._stop = self._stop or (why, time.monotonic())
        if self._child is not None:
            # os.kill, not Popen.send_signal, which would reap it under the hands of `_wait`
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)

    # 1. Before the child

    def _begin(self) -> Outcome | None:
        """Note the end of an attempt that was killed; begin this one, or return why there is no need."""
        status = self._status = self.ledger.status(self.job)
        attempts = status["attempts"]
        if attempts and attempts[-1].get("end") is None:
            # Its process was killed, or its node lost: it had no time to say how it ended. Its last
            # progress note is the nearest to its end
            progress = read_progress(self.ledger.runs / self.job.name)
            start = attempts[-1]["start"]
            end = max(start, progress["time"]) if progress else start
            attempts[-1] |= {
                "end": end,
                "how": "killed",
                "reason": "ended without a word",
            }
            attempts[-1]["at"] = self._position()
        if self.ledger.cancelled(self.job):
            self.ledger.write_status(self.job, {**status, "state": "cancelled"})
            return "cancelled"
        if status["state"] == "done" and finished(self.job, self.ledger.runs):
            return "done"  # requeued by Slurm although it had ended well
        note: AttemptNote = {
            "start": time.time(),
            "end": None,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "place": self.place,
            "gpus": self.gpus,
            "machine": " ".join(self.machine),
            "gpu_ids": self.env.get("CUDA_VISIBLE_DEVICES", ""),
        }
        attempts.append(note)
        self.ledger.write_status(
            self.job, {**status, "state": "running", "reason": None}
        )
        return None

    # 2. The child

    def _start_child(self, lock: int | None = None) -> None:
        prefix = self.command or (sys.executable, "-m", "backbench")
        argv = [*prefix, self.job.verb, *self.machine, *self.job.argv[1:]]
        with contextlib.ExitStack() as stack:
            out: IO[bytes] | None = None
            if not self.show:
                file = self.ledger.log(self.job, self._rank)
                file.parent.mkdir(parents=True, exist_ok=True)
                out = stack.enter_context(file.open("ab"))
                out.write(f"$ {shlex.join(argv)}\n".encode())
                out.flush()
            self._child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self._environment(),
                pass_fds=() if lock is None else (lock,),
            )
        if self._stop is not None:  # the signal came while the child was being made
            self.ask_to_stop(self._stop[0])

    def _environment(self) -> dict[str, str]:
        """Return the environment without Slurm's variables, with which processes would count as
        Slurm's tasks. SLURM_CONF stays, for Slurm's clients."""
        out = {}
        for key, value in os.environ.items():
            if key == "SLURM_CONF" or not key.startswith(
                ("SUBMITIT_", "SLURM", "PMI_")
            ):
                out[key] = value
        # The cluster's `env` last: it may set what is left out here
        return {**out, "PYTHONUNBUFFERED": "1", **self.env}

    def _wait(self) -> int:
        """Wait for the child and return its exit status, negative for a signal. It is not reaped
        (WNOWAIT), so that a signal handler cannot signal another process that got its number."""
        assert self._child is not None
        while True:
            # 1. It has ended, by itself or by what was done to it below
            info = os.waitid(
                os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
            )
            if info is not None:
                exited = info.si_code == os.CLD_EXITED
                return info.si_status if exited else -info.si_status
            # 2. It was asked, and has not ended in time
            if (
                self._stop is not None
                and time.monotonic() > self._stop[1] + self.grace_s
            ):
                self._child.kill()
            # 3. Another rank has failed: this one would wait for it in a collective, for long
            if (
                self._sibling is None
                and (sibling := self._sibling_failure()) is not None
            ):
                self._sibling = sibling
                self._child.kill()
            time.sleep(0.05)

    def _sibling_failure(self) -> Ending | None:
        """Return how another task of the same job failed; None where none did."""
        return None

    # 3. After it: what its exit status means, and what follows

    def _meaning(self, code: int) -> Ending:
        """Say how the attempt ended, by the child's exit status and by what it was asked."""
        why = self._stop[0] if self._stop else None
        # We killed it because of another rank: that one's words are the reason
        if self._sibling is not None and code not in (0, EXIT_PREEMPTED):
            return self._sibling
        # An exit status is a claim; the files are the proof
        if code == 0:
            if finished(self.job, self.ledger.runs):
                return Ending("done", None)
            made = self.job.makes or self.job.name
            return Ending(
                "failed", f"exit 0, but {made} does not hold what was to be made"
            )
        if code == EXIT_PREEMPTED:
            return Ending(why or "preempted", None)
        if code < 0:
            number = signal.Signals(-code)
            if number in _STOP_SIGNALS:
                return Ending(why or "preempted", "stopped before it could save")
            if why is not None and number == signal.SIGKILL:
                return Ending(why, f"did not save within {self.grace_s:.0f} s")
            hint = " (out of memory?)" if number == signal.SIGKILL else ""
            return Ending("failed", f"killed by {number.name}{hint}")
        last = None if self.show else self.ledger.last_line(self.job, self._rank)
        reason = last or f"exit {code}"
        if self.tasks > 1 and PEER_LOST.search(reason):
            return self._peers_words() or Ending("lost peer", reason)
        return Ending("bad input" if code == EXIT_BAD_INPUT else "failed", reason)

    def _peers_words(self) -> Ending | None:
        """Wait for the lost task's reason. None: its node is gone, and the job is not to blame."""
        end = time.monotonic() + PEER_S
        while time.monotonic() < end:
            if (sibling := self._sibling_failure()) is not None:
                return sibling
            time.sleep(0.1)
        return None

    def _conclude(self, ending: Ending) -> Outcome:
        """Decide what follows (`decide`) and write it down."""
        how, reason = ending
        status = self._status
        at = self._position()
        status["attempts"][-1] |= {
            "end": time.time(),
            "how": how,
            "reason": reason,
            "at": at,
        }
        # A retry has forgiven the attempts before it
        counted = status["attempts"][status.get("forgiven", 0) :]
        outcome, reason = decide(
            ending, counted, cancelled=self.ledger.cancelled(self.job)
        )
        state: StatusName = "queued" if outcome == "again" else outcome
        noted = self.ledger.write_status(
            self.job, {**status, "state": state, "reason": reason}
        )
        # A failure that is on no record would be tried again without end
        return (
            "failed"
            if outcome == "again" and how == "failed" and not noted
            else outcome
        )

    def _position(self) -> str | None:
        """Return where the run is, as far as its progress file tells."""
        note = read_progress(self.ledger.runs / self.job.name)
        return (
            None if note is None else f"{note['what']} {note['done']}/{note['total']}"
        )


def decide(
    ending: Ending, attempts: Sequence[AttemptNote], *, cancelled: bool
) -> tuple[Outcome, str | None]:
    """Return the outcome and its reason. `attempts` are those that count, this one last."""
    how, reason = ending
    # 1. It is over, well or by somebody's wish. A cancelled job ends like one that was stopped or
    #    preempted, so the mark is asked for before those.
    if how == "done":
        return "done", None
    if cancelled:
        return "cancelled", None
    if how == "stopped":
        return "stopped", reason
    # 2. It failed in a way that the next attempt would repeat.
    if how == "bad input":
        return "failed", reason
    # 3. It came to the same end often enough and got nowhere in between.
    verdict = _often_enough(ending, since_progress(attempts))
    if verdict is not None:
        return "failed", verdict
    # 4. Failed but not often, or with progress; a node lost; preempted however often.
    return "again", reason


def since_progress(attempts: Sequence[AttemptNote]) -> Sequence[AttemptNote]:
    """Return the last attempt that got farther than all before it, and those after it. Three kills
    in three places are accidents, three at one place are a defect of the job."""
    farthest: dict[
        str, int
    ] = {}  # of each part of the run: the most steps that were done
    first = 0
    for number, attempt in enumerate(attempts):
        place = re.fullmatch(r"(.*) (\d{1,18})/\d+", attempt.get("at") or "", re.DOTALL)
        if place is None:
            continue
        part, step = place[1], int(place[2])
        if step > farthest.get(part, 0):
            farthest[part], first = step, number
    return attempts[first:]


def _often_enough(ending: Ending, attempts: Sequence[AttemptNote]) -> str | None:
    """Say why the job ends here; None while it may try again. `attempts`: those since progress."""
    how, reason = ending
    same = [attempt for attempt in attempts if attempt.get("how") == how]
    if how == "failed":
        # Without numbers: `tried to allocate 2.1 GiB` and 2.4 GiB are one reason
        last = same[-SAME_REASON:]
        shapes = {re.sub(r"\d+", "#", attempt.get("reason") or "") for attempt in last}
        if len(same) >= SAME_REASON and len(shapes) == 1:
            return f"failed {len(same)} times for the same reason: {reason}"
        if len(same) >= ANY_REASON:
            return f"failed {len(same)} times, at last: {reason}"
    # A lost node is not the job's failure; nodes that never find each other are a wrong setting
    if how == "lost peer" and len(same) >= ANY_REASON:
        return (
            f"its tasks lost each other {len(same)} times at the same point (see"
            f" NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME): {reason}"
        )
    # Its time is too short for one step: each attempt ends where the one before it began
    if how == "time limit" and len(same) >= SAME_REASON:
        at = attempts[-1].get("at")
        return f"{len(same)} time limits ended at the same point ({at}): give it more hours"
    return None


def main() -> int:
    """Make the attempt that `JobPool` pickled to stdin: `python -m backbench.launch.attempt`.
    SIGTERM and SIGINT leave the job `stopped`; SIGUSR1 and SIGUSR2 count as preempted."""
    attempt = pickle.load(sys.stdin.buffer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: attempt.ask_to_stop("stopped", signal.SIGTERM))
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: attempt.ask_to_stop("preempted"))
    try:
        return EXITS.get(attempt.run(), EXIT_PREEMPTED)
    except Failed as error:
        print(f"backbench: {error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    raise SystemExit(main())
