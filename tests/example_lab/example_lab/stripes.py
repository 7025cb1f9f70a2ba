"""A dataset: pictures of stripes, in a text file (`name label` a line) and a folder of images."""

from pathlib import Path

from backbench.datasets import splits
from backbench.datasets.row import Dataset
from backbench.datasets.splits import Splits
from backbench.images.image_list import ImageList

CLASSES = ("across", "down")


def _list(base: Path, name: str) -> ImageList:
    lines = [line.split() for line in (base / f"{name}.txt").read_text().splitlines()]
    paths = tuple(f"images/{file}" for file, _ in lines)
    labels = tuple(CLASSES.index(label) for _, label in lines)
    return ImageList(base, paths, labels, CLASSES)


def read(base: Path, seed: int) -> Splits:
    return splits.with_hold_out(_list(base, "train"), _list(base, "test"), seed=seed)


def read_split(root: Path, split: str) -> ImageList:
    return _list(root / "stripes", split)


STRIPES = Dataset(
    name="stripes",
    classes=None,
    sizes=(40, None, 20),
    metric="top1",
    read=read,
    read_split=read_split,
    needs=("train.txt", "test.txt", "images"),
    folders=("stripes",),
    get="the stripes from the lab's own disk",
)
