"""Finds what other installed packages add: a lab's own methods, readings, datasets, formats and
trunks.

A package names what it adds in its pyproject.toml, by an entry point:

    [project.entry-points."backbench.methods"]
    my_method = "my_lab.my_method"              # a module like those in pretrain/methods
    [project.entry-points."backbench.probes"]
    my_reading = "my_lab.my_reading:PROBE"      # a backbench.transfer.probes.kind.Probe
    [project.entry-points."backbench.datasets"]
    my_birds = "my_lab.data:MY_BIRDS"           # a backbench.datasets.row.Dataset of that name
    [project.entry-points."backbench.formats"]
    "my format" = "my_lab.formats:MY_FORMAT"    # a backbench.weights.formats.Format of that name
    [project.entry-points."backbench.trunks"]
    my_trunk = "my_lab.trunks:MY_TRUNK"         # a backbench.weights.trunk.InstalledTrunk of that name

Recipes and command lines can name only what is installed in this way, never a module to import: a
recipe from a stranger runs nothing that was not here before.
"""

import functools
import importlib.util
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TypeVar

from backbench.errors import BadInput

T = TypeVar("T")

METHODS, PROBES = "backbench.methods", "backbench.probes"
DATASETS = "backbench.datasets"
FORMATS, TRUNKS = "backbench.formats", "backbench.trunks"


@functools.cache
def installed(group: str) -> dict[str, EntryPoint]:
    """Name -> entry point. BadInput where two packages claim one name."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        known = found.get(point.name)
        if known is not None and known.value != point.value:
            both = f"{origin(known)} and from {origin(point)}"
            raise BadInput(f"'{point.name}' ({group}) comes from {both}; uninstall one")
        found[point.name] = point
    return found


def names(group: str, shipped: Collection[str]) -> list[str]:
    """The names that packages add. BadInput where one of them is backbench's own."""
    added = installed(group)
    for name in shipped:
        if name in added:
            same = f"calls something '{name}' ({group}), as backbench does"
            raise BadInput(f"{origin(added[name])} {same}; it needs another name")
    return sorted(added)


def load(group: str, name: str, kind: type[T]) -> T:
    """The object behind an installed name. BadInput names a package whose object is no `kind`."""
    point = installed(group)[name]
    where = f"{origin(point)}: '{name}' ({group})"
    try:
        value = point.load()
    except Exception as error:  # whatever a stranger's module does when it is imported
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise BadInput(f"{where} cannot be loaded: {what}") from error
    if not isinstance(value, kind):
        raise BadInput(f"{where} is {type(value).__name__}, not {kind.__name__}")
    own = getattr(value, "name", name)
    if (
        own != name
    ):  # its results would be under another name than the one that asks for it
        raise BadInput(f"{where} calls itself '{own}'")
    return value


def package_file(point: EntryPoint, name: str) -> Path:
    """Return the path of the file `name` beside the `__init__.py` of an entry point's package. The
    package is not imported. FileNotFoundError where no such package is installed."""
    package = point.module.partition(".")[0]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"no package '{package}'")
    return Path(spec.submodule_search_locations[0]) / name


def origin(point: EntryPoint) -> str:
    """The package that an entry point comes from, for messages."""
    return (
        f"{point.dist.name} {point.dist.version}"
        if point.dist is not None
        else point.value
    )
