"""The checkpoints of a grid: what its recipes pretrain, and what it names. Nothing here starts
anything.

A pretraining is a job, and so is the import of a foreign file; one of ours is there as it is.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backbench.errors import BadInput
from backbench.launch.grid import Grid, Source, Sweep
from backbench.launch.job import Job
from backbench.recipes import config, fast
from backbench.runs.folder import CHECKPOINT_FILE, RECIPE_FILE, RUN_FILE
from backbench.untrusted import jsons
from backbench.weights import archs, header

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
class GridPlaces:
    """Where a grid's jobs read and write; `where` is what messages call the grid."""

    where: str
    runs: Path  # resolved
    data: str | None  # None where nobody gave a folder, which only some jobs need

    @property
    def root(self) -> str:
        if self.data is None:
            raise BadInput(
                f"{self.where}: no data folder; add `data: ROOT` to the grid or --data ROOT"
            )
        return self.data


class Subjects:
    """All checkpoints of a grid, `by_label`, and the `jobs` that make those that are not there."""

    def __init__(
        self, grid: Grid, places: GridPlaces, *, claimed: Mapping[str, str], watching: bool
    ) -> None:
        self.grid, self.places = grid, places
        self.claimed, self.watching = claimed, watching
        self.jobs: dict[str, Job] = {}
        self.by_label: dict[str, Subject] = {}
        self.recipes: dict[str, Mapping[str, Any]] = {}  # of the pretrainings, by job
        self.waiting: list[str] = []  # pretrainings that have not written their checkpoint yet

    def find(self) -> None:
        """Pretrainings, then what the grid names, with the imports of foreign files."""
        for job in self._pretrainings():
            self.jobs.setdefault(job.name, job)
            label = Path(job.name).name
            self.by_label[label] = Subject(
                label=label,
                file=str(self.places.runs / str(job.makes)),
                maker=job.name,
                arch=job.arch,
                recipe=self.recipes[job.name],
            )
        for subject, maker in self._checkpoints():
            if maker is not None:
                self.jobs.setdefault(maker.name, maker)
            self.by_label.setdefault(subject.label, subject)

    # Pretrainings

    def _pretrainings(self) -> Iterator[Job]:
        for i, entry in enumerate(self.grid.recipes):
            given = {"recipe": entry} if isinstance(entry, str) else entry
            sweep = config.build(Sweep, given, where=f"{self.places.where}: recipes[{i}]")
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
        is_fast = self.grid.fast if sweep.fast is None else sweep.fast
        changes = fast.overrides(recipe, overrides, str(path)) if is_fast else overrides
        whole = config.apply_overrides(recipe, changes)
        identity = {key: value for key, value in whole.items() if key != "probe"}
        if "expected" in identity:
            identity["expected"] = []
        stem = folder_name("-".join([path.stem, *short]))[:LONGEST_NAME]
        name = f"pretrain/{stem}-s{identity.get('seed', 0)}-{config.fingerprint(identity)[:8]}"
        self.recipes[name] = whole
        file = str(path.resolve()) if Path(sweep.recipe).is_file() else sweep.recipe
        out = str(self.places.runs / name)
        switch = (fast.SWITCH,) if is_fast else ()
        return Job(
            name=name,
            argv=("pretrain", file, *overrides, *switch, "--data", self.places.root, "--out", out),
            like=f"pretrain-{path.stem}",
            cells=(name,),
            makes=f"{name}/{CHECKPOINT_FILE}",
            resources=sweep.resources,
            arch=identity.get("arch"),
            units=float(identity.get("epochs", 0)),
        )

    # Checkpoints

    def _checkpoints(self) -> Iterator[tuple[Subject, Job | None]]:
        """Every checkpoint of the grid once per content; foreign files with their import."""
        seen: set[str] = set()
        for i, entry in enumerate(self.grid.checkpoints):
            where = f"{self.places.where}: checkpoints[{i}]"
            given = {"path": entry} if isinstance(entry, str) else entry
            source = config.build(Source, given, where=where)
            if archs.is_name(source.path):
                named, maker = self._named(source, where)
                if named.label not in seen:
                    seen.add(named.label)
                    yield named, maker
                continue
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
                    stem = folder_name(source.name or path.name.removesuffix(path.suffix))[
                        :LONGEST_NAME
                    ]
                    label = f"{stem}-{(digest or content_digest(path))[:8]}"
                    identity, pair = digest or label, self._file(source, path, label, digest)
                if pair is not None and identity not in seen:
                    seen.add(identity)
                    yield pair

    def _named(self, source: Source, where: str) -> tuple[Subject, Job | None]:
        """The weights that a name stands for: as they are, or imported with what the grid says."""
        if source.encoder is not None:
            raise BadInput(f"{where}: {source.path} names one trunk; leave out encoder")
        stem = folder_name(source.name or source.path.replace("@", "-"))[:LONGEST_NAME]
        label = f"{stem}-{config.fingerprint(source.path)[:8]}"
        if not (source.name or source.method or source.epochs is not None):
            return Subject(label=label, file=source.path), None
        return self._imported(source, source.path, label)

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
        inside = (
            path.relative_to(self.places.runs).as_posix()
            if path.is_relative_to(self.places.runs)
            else ""
        )
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
        told = source.name or source.method or source.encoder or source.epochs is not None
        if digest is not None and not told:
            return Subject(label=label, file=str(path), recipe=_recipe_of(path)), None
        return self._imported(source, str(path), label)

    def _imported(self, source: Source, what: str, label: str) -> tuple[Subject, Job]:
        """By a job of the grid, with what the grid says of it."""
        options: list[str] = []
        for option in ("name", "method", "encoder", "epochs"):
            value = getattr(source, option)
            if value is not None:
                options += [f"--{option}", str(value)]
        name = f"imported/{label}"
        makes = f"{name}/{CHECKPOINT_FILE}"
        file = str(self.places.runs / makes)
        argv = ("import", what, *options, "--out", file)
        job = Job(name=name, argv=argv, like="import", cells=(name,), makes=makes)
        return Subject(label=label, file=file, maker=name), job


def folder_name(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.") or "x"


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
        return f"{folder_name(path.name)[:LONGEST_NAME]}-{config.fingerprint(about)[:8]}"
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
