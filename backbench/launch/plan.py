"""Plans a grid: the jobs that are missing, their arrays on Slurm, and what they will cost. A cost
is the time of ended jobs of the same command: the same recipe, options and data on the same kind of
trunk, cluster and machine. Nothing else is guessed: across recipes a guess is off by any factor."""

import dataclasses
import re
import shlex
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from backbench.datasets import availability
from backbench.errors import BadInput
from backbench.launch.clusters import Cluster, Resources
from backbench.launch.expansion import Expansion
from backbench.launch.grid import Grid
from backbench.launch.job import Job, command_kind, finished
from backbench.launch.records import Status
from backbench.launch.view import ACTIVE, Snapshot, State, StateName
from backbench.recipes import fast
from backbench.requests.options import Request
from backbench.requests.parsing import parse
from backbench.runs.run_progress import seconds
from backbench.runs.terminal import log
from backbench.weights import header

# A run submits these again, blocked ones unless what they need has failed. Failed ones wait for
# `launch retry`.
AGAIN: tuple[StateName, ...] = ("cancelled", "stopped", "lost", "blocked")
KINDS_NAMED = 5  # among those of unknown cost
# Images of ImageNet's size that one core of an Intel Xeon prepares a second: in two views, in two
# fast views, in one centre crop (benchmarks/ratios.csv). An EPYC's makes three times as many
IMAGES_A_CORE = {"pretrain": 42, "pretrain --fast": 168, "": 250}
# Verbs whose commands are checked before they are submitted: the other verbs name files that may be
# made before they start, or their check weighs as much as what they do
CHECKED = ("pretrain", "linear", "ood", "finetune", "semisup", "analyze")
# Overrides of a pretraining that change nothing about the time of one epoch: temperatures and
# weights of the method, rates, names
_NO_MATTER = re.compile(
    r"(epochs|name|expected)=.*|optim\.\w*lr=.*|method\.[\w.]+=-?(\d+\.\d*|\d*e-?\d+|inf)",
    re.DOTALL,
)


@dataclass
class Plan:
    """The jobs of a grid: those to submit, and the others with how they stand."""

    new: list[Job]
    known: dict[str, State]
    waiting: list[str]  # folders of pretrainings without a checkpoint yet
    again: set[str] = field(
        default_factory=set
    )  # jobs that train once more, with another seed


def make_plan(
    grid: Grid, snapshot: Snapshot, *, where: str, data: Path | None, watching: bool
) -> Plan:
    runs = snapshot.ledger.runs
    claimed: dict[str, str] = {}  # cell -> name of the job that was submitted for it
    for name, record in snapshot.records.items():
        claimed.update(dict.fromkeys(record.job.cells, name))
    wanted = Expansion(
        grid, runs, where=where, data=data, claimed=claimed, watching=watching
    )
    # Packs that were submitted before go again as they were, with the checkpoints of then
    packs = [snapshot.records[name].job for name in wanted.packed]
    states = dict(snapshot.states)  # of this grid's jobs and of all earlier ones
    new: dict[str, Job] = {}
    known: dict[str, State] = {}
    for job in (*wanted.jobs, *packs):  # needs come earlier in the list
        state = states.get(job.name, State("done"))
        # Only its files are proof: they are there without any record where the records were lost,
        # and gone in spite of one where somebody wants the number anew
        missing = state.name == "done" and not finished(job, runs)
        if missing or state.name in AGAIN:
            # It stays where one that it needs failed and is not submitted again
            failed = ""
            for need in job.needs:
                was = states[need].name if need in states and need not in new else ""
                if was in ("failed", "blocked"):
                    failed = failed or f"{need} {was}"
            if not failed:
                new[job.name] = job
                continue
            state = State("blocked", failed)
        known[job.name] = states[job.name] = state
    return Plan(
        without_done(list(new.values()), states), known, wanted.waiting, wanted.again
    )


def without_done(new: Sequence[Job], states: Mapping[str, State]) -> list[Job]:
    """Return the jobs without the dependencies that are over."""
    names = {job.name for job in new}
    on_the_way = names | {
        name for name, state in states.items() if state.name in ACTIVE
    }
    out = []
    for job in new:
        needs = tuple(name for name in job.needs if name in on_the_way)
        # `after` only fills a cache: what is on Slurm already is not worth a dependency
        after = tuple(name for name in job.after if name in names)
        out.append(dataclasses.replace(job, needs=needs, after=after))
    return out


@dataclass(frozen=True)
class CommandCheck:
    """Checks a grid's commands before they are submitted, as errors would else fail job by job."""

    check: Callable[[Request], None]  # BadInput for an unknown recipe or key
    seen: set[tuple[str, ...]] = field(
        default_factory=set
    )  # kinds of commands, and warnings

    def refuse(self, jobs: Iterable[Job], where: str) -> None:
        """Raise BadInput for an unknown recipe or key; warn of a dataset that is not here."""
        for job in jobs:
            kind = command_kind(job.argv)
            if job.verb not in CHECKED or kind in self.seen:
                continue
            self.seen.add(kind)
            request = parse(job.argv)
            try:
                self.check(request)
            except BadInput as error:
                raise BadInput(f"{where}: {job.name}: {error}") from None
            try:
                availability.datasets_there(request)
            except BadInput as error:
                if (str(error),) not in self.seen:
                    self.seen.add((str(error),))
                    log.warning(
                        "%s and jobs like it would stop here: %s", job.name, error
                    )


class JobArray(NamedTuple):
    """Jobs that go to Slurm as one array: one set of resources and of dependencies."""

    resources: Resources
    jobs: list[Job]
    needs: tuple[str, ...]  # names of jobs
    after: tuple[int, ...]  # numbers of earlier arrays


def arrays(cluster: Cluster, jobs: Sequence[Job]) -> Iterator[JobArray]:
    """Pack jobs into as few arrays as possible; `needs` stay exact, `after` become whole arrays."""
    # 1. Level of a job: 0 without dependencies in the list, else one more than the highest of
    #    theirs. So an array depends on arrays of lower levels only, which have their numbers.
    level: dict[str, int] = {}
    for job in jobs:  # needs and after come earlier in the list
        before = [level[n] for n in (*job.needs, *job.after) if n in level]
        level[job.name] = 1 + max(before, default=-1)
    by_level: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        by_level[level[job.name]].append(job)
    # 2. Within a level, jobs that ask for the same and depend on the same go together,
    # 3. in parts of at most `max_array`.
    number_of: dict[str, int] = {}
    number = 0
    for depth in sorted(by_level):
        groups: dict[tuple[object, ...], JobArray] = {}
        for job in by_level[depth]:
            needs = tuple(sorted(job.needs))
            after = tuple(sorted({number_of[n] for n in job.after if n in number_of}))
            resources = cluster.resources_for(job)
            key = (resources, needs, after)
            groups.setdefault(key, JobArray(resources, [], needs, after)).jobs.append(
                job
            )
        for group in groups.values():
            for start in range(0, len(group.jobs), cluster.max_array):
                part = group.jobs[start : start + cluster.max_array]
                for job in part:
                    number_of[job.name] = number
                number += 1
                yield group._replace(jobs=part)


def plan_text(plan: Plan, cluster: Cluster, snapshot: Snapshot) -> str:
    """Show every array with its jobs and their cost by past runs, what is skipped, and the sums."""
    estimates = Estimates(snapshot)
    gpu_hours = hours = 0.0
    unknown: Counter[str] = Counter()
    lines = []
    for number, array in enumerate(arrays(cluster, plan.new)):
        resources = array.resources
        parts = [
            f"{len(array.jobs)} jobs on {resources.partition or cluster.name}",
            f"{resources.nodes} node(s) x {resources.gpus} GPUs",
            f"{resources.cpus_per_node} CPUs",
            *(f"after {name}" for name in array.needs),
            *(f"after array {earlier}" for earlier in array.after),
        ]
        lines.append(f"array {number}: {', '.join(parts)}")
        if resources.gpus:
            verb = array.jobs[0].verb
            kind = f"{verb} --fast" if fast.SWITCH in array.jobs[0].argv else verb
            cores = resources.cpus_per_node / resources.gpus
            least = cores * IMAGES_A_CORE.get(kind, IMAGES_A_CORE[""])
            what = "images/s in two views" if verb == "pretrain" else "images/s"
            lines.append(
                f"  {cores:g} CPUs feed a GPU {least:,.0f} to {3 * least:,.0f} {what}"
            )
        for job in array.jobs:
            cost = estimates.seconds(job, resources, cluster)
            lines.append(
                f"  {job.name}  {'unknown' if cost is None else seconds(cost)}"
            )
            if fast.SWITCH in job.argv:  # its name is like the others'
                lines.append(f"    backbench {shlex.join(job.argv)}")
            if cost is None:
                unknown[job.like] += 1
                continue
            hours += cost / 3600
            gpu_hours += cost / 3600 * resources.gpus * resources.nodes
    lines += [f"skipped ({state.name}): {name}" for name, state in plan.known.items()]
    lines += [f"waiting for a checkpoint: {path}" for path in plan.waiting]
    repeated = sum(job.name in plan.again for job in plan.new)
    if repeated:
        lines.append(
            f"{repeated} of them train two checkpoints again with seeds 1 and 2, without which no"
            " number can be bold; `again=0` leaves them out"
        )
    done = sum(state.name == "done" for state in plan.known.values())
    others = len(plan.known) - done
    lines.append(f"{len(plan.new)} jobs, {done} skipped as done, {others} others")
    if unknown.total() < len(plan.new) or not plan.new:
        lines.append(
            f"estimated from past runs: {gpu_hours:.2f} GPU-hours, {hours:.2f} job-hours"
        )
    if unknown:
        kinds = [
            f"{count} x {like}" for like, count in unknown.most_common(KINDS_NAMED)
        ]
        more = len(unknown) - len(kinds)
        kinds += [f"{more} kinds more"] if more > 0 else []
        lines.append(
            f"cost unknown for {unknown.total()} jobs ({', '.join(kinds)}): no run of this recipe,"
            " data, trunk and machine is here to tell"
        )
    return "\n".join(lines) + "\n"


CostKind = tuple[
    object, ...
]  # jobs of one kind take the same time for each of their units


class Estimates:
    """Seconds per unit of each kind of job that a snapshot knows: the median over its jobs."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._per_unit: dict[CostKind, list[float]] = defaultdict(list)
        for name, status in snapshot.statuses.items():
            record = snapshot.records.get(name)
            if record is None or status["state"] != "done" or not status["attempts"]:
                continue
            attempt = status["attempts"][-1]
            machine = (attempt.get("gpus", 0), attempt.get("machine", ""))
            kind = _kind(record.job, (record.submission.cluster, *machine))
            if kind is not None:
                self._per_unit[kind].append(spent_seconds(status) / record.job.units)

    def seconds(self, job: Job, resources: Resources, cluster: Cluster) -> float | None:
        """Return how long the job takes on this cluster; None where nobody knows."""
        gpus = (
            resources.gpus
            if cluster.kind == "slurm"
            else min(resources.gpus, cluster.gpus)
        )
        kind = _kind(job, (cluster.file, gpus, " ".join(resources.options(job.verb))))
        per_unit = self._per_unit.get(kind) if kind is not None else None
        return statistics.median(per_unit) * job.units if per_unit else None


def _kind(job: Job, machine: CostKind) -> CostKind | None:
    """Return what the time of one unit depends on; None where the trunk is not known yet."""
    arch = job.arch
    # A detector's trunk is named by its config; files are converted at the speed of the disk
    if arch is None and job.verb not in ("detect", "import", "export"):
        # Of the first checkpoint on the command line, if it is there by now
        files = (word for word in job.argv[1:] if word.endswith(".safetensors"))
        file = next(files, None)
        arch = header.about(Path(file)).get("arch") if file is not None else None
        if not isinstance(arch, str):
            return None
    words = [word for word in command_kind(job.argv) if not _NO_MATTER.fullmatch(word)]
    return (*words, arch, *machine) if job.units > 0 else None


def spent_seconds(status: Status) -> float:
    """Return the seconds of all attempts; of one that goes on, until now."""
    now = time.time() if status["state"] == "running" else 0.0
    spent = 0.0
    for attempt in status["attempts"]:
        spent += (attempt.get("end") or max(now, attempt["start"])) - attempt["start"]
    return spent
