"""Reads and checks configs/grids: recipes, checkpoints, and what is measured on them."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from backbench.datasets.catalog import TWELVE
from backbench.errors import BadInput, nearest
from backbench.recipes import config
from backbench.recipes.own_probe import OWN
from backbench.requests.bounds import MOST_EPOCHS, Seed
from backbench.tasks import DETECTION, TASKS, VERBS

REPEAT_SEEDS = (1, 2)  # the seeds of evaluations that train once more
TABLE2 = tuple(TWELVE)
TABLE4 = tuple(TASKS[name].recipe for name in DETECTION)


@dataclass(frozen=True, kw_only=True)
class Source:
    """An entry of `checkpoints`. All keys but `path` are options of its import."""

    path: str  # a file, a glob, timm:NAME, or a pretraining's folder, finished or not
    name: str | None = None
    method: str | None = None
    encoder: str | None = None
    epochs: Annotated[int, Field(ge=0, le=MOST_EPOCHS)] | None = None


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep: the keys that it changes, and the labels by which it is told apart."""

    changes: dict[str, object]  # key of the recipe -> value
    labels: dict[str, object]  # beta -> 2.0: what follows the name on the leaderboard
    in_folder: dict[str, object]  # the labels that stand in the run folder's name, too


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """An entry of `recipes`: pretrainings by one recipe, with every point of `vary` and every seed.

    `vary` maps a key to a list of its values; several keys are combined, each value with each. Keys
    that move together stand under a name of their own:
    `batch: {16: {batch_size: 16, epochs: 16}, 32: {batch_size: 32, epochs: 32}}`.
    """

    recipe: str
    overrides: tuple[str, ...] = ()
    fast: bool | None = None  # `pretrain --fast`; null: as the grid says
    vary: config.Recipe = field(default_factory=dict)
    seeds: tuple[Seed, ...] = ()  # (): as the grid says
    # The published rows that a point must reproduce, in place of the recipe's own; a label of
    # `vary` stands in braces: "cllr:0.1:cllr:resnet50:100:lambda-{weight:g}"
    expected: tuple[str, ...] | None = None
    resources: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, values in self.vary.items():
            if not isinstance(values, list | tuple | Mapping) or not values:
                raise ValueError(f"vary.{key} must be a list of values, not {values!r}")
            if not isinstance(values, Mapping):
                continue
            if not all(isinstance(keys, Mapping) for keys in values.values()):
                raise ValueError(
                    f"vary.{key} must map each of its values to the keys it changes"
                )

    def points(self) -> Iterator[SweepPoint]:
        """Yield each combination of what varies; without `vary` the recipe as it is."""
        axes = []  # for each key of `vary`, a point for each of its values
        for key, values in self.vary.items():
            axis = []
            if isinstance(values, Mapping):
                # Keys that move together: each value is a label, and stands for several keys
                for value, keys in values.items():
                    axis.append(SweepPoint(dict(keys), {key: value}, {}))
            else:
                short = key.rpartition(".")[2]
                for value in values:
                    axis.append(
                        SweepPoint({key: value}, {short: value}, {short: value})
                    )
            axes.append(axis)
        for parts in itertools.product(*axes):
            point = SweepPoint({}, {}, {})
            for part in parts:
                point.changes.update(part.changes)
                point.labels.update(part.labels)
                point.in_folder.update(part.in_folder)
            yield point

    def expected_rows(self, point: SweepPoint) -> list[str]:
        """Return the published rows of one point: `expected` with the point's labels in it."""
        rows = []
        for template in self.expected or ():
            try:
                rows.append(template.format(**point.labels))
            except (KeyError, ValueError, IndexError, AttributeError) as error:
                labels = ", ".join(point.labels) or "nothing here"
                raise BadInput(
                    f"expected '{template}': {error}; in braces may stand {labels}"
                ) from None
        return rows


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An entry of `evaluate`: a verb with options, run on every checkpoint.

    The dataset `own` is the one that a checkpoint was pretrained on, the protocol `own` its recipe's
    (or its method's) for that dataset.
    """

    verb: Literal["linear", "ood", "semisup", "finetune", "analyze", "detect"]
    datasets: tuple[str, ...] = ()
    protocol: str | None = None
    percent: Literal[1, 10] | None = None
    lists: str | None = None
    config: str | None = None
    engine: Literal["auto", "detectron2", "torchvision"] | None = None
    seeds: tuple[Seed, ...] = (0,)
    # How many checkpoints, the first ones, are measured with REPEAT_SEEDS, too: two tell how far
    # trainings differ, which a bold number needs (stats/training_noise.py).
    again: Annotated[int, Field(ge=0)] = 0
    pretrained_on: tuple[str, ...] = ()  # only checkpoints of these datasets; () is all
    # How many checkpoints share one pass over a dataset
    pack: Annotated[int, Field(ge=1)] = 1
    args: tuple[str, ...] = ()  # handed to the verb as they are
    resources: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # An option that the verb does not take must be at its default; one that it needs must not.
        verb = VERBS[self.verb]
        defaults: dict[str, object] = {
            "datasets": (),
            "protocol": None,
            "percent": None,
            "lists": None,
            "config": None,
            "engine": None,
            "pack": 1,
        }
        for name, default in defaults.items():
            given = getattr(self, name) != default
            if given and name not in verb.takes:
                raise ValueError(
                    f"'{self.verb}' takes no '{name}', only {', '.join(verb.takes)}"
                )
            if not given and name in verb.needs:
                raise ValueError(f"'{self.verb}' needs '{name}'")
        choices = verb.needs_one_of
        if choices and all(getattr(self, name) == defaults[name] for name in choices):
            raise ValueError(f"'{self.verb}' needs {' or '.join(map(repr, choices))}")
        if "SEED" in self.args and (self.seeds != (0,) or self.again):
            raise ValueError("seeds stand in `seeds` or in args (SEED), not in both")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The keys of configs/grids/*.yaml."""

    name: str
    # Names (table2, table3, table4, imagenet, all) or Evaluations
    evaluate: tuple[config.Value, ...] = ()
    checkpoints: tuple[config.Value, ...] = ()  # paths, globs, folders, or Sources
    recipes: tuple[config.Value, ...] = ()  # names, files, or Sweeps
    # Seeds of the recipes that have none of their own here; (): the recipe's
    seeds: tuple[Seed, ...] = ()
    fast: bool = False  # `pretrain --fast` for all of its pretrainings
    data: str | None = None  # may also come from the command line
    lists: str | None = None  # may also come from the single evaluations
    engine: Literal["auto", "detectron2", "torchvision"] = "auto"
    # The printed table or figure that it makes (lorac:2, arb:fig.7), and its title
    prints: str | None = None
    title: str = ""
    choices: tuple[str, ...] = ()  # names in docs/choices.md that its numbers rest on
    # Where else its numbers are made otherwise than the paper says
    deviations: tuple[str, ...] = ()
    # In the named sets: checkpoints that share a pass, and checkpoints that train again
    pack: Annotated[int, Field(ge=1)] = 4
    again: Annotated[int, Field(ge=0)] = 2


def read_grid(name: str | Path, overrides: Sequence[str] = ()) -> Grid:
    """Read a grid by path, or by its name under configs/grids. Raises BadInput."""
    path = config.find_recipe(name, "grids")
    data = config.apply_overrides(config.read_recipe(path), overrides)
    grid = config.build(
        Grid, {"name": path.stem, **data}, where=str(path), overrides=overrides
    )
    if not re.fullmatch(r"[\w.+-]+", grid.name):
        raise BadInput(
            f"{path}: the name '{grid.name}' may hold letters, digits and . _ + - only"
        )
    if not grid.checkpoints and not grid.recipes:
        raise BadInput(
            f"{path}: names neither checkpoints nor recipes; there is nothing to run"
        )
    if not grid.recipes and not grid.evaluate:
        raise BadInput(
            f"{path}: says of no checkpoint what to `evaluate`; there is nothing to run"
        )
    return grid


def sweeps(grid: Grid, where: str) -> Iterator[Sweep]:
    """Yield the grid's `recipes` as sweeps that have their seeds and their way to train."""
    for i, entry in enumerate(grid.recipes):
        keys = {"recipe": entry} if isinstance(entry, str) else entry
        sweep = config.build(Sweep, keys, where=f"{where}: recipes[{i}]")
        is_fast = grid.fast if sweep.fast is None else sweep.fast
        yield dataclasses.replace(sweep, seeds=sweep.seeds or grid.seeds, fast=is_fast)


def evaluations(grid: Grid, where: str) -> list[Evaluation]:
    """Return the grid's `evaluate` with named tables written out, each evaluation once."""
    tables = _tables(grid)
    # An evaluation may be named twice (by a table and by itself): equal ones are one.
    out: list[Evaluation] = []
    for i, entry in enumerate(grid.evaluate):
        if isinstance(entry, str):
            if entry not in tables:
                raise BadInput(
                    f"{where}: unknown evaluation '{entry}'; {nearest(entry, tables)}, or a"
                    " `verb:` with options"
                )
            wanted = tables[entry]
        elif isinstance(entry, Mapping):
            wanted = _one_per_dataset(entry, where=f"{where}: evaluate[{i}]")
        else:
            raise BadInput(
                f"{where}: evaluate[{i}] is {entry!r}; a name ({', '.join(tables)}) or a"
                " `verb:` with options"
            )
        for one in wanted:
            evaluation = _checked(one, grid, where)
            if evaluation not in out:
                out.append(evaluation)
    return out


def _tables(grid: Grid) -> dict[str, list[Evaluation]]:
    """Return the evaluations that each name in `evaluate` stands for."""
    # Probes of one dataset share its decoded images in packs; finetuning and detection cannot.
    probe = partial(Evaluation, verb="linear", pack=grid.pack, again=grid.again)
    trained = partial(Evaluation, again=grid.again)
    tables = {
        "imagenet": [
            probe(datasets=("imagenet",), protocol=OWN),
            probe(datasets=("imagenet",), protocol="knn", again=0),
        ],
        "table2": [probe(datasets=(name,), protocol="lorac") for name in TABLE2],
        "table3": [
            trained(verb="semisup", percent=p, lists=grid.lists) for p in (1, 10)
        ],
        "table4": [
            trained(verb="detect", config=c, engine=grid.engine) for c in TABLE4
        ],
    }
    tables["all"] = list(itertools.chain(*tables.values()))
    return tables


def _one_per_dataset(entry: Mapping[str, object], where: str) -> list[Evaluation]:
    """Build an entry with options, once for each of its datasets."""
    options = dict(entry)
    for key in ("datasets", "seeds"):  # a single one may stand without a list
        if key in options and not isinstance(options[key], list):
            options[key] = [options[key]]
    one = config.build(Evaluation, options, where=where)
    if not one.datasets:  # its verb needs none
        return [one]
    datasets = TABLE2 if "all" in one.datasets else one.datasets
    return [dataclasses.replace(one, datasets=(name,)) for name in datasets]


def _with_lists(evaluation: Evaluation, grid: Grid, where: str) -> Evaluation:
    """Give a semisup evaluation the grid's `lists`, if its dataset is the one that its protocol names.

    For any other dataset the labelled images are drawn at random, as `backbench semisup` does it."""
    protocol = evaluation.protocol or "semisup"
    recipe = config.read_recipe(config.find_recipe(protocol, "transfer"))
    own = recipe.get("dataset")
    if own is None and not evaluation.datasets:
        raise BadInput(
            f"{where}: semisup by '{protocol}' needs `datasets`, as it names none itself"
        )
    if evaluation.datasets and evaluation.datasets[0] != own:
        return evaluation
    if not grid.lists and _prints_a_list(recipe, evaluation.percent):
        raise BadInput(
            f"{where}: semisup needs `lists: DIR` with 1percent.txt and 10percent.txt"
        )
    return dataclasses.replace(evaluation, lists=grid.lists)


def _prints_a_list(recipe: Mapping[str, object], percent: int | None) -> bool:
    """Return True if a protocol names the published list of this part of the labels."""
    parts = recipe.get("parts")
    part = parts.get(str(percent)) if isinstance(parts, Mapping) else None
    return isinstance(part, Mapping) and part.get("list") is not None


def _checked(evaluation: Evaluation, grid: Grid, where: str) -> Evaluation:
    """Give the evaluation the grid's `lists` if it needs them; refuse files that are not there."""
    if evaluation.verb == "semisup" and not evaluation.lists:
        evaluation = _with_lists(evaluation, grid, where)
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
