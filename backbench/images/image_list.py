"""Images on disk: decoding, and lists of images with labels from class folders or arrays."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import stat
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Self, TypeVar, overload

from backbench.errors import BadInput
from backbench.runs.run_progress import QUIET_SECONDS, Progress
from backbench.untrusted import opening, printable, walking

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

T = TypeVar("T")

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# What an image may be, whatever its name says: PIL would give PostScript to Ghostscript
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP")
LARGEST = opening.GIGABYTE  # bytes of a file


@contextlib.contextmanager
def readable(path: str | Path, data: bytes | None = None) -> Iterator[BinaryIO]:
    """Open the image file or `data`; any decoder's error in the block is BadInput that names it."""
    try:
        with (
            opening.open_regular(path, most=LARGEST)
            if data is None
            else io.BytesIO(data) as file
        ):
            yield file
    except FileNotFoundError:
        raise BadInput(f"{path}: no such image file") from None
    except (MemoryError, BadInput):
        raise
    except (
        Exception
    ) as error:  # a damaged file raises whatever its decoder happens to do with it
        shown = printable.shown(str(path), 300)
        if why := getattr(error, "strerror", None):  # of the system
            raise BadInput(f"{shown}: not readable ({why})") from None
        # Pillow's own would name an object in memory
        unknown = type(error).__name__ == "UnidentifiedImageError"
        said = (
            "no known image format" if unknown else " ".join(str(error).split())[:100]
        )
        raise BadInput(f"{shown}: corrupt image ({said})") from None


def decode(
    path: str | Path, *, upright: bool = False, data: bytes | None = None
) -> Image.Image:
    """Decode a file, or its `data`, as PIL RGB; `upright` obeys EXIF. BadInput names a bad file."""
    from PIL import Image, ImageOps

    with readable(path, data) as file:
        opened = Image.open(file, formats=FORMATS)
        image = ImageOps.exif_transpose(opened) if upright else opened
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")  # it would copy


def decode_array(data: bytes, name: str | Path) -> np.ndarray:
    """Decode an image's bytes as uint8 RGB (H, W, 3), by OpenCV or else PIL, with PIL's pixels
    (both use libjpeg-turbo and ignore EXIF). BadInput names a corrupt or truncated image."""
    import cv2
    import numpy as np

    # A JPEG starts with FF D8 and ends with FF D9. Some versions of OpenCV fill up with gray what
    # is missing; PIL refuses it
    truncated = data[:2] == b"\xff\xd8" and b"\xff\xd9" not in data[-1024:]
    if data and not truncated:
        # libjpeg itself gives RGB, where OpenCV has a word for that (from 4.11 on)
        direct = (
            getattr(cv2, "IMREAD_COLOR_RGB", None) if data[:2] == b"\xff\xd8" else None
        )
        flags = cv2.IMREAD_IGNORE_ORIENTATION | (
            cv2.IMREAD_COLOR if direct is None else direct
        )
        pixels = None
        with contextlib.suppress(cv2.error):  # PIL will say what is wrong with it
            pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
        if pixels is not None and direct is None:
            return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels)
        if pixels is not None:
            return pixels
    return np.asarray(decode(name, data=data))


def taken(values: Sequence[T], indices: Sequence[int]) -> tuple[T, ...]:
    """values[i] for every i of `indices`, in that order."""
    return tuple(values[i] for i in indices)


class Names(Sequence[str]):
    """Texts as one block of bytes: a third of a tuple's memory, and shared with forked workers."""

    def __init__(self, texts: Iterable[str]) -> None:
        block, ends = bytearray(), array("I", [0])
        for text in texts:
            block += text.encode(errors="surrogateescape")
            ends.append(len(block))
        self._block, self._ends = bytes(block), ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[str]:
        for begin, end in itertools.pairwise(self._ends):
            yield self._block[begin:end].decode(errors="surrogateescape")

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        place = range(len(self))[index]  # counts from the end, too
        part = self._block[self._ends[place] : self._ends[place + 1]]
        return part.decode(errors="surrogateescape")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class Stamp(NamedTuple):
    """An image's size, what tells that the file which holds it is as it was, and its place there."""

    size: int  # bytes of the image
    inode: int
    changed: int  # ctime of the file, ns
    place: object = 0  # equal for no two images of a file


@dataclass(frozen=True)
class ImageList:
    """Files and labels in a fixed order; label -1: unlabelled; `classes`: names in label order."""

    root: Path
    paths: Sequence[str]  # relative to root, '/' between parts; kept as Names
    labels: tuple[int, ...]
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.paths, Names):
            object.__setattr__(self, "paths", Names(self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def file(self, index: int) -> Path:
        return self.root / self.paths[index]

    def open(self, index: int) -> Image.Image:
        """Image `index` as PIL RGB."""
        return decode(self.file(index), data=self.read(index))

    def array(self, index: int) -> np.ndarray:
        """Image `index` as uint8 RGB (H, W, 3), the fast way."""
        return decode_array(self.read(index), self.file(index))

    def read(self, index: int) -> bytes:
        """The bytes of image `index`. BadInput that names one that is missing or cut short."""
        with readable(self.file(index)) as file:
            return file.read()

    def ends(self, index: int, size: int = 4096) -> bytes:
        """The first and the last `size` bytes of an image, without the rest where that is cheap."""
        with opening.open_regular(self.file(index)) as file:
            head = file.read(size)
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return head + file.read(size)

    @property
    def files(self) -> ImageList:
        """This list, and what else a number on it depends on, as files."""
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
                count = f"{there.count(False)} of {len(there)} images are"
                raise BadInput(f"{file} is missing ({count})")
            # What a deduplicator has linked are two images still
            place = (about.st_dev, path) if about.st_nlink > 1 else about.st_dev
            yield Stamp(about.st_size, about.st_ino, about.st_ctime_ns, place)

    def subset(self, indices: Sequence[int]) -> Self:
        """The images at `indices`, in that order."""
        paths = Names(self.paths[i] for i in indices)
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
        """The pixels of a row."""
        return self.pixels[index].tobytes()

    def stamps(self) -> Iterator[Stamp]:
        """Yield nothing that tells a change: the pixels are in memory."""
        for path in self.paths:
            yield Stamp(0, 0, 0, path)

    def subset(self, indices: Sequence[int]) -> Self:
        return replace(super().subset(indices), pixels=self.pixels[list(indices)])


def scan_folder(root: str | Path, *, classes: Sequence[str] | None = None) -> ImageList:
    """Read a class folder ROOT/<class>/**/<image>, sorted by class and path: the same order
    everywhere. `classes`, in label order, must be there; other folders are ignored. Images directly
    in ROOT, without class folders, are unlabelled. BadInput names a missing or empty folder."""
    root = Path(root)
    if not root.is_dir():
        raise BadInput(
            f"{root}: no such folder; expected images as {root}/<class>/<image>"
        )
    if classes is None:
        classes = sorted(p.name for p in root.iterdir() if p.is_dir())
    missing = [name for name in classes if not (root / name).is_dir()]
    if missing:
        raise BadInput(missing_classes(root, missing, len(classes)))
    paths: list[str] = []
    labels: list[int] = []
    progress = Progress(
        None, len(classes), f"{root}: listing", unit="folder", after=QUIET_SECONDS
    )
    # Names as they come from the system: a Path for each of a million files takes ten times as long
    begin = len(os.path.join(root, ""))  # noqa: PTH118
    for label, name in enumerate(classes):
        found = sorted(
            file[begin:]
            for file in walking.names(root / name, never_folders=is_image)
            if is_image(file)
        )
        if not found:
            raise BadInput(
                f"{root / name}: class folder without images ({', '.join(EXTENSIONS)})"
            )
        paths += found
        labels += [label] * len(found)
        progress.advance()
    if not classes:
        paths = sorted(p.name for p in root.iterdir() if is_image(p.name))
        labels = [-1] * len(paths)
    if not paths:
        raise BadInput(
            f"{root}: no images found; expected {root}/<class>/<image> ({', '.join(EXTENSIONS)})"
        )
    return ImageList(root, paths, tuple(labels), tuple(classes))


def missing_classes(root: Path, missing: Sequence[str], count: int) -> str:
    """The line for class folders that a data set of `count` classes lacks."""
    many = f"; is {root} a subset? Under a name of its own it is a class folder like any other"
    return (
        f"{root}: {len(missing)} of {count} class folders are missing, '{missing[0]}' first"
        f"{many if len(missing) > 1 else ''}"
    )


def ignored(root: Path) -> list[str]:
    """List files that `scan_folder` passes over: of unknown kind, or beside the class folders."""
    folders = any(p.is_dir() for p in root.iterdir())
    out = []
    for path in sorted(root.rglob("*")):
        beside = folders and path.parent == root
        odd = beside or not is_image(path.name)
        if path.is_file() and not path.name.startswith(".") and odd:
            out.append(path.relative_to(root).as_posix())
    return out


def is_image(path: str) -> bool:
    # "._1.png" is what a Mac leaves beside 1.png
    name = path.rpartition("/")[2]
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")
