"""This file finds the pretraining recipes that a printed number names, by the grid of its table,
and how the recipe of a measured trunk differs from them."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from backbench.errors import BadInput
from backbench.launch import grid as grids
from backbench.launch.grid import Grid, Sweep, SweepPoint, read_grid
from backbench.published import published
from backbench.recipes import config
from backbench.records import protocol_fingerprints
from backbench.records.protocol_fingerprints import Leaves, leaves

_SEED = "seed"
# Keys that train no other trunk: names, seeds, how the run is fed and watched, the order of sums;
# the last two are the word for `--fast` beside a verdict
_FREE = {
    "name",
    "expected",
    "probe",
    _SEED,
    "save_minutes",
    "log_every",
    "knn_every",
    "channels_last",
    "compile",
    "data.workers",
    "data.skip_corrupt",
    "precision",
    "views.pipeline",
}
_CROPS, _METHOD = "views.crops", "method.name"


def sweeps(grid: Grid) -> Iterator[Sweep]:
    """The pretrainings of a grid."""
    return grids.sweeps(grid, f"grid {grid.name}")


def expected_by(sweep: Sweep, point: SweepPoint) -> list[str]:
    """The published rows that one point must reach: those of the sweep, else of the recipe."""
    if sweep.expected is not None:
        return sweep.expected_rows(point)
    # `expected=[]` among the overrides, or nothing about it
    recipe = config.apply_overrides(shipped(sweep.recipe), sweep.overrides)
    return [str(key) for key in recipe.get("expected") or ()]


@functools.cache
def shipped(name: str) -> Mapping[str, Any]:
    """A recipe of configs/pretrain, as written."""
    return config.read_recipe(config.find_recipe(name, "pretrain"))


@functools.cache
def _by_key(grid: str) -> Mapping[str, list[Leaves]]:
    """Published row -> the settings of each point of a grid that must reach it."""
    named: dict[str, list[Leaves]] = {}
    try:
        found = read_grid(grid)
    except BadInput:
        return named  # a table that no grid makes
    for sweep in sweeps(found):
        recipe = config.apply_overrides(shipped(sweep.recipe), sweep.overrides)
        for point in sweep.points():
            of_point = settings(config.flat(recipe) | point.changes)
            for key in expected_by(sweep, point):
                named.setdefault(key, []).append(of_point)
    return named


def settings(recipe: Mapping[str, Any]) -> Leaves:
    """The leaves of a pretraining recipe that decide its trunk and are not at their defaults."""
    defaults = protocol_fingerprints.shipped()["pretraining"]
    found = leaves(recipe)
    # 1. Each group of crops on its own: its keys have defaults, too
    crops = found.pop(_CROPS, None)
    if isinstance(crops, list):
        found[f"{_CROPS}.count"] = len(crops)
        for n, group in enumerate(crops):
            found |= leaves(group, f"{_CROPS}.{n}")
    known: Leaves = {**defaults["recipe"], f"{_CROPS}.count": 1}
    for n in range(len(crops or ())):
        known |= _under(f"{_CROPS}.{n}", defaults["crops"])
    # 2. A method within a method (`method.inner`) has the defaults of its own name
    for place in ("method", "method.inner"):
        method = str(found.get(f"{place}.name"))
        known |= _under(place, defaults.get(method, {}))
        for name, group in defaults.items():
            above, _, part = name.partition(".")
            # A group that is written in part has its own defaults, not the method's
            if (
                above == method
                and part
                and any(k.startswith(f"{place}.{part}.") for k in found)
            ):
                found = _under(f"{place}.{part}", group) | found
    return {
        key: value
        for key, value in found.items()
        if key not in _FREE and not key.startswith("probe.") and known.get(key) != value
    }


def _under(place: str, keys: Leaves) -> Leaves:
    return {f"{place}.{key}": value for key, value in keys.items()}


def changes(recipe: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the keys, by their last word, in which `recipe` differs from the one that published
    row `key` names; if several reach that row, from the nearest."""
    own = settings(recipe)
    number = published.lookup(key)[0]
    unlike = []
    for other in _by_key(published.grid_name(number.paper, number.table)).get(key, []):
        keys = sorted(
            k for k in own.keys() | other.keys() if own.get(k) != other.get(k)
        )
        words = dict.fromkeys(key.rpartition(".")[2] for key in keys)
        if _METHOD in keys:  # another method has other keys
            rest = [
                key.rpartition(".")[2] for key in keys if not key.startswith("method.")
            ]
            words = dict.fromkeys(["method", *rest])
        unlike.append(tuple(words))
    return min(unlike, key=len, default=())
