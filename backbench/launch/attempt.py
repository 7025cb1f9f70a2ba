"""One attempt at a job: its command as a child process, with its status, its log and signals.

An attempt has three parts: `_begin` writes that it has begun, the child runs, and `_conclude` writes
how it ended. In between, `_meaning` reads the child's exit status, and `decide` says what follows.

The state in a job's status file moves like this:

    new, queued, stopped -> running    another attempt begins. None begins where a mark says
                                       cancelled, or where the job turns out to be done already
    running -> done                    exit 0, and the files are there
    running -> queued                  preempted, out of time, or failed and worth another attempt:
                                       whoever ran it starts it anew
    running -> failed                  bad input, or it has failed often enough
    running -> stopped                 told to save and end, by its launcher or by Slurm
    running -> cancelled               it ended while it was marked as cancelled
    failed, stopped, cancelled -> queued    by `Ledger.forgive`, before it is submitted again

A killed process leaves `running` behind, with nobody at the lock. The next attempt notes that.
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
from typing import IO, TYPE_CHECKING, Literal, NamedTuple, Self

from backbench.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_PREEMPTED, Failed
from backbench.launch.job import Job, finished
from backbench.launch.records import AttemptNote, Ledger, Status, StatusName
from backbench.runs import failures
from backbench.runs.run_progress import read_progress

if TYPE_CHECKING:
    from backbench.launch.clusters import Cluster

# A job fails for good after so many failures since its last progress: SAME_REASON for one and the same
# reason, ANY_REASON for any.
SAME_REASON = 3
ANY_REASON = 6
# The words of a rank that fails only because another one is gone
PEER_LOST = re.compile(
    "gloo|nccl|connection|socket|broken pipe|timed? ?out", re.IGNORECASE
)
PEER_S = 5.0  # seconds until a rank can read why another one failed
# A command that ends by one of these had no handler for it yet. It had done nothing so far: nothing
# is lost, and nothing has failed.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)

# What follows from an attempt. Each is also the state that the status file is left in, but for
# "again", which is there as `queued`.
Outcome = Literal["done", "failed", "again", "stopped", "cancelled"]

# The exit status by which the attempt's own process (`main`) tells its outcome to the pool above it;
# EXIT_PREEMPTED stands for the other outcomes.
EXIT_CANCELLED = 3  # not to be started again
EXITS = {"done": 0, "failed": EXIT_FAILED, "cancelled": EXIT_CANCELLED}


class Ending(NamedTuple):
    """How an attempt ended: a word that `decide` uses, and a reason for people."""

    how: str  # done, failed, bad input, preempted, time limit, stopped, lost peer
    reason: str | None


@dataclass
class Attempt:
    """Runs a job's command as a child process, once, and writes down how it went.

    An attempt can be pickled before it starts. A signal to its process is handed to the child,
    which saves its state and exits 75.
    """

    job: Job
    ledger: Ledger
    command: tuple[str, ...] = ()  # what stands before the verb; (): this very Python
    machine: tuple[str, ...] = ()  # options that tell the verb of the place
    env: dict[str, str] = field(default_factory=dict)
    gpus: int = 0
    # A child that has not saved this long after a signal is killed. Its earlier saves stay.
    grace_s: float = 60.0
    tasks: int = 1  # of the same job, which work together
    place: str = "local"  # for the status file: slurm:12_3, local
    show: bool = False  # the child's output goes to the terminal, not to the log

    def __post_init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        """Set all that an attempt learns while it runs to what it is before."""
        self._rank = 0  # of this task in its Slurm job
        self._child: subprocess.Popen[bytes] | None = None
        # Why the child was asked to stop, and when by the monotonic clock
        self._stop: tuple[str, float] | None = None
        self._sibling: Ending | None = None  # how another task of the job failed
        self._status: Status = {"name": self.job.name, "state": "new", "attempts": []}

    @classmethod
    def on(cls, cluster: "Cluster", job: Job, ledger: Ledger) -> Self:
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
            over = self._begin()
            if over is not None:
                return over
            try:
                self._start_child(lock)
            except OSError as error:
                return self._conclude(Ending("failed", f"not started: {error}"))
            exit_status = self._wait()
            return self._conclude(self._meaning(exit_status))

    def ask_to_stop(self, why: str, number: signal.Signals = signal.SIGUSR2) -> None:
        """Hand a signal to the child; it saves its state and exits 75. The first reason counts."""
        if self._stop is None:
            self._stop = (why, time.monotonic())
        if self._child is not None:
            # Popen.send_signal would reap a child that has ended, and `_wait` is the one to do so.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)

    # 1. Before the child

    def _begin(self) -> Outcome | None:
        """Write that an attempt has begun; or return an outcome where there is no need for one."""
        self._status = self.ledger.status(self.job)
        status = self._status
        attempts = status["attempts"]
        if attempts and attempts[-1].get("end") is None:
            self._note_killed(attempts[-1])
        if self.ledger.cancelled(self.job):
            self.ledger.write_status(self.job, {**status, "state": "cancelled"})
            return "cancelled"
        if status["state"] == "done" and finished(self.job, self.ledger.runs):
            return "done"  # Slurm requeued it although it had ended well
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

    def _note_killed(self, attempt: AttemptNote) -> None:
        """Complete an attempt whose process was killed, or whose node was lost."""
        # Nobody wrote when it ended: its last note of progress is the nearest to that.
        progress = read_progress(self.ledger.runs / self.job.name)
        end = attempt["start"]
        if progress is not None:
            end = max(end, progress["time"])
        attempt["end"] = end
        attempt["how"] = "killed"
        attempt["reason"] = "ended without a word"
        attempt["at"] = self._position()

    # 2. The child

    def _start_child(self, lock: int | None = None) -> None:
        """Start the command. It inherits the job's lock, and holds it if this process is killed."""
        prefix = self.command or (sys.executable, "-m", "backbench")
        argv = [*prefix, self.job.verb, *self.machine, *self.job.argv[1:]]
        with contextlib.ExitStack() as stack:
            out: IO[bytes] | None = None  # the terminal
            if not self.show:
                file = self.ledger.log(self.job, self._rank)
                failures.make_folder(file.parent)
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
        # A signal that came while the child was being made has reached nobody yet.
        if self._stop is not None:
            self.ask_to_stop(self._stop[0])

    def _environment(self) -> dict[str, str]:
        """Return the child's environment: ours without Slurm's variables, and the cluster's `env`."""
        out = {}
        for key, value in os.environ.items():
            # With these, the processes that a verb starts would take themselves for Slurm's tasks.
            # Slurm's own clients need SLURM_CONF.
            of_slurm = key.startswith(("SUBMITIT_", "SLURM", "PMI_"))
            if not of_slurm or key == "SLURM_CONF":
                out[key] = value
        out["PYTHONUNBUFFERED"] = "1"
        # The cluster's `env` comes last: it may set what is left out here.
        return out | self.env

    def _wait(self) -> int:
        """Wait for the child and return its exit status, negative for a signal."""
        assert self._child is not None
        while True:
            # 1. The child has ended. WNOWAIT leaves it unreaped, so that its number stays its own:
            #    a signal handler that runs now cannot signal somebody else's process.
            info = os.waitid(
                os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
            )
            if info is not None:
                exited = info.si_code == os.CLD_EXITED
                return info.si_status if exited else -info.si_status
            # 2. It was asked to stop, and has not done so in time.
            if (
                self._stop is not None
                and time.monotonic() > self._stop[1] + self.grace_s
            ):
                self._child.kill()
            # 3. Another rank has failed: this one would wait for it in a collective, for long.
            if self._sibling is None:
                self._sibling = self._sibling_failure()
                if self._sibling is not None:
                    self._child.kill()
            time.sleep(0.05)

    def _sibling_failure(self) -> Ending | None:
        """Return how another task of the same job failed; None where none did."""
        return None

    # 3. After the child: what its exit status means, and what follows

    def _meaning(self, exit_status: int) -> Ending:
        """Say how the attempt ended, by the child's exit status and by what it was asked."""
        why_stopped = self._stop[0] if self._stop else None
        # We killed it because of another rank: that one's words are the reason.
        if self._sibling is not None and exit_status not in (0, EXIT_PREEMPTED):
            return self._sibling
        # An exit status is a claim. The files are the proof.
        if exit_status == 0:
            if finished(self.job, self.ledger.runs):
                return Ending("done", None)
            made = self.job.makes or self.job.name
            return Ending(
                "failed", f"exit 0, but {made} does not hold what was to be made"
            )
        if exit_status == EXIT_PREEMPTED:
            return Ending(why_stopped or "preempted", None)
        if exit_status < 0:
            number = signal.Signals(-exit_status)
            if number in _STOP_SIGNALS:
                return Ending(
                    why_stopped or "preempted", "stopped before it could save"
                )
            if number == signal.SIGKILL and why_stopped is not None:
                return Ending(why_stopped, f"did not save within {self.grace_s:.0f} s")
            hint = " (out of memory?)" if number == signal.SIGKILL else ""
            return Ending("failed", f"killed by {number.name}{hint}")
        # It failed by itself: the last line that it said is the reason.
        reason = None if self.show else self.ledger.last_line(self.job, self._rank)
        if reason is None:
            reason = f"exit {exit_status}"
        if self.tasks > 1 and PEER_LOST.search(reason):
            return self._peers_words() or Ending("lost peer", reason)
        if exit_status == EXIT_BAD_INPUT:
            return Ending("bad input", reason)
        return Ending("failed", reason)

    def _peers_words(self) -> Ending | None:
        """Wait for the reason of the rank that is gone.

        None means that it could not give one: its node is gone, and the job is not to blame.
        """
        end = time.monotonic() + PEER_S
        while time.monotonic() < end:
            sibling = self._sibling_failure()
            if sibling is not None:
                return sibling
            time.sleep(0.1)
        return None

    def _conclude(self, ending: Ending) -> Outcome:
        """Decide what follows (`decide`) and write it down."""
        status = self._status
        attempt = status["attempts"][-1]
        attempt["end"] = time.time()
        attempt["how"] = ending.how
        attempt["reason"] = ending.reason
        attempt["at"] = self._position()
        # A retry has forgiven the attempts before it.
        counted = status["attempts"][status.get("forgiven", 0) :]
        is_cancelled = self.ledger.cancelled(self.job)
        outcome, reason = decide(ending, counted, cancelled=is_cancelled)
        state: StatusName = "queued" if outcome == "again" else outcome
        written = self.ledger.write_status(
            self.job, {**status, "state": state, "reason": reason}
        )
        # A failure that is on no record is not counted either, and would be tried without end.
        if outcome == "again" and ending.how == "failed" and not written:
            return "failed"
        return outcome

    def _position(self) -> str | None:
        """Return where the run is, as far as its progress file tells."""
        note = read_progress(self.ledger.runs / self.job.name)
        if note is None:
            return None
        return f"{note['what']} {note['done']}/{note['total']}"


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
    # 3. It came to the same end often enough, and got nowhere in between.
    verdict = _often_enough(ending, since_progress(attempts))
    if verdict is not None:
        return "failed", verdict
    # 4. Otherwise try again. Preemptions are never counted.
    return "again", reason


def since_progress(attempts: Sequence[AttemptNote]) -> Sequence[AttemptNote]:
    """Return the last attempt that got farther than all before it, and those after it.

    Three kills in three places are accidents; three at one place are a defect of the job.
    """
    # A run has parts with their own steps: part -> the most steps of it that were done
    farthest: dict[str, int] = {}
    first = 0
    for number, attempt in enumerate(attempts):
        place = re.fullmatch(r"(.*) (\d{1,18})/\d+", attempt.get("at") or "", re.DOTALL)
        if place is None:
            continue
        part = place[1]
        step = int(place[2])
        if step > farthest.get(part, 0):
            farthest[part] = step
            first = number
    return attempts[first:]


def _often_enough(ending: Ending, attempts: Sequence[AttemptNote]) -> str | None:
    """Say why the job ends here; None while it may try again. `attempts`: those since progress."""
    how, reason = ending
    same = [attempt for attempt in attempts if attempt.get("how") == how]
    if how == "failed":
        # Numbers do not count: `tried to allocate 2.1 GiB` and `... 2.4 GiB` are one reason.
        reasons = set()
        for attempt in same[-SAME_REASON:]:
            reasons.add(re.sub(r"\d+", "#", attempt.get("reason") or ""))
        if len(same) >= SAME_REASON and len(reasons) == 1:
            return f"failed {len(same)} times for the same reason: {reason}"
        if len(same) >= ANY_REASON:
            return f"failed {len(same)} times, at last: {reason}"
    # A lost node is not the job's failure, but nodes that never find each other are a wrong setting.
    if how == "lost peer" and len(same) >= ANY_REASON:
        return (
            f"its tasks lost each other {len(same)} times at the same point (see"
            f" NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME): {reason}"
        )
    # Its time is too short for one step: each attempt ends where the one before it began.
    if how == "time limit" and len(same) >= SAME_REASON:
        at = attempts[-1].get("at")
        return f"{len(same)} time limits ended at the same point ({at}): give it more hours"
    return None


def main() -> int:
    """Make the attempt that `JobPool` pickled to stdin: `python -m backbench.launch.attempt`.

    SIGTERM and SIGINT leave the job `stopped`; SIGUSR1 and SIGUSR2 count as a preemption.
    """
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
