"""Turns a grid into jobs: recipes and checkpoints, each with every evaluation. Nothing runs here.

A job is one command, `backbench VERB ...`. The name of its run folder is a pure function of what
decides its numbers, so a grid always names the same folders, and what a folder holds need not run
again.

    a recipe of the grid     -> a job that pretrains it, for each point and seed
    a foreign checkpoint     -> a job that imports it; our own files are measured as they are
    an evaluation            -> a job for each checkpoint, or for each pack of checkpoints
"""

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
    REPEAT_SEEDS,
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
DIGITS = 8  # of a checkpoint's digest, in the name of its folder


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A checkpoint that is measured: a file that is there, or one that job `maker` will write."""

    label: str  # its folder in RUNS, where its evaluations lie
    file: str
    maker: str | None = None
    # The recipe of its pretraining; None where nobody knows it
    recipe: Mapping[str, object] | None = None


class Expansion:
    """All jobs of a grid, each once, and each after its `needs` and its `after`.

    A cell is one evaluation of one checkpoint, named CHECKPOINT/EVALUATION. `claimed` (cell -> job
    name) are the cells of earlier submissions; a cell that belongs to a pack stays with that pack.
    With `watching`, a glob may still match nothing.
    """

    def __init__(
        self,
        grid: Grid,
        runs: Path,
        *,
        where: str,  # the grid, in messages
        data: Path | None = None,
        claimed: Mapping[str, str] | None = None,
        watching: bool = False,
        data_later: bool = False,
    ) -> None:
        self._runs = runs.resolve()
        self._where = where
        self._watching = watching
        self._claimed = claimed or {}
        if data is None and grid.data:
            data = Path(grid.data).expanduser()
        if data is not None and not data.is_dir() and not data_later:
            raise BadInput(
                f"{where}: data folder {data} is not there; give --data ROOT, or add --data-later if"
                " the nodes have it"
            )
        self._root = str(data.resolve()) if data else None
        self._jobs: dict[str, Job] = {}
        self._subjects: dict[str, Subject] = {}  # by label
        # Names of submitted packs that deliver cells of this grid: a set that keeps its order
        self.packed: dict[str, None] = {}
        # Pretrainings outside RUNS that have not written their checkpoint yet
        self.waiting: list[str] = []
        self.measures: dict[str, tuple[str, ...]] = {}  # job -> its checkpoints' files
        # Jobs that train once more, to tell how far trainings differ
        self.again: set[str] = set()
        self._seen: set[str] = set()  # contents and labels of what the grid names
        # (checkpoint's label, dataset, image geometry) -> job that puts those features in the cache
        self._features: dict[tuple[str, str, str], str] = {}
        # 1. What makes a checkpoint. Pretrainings come first: a checkpoint that the grid names may
        #    be the folder of one of them.
        for sweep in sweeps(grid, where):
            self._add_pretrainings(sweep)
        for i, entry in enumerate(grid.checkpoints):
            keys = {"path": entry} if isinstance(entry, str) else entry
            here = f"{where}: checkpoints[{i}]"
            self._add_named(config.build(Source, keys, where=here), here)
        # 2. What is measured on all of them
        for evaluation in evaluations(grid, where):
            alike = self._by_protocol(evaluation)
            for seed in evaluation.seeds:
                for one, group in alike:
                    self._measure(one, seed, group)
            # The first few checkpoints train again with other seeds. The seeds of one checkpoint
            # alone would not be enough to know how far trainings differ.
            for one, group in alike:
                if len(group) == 1:
                    continue
                for seed in REPEAT_SEEDS:
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
        # A shipped recipe goes by its name, a file of one's own by its whole path.
        shipped = path.is_relative_to(config.configs_dir())
        file = sweep.recipe if shipped else str(path.resolve())
        for point, seed in itertools.product(sweep.points(), sweep.seeds or (None,)):
            # 1. The point as overrides. Its name gives it a row of its own on the leaderboard, which
            #    its seeds share.
            overrides = list(sweep.overrides)
            overrides += _equations(point.changes)
            if point.labels:
                name = str(recipe.get("name", path.stem))
                title = " ".join([name, *_equations(point.labels)])
                overrides.append(f"name={json.dumps(title)}")
            if sweep.expected is not None:
                overrides.append(f"expected={json.dumps(sweep.expected_rows(point))}")
            if seed is not None:
                overrides.append(f"seed={seed}")
            # 2. The folder: readable, and told apart by everything that decides the weights
            changes = overrides
            if sweep.fast:
                changes = fast.overrides(recipe, overrides, str(path))
            whole = config.apply_overrides(recipe, changes)
            identity = dict(whole)
            identity.pop("probe", None)
            if "expected" in identity:
                identity["expected"] = []
            stem = _short("-".join([path.stem, *_equations(point.in_folder)]))
            seed_of_weights = identity.get("seed", 0)
            label = f"{stem}-s{seed_of_weights}-{config.fingerprint(identity)[:8]}"
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
            )
            self._jobs.setdefault(name, job)
            made = str(self._runs / name / CHECKPOINT_FILE)
            subject = Subject(label=label, file=made, maker=name, recipe=whole)
            self._subjects[label] = subject

    # Checkpoints

    def _add_named(self, source: Source, where: str) -> None:
        """Add the files of an entry of `checkpoints`, each content once; foreign ones by import."""
        # A name of timm's is a checkpoint without a file.
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
                self._add_run(path, where, is_named=not glob.has_magic(source.path))
                continue
            # A file of ours is known by its digest, so the same weights in two files are one
            # checkpoint; a foreign file is known by part of its content.
            digest = header.digest(path)
            stem = source.name or path.name.removesuffix(path.suffix)
            label = f"{_short(stem)}-{(digest or content_digest(path))[:DIGITS]}"
            if digest is not None and source.name is None:
                label = self._label_of_weights(label)
            self._add(label, source, str(path), digest=digest)

    def _label_of_weights(self, label: str) -> str:
        """Return the label under which these weights were measured, if only their file was renamed."""
        if label in self._measured:
            return label
        digits = label[-DIGITS - 1 :]
        return next((one for one in self._measured if one.endswith(digits)), label)

    @functools.cached_property
    def _measured(self) -> dict[str, None]:
        """The labels of what was measured or submitted before: a set that keeps its order."""
        submitted = (cell.partition("/")[0] for cell in self._claimed)
        folders = sorted(self._runs.iterdir()) if self._runs.is_dir() else []
        return dict.fromkeys([*submitted, *(folder.name for folder in folders)])

    def _files(self, source: Source, where: str) -> Iterator[Path]:
        """Yield the checkpoint files and the folders of pretrainings that an entry names."""
        pattern = str(Path(source.path).expanduser())
        matches = [pattern]
        if glob.has_magic(pattern):
            matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - absolute ones too
        if not matches and not self._watching:
            raise BadInput(
                f"{where}: '{source.path}' matches no file (looked from {Path.cwd()}); --watch"
                " waits for files to come"
            )
        if len(matches) > 1 and source.name:
            raise BadInput(
                f"{where}: {len(matches)} files cannot all be named '{source.name}'"
            )
        for text in matches:
            path = Path(text).resolve()
            if not path.exists():
                raise BadInput(
                    f"{where}: {text}: no such file or folder; give a checkpoint file, a glob, or"
                    " the folder of a pretraining"
                )
            # The checkpoint inside a run stands for the run: both ways of naming it are one.
            in_run = path.name == CHECKPOINT_FILE and (path.parent / RUN_FILE).is_file()
            yield path.parent if in_run else path

    def _add_run(self, run: Path, where: str, *, is_named: bool) -> None:
        """Add a pretraining's folder: its checkpoint, or the job that will write it.

        A folder that is no pretraining is refused if the grid names it, and left out if a glob
        found it.
        """
        label = _run_label(run, where, is_named=is_named)
        if label is None or label in self._seen:
            return
        file = run / CHECKPOINT_FILE
        maker = None
        if not file.is_file():
            name = ""  # of the job that makes it
            if run.is_relative_to(self._runs):
                name = run.relative_to(self._runs).as_posix()
            if name in self._claimed:  # submitted earlier
                maker = self._claimed[name]
            elif name in self._jobs:
                maker = name
            else:
                self.waiting.append(str(run))  # nobody here makes it
                return
        self._seen.add(label)
        subject = Subject(
            label=label, file=str(file), maker=maker, recipe=_recipe_of(file)
        )
        self._subjects.setdefault(label, subject)

    def _add(
        self, label: str, source: Source, file: str, *, digest: str | None
    ) -> None:
        """Add a file (or timm:NAME), each content once.

        A file of ours has a digest. It is measured as it is, unless its entry has options for an
        import; everything else is imported first.
        """
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
        """Return the evaluations that `own` stands for, each with its checkpoints.

        A foreign file has no recipe here: its own protocol is looked up when it is measured.
        """
        alike: dict[tuple[str | None, str | None], list[Subject]] = {}
        for subject in self._subjects.values():
            trained_on = own_probe.pretrained_on(subject.recipe)
            if evaluation.pretrained_on and trained_on not in evaluation.pretrained_on:
                continue
            dataset = evaluation.datasets[0] if evaluation.datasets else None
            if dataset == own_probe.OWN:
                if trained_on is None:
                    raise BadInput(
                        f"{self._where}: nobody knows what {subject.file} was pretrained on; name"
                        " the dataset in place of 'own'"
                    )
                dataset = trained_on
            protocol = evaluation.protocol
            if (
                protocol == own_probe.OWN
                and dataset is not None
                and subject.recipe is not None
            ):
                # A recipe of this grid may name a file as its probe. One that was read from a
                # checkpoint may not: it is somebody else's.
                file = None if subject.maker in self._jobs else subject.file
                of_recipe = own_probe.of_recipe(subject.recipe, dataset, file)
                protocol = of_recipe or protocol
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
        """Add the jobs of one evaluation of these checkpoints; return the names of new jobs."""
        # 1. The cells' name holds all options that decide their numbers, and none of the others.
        options = dataclasses.asdict(evaluation)
        for name in ("pack", "resources", "seeds", "again", "lists", "pretrained_on"):
            del options[name]
        # A published list is of its protocol. Another one decides which labels are seen.
        if evaluation.lists and evaluation.datasets:
            options["list"] = _list_digest(evaluation)
        slug = f"{_kind(evaluation)}-s{seed}-{config.fingerprint(options)[:6]}"
        # 2. Which checkpoints share a pass over the dataset, and which are measured alone
        alone: list[Subject] = []
        together: list[Subject] = []
        for subject in group:
            cell = f"{subject.label}/{slug}"
            owner = self._claimed.get(cell)
            if owner is not None and owner != cell:  # a pack that was submitted before
                self.packed[owner] = None
            elif (
                evaluation.pack == 1
                or owner == cell  # submitted alone
                or (self._runs / cell).is_dir()  # run alone by hand
                or subject.maker is not None  # a pack would wait for the slowest maker
            ):
                alone.append(subject)
            else:
                together.append(subject)
        packs = [[subject] for subject in alone]
        for start in range(0, len(together), evaluation.pack):
            packs.append(together[start : start + evaluation.pack])
        # 3. Their jobs
        before = set(self._jobs)
        for pack in packs:
            job = self._job(evaluation, seed, slug, pack)
            self._jobs.setdefault(job.name, job)
        return self._jobs.keys() - before

    def _job(
        self, evaluation: Evaluation, seed: int, slug: str, pack: Sequence[Subject]
    ) -> Job:
        """Return the job of one evaluation of these checkpoints."""
        labels = [subject.label for subject in pack]
        cells = tuple(f"{label}/{slug}" for label in labels)
        # The folder of one checkpoint is its cell's. A pack's folder names its members by a
        # fingerprint: the same checkpoints, in whatever order, are the same pack.
        name = cells[0]
        if len(pack) > 1:
            name = f"packs/{slug}-{len(pack)}x-{config.fingerprint(sorted(labels))[:8]}"
        # The first job that needs some features leaves them in the cache, and others come after it.
        fills_cache: set[str] = set()
        if evaluation.verb == "linear":
            geometry = _geometry(evaluation.protocol)
            if geometry is not None:
                for label in labels:
                    key = (label, evaluation.datasets[0], geometry)
                    fills_cache.add(self._features.setdefault(key, name))
        data, out = self._folders(name)
        files = tuple(subject.file for subject in pack)
        self.measures[name] = files
        return Job(
            name=name,
            argv=_argv(evaluation, files, seed, data, out),
            like=_kind(evaluation),
            cells=cells,
            needs=tuple(subject.maker for subject in pack if subject.maker is not None),
            after=tuple(sorted(fills_cache - {name})),
            resources=evaluation.resources,
        )


def folder_name(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.") or "x"


def _short(text: str) -> str:
    return folder_name(text)[:LONGEST_NAME]


def _text(value: object) -> str:
    """Write a value as it stands in an override, which is YAML; JSON is YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def _equations(labels: Mapping[str, object]) -> list[str]:
    return [f"{label}={_text(value)}" for label, value in labels.items()]


def _recipe_of(file: Path) -> Mapping[str, object] | None:
    """Return the pretraining recipe in a checkpoint of ours, or beside it before it is written."""
    if file.is_file():
        provenance = header.about(file).get("provenance") or {}
        recipe = provenance.get("recipe")
        return recipe if isinstance(recipe, Mapping) else None
    beside = file.parent / RECIPE_FILE
    return config.read_yaml(beside) if beside.is_file() else None


def _run_label(path: Path, where: str, *, is_named: bool) -> str | None:
    """Return the label of a pretraining's folder: the same before and after it ends.

    A folder that is no pretraining is refused if it `is_named`; for another one, None.
    """
    try:
        about = jsons.read(path / RUN_FILE)
        verb = about["verb"]
    except (OSError, ValueError, KeyError, TypeError):
        verb = None
    if verb == "pretrain":
        # The folder that a grid made has a fingerprint in its name already.
        has_fingerprint = re.search(r"-s\d+-[0-9a-f]{8}$", path.name) is not None
        if has_fingerprint and path.parent.name == "pretrain":
            return path.name
        # Two folders of one name may lie in two places: they differ in what run.json says.
        return f"{_short(path.name)}-{config.fingerprint(about)[:8]}"
    if not is_named:
        return None
    content = f"holds a run of '{verb}'" if verb else f"has no {RUN_FILE}"
    raise BadInput(
        f"{where}: {path} {content}; a folder must be a run of `backbench pretrain`"
    )


def content_digest(path: Path) -> str:
    """Hash a foreign file's size, first and last megabyte: enough to tell it apart, and fast."""
    size = path.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        sha.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        sha.update(file.read())
    return sha.hexdigest()


def _list_digest(evaluation: Evaluation) -> str:
    file = Path(str(evaluation.lists)) / f"{evaluation.percent}percent.txt"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


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
    """Return the words of a job's name: `linear-lorac-cifar10`, `detect-mask_rcnn_R_50_FPN_1x`."""
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
    """Return a fingerprint of the image geometry, which decides a linear protocol's features.

    None where no cache holds the features (augmentation makes them anew for every epoch, or they are
    not pooled), or where nobody knows the protocol yet.
    """
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
