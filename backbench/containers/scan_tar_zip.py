"""Finds images in tar files (also nested, and WebDataset's) and zip files.

Only headers and labels are read. Nothing is unpacked."""

import posixpath
import stat
import struct
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from backbench.containers.spans import CODECS, Span, bare_span
from backbench.containers.tables import LARGEST_IMAGE, Row, Table
from backbench.errors import BadInput
from backbench.images.file_names import is_image, passed_over, refuse_run
from backbench.untrusted import jsons, opening, printable

MOST_CLASSES = 1_000_000  # in shards, where labels alone say how many there are
MOST_LINKS = 10  # from link to link
MOST_TIMES = 1000  # unpacked bytes for one stored byte of an image in a zip file
LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a member of a zip file
UTF8_NAME = 0x800  # the flag of a zip member whose name is UTF-8, not code page 437
ENCRYPTED = 1  # the flag of an encrypted one


def scan_tars(files: Sequence[Path]) -> Iterator[Table]:
    """Yield the tables of uncompressed tar files, and of tars inside.

    A member `<key>.cls` (a number) or `<key>.json` ({"label": number}) labels the image
    `<key>.<extension>`."""
    for file in files:
        try:
            with opening.open_regular(file) as raw:
                rows, passed = _members(raw, file)
            yield Table.of(rows, notes=_notes(passed))
        except BadInput:
            raise
        # tarfile's own errors, and whatever a crafted header makes of it
        except Exception as error:
            said = printable.shown(" ".join(str(error).split()), 100)
            raise BadInput(
                f"{file}: not readable as an uncompressed tar file ({said}); get or write it anew"
            ) from None


def _notes(passed: Counter[str]) -> list[str]:
    return [f"{count} {kind} passed over" for kind, count in sorted(passed.items())]


def _members(
    raw: IO[bytes], file: Path, begin: int = 0, above: str = ""
) -> tuple[list[Row], Counter[str]]:
    """List a tar's images, and count what is passed over.

    A nested tar begins at byte `begin` of `file`, and its images lie in the folder `above`."""
    found: list[tuple[str, int, int]] = []  # name, first byte, number of bytes
    # Folder and key of a sample -> its label's kind, first byte, number of bytes
    labels: dict[str, tuple[str, int, int]] = {}
    links: dict[str, str] = {}  # name -> the name that it leads to
    rows: list[Row] = []
    passed: Counter[str] = Counter()
    with tarfile.open(fileobj=raw, mode="r:") as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            folder, _, base = name.rpartition("/")
            # WebDataset's rule: the key ends at the first dot
            key, _, extension = base.partition(".")
            if member.isdir():
                continue
            if passed_over(name):
                passed["hidden members"] += 1
            elif member.islnk():
                links[name] = posixpath.normpath(member.linkname)
            elif member.issym():
                target = posixpath.join(folder, member.linkname)
                links[name] = posixpath.normpath(target)
            elif not member.isreg() or member.issparse():
                if is_image(name):
                    raise BadInput(
                        f"{file}: {printable.shown(name, 100)} is a sparse file or a device, whose"
                        " bytes cannot be read in place; pack it without --sparse"
                    )
                passed["sparse files or devices"] += 1
            elif is_image(name):
                found.append((name, member.offset_data, member.size))
            elif extension in ("cls", "json") and key:
                label_at = (extension, member.offset_data, member.size)
                labels.setdefault(f"{folder}/{key}", label_at)
            elif base.endswith(".tar") and not above:
                inner = tar.extractfile(member)
                assert inner is not None
                below, more = _members(inner, file, member.offset_data, base[:-4])
                rows += below
                passed += more
            else:
                refuse_run(f"{file}: {printable.shown(name, 200)}", base)
                passed["other members"] += 1
            # tarfile would keep them all, for a million images some gigabytes
            tar.members = []  # type: ignore[attr-defined]
        # A tar ends with a block of zeros; without it tarfile takes a cut file for a short one
        raw.seek(tar.offset)
        if raw.read(512) != bytes(512):
            raise BadInput(
                f"{file}: the tar file is cut short (no end mark behind {tar.offset})"
            )
    found += _linked(links, found, raw, file)
    for name, start, size in found:
        label = -1
        if labels:
            folder, _, base = name.rpartition("/")
            key = base.partition(".")[0]
            if f"{folder}/{key}" in labels:
                label = _label(raw, labels[f"{folder}/{key}"], file, name)
        path = name
        if above and not name.startswith(f"{above}/"):
            path = f"{above}/{name}"
        rows.append((path, label, bare_span(begin + start, size)))
    return rows, passed


def _linked(
    links: Mapping[str, str],
    found: Sequence[tuple[str, int, int]],
    raw: IO[bytes],
    file: Path,
) -> list[tuple[str, int, int]]:
    """Return name, first byte and number of bytes of the images that are links to others.

    BadInput for a link to a folder, and for one that leads out of the tar: a class folder has the
    images behind it."""
    if not links:
        return []
    places = {name: (start, size) for name, start, size in found}
    out = []
    for name, first in links.items():
        target = first
        for _ in range(MOST_LINKS):
            target = links.get(target, target)
        if is_image(name) and target in places:
            out.append((name, *places[target]))
        elif is_image(name) or target not in _other_members(raw):
            raise BadInput(
                f"{file}: {printable.shown(name, 100)} is a link to"
                f" {printable.shown(target, 100)}, which is no image in it; pack the files in place"
                " of links (tar --dereference --hard-dereference)"
            )
    return out


def _other_members(raw: IO[bytes]) -> set[str]:
    """Return the names of all files in a tar. Few tars have a link that needs them."""
    raw.seek(0)
    with tarfile.open(fileobj=raw, mode="r:") as tar:
        return {member.name.removeprefix("./") for member in tar if member.isreg()}


def _label(
    raw: IO[bytes], label_at: tuple[str, int, int], file: Path, image: str
) -> int:
    """Read a label; -1 where the sample's json has none. BadInput for anything but a number."""
    kind, start, size = label_at
    raw.seek(start)
    try:
        value = jsons.decode(raw.read(min(size, opening.MEGABYTE)))
        label = value
        if kind != "cls":  # an object, whose label stands under either key
            label = value.get("label", value.get("cls", -1))
        # type() and not isinstance(): True would be an int
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
        except BadInput as error:
            raise BadInput(f"{file}: {error}") from None
        # zipfile's own errors, and whatever a crafted header makes of it
        except Exception as error:
            said = printable.shown(" ".join(str(error).split()), 160)
            raise BadInput(
                f"{file}: not readable as a zip file ({said}); get or write it anew"
            ) from None


def _zipped(raw: IO[bytes], archive: zipfile.ZipFile) -> Table:
    """Make the table of a zip file. ValueError where the file contradicts itself."""
    passed: Counter[str] = Counter()
    rows: list[Row] = []
    for info in archive.infolist():
        name = info.filename
        if info.is_dir():
            continue
        if passed_over(name):
            passed["hidden members"] += 1
            continue
        if stat.S_ISLNK(info.external_attr >> 16):
            raise ValueError(
                f"{printable.shown(name, 100)} is a link; pack the file itself, by zip without"
                " --symlinks"
            )
        if not is_image(name):
            refuse_run(printable.shown(name, 200), name.rpartition("/")[2])
            passed["other members"] += 1
            continue
        # 1. What the central directory says of the member
        shown = printable.shown(name, 100)
        if info.flag_bits & ENCRYPTED:
            raise ValueError(f"{shown} is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"{shown} has compression method {info.compress_type}; use `zip -0`"
            )
        limit = min(LARGEST_IMAGE, MOST_TIMES * max(1, info.compress_size))
        if info.file_size > limit:
            raise ValueError(f"{shown} claims {info.file_size} bytes")
        # 2. The member's own header, which must say the same, and where its bytes begin
        raw.seek(info.header_offset)
        header = LOCAL_HEADER.unpack(raw.read(LOCAL_HEADER.size))
        sign, _version, _flags, method, *_, name_length, extra_length = header
        encoding = "utf-8" if info.flag_bits & UTF8_NAME else "cp437"
        own_name = raw.read(name_length)
        if (
            sign != b"PK\3\4"
            or method != info.compress_type
            or own_name != info.orig_filename.encode(encoding)
        ):
            raise ValueError(f"the directory and the member {shown} disagree")
        start = info.header_offset + LOCAL_HEADER.size + name_length + extra_length
        size = info.file_size
        if method == zipfile.ZIP_STORED:
            if info.compress_size != size:
                raise ValueError(
                    f"{shown} is stored in {info.compress_size} bytes, not {size}"
                )
            span: Span = bare_span(start, size)
        else:
            deflate = CODECS.index("deflate")
            span = (start, info.compress_size, deflate, 0, size, size)
        rows.append((name.removeprefix("./"), -1, span))
    # 3. Members that overlap: a few bytes would unpack to any number (a zip bomb)
    end = 0
    for start, stored, *_ in sorted(span for _, _, span in rows):
        if start < end:
            raise ValueError(f"two members share byte {start}")
        end = start + stored
    return Table.of(rows, notes=_notes(passed))
