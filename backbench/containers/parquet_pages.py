"""Finds where a Parquet file's binary column has its values, which pyarrow does not say. Page
headers are Thrift's compact protocol (parquet-format: parquet.thrift). Snappy's blocks of 64 KiB of
output are independent (snappy: format_description.txt), so an image costs only its blocks."""

import os
import struct
from collections.abc import Iterator
from typing import Any

from backbench.containers.spans import CODECS, LARGEST_IMAGE, Span

BLOCK = 1 << 16  # bytes of output of Snappy's encoder
HEADER = (
    1 << 20
)  # bytes of a page's header at most; it may hold two values as statistics
DEEPEST, MOST_ITEMS = 8, 10_000  # of Thrift's structs and lists
PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY = 0, 2, 8
DATA, DICTIONARY, DATA_V2 = 0, 2, 3


class _Thrift:
    """A bounded reader of structs; ValueError or IndexError for what is none."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def varint(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise ValueError("a number of more than 64 bits")

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Field number -> value."""
        if depth > DEEPEST:
            raise ValueError("a header nested too deep")
        out: dict[int, Any] = {}
        number = 0
        while byte := self.data[self.at]:
            self.at += 1
            jump, kind = byte >> 4, byte & 15
            number = number + jump if jump else self._whole()
            out[number] = self._value(kind, depth)
        self.at += 1
        return out

    def _whole(self) -> int:
        value = self.varint()
        return value >> 1 ^ -(value & 1)  # zigzag

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):  # a boolean is its own type
            return kind == 1
        if kind in (4, 5, 6):
            return self._whole()
        if kind in (3, 7):  # a byte, a double
            self.at += 1 if kind == 3 else 8
            return None
        if kind == 8:
            size = self.varint()
            self.at += size
            return None
        if kind in (9, 10):
            head = self.data[self.at]
            self.at += 1
            count = head >> 4 if head >> 4 < 15 else self.varint()
            if count > MOST_ITEMS:
                raise ValueError("a header with a long list")
            return [self._value(head & 15, depth + 1) for _ in range(count)]
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError(f"a header with a field of type {kind}")


def hybrid(data: bytes, width: int, count: int) -> list[int]:
    """The first `count` numbers of `width` bits in runs and packed groups of eight."""
    if not 0 <= width <= 32:
        raise ValueError(f"numbers of {width} bits")
    reader = _Thrift(data)
    out: list[int] = []
    size = (width + 7) // 8
    while len(out) < count:
        head = reader.varint()
        if head & 1:
            packed = int.from_bytes(
                data[reader.at : reader.at + (head >> 1) * width], "little"
            )
            reader.at += (head >> 1) * width
            mask = (1 << width) - 1
            for n in range(min(8 * (head >> 1), count - len(out))):
                out.append(packed >> n * width & mask)
        else:
            value = int.from_bytes(data[reader.at : reader.at + size], "little")
            reader.at += size
            out += [value] * min(head >> 1, count - len(out))
        if not head >> 1 or reader.at > len(data) + size:
            raise ValueError("a page that ends too early")
    return out


def snappy_blocks(data: bytes) -> tuple[list[int], int]:
    """Return (each block's start in `data`, bytes of output); one block where blocks are linked."""
    reader = _Thrift(data)
    size = reader.varint()
    first = at = reader.at
    starts, done = [], 0
    alone = True
    while at < len(data):
        if done % BLOCK == 0:
            starts.append(at)
        tag = data[at]
        kind, long = tag & 3, tag >> 2
        if kind == 0:  # literal bytes
            extra = max(0, long - 59)
            length = (
                int.from_bytes(data[at + 1 : at + 1 + extra], "little") + 1
                if extra
                else long + 1
            )
            at += 1 + extra + length
        else:  # a copy of bytes before
            wide = (0, 1, 2, 4)[kind]
            back = int.from_bytes(data[at + 1 : at + 1 + wide], "little")
            length = (long & 7) + 4 if kind == 1 else long + 1
            back += (tag >> 5) << 8 if kind == 1 else 0
            at += 1 + wide
            alone &= back <= done % BLOCK
        alone &= done % BLOCK + length <= BLOCK
        done += length
    if done != size or at != len(data):
        raise ValueError("a Snappy block of another length than it says")
    return (starts if alone else [first]), size


def codec_of(about: Any) -> str:
    """The one of CODECS that pyarrow's ColumnChunkMetaData names; ValueError for any other."""
    codec = about.compression.lower().replace("uncompressed", "bare")
    if codec not in CODECS:
        raise ValueError(f"compressed with {codec}")
    return codec


def spans_of(descriptor: int, about: Any, levels: int) -> Iterator[Span]:
    """Yield the span of every value of a binary column in one row group; `about` is pyarrow's
    ColumnChunkMetaData. A value below the definition level `levels` is null. ValueError for nulls
    and other encodings."""
    at, codec = about.data_page_offset, codec_of(about)
    if about.has_dictionary_page and about.dictionary_page_offset:
        at = min(at, about.dictionary_page_offset)
    end = at + about.total_compressed_size
    entries: list[Span] = []
    while at < end:
        reader = _Thrift(os.pread(descriptor, min(HEADER, end - at), at))
        header = reader.struct()
        kind, unpacked, packed = header[1], header[2], header[3]
        at += reader.at
        if not (0 <= packed <= end - at and 0 <= unpacked <= LARGEST_IMAGE):
            raise ValueError("a page that is not inside its chunk")
        fields = header.get({DATA: 5, DICTIONARY: 7, DATA_V2: 8}.get(kind, -1))
        if fields is not None:
            page = _Page(descriptor, at, packed, unpacked, codec)
            encoding = fields[4 if kind == DATA_V2 else 2]
            skip = page.levels(kind, fields, levels) if kind != DICTIONARY else 0
            if kind == DICTIONARY:
                entries = list(page.values(0, fields[1]))
            elif encoding == PLAIN:
                yield from page.values(skip, fields[1])
            elif encoding in (PLAIN_DICTIONARY, RLE_DICTIONARY):
                packed_indices = page.content[skip:]
                for index in hybrid(packed_indices[1:], packed_indices[0], fields[1]):
                    yield entries[index]
            else:
                raise ValueError(f"images in Parquet's encoding {encoding}")
        at += packed


class _Page:
    """One page: its bytes in the file, and their content where it must be looked into."""

    def __init__(
        self, file: int, at: int, packed: int, unpacked: int, codec: str
    ) -> None:
        self.file, self.at, self.codec = file, at, codec
        self.packed, self.unpacked = packed, unpacked
        self._content: bytes | None = None

    @property
    def content(self) -> bytes:
        """The unpacked content."""
        if self._content is None:
            self.raw = os.pread(self.file, self.packed, self.at)
            self._content = self.raw
            if self.codec != "bare":
                import pyarrow

                self._content = pyarrow.decompress(
                    self.raw,
                    decompressed_size=self.unpacked,
                    codec=self.codec,
                    asbytes=True,
                )
        return self._content

    def part(self, start: int, size: int) -> bytes:
        """Some bytes of the content; of a bare page no others are read."""
        if self.codec == "bare":
            return os.pread(self.file, size, self.at + start)
        return self.content[start : start + size]

    def levels(self, kind: int, about: dict[int, Any], most: int) -> int:
        """Refuse nulls; how many bytes of levels stand before the values."""
        if kind == DATA_V2:
            if about[2] or about[6]:
                raise ValueError("the images are not in it (null bytes)")
            # Its levels are never packed
            self.at += about[5]
            self.packed, self.unpacked = (
                self.packed - about[5],
                self.unpacked - about[5],
            )
            if about.get(7) is False:
                self.codec = "bare"
            return 0
        if not most:
            return 0
        (size,) = struct.unpack("<I", self.part(0, 4))
        if size > self.unpacked:
            raise ValueError("levels longer than their page")
        if set(hybrid(self.part(4, size), most.bit_length(), about[1])) - {most}:
            raise ValueError("the images are not in it (null bytes)")
        return 4 + size

    def values(self, skip: int, count: int) -> Iterator[Span]:
        """Yield the spans of `count` plain values, each 4 bytes of length and then its bytes."""
        starts = [0]
        if self.codec == "snappy":
            starts, _ = snappy_blocks((self.content, self.raw)[1])
        inner = skip
        for _ in range(count):
            (size,) = struct.unpack("<I", self.part(inner, 4))
            inner += 4
            if inner + size > self.unpacked:
                raise ValueError("a value that is not inside its page")
            yield self._span(inner, size, starts)
            inner += size

    def _span(self, inner: int, size: int, starts: list[int]) -> Span:
        if self.codec == "bare":
            return self.at + inner, size, 0, 0, size, size
        first, last = 0, 0
        if len(starts) > 1:
            first, last = inner // BLOCK, max(inner, inner + size - 1) // BLOCK
        begin = starts[first]
        end = starts[last + 1] if last + 1 < len(starts) else self.packed
        block = (
            min(self.unpacked, (last + 1) * BLOCK) if len(starts) > 1 else self.unpacked
        )
        block -= first * BLOCK
        codec = CODECS.index(self.codec)
        return self.at + begin, end - begin, codec, inner - first * BLOCK, size, block
