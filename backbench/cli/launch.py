"""`backbench launch`: the missing jobs of a grid, on Slurm or on this machine. `run`, `retry` and
`cancel` submit and record (`slurm.catch_up`); `status` and `run --dry-run` write nothing."""

import contextlib
import os
import shlex
import signal
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backbench.datasets import outside
from backbench.errors import (
    EXIT_FAILED,
    EXIT_PREEMPTED,
    BadInput,
    Failed,
    no_folder,
)
from backbench.launch import slurm_client
from backbench.launch.clusters import (
    Cluster,
    check_resources,
    read_cluster,
    recorded_cluster,
)
from backbench.launch.grid import Grid, read_grid
from backbench.launch.job import Job, check_recorded_command
from backbench.launch.local import run_here
from backbench.launch.plan import CommandCheck, Plan, make_plan, plan_text, without_done
from backbench.launch.records import Ledger
from backbench.launch.slurm import catch_up, submit
from backbench.launch.view import ACTIVE, UNSUCCESSFUL, Snapshot, counted, status_text
from backbench.requests.launch import (
    LaunchCancelRequest,
    LaunchRetryRequest,
    LaunchRunRequest,
    LaunchStatusRequest,
    NamedJobs,
)
from backbench.requests.options import Outcome, Request
from backbench.runs.folder import CHECKPOINT_FILE, DEMO_FILE
from backbench.runs.state import StopFlag
from backbench.runs.terminal import log

CLEAR = "\x1b[H\x1b[2J"  # the terminal
REFRESH_S = 2.0  # of `status` on a terminal


def run_grid(request: LaunchRunRequest, check: Callable[[Request], None]) -> Outcome:
    """Start what is missing of a grid; `check` refuses a command that cannot run."""
    # cluster.a.b=c changes a key of the cluster's file, a.b=c one of the grid's
    of_cluster, of_grid = _split_overrides(request.overrides)
    grid = read_grid(request.grid, of_grid)
    data = request.data or grid.data
    if data is not None:
        # Before the ledger is written there. Each command's datasets are checked with the command
        outside.refuse_inside(Path(data), (), request.out)
    cluster = read_cluster(request.cluster, of_cluster)
    grid_run = GridRun(
        ledger=Ledger(request.out),
        grid=grid,
        cluster=cluster,
        where=f"grid {request.grid}",
        data=request.data,
        interval=request.interval if request.watch else None,
        commands=CommandCheck(check),
        data_later=request.data_later,
    )
    if request.dry_run:
        snapshot = Snapshot(grid_run.ledger)
        # This plan also shows what --watch would wait for.
        plan = grid_run.plan(snapshot, watching=True)
        if not (plan.new or plan.known or plan.waiting):
            # This one refuses the grid, and says which of its names match nothing.
            grid_run.plan(snapshot, watching=False)
        sys.stdout.write(plan_text(plan, cluster))
        grid_run.refuse_missing()
        return Outcome()
    if cluster.kind == "slurm":
        return Outcome(status=grid_run.on_slurm())
    status = run_here(
        grid_run.ledger,
        cluster,
        grid.name,
        grid_run.missing,
        interval=grid_run.interval,
    )
    return Outcome(status=status)


def _split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of the cluster, without `cluster.`, and the other words."""
    of_cluster: list[str] = []
    others: list[str] = []
    for word in words:
        if word.startswith("cluster.") and "=" in word:
            of_cluster.append(word.removeprefix("cluster."))
        else:
            others.append(word)
    return of_cluster, others


@dataclass
class GridRun:
    """One `launch run`: a grid, where it runs, the folder of its runs, and what it saw there."""

    ledger: Ledger
    grid: Grid
    cluster: Cluster
    where: str  # the grid, in messages
    data: Path | None
    interval: float | None  # seconds between looks of --watch
    commands: CommandCheck
    data_later: bool = False  # go on without datasets that are not here
    # Jobs that this launcher has seen on Slurm. If they are cancelled or lost later, they stay so
    seen: set[str] = field(default_factory=set)
    # Jobs that wait for the old Slurm number of a job that was submitted again. Slurm cancels them,
    # which is nobody's wish, so they are submitted again, too
    orphans: set[str] = field(default_factory=set)

    def plan(self, snapshot: Snapshot, *, watching: bool) -> Plan:
        """Find what is missing; BadInput where the cluster cannot run it."""
        plan = make_plan(
            self.grid,
            snapshot,
            where=self.where,
            data=self.data,
            watching=watching,
            data_later=self.data_later,
        )
        check_resources(self.cluster, plan.new)
        if self.cluster.command is None:  # another program knows its own words
            self.commands.refuse(plan.new, self.where)
        return plan

    def refuse_missing(self) -> None:
        """Raise BadInput for jobs whose datasets are not here."""
        self.commands.refuse_missing(self.where, later=self.data_later)

    def missing(self) -> tuple[list[Job], bool]:
        """Return the jobs to run on this machine, and whether there will be more."""
        watching = self.interval is not None
        plan = self.plan(catch_up(self.ledger, self.cluster), watching=watching)
        self.refuse_missing()
        if plan.new or not watching:  # a watcher that finds nothing says nothing
            at_once = "one by one"
            if self.cluster.kind == "local":
                at_once = f"{self.cluster.jobs} at a time"
            _say(plan, f"to run, {at_once}", self.ledger.runs)
        # A grid without any job is one whose globs match no checkpoint yet.
        without_jobs = not plan.new and not plan.known
        more_to_come = bool(plan.waiting) or without_jobs
        return plan.new, more_to_come

    def on_slurm(self) -> int:
        """Submit what is missing, once or, with --watch, at each look; return the exit status."""
        if self.interval is None:
            self.submit_missing()
            return 0
        with StopFlag() as stop:
            exit_code = self.look(first=True)
            while exit_code is None:
                if _sleep(stop, self.interval):
                    log.info("stopped watching; the jobs go on")
                    return 0
                exit_code = self.look(first=False)
        return exit_code

    def look(self, *, first: bool) -> int | None:
        """Look once for --watch; return the exit status where nothing is left to happen."""
        plan: Plan | None = None
        try:
            plan = self.submit_missing()
        except (Failed, BadInput) as error:
            # Slurm does not answer or takes no more now, or another launcher submits. What is
            # wrong at the first look is wrong with the command.
            if isinstance(error, BadInput) and first:
                raise
            log.warning("%s; looking again in %.0f s", error, self.interval)
        snapshot = Snapshot(self.ledger)
        print(
            f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {status_text(snapshot)}", flush=True
        )
        if plan is None or plan.new or plan.waiting or snapshot.trouble:
            return None
        names = {state.name for state in snapshot.states.values()}
        if not names or not names.isdisjoint(ACTIVE):
            return None
        log.info(
            "all is done"
            if names == {"done"}
            else "nothing is left to happen by itself"
        )
        return 0 if names == {"done"} else EXIT_FAILED

    def submit_missing(self) -> Plan:
        """Submit to Slurm what is missing, without the seen jobs that somebody cancelled."""
        ledger = self.ledger
        with ledger.submitting():
            snapshot = catch_up(ledger, self.cluster)
            plan = self.plan(snapshot, watching=self.interval is not None)
            self.refuse_missing()
            # 1. A stopped job only ran out of time on a node that could not requeue it: it goes on
            states = snapshot.states
            stopped = {
                n for n in self.seen & states.keys() if states[n].name == "stopped"
            }
            # 2. So does what waited for such a job, and was cancelled by Slurm for that
            new: dict[str, Job] = {}
            for job in plan.new:  # needs come earlier in the list
                behind = any(need in self.seen and need in new for need in job.needs)
                unseen = job.name not in self.seen or job.name in self.orphans
                if unseen or job.name in stopped or behind:
                    new[job.name] = job
            plan.new = list(new.values())
            # 3. What waits still, for the number that such a job had, Slurm will cancel soon
            goes_on = new.keys() & self.seen
            self.orphans -= new.keys()
            for name, state in plan.known.items():
                needs = (
                    snapshot.records[name].job.needs if state.name == "waiting" else ()
                )
                if goes_on.intersection(needs):
                    self.orphans.add(name)
            # 4. Earlier failures of jobs that are submitted anew are forgotten; a stopped job that goes
            #    on keeps its record
            for name in new.keys() - stopped:
                ledger.forgive(new[name])
            try:
                active = snapshot.active_ids()
                count = submit(ledger, self.cluster, self.grid.name, plan.new, active)
            finally:
                self.seen |= {
                    name for name, record in ledger.records().items() if record.id
                }
        _say(plan, f"submitted in {count} arrays", ledger.runs)
        return plan


def advised(action: str, runs: Path) -> str:
    """Return a command of `launch` on RUNS, to be copied."""
    return f"`{shlex.join(['backbench', 'launch', action, '--out', str(runs)])}`"


def _say(plan: Plan, what: str, runs: Path) -> None:
    counts: Counter[str] = Counter(state.name for state in plan.known.values())
    if not plan.new:
        what = "missing"
    new = f"{len(plan.new)} jobs {what}"
    log.info(", ".join([new, *counted(counts)]))
    if counts["failed"]:
        log.info(f"{advised('retry', runs)} starts the failed ones again")
    for file, names in plan.outdated.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        log.warning(
            f"{file}: holds other weights than {runs / names[0]}{more} measured; remove what is"
            " outdated (--dry-run lists it) and run again"
        )
    for path in plan.waiting:
        log.info(
            f"waiting for {path}: no {path}/{CHECKPOINT_FILE} yet; run again then, or --watch"
        )


def _sleep(stop: StopFlag, seconds: float) -> bool:
    """Sleep; True where a signal cut it short."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not stop.requested:
        time.sleep(0.1)
    return bool(stop.requested)


def _ledger_of(runs: Path) -> Ledger:
    """Return the ledger of a folder of runs. BadInput for a folder that is not there: who cancels
    there would believe that jobs elsewhere had ended."""
    if not runs.exists():
        raise BadInput(
            f"--out {runs}: {no_folder(runs)}; give the folder of a `backbench launch run`"
        )
    return Ledger(runs)


def show_status(request: LaunchStatusRequest) -> Outcome:
    ledger = Ledger(request.out)
    if request.json:
        return Outcome(document=Snapshot(ledger).states)
    if request.once or not sys.stdout.isatty():
        print(status_text(Snapshot(ledger), width=400), flush=True)
        return Outcome()
    with StopFlag() as stop:
        while True:
            snapshot = Snapshot(ledger)
            text = status_text(snapshot, os.get_terminal_size().columns)
            print(f"{CLEAR}{text}", flush=True)
            # When nothing is left to happen there is nothing left to watch
            active = any(state.name in ACTIVE for state in snapshot.states.values())
            if not active or _sleep(stop, REFRESH_S):
                return Outcome()


def _named_cluster(request: NamedJobs) -> tuple[Cluster | None, list[str]]:
    """Return the cluster of the command line, if there is one, and the patterns of jobs' names."""
    overrides, patterns = _split_overrides(request.names)
    if request.cluster is not None:
        return read_cluster(request.cluster, overrides), patterns
    if overrides:
        raise BadInput(f"cluster.{overrides[0]}: say of which cluster, --cluster FILE")
    return None, patterns


def _chosen(
    snapshot: Snapshot, patterns: Sequence[str], states: Container[str]
) -> list[str]:
    """Return the jobs in one of the states whose name holds one of the patterns, if any."""
    named = []
    for name in snapshot.records:
        if not patterns or any(part in name for part in patterns):
            named.append(name)
    if patterns and not named:
        raise BadInput(
            f"no job's name holds '{patterns[0]}';"
            f" {advised('status', snapshot.ledger.runs)} lists them"
        )
    return [name for name in named if snapshot.states[name].name in states]


def retry(request: LaunchRetryRequest) -> Outcome:
    """Submit the jobs that came to nothing again, where they were before, with a clean slate. Their
    commands are the recorded ones, checked; the cluster is ours or the command line's."""
    ledger = _ledger_of(request.out)
    given, patterns = _named_cluster(request)
    here: list[tuple[Cluster, str, list[Job]]] = []
    with ledger.submitting():
        snapshot = catch_up(ledger, given)
        chosen = _chosen(snapshot, patterns, (*UNSUCCESSFUL, "stopped"))
        if chosen and (ledger.runs / DEMO_FILE).is_file():
            runs = shlex.quote(str(ledger.runs))
            again = f"`backbench demo --out {runs}`, with its --size, continues them"
            raise BadInput(f"{ledger.runs}: its jobs are the demo's: {again}")
        # Each goes back where it was: one submission's cluster is not another's
        by_place: dict[tuple[str, tuple[str, ...], str], list[Job]] = defaultdict(list)
        for name in chosen:
            job, was = snapshot.records[name].job, snapshot.records[name].submission
            check_recorded_command(job, ledger.runs)
            by_place[was.cluster, was.cluster_overrides, was.grid].append(job)
        for (file, overrides, grid), jobs in by_place.items():
            cluster = recorded_cluster(file, overrides, given)
            check_resources(cluster, jobs)
            left = without_done(jobs, snapshot.states)
            if cluster.kind == "slurm":
                for job in jobs:
                    ledger.forgive(job)
                count = submit(ledger, cluster, grid, left, snapshot.active_ids())
                log.info(f"{len(jobs)} jobs submitted again in {count} arrays")
            else:  # below: they take as long as they take, and others may submit meanwhile
                here.append((cluster, grid, left))
    if not chosen:
        of_these = f" of {' '.join(patterns)}" if patterns else ""
        log.info(f"no job{of_these} failed, was lost or was cancelled")
    status = 0
    for cluster, grid, jobs in here:

        def these_only(jobs: list[Job] = jobs) -> tuple[list[Job], bool]:
            return jobs, False  # there are no more to wait for

        status = max(status, run_here(ledger, cluster, grid, these_only))
        if status == EXIT_PREEMPTED:
            break
    return Outcome(status=status)


def cancel(request: LaunchCancelRequest) -> Outcome:
    """Stop jobs for good: queued ones never start, running ones are told to save and end."""
    ledger = _ledger_of(request.out)
    given, patterns = _named_cluster(request)
    snapshot = catch_up(ledger, given)
    chosen = _chosen(snapshot, patterns, (*ACTIVE, "stopped", "lost"))
    ids: set[str] = set()
    left = 0  # jobs that go on, as their process is out of reach
    for name in chosen:
        # The mark first: a job that starts or ends meanwhile finds it and ends as cancelled
        record = snapshot.records[name]
        ledger.mark_cancelled(record.job)
        if record.submission.kind == "slurm" and record.id:
            # A number alone may be anybody's job by now, or what somebody wrote into the record
            if snapshot.on_slurm(record):
                ids.add(record.id)
        elif ledger.running(record.job):
            was_ended = _end_here(snapshot, name)
            if not was_ended:
                left += 1
    # Those that run go last: a place that they leave would be taken by one that still waits
    slurm_client.end(
        sorted(ids, key=lambda id: (snapshot.queue[id].state == "RUNNING", id))
    )
    if snapshot.trouble:
        raise Failed(
            f"{snapshot.trouble}; {len(chosen)} jobs are marked: run this again later"
        )
    note = f", {left} marked only: their processes go on (see above)" if left else ""
    log.info(f"{len(chosen) - left} jobs cancelled{note}")
    return Outcome()


def _end_here(snapshot: Snapshot, name: str) -> bool:
    """Tell the process above a job to end; False if it cannot be told, as on another machine."""
    attempt = snapshot.status(name)["attempts"][-1]
    host = attempt.get("host")
    if host != socket.gethostname():
        log.warning("%s runs on %s: cancel it there, or it ends by itself", name, host)
        return False
    if not snapshot.ledger.runs_it(attempt["pid"], snapshot.records[name].job):
        log.warning(
            "%s: process %s does not run it: end it by hand", name, attempt["pid"]
        )
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(attempt["pid"], signal.SIGTERM)
    return True
