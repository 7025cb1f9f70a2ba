"""Plans a grid: which jobs are missing, and which of them go to Slurm as one array."""

import dataclasses
import shlex
from collections import defaultdict
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from backbench.datasets import availability
from backbench.errors import BadInput
from backbench.launch.clusters import Cluster, Resources
from backbench.launch.expansion import Expansion
from backbench.launch.grid import Grid
from backbench.launch.job import Job, command_kind, finished
from backbench.launch.view import ACTIVE, Snapshot, State, StateName
from backbench.recipes import fast
from backbench.records import owed_rows
from backbench.requests.options import Request
from backbench.requests.parsing import parse
from backbench.runs.terminal import log
from backbench.weights import header

# `launch run` submits jobs in these states again, but a blocked one only if what it needs has not
# failed. Failed jobs wait for `launch retry`, unless their command has changed.
RESUBMITTED: tuple[StateName, ...] = ("cancelled", "stopped", "lost", "blocked")
# Images of ImageNet's size that one core of an Intel Xeon prepares in a second
# (benchmarks/ratios.csv). A core of an EPYC prepares three times as many.
IMAGES_A_CORE = {"pretrain": 42, "pretrain --fast": 168, "one crop": 250}
# The commands of these verbs are checked before they are submitted. The other verbs name files that
# may be made before they start, or checking them takes as long as running them.
CHECKED = ("pretrain", "linear", "ood", "finetune", "semisup", "analyze")
# A detector's files are read where it runs, but whether its dataset is here is said before, too.
WITH_DATASETS = (*CHECKED, "detect")


@dataclass
class Plan:
    """The jobs of a grid: those to submit, and the others with how they stand."""

    new: list[Job]
    known: dict[str, State]  # by name
    waiting: list[str]  # folders of pretrainings without a checkpoint yet
    # Names of the jobs that train once more, with another seed
    again: set[str] = field(default_factory=set)
    # A checkpoint's file -> the jobs that are done with other weights than it holds now
    outdated: dict[str, list[str]] = field(default_factory=dict)


def make_plan(
    grid: Grid,
    snapshot: Snapshot,
    *,
    where: str,
    data: Path | None,
    watching: bool,
    data_later: bool = False,
) -> Plan:
    """Find which of a grid's jobs are missing. `where` names the grid in messages."""
    runs = snapshot.ledger.runs
    # 1. The grid's jobs. The cells of a pack that was submitted before stay with that pack, which
    #    then goes again as it was, with the checkpoints of then.
    claimed: dict[str, str] = {}  # cell -> name of the job that was submitted for it
    for name, record in snapshot.records.items():
        for cell in record.job.cells:
            claimed[cell] = name
    wanted = Expansion(
        grid,
        runs,
        where=where,
        data=data,
        claimed=claimed,
        watching=watching,
        data_later=data_later,
    )
    packs = [snapshot.records[name].job for name in wanted.packed]
    # 2. Which of them are missing
    states = dict(snapshot.states)  # of this grid's jobs and of all earlier ones
    new: dict[str, Job] = {}
    known: dict[str, State] = {}
    for job in (*wanted.jobs, *packs):  # needs come earlier in the list
        # A job without a record counts as done as long as its files say so: they are the only
        # proof. They may be there without a record, where the records were lost, and be gone in
        # spite of one, where somebody wants the number anew.
        state = states.get(job.name, State("done"))
        lost_its_files = state.name == "done" and not finished(job, runs)
        is_mended = state.name == "failed" and _command_changed(job, snapshot)
        if lost_its_files or is_mended or state.name in RESUBMITTED:
            failed_need = _failed_need(job, states, new)
            if failed_need is None:
                new[job.name] = job
                continue
            state = State("blocked", failed_need)
        known[job.name] = state
        states[job.name] = state
    done = {name for name, state in known.items() if state.name == "done"}
    return Plan(
        new=without_done(list(new.values()), states),
        known=known,
        waiting=wanted.waiting,
        again=wanted.again,
        outdated=_outdated(wanted.measures, done, runs),
    )


def _command_changed(job: Job, snapshot: Snapshot) -> bool:
    """Return True if a job's command is not the recorded one, as where another folder of data or a
    renamed checkpoint is given now. `launch retry` would repeat the old one."""
    record = snapshot.records.get(job.name)
    return record is not None and record.job.argv != job.argv


def _outdated(
    measures: Mapping[str, Sequence[str]], done: Container[str], runs: Path
) -> dict[str, list[str]]:
    """Return checkpoint file -> its jobs that are done with other weights than it holds now.

    A pretraining that was made anew lies in the folder of the old one, whose evaluations are done."""
    digests: dict[str, str | None] = {}
    found: dict[str, list[str]] = defaultdict(list)
    for name, files in measures.items():
        if name not in done:
            continue
        measured = {number[0] for number in owed_rows.numbers(runs / name)}
        for file in files:
            if file not in digests:
                digests[file] = header.digest(Path(file))
            digest = digests[file]
            if digest is not None and digest not in measured:
                found[file].append(name)
    return found


def _failed_need(
    job: Job, states: Mapping[str, State], new: Mapping[str, Job]
) -> str | None:
    """Return the first job that this one needs, that failed, and that is not submitted again."""
    for need in job.needs:
        if need in new or need not in states:
            continue
        if states[need].name in ("failed", "blocked"):
            return f"{need} {states[need].name}"
    return None


def without_done(new: Sequence[Job], states: Mapping[str, State]) -> list[Job]:
    """Return the jobs without the dependencies that are over."""
    names = {job.name for job in new}
    on_the_way = set(names)
    for name, state in states.items():
        if state.name in ACTIVE:
            on_the_way.add(name)
    out = []
    for job in new:
        needs = tuple(name for name in job.needs if name in on_the_way)
        # `after` only fills a cache: what is on Slurm already is not worth a dependency
        after = tuple(name for name in job.after if name in names)
        out.append(dataclasses.replace(job, needs=needs, after=after))
    return out


@dataclass(frozen=True)
class CommandCheck:
    """Checks a grid's commands before they are submitted: an error would fail job by job."""

    check: Callable[[Request], None]  # BadInput for an unknown recipe or key
    # Kinds of commands that were checked
    seen: set[tuple[str, ...]] = field(default_factory=set)
    # What is wrong with a dataset -> the first job that would stop for it
    missing: dict[str, str] = field(default_factory=dict)

    def refuse(self, jobs: Iterable[Job], where: str) -> None:
        """Raise BadInput for an unknown recipe or key; note a dataset that is not here."""
        for job in jobs:
            kind = command_kind(job.argv)
            if job.verb not in WITH_DATASETS or kind in self.seen:
                continue
            self.seen.add(kind)
            request = parse(job.argv)
            try:
                if job.verb in CHECKED:
                    self.check(request)
                availability.out_inside(request)
            except BadInput as error:
                raise BadInput(f"{where}: {job.name}: {error}") from None
            try:
                availability.datasets_there(request)
            except BadInput as error:
                self.missing.setdefault(str(error), job.name)

    def refuse_missing(self, where: str, *, later: bool) -> None:
        """Raise BadInput for the datasets that are not here, as their jobs would fail one by one;
        warn of them where they come `later`, or where the jobs run."""
        if later:
            for wrong, job in self.missing.items():
                log.warning("%s and jobs like it would stop here: %s", job, wrong)
            self.missing.clear()
        if self.missing:
            # What would help stands behind the first semicolon, and is said once for all
            told = [
                f"{wrong.partition('; ')[0]} (for {job})"
                for wrong, job in self.missing.items()
            ]
            raise BadInput(
                f"{where}: data are missing: {', '.join(told)}; no job is started; `backbench data"
                " list --data ROOT` says what to get, and --data-later goes on where the nodes have"
                " them"
            )


class JobArray(NamedTuple):
    """Jobs that go to Slurm as one array: one set of resources and of dependencies."""

    resources: Resources
    jobs: list[Job]
    needs: tuple[str, ...]  # names of jobs
    after: tuple[int, ...]  # numbers of earlier arrays


def arrays(cluster: Cluster, jobs: Sequence[Job]) -> Iterator[JobArray]:
    """Put jobs into as few arrays as possible.

    An array of Slurm has one dependency for all of its jobs. The jobs of an array share the jobs
    that they need; for `after`, an array waits for whole earlier arrays.
    """
    # 1. A job's level is 0 without dependencies in the list, else one more than the highest of
    #    theirs. So an array depends on arrays of lower levels only, which have their numbers.
    level: dict[str, int] = {}
    by_level: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:  # needs and after come earlier in the list
        levels = [level[name] for name in (*job.needs, *job.after) if name in level]
        level[job.name] = 1 + max(levels, default=-1)
        by_level[level[job.name]].append(job)
    number_of: dict[str, int] = {}  # job name -> number of its array
    number = 0
    for depth in sorted(by_level):
        # 2. Within a level, jobs go together that ask for the same and depend on the same.
        groups: dict[tuple[object, ...], JobArray] = {}
        for job in by_level[depth]:
            resources = cluster.resources_for(job)
            needs = tuple(sorted(job.needs))
            after = tuple(sorted({number_of[n] for n in job.after if n in number_of}))
            key = (resources, needs, after)
            if key not in groups:
                groups[key] = JobArray(resources, [], needs, after)
            groups[key].jobs.append(job)
        # 3. A group is cut into arrays of at most `max_array` jobs.
        for group in groups.values():
            for start in range(0, len(group.jobs), cluster.max_array):
                part = group.jobs[start : start + cluster.max_array]
                for job in part:
                    number_of[job.name] = number
                number += 1
                yield group._replace(jobs=part)


def plan_text(plan: Plan, cluster: Cluster) -> str:
    """Show every array with its jobs, what is skipped and why, and the sums."""
    lines = []
    for number, array in enumerate(arrays(cluster, plan.new)):
        resources = array.resources
        parts = [
            f"{len(array.jobs)} jobs on {resources.partition or cluster.name}",
            f"{resources.nodes} node(s) x {resources.gpus} GPUs",
            f"{resources.cpus_per_node} CPUs",
        ]
        parts += [f"after {name}" for name in array.needs]
        parts += [f"after array {earlier}" for earlier in array.after]
        lines.append(f"array {number}: {', '.join(parts)}")
        if resources.gpus:
            lines.append(_feeding(array))
        for job in array.jobs:
            lines.append(f"  {job.name}")
            if fast.SWITCH in job.argv:
                # The name of a fast pretraining looks like any other's.
                lines.append(f"    backbench {shlex.join(job.argv)}")
    for name, state in plan.known.items():
        lines.append(f"skipped ({state.name}): {name}")
    for file, names in plan.outdated.items():
        lines += [
            f"outdated (other weights than {file} holds now): {name}" for name in names
        ]
    for path in plan.waiting:
        lines.append(f"waiting for a checkpoint: {path}")
    repeated = sum(job.name in plan.again for job in plan.new)
    if repeated:
        lines.append(
            f"{repeated} of them train the grid's first checkpoints again with seeds 1 and 2, without"
            " which no number can be bold; `again=0` leaves them out"
        )
    done = sum(state.name == "done" for state in plan.known.values())
    others = len(plan.known) - done
    lines.append(f"{len(plan.new)} jobs, {done} skipped as done, {others} others")
    return "\n".join(lines) + "\n"


def _feeding(array: JobArray) -> str:
    """Say how many images a second the CPUs that the array asks for give to each GPU."""
    job = array.jobs[0]
    kind = f"{job.verb} --fast" if fast.SWITCH in job.argv else job.verb
    cores = array.resources.cpus_per_node / array.resources.gpus
    least = cores * IMAGES_A_CORE.get(kind, IMAGES_A_CORE["one crop"])
    unit = "images/s in two views" if job.verb == "pretrain" else "images/s"
    return f"  {cores:g} CPUs feed a GPU {least:,.0f} to {3 * least:,.0f} {unit}"
