"""This turns a grid into jobs: recipes and checkpoints x evaluations. Nothing here starts anything.

A job is one command, `backbench VERB ...`, with a run folder whose name is a pure function of what
decides its numbers. So the same grid always names the same folders, and what a folder already holds
need not run again.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.errors import BadInput
from backbench.launch.grid import AGAIN, Evaluation, Grid, evaluations
from backbench.launch.job import Job
from backbench.launch.subjects import Subject, Subjects, folder_name
from backbench.recipes import config, own_probe
from backbench.tasks import TASKS, by_kind


@dataclass(frozen=True)
class Expansion:
    jobs: list[Job]
    packed: list[str]  # submitted jobs that deliver cells of this grid together with others
    waiting: list[str]  # pretrainings outside RUNS that have not written their checkpoint yet
    again: set[str]  # jobs that train once more, to tell how far trainings differ


def expand(
    grid: Grid,
    runs: Path,
    *,
    where: str,
    data: Path | None = None,
    claimed: Mapping[str, str] | None = None,
    watching: bool = False,
) -> Expansion:
    """Return all jobs of the grid, `needs` and `after` before what follows them; each cell once.
    `claimed` (cell -> job name) are the cells of earlier submissions; those that a pack delivers
    stay with it. With `watching`, a glob may still match nothing."""
    # 1. What makes a checkpoint: pretrainings, then imports of foreign files
    subjects = Subjects(
        grid, runs, where=where, data=data, claimed=claimed or {}, watching=watching
    )
    jobs = dict(subjects.jobs)
    # 2. What is measured on all of them, once where two entries of the grid name it
    measuring = _Measuring(subjects)
    again: set[str] = set()
    for evaluation in evaluations(grid, where):
        alike = _by_dataset_and_protocol(evaluation, subjects.by_label.values(), where)
        for seed in evaluation.seeds:
            for one, group in alike:
                for job in measuring.jobs_of(one, seed, group):
                    jobs.setdefault(job.name, job)
        # Seeds of one checkpoint alone would not be enough to know how far trainings differ
        for one, group in alike:
            for seed in AGAIN if len(group) > 1 else ():
                for job in measuring.jobs_of(one, seed, group[: evaluation.again]):
                    if job.name not in jobs:
                        again.add(job.name)
                        jobs[job.name] = job
    return Expansion(list(jobs.values()), list(measuring.packed), subjects.waiting, again)


def _by_dataset_and_protocol(
    evaluation: Evaluation, subjects: Iterable[Subject], where: str
) -> list[tuple[Evaluation, list[Subject]]]:
    """Fill in `own`: return the evaluations that it stands for, each with its checkpoints. A
    foreign file has no recipe here: its own protocol is looked up when it is measured."""
    alike: dict[tuple[str | None, str | None], list[Subject]] = {}
    for subject in subjects:
        trained_on = own_probe.pretrained_on(subject.recipe)
        if evaluation.pretrained_on and trained_on not in evaluation.pretrained_on:
            continue
        dataset = next(iter(evaluation.datasets), None)
        if dataset == own_probe.OWN:
            if trained_on is None:
                unknown = f"nobody knows what {subject.file} was pretrained on"
                raise BadInput(f"{where}: {unknown}; name the dataset in place of 'own'")
            dataset = trained_on
        protocol = evaluation.protocol
        if protocol == own_probe.OWN and dataset is not None and subject.recipe is not None:
            protocol = own_probe.of_recipe(subject.recipe, dataset) or protocol
        alike.setdefault((dataset, protocol), []).append(subject)
    out = []
    for (dataset, protocol), group in alike.items():
        datasets = () if dataset is None else (dataset,)
        one = dataclasses.replace(evaluation, datasets=datasets, protocol=protocol)
        out.append((one, group))
    return out


class _Measuring:
    """Makes the jobs of evaluations, and remembers which of them fill the cache of features."""

    def __init__(self, subjects: Subjects) -> None:
        self.subjects = subjects
        self.packed: dict[str, None] = {}
        # (checkpoint's label, dataset, image geometry) -> job that puts those features in the cache
        self.features: dict[tuple[str, str, str], str] = {}

    def jobs_of(self, evaluation: Evaluation, seed: int, group: Sequence[Subject]) -> Iterator[Job]:
        """Yield the jobs of one evaluation: ready checkpoints in packs, the others one by one."""
        # A cell's name holds all options that decide its number, and none of the others
        options = dataclasses.asdict(evaluation)
        for name in ("pack", "resources", "seeds", "again", "lists", "pretrained_on"):
            del options[name]
        slug = f"{_kind(evaluation)}-s{seed}-{config.fingerprint(options)[:6]}"
        alone: list[Subject] = []
        together: list[Subject] = []
        for subject in group:
            cell = f"{subject.label}/{slug}"
            owner = self.subjects.claimed.get(cell)
            if owner is not None and owner != cell:  # a pack that was submitted before
                self.packed[owner] = None
            elif (
                evaluation.pack == 1
                or owner == cell  # submitted alone, or run alone by hand
                or (self.subjects.runs / cell).is_dir()
                or subject.maker is not None  # a pack would wait for the slowest maker
            ):
                alone.append(subject)
            else:
                together.append(subject)
        for subject in alone:
            yield self._job(evaluation, seed, slug, [subject])
        for start in range(0, len(together), evaluation.pack):
            pack = together[start : start + evaluation.pack]
            yield self._job(evaluation, seed, slug, pack)

    def _job(self, evaluation: Evaluation, seed: int, slug: str, pack: Sequence[Subject]) -> Job:
        """One evaluation of these checkpoints."""
        labels = [subject.label for subject in pack]
        cells = tuple(f"{label}/{slug}" for label in labels)
        # The folder of one checkpoint is its cell's; a pack's names its members by a fingerprint,
        # so the same checkpoints, in whatever order, are the same pack
        name = cells[0]
        if len(pack) > 1:
            name = f"packs/{slug}-{len(pack)}x-{config.fingerprint(sorted(labels))[:8]}"
        # The jobs that leave this one's features in the cache: the first ones to need them
        first: set[str] = set()
        geometry = _geometry(evaluation.protocol) if evaluation.verb == "linear" else None
        if geometry is not None:
            keys = [(label, evaluation.datasets[0], geometry) for label in labels]
            first = {self.features.setdefault(key, name) for key in keys}
        return Job(
            name=name,
            argv=_argv(evaluation, [s.file for s in pack], seed, self.subjects.folders(name)),
            like=_kind(evaluation),
            cells=cells,
            needs=tuple(subject.maker for subject in pack if subject.maker is not None),
            after=tuple(sorted(first - {name})),
            resources=evaluation.resources,
            arch=pack[0].arch,
            units=len(pack),
        )


def _argv(
    evaluation: Evaluation, files: Sequence[str], seed: int, end: Sequence[str]
) -> tuple[str, ...]:
    """The command that measures these checkpoint files."""
    if evaluation.verb == "detect":  # it takes one checkpoint, and continues where it stopped
        engine = evaluation.engine or "auto"
        argv = ["detect", "--config-file", str(evaluation.config), "--engine", engine, *end]
        if seed:
            argv += ["--seed", str(seed)]
        return (*argv, "--checkpoint", files[0], "--resume", *evaluation.args)
    argv = [evaluation.verb, *files]
    if evaluation.datasets:
        option = "--datasets" if evaluation.verb in ("linear", "ood") else "--dataset"
        argv += [option, evaluation.datasets[0]]
    if evaluation.percent is not None:
        lists = str(Path(str(evaluation.lists)).resolve())
        argv += ["--percent", str(evaluation.percent), "--lists", lists]
    if evaluation.protocol is not None:
        argv += ["--protocol", evaluation.protocol]
    return (*argv, "--seed", str(seed), *evaluation.args, *end)


def _kind(evaluation: Evaluation) -> str:
    """The words of a job's name: `linear-lorac-cifar10`, `detect-mask_rcnn_R_50_FPN_1x`."""
    parts: list[str] = [evaluation.verb]
    if evaluation.protocol is not None:
        parts.append(Path(evaluation.protocol).name.removesuffix(".yaml"))
    if evaluation.percent is not None:
        parts.append(str(evaluation.percent))
    if evaluation.config is not None:
        parts.append(Path(evaluation.config).stem)
    if evaluation.engine not in (None, "auto"):
        parts.append(str(evaluation.engine))
    return folder_name("-".join([*parts, *evaluation.datasets]))


@functools.cache
def _geometry(protocol: str | None) -> str | None:
    """A fingerprint of the image geometry, which decides a linear protocol's features. None where
    augmentation makes them anew for every epoch, or where nobody knows it yet."""
    if protocol == own_probe.OWN:
        return None
    recipe = config.read_recipe(config.find_recipe(protocol or "lorac", "transfer"))
    kind = str(recipe.get("kind"))
    task = by_kind("linear").get(kind)
    if task is None or not TASKS[task].pooled:
        return None
    if kind == "sgd" and recipe.get("augment", {}) is not None:
        return None
    return config.fingerprint(recipe.get("geometry"))
