"""One thing to measure: a protocol on a dataset, for some checkpoints, in a run's folder."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from backbench.datasets import splits
from backbench.datasets.row import Dataset
from backbench.datasets.splits import Splits
from backbench.images import contents
from backbench.recipes import config
from backbench.records.store import Result
from backbench.runs.folder import STATES
from backbench.transfer.protocol import CropAugment, Geometry, Protocol, TrunkGeometry
from backbench.weights.checkpoint import Checkpoint
from backbench.weights.kept_heads import KeptHead

# The class of the protocol: a probe that measures an Assignment[Sgd] finds an Sgd in it.
Kind_co = TypeVar("Kind_co", bound=Protocol, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Assignment(Generic[Kind_co]):
    """One thing to measure: a protocol on a dataset for some checkpoints, in a run folder."""

    run: Path
    task: str  # of backbench/tasks.toml
    dataset: Dataset
    splits: Splits
    protocol: Kind_co
    seed: int
    checkpoints: tuple[Checkpoint, ...]
    # The folder in which kept heads are looked for; None: the one that the run's folder lies in
    heads: Path | None = None
    # The heads that were found there, by their checkpoints' digests
    found: Mapping[str, KeptHead] = field(default_factory=dict)
    # The size in pixels at which these checkpoints are read, where the protocol has a TrunkGeometry:
    # their own, or one for all
    own_size: int | None = None

    @property
    def geometry(self) -> Geometry:
        """The geometry of the images that these checkpoints read."""
        geometry = self.protocol.geometry
        if isinstance(geometry, TrunkGeometry):
            assert self.own_size is not None, "checkpoints of one own size"
            return geometry.at(self.own_size)
        return geometry

    def views(self, augment: CropAugment) -> CropAugment:
        """Return the views of the images that these checkpoints train on."""
        return augment if self.own_size is None else augment.at(self.own_size)

    @functools.cached_property
    def hashes(self) -> dict[str, str]:
        """Digests of the lists of images, by split."""
        return splits.digests(self.splits)

    @property
    def state_file(self) -> Path:
        """The file that this measurement, unfinished, continues from."""
        size = "" if self.own_size is None else f"-{self.own_size}px"
        name = f"{self.dataset.name}-{self.protocol.name}{size}.state"
        return self.run / STATES / name.replace("/", "_")

    def stem(self, checkpoint: Checkpoint, suffix: str = "") -> str:
        """Return the name of the files that are kept beside the rows of a checkpoint."""
        parts = (
            self.task,
            self.dataset.name,
            self.protocol.name + suffix,
            f"s{self.seed}",
            checkpoint.digest[:12],
        )
        return "-".join(parts).replace("/", "_")

    @functools.cached_property
    def test_contents(self) -> str:
        """A digest of the test images' contents: other images may have the same names."""
        return contents.whole(self.splits.test)

    @functools.cached_property
    def path_order(self) -> dict[str, str]:
        """The digests of the lists and of the test images' contents, in the order of paths; empty
        for a dataset whose copies all have one order."""
        if self.dataset.parquet is None:
            return {}
        found = {name: splits.by_path(part) for name, part in self.splits.items()}
        digests = {name: splits.digest(images) for name, images in found.items()}
        # Where the list is in that order, nothing is read twice
        return {**digests, contents.KEY: contents.whole(found["test"])}

    def done(
        self, rows: Iterable[Result], metrics: Iterable[str]
    ) -> dict[str, list[Result]]:
        """Return a checkpoint's digest -> its rows among `rows` of a run, for each checkpoint of
        this assignment that has a row of each of `metrics`."""
        mine = (self.task, self.dataset.name, self.protocol.name, self.seed)
        by_digest: dict[str, list[Result]] = {c.digest: [] for c in self.checkpoints}
        for row in rows:
            same = (row.task, row.dataset, row.protocol, row.seed) == mine
            if same and row.checkpoint in by_digest:
                by_digest[row.checkpoint].append(row)
        wanted = set(metrics)
        complete = {}
        for digest, own in by_digest.items():
            if wanted <= {row.metric for row in own}:
                complete[digest] = own
        return complete


def identity_of(tasks: Sequence[Assignment[Protocol]]) -> dict[str, object]:
    """Return all that decides a run's numbers. A run folder belongs to one such identity."""
    recipes: list[dict[str, object]] = []
    digests: list[str] = []
    heads: dict[str, str] = {}
    for task in tasks:
        recipe = config.to_dict(task.protocol)
        if recipe not in recipes:
            recipes.append(recipe)
        digests += [c.digest for c in task.checkpoints]
        for digest, head in task.found.items():
            heads[digest] = head.digest
    identity: dict[str, object] = {
        # One protocol stands by itself and not in a list, as in runs from before there could be
        # several.
        "recipe": recipes[0] if len(recipes) == 1 else recipes,
        "checkpoints": list(dict.fromkeys(digests)),
        "datasets": {task.dataset.name: task.hashes for task in tasks},
        "seed": tasks[0].seed,
        contents.KEY: {
            t.dataset.name: contents.of_splits(t.splits.items()) for t in tasks
        },
    }
    # The key is left out where no heads are used, so that runs without heads keep their identity.
    if heads:
        identity["heads"] = heads
    return identity
