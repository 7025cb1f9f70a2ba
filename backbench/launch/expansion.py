"""Turns a grid into jobs: recipes and checkpoints x evaluations. Nothing here starts anything. A
job is one command, `backbench VERB ...`; its run folder's name is a pure function of what decides
its numbers. So a grid always names the same folders, and what a folder holds need not run again.
Pretrainings are jobs, and imports of foreign files; our own files are checkpoints as they are."""

import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backbench.errors import BadInput
from backbench.launch.grid import (
    AGAIN,
    Evaluation,
    Grid,
    Source,
    Sweep,
    evaluations,
    sweeps,
)
from backbench.launch.job import Job
from backbench.recipes import config, fast, own_probe
from backbench.requests.measuring import measuring_request
from backbench.requests.parsing import parse
from backbench.requests.pretrain import PretrainRequest
from backbench.requests.weights import ImportRequest
from backbench.runs.folder import CHECKPOINT_FILE, RECIPE_FILE, RUN_FILE
from backbench.tasks import TASKS, by_kind
from backbench.untrusted import jsons
from backbench.weights import archs, header

LONGEST_NAME = 80  # characters of what people chose, in a folder's name


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A checkpoint that is there or that job `maker` will write; `label` is its folder in RUNS."""

    label: str
    file: str
    maker: str | None = None
    arch: str | None = None  # None where only its file will tell
    recipe: Mapping[str, object] | None = (
        None  # of its pretraining; None where nobody knows it
    )


class Expansion:
    """All jobs of a grid, `needs` and `after` before what follows them; each cell once. `claimed`
    (cell -> job name) are the cells of earlier submissions; those that a pack delivers stay with
    it. With `watching`, a glob may still match nothing."""

    def __init__(
        self,
        grid: Grid,
        runs: Path,
        *,
        where: str,  # the grid, in messages
        data: Path | None = None,
        claimed: Mapping[str, str] | None = None,
        watching: bool = False,
    ) -> None:
        self._runs, self._where, self._watching = runs.resolve(), where, watching
        self._claimed = claimed or {}
        data = data or (Path(grid.data).expanduser() if grid.data else None)
        if data is not None and not data.is_dir():
            raise BadInput(
                f"{where}: data folder {data} is not there; give --data ROOT"
            )
        self._root = str(data.resolve()) if data else None
        self._jobs: dict[str, Job] = {}
        self._subjects: dict[str, Subject] = {}  # by label
        # Submitted jobs that deliver cells of this grid together with others
        self.packed: dict[str, None] = {}
        # Pretrainings outside RUNS that have not written their checkpoint yet
        self.waiting: list[str] = []
        self.again: set[str] = (
            set()
        )  # jobs that train once more, to tell how far trainings differ
        self._seen: set[str] = set()  # contents and labels of what the grid names
        # (checkpoint's label, dataset, image geometry) -> job that puts those features in the cache
        self._features: dict[tuple[str, str, str], str] = {}
        # 1. What makes a checkpoint. Pretrainings come first: a checkpoint that the grid names may
        #    be the folder of one of them
        for sweep in sweeps(grid, where):
            self._add_pretrainings(sweep)
        for i, entry in enumerate(grid.checkpoints):
            keys = {"path": entry} if isinstance(entry, str) else entry
            here = f"{where}: checkpoints[{i}]"
            self._add_named(config.build(Source, keys, where=here), here)
        # 2. What is measured on all of them, once where two entries of the grid name it
        for evaluation in evaluations(grid, where):
            alike = self._by_protocol(evaluation)
            for seed in evaluation.seeds:
                for one, group in alike:
                    self._measure(one, seed, group)
            # Seeds of one checkpoint alone would not be enough to know how far trainings differ
            for one, group in alike:
                for seed in AGAIN if len(group) > 1 else ():
                    self.again |= self._measure(one, seed, group[: evaluation.again])

    @property
    def jobs(self) -> list[Job]:
        return list(self._jobs.values())

    def _folders(self, name: str) -> tuple[Path, Path]:
        """Return where a job reads, and where it writes."""
        if self._root is None:
            raise BadInput(
                f"{self._where}: no data folder; add `data: ROOT` to it or --data ROOT"
            )
        return Path(self._root), self._runs / name

    # Pretrainings

    def _add_pretrainings(self, sweep: Sweep) -> None:
        path = config.find_recipe(sweep.recipe, "pretrain")
        recipe = config.apply_overrides(config.read_recipe(path), sweep.overrides)
        # A shipped recipe goes by its name, a file of one's own by its whole path
        shipped = path.is_relative_to(config.configs_dir())
        file = sweep.recipe if shipped else str(path.resolve())
        for point, seed in itertools.product(sweep.points(), sweep.seeds or (None,)):
            # 1. The point as overrides, with a row of its own on the leaderboard that its seeds share
            overrides = list(sweep.overrides)
            overrides += [
                f"{key}={_text(value)}" for key, value in point.changes.items()
            ]
            if point.labels:
                title = " ".join(
                    [str(recipe.get("name", path.stem)), *_equations(point.labels)]
                )
                overrides.append(f"name={json.dumps(title)}")
            if sweep.expected is not None:
                overrides.append(f"expected={json.dumps(sweep.expected_rows(point))}")
            if seed is not None:
                overrides.append(f"seed={seed}")
            # 2. The folder: readable, and told apart by everything that decides the weights
            changes = (
                fast.overrides(recipe, overrides, str(path))
                if sweep.fast
                else overrides
            )
            whole = config.apply_overrides(recipe, changes)
            identity = {key: value for key, value in whole.items() if key != "probe"}
            if "expected" in identity:
                identity["expected"] = []
            stem = _short("-".join([path.stem, *_equations(point.in_folder)]))
            label = (
                f"{stem}-s{identity.get('seed', 0)}-{config.fingerprint(identity)[:8]}"
            )
            name = f"pretrain/{label}"
            # 3. The job, and the checkpoint that it will write
            data, out = self._folders(name)
            request = PretrainRequest(
                recipe=file,
                overrides=tuple(overrides),
                data=data,
                out=out,
                fast=bool(sweep.fast),
            )
            job = Job(
                name=name,
                argv=request.argv(),
                like=f"pretrain-{path.stem}",
                cells=(name,),
                makes=f"{name}/{CHECKPOINT_FILE}",
                resources=sweep.resources,
                arch=identity.get("arch"),
                units=float(identity.get("epochs", 0)),
            )
            self._jobs.setdefault(name, job)
            made = str(self._runs / name / CHECKPOINT_FILE)
            subject = Subject(
                label=label, file=made, maker=name, arch=job.arch, recipe=whole
            )
            self._subjects[label] = subject

    # Checkpoints

    def _add_named(self, source: Source, where: str) -> None:
        """Add the files of an entry of `checkpoints`, each content once; foreign ones by import."""
        if archs.is_name(source.path):
            if source.encoder is not None:
                raise BadInput(
                    f"{where}: {source.path} names one trunk; leave out encoder"
                )
            stem = source.name or source.path.replace("@", "-")
            label = f"{_short(stem)}-{config.fingerprint(source.path)[:8]}"
            self._add(label, source, source.path, digest=label)
            return
        for path in self._files(source, where):
            if path.is_dir():
                self._add_run(path, where, skip=glob.has_magic(source.path))
                continue
            # One of ours is known by its digest, so the same weights in two files are one
            # checkpoint; a foreign file by part of its content
            digest = header.digest(path)
            stem = source.name or path.name.removesuffix(path.suffix)
            label = f"{_short(stem)}-{(digest or content_digest(path))[:8]}"
            self._add(label, source, str(path), digest=digest)

    def _files(self, source: Source, where: str) -> Iterator[Path]:
        """Yield the checkpoint files and the folders of pretrainings that an entry names."""
        pattern = str(Path(source.path).expanduser())
        matches = [pattern]
        if glob.has_magic(pattern):
            matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - absolute ones too
        if not matches and not self._watching:
            none = f"matches no file (looked from {Path.cwd()})"
            raise BadInput(
                f"{where}: '{source.path}' {none}; --watch waits for files to come"
            )
        if len(matches) > 1 and source.name:
            raise BadInput(
                f"{where}: {len(matches)} files cannot all be named '{source.name}'"
            )
        for text in matches:
            path = Path(text).resolve()
            if not path.exists():
                hint = "give a checkpoint file, a glob, or the folder of a pretraining"
                raise BadInput(f"{where}: {text}: no such file or folder; {hint}")
            # The checkpoint inside a run stands for the run, so both ways of naming it are one
            in_run = path.name == CHECKPOINT_FILE and (path.parent / RUN_FILE).is_file()
            yield path.parent if in_run else path

    def _add_run(self, run: Path, where: str, *, skip: bool) -> None:
        """Add a pretraining's folder: its checkpoint, or the job that will write it."""
        label = _run_label(run, where, skip=skip)
        if label is None or label in self._seen:
            return
        file = run / CHECKPOINT_FILE
        maker = None
        if not file.is_file():
            below = run.is_relative_to(self._runs)
            inside = run.relative_to(self._runs).as_posix() if below else ""
            if inside not in self._claimed and inside not in self._jobs:
                self.waiting.append(
                    str(run)
                )  # nobody here makes it: something to wait for
                return
            maker = self._claimed.get(
                inside, inside
            )  # submitted earlier, or a job of this grid
        self._seen.add(label)
        subject = Subject(
            label=label, file=str(file), maker=maker, recipe=_recipe_of(file)
        )
        self._subjects.setdefault(label, subject)

    def _add(
        self, label: str, source: Source, file: str, *, digest: str | None
    ) -> None:
        """Add a file (or timm:NAME), each content once: as it is if it is one of ours, which has a
        digest, and its entry has no options for an import; else by an import."""
        if (digest or label) in self._seen:
            return
        self._seen.add(digest or label)
        described = (source.name, source.method, source.encoder, source.epochs)
        if digest is not None and described == (None,) * 4:
            recipe = None if archs.is_name(file) else _recipe_of(Path(file))
            self._subjects.setdefault(
                label, Subject(label=label, file=file, recipe=recipe)
            )
            return
        name = f"imported/{label}"
        makes = f"{name}/{CHECKPOINT_FILE}"
        made = str(self._runs / makes)
        request = ImportRequest(
            file=Path(file),
            out=Path(made),
            name=source.name,
            method=source.method,
            encoder=source.encoder,
            epochs=source.epochs,
        )
        job = Job(
            name=name, argv=request.argv(), like="import", cells=(name,), makes=makes
        )
        self._jobs.setdefault(name, job)
        self._subjects.setdefault(label, Subject(label=label, file=made, maker=name))

    # Evaluations

    def _by_protocol(
        self, evaluation: Evaluation
    ) -> list[tuple[Evaluation, list[Subject]]]:
        """Return the evaluations that `own` stands for, each with its checkpoints. A foreign file
        has no recipe here: its own protocol is looked up when it is measured."""
        alike: dict[tuple[str | None, str | None], list[Subject]] = {}
        for subject in self._subjects.values():
            trained_on = own_probe.pretrained_on(subject.recipe)
            if evaluation.pretrained_on and trained_on not in evaluation.pretrained_on:
                continue
            dataset = next(iter(evaluation.datasets), None)
            if dataset == own_probe.OWN:
                if trained_on is None:
                    unknown = f"nobody knows what {subject.file} was pretrained on"
                    raise BadInput(
                        f"{self._where}: {unknown}; name the dataset in place of 'own'"
                    )
                dataset = trained_on
            protocol = evaluation.protocol
            if (
                protocol == own_probe.OWN
                and dataset is not None
                and subject.recipe is not None
            ):
                # This grid's own recipes may name a file; others were read from a checkpoint
                file = None if subject.maker in self._jobs else subject.file
                protocol = (
                    own_probe.of_recipe(subject.recipe, dataset, file) or protocol
                )
            alike.setdefault((dataset, protocol), []).append(subject)
        out = []
        for (dataset, protocol), group in alike.items():
            datasets = () if dataset is None else (dataset,)
            one = dataclasses.replace(evaluation, datasets=datasets, protocol=protocol)
            out.append((one, group))
        return out

    def _measure(
        self, evaluation: Evaluation, seed: int, group: Sequence[Subject]
    ) -> set[str]:
        """Add the jobs of one evaluation, ready checkpoints in packs and the others one by one;
        return the names of those that are new."""
        # A cell's name holds all options that decide its number, and none of the others
        options = dataclasses.asdict(evaluation)
        for name in ("pack", "resources", "seeds", "again", "lists", "pretrained_on"):
            del options[name]
        slug = f"{_kind(evaluation)}-s{seed}-{config.fingerprint(options)[:6]}"
        groups: list[list[Subject]] = []
        together: list[Subject] = []
        for subject in group:
            cell = f"{subject.label}/{slug}"
            owner = self._claimed.get(cell)
            if owner is not None and owner != cell:  # a pack that was submitted before
                self.packed[owner] = None
            elif (
                evaluation.pack == 1
                or owner == cell  # submitted alone, or run alone by hand
                or (self._runs / cell).is_dir()
                or subject.maker is not None  # a pack would wait for the slowest maker
            ):
                groups.append([subject])
            else:
                together.append(subject)
        for start in range(0, len(together), evaluation.pack):
            groups.append(together[start : start + evaluation.pack])
        before = set(self._jobs)
        for pack in groups:
            job = self._job(evaluation, seed, slug, pack)
            self._jobs.setdefault(job.name, job)
        return self._jobs.keys() - before

    def _job(
        self, evaluation: Evaluation, seed: int, slug: str, pack: Sequence[Subject]
    ) -> Job:
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
        geometry = (
            _geometry(evaluation.protocol) if evaluation.verb == "linear" else None
        )
        if geometry is not None:
            keys = [(label, evaluation.datasets[0], geometry) for label in labels]
            first = {self._features.setdefault(key, name) for key in keys}
        data, out = self._folders(name)
        return Job(
            name=name,
            argv=_argv(evaluation, [s.file for s in pack], seed, data, out),
            like=_kind(evaluation),
            cells=cells,
            needs=tuple(subject.maker for subject in pack if subject.maker is not None),
            after=tuple(sorted(first - {name})),
            resources=evaluation.resources,
            arch=pack[0].arch,
            units=len(pack),
        )


def folder_name(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.") or "x"


def _short(text: str) -> str:
    return folder_name(text)[:LONGEST_NAME]


def _text(value: object) -> str:
    """A value as it stands in an override. JSON is YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def _equations(labels: Mapping[str, object]) -> list[str]:
    return [f"{label}={_text(value)}" for label, value in labels.items()]


def _recipe_of(file: Path) -> Mapping[str, object] | None:
    """The pretraining recipe in a checkpoint of ours, or beside it before it is written."""
    beside = file.parent / RECIPE_FILE
    if file.is_file():
        recipe = (header.about(file).get("provenance") or {}).get("recipe")
        return recipe if isinstance(recipe, Mapping) else None
    return config.read_yaml(beside) if beside.is_file() else None


def _run_label(path: Path, where: str, *, skip: bool) -> str | None:
    """Return the label of a pretraining's folder: the same before and after it ends. With `skip`,
    None for a folder that is no pretraining (a glob found it, nobody named it)."""
    # A grid's own folder has its fingerprint in its name already. Another one's label gets one of
    # all that run.json says, for two folders of one name may lie in two places.
    try:
        about = jsons.read(path / RUN_FILE)
        verb = about["verb"]
    except (OSError, ValueError, KeyError, TypeError):
        verb = None
    if verb == "pretrain":
        if (
            re.search(r"-s\d+-[0-9a-f]{8}$", path.name)
            and path.parent.name == "pretrain"
        ):
            return path.name
        return f"{_short(path.name)}-{config.fingerprint(about)[:8]}"
    if skip:
        return None
    content = f"holds a run of '{verb}'" if verb else f"has no {RUN_FILE}"
    raise BadInput(
        f"{where}: {path} {content}; a folder must be a run of `backbench pretrain`"
    )


def content_digest(path: Path) -> str:
    """Hash a foreign file's size, first and last megabyte: it is told apart without reading all."""
    size = path.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        sha.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        sha.update(file.read())
    return sha.hexdigest()


def _argv(
    evaluation: Evaluation, files: Sequence[str], seed: int, data: Path, out: Path
) -> tuple[str, ...]:
    """Write the command that measures these checkpoint files."""
    request = measuring_request(
        evaluation.verb,
        [Path(file) for file in files],
        data=data,
        out=out,
        dataset=next(iter(evaluation.datasets), None),
        recipe=evaluation.config or evaluation.protocol,
        percent=evaluation.percent,
        lists=Path(evaluation.lists).resolve() if evaluation.lists else None,
        engine=evaluation.engine or "auto",
        seed=seed,
    )
    if evaluation.args:  # options by hand are read as the command line reads them
        request = parse((*request.argv(), *evaluation.args))
    return request.argv()


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
    """Return a fingerprint of the image geometry, which decides a linear protocol's features. None
    where augmentation makes them anew for every epoch, or where nobody knows it yet."""
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
