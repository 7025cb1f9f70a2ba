"""Keeps the table of every container file, so that it is scanned once.

Tables lie in $BACKBENCH_CACHE/containers under a hash of kind, name, size, inode and ctime."""

import contextlib
import fcntl
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from backbench.containers import scan_parquet_arrow_lmdb, scan_tar_zip
from backbench.containers.container import Container
from backbench.containers.spans import SPAN, Mark, mark_of
from backbench.containers.tables import SCANNER_VERSION, Table
from backbench.errors import BadInput, Failed
from backbench.runs import atomic, failures
from backbench.runs.folder import cache_folder
from backbench.runs.run_progress import QUIET_SECONDS, Progress
from backbench.runs.terminal import log

MOST_FILES = np.iinfo(SPAN["file"]).max


def tables_of(container: Container) -> tuple[list[Table], list[Mark]]:
    """Return the table and the mark of each file, from the cache or scanned.

    One process scans at a time. BadInput for a file that cannot be scanned, or that somebody writes
    meanwhile."""
    files = container.files
    folder = files[0].parent
    if len(files) > MOST_FILES:
        raise BadInput(f"{folder}: {len(files)} container files are too many")
    marks = [mark_of(file) for file in files]
    parts = [_kept_at(container, *each) for each in zip(files, marks)]
    out: dict[int, Table] = {}
    _add_kept(out, parts, marks)
    if len(out) < len(files):
        with _alone(parts[0].with_suffix(".lock"), folder):
            # Another process may have scanned them meanwhile, or been killed in the middle of them
            _add_kept(out, parts, marks)
            left = [i for i in range(len(files)) if i not in out]
            progress = Progress(
                None,
                len(left),
                f"{folder}: looking into {container.kind}",
                unit="file",
                after=QUIET_SECONDS,
            )
            scanned = _scan(container, [files[i] for i in left])
            for i, table in zip(left, scanned):
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


def _scan(container: Container, files: Sequence[Path]) -> Iterable[Table]:
    """Yield the tables of some files of a container, in their order."""
    if container.kind == "tar":
        return scan_tar_zip.scan_tars(files)
    if container.kind == "zip":
        return scan_tar_zip.scan_zips(files)
    return scan_parquet_arrow_lmdb.scan(container.kind, files, container.labels)


def _kept_at(container: Container, file: Path, mark: Mark) -> Path:
    """Return the file of the cache that keeps the table of one file of a container."""
    about = f"{SCANNER_VERSION} {container.kind} {file.name} {mark}"
    # One file may be asked for another column of labels
    if container.labels:
        about += f" {container.labels}"
    key = hashlib.sha256(about.encode(errors="surrogateescape")).hexdigest()[:32]
    return cache_folder() / "containers" / f"{key}.npz"


def _add_kept(
    tables: dict[int, Table], parts: Sequence[Path], marks: Sequence[Mark]
) -> None:
    """Add the kept tables that are not yet in `tables`, and that can be used."""
    for i, (part, (size, _, _)) in enumerate(zip(parts, marks)):
        if i in tables:
            continue
        # There may be no file, or one that is torn or somebody else's
        with contextlib.suppress(Exception):
            tables[i] = Table.loaded(part, size)


@contextlib.contextmanager
def _alone(lock: Path, what: Path) -> Iterator[None]:
    """Hold a lock file, where the file system has locks: a process that waits scans nothing."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            failures.make_folder(lock.parent)
            file = stack.enter_context(lock.open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info(
                    f"{what}: waiting for another process, which looks into these files"
                )
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
