"""Reads images inside containers in place. An image is a span of a file, and costs one `pread`.

`SpanList` is the list of images for it. `spelled` writes one such image as a word, for readers that
know names of files alone (COCO's, Detectron2's); `NamedImages` is a list of such words."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from backbench.errors import BadInput
from backbench.images.image_list import ImageList, Stamp
from backbench.untrusted import opening, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

OPEN_CONTAINERS = 64  # of a process; timm's ImageNet has 1,088 shards
CODECS = ("bare", "deflate", "snappy", "zstd", "gzip", "lz4_raw", "brotli")
# `stored` bytes of the file, from byte `start` on, unpack (by `codec`, a place in CODECS) to `block`
# bytes. Of these the image is `size` bytes, from byte `inner` on
SPAN = np.dtype(
    [
        ("file", "<u2"),
        ("start", "<u8"),
        ("stored", "<u4"),
        ("codec", "u1"),
        ("inner", "<u4"),
        ("size", "<u4"),
        ("block", "<u4"),
    ]
)
Span = tuple[int, int, int, int, int, int]  # a row of SPAN without its file
Mark = tuple[int, int, int]  # size, inode and ctime of a container


def bare_span(start: int, size: int) -> Span:
    """Return the span of an image that is stored as it is."""
    return start, size, CODECS.index("bare"), 0, size, size


def mark_of(file: str | Path | int) -> Mark:
    """Return the size, inode and ctime (which no program can set) of a file or descriptor."""
    about = os.stat(file)  # noqa: PTH116
    return about.st_size, about.st_ino, about.st_ctime_ns


# Reading


class _OpenContainer:
    """A container, open while somebody reads in it; the garbage collector closes it."""

    def __init__(self, path: str, mark: Mark) -> None:
        try:
            self.file = opening.open_regular(path)
        except OSError as error:
            raise BadInput(f"{path}: not readable ({error.strerror})") from None
        if mark_of(self.file.fileno()) != mark:
            self.file.close()
            raise BadInput(
                f"{path}: has changed since this run looked into it; run the command again"
            )

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()


# The cache's entry may go while a thread reads in it: the thread holds the container, so it stays
# open
_open_container = functools.lru_cache(maxsize=OPEN_CONTAINERS)(_OpenContainer)


def read_span(path: str, mark: Mark, span: Sequence[int], name: str | Path) -> bytes:
    """Return the bytes of one image; `span` is a `Span`.

    BadInput names the image `name` where it is cut or damaged, and a container that is not the one
    of this mark any more."""
    start, stored, codec, inner, size, block = span
    container = _open_container(path, mark)
    try:
        data = os.pread(container.file.fileno(), stored, start)
    except OSError as error:
        raise BadInput(f"{path}: not readable ({error.strerror})") from None
    if len(data) != stored:
        raise BadInput(
            f"{name}: {path} ends in the middle of this image; get the file again"
        )
    if CODECS[codec] != "bare":
        try:
            data = _unpacked(data, CODECS[codec], block)
        except Exception as error:  # each of several libraries has errors of its own
            said = printable.shown(" ".join(str(error).split()), 100)
            raise BadInput(f"{name}: damaged in {path} ({said})") from None
    return data if len(data) == size else data[inner : inner + size]


def _unpacked(data: bytes, codec: str, block: int) -> bytes:
    """Unpack `data` to `block` bytes; ValueError where there are more or fewer."""
    if codec == "deflate":
        out = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, block + 1)
    elif codec == "gzip":
        # Of a gzip or a zlib stream, as pyarrow reads it
        out = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(data, block + 1)
    elif codec == "brotli":
        import pyarrow

        stream = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), codec)
        out = stream.read(block + 1)
    else:
        import pyarrow

        if codec == "snappy":
            # The span is a piece of a longer stream. Snappy wants a stream to begin with its
            # unpacked length, 7 bits a byte, the lowest first
            length = block
            head = bytearray()
            while length > 127:
                head.append(length & 127 | 128)
                length >>= 7
            data = bytes([*head, length]) + data
        out = pyarrow.decompress(
            data, decompressed_size=block, codec=codec, asbytes=True
        )
        # What LZ4 unpacks short is filled up with zeros, and no stream can be read of it. What
        # really has `block` bytes does not fit into one less
        if codec == "lz4_raw" and block > 0 and _fits(data, codec, block - 1):
            raise ValueError(f"fewer than {block} bytes")
    if len(out) != block:
        raise ValueError(f"{len(out)} bytes, not {block}")
    return out


def _fits(data: bytes, codec: str, size: int) -> bool:
    """Return whether data unpack to at most `size` bytes."""
    import pyarrow

    try:
        pyarrow.decompress(data, decompressed_size=size, codec=codec, asbytes=True)
    except (OSError, ValueError):
        return False
    return True


@dataclass(frozen=True)
class SpanList(ImageList):
    """Images in containers. `root` and `paths` are those that a class folder of them would have."""

    spans: NDArray[np.void]  # (N,) SPAN
    containers: tuple[str, ...]
    marks: tuple[Mark, ...]
    kind: str
    notes: tuple[str, ...] = field(default=(), compare=False)  # what the scanners said

    @property
    def described(self) -> str:
        """The container in words, and what a read costs."""
        codecs = ", ".join(CODECS[codec] for codec in np.unique(self.spans["codec"]))
        read = self.spans["stored"].sum(dtype=np.int64)
        held = self.spans["size"].sum(dtype=np.int64)
        container = (
            f"{self.kind}, {len(self.containers)} files, {codecs}:"
            f" {read / max(1, held):.2f} bytes read for each byte of an image"
        )
        return "; ".join([container, *self.notes])

    def read(self, index: int) -> bytes:
        file, *span = self.spans[index].item()
        return read_span(
            self.containers[file], self.marks[file], span, self.file(index)
        )

    def ends(self, index: int, size: int = 4096) -> bytes:
        data = self.read(index)
        return data[:size] + data[max(0, len(data) - size) :]

    def stamps(self) -> Iterator[Stamp]:
        """Yield the stamp of every image: one stat per container."""
        abouts: list[os.stat_result] = []
        for path in self.containers:
            try:
                abouts.append(os.stat(path))  # noqa: PTH116
            except OSError as error:
                raise BadInput(f"{path}: not readable ({error.strerror})") from None
        for path, span in zip(self.paths, self.spans.tolist()):
            file, start, _stored, _codec, inner, size, _block = span
            about = abouts[file]
            place: tuple[object, ...] = (about.st_dev, start, inner)
            if self.kind == "tar":
                # A tar keeps hard links of one file as one, which are two images all the same
                place = (*place, path)
            yield Stamp(size, about.st_ino, about.st_ctime_ns, place)

    def subset(self, indices: Sequence[int]) -> Self:
        return replace(super().subset(indices), spans=self.spans[list(indices)])


# One image as one word

PREFIX = "span:"


def spelled(images: SpanList, index: int) -> str:
    """Write image `index` as span:<numbers>:CONTAINER!/NAME, which any process can read.

    The numbers are the six of its span, the three of the container's mark and the length of the
    container's path."""
    file, *span = images.spans[index].item()
    path = images.containers[file]
    numbers = (*span, *images.marks[file], len(path))
    text = ",".join(str(number) for number in numbers)
    return f"{PREFIX}{text}:{path}!/{images.paths[index]}"


def plain_name(word: str) -> str:
    """Return CONTAINER!/NAME for people; any other name as it is."""
    return word.split(":", 2)[2] if word.startswith(PREFIX) else word


def _parsed(word: str) -> tuple[str, Mark, list[int]]:
    """Return the container's path and mark, and the span, of a spelled image."""
    numbers = [int(number) for number in word.split(":", 2)[1].split(",")]
    size, inode, changed, length = numbers[6:]
    return plain_name(word)[:length], (size, inode, changed), numbers[:6]


def read_spelled(word: str) -> bytes | None:
    """Return the bytes of a spelled image; None where the word is the name of a file."""
    if not word.startswith(PREFIX):
        return None
    path, mark, span = _parsed(word)
    return read_span(path, mark, span, plain_name(word))


class NamedImages(ImageList):
    """Images whose `paths` are names of files, or spelled images in containers."""

    @functools.cached_property
    def containers(self) -> dict[str, Mark]:
        """Each container with its mark when it was looked into."""
        words = [_parsed(word) for word in self.paths if word.startswith(PREFIX)]
        return {path: mark for path, mark, _ in words}

    def read(self, index: int) -> bytes:
        data = read_spelled(self.paths[index])
        return super().read(index) if data is None else data

    def stamps(self) -> Iterator[Stamp]:
        marks = {path: mark_of(path) for path in self.containers}
        for word in self.paths:
            if word.startswith(PREFIX):
                path, _, span = _parsed(word)
                *_, size, _block = span
                _, inode, changed = marks[path]
            else:
                size, inode, changed = mark_of(word)
            yield Stamp(size, inode, changed)
