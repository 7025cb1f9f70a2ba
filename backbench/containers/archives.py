"""Reads image sets that are not files: CIFAR's pickles (none executed), STL-10, joined lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from backbench.errors import BadInput, nearest
from backbench.images.image_list import ArrayList, ImageList, Stamp, taken
from backbench.untrusted import opening, pickles, printable

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

STL10_SPLITS = ("train", "unlabeled", "train+unlabeled", "test")


def _read_pickle(path: Path) -> dict[str, Any]:
    """A batch of CIFAR, its keys as text."""
    try:
        with opening.open_regular(path, most=opening.GIGABYTE) as file:
            content = pickles.read(file)
        return {
            k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()
        }
    except FileNotFoundError:
        raise BadInput(
            f"{path}: no such file; unpack the python version of the data set there"
        ) from None
    except Exception as error:  # a damaged pickle raises anything
        said = printable.shown(" ".join(str(error).split()), 100)
        raise BadInput(f"{path}: not readable as a CIFAR batch ({said})") from None


def read_cifar(folder: Path, split: str) -> ArrayList:
    """Read an archive's folder cifar-10-batches-py or cifar-100-python; split: train or test."""
    import numpy as np

    if folder.name == "cifar-100-python":
        meta, key, files = "meta", "fine_label", {"train": ["train"], "test": ["test"]}
    else:
        meta, key = "batches.meta", "label"
        files = {
            "train": [f"data_batch_{i}" for i in range(1, 6)],
            "test": ["test_batch"],
        }
    if split not in files:
        raise BadInput(f"{folder}: no split '{split}'; allowed: train, test")
    batches = [_read_pickle(folder / name) for name in files[split]]
    names = _read_pickle(folder / meta)
    try:
        # A row is 1024 red, 1024 green and 1024 blue values, each row by row
        rows = np.concatenate([batch["data"] for batch in batches])
        pixels = np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels = [int(label) for batch in batches for label in batch[f"{key}s"]]
        classes = names[f"{key}_names"]
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise BadInput(f"{folder}: not CIFAR's files ({error!r:.100})") from None
    return _array_list(folder, split, pixels, labels, classes)


def _array_list(
    folder: Path, split: str, pixels: np.ndarray, labels: list[int], classes: list[str]
) -> ArrayList:
    """The rows of `pixels`, named by split and place. BadInput where they do not fit together."""
    if pixels.dtype != "uint8" or len(labels) != len(pixels):
        raise BadInput(
            f"{folder}: {len(pixels)} images of {pixels.dtype} but {len(labels)} labels in '{split}'"
        )
    if not all(isinstance(name, str) for name in classes):
        raise BadInput(f"{folder}: a class name that is no text")
    wrong = [label for label in labels if not -1 <= label < len(classes)]
    if wrong:
        raise BadInput(
            f"{folder}: label {wrong[0]}, and {len(classes)} classes have names"
        )
    paths = tuple(f"{split}/{i:05}" for i in range(len(labels)))
    return ArrayList(folder.parent, paths, tuple(labels), tuple(classes), pixels)


def read_stl10(folder: Path, split: str) -> ImageList:
    """Read the folder `stl10_binary`, pixels only when needed; unlabelled images have label -1."""
    if split not in STL10_SPLITS:
        raise BadInput(f"{folder}: no split '{split}'; {nearest(split, STL10_SPLITS)}")
    parts = [_read_stl10(folder, name) for name in split.split("+")]
    return parts[0] if len(parts) == 1 else Joined.of(parts)


def _read_stl10(folder: Path, split: str) -> ArrayList:
    import numpy as np

    # Stored by channel, column, row; its labels count from 1
    file = folder / f"{split}_X.bin"
    with opening.open_regular(file) as binary:
        try:
            raw = np.memmap(binary, np.uint8, mode="r").reshape(-1, 3, 96, 96)
        except ValueError as error:
            raise BadInput(f"{file}: not STL-10's binary file ({error})") from None
    labels = [-1] * len(raw)
    if split != "unlabeled":
        stored = opening.read_bytes(folder / f"{split}_y.bin", most=opening.GIGABYTE)
        labels = [label - 1 for label in stored]
    names = folder / "class_names.txt"
    classes = [str(i) for i in range(10)]
    if names.exists():
        classes = opening.read_bytes(names, most=opening.MEGABYTE).decode().splitlines()
    return _array_list(folder, split, raw.transpose(0, 3, 2, 1), labels, classes)


@dataclass(frozen=True)
class Joined(ImageList):
    """Several lists behind one another, with the classes of the first."""

    parts: tuple[ImageList, ...]
    where: tuple[tuple[int, int], ...]  # of each image: the part, and its place there

    @staticmethod
    def of(
        parts: Sequence[ImageList],
        *,
        root: Path | None = None,
        paths: Sequence[str] | None = None,
    ) -> Joined:
        """The lists, by default under the root of the first and their own paths."""
        own: list[str] = []
        labels: list[int] = []
        where: list[tuple[int, int]] = []
        for number, part in enumerate(parts):
            own += part.paths
            labels += part.labels
            where += [(number, place) for place in range(len(part))]
        first = parts[0]
        kept, here = own if paths is None else paths, root or first.root
        return Joined(
            here, kept, tuple(labels), first.classes, tuple(parts), tuple(where)
        )

    def open(self, index: int) -> Image.Image:
        part, place = self.where[index]
        return self.parts[part].open(place)

    def array(self, index: int) -> np.ndarray:
        part, place = self.where[index]
        return self.parts[part].array(place)

    def read(self, index: int) -> bytes:
        part, place = self.where[index]
        return self.parts[part].read(place)

    def ends(self, index: int, size: int = 4096) -> bytes:
        part, place = self.where[index]
        return self.parts[part].ends(place, size)

    def stamps(self) -> Iterator[Stamp]:
        stamps = [list(part.stamps()) for part in self.parts]
        for part, place in self.where:
            yield stamps[part][place]

    def subset(self, indices: Sequence[int]) -> Self:
        return replace(super().subset(indices), where=taken(self.where, indices))
