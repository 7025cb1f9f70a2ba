"""The plan of a grid: the jobs that are missing, the arrays that they go to Slurm in, their cost."""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from backbench.launch.clusters import Cluster, Resources
from backbench.launch.expansion import expand
from backbench.launch.grid import Grid
from backbench.launch.job import Job, finished
from backbench.launch.price import Estimates
from backbench.launch.view import ACTIVE, Snapshot, State, StateName
from backbench.recipes import fast
from backbench.runs.run_progress import seconds

# A run submits these again. Blocked ones stay out below while what they need has failed; failed
# ones wait for `launch retry`.
AGAIN: tuple[StateName, ...] = ("cancelled", "stopped", "lost", "blocked")


KINDS_NAMED = 5  # among those of unknown cost


@dataclass
class Plan:
    """The jobs of a grid: those to submit, and the others with how they stand."""

    new: list[Job]
    known: dict[str, State]
    waiting: list[str]  # folders of pretrainings without a checkpoint yet


def make_plan(
    grid: Grid, snapshot: Snapshot, *, where: str, data: Path | None, watching: bool
) -> Plan:
    runs = snapshot.ledger.runs
    claimed = snapshot.claimed()
    wanted = expand(grid, runs, where=where, data=data, claimed=claimed, watching=watching)
    known: dict[str, State] = {}
    # 1. Packs that were submitted before go again as they were, with the checkpoints of then
    packs: list[Job] = []
    for name in wanted.packed:
        pack = snapshot.records[name].job
        standing = _standing(pack, snapshot)
        if standing is None:
            packs.append(pack)
        else:
            known[name] = standing
    # 2. The jobs of the grid as it is now
    new: list[Job] = []
    for job in wanted.jobs:
        standing = _standing(job, snapshot)
        if standing is None:
            new.append(job)
        else:
            known[job.name] = standing
    # 3. Without those that could not start; and without mention of dependencies that are over
    possible = _leave_out_blocked([*new, *packs], known, snapshot)
    return Plan(without_done(possible, known, snapshot), known, wanted.waiting)


def _standing(job: Job, snapshot: Snapshot) -> State | None:
    """Return how a job of the grid stands; None where it is to be submitted."""
    state = State("done")
    if job.name in snapshot.records:
        state = snapshot.state(job.name)
    if state.name in AGAIN:
        return None
    # Only its files are proof: they are there without any record where the records were lost, and
    # gone in spite of one where somebody wants the number anew
    if state.name == "done" and not finished(job, snapshot.ledger.runs):
        return None
    return state


def _leave_out_blocked(
    new: Sequence[Job], known: dict[str, State], snapshot: Snapshot
) -> list[Job]:
    """Leave out what needs a job that failed and is not submitted again; its state says so."""
    # Needs come earlier in the list: what is in `out` by now goes before its users
    out: dict[str, Job] = {}
    for job in new:
        for name in job.needs:
            state = _known(name, known, snapshot)
            if name not in out and state is not None and state.name in ("failed", "blocked"):
                known[job.name] = State("blocked", f"{name} {state.name}")
                break
        else:
            out[job.name] = job
    return list(out.values())


def without_done(new: Sequence[Job], known: dict[str, State], snapshot: Snapshot) -> list[Job]:
    """Return the jobs without the dependencies that are over."""
    names = {job.name for job in new}

    def pending(name: str) -> bool:
        state = _known(name, known, snapshot)
        return name in names or (state is not None and state.name in ACTIVE)

    out = []
    for job in new:
        needs = tuple(filter(pending, job.needs))
        # `after` only fills a cache: what is on Slurm already is not worth a dependency
        after = tuple(name for name in job.after if name in names)
        out.append(dataclasses.replace(job, needs=needs, after=after))
    return out


def _known(name: str, known: dict[str, State], snapshot: Snapshot) -> State | None:
    """Return the state of a job of this grid or of an earlier one."""
    if name in known or name not in snapshot.records:
        return known.get(name)
    return snapshot.state(name)


class JobArray(NamedTuple):
    """Jobs that go to Slurm as one array: one set of resources and of dependencies."""

    resources: Resources
    jobs: list[Job]
    needs: tuple[str, ...]  # names of jobs
    after: tuple[int, ...]  # numbers of earlier arrays


def arrays(cluster: Cluster, jobs: Sequence[Job]) -> Iterator[JobArray]:
    """Pack jobs into as few arrays as their resources and dependencies allow.

    `needs` stay exact, `after` is widened to whole arrays.
    """
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
            groups.setdefault(key, JobArray(resources, [], needs, after)).jobs.append(job)
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
        lines.append(f"array {number}: {_array_text(array, cluster.name)}")
        resources = array.resources
        for job in array.jobs:
            cost = estimates.seconds(job, resources, cluster)
            lines.append(f"  {job.name}  {'unknown' if cost is None else seconds(cost)}")
            if fast.SWITCH in job.argv:  # its name is like the others'
                lines.append(f"    backbench {shlex.join(job.argv)}")
            if cost is None:
                unknown[job.like] += 1
                continue
            hours += cost / 3600
            gpu_hours += cost / 3600 * resources.gpus * resources.nodes
    done = 0
    for name, state in plan.known.items():
        lines.append(f"skipped ({state.name}): {name}")
        done += state.name == "done"
    for path in plan.waiting:
        lines.append(f"waiting for a checkpoint: {path}")
    others = len(plan.known) - done
    lines.append(f"{len(plan.new)} jobs, {done} skipped as done, {others} others")
    lines += _cost_text(gpu_hours, hours, unknown, jobs=len(plan.new))
    return "\n".join(lines) + "\n"


def _cost_text(gpu_hours: float, hours: float, unknown: Counter[str], *, jobs: int) -> list[str]:
    lines = []
    if unknown.total() < jobs or not jobs:
        lines.append(f"estimated from past runs: {gpu_hours:.2f} GPU-hours, {hours:.2f} job-hours")
    if unknown:
        kinds = [f"{count} x {like}" for like, count in unknown.most_common(KINDS_NAMED)]
        more = len(unknown) - len(kinds)
        kinds += [f"{more} kinds more"] if more > 0 else []
        lines.append(
            f"cost unknown for {unknown.total()} jobs ({', '.join(kinds)}): no run of this recipe,"
            " data, trunk and machine is here to tell"
        )
    return lines


def _array_text(array: JobArray, cluster: str) -> str:
    resources = array.resources
    parts = [
        f"{len(array.jobs)} jobs on {resources.partition or cluster}",
        f"{resources.nodes} node(s) x {resources.gpus} GPUs",
        f"{resources.cpus_per_node} CPUs",
        *(f"after {name}" for name in array.needs),
        *(f"after array {number}" for number in array.after),
    ]
    return ", ".join(parts)
