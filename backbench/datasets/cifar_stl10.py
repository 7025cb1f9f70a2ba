"""Reads CIFAR and STL-10, whose images are rows of arrays. CIFAR's pickles are never unpickled:
`untrusted.pickles` reads them, and executes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbench.errors import BadInput, nearest
from backbench.images.image_list import ArrayList, ImageList, Joined
from backbench.untrusted import opening, pickles, printable

if TYPE_CHECKING:
    import numpy as np

STL10_SPLITS = ("train", "unlabeled", "train+unlabeled", "test")


def _read_pickle(path: Path) -> dict[str, Any]:
    """Read a batch of CIFAR, its keys as text."""
    try:
        with opening.open_regular(path, most=opening.GIGABYTE) as file:
            content = pickles.read(file)
        return {
            key.decode() if isinstance(key, bytes) else key: value
            for key, value in content.items()
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
        meta, labels_key, names_key = "meta", "fine_labels", "fine_label_names"
        files = {"train": ["train"], "test": ["test"]}
    else:
        meta, labels_key, names_key = "batches.meta", "labels", "label_names"
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
        labels = [int(label) for batch in batches for label in batch[labels_key]]
        classes = names[names_key]
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise BadInput(f"{folder}: not CIFAR's files ({error!r:.100})") from None
    return _array_list(folder, split, pixels, labels, classes)


def _array_list(
    folder: Path, split: str, pixels: np.ndarray, labels: list[int], classes: list[str]
) -> ArrayList:
    """List the rows of `pixels`, named by split and place. BadInput where the parts do not fit."""
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
