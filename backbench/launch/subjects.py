"""The checkpoints of a grid: those that its recipes pretrain, and those that it names.

Nothing here starts anything: a pretraining is a job, and so is the import of a foreign file. One of
our own files is a checkpoint as it is.
"""

import glob
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from backbench.errors import BadInput
from backbench.launch.grid import Grid, Source, Sweep, sweeps
from backbench.launch.job import Job
from backbench.recipes import config, fast
from backbench.runs.folder import CHECKPOINT_FILE, RECIPE_FILE, RUN_FILE
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
    recipe: Mapping[str, object] | None = None  # of its pretraining; None where nobody knows it


class Subjects:
    """All checkpoints of a grid, `by_label`, and the `jobs` that make those that are not there."""

    def __init__(
        self,
        grid: Grid,
        runs: Path,
        *,
        where: str,  # what messages call the grid
        data: Path | None,
        claimed: Mapping[str, str],
        watching: bool,
    ) -> None:
        self.runs, self.where, self.claimed, self.watching = (
            runs.resolve(),
            where,
            claimed,
            watching,
        )
        data = data or (Path(grid.data).expanduser() if grid.data else None)
        if data is not None and not data.is_dir():
            raise BadInput(f"{where}: data folder {data} is not there; give --data ROOT")
        self._root = str(data.resolve()) if data else None
        self.jobs: dict[str, Job] = {}
        self.by_label: dict[str, Subject] = {}
        self.waiting: list[str] = []  # pretrainings that have not written their checkpoint yet
        # Pretrainings come first: a checkpoint that the grid names may be the folder of one of them
        for sweep in sweeps(grid, where):
            self._add_pretrainings(sweep)
        self._seen: set[str] = set()  # contents and labels of what the grid names
        for i, entry in enumerate(grid.checkpoints):
            keys = {"path": entry} if isinstance(entry, str) else entry
            here = f"{where}: checkpoints[{i}]"
            self._add_named(config.build(Source, keys, where=here), here)

    def folders(self, name: str) -> tuple[str, ...]:
        """Return the options of a job that tell it where it reads and writes."""
        if self._root is None:
            raise BadInput(f"{self.where}: no data folder; add `data: ROOT` to it or --data ROOT")
        return ("--data", self._root, "--out", str(self.runs / name))

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
            overrides += [f"{key}={_text(value)}" for key, value in point.changes.items()]
            if point.labels:
                title = " ".join([str(recipe.get("name", path.stem)), *_equations(point.labels)])
                overrides.append(f"name={json.dumps(title)}")
            if sweep.expected is not None:
                overrides.append(f"expected={json.dumps(sweep.expected_rows(point))}")
            if seed is not None:
                overrides.append(f"seed={seed}")
            # 2. The folder: readable, and told apart by everything that decides the weights
            changes = fast.overrides(recipe, overrides, str(path)) if sweep.fast else overrides
            whole = config.apply_overrides(recipe, changes)
            identity = {key: value for key, value in whole.items() if key != "probe"}
            if "expected" in identity:
                identity["expected"] = []
            stem = _short("-".join([path.stem, *_equations(point.in_folder)]))
            label = f"{stem}-s{identity.get('seed', 0)}-{config.fingerprint(identity)[:8]}"
            name = f"pretrain/{label}"
            # 3. The job, and the checkpoint that it will write
            switch = (fast.SWITCH,) if sweep.fast else ()
            job = Job(
                name=name,
                argv=("pretrain", file, *overrides, *switch, *self.folders(name)),
                like=f"pretrain-{path.stem}",
                cells=(name,),
                makes=f"{name}/{CHECKPOINT_FILE}",
                resources=sweep.resources,
                arch=identity.get("arch"),
                units=float(identity.get("epochs", 0)),
            )
            self.jobs.setdefault(name, job)
            made = str(self.runs / name / CHECKPOINT_FILE)
            self.by_label[label] = Subject(
                label=label, file=made, maker=name, arch=job.arch, recipe=whole
            )

    # Checkpoints

    def _add_named(self, source: Source, where: str) -> None:
        """Add the files of an entry of `checkpoints`, each content once; foreign ones by import."""
        if archs.is_name(source.path):
            if source.encoder is not None:
                raise BadInput(f"{where}: {source.path} names one trunk; leave out encoder")
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
        if not matches and not self.watching:
            none = f"matches no file (looked from {Path.cwd()})"
            raise BadInput(f"{where}: '{source.path}' {none}; --watch waits for files to come")
        if len(matches) > 1 and source.name:
            raise BadInput(f"{where}: {len(matches)} files cannot all be named '{source.name}'")
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
            below = run.is_relative_to(self.runs)
            inside = run.relative_to(self.runs).as_posix() if below else ""
            if inside not in self.claimed and inside not in self.jobs:
                self.waiting.append(str(run))  # nobody here makes it: something to wait for
                return
            maker = self.claimed.get(inside, inside)  # submitted earlier, or a job of this grid
        self._seen.add(label)
        subject = Subject(label=label, file=str(file), maker=maker, recipe=_recipe_of(file))
        self.by_label.setdefault(label, subject)

    def _add(self, label: str, source: Source, file: str, *, digest: str | None) -> None:
        """Add a file (or timm:NAME), each content once: as it is if it is one of ours, which has a
        digest, and its entry has no options for an import; else by an import."""
        if (digest or label) in self._seen:
            return
        self._seen.add(digest or label)
        options: list[str] = []
        for option in ("name", "method", "encoder", "epochs"):
            value = getattr(source, option)
            if value is not None:
                options += [f"--{option}", str(value)]
        if digest is not None and not options:
            recipe = None if archs.is_name(file) else _recipe_of(Path(file))
            self.by_label.setdefault(label, Subject(label=label, file=file, recipe=recipe))
            return
        name, makes = f"imported/{label}", f"imported/{label}/{CHECKPOINT_FILE}"
        made = str(self.runs / makes)
        argv = ("import", file, *options, "--out", made)
        job = Job(name=name, argv=argv, like="import", cells=(name,), makes=makes)
        self.jobs.setdefault(name, job)
        self.by_label.setdefault(label, Subject(label=label, file=made, maker=name))


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
    """The label of a pretraining's folder: the same before and after it ends. With `skip`, None for
    a folder that is no pretraining (a glob found it, nobody named it)."""
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
        return f"{_short(path.name)}-{config.fingerprint(about)[:8]}"
    if skip:
        return None
    content = f"holds a run of '{verb}'" if verb else f"has no {RUN_FILE}"
    raise BadInput(f"{where}: {path} {content}; a folder must be a run of `backbench pretrain`")


def content_digest(path: Path) -> str:
    """Hash a foreign file's size, first and last megabyte: it is told apart without reading all."""
    size = path.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        sha.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        sha.update(file.read())
    return sha.hexdigest()
