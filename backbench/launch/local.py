"""Runs jobs of this machine side by side, in order of their dependencies: `JobPool`, with GPUs,
retries, and the jobs that a killed launcher left. `run_here` is `launch run` on this machine."""

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
from backbench.launch.attempt import EXIT_STOPPED, EXITS, Attempt
from backbench.launch.clusters import Cluster
from backbench.launch.job import Job
from backbench.launch.records import Ledger, Submission
from backbench.launch.view import Snapshot, counted
from backbench.runs.state import StopFlag
from backbench.runs.terminal import log

PATIENCE_S = 60.0  # for running jobs to save when the pool is stopped


class Running(NamedTuple):
    attempt: Attempt
    # None: a launcher left it running when it was killed; it is waited for, and left alone
    process: subprocess.Popen[bytes] | None
    gpus: set[int]


class JobPool:
    """Runs jobs as processes of this machine, at most `at_once`, in the order of their adding. A
    job is waiting -> running -> over (`outcomes`), or again waiting where its attempt says so. Each
    attempt is a process of its own: a killed pool leaves jobs to finish, and the next pool waits
    for them and starts no second copy. `gpus` are handed out by CUDA_VISIBLE_DEVICES."""

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
        # It still uses the GPUs that its own launcher handed out: nobody else gets them meanwhile
        attempts = self.ledger.status(job)["attempts"]
        ids = attempts[-1].get("gpu_ids", "") if attempts else ""
        # GPUs that the cluster's `env` names by UUID are not among those handed out here
        given = {int(word) for word in ids.split(",") if word.isdecimal()}
        self._begin(Running(attempt, None, given & self._free_gpus))
        log.info(f"runs already: {job.name}")
        return True

    def run(
        self,
        stopped: Callable[[], bool] = lambda: False,
        refill: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Run until nothing can run any more (True) or `stopped()` says so (False). `refill` is
        called before every step and may add jobs; the pool goes on while it says True."""
        while refill() or self._waiting or self.running:
            # In this order: what has ended frees a place and GPUs, and may be what others wait for
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
            if process is not None and process.poll() is None:
                continue
            # A job outlives a launcher, or the process above it, that somebody kills
            orphaned = process is None or process.returncode < 0
            if orphaned and self.ledger.running(attempt.job):
                continue
            del self.running[name]
            self._free_gpus |= gpus
            status = self.ledger.status(attempt.job)
            attempts = status["attempts"]
            how = attempts[-1].get("how", "killed") if attempts else "not started"
            why = status.get("reason") or how
            # Nobody can ask a stranger, or a killed one, how it exited. The state that it wrote is
            # named as its outcome is, but for `queued`, which is "again", and `running`: it was killed
            exit_status = EXITS.get(status["state"], EXIT_PREEMPTED)
            if process is not None and not orphaned:
                exit_status = process.returncode
            if exit_status and attempt.show:  # kind debug: the first failure ends it
                raise Failed(f"{name}: {why}")
            if exit_status == EXIT_PREEMPTED:
                # Failed and may try again, or preempted: behind those that wait already
                log.info(f"again  {name}: {why}")
                self.add(attempt)
            elif exit_status in (0, EXIT_STOPPED):
                self.outcomes[name] = "cancelled" if exit_status else "done"
                log.info(f"{self.outcomes[name]:6} {name}")
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
            # A pool without GPUs hands none out: the job sees those of the machine
            attempt.gpus = min(attempt.gpus, self._gpus)
            # `after` must only be over: blocked, or never added, is over as well
            unfinished = self._waiting.keys() | self.running.keys()
            ready = unfinished.isdisjoint((*attempt.job.needs, *attempt.job.after))
            if (
                ready
                and attempt.gpus <= len(self._free_gpus)
                and not self.adopt(attempt)
            ):
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
        # All are asked before any is waited for, so that they save side by side
        children = [
            each.process for each in self.running.values() if each.process is not None
        ]
        for process in children:
            process.send_signal(signal.SIGTERM)
        limit = time.monotonic() + PATIENCE_S
        for process in children:
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
    """Run jobs on this machine and return the exit status. kind local: N processes at a time; kind
    debug: one after the other, on the terminal, until one fails. `find` gives the jobs, and whether
    there are more to wait for: then it is asked every `interval` until there are not and all are
    over. `watch` is called after every step."""
    number = uuid.uuid4().hex[:12]  # the pool's, as its lock tells it to others
    looks = itertools.count()
    at_once = 1 if cluster.kind == "debug" else cluster.jobs
    pool = JobPool(ledger.runs, at_once=at_once, gpus=cluster.gpus)
    more_to_come = True
    next_look = -math.inf

    def refill() -> bool:
        """Add the jobs that this pool does not know; on record they go with a clean slate."""
        nonlocal more_to_come, next_look
        if time.monotonic() > next_look:
            next_look = math.inf if interval is None else time.monotonic() + interval
            found, more_to_come = find()
            known = pool.outcomes.keys() | pool.running.keys()
            jobs = [job for job in found if job.name not in known]
            if jobs:
                ledger.write_submission(
                    Submission.to(cluster, grid, f"{number}-{next(looks)}", jobs)
                )
            for job in jobs:
                ledger.forgive(job)
                pool.add(Attempt.on(cluster, job, ledger))
        watch(pool)
        return interval is not None and more_to_come

    with ledger.running_pool(number), StopFlag() as stop:
        # The jobs of a launcher that was killed run on, and count among `at_once`
        snapshot = Snapshot(ledger)
        for name, record in snapshot.records.items():
            if (
                record.submission.kind != "slurm"
                and snapshot.status(name)["state"] == "running"
            ):
                job = dataclasses.replace(
                    record.job, needs=(), after=()
                )  # it has started already
                pool.adopt(Attempt.on(cluster, job, ledger))
        if not pool.run(stopped=lambda: bool(stop.requested), refill=refill):
            log.info(
                f"stopped by {stop.requested}: running jobs saved; the same command continues"
            )
            return EXIT_PREEMPTED
        outcomes: Counter[str] = Counter(pool.outcomes.values())
        log.info(", ".join(counted(outcomes)) or "nothing to do")
        return EXIT_FAILED if outcomes.keys() - {"done"} else 0
