"""Gives a copy that lost its file names (folder2lmdb numbers them) the names of the original.

`data check --record` writes contents.tsv.gz beside an original: split, path and the first digits of
each file's sha256. Laid beside the copy as names.tsv.gz, it names images of the same bytes."""

import concurrent.futures
import contextlib
import gzip
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from backbench.containers.container import Container
from backbench.containers.spans import mark_of, read_span
from backbench.containers.tables import ANY_SIZE, SCANNER_VERSION, Table
from backbench.errors import BadInput, Failed
from backbench.runs import atomic
from backbench.runs.folder import cache_folder
from backbench.untrusted import opening, printable

LARGEST_NAMES = 4 * opening.GIGABYTE  # bytes, unpacked; ImageNet's train has 80 MB
READERS = 8  # threads


def digest_of(data: bytes) -> str:
    """Return the digest of an image's bytes that contents.tsv.gz holds: 16 hex digits."""
    return hashlib.sha256(data).hexdigest()[:16]


def renamed(
    container: Container, tables: list[Table], base: Path, split: str
) -> list[Table]:
    """Return the tables with the names of BASE/names.tsv.gz; as they are where it is missing.

    Labels and classes are dropped, because the names hold the class. BadInput for a damaged list,
    and for images that are not in it."""
    file = base / "names.tsv.gz"
    if not file.exists():
        return tables
    paths = _paths_by_digest(file, split)
    out: list[Table] = []
    strange = 0
    for container_file, table in zip(container.files, tables):
        names = []
        for name, digest in zip(table.names, _digests_of(container_file, table)):
            # Images of equal bytes may have several names, and each name is given once
            left = paths.get(digest)
            if left:
                names.append(left.pop())
            else:
                names.append(name)
                strange += 1
        fresh = replace(table.unlabelled(), names=names)
        fresh.check(ANY_SIZE)
        out.append(fresh)
    if strange:
        total = sum(len(table.names) for table in tables)
        raise BadInput(
            f"{file}: {strange} of {total} images of '{split}' are not in it"
        )
    return out


def _paths_by_digest(file: Path, split: str) -> dict[str, list[str]]:
    paths: dict[str, list[str]] = {}
    try:
        with opening.open_regular(file) as raw, gzip.open(raw) as lines:
            for line in lines.read(LARGEST_NAMES).decode().splitlines():
                part, path, digest = line.split("\t")
                if part == split:
                    paths.setdefault(digest, []).append(path)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        said = printable.shown(str(error), 100)
        raise BadInput(
            f"{file}: not as `data check --record` writes it ({said})"
        ) from None
    return paths


def _digests_of(file: Path, table: Table) -> Sequence[str]:
    """Return `digest_of` each image. The whole container is read once; the digests are kept."""
    mark = mark_of(file)
    about = f"{SCANNER_VERSION} {mark}".encode() + table.spans.tobytes()
    key = hashlib.sha256(about).hexdigest()[:32]
    kept = cache_folder() / "containers" / f"{key}.txt"
    with contextlib.suppress(OSError):
        digests = kept.read_text().split()
        if len(digests) == len(table.names):
            return digests

    def read_digest(index: int) -> str:
        span = table.spans[index].item()[1:]  # without the number of its container
        return digest_of(read_span(str(file), mark, span, table.names[index]))

    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        digests = list(pool.map(read_digest, range(len(table.names))))
    with contextlib.suppress(OSError, BadInput, Failed):
        atomic.write_text(kept, "\n".join(digests))
    return digests
