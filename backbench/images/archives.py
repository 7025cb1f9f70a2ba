"""Image sets that are not folders of files: CIFAR's pickles, STL-10's binary files, tar shards.

Nothing is executed.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from backbench.errors import BadInput, nearest
from backbench.images.image_list import (
    EXTENSIONS,
    ArrayList,
    ImageList,
    decode_array,
    decode_bytes,
    taken,
)
from backbench.untrusted import jsons, opening, pickles, printable

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

CIFAR_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
MOST_CLASSES = 1_000_000  # in shards, where labels alone say how many there are
STL10_SPLITS = ("train", "unlabeled", "train+unlabeled", "test")


def _read_pickle(path: Path) -> dict[str, Any]:
    try:
        with opening.open_regular(path, most=opening.GIGABYTE) as file:
            content = pickles.read(file)
    except FileNotFoundError:
        raise BadInput(
            f"{path}: no such file; unpack the python version of the data set there"
        ) from None
    except Exception as error:
        raise BadInput(
            f"{path}: not readable as a CIFAR batch ({' '.join(str(error).split())[:100]})"
        ) from None
    if not isinstance(content, dict):
        raise BadInput(f"{path}: not readable as a CIFAR batch (a {type(content).__name__})")
    named: dict[str, Any] = {}
    for key, value in content.items():
        named[key.decode(errors="replace") if isinstance(key, bytes) else str(key)] = value
    return named


def read_cifar(root: str | Path, split: str) -> ArrayList:
    """ROOT/cifar10/cifar-10-batches-py or ROOT/cifar100/cifar-100-python as torchvision lays them
    out; `root` is the data set's own folder and tells which one it is; split is train or test."""
    import numpy as np

    root = Path(root)
    if (root / CIFAR_FOLDERS["cifar100"]).is_dir():
        folder, meta, label_key = root / CIFAR_FOLDERS["cifar100"], "meta", "fine_label"
        files = {"train": ["train"], "test": ["test"]}
    else:
        folder, meta, label_key = root / CIFAR_FOLDERS["cifar10"], "batches.meta", "label"
        files = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    if split not in files:
        raise BadInput(f"{root}: no split '{split}'; allowed: train, test")
    batches = [_read_pickle(folder / name) for name in files[split]]
    names = _read_pickle(folder / meta)
    labels: list[int] = []
    try:
        # A row is 1024 red, 1024 green and 1024 blue values, each row by row
        rows = np.concatenate([batch["data"] for batch in batches])
        pixels = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        for batch in batches:
            labels += [int(x) for x in batch[f"{label_key}s"]]
        classes = tuple(names[f"{label_key}_names"])
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise BadInput(f"{folder}: not CIFAR's files ({error!r:.100})") from None
    if pixels.dtype != np.uint8 or len(labels) != len(pixels):
        found = f"{len(pixels)} images of {pixels.dtype}, {len(labels)} labels"
        raise BadInput(f"{folder}: not CIFAR's files ({found})")
    if not all(isinstance(name, str) for name in classes):
        raise BadInput(f"{folder}: not CIFAR's files (a class name that is no text)")
    _check_labels(folder, labels, classes)
    paths = tuple(f"{split}/{i:05}" for i in range(len(labels)))
    return ArrayList(root, paths, tuple(labels), classes, np.ascontiguousarray(pixels))


def _check_labels(folder: Path, labels: Sequence[int], classes: Sequence[str]) -> None:
    wrong = [label for label in labels if not -1 <= label < len(classes)]
    if wrong:
        raise BadInput(f"{folder}: label {wrong[0]}, and {len(classes)} classes have names")


def read_stl10(root: str | Path, split: str) -> ImageList:
    """ROOT/stl10/stl10_binary; `root` is the data set's own folder. Unlabelled images have label
    -1. Pixels are read from disk when they are needed."""
    root = Path(root)
    if split not in STL10_SPLITS:
        raise BadInput(f"{root}: no split '{split}'; {nearest(split, STL10_SPLITS)}")
    parts = [_read_stl10(root, name) for name in split.split("+")]
    return parts[0] if len(parts) == 1 else Joined.of(parts)


def _read_stl10(root: Path, split: str) -> ArrayList:
    import numpy as np

    folder = root / "stl10_binary"
    file = folder / f"{split}_X.bin"
    try:
        # Stored by channel, column, row; its labels count from 1
        with opening.open_regular(file) as binary:
            raw = np.memmap(binary, np.uint8, mode="r").reshape(-1, 3, 96, 96)
        labels = np.full(len(raw), -1)
        if split != "unlabeled":
            stored = opening.read_bytes(folder / f"{split}_y.bin", most=opening.GIGABYTE)
            labels = np.frombuffer(stored, np.uint8).astype(int) - 1
        names = folder / "class_names.txt"
        classes = [str(i) for i in range(10)]
        if names.exists():
            classes = opening.read_bytes(names, most=opening.MEGABYTE).decode().split()
    except FileNotFoundError as error:
        raise BadInput(
            f"{error.filename}: no such file; unpack stl10_binary.tar.gz in {root}"
        ) from None
    except OSError as error:
        raise BadInput(f"{folder}: not readable ({error})") from None
    except UnicodeDecodeError:
        raise BadInput(f"{names}: class names that are no text") from None
    except ValueError:
        raise BadInput(
            f"{file}: not STL-10's binary file (its size is no multiple of 3 x 96 x 96)"
        ) from None
    if len(labels) != len(raw):
        raise BadInput(f"{folder}: {len(raw)} images but {len(labels)} labels in '{split}'")
    _check_labels(folder, labels.tolist(), classes)
    paths = tuple(f"{split}/{i:06}" for i in range(len(raw)))
    return ArrayList(root, paths, tuple(labels.tolist()), tuple(classes), raw.transpose(0, 3, 2, 1))


@dataclass(frozen=True)
class Joined(ImageList):
    """Several lists behind one another, with the classes of the first."""

    parts: tuple[ImageList, ...]
    where: tuple[tuple[int, int], ...]  # of each image: the part, and its place there

    @staticmethod
    def of(parts: Sequence[ImageList]) -> Joined:
        paths: list[str] = []
        labels: list[int] = []
        where: list[tuple[int, int]] = []
        for number, part in enumerate(parts):
            paths += part.paths
            labels += part.labels
            where += [(number, place) for place in range(len(part))]
        first = parts[0]
        return Joined(
            first.root, tuple(paths), tuple(labels), first.classes, tuple(parts), tuple(where)
        )

    def open(self, index: int) -> Image.Image:
        part, place = self.where[index]
        return self.parts[part].open(place)

    def array(self, index: int) -> np.ndarray:
        part, place = self.where[index]
        return self.parts[part].array(place)

    def subset(self, indices: Sequence[int]) -> Self:
        return replace(super().subset(indices), where=taken(self.where, indices))


@dataclass(frozen=True)
class ShardList(ImageList):
    """Images inside uncompressed tar files, each read in place, in any order:
    SHARD.tar/<key>.<image extension>."""

    spans: tuple[tuple[str, int, int], ...]  # of each image: shard, first byte, number of bytes
    _open: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    def read(self, index: int) -> bytes:
        shard, start, size = self.spans[index]
        try:
            if shard not in self._open:
                self._open[shard] = os.open(self.root / shard, os.O_RDONLY)
            data = os.pread(self._open[shard], size, start)
        except OSError as error:
            raise BadInput(f"{self.root / shard}: not readable ({error.strerror})") from None
        if len(data) != size:
            raise BadInput(f"{self.file(index)}: the shard ends in the middle of this image")
        return data

    def open(self, index: int) -> Image.Image:
        return decode_bytes(self.read(index), self.file(index))

    def array(self, index: int) -> np.ndarray:
        return decode_array(self.read(index), self.file(index))

    def subset(self, indices: Sequence[int]) -> Self:
        return replace(super().subset(indices), spans=taken(self.spans, indices))


Span = tuple[int, int]  # first byte and number of bytes of a member of a tar file


def scan_shards(shards: Sequence[Path]) -> ShardList:
    """WebDataset's layout: members `<key>.jpg` with `<key>.cls` (a number) or `<key>.json`
    ({"label": number}) beside them; images without either have label -1. Only the headers are read,
    members are never unpacked."""
    root = shards[0].parent
    paths: list[str] = []
    labels: list[int] = []
    spans: list[tuple[str, int, int]] = []
    for shard in shards:
        samples = _samples(shard)
        with opening.open_regular(shard) as file:
            for key, parts in samples.items():
                images = [e for e in parts if f".{e}" in EXTENSIONS]
                if not images:
                    continue
                paths.append(f"{shard.name}/{key.lstrip('/')}.{images[0]}")
                spans.append((shard.name, *parts[images[0]]))
                labels.append(_label(file, parts, shard, key))
    if not paths:
        raise BadInput(
            f"{root}: no images in {len(shards)} tar shards; expected members <key>.jpg and <key>.cls"
        )
    classes = tuple(str(i) for i in range(max(labels) + 1))
    return ShardList(root, tuple(paths), tuple(labels), classes, tuple(spans))


def _samples(shard: Path) -> dict[str, dict[str, Span]]:
    """key -> extension -> where it lies in the shard, in the order of the members."""
    samples: dict[str, dict[str, Span]] = {}
    try:
        with opening.open_regular(shard) as raw, tarfile.open(fileobj=raw, mode="r:") as tar:
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                # WebDataset: the key ends at the first dot
                key, _, extension = base.partition(".")
                if member.isfile() and not member.issparse() and key:
                    parts = samples.setdefault(f"{folder}/{key}", {})
                    parts[extension.lower()] = (member.offset_data, member.size)
            # It ends with a block of zeros; without it tarfile takes a cut file for a short one
            raw.seek(tar.offset)
            whole = raw.read(512) == bytes(512)
    except Exception as error:  # tarfile's own errors, and whatever a crafted header makes of it
        said = printable.shown(" ".join(str(error).split()), 100)
        raise BadInput(f"{shard}: not readable as an uncompressed tar file ({said})") from None
    if not whole:
        raise BadInput(
            f"{shard}: the tar file is cut short (no end mark after {len(samples)} samples)"
        )
    for key, parts in samples.items():
        if found := printable.control_in(key + "".join(parts)):
            raise BadInput(f"{shard}: a member's name holds the control character {found}")
    return samples


def _label(file: BinaryIO, parts: dict[str, Span], shard: Path, key: str) -> int:
    for extension in ("cls", "json"):
        if extension not in parts:
            continue
        start, size = parts[extension]
        file.seek(start)
        try:
            value = jsons.decode(file.read(min(size, opening.MEGABYTE)))
            label = value if extension == "cls" else value.get("label", value.get("cls", -1))
            if type(label) is int and -1 <= label < MOST_CLASSES:
                return label
        except (ValueError, AttributeError):
            pass
        raise BadInput(
            f"{shard}: the label in {key}.{extension} is not a whole number below {MOST_CLASSES}"
        )
    return -1
