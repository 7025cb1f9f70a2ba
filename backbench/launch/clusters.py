"""Reads configs/clusters: where jobs run and what they ask for. What no node offers is refused early."""

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from backbench.errors import BadInput, nearest
from backbench.launch.job import LARGEST, Job, Kind
from backbench.launch.slurm_client import Node, nodes
from backbench.recipes import config
from backbench.requests.bounds import MOST_PROCESSES, Count, Processes, Workers
from backbench.tasks import VERBS
from backbench.untrusted import printable

Positive = Annotated[float, Interval(gt=0, le=LARGEST)]
GRID_VERBS = ("pretrain", "import", "export", *VERBS)
ROWS = ("default", *GRID_VERBS)  # of `resources`
# Keys of a cluster that decide how many jobs run and how large they are, never what is run
HARMLESS = ("jobs", "max_array", "signal_s", "gpus", "resources")
# Options of sbatch that come from `resources`
FROM_RESOURCES = {
    "account",
    "constraint",
    "cpus-per-task",
    "gpus-per-node",
    "mem",
    "nodes",
    "ntasks-per-node",
    "partition",
    "qos",
    "time",
}
# Options of sbatch by which jobs are found, told to save, and brought back
FOR_ITSELF = {
    "array",
    "comment",
    "dependency",
    "error",
    "job-name",
    "kill-on-invalid-dep",
    "open-mode",
    "output",
    "requeue",
    "signal",
}
# A name of Slurm's, and a constraint, which may combine several: a100|h100, [ib*2&ssd]
_NAME = re.compile(r"[\w.,@/+:-]+")
_CONSTRAINT = re.compile(r"[\w.,@/+:\[\]()|&*-]+")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """One job asks for these: `cpus` per task; `gpus`, `memory_gb` and tasks per node.

    With `tasks_per_node` 1 the verb starts its own processes; with more, Slurm starts every rank.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus: Annotated[int, Interval(ge=0, le=MOST_PROCESSES)] = 0
    nodes: Processes = 1
    tasks_per_node: Processes = 1
    cpus: Processes = 1
    memory_gb: Positive | None = None
    hours: Positive | None = None  # the time limit, which Slurm keeps
    accelerator: Literal["cpu", "cuda"] | None = None
    workers: Workers | None = None

    def __post_init__(self) -> None:
        # Each of these becomes a line of the script that sbatch is given.
        for name in ("partition", "account", "qos", "constraint"):
            value = getattr(self, name)
            pattern = _CONSTRAINT if name == "constraint" else _NAME
            if value is not None and not pattern.fullmatch(value):
                raise ValueError(f"{name} must be one plain word, not {value[:40]!r}")
        if self.nodes > 1 and self.tasks_per_node != max(1, self.gpus):
            raise ValueError(
                f"several nodes need one task per GPU: tasks_per_node {max(1, self.gpus)}"
            )

    @property
    def devices(self) -> int:
        """Return the number of processes per node: Slurm's tasks, or those that the verb starts."""
        return self.tasks_per_node if self.tasks_per_node > 1 else max(1, self.gpus)

    @property
    def cpus_per_node(self) -> int:
        return self.cpus * self.tasks_per_node

    @property
    def limit_s(self) -> float | None:
        return None if self.hours is None else self.hours * 3600

    def options(self, verb: str) -> tuple[str, ...]:
        """Return the options that tell the verb what it has been given."""
        told: dict[str, int | str | None] = {}
        if verb == "detect":
            told = {"--num-gpus": self.devices, "--num-machines": self.nodes}
        elif verb not in ("import", "export"):
            if verb != "analyze":  # which runs in one process
                told = {"--devices": self.devices, "--nodes": self.nodes}
            told |= {"--accelerator": self.accelerator, "--workers": self.workers}
        # Only what differs from the verb's own defaults: commands stay as short as by hand. 1 is the
        # default of all but --workers.
        out: list[str] = []
        for option, value in told.items():
            if value is None or (value == 1 and option != "--workers"):
                continue
            out += [option, str(value)]
        return tuple(out)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The keys of configs/clusters/*.yaml. `resources` has a row `default`, and rows by verb over it."""

    name: str
    kind: Kind
    jobs: Processes = 2  # at a time: of each array on Slurm, in all on this machine
    max_array: Count = 1000
    signal_s: Count = 120  # how long before the end of its time a job is told to save
    # What stands before the verb: `apptainer exec --nv X.sif python -m backbench`
    command: str | None = None
    setup: tuple[str, ...] = ()  # shell lines before the job
    env: dict[str, str] = field(default_factory=dict)
    gpus: Annotated[int, Interval(ge=0, le=MOST_PROCESSES)] = (
        0  # of this machine, for kinds local and debug
    )
    # Further options of sbatch, as they are
    sbatch: dict[str, object] = field(default_factory=dict)
    resources: dict[str, dict[str, object] | None] = field(default_factory=dict)
    file: str = ""
    overrides: tuple[str, ...] = ()  # of the command line
    # Merged rows by verb and by what the job itself asks for (`resources_for`)
    _known: dict[tuple[str, str], Resources] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        try:
            shlex.split(self.command or "")
        except ValueError as error:
            raise ValueError(f"command {self.command!r:.200}: {error}") from None
        object.__setattr__(self, "_known", {})

    def resources_for(self, job: Job) -> Resources:
        """Return what a job asks for: the default row, the verb's row over it, the grid's over both."""
        # Thousands of jobs ask for a few different things: each is merged and checked once.
        key = (job.verb, json.dumps(job.resources, sort_keys=True))
        if key not in self._known:
            default = self.resources.get("default") or {}
            of_verb = self.resources.get(job.verb) or {}
            wanted = {**default, **of_verb, **job.resources}
            where = f"{self.file}: resources of {job.like}"
            self._known[key] = config.build(Resources, wanted, where=where)
        return self._known[key]

    def grace_s(self, resources: Resources) -> float:
        """Return seconds from signal to end, at most half the time limit (a pool keeps none)."""
        if resources.limit_s is None or self.kind != "slurm":
            return float(self.signal_s)
        return min(float(self.signal_s), resources.limit_s / 2)


def read_cluster(name: str | Path, overrides: Sequence[str] = ()) -> Cluster:
    """Read a cluster by path or by name."""
    path = config.find_recipe(name, "clusters")
    recipe = config.read_recipe(path, trusted=True)  # its set-up may have several lines
    data = {"name": path.stem, **config.apply_overrides(recipe, overrides)}
    for key in ("file", "overrides"):  # set here, not in the file
        if key in data:
            raise BadInput(f"{path}: unknown key '{key}'")
    data["file"] = str(path)
    data["overrides"] = tuple(overrides)
    cluster = config.build(Cluster, data, where=str(path))
    for row, values in cluster.resources.items():
        if row not in ROWS:
            raise BadInput(
                f"{path}: unknown key 'resources.{row}'; {nearest(row, ROWS)}"
            )
        config.build(Resources, values or {}, where=f"{path}: resources.{row}")
    # submitit takes options with underscores, sbatch with hyphens: both reach the same option.
    options = {key.replace("_", "-") for key in cluster.sbatch}
    taken = sorted((FROM_RESOURCES | FOR_ITSELF) & options)
    if taken:
        raise BadInput(
            f"{path}: 'sbatch.{taken[0]}' is set by the launcher itself, from `resources` or for"
            " its own use"
        )
    return cluster


def recorded_cluster(
    file: str, overrides: Sequence[str], given: Cluster | None
) -> Cluster:
    """Return the cluster that recorded jobs were submitted to.

    A record in RUNS may have been written by anybody, and a cluster's file says what is run. So the
    file must be a shipped one, or the one `given` on the command line, and recorded overrides may
    only change numbers and sizes; else BadInput.
    """
    # 1. The file
    path = Path(file)
    is_named = given is not None and Path(given.file).resolve() == path.resolve()
    is_shipped = path.resolve().parent == (config.configs_dir() / "clusters").resolve()
    never = "what a record in RUNS says never becomes a command"
    if not is_named and not is_shipped:
        raise BadInput(
            f"these jobs were submitted to {printable.shown(file, 200)}; {never}: name it,"
            " --cluster FILE"
        )
    # 2. The overrides: those of the command line win over recorded ones of the same key.
    said_again = given.overrides if given is not None else ()
    keys_said_again = {text.partition("=")[0] for text in said_again}
    kept = []
    for text in overrides:
        key = text.partition("=")[0]
        if key in keys_said_again:
            continue
        if key.split(".")[0] not in HARMLESS:
            raise BadInput(
                f"these jobs had cluster.{printable.shown(key, 80)} changed; {never}: say it"
                f" again, cluster.{printable.shown(text, 200)}"
            )
        kept.append(text)
    return read_cluster(path, [*kept, *said_again])


def check_resources(cluster: Cluster, jobs: Iterable[Job]) -> None:
    """Refuse what could never start: BadInput with the job, what it asks for and what there is."""
    wanted: dict[Resources, str] = {}  # -> the first job that asks for it, in messages
    for job in jobs:
        wanted.setdefault(cluster.resources_for(job), f"{cluster.file}: {job.like}")
    offered = nodes() if cluster.kind == "slurm" else []
    for resources, where in wanted.items():
        if cluster.kind == "slurm":
            _check_partition(resources, offered, where=where)
        elif resources.nodes > 1:
            raise BadInput(
                f"{where} asks for {resources.nodes} nodes; '{cluster.name}' is one machine"
            )
        elif cluster.gpus and resources.gpus > cluster.gpus:
            raise BadInput(
                f"{where} asks for {resources.gpus} GPUs; this machine has {cluster.gpus}"
            )


def _check_partition(
    resources: Resources, offered: Sequence[Node], *, where: str
) -> None:
    """Raise BadInput where the partition cannot run this. `where` is the job, in messages."""
    if resources.hours is None:
        raise BadInput(f"{where} has no `hours`; write them down in resources.default")
    # 1. The nodes of the partition that is asked for, or of Slurm's default
    asked = resources.partition
    if asked is None:
        rows = [node for node in offered if node.default]
    else:
        rows = [node for node in offered if node.partition == asked]
    if not rows:
        names = sorted({node.partition for node in offered})
        if asked is not None:
            raise BadInput(
                f"{where} asks for partition '{asked}'; {nearest(asked, names)}"
            )
        raise BadInput(
            f"{where} names no partition and Slurm has no default; allowed:"
            f" {', '.join(names)}"
        )
    name = rows[0].partition
    # 2. The constraint, if it is one word. Expressions (`a100|h100`) are left for Slurm to judge.
    feature = resources.constraint
    if feature and not re.fullmatch(r"\w+", feature):
        feature = None
    features = frozenset[str]().union(*(node.features for node in rows))
    if feature and feature not in features:
        hint = nearest(feature, features) if features else "its nodes have no features"
        raise BadInput(
            f"{where} asks for constraint '{feature}' in partition '{name}'; {hint}"
        )
    # 3. The time
    longest = max(node.limit_s for node in rows) / 3600
    if resources.hours > longest:
        raise BadInput(
            f"{where} asks for {resources.hours:g} hours; '{name}' allows {longest:g}"
        )
    # 4. The sizes: one node must have all of them. The GPUs of one node and the memory of another
    #    do not add up.
    memory_mb = (resources.memory_gb or 0) * 1024
    wanted = (resources.gpus, resources.cpus_per_node, memory_mb)
    fit = 0
    for node in rows:
        is_large = all(there >= each for there, each in zip(node.sizes, wanted))
        if is_large and (feature is None or feature in node.features):
            fit += 1
    if fit < resources.nodes:
        most = [max(sizes) for sizes in zip(*(node.sizes for node in rows))]
        raise BadInput(
            f"{where} asks for {resources.nodes} node(s) with {_sizes(wanted)} each; of the"
            f" {len(rows)} of partition '{name}', {fit} have all (at most {_sizes(most)})"
        )


def _sizes(sizes: Sequence[float]) -> str:
    return f"{sizes[0]} GPUs, {sizes[1]} CPUs, {sizes[2]:.0f} MB"
