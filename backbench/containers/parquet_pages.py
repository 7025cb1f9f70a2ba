"""Finds where a Parquet file's binary column has its values, which pyarrow does not say.

Page headers are Thrift's compact protocol (parquet-format: parquet.thrift). Snappy's blocks of 64
KiB of output are independent (snappy: format_description.txt), so an image costs only its blocks."""

import os
import struct
from collections.abc import Iterator
from typing import Any

from backbench.containers.spans import CODECS, Span, bare_span
from backbench.containers.tables import LARGEST_IMAGE

BLOCK = 1 << 16  # bytes of output of Snappy's encoder
# Bytes of a page's header at most; it may hold two values as statistics
LONGEST_HEADER = 1 << 20
# Of Thrift's structs and lists
DEEPEST = 8
MOST_ITEMS = 10_000
# parquet.thrift, enum Encoding
PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY = 0, 2, 8
# parquet.thrift, enum PageType; and the field of a page's header that describes a page of this type
DATA, DICTIONARY, DATA_V2 = 0, 2, 3
DESCRIBED_IN = {DATA: 5, DICTIONARY: 7, DATA_V2: 8}


class _Thrift:
    """A bounded reader of Thrift's structs; ValueError or IndexError for what is none."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def varint(self) -> int:
        """Read a number: 7 bits a byte, the lowest first; the last byte is below 128."""
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
        """Read field number -> value."""
        if depth > DEEPEST:
            raise ValueError("a header nested too deep")
        out: dict[int, Any] = {}
        number = 0
        # A byte holds the distance to the field before (0: the number follows) and the type
        while byte := self.data[self.at]:
            self.at += 1
            jump = byte >> 4
            number = number + jump if jump else self._whole()
            out[number] = self._value(byte & 15, depth)
        self.at += 1
        return out

    def _whole(self) -> int:
        """Read a signed number in zigzag code: 0, -1, 1, -2, ..."""
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def _value(self, kind: int, depth: int) -> Any:
        """Read a value of a type of Thrift's; None for one that no caller needs."""
        if kind in (1, 2):  # true and false, without bytes of their own
            return kind == 1
        if kind in (4, 5, 6):  # integers of 16, 32 and 64 bits
            return self._whole()
        if kind == 3:  # a byte
            self.at += 1
            return None
        if kind == 7:  # a double
            self.at += 8
            return None
        if kind == 8:  # bytes
            size = self.varint()
            self.at += size
            return None
        if kind in (9, 10):  # a list, a set
            head = self.data[self.at]
            self.at += 1
            count = head >> 4
            if count == 15:  # too many for four bits
                count = self.varint()
            if count > MOST_ITEMS:
                raise ValueError("a header with a long list")
            return [self._value(head & 15, depth + 1) for _ in range(count)]
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError(f"a header with a field of type {kind}")


def hybrid(data: bytes, width: int, count: int) -> list[int]:
    """Read `count` numbers of `width` bits in Parquet's RLE/bit-packing hybrid.

    Each part begins with a head. An odd one says how many groups of eight packed numbers follow, an
    even one how often the one number that follows is repeated."""
    if not 0 <= width <= 32:
        raise ValueError(f"numbers of {width} bits")
    reader = _Thrift(data)
    out: list[int] = []
    run_size = (width + 7) // 8
    mask = (1 << width) - 1
    while len(out) < count:
        head = reader.varint()
        length = head >> 1
        missing = count - len(out)
        if head & 1:
            end = reader.at + length * width  # eight numbers of `width` bits
            packed = int.from_bytes(data[reader.at : end], "little")
            reader.at = end
            for n in range(min(8 * length, missing)):
                out.append((packed >> (n * width)) & mask)
        else:
            end = reader.at + run_size
            value = int.from_bytes(data[reader.at : end], "little")
            reader.at = end
            out += [value] * min(length, missing)
        if not length or reader.at > len(data) + run_size:
            raise ValueError("a page that ends too early")
    return out


def snappy_blocks(data: bytes) -> tuple[list[int], int]:
    """Return (the place in `data` where each block of BLOCK bytes of output begins, bytes of output).

    There is one block only where an element crosses a border of blocks, or copies from another block
    than its own: then no block can be unpacked alone."""
    reader = _Thrift(data)
    size = reader.varint()
    first = at = reader.at
    starts: list[int] = []
    done = 0  # bytes of output so far
    alone = True
    while at < len(data):
        if done % BLOCK == 0:
            starts.append(at)
        tag = data[at]
        kind = tag & 3
        upper = tag >> 2
        if kind == 0:
            # Literal bytes. Their number follows the tag where it is above 60
            extra = max(0, upper - 59)
            length = upper + 1
            if extra:
                length = int.from_bytes(data[at + 1 : at + 1 + extra], "little") + 1
            at += 1 + extra + length
        else:  # a copy of `length` bytes of output, from `back` bytes before
            wide = (0, 1, 2, 4)[kind]  # bytes of the offset
            back = int.from_bytes(data[at + 1 : at + 1 + wide], "little")
            if kind == 1:
                length = (upper & 7) + 4
                back += (tag >> 5) << 8
            else:
                length = upper + 1
            at += 1 + wide
            if back > done % BLOCK:
                alone = False
        if done % BLOCK + length > BLOCK:
            alone = False
        done += length
    if done != size or at != len(data):
        raise ValueError("a Snappy block of another length than it says")
    return (starts if alone else [first]), size


def codec_of(about: Any) -> str:
    """Return the one of CODECS that pyarrow's ColumnChunkMetaData names; ValueError for any other."""
    said = about.compression.lower()
    # What pyarrow calls LZ4 is Parquet's LZ4_RAW; Hadoop's own LZ4 has no name there
    codec = {"uncompressed": "bare", "lz4": "lz4_raw"}.get(said, said)
    if codec not in CODECS:
        raise ValueError(f"compressed with {codec}")
    return codec


def spans_of(descriptor: int, about: Any, levels: int) -> Iterator[Span]:
    """Yield the span of every value of a binary column in one row group.

    `about` is pyarrow's ColumnChunkMetaData. A value below the definition level `levels` is null.
    ValueError for nulls, and for encodings that are neither plain nor a dictionary."""
    codec = codec_of(about)
    at = about.data_page_offset
    if about.has_dictionary_page and about.dictionary_page_offset:
        at = min(at, about.dictionary_page_offset)
    end = at + about.total_compressed_size
    entries: list[Span] = []  # of the dictionary, which comes first
    while at < end:
        # Of a page's header (parquet.thrift, PageHeader): 1 type, 2 and 3 sizes
        reader = _Thrift(os.pread(descriptor, min(LONGEST_HEADER, end - at), at))
        header = reader.struct()
        kind = header[1]
        unpacked = header[2]
        packed = header[3]
        at += reader.at
        if not (0 <= packed <= end - at and 0 <= unpacked <= LARGEST_IMAGE):
            raise ValueError("a page that is not inside its chunk")
        fields = header.get(DESCRIBED_IN.get(kind, -1))
        if fields is not None:
            page = _Page(descriptor, at, packed, unpacked, codec)
            count = fields[1]
            if kind == DICTIONARY:
                entries = list(page.values(0, count))
            else:
                encoding = fields[4 if kind == DATA_V2 else 2]
                skip = page.levels(kind, fields, levels)
                if encoding == PLAIN:
                    yield from page.values(skip, count)
                elif encoding in (PLAIN_DICTIONARY, RLE_DICTIONARY):
                    # The first byte is the indices' width in bits
                    indices = page.content[skip:]
                    for index in hybrid(indices[1:], indices[0], count):
                        yield entries[index]
                else:
                    raise ValueError(f"images in Parquet's encoding {encoding}")
        at += packed


class _Page:
    """One page: its bytes in the file, and their content where it must be looked into."""

    def __init__(
        self, file: int, at: int, packed: int, unpacked: int, codec: str
    ) -> None:
        self.file = file
        self.at = at
        self.packed = packed
        self.unpacked = unpacked
        self.codec = codec
        self._raw: bytes | None = None
        self._content: bytes | None = None

    @property
    def raw(self) -> bytes:
        """The content as it is stored."""
        if self._raw is None:
            self._raw = os.pread(self.file, self.packed, self.at)
        return self._raw

    @property
    def content(self) -> bytes:
        """The unpacked content."""
        if self.codec == "bare":
            return self.raw
        if self._content is None:
            import pyarrow

            self._content = pyarrow.decompress(
                self.raw,
                decompressed_size=self.unpacked,
                codec=self.codec,
                asbytes=True,
            )
        return self._content

    def part(self, start: int, size: int) -> bytes:
        """Return some bytes of the content; of a bare page no others are read."""
        if self.codec == "bare":
            return os.pread(self.file, size, self.at + start)
        return self.content[start : start + size]

    def levels(self, kind: int, about: dict[int, Any], most: int) -> int:
        """Return how many bytes of levels stand before the values; ValueError for nulls."""
        if kind == DATA_V2:
            # parquet.thrift, DataPageHeaderV2: 2 number of nulls, 5 and 6 bytes of definition and
            # repetition levels, 7 whether the values are compressed. The levels never are
            if about[2] or about[6]:
                raise ValueError("the images are not in it (null bytes)")
            self.at += about[5]
            self.packed -= about[5]
            self.unpacked -= about[5]
            if about.get(7) is False:
                self.codec = "bare"
            return 0
        if not most:
            return 0
        (size,) = struct.unpack("<I", self.part(0, 4))
        if size > self.unpacked:
            raise ValueError("levels longer than their page")
        found = set(hybrid(self.part(4, size), most.bit_length(), about[1]))
        if found - {most}:
            raise ValueError("the images are not in it (null bytes)")
        return 4 + size

    def values(self, skip: int, count: int) -> Iterator[Span]:
        """Yield the spans of `count` plain values, each 4 bytes of length and then its bytes."""
        starts = [0]
        if self.codec == "snappy":
            # pyarrow unpacks the page first, because it refuses a damaged one in plain words
            _ = self.content
            starts, _ = snappy_blocks(self.raw)
        inner = skip
        for _ in range(count):
            (size,) = struct.unpack("<I", self.part(inner, 4))
            inner += 4
            if inner + size > self.unpacked:
                raise ValueError("a value that is not inside its page")
            yield self._span(inner, size, starts)
            inner += size

    def _span(self, inner: int, size: int, starts: list[int]) -> Span:
        """Return the span of the value that takes `size` bytes of the unpacked page from `inner` on.

        A span says where the stored bytes begin, how many they are, the number of their codec, and,
        within what they unpack to, where the value begins, its size, and the size of all of it.
        """
        if self.codec == "bare":
            return bare_span(self.at + inner, size)
        codec_number = CODECS.index(self.codec)
        if len(starts) == 1:
            # One piece, which has to be unpacked as a whole
            begin = starts[0]
            stored = self.packed - begin
            return self.at + begin, stored, codec_number, inner, size, self.unpacked
        # The blocks of Snappy in which the value's first and last byte lie
        first = inner // BLOCK
        last_byte = max(inner, inner + size - 1)  # an empty value has none
        last = last_byte // BLOCK
        begin = starts[first]
        end = starts[last + 1] if last + 1 < len(starts) else self.packed
        skipped = first * BLOCK
        unpacked_end = min(self.unpacked, (last + 1) * BLOCK)
        return (
            self.at + begin,
            end - begin,
            codec_number,
            inner - skipped,
            size,
            unpacked_end - skipped,
        )
