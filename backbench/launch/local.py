"""Runs jobs of this machine side by side, in the order of their dependencies.

`JobPool` starts them, hands out GPUs, and waits for jobs that a killed launcher left running.
`run_here` is `backbench launch run` on this machine.
"""

import contextlib
import dataclasses
import itertools
import math
import pickle
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from backbench.errors import EXIT_FAILED, EXIT_PREEMPTED, Failed
from backbench.launch.attempt import EXIT_CANCELLED, EXITS, Attempt
from backbench.launch.clusters import Cluster
from backbench.launch.job import Job
from backbench.launch.records import Ledger, Submission
from backbench.launch.view import Snapshot, counted
from backbench.runs.state import StopFlag
from backbench.runs.terminal import log

PATIENCE_S = 60.0  # for running jobs to save when the pool is stopped


class Running(NamedTuple):
    """A job that runs."""

    attempt: Attempt
    # None: a launcher left it running when it was killed. It is waited for, and left alone.
    process: subprocess.Popen[bytes] | None
    gpus: set[int]


class JobPool:
    """Runs jobs as processes of this machine, at most `at_once`, in the order of their adding.

    A job is waiting, then running, then over (`outcomes`); it waits again where its attempt says
    "again". Each attempt is a process of its own: when the pool is killed, its jobs finish, and the
    next pool waits for them and starts no second copy. `gpus` are handed out to the jobs by
    CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, runs: str | Path, *, at_once: int, gpus: int = 0) -> None:
        self.ledger = Ledger(runs)
        self.at_once = at_once
        self.running: dict[str, Running] = {}
        self.outcomes: dict[str, Literal["done", "failed", "cancelled", "blocked"]] = {}
        self._waiting: dict[str, Attempt] = {}
        self._gpus = gpus
        self._free_gpus = set(range(gpus))

    def add(self, attempt: Attempt) -> None:
        self._waiting[attempt.job.name] = attempt

    def adopt(self, attempt: Attempt) -> bool:
        """Wait for a job that runs already, on the GPUs it was given; False where it does not."""
        job = attempt.job
        if not self.ledger.running(job):
            return False
        # It still uses the GPUs that its own launcher handed out: nobody else gets them meanwhile.
        attempts = self.ledger.status(job)["attempts"]
        ids = attempts[-1].get("gpu_ids", "") if attempts else ""
        # GPUs that the cluster's `env` names by UUID are not among those that are handed out here.
        given = {int(word) for word in ids.split(",") if word.isdecimal()}
        self._begin(Running(attempt, None, given & self._free_gpus))
        log.info(f"runs already: {job.name}")
        return True

    def run(
        self,
        stopped: Callable[[], bool] = lambda: False,
        refill: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Run until nothing can run any more (True) or `stopped()` says so (False).

        `refill` is called before every step and may add jobs; the pool goes on while it says True.
        """
        while refill() or self._waiting or self.running:
            # In this order: a job that has ended frees its place and its GPUs, and may be what
            # other jobs wait for.
            self._collect()
            self._set_aside()
            self._start_ready()
            if stopped():
                self._end()
                return False
            time.sleep(0.05)
        return True

    def _collect(self) -> None:
        """Note the outcome of every attempt that has ended."""
        for name, (attempt, process, gpus) in list(self.running.items()):
            # 1. Has it ended? A job outlives a launcher that somebody kills, and also the process
            #    above its command: then nobody can ask how it exits, but its lock tells when.
            if process is not None and process.poll() is None:
                continue
            is_orphan = process is None or process.returncode < 0
            if is_orphan and self.ledger.running(attempt.job):
                continue
            del self.running[name]
            self._free_gpus |= gpus
            # 2. How? The state that an orphan wrote has its outcome's name, but for `queued`, which
            #    is "again", and for `running`, which is left behind by a process that was killed.
            status = self.ledger.status(attempt.job)
            if process is None or is_orphan:
                exit_status = EXITS.get(status["state"], EXIT_PREEMPTED)
            else:
                exit_status = process.returncode
            attempts = status["attempts"]
            how = attempts[-1].get("how", "killed") if attempts else "not started"
            why = status.get("reason") or how
            # 3. What follows? With kind debug, the first failure ends the run.
            if exit_status != 0 and attempt.show:
                raise Failed(f"{name}: {why}")
            if exit_status == 0:
                self.outcomes[name] = "done"
                log.info(f"done   {name}")
            elif exit_status == EXIT_CANCELLED:
                self.outcomes[name] = "cancelled"
                log.info(f"cancelled {name}")
            elif exit_status == EXIT_PREEMPTED:
                # It failed and may try again, or was preempted: behind those that wait already
                log.info(f"again  {name}: {why}")
                self.add(attempt)
            else:
                self.outcomes[name] = "failed"
                log.info(f"failed {name}: {why}")

    def _set_aside(self) -> None:
        """Take out what can never start: a job that it needs is neither done nor on its way."""
        hopeful = {name for name, outcome in self.outcomes.items() if outcome == "done"}
        hopeful |= self._waiting.keys() | self.running.keys()
        for name, attempt in list(self._waiting.items()):
            missing = [need for need in attempt.job.needs if need not in hopeful]
            if missing:
                del self._waiting[name]
                hopeful.discard(name)  # so that what needs it is blocked as well
                self.outcomes[name] = "blocked"
                log.info(f"blocked {name}: needs {missing[0]}")

    def _start_ready(self) -> None:
        for attempt in list(self._waiting.values()):
            if len(self.running) >= self.at_once:
                return
            # `after` must only be over: a job that is blocked, or was never added, is over as well.
            unfinished = self._waiting.keys() | self.running.keys()
            if not unfinished.isdisjoint((*attempt.job.needs, *attempt.job.after)):
                continue
            # A pool without GPUs hands none out: the job sees those of the machine.
            attempt.gpus = min(attempt.gpus, self._gpus)
            if attempt.gpus > len(self._free_gpus):
                continue
            if not self.adopt(attempt):
                self._start(attempt)

    def _start(self, attempt: Attempt) -> None:
        gpus = set(sorted(self._free_gpus)[: attempt.gpus])
        if self._gpus:
            attempt.env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, sorted(gpus)))
        process = subprocess.Popen(
            [sys.executable, "-m", "backbench.launch.attempt"],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches this pool alone, which passes it on in order
        )
        assert process.stdin is not None
        pickle.dump(attempt, process.stdin)
        process.stdin.close()
        self._begin(Running(attempt, process, gpus))
        log.info(f"start  {attempt.job.name}")

    def _begin(self, running: Running) -> None:
        name = running.attempt.job.name
        self._waiting.pop(name, None)
        self.running[name] = running
        self._free_gpus -= running.gpus

    def _end(self) -> None:
        """Ask all that run to save and stop; those that take too long end by themselves."""
        processes = []
        for running in self.running.values():
            if running.process is not None:
                processes.append(running.process)
        # All are asked before any is waited for, so that they save side by side.
        for process in processes:
            process.send_signal(signal.SIGTERM)
        limit = time.monotonic() + PATIENCE_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, limit - time.monotonic()))
        self.running.clear()


def run_here(
    ledger: Ledger,
    cluster: Cluster,
    grid: str,
    find: Callable[[], tuple[list[Job], bool]],
    *,
    interval: float | None = None,
    watch: Callable[[JobPool], None] = lambda pool: None,
) -> int:
    """Run jobs on this machine and return the exit status.

    Kind local runs `cluster.jobs` processes at a time. Kind debug runs one after the other, on the
    terminal, until one fails.

    `find` returns the jobs, and whether there are more to wait for. It is asked once or, with an
    `interval`, every so many seconds until it says that no more will come. `watch` is called after
    every step.
    """
    pool_id = uuid.uuid4().hex[:12]  # its lock tells it to others
    submission_numbers = itertools.count()
    at_once = 1 if cluster.kind == "debug" else cluster.jobs
    pool = JobPool(ledger.runs, at_once=at_once, gpus=cluster.gpus)
    more_to_come = True
    next_look = -math.inf

    def refill() -> bool:
        """Add the jobs that this pool does not know. They are recorded, and earlier failures forgotten."""
        nonlocal more_to_come, next_look
        if time.monotonic() > next_look:
            next_look = math.inf if interval is None else time.monotonic() + interval
            found, more_to_come = find()
            known = pool.outcomes.keys() | pool.running.keys()
            jobs = [job for job in found if job.name not in known]
            if jobs:
                uid = f"{pool_id}-{next(submission_numbers)}"
                ledger.write_submission(Submission.to(cluster, grid, uid, jobs))
            for job in jobs:
                ledger.forgive(job)
                pool.add(Attempt.on(cluster, job, ledger))
        watch(pool)
        return interval is not None and more_to_come

    with ledger.running_pool(pool_id), StopFlag() as stop:
        # The jobs of a launcher that was killed run on, and count among `at_once`.
        snapshot = Snapshot(ledger)
        for name, record in snapshot.records.items():
            is_running = snapshot.status(name)["state"] == "running"
            if is_running and record.submission.kind != "slurm":
                # It waits for nothing: it has started already.
                job = dataclasses.replace(record.job, needs=(), after=())
                pool.adopt(Attempt.on(cluster, job, ledger))
        if not pool.run(stopped=lambda: bool(stop.requested), refill=refill):
            log.info(
                f"stopped by {stop.requested}: running jobs saved; the same command continues"
            )
            return EXIT_PREEMPTED
        outcomes: Counter[str] = Counter(pool.outcomes.values())
        log.info(", ".join(counted(outcomes)) or "nothing to do")
        return EXIT_FAILED if outcomes.keys() - {"done"} else 0
