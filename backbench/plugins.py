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

METHODS = "backbench.methods"
PROBES = "backbench.probes"
DATASETS = "backbench.datasets"
FORMATS = "backbench.formats"
TRUNKS = "backbench.trunks"


@functools.cache
def installed(group: str) -> dict[str, EntryPoint]:
    """Return name -> entry point. BadInput where two packages claim one name."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        known = found.get(point.name)
        if known is not None and known.value != point.value:
            raise BadInput(
                f"'{point.name}' ({group}) comes from {origin(known)} and from {origin(point)};"
                " uninstall one"
            )
        found[point.name] = point
    return found


def names(group: str, shipped: Collection[str]) -> list[str]:
    """List the names that packages add. BadInput where one of them is backbench's own."""
    added = installed(group)
    for name in shipped:
        if name in added:
            raise BadInput(
                f"{origin(added[name])} calls something '{name}' ({group}), as backbench does;"
                " it needs another name"
            )
    return sorted(added)


def load(group: str, name: str, kind: type[T]) -> T:
    """Load the object behind an installed name. BadInput is raised where the object cannot be loaded
    or is no `kind`."""
    point = installed(group)[name]
    where = f"{origin(point)}: '{name}' ({group})"
    try:
        value = point.load()
    except Exception as error:  # whatever a stranger's module does when it is imported
        said = " ".join(str(error).split())
        raise BadInput(
            f"{where} cannot be loaded: {type(error).__name__}: {said}"
        ) from error
    if not isinstance(value, kind):
        raise BadInput(f"{where} is {type(value).__name__}, not {kind.__name__}")
    # Else its results would stand under its own name, not under the one they are asked for by
    own = getattr(value, "name", name)
    if own != name:
        raise BadInput(f"{where} calls itself '{own}'")
    return value


def package_file(point: EntryPoint, name: str) -> Path:
    """Return the path of the file `name` beside the `__init__.py` of an entry point's package.

    The package is not imported. FileNotFoundError where no such package is installed."""
    package = point.module.partition(".")[0]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"no package '{package}'")
    return Path(spec.submodule_search_locations[0]) / name


def origin(point: EntryPoint) -> str:
    """Return the package that an entry point comes from, for messages."""
    if point.dist is None:
        return point.value
    return f"{point.dist.name} {point.dist.version}"
