"""The jobs of a grid: recipes and checkpoints x evaluations. Nothing here starts anything.

A job is one command, `backbench VERB ...`, with a run folder whose name is a pure function of what
decides its numbers. So the same grid always names the same folders, and what a folder already holds
need not run again.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backbench import config
from backbench.errors import BadInput
from backbench.launch.costs import evaluation_costs, pretraining_costs
from backbench.launch.grid import Evaluation, Grid, Source, Sweep, evaluations
from backbench.launch.job import Job
from backbench.runs.folder import CHECKPOINT_FILE, RECIPE_FILE, RUN_FILE
from backbench.untrusted import jsons
from backbench.weights import header, probes

LONGEST_NAME = 80  # characters of what people chose, in a folder's name


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A checkpoint that exists, or that a job of the grid (`maker`) will write.

    `label` names its folder below RUNS.
    """

    label: str
    file: str
    maker: str | None = None
    arch: str | None = None  # None where only its file will tell
    recipe: Mapping[str, Any] | None = None  # of its pretraining; None where nobody knows it


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
    expander = _Expander(
        grid, runs.resolve(), where, data=data, claimed=claimed or {}, watching=watching
    )
    return expander.expand()


class _Expander:
    def __init__(
        self,
        grid: Grid,
        runs: Path,
        where: str,
        *,
        data: Path | None,
        claimed: Mapping[str, str],
        watching: bool,
    ) -> None:
        self.grid, self.runs, self.where = grid, runs, where
        self.claimed, self.watching = claimed, watching
        folder = data
        if folder is None and grid.data:
            folder = Path(grid.data).expanduser()
        if folder is not None and not folder.is_dir():
            raise BadInput(f"{where}: data folder {folder} is not there; give --data ROOT")
        self._root = str(folder.resolve()) if folder else None
        self.jobs: dict[str, Job] = {}
        self.packed: dict[str, None] = {}
        self.waiting: list[str] = []
        self.subjects: dict[str, Subject] = {}
        self.recipes: dict[str, Mapping[str, Any]] = {}  # of the pretrainings, by job
        # (checkpoint's label, dataset, image geometry) -> job that puts those features in the cache
        self.features: dict[tuple[str, str, str], str] = {}

    @property
    def root(self) -> str:
        if self._root is None:
            raise BadInput(
                f"{self.where}: no data folder; add `data: ROOT` to the grid or --data ROOT"
            )
        return self._root

    def expand(self) -> Expansion:
        # 1. Whatever makes a checkpoint: pretrainings, then imports of foreign files
        for job in self._pretrainings():
            self.jobs.setdefault(job.name, job)
            label = Path(job.name).name
            file = str(self.runs / str(job.makes))
            self.subjects[label] = Subject(
                label=label,
                file=file,
                maker=job.name,
                arch=job.arch,
                recipe=self.recipes[job.name],
            )
        for subject, maker in self._checkpoints():
            if maker is not None:
                self.jobs.setdefault(maker.name, maker)
            self.subjects.setdefault(subject.label, subject)
        # 2. What is measured on all of them; what two entries of the grid name is there once
        for evaluation in evaluations(self.grid, self.where):
            for seed in evaluation.seeds:
                for job in self._evaluate(evaluation, seed):
                    self.jobs.setdefault(job.name, job)
        return Expansion(list(self.jobs.values()), list(self.packed), self.waiting)

    # Pretrainings

    def _pretrainings(self) -> Iterator[Job]:
        for i, entry in enumerate(self.grid.recipes):
            given = {"recipe": entry} if isinstance(entry, str) else entry
            sweep = config.build(Sweep, given, where=f"{self.where}: recipes[{i}]")
            path = config.find_recipe(sweep.recipe, "pretrain")
            recipe = config.apply_overrides(config.read_recipe(path), sweep.overrides)
            for variant in sweep.points():
                for seed in sweep.seeds or (None,):
                    yield self._pretraining(sweep, path, recipe, variant, seed)

    def _pretraining(
        self,
        sweep: Sweep,
        path: Path,
        recipe: Mapping[str, Any],
        variant: Mapping[str, Any],
        seed: int | None,
    ) -> Job:
        """One point of a sweep: `variant` has its value of each key that varies."""
        # 1. The point as overrides; what varies is also part of the name, in short
        overrides = list(sweep.overrides)
        short = []
        for key, value in variant.items():
            text = value if isinstance(value, str) else json.dumps(value)  # JSON is YAML
            overrides.append(f"{key}={text}")
            short.append(f"{key.rpartition('.')[2]}={text}")
        # 2. A row of its own on the leaderboard, which all its seeds share
        if variant:
            title = " ".join([str(recipe.get("name", path.stem)), *short])
            overrides.append(f"name={json.dumps(title)}")
        if sweep.expected is not None:
            overrides.append(f"expected={json.dumps(sweep.keys(variant))}")
        if seed is not None:
            overrides.append(f"seed={seed}")
        # 3. The folder: readable, and told apart by everything that decides the weights
        whole = config.apply_overrides(recipe, overrides)
        identity = {key: value for key, value in whole.items() if key != "probe"}
        if "expected" in identity:
            identity["expected"] = []
        stem = _slug("-".join([path.stem, *short]))[:LONGEST_NAME]
        name = f"pretrain/{stem}-s{identity.get('seed', 0)}-{config.fingerprint(identity)[:8]}"
        self.recipes[name] = whole
        file = str(path.resolve()) if Path(sweep.recipe).is_file() else sweep.recipe
        out = str(self.runs / name)
        return Job(
            name=name,
            argv=("pretrain", file, *overrides, "--data", self.root, "--out", out),
            like=f"pretrain-{path.stem}",
            cells=(name,),
            makes=f"{name}/{CHECKPOINT_FILE}",
            resources=sweep.resources,
            costs=pretraining_costs(identity, self.root),
            arch=identity.get("arch"),
            units=float(identity.get("epochs", 0)),
        )

    # Checkpoints

    def _checkpoints(self) -> Iterator[tuple[Subject, Job | None]]:
        """Every checkpoint of the grid once per content; foreign files with their import."""
        seen: set[str] = set()
        for i, entry in enumerate(self.grid.checkpoints):
            where = f"{self.where}: checkpoints[{i}]"
            given = {"path": entry} if isinstance(entry, str) else entry
            source = config.build(Source, given, where=where)
            magic = glob.has_magic(source.path)
            for path in self._files(source, where):
                # One of ours is known by its digest, so the same weights in two files are one
                # checkpoint; a foreign file by part of its content; a run by what run.json says
                if path.is_dir():
                    label = _run_label(path, where, skip=magic)
                    if label is None:
                        continue
                    identity, pair = label, self._pretrained(path, label)
                else:
                    digest = header.digest(path)
                    stem = _slug(source.name or path.name.removesuffix(path.suffix))[:LONGEST_NAME]
                    label = f"{stem}-{(digest or content_digest(path))[:8]}"
                    identity, pair = digest or label, self._file(source, path, label, digest)
                if pair is not None and identity not in seen:
                    seen.add(identity)
                    yield pair

    def _files(self, source: Source, where: str) -> Iterator[Path]:
        """What an entry names: checkpoint files, and the folders of pretrainings."""
        pattern = str(Path(source.path).expanduser())
        found = [pattern]
        if glob.has_magic(pattern):
            found = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - absolute ones too
        if not found and not self.watching:
            raise BadInput(
                f"{where}: '{source.path}' matches no file (looked from {Path.cwd()});"
                " --watch waits for files to come"
            )
        if len(found) > 1 and source.name:
            raise BadInput(
                f"{where}: {len(found)} files match and cannot all be named '{source.name}'"
            )
        for text in found:
            path = Path(text).resolve()
            if not path.exists():
                hint = "give a checkpoint file, a glob, or the folder of a pretraining"
                raise BadInput(f"{where}: {text}: no such file or folder; {hint}")
            # The checkpoint inside a run stands for the run, so both ways of naming it are one
            in_run = path.name == CHECKPOINT_FILE and (path.parent / RUN_FILE).is_file()
            yield path.parent if in_run else path

    def _pretrained(self, path: Path, label: str) -> tuple[Subject, Job | None] | None:
        """A pretraining's folder: its checkpoint, or the job that will write it.

        None where neither is known: then it is something to wait for.
        """
        file = path / CHECKPOINT_FILE
        if file.is_file():
            return Subject(label=label, file=str(file), recipe=_recipe_of(file)), None
        inside = path.relative_to(self.runs).as_posix() if path.is_relative_to(self.runs) else ""
        maker = self.claimed.get(inside, inside)  # submitted earlier, or a job of this grid
        if inside not in self.claimed and inside not in self.jobs:
            self.waiting.append(str(path))
            return None
        recipe = _recipe_of(file)
        return Subject(label=label, file=str(file), maker=maker, recipe=recipe), None

    def _file(
        self, source: Source, path: Path, label: str, digest: str | None
    ) -> tuple[Subject, Job | None]:
        """A file: as it is where it is one of ours and nothing is said about it, else imported."""
        options: list[str] = []
        for option in ("name", "method", "encoder", "epochs"):
            value = getattr(source, option)
            if value is not None:
                options += [f"--{option}", str(value)]
        told = source.name or source.method or source.encoder or source.epochs is not None
        if digest is not None and not told:
            return Subject(label=label, file=str(path), recipe=_recipe_of(path)), None
        name = f"imported/{label}"
        makes = f"{name}/{CHECKPOINT_FILE}"
        file = str(self.runs / makes)
        argv = ("import", str(path), *options, "--out", file)
        costs = config.fingerprint("import")
        job = Job(name=name, argv=argv, like="import", cells=(name,), makes=makes, costs=costs)
        return Subject(label=label, file=file, maker=name), job

    # Evaluations

    def _evaluate(self, evaluation: Evaluation, seed: int) -> Iterator[Job]:
        """The jobs of one evaluation: ready checkpoints in packs, the others one by one."""
        for own, subjects in self._of_their_own(evaluation):
            yield from self._evaluate_alike(own, seed, subjects)

    def _of_their_own(self, evaluation: Evaluation) -> Iterator[tuple[Evaluation, list[Subject]]]:
        """The evaluation with `own` filled in, and the checkpoints that it is the same for.

        Of a foreign file nobody knows the recipe: its own protocol is found when it is measured.
        """
        alike: dict[tuple[str | None, str | None], list[Subject]] = {}
        for subject in self.subjects.values():
            trained_on = probes.pretrained_on(subject.recipe)
            if evaluation.pretrained_on and trained_on not in evaluation.pretrained_on:
                continue
            dataset = next(iter(evaluation.datasets), None)
            if dataset == probes.OWN:
                if trained_on is None:
                    raise BadInput(
                        f"{self.where}: nobody knows what {subject.file} was pretrained on; name"
                        " the dataset in place of 'own'"
                    )
                dataset = trained_on
            protocol = evaluation.protocol
            if protocol == probes.OWN and dataset is not None and subject.recipe is not None:
                protocol = probes.of_recipe(subject.recipe, dataset) or protocol
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
                or (self.runs / cell).is_dir()
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
        end = ("--data", self.root, "--out", str(self.runs / name))
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
            expects=len(pack),
            resources=evaluation.resources,
            costs=evaluation_costs(evaluation, self.root),
            arch=pack[0].arch,
            units=float(len(pack)),
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


def _slug(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.") or "x"


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
    return _slug("-".join([*parts, *evaluation.datasets]))


@functools.cache
def _geometry(protocol: str | None) -> str | None:
    """What decides a linear protocol's features: its image geometry, as a fingerprint.

    None where augmentation makes them anew for every epoch, or where nobody knows it yet.
    """
    if protocol == probes.OWN:
        return None
    recipe = config.read_recipe(config.find_recipe(protocol or "lorac", "transfer"))
    if recipe.get("kind") == "sgd" and recipe.get("augment", {}) is not None:
        return None
    return config.fingerprint(recipe.get("geometry"))


def _recipe_of(file: Path) -> Mapping[str, Any] | None:
    """The pretraining recipe behind a checkpoint of ours, or one that its run is to write."""
    beside = file.parent / RECIPE_FILE
    if file.is_file():
        recipe = (header.about(file).get("provenance") or {}).get("recipe")
        return recipe if isinstance(recipe, Mapping) else None
    return config.read_yaml(beside) if beside.is_file() else None


def _run_label(path: Path, where: str, *, skip: bool) -> str | None:
    """A pretraining's folder name and what its run.json says: the same before and after it ends.

    With `skip`, None for a folder that is no pretraining (a glob found it, nobody named it).
    """
    # A grid's own folder has its fingerprint in its name already. Another one's label gets one of
    # all that run.json says, for two folders of one name may lie in two places.
    try:
        about = jsons.read(path / RUN_FILE)
        verb = about["verb"]
    except (OSError, ValueError, KeyError, TypeError):
        verb = None
    if verb == "pretrain":
        if re.search(r"-s\d+-[0-9a-f]{8}$", path.name) and path.parent.name == "pretrain":
            return path.name
        return f"{_slug(path.name)[:LONGEST_NAME]}-{config.fingerprint(about)[:8]}"
    if skip:
        return None
    found = f"holds a run of '{verb}'" if verb else f"has no {RUN_FILE}"
    raise BadInput(f"{where}: {path} {found}; a folder must be a run of `backbench pretrain`")


def content_digest(path: Path) -> str:
    """Hex that tells one foreign file from another without reading all of it.

    Of its size, first and last megabyte.
    """
    size = path.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        sha.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        sha.update(file.read())
    return sha.hexdigest()
