"""The jobs of a grid: recipes and checkpoints x evaluations. Nothing here starts anything.

A job is one command, `backbench VERB ...`, with a run folder whose name is a pure function of what
decides its numbers. So the same grid always names the same folders, and what a folder already holds
need not run again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.errors import BadInput
from backbench.launch.grid import Evaluation, Grid, evaluations
from backbench.launch.job import Job
from backbench.launch.subjects import GridPlaces, Subject, Subjects, folder_name
from backbench.recipes import config, own_probe


@dataclass(frozen=True)
class Expansion:
    jobs: list[Job]
    packed: list[str]  # submitted jobs that deliver cells of this grid together with others
    waiting: list[str]  # pretrainings outside RUNS that have not written their checkpoint yet


def expand(
    grid: Grid,
    runs: Path,
    *,
    where: str,
    data: Path | None = None,
    claimed: Mapping[str, str] | None = None,
    watching: bool = False,
) -> Expansion:
    """All jobs of the grid, `needs` and `after` before what follows them; each cell exactly once.

    `claimed` (cell -> job name) are the cells of earlier submissions; those that a pack delivers
    stay with it. With `watching`, a glob may still match nothing.
    """
    folder = data
    if folder is None and grid.data:
        folder = Path(grid.data).expanduser()
    if folder is not None and not folder.is_dir():
        raise BadInput(f"{where}: data folder {folder} is not there; give --data ROOT")
    places = GridPlaces(where, runs.resolve(), str(folder.resolve()) if folder else None)
    # 1. Whatever makes a checkpoint: pretrainings, then imports of foreign files
    found = Subjects(grid, places, claimed=claimed or {}, watching=watching)
    found.find()
    jobs = dict(found.jobs)
    # 2. What is measured on all of them; what two entries of the grid name is there once
    measuring = _Measuring(places, found.by_label.values(), claimed or {})
    for evaluation in evaluations(grid, where):
        for seed in evaluation.seeds:
            for job in measuring.jobs_of(evaluation, seed):
                jobs.setdefault(job.name, job)
    return Expansion(list(jobs.values()), list(measuring.packed), found.waiting)


class _Measuring:
    def __init__(
        self, places: GridPlaces, subjects: Iterable[Subject], claimed: Mapping[str, str]
    ) -> None:
        self.places, self.subjects, self.claimed = places, tuple(subjects), claimed
        self.packed: dict[str, None] = {}
        # (checkpoint's label, dataset, image geometry) -> job that puts those features in the cache
        self.features: dict[tuple[str, str, str], str] = {}

    def jobs_of(self, evaluation: Evaluation, seed: int) -> Iterator[Job]:
        """The jobs of one evaluation: ready checkpoints in packs, the others one by one."""
        for own, subjects in self._of_their_own(evaluation):
            yield from self._evaluate_alike(own, seed, subjects)

    def _of_their_own(self, evaluation: Evaluation) -> Iterator[tuple[Evaluation, list[Subject]]]:
        """The evaluation with `own` filled in, and the checkpoints that it is the same for.

        Of a foreign file nobody knows the recipe: its own protocol is found when it is measured.
        """
        alike: dict[tuple[str | None, str | None], list[Subject]] = {}
        for subject in self.subjects:
            trained_on = own_probe.pretrained_on(subject.recipe)
            if evaluation.pretrained_on and trained_on not in evaluation.pretrained_on:
                continue
            dataset = next(iter(evaluation.datasets), None)
            if dataset == own_probe.OWN:
                if trained_on is None:
                    raise BadInput(
                        f"{self.places.where}: nobody knows what {subject.file} was pretrained on;"
                        " name the dataset in place of 'own'"
                    )
                dataset = trained_on
            protocol = evaluation.protocol
            if protocol == own_probe.OWN and dataset is not None and subject.recipe is not None:
                protocol = own_probe.of_recipe(subject.recipe, dataset) or protocol
            alike.setdefault((dataset, protocol), []).append(subject)
        for (dataset, protocol), subjects in alike.items():
            datasets = () if dataset is None else (dataset,)
            yield dataclasses.replace(evaluation, datasets=datasets, protocol=protocol), subjects

    def _evaluate_alike(
        self, evaluation: Evaluation, seed: int, subjects: Sequence[Subject]
    ) -> Iterator[Job]:
        # A cell's name holds all options that decide its number, and none of the others
        options = dataclasses.asdict(evaluation)
        for name in ("pack", "resources", "seeds", "lists", "pretrained_on"):
            del options[name]
        slug = f"{_like(evaluation)}-s{seed}-{config.fingerprint(options)[:6]}"
        alone: list[Subject] = []
        together: list[Subject] = []
        for subject in subjects:
            cell = f"{subject.label}/{slug}"
            owner = self.claimed.get(cell)
            if owner is not None and owner != cell:  # a pack that was submitted before
                self.packed[owner] = None
            elif (
                evaluation.pack == 1
                or owner == cell  # submitted alone, or run alone by hand
                or (self.places.runs / cell).is_dir()
                or subject.maker is not None  # a pack would wait for the slowest maker
            ):
                alone.append(subject)
            else:
                together.append(subject)
        for subject in alone:
            yield from self._measure(evaluation, seed, slug, [subject])
        for start in range(0, len(together), evaluation.pack):
            pack = together[start : start + evaluation.pack]
            yield from self._measure(evaluation, seed, slug, pack)

    def _measure(
        self, evaluation: Evaluation, seed: int, slug: str, pack: Sequence[Subject]
    ) -> Iterator[Job]:
        """One evaluation of these checkpoints."""
        labels = [subject.label for subject in pack]
        cells = tuple(f"{label}/{slug}" for label in labels)
        # The folder of one checkpoint is its cell's; a pack's names its members by a fingerprint,
        # so the same checkpoints, in whatever order, are the same pack
        name = cells[0]
        if len(pack) > 1:
            name = f"packs/{slug}-{len(pack)}x-{config.fingerprint(sorted(labels))[:8]}"
        needs = tuple(subject.maker for subject in pack if subject.maker is not None)
        end = ("--data", self.places.root, "--out", str(self.places.runs / name))
        if evaluation.verb == "detect":
            argv = _detect_argv(evaluation, pack[0].file, end)
        else:
            argv = _argv(evaluation, [s.file for s in pack], seed, end)
        yield Job(
            name=name,
            argv=argv,
            like=_like(evaluation),
            cells=cells,
            needs=needs,
            after=self._after(evaluation, name, labels),
            resources=evaluation.resources,
            arch=pack[0].arch,
            units=len(pack),
        )

    def _after(self, evaluation: Evaluation, name: str, labels: Sequence[str]) -> tuple[str, ...]:
        """The jobs that leave this one's features in the cache: the first ones to need them."""
        geometry = _geometry(evaluation.protocol) if evaluation.verb == "linear" else None
        if geometry is None:
            return ()
        keys = [(label, evaluation.datasets[0], geometry) for label in labels]
        first = {self.features.setdefault(key, name) for key in keys}
        return tuple(sorted(first - {name}))


def _argv(
    evaluation: Evaluation, files: Sequence[str], seed: int, end: Sequence[str]
) -> tuple[str, ...]:
    """The command of a verb that takes checkpoints."""
    argv = [evaluation.verb, *files]
    if evaluation.datasets:
        option = "--datasets" if evaluation.verb == "linear" else "--dataset"
        argv += [option, evaluation.datasets[0]]
    if evaluation.percent is not None:
        lists = str(Path(str(evaluation.lists)).resolve())
        argv += ["--percent", str(evaluation.percent), "--lists", lists]
    if evaluation.protocol is not None:
        argv += ["--protocol", evaluation.protocol]
    return (*argv, "--seed", str(seed), *evaluation.args, *end)


def _detect_argv(evaluation: Evaluation, file: str, end: Sequence[str]) -> tuple[str, ...]:
    """The command of a detection, which takes one checkpoint, and continues if it is there."""
    engine = evaluation.engine or "auto"
    argv = ("detect", "--config-file", str(evaluation.config), "--engine", engine, *end)
    return (*argv, "--checkpoint", file, "--resume", *evaluation.args)


def _like(evaluation: Evaluation) -> str:
    """What costs the same: `linear-lorac-cifar10`, `detect-mask_rcnn_R_50_FPN_1x-detectron2`."""
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
    """What decides a linear protocol's features: its image geometry, as a fingerprint.

    None where augmentation makes them anew for every epoch, or where nobody knows it yet.
    """
    if protocol == own_probe.OWN:
        return None
    recipe = config.read_recipe(config.find_recipe(protocol or "lorac", "transfer"))
    if recipe.get("kind") == "sgd" and recipe.get("augment", {}) is not None:
        return None
    return config.fingerprint(recipe.get("geometry"))
