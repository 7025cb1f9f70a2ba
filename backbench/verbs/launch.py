"""`backbench launch`: the jobs of a grid that are missing, on Slurm or on this machine.

`run`, `retry` and `cancel` act: they submit, and write down what they find (`slurm.catch_up`).
`status` and `run --dry-run` look, and write nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import signal
import socket
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from backbench.errors import EXIT_FAILED, EXIT_PREEMPTED, BadInput, Failed
from backbench.launch import slurm_client, stored
from backbench.launch.attempt import Attempt
from backbench.launch.clusters import Cluster, check_resources, read_cluster
from backbench.launch.commands import CommandLine
from backbench.launch.grid import Grid, read_grid
from backbench.launch.job import Job
from backbench.launch.plan import Plan, make_plan, plan_text, without_done
from backbench.launch.pool import JobPool
from backbench.launch.records import Ledger, Target
from backbench.launch.slurm import catch_up, submit
from backbench.launch.view import ACTIVE, UNSUCCESSFUL, Snapshot, status_text
from backbench.runs.folder import CHECKPOINT_FILE
from backbench.runs.state import StopFlag
from backbench.runs.terminal import log

CLEAR = "\x1b[H\x1b[2J"  # the terminal


def run(args: argparse.Namespace) -> int:
    """The verb `launch`."""
    actions = {"run": run_grid, "status": show_status, "retry": retry, "cancel": cancel}
    return actions[args.action](args)


# --- run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What `launch run` was asked: a grid, where it runs, and the folder of its runs."""

    ledger: Ledger
    grid: Grid
    target: Target
    where: str  # the grid, in messages
    data: Path | None
    interval: float | None  # seconds between looks of --watch
    line: CommandLine

    @property
    def watching(self) -> bool:
        return self.interval is not None

    def plan(self, snapshot: Snapshot, *, watching: bool) -> Plan:
        """What is missing; refused where the cluster cannot run it."""
        plan = make_plan(self.grid, snapshot, where=self.where, data=self.data, watching=watching)
        check_resources(self.target.cluster, plan.new)
        if self.target.cluster.command is None:  # another program knows its own words
            self.line.refuse(plan.new, self.where)
        return plan


def run_grid(args: argparse.Namespace) -> int:
    if not 0 < args.interval < math.inf:
        raise BadInput(f"--interval {args.interval:g}: seconds between two looks, above 0")
    # cluster.a.b=c changes a key of the cluster's file, a.b=c one of the grid's
    of_grid: list[str] = []
    of_cluster: list[str] = []
    for text in args.overrides:
        key = text.removeprefix("cluster.")
        (of_grid if key == text else of_cluster).append(key)
    grid = read_grid(args.grid, of_grid)
    cluster = read_cluster(args.cluster, of_cluster)
    request = Request(
        ledger=Ledger(args.out),
        grid=grid,
        target=Target(cluster, tuple(of_cluster), grid.name),
        where=f"grid {args.grid}",
        data=args.data,
        interval=args.interval if args.watch else None,
        line=CommandLine(args.parsed, args.check),
    )
    if args.dry_run:
        snapshot = Snapshot(request.ledger)
        plan = request.plan(snapshot, watching=True)  # also shows what --watch would wait for
        if not (plan.new or plan.known or plan.waiting):
            request.plan(snapshot, watching=False)  # says which of its names match nothing
        sys.stdout.write(plan_text(plan, request.target.cluster, snapshot))
        return 0
    if request.target.cluster.kind == "slurm":
        return _run_on_slurm(request)
    find = partial(_missing_here, request)
    return _run_here(request.ledger, request.target, find, interval=request.interval)


def _run_on_slurm(request: Request) -> int:
    watcher = _Watcher(request)
    if request.interval is None:
        watcher.submit_missing()
        return 0
    with StopFlag() as stop:
        while (code := watcher.look(request.interval)) is None:
            if _sleep(stop, request.interval):
                log.info("stopped watching; the jobs go on")
                return 0
    return code


class _Watcher:
    """Submits what is missing to Slurm, once or again and again."""

    def __init__(self, request: Request) -> None:
        self.request, self.ledger = request, request.ledger
        # What this watcher submitted, and was cancelled or lost since, is not its to submit again.
        # What only ran out of time, on a node that could not requeue it, is.
        self.seen: set[str] = set()
        self._looked = False

    def look(self, interval: float) -> int | None:
        """One look of --watch; the exit status where nothing is left to happen."""
        plan: Plan | None = None
        try:
            plan = self.submit_missing()
        except (Failed, BadInput) as error:
            # Slurm does not answer or takes no more now, another launcher submits. What is wrong
            # at the first look is wrong with the command.
            if isinstance(error, BadInput) and not self._looked:
                raise
            log.warning("%s; looking again in %.0f s", error, interval)
        self._looked = True
        snapshot = Snapshot(self.ledger)
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {status_text(snapshot)}", flush=True)
        if plan is None or plan.new or plan.waiting or snapshot.trouble:
            return None
        names = {state.name for state in snapshot.states().values()}
        if not names or not names.isdisjoint(ACTIVE):
            return None
        log.info("all is done" if names == {"done"} else "nothing is left to happen by itself")
        return 0 if names == {"done"} else EXIT_FAILED

    def submit_missing(self) -> Plan:
        with self.ledger.submitting():
            snapshot = catch_up(self.ledger, self.request.target)
            plan = self.request.plan(snapshot, watching=self.request.watching)
            plan.new = self._ours(plan.new, snapshot)
            # A clean slate for what is submitted by a wish, not for what goes on by itself
            goes_on = {
                name
                for name in self.seen & snapshot.records.keys()
                if snapshot.state(name).name == "stopped"
            }
            _start_over(self.ledger, (job for job in plan.new if job.name not in goes_on))
            try:
                count = submit(self.ledger, self.request.target, plan.new, snapshot.active_ids())
            finally:
                # All that have a number by now, whoever submitted them
                for name, record in self.ledger.records().items():
                    if record.id:
                        self.seen.add(name)
        _say(plan, f"submitted in {count} arrays")
        return plan

    def _ours(self, new: Sequence[Job], snapshot: Snapshot) -> list[Job]:
        out: dict[str, Job] = {}
        for job in new:  # needs come earlier in the list
            # What waited for a job that now goes on was cancelled by Slurm, not by somebody
            behind = any(need in self.seen and need in out for need in job.needs)
            stopped = job.name in snapshot.records and snapshot.state(job.name).name == "stopped"
            if job.name not in self.seen or stopped or behind:
                out[job.name] = job
        return list(out.values())


def _missing_here(request: Request) -> tuple[list[Job], bool]:
    snapshot = catch_up(request.ledger, request.target)
    plan = request.plan(snapshot, watching=request.watching)
    cluster = request.target.cluster
    if plan.new or not request.watching:  # a watcher that finds nothing says nothing
        at_once = f"{cluster.jobs} at a time" if cluster.kind == "local" else "one by one"
        _say(plan, f"to run, {at_once}")
    return plan.new, bool(plan.waiting) or not (plan.new or plan.known)


def _say(plan: Plan, what: str) -> None:
    counts: Counter[str] = Counter(state.name for state in plan.known.values())
    parts = [f"{len(plan.new)} jobs {what if plan.new else 'missing'}"]
    parts += _counted(counts)
    log.info(", ".join(parts))
    if counts["failed"]:
        log.info("`backbench launch retry` starts the failed ones again")
    for path in plan.waiting:
        log.info(
            f"waiting for {path}: no {path}/{CHECKPOINT_FILE} yet; run this again when it is"
            " there, or --watch"
        )


def _counted(counts: Counter[str]) -> list[str]:
    return [f"{count} {name}" for name, count in sorted(counts.items())]


def _start_over(ledger: Ledger, jobs: Iterable[Job]) -> None:
    for job in jobs:
        ledger.forgive(job)


def _sleep(stop: StopFlag, interval: float) -> bool:
    """Whether the sleep was cut short by a signal."""
    end = time.monotonic() + interval
    while time.monotonic() < end and not stop.requested:
        time.sleep(0.1)
    return bool(stop.requested)


# --- on this machine ---------------------------------------------------------------------------


def _run_here(
    ledger: Ledger,
    target: Target,
    find: Callable[[], tuple[list[Job], bool]],
    *,
    interval: float | None = None,
) -> int:
    """kind local: N processes at a time; kind debug: one job after the other, on the terminal.

    `find` gives the jobs to run, and whether there is more to wait for; with an `interval` it is
    asked again and again, until there is not and all are over.
    """
    cluster = target.cluster
    batches = _Batches(ledger, target, find)
    next_look = -math.inf

    def refill() -> bool:
        nonlocal next_look
        if time.monotonic() > next_look:
            next_look = math.inf if interval is None else time.monotonic() + interval
            for job in batches.next(without=pool.outcomes):
                pool.add(Attempt.on(cluster, job, ledger))
        return interval is not None and batches.more_to_come

    with ledger.running_pool(batches.pool), StopFlag() as stop:
        pool = JobPool(ledger.runs, at_once=cluster.jobs, gpus=cluster.gpus)
        _adopt_left_running(pool, cluster)
        if cluster.kind == "debug":
            return _debug(ledger, cluster, batches.next(), stop)
        if not pool.run(stopped=lambda: bool(stop.requested), refill=refill):
            log.info(
                f"stopped by {stop.requested}: running jobs have saved; the same command continues"
            )
            return EXIT_PREEMPTED
        counts: Counter[str] = Counter(pool.outcomes.values())
        log.info(", ".join(_counted(counts)) or "nothing to do")
        return EXIT_FAILED if counts.keys() - {"done"} else 0


class _Batches:
    """What a pool of this machine is given to run: the missing jobs, on record as its own."""

    def __init__(
        self, ledger: Ledger, target: Target, find: Callable[[], tuple[list[Job], bool]]
    ) -> None:
        self.ledger, self.target, self.find = ledger, target, find
        self.more_to_come = True
        self.pool = uuid.uuid4().hex[:12]  # its number, as its lock tells it to others
        self._looks = itertools.count()

    def next(self, without: Container[str] = ()) -> list[Job]:
        """The jobs that are missing now, with a clean slate; those that this pool ended are not."""
        found, self.more_to_come = self.find()
        jobs = [job for job in found if job.name not in without]
        uid = f"{self.pool}-{next(self._looks)}"  # begins with the pool's number: `Ledger.pool`
        if jobs:
            self.ledger.write_submission(self.target.submission(uid, jobs))
        _start_over(self.ledger, jobs)
        return jobs


def _adopt_left_running(pool: JobPool, cluster: Cluster) -> None:
    """Jobs of a launcher that was killed: they run on, and count among those at a time."""
    snapshot = Snapshot(pool.ledger)
    for name, record in snapshot.records.items():
        if record.submission.kind == "local" and snapshot.status(name)["state"] == "running":
            job = dataclasses.replace(record.job, needs=(), after=())  # it has started already
            pool.adopt(Attempt.on(cluster, job, pool.ledger))


def _debug(ledger: Ledger, cluster: Cluster, jobs: Sequence[Job], stop: StopFlag) -> int:
    for job in jobs:
        if stop.requested:
            break
        log.info(f"start  {job.name}")
        attempt = Attempt.on(cluster, job, ledger)
        attempt.show = True
        with stop.told_to(partial(attempt.ask_to_stop, "stopped", signal.SIGTERM)):
            outcome = attempt.run()
        if outcome != "done" and not stop.requested:
            raise Failed(f"{job.name}: {outcome}: {ledger.status(job).get('reason')}")
        if outcome != "done":
            break
    else:
        return 0
    log.info(f"stopped by {stop.requested}; the same command continues")
    return EXIT_PREEMPTED


# --- status, retry, cancel ---------------------------------------------------------------------


def show_status(args: argparse.Namespace) -> int:
    ledger = Ledger(args.out)
    if args.json:
        states = Snapshot(ledger).states()
        as_json = {name: dataclasses.asdict(state) for name, state in states.items()}
        print(json.dumps(as_json, indent=1))
        return 0
    if args.once or not sys.stdout.isatty():
        print(status_text(Snapshot(ledger), width=400), flush=True)
        return 0
    with StopFlag() as stop:
        while True:
            snapshot = Snapshot(ledger)
            text = status_text(snapshot, os.get_terminal_size().columns)
            print(f"{CLEAR}{text}", flush=True)
            # When nothing is left to happen there is nothing left to watch
            active = any(state.name in ACTIVE for state in snapshot.states().values())
            if not active or _sleep(stop, 2.0):
                return 0


def _chosen(snapshot: Snapshot, patterns: Sequence[str], states: Container[str]) -> list[str]:
    """Jobs in one of the states whose name holds one of the patterns; any name without patterns."""
    named = 0
    out = []
    for name in snapshot.records:
        if not patterns or any(part in name for part in patterns):
            named += 1
            if snapshot.state(name).name in states:
                out.append(name)
    if patterns and not named:
        raise BadInput(f"no job's name holds '{patterns[0]}'; `backbench launch status` lists them")
    return out


def retry(args: argparse.Namespace) -> int:
    """Jobs that came to nothing go where they were submitted first, with a clean slate.

    Their commands are the stored ones, checked; the cluster is one of ours, or that of the command
    line (`stored`).
    """
    ledger = Ledger(args.out)
    here: list[Callable[[], int]] = []
    names, changes, told = _told(args)
    with ledger.submitting():
        snapshot = catch_up(ledger, told)
        chosen = _chosen(snapshot, names, (*UNSUCCESSFUL, "stopped"))
        # Each goes back where it was: one submission's cluster is not another's
        by_place: dict[tuple[str, tuple[str, ...], str], list[Job]] = defaultdict(list)
        for name in chosen:
            record = snapshot.records[name]
            was = record.submission
            stored.check_command(record.job, ledger.runs)
            by_place[was.cluster, was.cluster_overrides, was.grid].append(record.job)
        for (file, overrides, grid), jobs in by_place.items():
            given = told.cluster if told else None
            cluster, kept = stored.cluster_of(file, overrides, given, changes)
            target = Target(cluster, kept, grid)
            check_resources(target.cluster, jobs)
            left = without_done(jobs, {}, snapshot)
            if target.cluster.kind == "slurm":
                _start_over(ledger, jobs)
                count = submit(ledger, target, left, snapshot.active_ids())
                log.info(f"{len(jobs)} jobs submitted again in {count} arrays")
            else:  # below: they take as long as they take, and others may submit meanwhile
                here.append(partial(_run_here, ledger, target, partial(_as_found, left)))
    if not chosen:
        log.info("no job failed, was lost or was cancelled")
    status = 0
    for later in here:
        status = max(status, later())
        if status == EXIT_PREEMPTED:
            break
    return status


def _told(args: argparse.Namespace) -> tuple[list[str], list[str], Target | None]:
    """What the command line says: parts of names, changes to the cluster, and the cluster."""
    # cluster.a.b=c changes a key of the cluster's file, any other word is part of a name
    changes = [text for text in args.names if text.startswith("cluster.") and "=" in text]
    names = [text for text in args.names if text not in changes]
    changes = [text.removeprefix("cluster.") for text in changes]
    if args.cluster is None:
        return names, changes, None
    return names, changes, Target(read_cluster(args.cluster, changes), tuple(changes), "")


def _as_found(jobs: Sequence[Job]) -> tuple[list[Job], bool]:
    """These jobs and no others, for `_run_here`."""
    return list(jobs), False


def cancel(args: argparse.Namespace) -> int:
    """Stop jobs for good: queued ones never start, running ones are told to save and end."""
    ledger = Ledger(args.out)
    names, _, told = _told(args)
    snapshot = catch_up(ledger, told)
    chosen = _chosen(snapshot, names, (*ACTIVE, "stopped", "lost"))
    ids: set[str] = set()
    for name in chosen:
        # The mark first: a job that starts or ends meanwhile finds it and ends as cancelled
        record = snapshot.records[name]
        ledger.mark_cancelled(record.job, on=True)
        if record.submission.kind == "slurm" and record.id:
            # A number alone may be anybody's job by now, or what somebody wrote into the record
            if snapshot.on_slurm(record):
                ids.add(record.id)
        elif ledger.running(record.job):
            _end_here(snapshot, name)
    slurm_client.end(_whole_arrays(ids, snapshot))
    if snapshot.trouble:
        raise Failed(f"{snapshot.trouble}; {len(chosen)} jobs are marked: run this again later")
    log.info(f"{len(chosen)} jobs cancelled")
    return 0


def _end_here(snapshot: Snapshot, name: str) -> None:
    """Tell the process above a job's command to end it; a process id means nothing elsewhere."""
    attempt = snapshot.status(name)["attempts"][-1]
    host = attempt.get("host")
    if host != socket.gethostname():
        log.warning("%s runs on %s: cancel it there, or it ends by itself", name, host)
        return
    if not snapshot.ledger.runs_it(attempt["pid"], snapshot.records[name].job):
        log.warning("%s: process %s does not run it: end it by hand", name, attempt["pid"])
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(attempt["pid"], signal.SIGTERM)


def _whole_arrays(ids: set[str], snapshot: Snapshot) -> list[str]:
    """For scancel: the array's number where all of its jobs are among `ids`, else one by one."""
    mixed = set()
    for record in snapshot.records.values():
        if record.id and record.id not in ids:
            mixed.add(record.id.split("_")[0])
    out = set()
    for number in ids:
        array = number.split("_")[0]
        out.add(number if array in mixed else array)
    return sorted(out)
