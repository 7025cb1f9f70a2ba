"""Finds images in tar files (also nested, WebDataset) and zips, reading headers and labels only."""

import struct
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from backbench.containers.spans import CODECS, LARGEST_IMAGE, Row, Span, Table
from backbench.errors import BadInput
from backbench.images.image_list import is_image
from backbench.untrusted import jsons, opening, printable

MOST_CLASSES = 1_000_000  # in shards, where labels alone say how many there are
MOST_TIMES = 1000  # unpacked bytes for one stored byte of an image in a zip file


def bare(start: int, size: int) -> Span:
    return start, size, 0, 0, size, size


def scan_tars(files: Sequence[Path]) -> Iterator[Table]:
    """Yield the tables of uncompressed tar files, and of tars inside. A member `<key>.cls` (a
    number) or `<key>.json` ({"label": number}) labels the image `<key>.<extension>`."""
    for file in files:
        try:
            with opening.open_regular(file) as raw:
                rows, passed = _members(raw, file)
            yield Table.of(rows, notes=_said(passed))
        except BadInput:
            raise
        except (
            Exception
        ) as error:  # tarfile's own, and whatever a crafted header makes of it
            said = printable.shown(" ".join(str(error).split()), 100)
            raise BadInput(
                f"{file}: not readable as an uncompressed tar file ({said})"
            ) from None


def _said(passed: Counter[str]) -> list[str]:
    return [f"{count} {kind} passed over" for kind, count in sorted(passed.items())]


def _members(
    raw: IO[bytes], file: Path, begin: int = 0, above: str = ""
) -> tuple[list[Row], Counter[str]]:
    """List a tar's images, from byte `begin` of `file`; `above` is the folder of a nested tar."""
    found: list[tuple[str, int, int]] = []
    labels: dict[
        str, tuple[str, int, int]
    ] = {}  # key of a sample -> its label's kind and place
    rows: list[Row] = []
    passed: Counter[str] = Counter()
    with tarfile.open(fileobj=raw, mode="r:") as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            folder, _, base = name.rpartition("/")
            key, _, extension = base.partition(
                "."
            )  # WebDataset: the key ends at the first dot
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                passed["links, sparse files or devices"] += 1
            elif is_image(name):
                found.append((name, member.offset_data, member.size))
            elif extension in ("cls", "json") and key:
                labels.setdefault(
                    f"{folder}/{key}", (extension, member.offset_data, member.size)
                )
            elif base.endswith(".tar") and not above:
                inner = tar.extractfile(member)
                assert inner is not None
                below, more = _members(inner, file, member.offset_data, base[:-4])
                rows += below
                passed += more
            else:
                passed["other members"] += 1
            tar.members = []  # type: ignore[attr-defined] # tarfile keeps them all otherwise
        # It ends with a block of zeros; without it tarfile takes a cut file for a short one
        raw.seek(tar.offset)
        if raw.read(512) != bytes(512):
            raise BadInput(
                f"{file}: the tar file is cut short (no end mark behind {tar.offset})"
            )
    for name, start, size in found:
        label = -1
        if labels:
            folder, _, base = name.rpartition("/")
            stated = labels.get(f"{folder}/{base.partition('.')[0]}")
            if stated is not None:
                label = _label(raw, stated, file, name)
        path = name if not above or name.startswith(f"{above}/") else f"{above}/{name}"
        rows.append((path, label, bare(begin + start, size)))
    return rows, passed


def _label(raw: IO[bytes], stated: tuple[str, int, int], file: Path, image: str) -> int:
    kind, start, size = stated
    raw.seek(start)
    try:
        value = jsons.decode(raw.read(min(size, opening.MEGABYTE)))
        label = value if kind == "cls" else value.get("label", value.get("cls", -1))
        if type(label) is int and -1 <= label < MOST_CLASSES:
            return label
    except (ValueError, AttributeError):
        pass
    key = printable.shown(image.partition(".")[0], 200)
    raise BadInput(
        f"{file}: the label in {key}.{kind} is not a whole number below {MOST_CLASSES}"
    )


def scan_zips(files: Sequence[Path]) -> Iterator[Table]:
    """Yield the tables of zip files, by the central directory and each member's own header."""
    for file in files:
        try:
            with opening.open_regular(file) as raw, zipfile.ZipFile(raw) as archive:
                yield _zipped(raw, archive)
        except (
            Exception
        ) as error:  # zipfile's own, and whatever a crafted header makes of it
            said = printable.shown(" ".join(str(error).split()), 160)
            raise BadInput(f"{file}: not readable as a zip file ({said})") from None


def _zipped(raw: IO[bytes], archive: zipfile.ZipFile) -> Table:
    passed: Counter[str] = Counter()
    rows: list[Row] = []
    for info in archive.infolist():
        name = info.filename
        if info.is_dir():
            continue
        if not is_image(name):
            passed["other members"] += 1
            continue
        shown = printable.shown(name, 100)
        if info.flag_bits & 1:
            raise ValueError(f"{shown} is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"{shown} has compression method {info.compress_type}; use `zip -0`"
            )
        limit = min(LARGEST_IMAGE, MOST_TIMES * max(1, info.compress_size))
        if info.file_size > limit:
            raise ValueError(f"{shown} claims {info.file_size} bytes")
        raw.seek(info.header_offset)
        sign, _, _, method, *_, long, extra = struct.unpack("<4s5H3I2H", raw.read(30))
        encoded = info.orig_filename.encode(
            "utf-8" if info.flag_bits & 0x800 else "cp437"
        )
        if (sign, method, raw.read(long)) != (b"PK\3\4", info.compress_type, encoded):
            raise ValueError(f"the directory and the member {shown} disagree")
        start, size = info.header_offset + 30 + long + extra, info.file_size
        span = bare(start, size)
        if method:
            span = start, info.compress_size, CODECS.index("deflate"), 0, size, size
        elif info.compress_size != size:
            raise ValueError(
                f"{shown} is stored in {info.compress_size} bytes, not {size}"
            )
        rows.append((name.removeprefix("./"), -1, span))
    end = 0
    for start, stored, *_ in sorted(span for _, _, span in rows):
        if start < end:
            raise ValueError(f"two members share byte {start}")
        end = start + stored
    return Table.of(rows, notes=_said(passed))
