"""configs/clusters: where jobs run and what they ask for. What nothing offers is refused early."""

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from backbench.errors import BadInput, nearest
from backbench.launch.job import LARGEST, Job
from backbench.launch.slurm_client import Node, nodes
from backbench.recipes import config
from backbench.tasks import VERBS
from backbench.untrusted import printable

Kind = Literal["slurm", "local", "debug"]
Count = Annotated[int, Ge(1)]
NotNegative = Annotated[int, Ge(0)]
Positive = Annotated[float, Interval(gt=0, le=LARGEST)]
# Keys of a cluster that decide how many and how large, never what is run
HARMLESS = ("jobs", "max_array", "signal_s", "gpus", "resources")
# Options of sbatch that come from `resources`
FROM_RESOURCES = {
    "account",
    "constraint",
    "cpus-per-task",
    "gpus-per-node",
    "mem",
    "nodes",
}
FROM_RESOURCES |= {"ntasks-per-node", "partition", "qos", "time"}
# Those by which jobs are found, told to save and brought back
FOR_ITSELF = {
    "array",
    "comment",
    "dependency",
    "error",
    "job-name",
    "kill-on-invalid-dep",
}
FOR_ITSELF |= {"open-mode", "output", "requeue", "signal"}
# A name of Slurm's; a constraint may combine several (a100|h100, [ib*2&ssd])
_WORD = (r"[\w.,@/+:-]+", r"[\w.,@/+:\[\]()|&*-]+")
ROWS = ("default", "pretrain", "import", "export", *VERBS)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources that one job asks for, per node where it can differ. `cpus` are per task. With
    `tasks_per_node` 1 the verb starts its own processes; with more, Slurm starts every rank."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus: NotNegative = 0
    nodes: Count = 1
    tasks_per_node: Count = 1
    cpus: Count = 1
    memory_gb: Positive | None = None
    hours: Positive | None = None  # the time limit, which Slurm keeps
    accelerator: Literal["cpu", "cuda"] | None = None
    workers: NotNegative | None = None

    def __post_init__(self) -> None:
        for name in ("partition", "account", "qos", "constraint"):
            value = getattr(self, name)
            # Each becomes a line of the script that sbatch is given
            if value is not None and not re.fullmatch(
                _WORD[name == "constraint"], value
            ):
                raise ValueError(f"{name} must be one plain word, not {value[:40]!r}")
        if self.nodes > 1 and self.tasks_per_node != max(1, self.gpus):
            tasks = f"tasks_per_node {max(1, self.gpus)}"
            raise ValueError(f"several nodes need one task per GPU: {tasks}")

    @property
    def devices(self) -> int:
        """The number of processes per node: Slurm's tasks, or those that the verb starts."""
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
        # Only what differs from the verb's own defaults: commands stay as short as by hand
        out: list[str] = []
        for option, value in told.items():
            if value is not None and (value != 1 or option == "--workers"):
                out += [option, str(value)]
        return tuple(out)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """configs/clusters/*.yaml. `resources` has a row `default` and rows by verb over it. `command`
    is what stands before the verb: `apptainer exec --nv X.sif python -m backbench`."""

    name: str
    kind: Kind
    jobs: Count = 2  # at a time: of each array on Slurm, in all on this machine
    max_array: Count = 1000
    signal_s: Count = 120  # how long before the end of its time a job is told to save
    command: str | None = None
    setup: tuple[str, ...] = ()  # shell lines before the job
    env: dict[str, str] = field(default_factory=dict)
    gpus: NotNegative = 0  # of this machine, for kinds local and debug
    sbatch: dict[str, object] = field(
        default_factory=dict
    )  # further sbatch options, as they are
    resources: dict[str, dict[str, object] | None] = field(default_factory=dict)
    file: str = ""
    overrides: tuple[str, ...] = ()  # of the command line
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
        """Return what a job asks for: the cluster's default, its row for the verb, the grid's."""
        # Thousands of jobs share a few kinds of wishes: each kind is merged and checked once
        key = (job.verb, json.dumps(job.resources, sort_keys=True))
        if key not in self._known:
            default, row = self.resources.get("default"), self.resources.get(job.verb)
            wanted = {**(default or {}), **(row or {}), **job.resources}
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
    for key in {"file", "overrides"} & data.keys():
        raise BadInput(f"{path}: unknown key '{key}'")
    data |= {"file": str(path), "overrides": tuple(overrides)}
    cluster = config.build(Cluster, data, where=str(path))
    for row, values in cluster.resources.items():
        if row not in ROWS:
            raise BadInput(
                f"{path}: unknown key 'resources.{row}'; {nearest(row, ROWS)}"
            )
        config.build(Resources, values or {}, where=f"{path}: resources.{row}")
    # submitit takes them with underscores, sbatch with hyphens: both would reach the same option
    options = {key.replace("_", "-") for key in cluster.sbatch}
    if taken := sorted((FROM_RESOURCES | FOR_ITSELF) & options):
        own = "is set by the launcher itself, from `resources` or for its own use"
        raise BadInput(f"{path}: 'sbatch.{taken[0]}' {own}")
    return cluster


def recorded_cluster(
    file: str, overrides: Sequence[str], given: Cluster | None
) -> Cluster:
    """Return the cluster that recorded jobs were submitted to: a shipped one, or the one `given` on
    the command line, else BadInput. Recorded overrides may only change numbers and sizes."""
    path = Path(file)
    named = given is not None and Path(given.file).resolve() == path.resolve()
    shipped = path.resolve().parent == (config.configs_dir() / "clusters").resolve()
    never = "what a record in RUNS says never becomes a command"
    if not (named or shipped):
        shown = printable.shown(file, 200)
        raise BadInput(
            f"these jobs were submitted to {shown}; {never}: name it, --cluster FILE"
        )
    said_again = given.overrides if given is not None else ()
    given_keys = {text.partition("=")[0] for text in said_again}
    kept = []
    for text in overrides:
        key = text.partition("=")[0]
        if key in given_keys:
            continue
        if key.split(".")[0] not in HARMLESS:
            again = f"{never}: say it again, cluster.{printable.shown(text, 200)}"
            raise BadInput(
                f"these jobs had cluster.{printable.shown(key, 80)} changed; {again}"
            )
        kept.append(text)
    kept += said_again
    return read_cluster(path, kept)


def check_resources(cluster: Cluster, jobs: Iterable[Job]) -> None:
    """Refuse what could never start: BadInput with the job, what it asks for and what there is."""
    wanted: dict[Resources, str] = {}
    for job in jobs:
        wanted.setdefault(cluster.resources_for(job), f"{cluster.file}: {job.like}")
    offered = nodes() if cluster.kind == "slurm" else []
    for resources, where in wanted.items():
        if cluster.kind == "slurm":
            _check_partition(resources, offered, where=where)
        elif resources.nodes > 1:
            one = f"'{cluster.name}' is one machine"
            raise BadInput(f"{where} asks for {resources.nodes} nodes; {one}")
        elif cluster.gpus and resources.gpus > cluster.gpus:
            there = f"this machine has {cluster.gpus}"
            raise BadInput(f"{where} asks for {resources.gpus} GPUs; {there}")


def _check_partition(
    resources: Resources, offered: Sequence[Node], *, where: str
) -> None:
    if resources.hours is None:
        raise BadInput(f"{where} has no `hours`; write them down in resources.default")
    # The nodes of the partition that is asked for, or of Slurm's default
    asked = resources.partition
    rows = [
        n for n in offered if (n.default if asked is None else n.partition == asked)
    ]
    if not rows:
        names = sorted({n.partition for n in offered})
        if asked is not None:
            raise BadInput(
                f"{where} asks for partition '{asked}'; {nearest(asked, names)}"
            )
        allowed = f"allowed: {', '.join(names)}"
        raise BadInput(
            f"{where} names no partition and Slurm has no default; {allowed}"
        )
    name = rows[0].partition
    # A constraint of one word; expressions (`a100|h100`) are left for Slurm to judge
    feature = resources.constraint
    if feature and not re.fullmatch(r"\w+", feature):
        feature = None
    features = frozenset[str]().union(*(node.features for node in rows))
    if feature and feature not in features:
        hint = nearest(feature, features) if features else "its nodes have no features"
        raise BadInput(
            f"{where} asks for constraint '{feature}' in partition '{name}'; {hint}"
        )
    longest = max(node.limit_s for node in rows) / 3600
    if resources.hours > longest:
        raise BadInput(
            f"{where} asks for {resources.hours:g} hours; '{name}' allows {longest:g}"
        )
    # On one node all of it: the GPUs of one and the memory of another do not add up
    wanted = (
        resources.gpus,
        resources.cpus_per_node,
        (resources.memory_gb or 0) * 1024,
    )
    fit = 0
    for node in rows:
        large = all(there >= each for there, each in zip(node.sizes, wanted))
        fit += large and (feature is None or feature in node.features)
    if fit < resources.nodes:
        most = list(map(max, zip(*(node.sizes for node in rows))))
        raise BadInput(
            f"{where} asks for {resources.nodes} node(s) with {_sizes(wanted)} each; of the"
            f" {len(rows)} of partition '{name}', {fit} have all (at most {_sizes(most)})"
        )


def _sizes(sizes: Sequence[float]) -> str:
    return f"{sizes[0]} GPUs, {sizes[1]} CPUs, {sizes[2]:.0f} MB"
