"""The tasks that can be measured, one row of tasks.toml each. Every list of tasks is made here.

A task is a kind of number (a linear probe, the AP of Mask R-CNN), measured by a verb. A protocol (a
recipe under configs/transfer or configs/detection) says how.

A package that adds a reading (backbench/plugins.py) has a row for it in a tasks.toml of its own,
beside the package's `__init__.py`: a board needs the row, and must not import the reading's code.
"""

import logging
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from backbench import plugins
from backbench.errors import BadInput


@dataclass(frozen=True)
class Task:
    """A kind of number. Its place in TASKS is its place in every table."""

    name: str
    title: str  # on the page and in tables
    verb: str  # of the command line
    recipe: str  # the protocol where none is named
    _: KW_ONLY
    # `kind:` of the protocols in configs/transfer that measure it
    kind: str | None = None
    percent: int | None = None  # of ImageNet's labels
    ious: tuple[str, ...] = ()  # detection: what its APs compare, the task's own first
    cheap: bool = False  # takes minutes, where the others take hours
    ranked: bool = True  # False where the numbers only describe features
    lower: bool = False  # less is better; the title says so, too
    # Its probes read one feature an image, which stands in the cache; others read maps or tokens
    pooled: bool = True
    # It reads images that show several classes each, as a folder of boxes says
    multilabel: bool = False
    # Whether it is computed from what the other tasks' heads said of each image
    from_scores: bool = False
    # Whether it is computed from the classes that other tasks predicted, and from a list of images
    from_predictions: bool = False
    # The detection task whose AP50 its numbers explain, from the detections that were kept
    explains: str | None = None
    # What it costs, in work that depends on the data, and a time that docs/datasets.md tells, too
    price: str = ""
    priced: str = ""
    # Whether something is trained by chance, so that a second run gives another number
    # (stats/training_noise.py). For few labels it is False: their tests count the draws of labels,
    # which hold that chance already
    trains: bool = True
    # How those protocols begin that measure what a model came with, and train nothing
    untrained: str | None = None
    # Points by which a measured number may miss a printed one; None: it is not judged. These numbers
    # are our own: the papers print one run without an interval, and users report spreads of half a
    # point to a point for one recipe (facebookresearch/barlowtwins#14: 68.9 and 69.7)
    tolerance: float | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)  # on single datasets

    @property
    def detects(self) -> bool:
        return bool(self.ious)

    @property
    def split(self) -> str:
        """The split in its rows: detectors are scored on what their datasets call val."""
        return "val" if self.detects or self.explains else "test"

    @property
    def follows(self) -> bool:
        """Whether its numbers follow from what other tasks kept."""
        return self.from_scores or self.from_predictions or self.explains is not None

    def trains_in(self, protocol: str) -> bool:
        """Return whether a second run of a protocol may give another number."""
        came_with_the_model = self.untrained is not None and protocol.startswith(
            self.untrained
        )
        return self.trains and not came_with_the_model

    def tolerance_on(self, dataset: str) -> float | None:
        return self.tolerances.get(dataset, self.tolerance)


def read(file: Path) -> dict[str, Task]:
    """Read the rows of a tasks.toml. TypeError for a key that is unknown or missing."""
    rows: dict[str, dict[str, Any]] = tomllib.loads(file.read_text())
    tasks = {}
    for name, row in rows.items():
        ious = tuple(row.get("ious", ()))
        tasks[name] = Task(name, **{**row, "ious": ious})
    return tasks


def installed(shipped: Mapping[str, Task]) -> dict[str, Task]:
    """Return the tasks of the readings that packages add.

    A package whose row cannot be read, or has a shipped name, is named in a warning and stands in
    nobody else's way."""
    log = logging.getLogger("backbench")
    try:
        points = plugins.installed(plugins.PROBES)
    except BadInput as error:
        log.warning(str(error))
        return {}
    found: dict[str, Task] = {}
    for kind, point in points.items():
        try:
            rows = read(plugins.package_file(point, "tasks.toml"))
            of_kind = [task for task in rows.values() if task.kind == kind]
            if not of_kind:
                raise ValueError(f"its tasks.toml has no row of kind '{kind}'")
            for task in of_kind:
                if task.name in shipped or task.name in found:
                    raise ValueError(f"there is a task '{task.name}' already")
                found[task.name] = task
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning(f"{plugins.origin(point)}: '{kind}' has no task: {error}")
    return found


TASKS = read(Path(__file__).with_suffix(".toml"))
TASKS |= installed(TASKS)
ORDER = {name: place for place, name in enumerate(TASKS)}
DETECTION = tuple(name for name, task in TASKS.items() if task.detects)


@dataclass(frozen=True, kw_only=True)
class MeasuringVerb:
    """A verb that measures tasks: the options that a grid may give it, and those that it must."""

    takes: tuple[str, ...]
    needs: tuple[str, ...] = ()
    needs_one_of: tuple[str, ...] = ()  # one of them is enough


VERBS: dict[str, MeasuringVerb] = {
    "linear": MeasuringVerb(
        takes=("datasets", "protocol", "pack"), needs=("datasets",)
    ),
    "ood": MeasuringVerb(takes=("datasets", "protocol", "pack"), needs=("datasets",)),
    "semisup": MeasuringVerb(
        takes=("datasets", "percent", "lists", "protocol"), needs=("percent",)
    ),
    "finetune": MeasuringVerb(takes=("datasets", "protocol"), needs=("datasets",)),
    "analyze": MeasuringVerb(takes=("datasets", "pack"), needs=("datasets",)),
    # COCO's data stand in the config; boxes of one's own are `datasets`, with a config of their own
    "detect": MeasuringVerb(
        takes=("datasets", "config", "engine"), needs_one_of=("config", "datasets")
    ),
}


def prices(verb: str | None = None) -> str:
    """Say what the readings of a verb cost, or all whose cost is known: a paragraph for each."""
    paragraphs = []
    for task in TASKS.values():
        if not task.price or verb not in (None, task.verb):
            continue
        text = f"{task.name}: {task.price}"
        if task.priced:
            text += f" ({task.priced})"
        paragraphs.append(
            textwrap.fill(text, 78, initial_indent="  ", subsequent_indent="    ")
        )
    return "\n".join(paragraphs)


def by_kind(verb: str) -> dict[str, str]:
    """Return `kind:` of a protocol -> the task that the verb measures by it."""
    return {
        task.kind: name
        for name, task in TASKS.items()
        if task.verb == verb and task.kind is not None
    }
