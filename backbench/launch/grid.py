"""Grids: the files under configs/grids, and what they ask to be measured (jobs: `expansion`)."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from backbench.datasets.catalog import TWELVE
from backbench.errors import BadInput, nearest
from backbench.recipes import config
from backbench.recipes.own_probe import OWN
from backbench.tasks import DETECTION, TASKS, VERBS

TABLE2 = tuple(TWELVE)
TABLE4 = tuple(TASKS[name].recipe for name in DETECTION)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint of the grid: a file, a glob, timm:NAME, or the folder of a pretraining, finished
    or not."""

    path: str
    name: str | None = None
    method: str | None = None
    encoder: str | None = None
    epochs: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Pretrainings: one recipe, changed by every combination of `vary`, with every seed."""

    recipe: str
    overrides: tuple[str, ...] = ()
    fast: bool | None = None  # `pretrain --fast`; null: as the grid says
    vary: dict[str, Any] = field(default_factory=dict)  # key: list of values
    seeds: tuple[int, ...] = ()
    # The published rows that a point must reproduce, in place of the recipe's own; the last part of
    # each key of `vary` stands in braces: "cllr:0.1:cllr:resnet50:100:lambda-{weight:g}"
    expected: tuple[str, ...] | None = None
    resources: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, values in self.vary.items():
            if not isinstance(values, list | tuple) or not values:
                raise ValueError(f"vary.{key} must be a list of values, not {values!r}")

    def points(self) -> Iterator[dict[str, Any]]:
        """Each combination of the values that vary, by key."""
        for values in itertools.product(*self.vary.values()):
            yield dict(zip(self.vary, values))

    def keys(self, point: Mapping[str, Any]) -> list[str]:
        """The published rows of one point: `expected` with the point's values in it."""
        values = {key.rpartition(".")[2]: value for key, value in point.items()}
        keys = []
        for template in self.expected or ():
            try:
                keys.append(template.format(**values))
            except (KeyError, ValueError, IndexError, AttributeError) as error:
                raise BadInput(
                    f"expected '{template}': {error}; in braces may stand"
                    f" {', '.join(values) or 'nothing here'}"
                ) from None
        return keys


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured on every checkpoint: a verb with options.

    `pack` checkpoints share one pass over a dataset. The dataset `own` is what a checkpoint was
    pretrained on, the protocol `own` its recipe's (or its method's) for that dataset.
    """

    verb: Literal["linear", "semisup", "finetune", "analyze", "detect"]
    datasets: tuple[str, ...] = ()
    protocol: str | None = None
    percent: Literal[1, 10] | None = None
    lists: str | None = None
    config: str | None = None
    engine: Literal["auto", "detectron2", "torchvision"] | None = None
    seeds: tuple[int, ...] = (0,)
    pretrained_on: tuple[str, ...] = ()  # only checkpoints of these sets; () is all
    pack: int = 1
    args: tuple[str, ...] = ()  # handed to the verb as they are
    resources: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # What the verb does not take must be as if it had not been written; what it needs must not
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
    """configs/grids/*.yaml.

    `data` may also come from the command line, `lists` from the single evaluations.
    """

    name: str
    evaluate: tuple[Any, ...] = ()  # names (table2, table3, table4, imagenet, all) or Evaluations
    checkpoints: tuple[Any, ...] = ()  # paths, globs, folders, or Sources
    recipes: tuple[Any, ...] = ()  # names, files, or Sweeps
    fast: bool = False  # `pretrain --fast` for all of its pretrainings
    data: str | None = None
    lists: str | None = None
    engine: Literal["auto", "detectron2", "torchvision"] = "auto"
    prints: str | None = None  # the printed table or figure that it makes: lorac:2, arb:fig.7
    title: str = ""  # what that shows
    deviations: tuple[str, ...] = ()  # in what its numbers are made otherwise than the paper says
    pack: int = 4  # for the sets of evaluations, where sharing a pass saves decoding

    def __post_init__(self) -> None:
        if self.pack < 1:
            raise ValueError("pack must be at least 1")


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
    tables = _tables(grid)
    # An entry may be written in two ways (a table and its rows): equal evaluations are one
    out: list[Evaluation] = []
    for i, entry in enumerate(grid.evaluate):
        if isinstance(entry, str):
            if entry not in tables:
                raise BadInput(
                    f"{where}: unknown evaluation '{entry}'; {nearest(entry, tables)}, or a `verb:`"
                    " with options"
                )
            new = tables[entry]
        elif isinstance(entry, Mapping):
            new = _one_by_one(entry, where=f"{where}: evaluate[{i}]")
        else:
            raise BadInput(
                f"{where}: evaluate[{i}] is {entry!r}; a name ({', '.join(tables)}) or a `verb:`"
                " with options"
            )
        for each in new:
            evaluation = _checked(each, grid, where)
            if evaluation not in out:
                out.append(evaluation)
    return out


def _tables(grid: Grid) -> dict[str, list[Evaluation]]:
    """What the names in `evaluate` stand for."""
    probe = partial(Evaluation, verb="linear", pack=grid.pack)
    # Probes of one dataset share its decoded images in packs; finetuning and detection cannot
    tables = {
        "imagenet": [
            probe(datasets=("imagenet",), protocol=OWN),
            probe(datasets=("imagenet",), protocol="knn"),
        ],
        "table2": [probe(datasets=(name,), protocol="lorac") for name in TABLE2],
        "table3": [Evaluation(verb="semisup", percent=p, lists=grid.lists) for p in (1, 10)],
        "table4": [Evaluation(verb="detect", config=c, engine=grid.engine) for c in TABLE4],
    }
    tables["all"] = list(itertools.chain(*tables.values()))
    return tables


def _one_by_one(entry: Mapping[str, Any], where: str) -> list[Evaluation]:
    """An entry with options, once for each of its datasets. One name may stand without a list."""
    given = dict(entry)
    for key in ("datasets", "seeds"):
        if key in given and not isinstance(given[key], list):
            given[key] = [given[key]]
    one = config.build(Evaluation, given, where=where)
    datasets = TABLE2 if "all" in one.datasets else one.datasets
    if not datasets:
        return [one]
    return [dataclasses.replace(one, datasets=(name,)) for name in datasets]


def _checked(evaluation: Evaluation, grid: Grid, where: str) -> Evaluation:
    """With the grid's `lists` where it has none of its own; its files and recipes must be there."""
    if evaluation.verb == "semisup" and not evaluation.lists:
        if not grid.lists:
            raise BadInput(
                f"{where}: semisup needs `lists: DIR`, the folder with 1percent.txt and"
                " 10percent.txt"
            )
        evaluation = dataclasses.replace(evaluation, lists=grid.lists)
    if evaluation.lists:
        file = Path(evaluation.lists) / f"{evaluation.percent}percent.txt"
        if not file.is_file():
            raise BadInput(
                f"{where}: semisup: {file}: no such file; `backbench data fetch-splits` writes"
                " SimCLR's lists"
            )
    if evaluation.config is not None:
        config.find_recipe(evaluation.config, "detection")
    if evaluation.protocol not in (None, OWN):
        config.find_recipe(evaluation.protocol, "transfer")
    return evaluation
