"""Grids: recipes and checkpoints x evaluations, expanded into jobs. Nothing here starts anything.

A job is one command, `backbench VERB ...`, with a run folder whose name is a pure function of what decides its numbers.
So the same grid always names the same folders, and what a folder already holds need not run again.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from backbench import config
from backbench.datasets.catalog import TWELVE
from backbench.errors import BadInput, nearest
from backbench.runs.folder import CHECKPOINT_FILE, RESULTS_FILE, RUN_FILE
from backbench.tasks import DETECTION, TASKS, VERBS
from backbench.weights import header

TABLE2 = tuple(TWELVE)
TABLE4 = tuple(TASKS[name].recipe for name in DETECTION)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command of the suite. `name` is unique and is its run folder below RUNS.

    `cells` are the (checkpoint, evaluation) pairs it delivers: one run may serve several checkpoints. It is done when
    the file `makes` exists, or else when its results.jsonl speaks of `expects` (checkpoint, dataset) pairs. `needs`
    must have succeeded before it starts, `after` should be over (they fill a cache). `like` names what costs the same.
    """

    name: str
    argv: tuple[str, ...]
    like: str
    cells: tuple[str, ...]
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    makes: str | None = None
    expects: int = 1
    resources: Mapping[str, Any] = field(
        default_factory=dict
    )  # over the cluster's row for this verb

    @property
    def verb(self) -> str:
        return self.argv[0]

    @property
    def key(self) -> str:
        """The name as a short file name."""
        return config.fingerprint(self.name)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Job:
        lists = {k: tuple(data[k]) for k in ("argv", "cells", "needs", "after")}
        return Job(**{**data, **lists})


def finished(job: Job, runs: Path) -> bool:
    """Whether the run folder already holds what the job delivers."""
    if job.makes is not None:
        return (runs / job.makes).is_file()
    file = runs / job.name / RESULTS_FILE
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return False
    pairs = set()
    for line in lines:
        try:
            row = json.loads(line)
            pairs.add((row["checkpoint"], row["dataset"]))
        except (json.JSONDecodeError, KeyError, TypeError):
            continue  # a torn line is no result; the leaderboard reports it
    return len(pairs) >= job.expects


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint of the grid: a file, a glob, or the folder of a pretraining that is finished or still running."""

    path: str
    name: str | None = None
    method: str | None = None
    encoder: str | None = None
    epochs: int | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Pretrainings: one recipe, changed by every combination of `vary`, with every seed."""

    recipe: str
    overrides: tuple[str, ...] = ()
    vary: dict[str, Any] = field(default_factory=dict)  # key: list of values
    seeds: tuple[int, ...] = ()
    resources: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, values in self.vary.items():
            if not isinstance(values, list | tuple) or not values:
                raise ValueError(f"vary.{key} must be a list of values, not {values!r}")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured on every checkpoint: a verb with options. `pack` checkpoints share one pass over a dataset."""

    verb: Literal["linear", "semisup", "finetune", "analyze", "detect"]
    datasets: tuple[str, ...] = ()
    protocol: str | None = None
    percent: Literal[1, 10] | None = None
    lists: str | None = None
    config: str | None = None
    engine: Literal["auto", "detectron2", "torchvision"] | None = None
    seeds: tuple[int, ...] = (0,)
    pack: int = 1
    args: tuple[str, ...] = ()  # handed to the verb as they are
    resources: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        verb = VERBS[self.verb]
        empty: dict[str, Any] = {"datasets": (), "pack": 1}
        for name in ("datasets", "protocol", "percent", "lists", "config", "engine", "pack"):
            given = getattr(self, name) != empty.get(name)
            if given and name not in verb.takes:
                raise ValueError(
                    f"'{self.verb}' takes no '{name}'; it takes {', '.join(verb.takes)}"
                )
            if not given and name in verb.needs:
                raise ValueError(f"'{self.verb}' needs '{name}'")
        if self.verb == "detect" and self.seeds != (0,):
            raise ValueError("'detect' takes its seed from the config: args: [SEED, '1']")
        if self.pack < 1:
            raise ValueError("pack must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """configs/grids/*.yaml. `data` and `lists` may also come from the command line or the single evaluations."""

    name: str
    evaluate: tuple[Any, ...] = ()  # names (table2, table3, table4, imagenet, all) or Evaluations
    checkpoints: tuple[Any, ...] = ()  # paths, globs, folders, or Sources
    recipes: tuple[Any, ...] = ()  # names, files, or Recipes
    data: str | None = None
    lists: str | None = None
    engine: Literal["auto", "detectron2", "torchvision"] = "auto"
    pack: int = 4  # for the sets of evaluations, where sharing a pass saves decoding


def read_grid(name: str | Path, overrides: Sequence[str] = ()) -> Grid:
    path = config.find_recipe(name, "grids")
    data = config.apply_overrides(config.read_recipe(path), overrides)
    grid = config.build(Grid, {"name": path.stem, **data}, where=str(path))
    if not re.fullmatch(r"[\w.+-]+", grid.name):
        raise BadInput(
            f"{path}: the grid's name '{grid.name}' may hold letters, digits and . _ + - only"
        )
    if not grid.checkpoints and not grid.recipes:
        raise BadInput(f"{path}: names neither checkpoints nor recipes; there is nothing to run")
    return grid


def evaluations(grid: Grid, where: str) -> list[Evaluation]:
    """The grid's `evaluate` with the names of whole tables written out, each evaluation once."""
    table2 = [
        Evaluation(verb="linear", datasets=(d,), protocol="lorac", pack=grid.pack) for d in TABLE2
    ]
    table3 = [Evaluation(verb="semisup", percent=p, lists=grid.lists) for p in (1, 10)]
    table4 = [Evaluation(verb="detect", config=c, engine=grid.engine) for c in TABLE4]
    imagenet = [
        Evaluation(
            verb="linear", datasets=("imagenet",), protocol="imagenet_lorac", pack=grid.pack
        ),
        Evaluation(verb="linear", datasets=("imagenet",), protocol="knn", pack=grid.pack),
    ]
    sets = {"imagenet": imagenet, "table2": table2, "table3": table3, "table4": table4}
    sets["all"] = [e for rows in list(sets.values()) for e in rows]
    out: list[Evaluation] = []
    for i, entry in enumerate(grid.evaluate):
        if isinstance(entry, str):
            if entry not in sets:
                raise BadInput(
                    f"{where}: unknown evaluation '{entry}'; {nearest(entry, sets)}, or a `verb:` with options"
                )
            new = sets[entry]
        elif isinstance(entry, Mapping):
            given = {
                k: [v] if k in ("datasets", "seeds") and not isinstance(v, list) else v
                for k, v in entry.items()
            }
            one = config.build(Evaluation, given, where=f"{where}: evaluate[{i}]")
            if "all" in one.datasets:
                one = dataclasses.replace(one, datasets=TABLE2)
            new = (
                [dataclasses.replace(one, datasets=(d,)) for d in one.datasets]
                if one.datasets
                else [one]
            )
        else:
            raise BadInput(
                f"{where}: evaluate[{i}] is {entry!r}; a name ({', '.join(sets)}) or a `verb:` with options"
            )
        for each in new:
            evaluation = each
            if evaluation.verb == "semisup" and not evaluation.lists:
                if not grid.lists:
                    raise BadInput(
                        f"{where}: semisup needs `lists: DIR`, the folder with 1percent.txt and 10percent.txt"
                    )
                evaluation = dataclasses.replace(evaluation, lists=grid.lists)
            if (
                evaluation.lists
                and not (
                    file := Path(evaluation.lists) / f"{evaluation.percent}percent.txt"
                ).is_file()
            ):
                raise BadInput(
                    f"{where}: semisup: {file}: no such file; `backbench data fetch-splits` writes SimCLR's lists"
                )
            if evaluation.config is not None:
                config.find_recipe(evaluation.config, "detection")
            if evaluation.protocol is not None:
                config.find_recipe(evaluation.protocol, "transfer")
            if evaluation not in out:
                out.append(evaluation)
    return out


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A checkpoint that exists, or that a job of the grid (`maker`) will write. `label` names its folder below RUNS."""

    label: str
    file: str
    maker: str | None = None


@dataclass(frozen=True)
class Expansion:
    jobs: list[Job]
    packed: list[
        str
    ]  # names of submitted jobs that deliver cells of this grid together with others
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
    """All jobs of the grid, in an order in which `needs` and `after` come first; each cell exactly once.

    `claimed` (cell -> job name) are the cells of earlier submissions; those that a pack delivers stay with it. With
    `watching`, a glob may still match nothing.
    """
    return _Expander(
        grid, runs.resolve(), where, data=data, claimed=claimed or {}, watching=watching
    ).expand()


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
        self.grid, self.runs, self.where, self.claimed, self.watching = (
            grid,
            runs,
            where,
            claimed,
            watching,
        )
        folder = data or (Path(grid.data).expanduser() if grid.data else None)
        self._root = str(folder.resolve()) if folder else None
        if folder is not None and not folder.is_dir():
            raise BadInput(f"{where}: data folder {folder} is not there; give --data ROOT")
        self.jobs: dict[str, Job] = {}
        self.packed: dict[str, None] = {}
        self.waiting: list[str] = []
        self.subjects: dict[str, Subject] = {}
        self.features: dict[tuple[str, str, str], str] = {}

    @property
    def root(self) -> str:
        if self._root is None:
            raise BadInput(
                f"{self.where}: no data folder; add `data: ROOT` to the grid or --data ROOT"
            )
        return self._root

    def expand(self) -> Expansion:
        for job in self._pretrainings():
            self.jobs.setdefault(job.name, job)
            label = Path(job.name).name
            self.subjects[label] = Subject(
                label=label, file=str(self.runs / str(job.makes)), maker=job.name
            )
        for subject, maker in self._checkpoints():
            if maker is not None:
                self.jobs.setdefault(maker.name, maker)
            self.subjects.setdefault(subject.label, subject)
        for evaluation in evaluations(self.grid, self.where):
            for seed in evaluation.seeds:
                for job in self._evaluate(evaluation, seed):
                    self.jobs.setdefault(job.name, job)
        return Expansion(list(self.jobs.values()), list(self.packed), self.waiting)

    def _pretrainings(self) -> Iterator[Job]:
        for i, entry in enumerate(self.grid.recipes):
            given = {"recipe": entry} if isinstance(entry, str) else entry
            one = config.build(Recipe, given, where=f"{self.where}: recipes[{i}]")
            path = config.find_recipe(one.recipe, "pretrain")
            recipe = str(path.resolve()) if Path(one.recipe).is_file() else one.recipe
            whole = config.apply_overrides(config.read_recipe(path), one.overrides)
            for values in itertools.product(*one.vary.values()):
                variant = [f"{key}={_yaml(value)}" for key, value in zip(one.vary, values)]
                short = [
                    text.partition("=")[0].rpartition(".")[2] + "=" + text.partition("=")[2]
                    for text in variant
                ]
                changes = list(variant)
                if (
                    variant
                ):  # rows of their own on the leaderboard; the seeds of one variant share the name
                    changes.append(
                        f"name={json.dumps(' '.join([str(whole.get('name', path.stem)), *short]))}"
                    )
                for seed in one.seeds or (None,):
                    overrides = [
                        *one.overrides,
                        *changes,
                        *([f"seed={seed}"] if seed is not None else []),
                    ]
                    identity = config.apply_overrides(whole, overrides)
                    stem = _slug("-".join([path.stem, *short]))[:80]
                    name = f"pretrain/{stem}-s{identity.get('seed', 0)}-{config.fingerprint(identity)[:8]}"
                    yield Job(
                        name=name,
                        argv=(
                            "pretrain",
                            recipe,
                            *overrides,
                            "--data",
                            self.root,
                            "--out",
                            str(self.runs / name),
                        ),
                        like=f"pretrain-{path.stem}",
                        cells=(name,),
                        makes=f"{name}/{CHECKPOINT_FILE}",
                        resources=one.resources,
                    )

    def _checkpoints(self) -> Iterator[tuple[Subject, Job | None]]:
        """Every checkpoint named by a path, a glob or a folder, once per content; foreign files with their import."""
        seen: set[str] = set()
        for i, entry in enumerate(self.grid.checkpoints):
            where = f"{self.where}: checkpoints[{i}]"
            source = config.build(
                Source, {"path": entry} if isinstance(entry, str) else entry, where=where
            )
            pattern = str(Path(source.path).expanduser())
            magic = glob.has_magic(pattern)
            found = sorted(glob.glob(pattern, recursive=True)) if magic else [pattern]  # noqa: PTH207 - absolute too
            if not found and not self.watching:
                raise BadInput(
                    f"{where}: '{source.path}' matches no file; --watch waits for files to come"
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
                if path.name == CHECKPOINT_FILE and (path.parent / RUN_FILE).is_file():
                    path = path.parent
                if path.is_dir():
                    label = _run_label(path, where, skip=magic)
                    identity, pair = label, self._pretrained(path, label) if label else None
                else:
                    digest = header.digest(path)
                    stem = _slug(source.name or path.name.removesuffix(path.suffix))[:80]
                    label = f"{stem}-{(digest or content_digest(path))[:8]}"
                    identity, pair = digest or label, self._file(source, path, label, digest)
                if pair is not None and identity is not None and identity not in seen:
                    seen.add(identity)
                    yield pair

    def _pretrained(self, path: Path, label: str) -> tuple[Subject, Job | None] | None:
        """A pretraining's folder: its checkpoint, or the submitted job that will write it, or something to wait for."""
        file = path / CHECKPOINT_FILE
        if file.is_file():
            return Subject(label=label, file=str(file)), None
        inside = path.relative_to(self.runs).as_posix() if path.is_relative_to(self.runs) else ""
        maker = self.claimed.get(inside) or (inside if inside in self.jobs else None)
        if maker is None:
            self.waiting.append(str(path))
            return None
        return Subject(label=label, file=str(file), maker=maker), None

    def _file(
        self, source: Source, path: Path, label: str, digest: str | None
    ) -> tuple[Subject, Job | None]:
        if digest is not None and not (
            source.name or source.method or source.encoder or source.epochs is not None
        ):
            return Subject(label=label, file=str(path)), None
        name = f"imported/{label}"
        makes = f"{name}/{CHECKPOINT_FILE}"
        options: list[str] = []
        for option in ("name", "method", "encoder", "epochs"):
            if getattr(source, option) is not None:
                options += [f"--{option}", str(getattr(source, option))]
        argv = ("import", str(path), *options, "--out", str(self.runs / makes))
        job = Job(name=name, argv=argv, like="import", cells=(name,), makes=makes)
        return Subject(label=label, file=str(self.runs / makes), maker=name), job

    def _evaluate(self, evaluation: Evaluation, seed: int) -> Iterator[Job]:
        """The jobs of one evaluation: ready checkpoints in packs, the others one by one behind their makers."""
        options = dataclasses.asdict(evaluation)
        for name in ("pack", "resources", "seeds", "lists"):  # they decide no number
            del options[name]
        slug = f"{_like(evaluation)}-s{seed}-{config.fingerprint(options)[:6]}"
        alone: list[Subject] = []
        together: list[Subject] = []
        for subject in self.subjects.values():
            cell = f"{subject.label}/{slug}"
            owner = self.claimed.get(cell)
            if owner is not None and owner != cell:
                self.packed[owner] = None
            elif (
                evaluation.pack == 1
                or owner == cell
                or subject.maker is not None
                or (self.runs / cell).is_dir()
            ):
                alone.append(subject)
            else:
                together.append(subject)
        packs = [
            together[i : i + evaluation.pack] for i in range(0, len(together), evaluation.pack)
        ]
        for pack in [*([s] for s in alone), *packs]:
            yield from self._job(evaluation, seed, slug, pack)

    def _job(
        self, evaluation: Evaluation, seed: int, slug: str, pack: Sequence[Subject]
    ) -> Iterator[Job]:
        labels = [s.label for s in pack]
        cells = tuple(f"{label}/{slug}" for label in labels)
        name = (
            cells[0]
            if len(pack) == 1
            else f"packs/{slug}-{len(pack)}x-{config.fingerprint(sorted(labels))[:8]}"
        )
        needs = [s.maker for s in pack if s.maker is not None]
        files = [s.file for s in pack]
        end = ["--data", self.root, "--out", str(self.runs / name)]
        after: tuple[str, ...] = ()
        if evaluation.verb == "detect":
            convert = self._convert(pack[0])
            yield convert
            needs = [convert.name]
            argv = [
                "detect",
                "--config-file",
                str(evaluation.config),
                "--engine",
                evaluation.engine or "auto",
                *end,
            ]
            argv += [
                "--resume",
                "MODEL.WEIGHTS",
                str(self.runs / str(convert.makes)),
                *evaluation.args,
            ]
        else:
            argv = [evaluation.verb, *files]
            if evaluation.datasets:
                argv += [
                    "--datasets" if evaluation.verb == "linear" else "--dataset",
                    evaluation.datasets[0],
                ]
            if evaluation.percent is not None:
                argv += [
                    "--percent",
                    str(evaluation.percent),
                    "--lists",
                    str(Path(str(evaluation.lists)).resolve()),
                ]
            if evaluation.protocol is not None:
                argv += ["--protocol", evaluation.protocol]
            argv += ["--seed", str(seed), *evaluation.args, *end]
        geometry = _features(evaluation.protocol) if evaluation.verb == "linear" else None
        if (
            geometry is not None
        ):  # the first job of these images and this checkpoint leaves its features in the cache
            keys = [(label, evaluation.datasets[0], geometry) for label in labels]
            after = tuple(sorted({self.features.setdefault(key, name) for key in keys} - {name}))
        yield Job(
            name=name,
            argv=tuple(argv),
            like=_like(evaluation),
            cells=cells,
            needs=tuple(needs),
            after=after,
            expects=len(pack),
            resources=evaluation.resources,
        )

    def _convert(self, subject: Subject) -> Job:
        name = f"{subject.label}/detectron2"
        makes = f"{name}/backbone.pkl"
        return Job(
            name=name,
            argv=(
                "export",
                subject.file,
                "--format",
                "detectron2",
                "--out",
                str(self.runs / makes),
            ),
            like="export",
            cells=(name,),
            needs=(subject.maker,) if subject.maker else (),
            makes=makes,
        )


def _yaml(value: Any) -> str:
    """A value as it stands in an override; JSON is YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def _slug(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.") or "x"


def _like(evaluation: Evaluation) -> str:
    parts: Iterable[Any] = (
        evaluation.verb,
        evaluation.protocol and Path(evaluation.protocol).name.removesuffix(".yaml"),
        evaluation.percent,
        evaluation.config and Path(evaluation.config).stem,
        evaluation.engine if evaluation.engine != "auto" else None,
        *evaluation.datasets,
    )
    return _slug("-".join(str(p) for p in parts if p is not None))


@functools.cache
def _features(protocol: str | None) -> str | None:
    """What decides a linear protocol's features: its image geometry; None where augmentation makes them anew."""
    recipe = config.read_recipe(config.find_recipe(protocol or "lorac", "transfer"))
    if recipe.get("kind") == "sgd" and recipe.get("augment", {}) is not None:
        return None
    return config.fingerprint(recipe.get("geometry"))


def _run_label(path: Path, where: str, *, skip: bool) -> str | None:
    """A pretraining's folder name and what its run.json says, so the label is the same before and after it ends."""
    try:
        about = json.loads((path / RUN_FILE).read_text())
        verb = about["verb"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError):
        verb = None
    if verb == "pretrain":
        if re.search(r"-s\d+-[0-9a-f]{8}$", path.name) and path.parent.name == "pretrain":
            return path.name  # one of a grid's own
        return f"{_slug(path.name)[:80]}-{config.fingerprint(about)[:8]}"
    if skip:
        return None
    found = f"holds a run of '{verb}'" if verb else f"has no {RUN_FILE}"
    raise BadInput(f"{where}: {path} {found}; a folder must be a run of `backbench pretrain`")


def content_digest(path: Path) -> str:
    """Hex that tells one foreign file from another without reading all of it: its size, first and last megabyte."""
    size = path.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        sha.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        sha.update(file.read())
    return sha.hexdigest()
