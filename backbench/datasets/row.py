"""A dataset is one row: what it holds, where it lies, and how it is read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backbench.containers import finding
from backbench.containers.container import SPLIT_WORDS
from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.file_names import passed_over
from backbench.images.image_list import ImageList

# miou: its images have label maps; map: they show several classes each
Metric = Literal["top1", "mean_per_class", "miou", "map"]
# (the folder that holds what `needs` names, seed of the hold-out)
Reader = Callable[[Path, int], Splits]
# (ROOT, name of the split)
SplitReader = Callable[[Path, str], ImageList]


@dataclass(frozen=True, kw_only=True)
class HubTables:
    """How a dataset lies on the Hugging Face Hub: Parquet files for each split (hub_tables.py)."""

    labels: tuple[str, ...]  # columns that may hold its labels
    # Where the owner's archives have an image: {file} is its name in the table, {class} its class,
    # {split} its split
    path: str
    # How its classes are counted: by their names in the alphabet, by their names as text (capitals
    # first), as the table states, or as the owner's list beside the tables has them
    order: Literal["names", "text", "stated", "listed"] = "names"
    # The owner's files that lie beside the tables; the list of classes is the first
    beside: tuple[str, ...] = ()
    config: str = ""  # the configuration of several that holds its splits
    whole: bool = False  # the table is undivided: our reader draws the splits
    arrays: bool = False  # its owner's files hold arrays of pixels, no images


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One dataset: catalog.toml has the shipped rows, and installed packages may add theirs."""

    name: str
    classes: int | None
    # Images of train, val, test; None where val is held out of train, or where a size is not fixed
    sizes: tuple[int | None, int | None, int | None]
    read: Reader
    metric: Metric = "top1"
    # One split as pretraining takes it; default: class folders or tar shards in ROOT/<name>/<split>
    read_split: SplitReader | None = None
    needs: tuple[str, ...] = ()  # files or folders that tell that the dataset is there
    # Where to look below ROOT; default: ROOT/<name>, then ROOT
    folders: tuple[str, ...] = ()
    get: str = ""  # which files to get, and from whom
    licence: str = "as its owner states"
    hub: str | None = (
        None  # the dataset's repository on the Hugging Face Hub, of its owner
    )
    parquet: HubTables | None = None
    top5: bool = False
    # Of test sets for ImageNet's classifiers: the rules by which an answer is right, and the pixels
    # that are cut from each side of an image first
    rules: tuple[str, ...] = ()
    trim: int = 0

    @property
    def dense(self) -> bool:
        """True if every image has a label map (`images.dense.DenseList`), and no class."""
        return self.metric == "miou"

    @property
    def multilabel(self) -> bool:
        """True if an image shows several classes (`images.multilabel.MultiLabelList`)."""
        return self.metric == "map"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all its metrics, the main one first."""
        if self.dense:
            return (self.metric, "pixel_acc", "macc")
        if self.multilabel:
            return (self.metric, "map11")
        if self.top5:
            return (self.metric, "top5")
        return (self.metric,)

    def base(self, root: Path) -> Path:
        """Return the folder that holds all of `needs`. BadInput says what is missing, and from whom
        to get it."""
        if not self.needs:
            return root
        folders = [root / folder for folder in self.folders or (self.name, ".")]
        for base in folders:
            if all(
                (base / need).exists() or _contained(base, need) for need in self.needs
            ):
                tables = tables_below(folders[0]) if self.parquet else []
                if base == folders[0] or not tables:
                    return base
                if self._lie_beside(base, folders[0]):
                    return folders[0]
                raise BadInput(
                    f"{self.name} is there twice, as {base / self.needs[0]} and as {tables[0]};"
                    " move one away"
                )
        if self.parquet is not None and tables_below(folders[0]):
            return folders[0]
        # The message names the first folder, since that is where the dataset belongs
        for need in self.needs:
            if need in SPLIT_WORDS:
                why = finding.refusal(folders[0], need)
                if why:
                    raise BadInput(f"{self.name}: {why}")
        missing = next(need for need in self.needs if not (folders[0] / need).exists())
        raise BadInput(
            f"{self.name}: {folders[0] / missing} is missing; get {self.get} and unpack it there"
        )

    def _lie_beside(self, base: Path, hub: Path) -> bool:
        """Return True if all of `needs` are the files that the Hub has beside the tables in `hub`."""
        assert self.parquet is not None
        files = [base / need for need in self.needs]
        return all(
            file.parent == hub and file.name in self.parquet.beside for file in files
        )


def tables_below(base: Path) -> list[Path]:
    """List the Parquet files of a dataset, in BASE and in its folders of splits and configurations."""
    found: list[Path] = []
    for pattern in ("*.parquet", "*/*.parquet", "*/*/*.parquet"):
        below = base.glob(pattern)
        found += [p for p in below if not passed_over(p.relative_to(base).as_posix())]
    return sorted(found)


def _contained(base: Path, need: str) -> bool:
    """Return True if `need` is a split, and in a container."""
    return need in SPLIT_WORDS and finding.find(base, need) is not None
