"""Jobs as processes: one attempt at a command with its status, log and signals; N of them at a time on this machine.

Everything that is known about a job lies in RUNS/.launch, written by whoever runs it: whoever watches, retries or comes
after a crash needs no live process to ask.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

from backbench.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_PREEMPTED, Failed
from backbench.launch.grid import Job, finished
from backbench.runs import atomic
from backbench.runs.folder import PROGRESS_FILE, log

SAME_REASON = 3  # a job that fails this often for the same reason stops
ANY_REASON = 6  # and so does one that fails this often at all
EXIT_STOPPED = 3  # of an attempt: cancelled, not to be started again
Outcome = Literal["done", "failed", "again", "stopped", "cancelled", "blocked"]
_EXITS: dict[Outcome, int] = {
    "done": 0,
    "failed": EXIT_FAILED,
    "again": EXIT_PREEMPTED,
    "stopped": EXIT_PREEMPTED,
    "cancelled": EXIT_STOPPED,
    "blocked": EXIT_FAILED,
}


class Store:
    """RUNS/.launch: what was submitted, how each job stands, and its log."""

    def __init__(self, runs: str | Path) -> None:
        self.runs = Path(runs).resolve()
        self.root = self.runs / ".launch"

    def _file(self, folder: str, job: Job, suffix: str = "") -> Path:
        return self.root / folder / f"{job.key}{suffix}"

    def log(self, job: Job, rank: int = 0) -> Path:
        return self._file("logs", job, f".{rank}.log" if rank else ".log")

    def status(self, job: Job) -> dict[str, Any]:
        """{"name", "state", "reason", "attempts": [...]}; state "new" for a job that never started."""
        return _read_json(self._file("status", job, ".json")) or {
            "name": job.name,
            "state": "new",
            "attempts": [],
        }

    def statuses(self) -> dict[str, dict[str, Any]]:
        """Job name -> status, for every job that ever started."""
        out = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root / "status") as entries:
            for entry in entries:
                if entry.name.endswith(".json") and (status := _read_json(entry.path)):
                    out[status["name"]] = status
        return out

    def write_status(self, job: Job, status: Mapping[str, Any]) -> None:
        """A status that cannot be written (a full disk) must not end the job that it speaks of."""
        try:
            atomic.write_json(self._file("status", job, ".json"), status)
        except OSError as error:
            print(f"{job.name}: status not written: {error}", file=sys.stderr)

    def cancelled(self, job: Job) -> bool:
        return self._file("cancel", job).exists()

    def mark_cancelled(self, job: Job, *, on: bool) -> None:
        file = self._file("cancel", job)
        if on:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        else:
            file.unlink(missing_ok=True)

    def forgive(self, job: Job) -> None:
        """Before a retry: earlier failures no longer count, and a cancellation is over."""
        self.mark_cancelled(job, on=False)
        status = self.status(job)
        if status["state"] != "new":
            self.write_status(
                job,
                {**status, "state": "queued", "reason": None, "forgiven": len(status["attempts"])},
            )

    def running(self, job: Job) -> bool:
        """Whether a live process holds the job's lock."""
        file = self._file("locks", job)
        if not file.exists():
            return False
        with file.open("a") as handle:
            return not _lock(handle)

    @contextlib.contextmanager
    def alone(self, job: Job, patience_s: float = 90.0) -> Iterator[int]:
        """Hold the job's lock, given as a file descriptor: two processes never run one job, also when it was requeued
        before its old process ended. A child that inherits the descriptor holds the lock for as long as it lives."""
        file = self._file("locks", job)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as handle:
            end = time.monotonic() + patience_s
            while not _lock(handle):
                if time.monotonic() > end:
                    raise Failed(
                        f"{job.name}: another process has been running it for {patience_s:.0f} s"
                    )
                time.sleep(0.2)
            yield handle.fileno()


def _lock(handle: IO[str]) -> bool:
    """Whether the lock was to be had; a file system without locks counts as free."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _read_json(path: str | Path) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - thousands of them: twice as fast
            value = json.load(file)
    except (OSError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


PEER_LOST = re.compile("gloo|nccl|connection|socket|broken pipe|timed? ?out", re.IGNORECASE)


@dataclass
class Attempt:
    """Runs a job's command as a child process, once, and writes down how it went. Picklable before it starts.

    A signal to this process is handed to the child, which saves and exits 75. `command` is what stands before the verb,
    `machine` the options that fit it to the place (--devices). `limit_s` is a time limit of our own; `grace_s` is how
    long a child may take to save before it is killed (what it had saved earlier stays).
    """

    job: Job
    runs: str
    command: tuple[str, ...] = ()
    machine: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    gpus: int = 0
    limit_s: float | None = None
    grace_s: float = 60.0
    place: str = "local"  # written beside the attempt: slurm:12_3, local
    show: bool = False  # the child's output to the terminal, not to the log

    watches_clock: ClassVar[bool] = True  # whether `limit_s` is ours to keep

    def __post_init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._asked: tuple[str, float] | None = None  # why the child was asked to stop, and when
        self._sibling: tuple[str, str] | None = None  # (how, reason) of another task that failed
        self._status: dict[str, Any] = {}
        self._outcome: Outcome | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def store(self) -> Store:
        return Store(self.runs)

    @property
    def _log(self) -> Path:
        return self.store.log(self.job)

    def run(self) -> Outcome:
        """The whole attempt: lock, child, status."""
        with self.store.alone(self.job) as lock:
            self._begin()
            if self._outcome is None:
                try:
                    self._start_child(lock)
                except OSError as error:
                    self._conclude("failed", f"not started: {error}")
                else:
                    code = self._wait()
                    self._conclude(*self._meaning(code))
            assert self._outcome is not None
            return self._outcome

    def ask_to_stop(self, why: str, number: signal.Signals = signal.SIGUSR2) -> None:
        """Hand a signal to the child; it saves its state and exits 75."""
        self._asked = self._asked or (why, time.monotonic())
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)

    def finish_now(self, why: str) -> Outcome | None:
        """From a signal handler: stop the child, wait for it, write the status. None when it had not begun yet."""
        if self._outcome is None and self._child is not None:
            self.ask_to_stop(why)
            code = self._wait()
            self._conclude(*self._meaning(code))
        return self._outcome

    def _begin(self) -> None:
        status = self.store.status(self.job)
        attempts = status["attempts"]
        if attempts and attempts[-1].get("end") is None:  # it had no time to say how it ended
            attempts[-1] |= {
                "end": attempts[-1]["start"],
                "how": "killed",
                "reason": "ended without a word",
            }
        self._status = status
        if self.store.cancelled(self.job):
            self._outcome = "cancelled"
            self.store.write_status(self.job, {**status, "state": "cancelled"})
        elif status["state"] == "done" and finished(self.job, self.store.runs):
            self._outcome = "done"
        else:
            attempts.append(
                {
                    "start": time.time(),
                    "end": None,
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "place": self.place,
                    "gpus": self.gpus,
                    "gpu_ids": self.env.get("CUDA_VISIBLE_DEVICES", ""),
                }
            )
            self.store.write_status(self.job, {**status, "state": "running", "reason": None})

    def _start_child(self, lock: int | None = None) -> None:
        prefix = self.command or (sys.executable, "-m", "backbench")
        argv = [*prefix, self.job.verb, *self.machine, *self.job.argv[1:]]
        with contextlib.ExitStack() as stack:
            out: Any = None
            if not self.show:
                file = self._log
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
        if self._asked is not None:  # the signal came while the child was being made
            self.ask_to_stop(self._asked[0])

    def _wait(self) -> int:
        """The child's exit status, negative for a signal. Does not reap it, so a signal handler may wait as well."""
        assert self._child is not None
        start = time.monotonic()
        while True:
            info = os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
            now = time.monotonic()
            if (
                self.watches_clock
                and self.limit_s is not None
                and self._asked is None
                and now > start + self.limit_s - self.grace_s
            ):
                self.ask_to_stop("time limit")
            if self._asked is not None and now > self._asked[1] + self.grace_s:
                self._child.kill()
            if self._sibling is None and (sibling := self._sibling_failure()) is not None:
                self._sibling = sibling
                self._child.kill()
            time.sleep(0.05)

    def _environment(self) -> dict[str, str]:
        """What the command sees: without Slurm's variables, or its own processes would be taken for Slurm's tasks."""
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("SUBMITIT_", "SLURM", "PMI_"))
        }
        slurm = {"SLURM_CONF": os.environ["SLURM_CONF"]} if "SLURM_CONF" in os.environ else {}
        return {**kept, **slurm, "PYTHONUNBUFFERED": "1", **self.env}

    def _sibling_failure(self) -> tuple[str, str] | None:
        """(how, reason) of another task of the same job that failed; None where there is one task only."""
        return None

    def _meaning(self, code: int) -> tuple[str, str | None]:
        """(how, reason) of an exit status."""
        why = self._asked[0] if self._asked else None
        if self._sibling is not None and code not in (0, EXIT_PREEMPTED):
            return self._sibling
        if code == 0:
            if finished(self.job, self.store.runs):
                return "done", None
            return (
                "failed",
                f"exit 0, but {self.job.makes or self.job.name} does not hold what was to be made",
            )
        if code == EXIT_PREEMPTED:
            return why or "preempted", None
        if -code in (
            signal.SIGTERM,
            signal.SIGUSR1,
            signal.SIGUSR2,
            signal.SIGINT,
        ):  # it had no handler yet
            return why or "preempted", "stopped before it could save"
        if why is not None and -code == signal.SIGKILL:
            return why, f"did not save within {self.grace_s:.0f} s"
        if code < 0:
            name = signal.Signals(-code).name
            return "failed", f"killed by {name}" + (
                " (out of memory?)" if name == "SIGKILL" else ""
            )
        reason = self._last_line() or f"exit {code}"
        if PEER_LOST.search(reason):  # the other task died first and is about to write down why
            time.sleep(0.5)
            if (sibling := self._sibling_failure()) is not None:
                return sibling
        return ("bad input" if code == EXIT_BAD_INPUT else "failed"), reason

    def _last_line(self) -> str | None:
        return None if self.show else last_line(self._log)

    def _conclude(self, how: str, reason: str | None) -> None:
        status = self._status
        attempt = status["attempts"][-1]
        attempt |= {"end": time.time(), "how": how, "reason": reason, "at": self._position()}
        outcome, reason = self._decide(how, reason)
        state = {"again": "queued", "stopped": "stopped"}.get(outcome, outcome)
        self._outcome = outcome
        self.store.write_status(self.job, {**status, "state": state, "reason": reason})

    def _decide(self, how: str, reason: str | None) -> tuple[Outcome, str | None]:
        since = self._status.get("forgiven", 0)
        attempts = self._status["attempts"][since:]
        if how == "done":
            return "done", None
        if self.store.cancelled(self.job) or how == "cancelled":
            return "cancelled", None
        if how == "stopped":
            return "stopped", reason
        if how == "bad input":
            return "failed", reason
        if how == "failed":
            failures = [a for a in attempts if a.get("how") == "failed"]
            recent = {_shape(a.get("reason")) for a in failures[-SAME_REASON:]}
            if len(failures) >= SAME_REASON and len(recent) == 1:
                return "failed", f"failed {len(failures)} times for the same reason: {reason}"
            if len(failures) >= ANY_REASON:
                return "failed", f"failed {len(failures)} times, at last: {reason}"
            return "again", reason
        late = [a for a in attempts if a.get("how") == "time limit"][-SAME_REASON:]
        if (
            how == "time limit"
            and len(late) == SAME_REASON
            and len({str(a.get("at")) for a in late}) == 1
        ):
            return (
                "failed",
                f"{SAME_REASON} time limits ended at the same point ({late[-1].get('at')}): give it more hours",
            )
        return "again", reason

    def _position(self) -> str | None:
        """Where the run is, as far as its progress file tells."""
        state = _read_json(self.store.runs / self.job.name / PROGRESS_FILE)
        return f"{state.get('what')} {state.get('done')}/{state.get('total')}" if state else None


def last_line(path: Path) -> str | None:
    """The last line of a log that says something."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    lines = [
        line.strip()
        for line in re.split(r"[\r\n]+", text)
        if line.strip() and not line.startswith("$ ")
    ]
    return lines[-1][:300] if lines else None


def _shape(reason: str | None) -> str:
    """A reason without its numbers: `tried to allocate 2.1 GiB` and `... 2.4 GiB` are the same failure."""
    return re.sub(r"\d+", "#", reason or "")


class Pool:
    """Runs jobs as processes of this machine, at most `at_once`, in order of their dependencies.

    Each attempt is a small process of its own, so a killed pool leaves running jobs to finish, and the next pool waits
    for them instead of starting a second copy. `gpus` are handed out by CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, runs: str | Path, *, at_once: int, gpus: int = 0) -> None:
        self.store = Store(runs)
        self.at_once = at_once
        self.free_gpus = set(range(gpus))
        self.total_gpus = gpus
        self.queue: list[Attempt] = []
        self.live: dict[str, tuple[subprocess.Popen[bytes], Attempt, set[int]]] = {}
        self.adopted: dict[
            str, tuple[Attempt, set[int]]
        ] = {}  # with their GPUs; run by a pool that was killed
        self.outcomes: dict[str, Outcome] = {}
        self.done_before: set[str] = set()

    def add(self, attempt: Attempt) -> None:
        self.queue.append(attempt)

    @property
    def busy(self) -> bool:
        return bool(self.live or self.adopted or self.queue)

    def step(self) -> None:
        """Collect what ended, set aside what can never start, and start what may."""
        for name, (process, attempt, gpus) in list(self.live.items()):
            code = process.poll()
            if code is not None:
                del self.live[name]
                self.free_gpus |= gpus
                self._ended(attempt, code)
        for name, (attempt, gpus) in list(self.adopted.items()):
            if not self.store.running(attempt.job):
                del self.adopted[name]
                self.free_gpus |= gpus
                codes = {"done": 0, "failed": 1, "cancelled": EXIT_STOPPED}
                self._ended(
                    attempt, codes.get(self.store.status(attempt.job)["state"], EXIT_PREEMPTED)
                )
        waiting = {a.job.name for a in self.queue} | set(self.live) | set(self.adopted)
        good = self.done_before | {
            name for name, outcome in self.outcomes.items() if outcome == "done"
        }
        for attempt in list(self.queue):
            job = attempt.job
            if lost := [name for name in job.needs if name not in good | waiting]:
                self.queue.remove(attempt)
                waiting.discard(job.name)
                self.outcomes[job.name] = "blocked"
                log.info(f"blocked {job.name}: needs {lost[0]}")
                continue
            wanted = min(
                attempt.gpus, self.total_gpus
            )  # none are handed out where the pool has none
            room = len(self.live) + len(self.adopted) < self.at_once and wanted <= len(
                self.free_gpus
            )
            if room and good.issuperset(job.needs) and waiting.isdisjoint(job.after):
                self.queue.remove(attempt)
                self._start(attempt)

    def adopt(self, attempt: Attempt) -> bool:
        """Wait for the job where it runs already, on the GPUs that it was given; False where it does not run."""
        if not self.store.running(attempt.job):
            return False
        attempts = self.store.status(attempt.job)["attempts"] or [{}]
        ids = {int(i) for i in attempts[-1].get("gpu_ids", "").split(",") if i} & self.free_gpus
        self.free_gpus -= ids
        self.adopted[attempt.job.name] = attempt, ids
        log.info(f"runs already: {attempt.job.name}")
        return True

    def _start(self, attempt: Attempt) -> None:
        name = attempt.job.name
        if self.adopt(attempt):
            return
        attempt.gpus = min(attempt.gpus, self.total_gpus)
        gpus = set(sorted(self.free_gpus)[: attempt.gpus])
        self.free_gpus -= gpus
        if self.total_gpus:
            attempt.env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, sorted(gpus)))
        process = subprocess.Popen(
            [sys.executable, "-m", "backbench.launch.attempt"],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches this pool alone, which passes it on in order
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(dataclasses.asdict(attempt)).encode())
        process.stdin.close()
        self.live[name] = (process, attempt, gpus)
        log.info(f"start  {name}")

    def _ended(self, attempt: Attempt, code: int) -> None:
        name = attempt.job.name
        status = self.store.status(attempt.job)
        if code == EXIT_PREEMPTED:
            log.info(f"again  {name}: {status.get('reason') or status['attempts'][-1].get('how')}")
            self.queue.append(attempt)
            return
        names: dict[int, Outcome] = {0: "done", EXIT_STOPPED: "cancelled"}
        self.outcomes[name] = names.get(code, "failed")
        reason = f": {status.get('reason')}" if self.outcomes[name] == "failed" else ""
        log.info(f"{self.outcomes[name]:6} {name}{reason}")

    def stop(self, patience_s: float = 60.0) -> None:
        """Ask all running jobs to save and stop, and wait for them."""
        for process, _, _ in self.live.values():
            process.send_signal(signal.SIGTERM)
        end = time.monotonic() + patience_s
        for process, _, _ in self.live.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
        self.live.clear()

    def run(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Until nothing can run any more (True) or `stopped()` says so (False)."""
        while self.busy:
            self.step()
            if stopped():
                self.stop()
                return False
            time.sleep(0.05)
        return True


def main() -> int:
    """`python -m backbench.launch.attempt`: one attempt, described on stdin, in a process of its own."""
    data = json.load(sys.stdin)
    lists = {k: tuple(data[k]) for k in ("command", "machine")}
    attempt = Attempt(**{**data, **lists, "job": Job.from_json(data["job"])})
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: attempt.ask_to_stop("stopped", signal.SIGTERM))
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: attempt.ask_to_stop("preempted"))
    try:
        return _EXITS[attempt.run()]
    except Failed as error:
        print(f"backbench: {error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    raise SystemExit(main())
