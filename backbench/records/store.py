"""RUN/results.jsonl: one line per measured number, appended once and never edited.

docs/results.md describes the lines. What their numbers were computed from is kept beside them
(predictions.py, kept_scores.py).
"""

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from backbench.errors import BadInput
from backbench.records.origin import code_revision, hardware, versions
from backbench.records.owed_rows import (
    KEY_NAMES,
    LARGEST_FILE,
    NumberKey,
    complete,
    number_key,
    numbers,
    numbers_of,
    owe,
    owed,
)
from backbench.records.result_line import SCHEMA, Origin, Result, parse_line
from backbench.runs import failures
from backbench.runs.folder import RESULTS_FILE, RUN_FILE
from backbench.runs.lock import NO_LOCKS
from backbench.untrusted import opening, printable, walking

# The names of other files that callers take from here
__all__ = [
    "KEY_NAMES",
    "SCHEMA",
    "Origin",
    "Result",
    "code_revision",
    "complete",
    "hardware",
    "numbers",
    "owe",
    "owed",
]

# ---- writing


def append(
    run: str | Path, results: Iterable[Result], *, skip_known: bool = False
) -> None:
    """Append to RUN/results.jsonl by one locked, synced write: many jobs may share the file. With
    `skip_known`, known numbers are skipped: a killed run adds the missing ones."""
    run = Path(run)
    origin = _origin(run)
    lines: list[tuple[NumberKey, str]] = []
    for result in results:
        data = dataclasses.asdict(result)
        data["origin"] = {**origin, **result.origin}
        lines.append((number_key(data), json.dumps(data, sort_keys=True) + "\n"))
    if not lines:
        return
    path = run / RESULTS_FILE
    failures.make_folder(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)  # lockf also works over NFS
        except OSError as error:
            # What took hours is not thrown away: the run's folder has one writer (`runs.lock`)
            if error.errno not in NO_LOCKS:
                raise
        known: set[NumberKey] = set()
        if skip_known:
            # Read under the lock: of two writers, the second sees the first one's rows. Read by
            # this descriptor: closing another one of the same file would give the lock away.
            size = os.fstat(descriptor).st_size
            known = numbers_of(os.pread(descriptor, size, 0))
        new = "".join(line for number, line in lines if number not in known)
        if new:
            _write_whole(descriptor, new.encode(), path)
    finally:
        os.close(descriptor)


def _origin(run: Path) -> Origin:
    """Return the origin of numbers added now; the command is the one that opened the run folder."""
    origin: Origin = {
        "recorded": round(time.time(), 3),
        "code": code_revision(),
        "versions": versions(),
        "hardware": hardware(),
    }
    try:
        opened = json.loads((run / RUN_FILE).read_text())
    except (OSError, ValueError):
        return origin  # no run folder: a test, or somebody's own script
    for key in ("command", "cwd"):
        if key in opened:
            origin[key] = opened[key]
    return origin


def _write_whole(descriptor: int, data: bytes, path: Path) -> None:
    """Write all of `data` at the end of the locked file, on disk; or nothing, and raise OSError."""
    size = os.fstat(descriptor).st_size
    # A writer may have died in the middle of a line: keep its part apart from ours.
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        data = b"\n" + data
    try:
        while data:
            # One write may take only a part of what it is given.
            written = os.write(descriptor, data)
            data = data[written:]
    except OSError as error:
        # The disk is full. Half of a run's rows would pass for all of them, so none stay.
        os.ftruncate(descriptor, size)
        raise OSError(error.errno, error.strerror, str(path)) from None
    os.fsync(descriptor)


# ---- reading


def files_below(path: str | Path) -> list[Path]:
    """Return every results file at or below `path`, sorted. Raises BadInput where `path` is
    missing, and where it is a file that is no text, such as weights."""
    path = Path(path)
    if path.is_file():
        with path.open("rb") as file:
            if b"\0" in file.read(4096):
                raise BadInput(
                    f"{path}: is no results file; give a run folder, or its {RESULTS_FILE}"
                )
        return [path]
    if not path.is_dir():
        raise BadInput(f"{path}: no such run folder or results file")
    # Links are followed, since runs often lie on a scratch disk
    files = walking.files(path, follow=True)
    return sorted(file for file in files if file.name == RESULTS_FILE)


def read_file(file: Path) -> Iterator[Result | str]:
    """Return each line as a Result, or as one line of text that says why it could not be read."""
    where = printable.shown(str(file), 300)
    try:
        # Opening a FIFO in the place of a file would wait for its writer.
        opened = opening.open_regular(file, most=LARGEST_FILE)
    except OSError as error:
        yield f"{where}: not read: {error.strerror}"
        return
    with opened:
        for number, line in enumerate(opened, 1):
            if not line.strip():
                continue
            try:
                yield parse_line(line)
            except BadInput as error:
                yield f"{where}:{number}: {printable.shown(str(error))}"
            except ValueError as error:
                # Text that does not end as JSON ends was cut off; text that is too deep was not.
                why = str(error)
                if isinstance(error, json.JSONDecodeError):
                    why = "truncated line"
                start = line.rstrip(b"\n")[:60].decode(errors="replace")
                yield (
                    f"{where}:{number}: {printable.shown(why)}, not counted:"
                    f" {printable.shown(start)}"
                )


def read(path: str | Path) -> tuple[list[Result], list[str]]:
    """Return all results below `path` (file or folder), and a line about each that could not be
    read."""
    results = []
    problems = []
    for file in files_below(path):
        for line in read_file(file):
            if isinstance(line, str):
                problems.append(line)
            else:
                results.append(line)
    return results, problems
