"""The tasks that can be measured, one row of tasks.toml each; every list of tasks is made here. A
task is a kind of number (a linear probe, the AP of Mask R-CNN), measured by a verb. A protocol (a
recipe under configs/transfer or configs/detection) says how."""

import tomllib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path


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
    cheap: bool = False  # minutes, where the others take hours: what may predict them
    ranked: bool = True  # False where the numbers only describe features
    lower: bool = False  # less is better; the title says so, too
    # Its probes read one feature an image, which stands in the cache; others read maps or tokens
    pooled: bool = True
    from_scores: bool = (
        False  # computed from what the other tasks' heads said of each image
    )
    # Something is trained by chance: a second run gives another number (stats/training_noise.py).
    # Few labels draw theirs, and their tests count the draws already.
    trains: bool = True
    # Points by which a measured number may miss a printed one; None: it is not judged. Ours: the
    # papers print one run without an interval, and users report spreads of half a point to a point
    # for one recipe (facebookresearch/barlowtwins#14: 68.9 and 69.7).
    tolerance: float | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)  # on single datasets

    @property
    def detects(self) -> bool:
        return bool(self.ious)

    @property
    def split(self) -> str:
        """The split in its rows: detectors are scored on what their datasets call val."""
        return "val" if self.detects else "test"

    def tolerance_on(self, dataset: str) -> float | None:
        return self.tolerances.get(dataset, self.tolerance)


_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
TASKS = {
    n: Task(n, **(row | {"ious": tuple(row.get("ious", ()))}))
    for n, row in _ROWS.items()
}
ORDER = {name: place for place, name in enumerate(TASKS)}
DETECTION = tuple(name for name, task in TASKS.items() if task.detects)


@dataclass(frozen=True, kw_only=True)
class MeasuringVerb:
    """A verb that measures tasks: the options that a grid may give it, and those that it must."""

    takes: tuple[str, ...]
    needs: tuple[str, ...]


VERBS: dict[str, MeasuringVerb] = {
    "linear": MeasuringVerb(
        takes=("datasets", "protocol", "pack"), needs=("datasets",)
    ),
    "ood": MeasuringVerb(takes=("datasets", "protocol", "pack"), needs=("datasets",)),
    "semisup": MeasuringVerb(
        takes=("percent", "lists", "protocol"), needs=("percent",)
    ),
    "finetune": MeasuringVerb(takes=("datasets", "protocol"), needs=("datasets",)),
    "analyze": MeasuringVerb(takes=("datasets", "pack"), needs=("datasets",)),
    "detect": MeasuringVerb(takes=("config", "engine"), needs=("config",)),
}


def by_kind(verb: str) -> dict[str, str]:
    """`kind:` of a protocol -> the task that the verb measures by it."""
    return {
        task.kind: name
        for name, task in TASKS.items()
        if task.verb == verb and task.kind is not None
    }
