"""Processes of this machine side by side: the demo's stages, and the launcher's jobs.

`ProcessPool` is the mechanism (who may start, who has ended); `JobPool` runs attempts at jobs by
it, with their GPUs, their retries, and the jobs that a killed launcher left running.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from backbench.errors import EXIT_FAILED, EXIT_PREEMPTED
from backbench.launch.attempt import EXIT_STOPPED, Attempt
from backbench.launch.records import Ledger
from backbench.runs.terminal import log


class Process(Protocol):
    """What a pool asks of subprocess.Popen, and of what stands for a process of somebody else."""

    def poll(self) -> int | None: ...
    def send_signal(self, sig: int, /) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class _Waiting(NamedTuple):
    needs: Sequence[str]  # must have ended well
    after: Sequence[str]  # should be over, well or not


class ProcessPool:
    """At most `at_once` processes, started in the order in which their names were added.

    A name is added -> ready (the caller starts it) -> running -> ended, or added -> blocked. Exit
    status 0 is ending well. `done` are names that ended well before this pool was made.
    """

    def __init__(self, at_once: int, done: Sequence[str] = ()) -> None:
        self.at_once = at_once
        self.running: dict[str, Process] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._done = set(done)

    def __len__(self) -> int:
        """How many are not over."""
        return len(self._waiting) + len(self.running)

    def add(self, name: str, *, needs: Sequence[str] = (), after: Sequence[str] = ()) -> None:
        self._waiting[name] = _Waiting(needs, after)

    def ended(self) -> Iterator[tuple[str, int]]:
        """Name and exit status of each process that ended since the last question."""
        # A copy, for the caller may add and start others between two of them
        for name, process in list(self.running.items()):
            status = process.poll()
            if status is not None:
                del self.running[name]
                if status == 0:
                    self._done.add(name)
                yield name, status

    def blocked(self) -> Iterator[tuple[str, str]]:
        """Take out what can never start: its name, and what it needs that will not be."""
        # Done, or on the way to it; a blocked name leaves, so what needs it is blocked as well
        hopeful = self._done | self._waiting.keys() | self.running.keys()
        for name, (needs, _) in list(self._waiting.items()):
            lost = [need for need in needs if need not in hopeful]
            if lost:
                del self._waiting[name]
                hopeful.discard(name)
                yield name, lost[0]

    def ready(self) -> Iterator[str]:
        """What may start now; whoever leaves one out is given it again the next time."""
        for name, (needs, after) in list(self._waiting.items()):
            if len(self.running) >= self.at_once:
                return
            # `after` must only be over: a name that is blocked, or was never added, is that as well
            over = not any(other in self._waiting or other in self.running for other in after)
            if over and self._done.issuperset(needs):
                yield name

    def start(self, name: str, process: Process) -> None:
        """The process that runs `name` from now on."""
        self._waiting.pop(name, None)
        self.running[name] = process

    def end(self, patience_s: float, *, kill: bool) -> None:
        """Ask all that run to save and stop, and wait for them so long in all.

        Those that have not ended by then are killed, or left to end by themselves.
        """
        # All are asked before any is waited for, so that they save side by side
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        limit = time.monotonic() + patience_s
        for process in self.running.values():
            try:
                process.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                if kill:
                    process.kill()
                    process.wait()
        self.running.clear()


class _Adopted:
    """A job that a launcher left running when it was killed: waited for, and left alone."""

    def __init__(self, attempt: Attempt) -> None:
        self.job, self.ledger = attempt.job, attempt.ledger

    def poll(self) -> int | None:
        """As the attempt's own process would have exited: nobody can ask that of a stranger."""
        if self.ledger.running(self.job):
            return None
        exits = {"done": 0, "failed": EXIT_FAILED, "cancelled": EXIT_STOPPED}
        return exits.get(self.ledger.status(self.job)["state"], EXIT_PREEMPTED)

    def send_signal(self, sig: int, /) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        pass


class JobPool:
    """Runs jobs as processes of this machine, at most `at_once`, in order of their dependencies.

    Each attempt is a small process of its own, so a killed pool leaves running jobs to finish, and
    the next pool waits for them instead of starting a second copy. `gpus` are handed out by
    CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, runs: str | Path, *, at_once: int, gpus: int = 0) -> None:
        self.ledger = Ledger(runs)
        self.outcomes: dict[str, Literal["done", "failed", "cancelled", "blocked"]] = {}
        self._processes = ProcessPool(at_once)
        self._attempts: dict[str, Attempt] = {}
        self._gpus = gpus
        self._free_gpus = set(range(gpus))
        self._held_gpus: dict[str, set[int]] = {}

    def add(self, attempt: Attempt) -> None:
        job = attempt.job
        self._attempts[job.name] = attempt
        self._processes.add(job.name, needs=job.needs, after=job.after)

    def adopt(self, attempt: Attempt) -> bool:
        """Wait for the job where it runs already, on the GPUs that it was given.

        False where it does not run.
        """
        job = attempt.job
        if not self.ledger.running(job):
            return False
        # It still uses the GPUs that its own launcher handed out: nobody else gets them meanwhile
        given: set[int] = set()
        for attempt_note in self.ledger.status(job)["attempts"][-1:]:
            ids = attempt_note.get("gpu_ids", "")
            # GPUs that the cluster's `env` names by UUID are not among those handed out here
            given.update(int(word) for word in ids.split(",") if word.isdecimal())
        self._hold(job.name, given & self._free_gpus)
        self._attempts[job.name] = attempt
        self._processes.start(job.name, _Adopted(attempt))
        log.info(f"runs already: {job.name}")
        return True

    def run(
        self,
        stopped: Callable[[], bool] = lambda: False,
        refill: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Until nothing can run any more (True) or `stopped()` says so (False).

        `refill` is called before every step and may add jobs; while it says True the pool waits
        for more, even when all are over.
        """
        while refill() or len(self._processes):
            self._step()
            if stopped():
                self._processes.end(60.0, kill=False)
                return False
            time.sleep(0.05)
        return True

    def _step(self) -> None:
        """Collect what ended, set aside what can never start, and start what may."""
        # In this order: what has ended frees a place and GPUs, and may be what others waited for
        for name, status in self._processes.ended():
            self._free_gpus |= self._held_gpus.pop(name)
            self._ended(name, status)
        for name, need in self._processes.blocked():
            self.outcomes[name] = "blocked"
            log.info(f"blocked {name}: needs {need}")
        for name in self._processes.ready():
            attempt = self._attempts[name]
            # A pool without GPUs hands none out: the job sees those of the machine
            attempt.gpus = min(attempt.gpus, self._gpus)
            if attempt.gpus <= len(self._free_gpus) and not self.adopt(attempt):
                self._start(attempt)

    def _ended(self, name: str, exit_status: int) -> None:
        attempt = self._attempts[name]
        status = self.ledger.status(attempt.job)
        # Failed and may try again, or preempted: behind those that wait already
        if exit_status == EXIT_PREEMPTED:
            log.info(f"again  {name}: {status.get('reason') or status['attempts'][-1].get('how')}")
            self.add(attempt)
            return
        if exit_status in (0, EXIT_STOPPED):
            self.outcomes[name] = "cancelled" if exit_status else "done"
            log.info(f"{self.outcomes[name]:6} {name}")
        else:
            self.outcomes[name] = "failed"
            log.info(f"failed {name}: {status.get('reason')}")

    def _start(self, attempt: Attempt) -> None:
        name = attempt.job.name
        self._hold(name, set(sorted(self._free_gpus)[: attempt.gpus]))
        if self._gpus:
            attempt.env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, sorted(self._held_gpus[name])))
        process = subprocess.Popen(
            [sys.executable, "-m", "backbench.launch.attempt"],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches this pool alone, which passes it on in order
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(dataclasses.asdict(attempt)).encode())
        process.stdin.close()
        self._processes.start(name, process)
        log.info(f"start  {name}")

    def _hold(self, name: str, gpus: set[int]) -> None:
        self._held_gpus[name] = gpus
        self._free_gpus -= gpus
