"""The pretraining recipes that printed numbers stand for, and how another recipe differs from them.

A printed number belongs to a table, and the table to a grid of configs/grids. Each point of the
grid is a pretraining recipe, and says which published rows it must reach.
"""

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

# Keys that leave the training as it is: names, the seed, how the run is fed and watched, and the
# order of sums. The last two are said by another word beside the verdict (recipes/fast.py).
_FREE = {
    "name",
    "expected",
    "probe",
    "seed",
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
_CROPS = "views.crops"


def sweeps(grid: Grid) -> Iterator[Sweep]:
    """Yield the sweeps of pretrainings that a grid runs."""
    return grids.sweeps(grid, f"grid {grid.name}")


def expected_by(sweep: Sweep, point: SweepPoint) -> list[str]:
    """Return the published rows that one point must reach: the sweep's own, or its recipe's."""
    if sweep.expected is not None:
        return sweep.expected_rows(point)
    # The overrides may hold `expected=[]`.
    recipe = config.apply_overrides(shipped(sweep.recipe), sweep.overrides)
    return [str(key) for key in recipe.get("expected") or ()]


# From this weight of the reconstruction on (lambda), at this rate of SGD or more, CLLR's loss is not
# finite within its first steps (docs/choices.md, "CLLR: lambda from 0.1 on")
_EXPLODES_FROM = 0.1
_EXPLODES_AT_RATE = 5e-3

# From this alpha on CLLR's penalty leaves less of L than the 256 columns that are kept of it:
# 41 of 512 directions at 1, 12 at 10 (benchmarks/variants_on_digits.txt)
_LOST_FROM = 1.0


def loses_projection(sweep: Sweep, point: SweepPoint) -> bool:
    """Say whether one point trains CLLR with a penalty that takes nearly all of its L away."""
    keys = _keys_of(sweep, point)
    if keys.get("method.name") != "cllr" or keys.get("method.norm") == "none":
        return False
    return float(keys["method.alpha"]) >= _LOST_FROM


def explodes(sweep: Sweep, point: SweepPoint) -> bool:
    """Say whether one point trains CLLR at a rate that its reconstruction does not bear."""
    keys = _keys_of(sweep, point)
    if keys.get("method.name") != "cllr" or keys.get("optim.name") != "sgd":
        return False
    fast = float(keys["optim.lr"]) >= _EXPLODES_AT_RATE
    return fast and float(keys["method.weight"]) >= _EXPLODES_FROM


def _keys_of(sweep: Sweep, point: SweepPoint) -> Mapping[str, Any]:
    """Return the dotted keys of one point's recipe, without defaults."""
    recipe = config.apply_overrides(shipped(sweep.recipe), sweep.overrides)
    return config.flat(recipe) | point.changes


@functools.cache
def shipped(name: str) -> Mapping[str, Any]:
    """Return a recipe of configs/pretrain as it is written, without defaults."""
    return config.read_recipe(config.find_recipe(name, "pretrain"))


@functools.cache
def _by_key(grid: str) -> Mapping[str, list[Leaves]]:
    """Return, for each published row, the settings of the points of a grid that must reach it."""
    by_key: dict[str, list[Leaves]] = {}
    try:
        found = read_grid(grid)
    except BadInput:
        return by_key  # no grid makes this table
    for sweep in sweeps(found):
        for point in sweep.points():
            of_point = settings(_keys_of(sweep, point))
            for key in expected_by(sweep, point):
                by_key.setdefault(key, []).append(of_point)
    return by_key


def settings(recipe: Mapping[str, Any]) -> Leaves:
    """Return the leaves of a pretraining recipe that decide its trunk and are not at their defaults.

    Two recipes with equal settings train the same, whether their defaults are written out or not.
    """
    defaults = protocol_fingerprints.shipped()["pretraining"]
    found = leaves(recipe)
    # 1. The groups of crops are a list; each group has the same defaults.
    groups = found.pop(_CROPS, None)
    if isinstance(groups, list):
        found[f"{_CROPS}.count"] = len(groups)
        for n, group in enumerate(groups):
            found |= leaves(group, f"{_CROPS}.{n}")
    known: Leaves = {**defaults["recipe"], f"{_CROPS}.count": 1}
    for n in range(len(groups or ())):
        known |= _under(f"{_CROPS}.{n}", defaults["crops"])
    # 2. A method has the defaults of its name, and so has a method within it (`method.inner`).
    for place in ("method", "method.inner"):
        method = str(found.get(f"{place}.name"))
        known |= _under(place, defaults.get(method, {}))
        # `defaults` has a group of a method's keys as METHOD.PART. A recipe that writes only some of
        # the group's keys gets the others from there, and not from the method's defaults.
        for name, group in defaults.items():
            owner, _, part = name.partition(".")
            if owner != method or not part:
                continue
            if any(key.startswith(f"{place}.{part}.") for key in found):
                found = _under(f"{place}.{part}", group) | found
    # 3. Keep what changes the training.
    kept = {}
    for key, value in found.items():
        free = key in _FREE or key.startswith("probe.")
        if not free and known.get(key) != value:
            kept[key] = value
    return kept


def _under(place: str, keys: Leaves) -> Leaves:
    return {f"{place}.{key}": value for key, value in keys.items()}


def changes(recipe: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the keys, by their last word, in which `recipe` differs from that of published row `key`.

    If several recipes must reach the row, the nearest counts: the one with the fewest such keys.
    """
    own = settings(recipe)
    number = published.lookup(key)[0]
    grid = published.grid_name(number.paper, number.table)
    differences = [_different(own, other) for other in _by_key(grid).get(key, [])]
    return min(differences, key=len, default=())


def _different(own: Leaves, other: Leaves) -> tuple[str, ...]:
    """Return the last words of the keys in which two recipes differ."""
    keys = []
    for key in sorted(own.keys() | other.keys()):
        if own.get(key) != other.get(key):
            keys.append(key)
    if "method.name" in keys:
        # Another method has other keys, which would only repeat that it is another.
        rest = [key for key in keys if not key.startswith("method.")]
        keys = ["method", *rest]
    words = dict.fromkeys(key.rpartition(".")[2] for key in keys)  # each word once
    return tuple(words)
