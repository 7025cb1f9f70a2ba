"""The lists under configs/reproduce: public checkpoints, what is printed of them, what is run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from backbench.errors import BadInput, nearest
from backbench.launch.grid import Evaluation, Grid, evaluations
from backbench.recipes import config
from backbench.recipes.own_probe import OWN
from backbench.results import judging_rules, published
from backbench.results.published import Published
from backbench.tasks import TASKS, by_kind

KIND = "reproduce"  # the folder under configs
_HEX = re.compile(r"[0-9a-f]{8,}")
_NAME = re.compile(r"\w[\w.+-]*")


@dataclass(frozen=True, kw_only=True)
class PrintedBeside:
    """A number that is printed of a file somewhere else than in the five papers' tables.

    `protocol` is the recipe under configs/transfer that comes nearest to how it was measured;
    `unlike` says what still differs, and then there is no verdict.
    """

    task: str
    dataset: str
    metric: str
    value: float  # percent
    protocol: str
    source: str
    unlike: str | None = None

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task '{self.task}': {nearest(self.task, TASKS)}")
        config.find_recipe(self.protocol, "transfer")


@dataclass(frozen=True, kw_only=True)
class PublicFile:
    """One public checkpoint. configs/reproduce/_checkpoints.yaml says what each key means."""

    page: str
    file: str
    url: str | None = None
    by_hand: str | None = None  # how one comes by it where there is no url
    sha256: str | None = None  # its first digits, at least eight
    md5: str | None = None
    digest_page: str | None = None
    method: str | None = None
    encoder: str | None = None
    epochs: int | None = None
    rows: tuple[str, ...] = ()
    numbers: tuple[Any, ...] = ()  # PrintedBeside

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.file):
            raise ValueError(f"file '{self.file}' must be a file's name, without a folder")
        for what, digits in (("sha256", self.sha256), ("md5", self.md5)):
            if digits is not None and not _HEX.fullmatch(digits):
                raise ValueError(f"{what} '{digits}' must be eight or more of 0-9 and a-f")
            if digits is not None and self.digest_page is None:
                raise ValueError(f"{what}: say by `digest_page` where it is printed")
        if self.url is not None and not self.url.startswith(("https://", "http://")):
            raise ValueError(f"url '{self.url}' must begin with https://")
        if self.url is None and self.by_hand is None:
            raise ValueError("give its `url`, or say by `by_hand` how one comes by it")
        for key in self.rows:
            published.lookup(key)

    @cached_property
    def beside(self) -> tuple[PrintedBeside, ...]:
        return tuple(config.build(PrintedBeside, each, where="numbers") for each in self.numbers)

    def where(self, files: Path, name: str) -> Path:
        """Two of them are called resnet50.pth: each has a folder of its own."""
        return files / name / self.file


@dataclass(frozen=True, kw_only=True)
class ListPart:
    """Evaluations of some of the list's checkpoints, or of all; `gpu_hours` of each of them."""

    title: str
    evaluate: tuple[Any, ...]
    gpu_hours: float
    only: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReproductionList:
    """configs/reproduce/*.yaml."""

    name: str
    title: str
    estimate: str  # what gpu_hours are of, and whether anybody measured them
    checkpoints: dict[str, Any]  # name -> PublicFile
    parts: tuple[ListPart, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in self.checkpoints:
            if not _NAME.fullmatch(str(name)):
                raise ValueError(f"checkpoint '{name}': letters, digits and . _ + - only")
        for part in self.parts:
            for name in part.only:
                if name not in self.checkpoints:
                    raise ValueError(f"only '{name}': {nearest(name, self.checkpoints)}")

    @cached_property
    def files(self) -> dict[str, PublicFile]:
        where = f"list {self.name}: checkpoints"
        return {
            name: config.build(PublicFile, about, where=f"{where}.{name}")
            for name, about in self.checkpoints.items()
        }

    def of_part(self, part: ListPart, names: Sequence[str]) -> list[str]:
        """Those of `names` that a part measures."""
        return [name for name in names if not part.only or name in part.only]

    def gpu_hours(self, names: Sequence[str]) -> float:
        return sum(part.gpu_hours * len(self.of_part(part, names)) for part in self.parts)


def read_list(name: str | Path) -> ReproductionList:
    path = config.find_recipe(name, KIND)
    data = config.read_recipe(path)
    found = config.build(ReproductionList, {"name": path.stem, **data}, where=str(path))
    if not re.fullmatch(r"[\w.+-]+", found.name):
        raise BadInput(f"{path}: the name '{found.name}' may hold letters, digits and . _ + - only")
    for about in found.files.values():  # what is wrong in it is wrong now, not hours later
        assert about.beside is not None
    return found


def chosen(names: Sequence[str], known: ReproductionList) -> list[str]:
    """The checkpoints that a command asks for; all where it names none. BadInput."""
    for name in names:
        if name not in known.checkpoints:
            raise BadInput(f"--only {name}: {nearest(name, known.checkpoints)}")
    return [name for name in known.checkpoints if not names or name in names]


def measures(grid: Grid) -> Iterator[tuple[str, str]]:
    """(task, dataset) of everything that a grid's evaluations measure."""
    kinds = by_kind("linear")
    for one in evaluations(grid, f"list {grid.name}"):
        yield from _measured_by(one, kinds)


def _measured_by(one: Evaluation, kinds: dict[str, str]) -> Iterator[tuple[str, str]]:
    if one.verb == "detect":
        for task in TASKS.values():
            if task.recipe == one.config:
                yield task.name, "coco2017"
    elif one.verb == "semisup":
        for task in TASKS.values():
            if task.percent == one.percent:
                yield task.name, "imagenet"
    elif one.verb == "linear":
        task_name = "linear"
        if one.protocol not in (None, OWN):
            recipe = config.read_recipe(config.find_recipe(str(one.protocol), "transfer"))
            task_name = kinds[recipe["kind"]]
        for dataset in one.datasets:
            yield task_name, dataset


def judged_rows(about: PublicFile) -> Iterator[Published]:
    """The numbers of the papers that a file is held to."""
    for key in about.rows:
        for number in published.lookup(key):
            if judging_rules.tolerance(number) is not None:
                yield number
