"""Lists of images with labels: the files of a class folder, the rows of an array, joined lists."""

from __future__ import annotations

import itertools
import logging
import operator
import os
import stat
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar, overload

from backbench.errors import BadInput, no_folder
from backbench.images.decoding import decode, decode_array, readable
from backbench.images.file_names import (
    EXTENSIONS,
    OTHER_PICTURES,
    is_image,
    passed_over,
    unusable_in,
)
from backbench.images.folder_walk import ClassWalk, refuse_broken_links, subfolders
from backbench.runs.run_progress import QUIET_SECONDS, Progress
from backbench.untrusted import opening, printable

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

T = TypeVar("T")
log = logging.getLogger(__name__)
# Warnings that were given: a process lists a folder several times
_WARNED: set[str] = set()


def taken(values: Sequence[T], indices: Sequence[int]) -> tuple[T, ...]:
    """Return values[i] for every i of `indices`, in that order."""
    return tuple(values[i] for i in indices)


class Names(Sequence[str]):
    """Texts as one block of bytes: a third of a tuple's memory, and shared with forked workers."""

    def __init__(self, texts: Iterable[str]) -> None:
        texts = list(texts)
        joined = "".join(texts)
        if joined.isascii():
            # Where a character is a byte, encoding all at once takes a fifth of the time
            self._block = joined.encode("ascii")
            self._ends = array("I", itertools.accumulate(map(len, texts), initial=0))
            return
        encode = operator.methodcaller("encode", errors="surrogateescape")
        self._keep(map(encode, texts))

    def _keep(self, parts: Iterable[bytes]) -> None:
        """Join texts that are encoded."""
        block = bytearray()
        # Text i lies between bytes ends[i] and ends[i + 1]
        ends = array("I", [0])
        for part in parts:
            block += part
            ends.append(len(block))
        self._block = bytes(block)
        self._ends = ends

    @staticmethod
    def of(texts: Iterable[str]) -> Names:
        """Return the texts as Names; Names are returned as they are."""
        return texts if isinstance(texts, Names) else Names(texts)

    def taken(self, indices: Iterable[int]) -> Names:
        """Return the texts at `indices`, in that order, without decoding them."""
        block, ends = self._block, self._ends
        places = map(range(len(self)).__getitem__, indices)
        out = Names(())
        out._keep(block[ends[i] : ends[i + 1]] for i in places)
        return out

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[str]:
        if self._block.isascii():
            # Where a byte is a character, decoding all at once takes half the time
            text = self._block.decode("ascii")
            for begin, end in itertools.pairwise(self._ends):
                yield text[begin:end]
            return
        for begin, end in itertools.pairwise(self._ends):
            yield self._block[begin:end].decode(errors="surrogateescape")

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        place = range(len(self))[index]  # a negative index counts from the end
        part = self._block[self._ends[place] : self._ends[place + 1]]
        return part.decode(errors="surrogateescape")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class Stamp(NamedTuple):
    """An image's size, its file's fingerprint, and its place in the file."""

    size: int  # bytes of the image
    inode: int
    changed: int  # ctime of the file, ns
    place: object = 0  # equal for no two images of a file


@dataclass(frozen=True)
class ImageList:
    """Image files and their labels, in a fixed order."""

    root: Path
    paths: Sequence[str]  # relative to root, '/' between parts; kept as Names
    labels: tuple[int, ...]  # -1: unlabelled
    classes: tuple[str, ...]  # names, in label order

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", Names.of(self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def file(self, index: int) -> Path:
        return self.root / self.paths[index]

    def open(self, index: int) -> Image.Image:
        """Decode image `index` as PIL RGB, not turned by EXIF."""
        return decode(self.file(index), data=self.read(index))

    def array(self, index: int) -> np.ndarray:
        """Decode image `index` as uint8 RGB (H, W, 3): the same pixels, faster."""
        return decode_array(self.read(index), self.file(index))

    def read(self, index: int) -> bytes:
        """Return the bytes of image `index`. BadInput names one that is missing or cut short."""
        with readable(self.file(index)) as file:
            return file.read()

    def ends(self, index: int, size: int = 4096) -> bytes:
        """Return the first and the last `size` bytes of an image; where that is cheap, the rest is
        not read."""
        return opening.ends(f"{self.root}/{self.paths[index]}", size)

    @property
    def files(self) -> ImageList:
        """All files that a number on this list depends on, as a list."""
        return self

    def stamps(self) -> Iterator[Stamp]:
        """Yield the stamp of every image, in order: one stat per file."""
        for path in self.paths:
            file = f"{self.root}/{path}"
            try:
                about = os.stat(file)  # noqa: PTH116 - a Path for each of a million takes longer
            except OSError:
                about = None
            if about is None or not stat.S_ISREG(about.st_mode):
                there = [os.path.isfile(f"{self.root}/{each}") for each in self.paths]  # noqa: PTH113
                raise BadInput(
                    f"{file} is missing ({there.count(False)} of {len(there)} images are)"
                )
            # Two images that a deduplicator made hard links of one file are still two images
            place = (about.st_dev, path) if about.st_nlink > 1 else about.st_dev
            yield Stamp(about.st_size, about.st_ino, about.st_ctime_ns, place)

    def subset(self, indices: Sequence[int]) -> Self:
        """Return the list of the images at `indices`, in that order."""
        paths = Names.of(self.paths).taken(indices)
        return replace(self, paths=paths, labels=taken(self.labels, indices))


@dataclass(frozen=True)
class ArrayList(ImageList):
    """Images that are rows of one array (CIFAR, STL-10); `paths` are made-up names, one per row."""

    pixels: np.ndarray  # (N, H, W, 3) uint8

    def open(self, index: int) -> Image.Image:
        from PIL import Image

        return Image.fromarray(self.pixels[index])

    def array(self, index: int) -> np.ndarray:
        import numpy as np

        return np.ascontiguousarray(self.pixels[index])

    def read(self, index: int) -> bytes:
        """Return the pixels of a row."""
        return self.pixels[index].tobytes()

    def stamps(self) -> Iterator[Stamp]:
        """Yield stamps that tell no change: the pixels are in memory."""
        for path in self.paths:
            yield Stamp(0, 0, 0, path)

    def subset(self, indices: Sequence[int]) -> Self:
        return replace(super().subset(indices), pixels=self.pixels[list(indices)])


@dataclass(frozen=True)
class Joined(ImageList):
    """Several lists one after the other, with the classes of the first."""

    parts: tuple[ImageList, ...]
    where: tuple[tuple[int, int], ...]  # of each image: the part, and its index there

    @staticmethod
    def of(
        parts: Sequence[ImageList],
        *,
        root: Path | None = None,
        paths: Sequence[str] | None = None,
    ) -> Joined:
        """Join the lists; by default under the root of the first and their own paths."""
        own_paths: list[str] = []
        labels: list[int] = []
        where: list[tuple[int, int]] = []
        for number, part in enumerate(parts):
            own_paths += part.paths
            labels += part.labels
            where += [(number, index) for index in range(len(part))]
        return Joined(
            root or parts[0].root,
            own_paths if paths is None else paths,
            tuple(labels),
            parts[0].classes,
            tuple(parts),
            tuple(where),
        )

    def open(self, index: int) -> Image.Image:
        part, inner = self.where[index]
        return self.parts[part].open(inner)

    def array(self, index: int) -> np.ndarray:
        part, inner = self.where[index]
        return self.parts[part].array(inner)

    def read(self, index: int) -> bytes:
        part, inner = self.where[index]
        return self.parts[part].read(inner)

    def ends(self, index: int, size: int = 4096) -> bytes:
        part, inner = self.where[index]
        return self.parts[part].ends(inner, size)

    def stamps(self) -> Iterator[Stamp]:
        stamps = [list(part.stamps()) for part in self.parts]
        for part, inner in self.where:
            yield stamps[part][inner]

    def subset(self, indices: Sequence[int]) -> Self:
        return replace(super().subset(indices), where=taken(self.where, indices))


# Class folders


def scan_folder(root: str | Path, *, classes: Sequence[str] | None = None) -> ImageList:
    """List a class folder ROOT/<class>/**/<image>, sorted by class and path: the same everywhere.

    `classes`, in label order, must be there; other folders are ignored. Images directly in ROOT,
    without class folders, are unlabelled. Hidden folders are passed over, links followed.
    BadInput names a missing or empty folder, a link that leads nowhere, and an unusable name."""
    root = Path(root)
    if not root.is_dir():
        raise BadInput(
            f"{root}: {no_folder(root)}; expected images as {root}/<class>/<image>"
        )
    refuse_broken_links(root)
    if classes is None:
        classes = subfolders(root)
    missing = [name for name in classes if not (root / name).is_dir()]
    if missing:
        raise BadInput(missing_classes(root, missing, len(classes)))
    found = _images_of_classes(root, classes)
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if not found[name]:
            raise BadInput(
                f"{root / name}: class folder without images ({', '.join(EXTENSIONS)})"
            )
        paths += sorted(found[name])
        labels += [label] * len(found[name])
    if not classes:
        paths = sorted(p.name for p in root.iterdir() if is_image(p.name))
        labels = [-1] * len(paths)
    if not paths:
        raise BadInput(
            f"{root}: no images found; expected {root}/<class>/<image> ({', '.join(EXTENSIONS)})"
        )
    # Nearly all names are printable, which one look at all of them tells
    if unusable_in("".join(paths)) is not None:
        for path in paths:
            character = unusable_in(path)
            if character is not None:
                raise BadInput(
                    f"{root}: the name '{printable.shown(path, 200)}' holds the control character"
                    f" {character}; rename it"
                )
    return ImageList(root, paths, tuple(labels), tuple(classes))


def _images_of_classes(root: Path, classes: Sequence[str]) -> dict[str, list[str]]:
    """Return class -> the paths of its images below ROOT."""
    progress = Progress(
        None, len(classes), f"{root}: listing", unit="folder", after=QUIET_SECONDS
    )
    walk = ClassWalk(root)
    found: dict[str, list[str]] = {name: [] for name in classes}
    others = []  # pictures of another kind
    for name in classes:
        for file, image in walk.files(name):
            if image:
                found[name].append(file)
            elif file.lower().endswith(OTHER_PICTURES):
                others.append(file)
        progress.advance()
    for name, (file, image) in walk.linked_files():
        if image:
            found[name].append(file)
    if others:
        warning = (
            f"{root}: {len(others)} pictures are passed over, {min(others)} first; a list takes"
            f" {', '.join(EXTENSIONS)}: write them as one of these"
        )
        if warning not in _WARNED:
            log.warning(warning)
            _WARNED.add(warning)
    return found


def missing_classes(root: Path, missing: Sequence[str], count: int) -> str:
    """Say which class folders a dataset of `count` classes lacks."""
    line = f"{root}: {len(missing)} of {count} class folders are missing, '{missing[0]}' first"
    if len(missing) > 1:
        line += f"; is {root} a subset? Under a name of its own it is a class folder like any other"
    return line


def ignored(root: Path) -> list[str]:
    """List files that `scan_folder` passes over: of unknown kind, or beside the class folders.

    Hidden files are not among them."""
    classes = subfolders(root)
    walk = ClassWalk(root)
    out = []
    for path in root.iterdir():
        beside = bool(classes) or not is_image(path.name)
        if path.is_file() and not passed_over(path.name) and beside:
            out.append(path.name)
    for name in classes:
        out += [file for file, image in walk.files(name) if not image]
    out += [file for _, (file, image) in walk.linked_files() if not image]
    return sorted(out)
