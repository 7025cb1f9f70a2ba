"""Writes files so that they are there completely or not at all, whenever the writer dies."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from backbench.runs import failures


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Give a temporary path, which becomes `path` if the block ends well and is removed if not."""
    path = Path(path)
    failures.make_folder(path.parent)
    # The temporary file lies beside `path`, because a rename is atomic only within a file system
    with failures.naming(path):
        handle, name = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"
        )
    os.close(handle)
    temporary = Path(name)
    try:
        with failures.naming(path):
            yield temporary
            # The bytes reach the disk before the name does: a crash in between must not leave an
            # empty file
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        # mkstemp allows the owner only (0600), but results are for all whom the user's mask allows.
        # The mask can only be read by setting it
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(*folders: Path) -> None:
    """Remove what killed writers left in `folders`. Only the folders' sole writer may call this."""
    for folder in folders:
        for path in folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)


def write_bytes(path: str | Path, data: bytes) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: str | Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: str | Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n")
