"""Reads images inside containers (tar, zip, Parquet, Arrow, LMDB) in place: one `pread` for each.
An image is a span: container file, first byte, length. A scanner finds the spans once; the file's
table is kept in $BACKBENCH_CACHE/containers by its name, size, inode and ctime."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from backbench.errors import BadInput, Failed
from backbench.images.image_list import ImageList, Stamp
from backbench.runs import atomic
from backbench.runs.folder import cache_folder
from backbench.runs.run_progress import QUIET_SECONDS, Progress
from backbench.runs.terminal import log
from backbench.untrusted import jsons, opening, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = 1  # of the scanners: another one makes all tables anew
DESCRIPTORS = 64  # open containers of a process; timm's ImageNet has 1,088 shards
CODECS = ("bare", "deflate", "snappy", "zstd", "gzip", "lz4_raw", "brotli")
LARGEST_IMAGE = opening.GIGABYTE
LARGEST_TABLE = 4 * opening.GIGABYTE
LONGEST_NAME = 300  # bytes
# `stored` bytes from `start` on unpack to `block` bytes, where the image has `size` from `inner` on
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
Row = tuple[str, int, Span]  # an image's name in its container, label or -1, span
Mark = tuple[int, int, int]  # size, inode and ctime of a container


def mark_of(file: str | Path | int) -> Mark:
    """The size, inode and ctime (which no program can set) of a file, by name or descriptor."""
    about = os.stat(file)  # noqa: PTH116
    return about.st_size, about.st_ino, about.st_ctime_ns


# Reading


class _Container:
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


# A thread that reads in a container keeps it open, also when 64 others have pushed it out
_container = functools.lru_cache(maxsize=DESCRIPTORS)(_Container)


def read_span(path: str, mark: Mark, span: Sequence[int], name: str | Path) -> bytes:
    """The bytes of one image; `span` is a `Span`."""
    start, stored, codec, inner, size, block = span
    container = _container(path, mark)
    try:
        data = os.pread(container.file.fileno(), stored, start)
    except OSError as error:
        raise BadInput(f"{path}: not readable ({error.strerror})") from None
    if len(data) != stored:
        raise BadInput(
            f"{name}: {path} ends in the middle of this image; get the file again"
        )
    if codec:
        try:
            data = _unpacked(data, CODECS[codec], block)
        except Exception as error:  # of several libraries, each with errors of its own
            said = printable.shown(" ".join(str(error).split()), 100)
            raise BadInput(f"{name}: damaged in {path} ({said})") from None
    return data if len(data) == size else data[inner : inner + size]


def _unpacked(data: bytes, codec: str, block: int) -> bytes:
    """`block` bytes; ValueError where there are others."""
    if codec == "deflate":
        out = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, block + 1)
    else:
        import pyarrow

        if codec == "snappy":
            # Its pieces lie bare: a block begins with its length, 7 bits a byte, the lowest first
            length, head = block, bytearray()
            while length > 127:
                head.append(length & 127 | 128)
                length >>= 7
            data = bytes([*head, length]) + data
        out = pyarrow.decompress(
            data, decompressed_size=block, codec=codec, asbytes=True
        )
    if len(out) != block:
        raise ValueError(f"{len(out)} bytes, not {block}")
    return out


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
        read, held = (self.spans[key].sum(dtype=np.int64) for key in ("stored", "size"))
        cost = f"{read / max(1, held):.2f} bytes read for each byte of an image"
        return "; ".join(
            [
                f"{self.kind}, {len(self.containers)} files, {codecs}: {cost}",
                *self.notes,
            ]
        )

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
        for file, start, _, _, inner, size, _ in self.spans.tolist():
            of = abouts[file]
            yield Stamp(size, of.st_ino, of.st_ctime_ns, (of.st_dev, start, inner))

    def subset(self, indices: Sequence[int]) -> Self:
        return replace(super().subset(indices), spans=self.spans[list(indices)])


# One image by one word, for readers that know names of files alone

PREFIX = "span:"


def spelled(images: SpanList, index: int) -> str:
    """span:<numbers>:CONTAINER!/NAME, which `read_spelled` reads in any process."""
    file, *span = images.spans[index].item()
    path = images.containers[file]
    numbers = ",".join(map(str, (*span, *images.marks[file], len(path))))
    return f"{PREFIX}{numbers}:{path}!/{images.paths[index]}"


def plain_name(word: str) -> str:
    """CONTAINER!/NAME for people; any other name as it is."""
    return word.split(":", 2)[2] if word.startswith(PREFIX) else word


def _parsed(word: str) -> tuple[str, Mark, list[int]]:
    numbers = [int(number) for number in word.split(":", 2)[1].split(",")]
    size, inode, changed, length = numbers[6:]
    return plain_name(word)[:length], (size, inode, changed), numbers[:6]


def read_spelled(word: str) -> bytes | None:
    """The image's bytes; None for the name of a file."""
    if not word.startswith(PREFIX):
        return None
    path, mark, span = _parsed(word)
    return read_span(path, mark, span, plain_name(word))


class NamedImages(ImageList):
    """Images whose `paths` are names of files, or words for images in containers."""

    @functools.cached_property
    def containers(self) -> dict[str, Mark]:
        """Each container as it was when it was looked into."""
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
                yield Stamp(span[4], *marks[path][1:])
            else:
                yield Stamp(*mark_of(word))


# Tables


@dataclass(frozen=True)
class Table:
    """The images in one container file, in its order, under the names that it gives them."""

    names: Sequence[str]
    labels: NDArray[np.int64]  # (N,); -1 where the container states none
    spans: NDArray[np.void]  # (N,) SPAN, `file` 0
    classes: tuple[str, ...] = ()  # names by label, where the container states them
    notes: tuple[str, ...] = ()  # what was passed over, and how the file was written

    @classmethod
    def of(
        cls, rows: Sequence[Row], classes: Sequence[str] = (), notes: Sequence[str] = ()
    ) -> Table:
        """Make a table of (name, label, span without file) rows. ValueError for impossible ones."""
        table = cls(
            [name for name, _, _ in rows],
            np.array([label for _, label, _ in rows], np.int64),
            np.array([(0, *span) for _, _, span in rows], SPAN),
            tuple(classes),
            tuple(notes),
        )
        table.check(1 << 62)
        return table

    def check(self, size: int) -> None:
        """ValueError unless every span lies inside a file of `size` bytes, under a usable name."""
        s, count = self.spans, len(self.names)
        if s.dtype != SPAN or not s.shape == self.labels.shape == (count,):
            raise ValueError("columns of other types or lengths")
        if count and (
            (s["start"] > size).any()
            or (s["start"] + s["stored"] > size).any()
            or s["codec"].max() >= len(CODECS)
            or (s["inner"].astype(np.int64) + s["size"] > s["block"]).any()
            or s["block"].max() > LARGEST_IMAGE
            or s["file"].any()
            or ((s["codec"] == 0) & (s["stored"] != s["size"])).any()
        ):
            raise ValueError("an image that is not inside the file")
        for name in (*self.names, *self.classes):
            if found := printable.control_in(name):
                raise ValueError(f"a member's name holds the control character {found}")
        for name in self.classes:  # they become folders
            if "/" in name or name in (".", ".."):
                raise ValueError(f"the class name '{printable.shown(name, 100)}'")
        for name in self.names:
            parts = name.split("/")
            if (
                not parts[-1]
                or not parts[0]
                or ".." in parts
                or len(name.encode()) > LONGEST_NAME
            ):
                raise ValueError(f"the name '{printable.shown(name, 100)}'")

    def dumped(self) -> bytes:
        """The table as numpy's archive."""
        about = {"classes": self.classes, "notes": self.notes}
        texts = {"names": "\n".join(self.names), "about": json.dumps(about)}
        columns: dict[str, Any] = {"labels": self.labels, "spans": self.spans}
        for key, text in texts.items():
            columns[key] = np.frombuffer(text.encode(), np.uint8)
        buffer = io.BytesIO()
        np.savez(buffer, **columns)
        return buffer.getvalue()

    @staticmethod
    def loaded(file: Path, size: int) -> Table:
        """Load the table of a container of `size` bytes. OSError, ValueError or KeyError if bad."""
        with np.load(
            io.BytesIO(opening.read_bytes(file, most=LARGEST_TABLE))
        ) as columns:
            names = columns["names"].tobytes().decode()
            about: dict[str, Any] = jsons.decode(columns["about"].tobytes())
            labels, spans = columns["labels"], columns["spans"]
        named = names.split("\n") if names else []
        table = Table(
            named, labels, spans, tuple(about["classes"]), tuple(about["notes"])
        )
        table.check(size)
        return table


# A scanner yields the tables of several container files, in their order
Scan = Callable[[Sequence[Path]], Iterable[Table]]


def tables_of(
    files: Sequence[Path], kind: str, scan: Scan
) -> tuple[list[Table], list[Mark]]:
    """The tables of container files: from the cache, or scanned, by one process at a time."""
    if len(files) > np.iinfo(np.uint16).max:
        raise BadInput(f"{files[0].parent}: {len(files)} container files are too many")
    marks = [mark_of(file) for file in files]
    folder = cache_folder() / "containers"
    parts = []
    for file, mark in zip(files, marks):
        key = f"{VERSION} {kind} {file.name} {mark}".encode(errors="surrogateescape")
        parts.append(folder / f"{hashlib.sha256(key).hexdigest()[:32]}.npz")
    out = {i: table for i in range(len(files)) if (table := _kept(parts[i], marks[i]))}
    if len(out) == len(files):
        return [out[i] for i in range(len(files))], marks
    with _alone(parts[0].with_suffix(".lock"), files[0].parent):
        # Another process may have scanned them meanwhile, or been killed in the middle of them
        left = []
        for i in range(len(files)):
            table = out.get(i) or _kept(parts[i], marks[i])
            if table is None:
                left.append(i)
            else:
                out[i] = table
        title = f"{files[0].parent}: looking into {kind}"
        progress = Progress(None, len(left), title, unit="file", after=QUIET_SECONDS)
        for i, table in zip(left, scan([files[i] for i in left])):
            if mark_of(files[i]) != marks[i]:
                raise BadInput(
                    f"{files[i]}: somebody is writing it; wait until it is whole"
                )
            # What cannot be kept is scanned again the next time
            with contextlib.suppress(OSError, BadInput, Failed):
                atomic.write_bytes(parts[i], table.dumped())
            out[i] = table
            progress.advance()
    return [out[i] for i in range(len(files))], marks


def _kept(part: Path, mark: Mark) -> Table | None:
    """The kept table of a container; None where there is none that can be used."""
    try:
        return Table.loaded(part, mark[0])
    except Exception:  # no file, or one that is torn or somebody else's
        return None


def contents_of(file: Path, table: Table) -> list[str]:
    """16 hex digits of each image's sha256; the whole container is read once, and they are kept."""
    mark = mark_of(file)
    about = hashlib.sha256(
        f"{VERSION} {mark}".encode() + table.spans.tobytes()
    ).hexdigest()
    kept = cache_folder() / "containers" / f"{about[:32]}.txt"
    with contextlib.suppress(OSError):
        digests = kept.read_text().split()
        if len(digests) == len(table.names):
            return digests

    def digest(index: int) -> str:
        span = table.spans[index].item()[1:]
        return contents_name(read_span(str(file), mark, span, table.names[index]))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        digests = list(pool.map(digest, range(len(table.names))))
    with contextlib.suppress(OSError, BadInput, Failed):
        atomic.write_text(kept, "\n".join(digests))
    return digests


def contents_name(data: bytes) -> str:
    """The name of an image by its bytes, in contents.tsv.gz."""
    return hashlib.sha256(data).hexdigest()[:16]


@contextlib.contextmanager
def _alone(lock: Path, what: Path) -> Iterator[None]:
    """Hold a lock file, where the file system has locks: a process that waits scans nothing."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock.open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info(
                    f"{what}: waiting for another process, which looks into these files"
                )
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
