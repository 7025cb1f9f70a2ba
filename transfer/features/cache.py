"""Keeps features on disk, under names that say exactly what they are features of.

The cache is $BACKBENCH_CACHE (default ~/.cache/backbench), and holds at most $BACKBENCH_CACHE_GB
(default 50) gigabytes: the least recently used entries are removed first. What a run uses stays,
even if that is more.

An entry is named by the hash of a description of all that decides its content. It is refused if the
description beside it is another one. Files by suffix:

    .npy         the rows, float32 (N, dim), in the order of the image list
    .json        description, shape and sha256 of the rows, and the file that was last hashed;
                 without it there is no entry. Its time of change is that of the entry's last use
    .files       inode, ctime and hash of each image (`Seen`)
    .lock        held by the run that looks or computes
    .part        the rows while they are computed (`PartFiles`)
    .rows.json   how many rows of the .part files hold; beside the first of them
    .files.part  inodes, ctimes and hashes of the images so far; beside the first of them

The description names an image list by the paths and sizes of its files and the contents of a few
(`contents.named`). When an entry is found, only files that have changed their place or time since are
hashed again (`changed_file`).
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backbench.errors import EXIT_BAD_INPUT, BadInput, Failed
from backbench.images import contents
from backbench.images.image_list import ArrayList, ImageList
from backbench.recipes import config
from backbench.runs import atomic, failures
from backbench.runs.folder import cache_folder
from backbench.runs.lock import NO_LOCKS
from backbench.runs.terminal import log
from backbench.transfer.features import layer_cells
from backbench.transfer.features.frozen import FrozenTrunk, state_digest
from backbench.transfer.protocol import Geometry
from backbench.untrusted import jsons, printable

Description = Mapping[str, object]  # JSON-able
Seen = NDArray[np.int64]  # a row for each image, with these columns
INODE = 0
CHANGED = 1  # ctime in ns
HASH = 2
COLUMNS = 3
UNKNOWN = 0  # a hash that is not known


def describe(trunk: FrozenTrunk, images: str, geometry: Geometry) -> dict[str, object]:
    """Return everything that the features depend on, but for rounding. `images` is the name of the
    list of images (`contents.named`)."""
    # The head behind the trunk. Features of the bare trunk get no such key: one more key would rename
    # their entries.
    head = {}
    if trunk.of_tokens is not None:
        head["of_tokens"] = trunk.of_tokens.name
    elif trunk.of_layers is not None:
        head["of_layers"] = layer_cells.NAME
    elif trunk.own_head is not None:
        head["own_head"] = trunk.own_head
    elif trunk.head is not None:
        head["head"] = state_digest(trunk.head)
    return {
        "checkpoint": trunk.digest,
        "arch": trunk.checkpoint.arch,
        "stem": trunk.checkpoint.stem,
        # Its tuples become lists, as JSON reads them back
        "pixels": json.loads(json.dumps(dataclasses.asdict(trunk.pixels))),
        "images": images,
        "geometry": config.to_dict(geometry),
        "precision": trunk.precision,
        "device": trunk.device.type,
        # The version without its build, such as +cu121
        "torch": torch.__version__.split("+")[0],
        **head,
    }


# Images that were looked at


def file_hash(images: ImageList, index: int) -> int:
    """Return 64 bits of a file's sha256, as a signed integer that is not UNKNOWN."""
    digest = hashlib.sha256(images.read(index)).digest()
    number = int.from_bytes(digest[:8], "little", signed=True)
    return 1 if number == UNKNOWN else number


def not_yet_seen(named: contents.Named) -> Seen:
    """Make the table of images that are about to be looked at; hashes are filled in as they come."""
    out = np.full((len(named.inodes), COLUMNS), UNKNOWN, dtype=np.int64)
    out[:, INODE] = named.inodes
    out[:, CHANGED] = named.changed
    return out


def changed_file(images: ImageList, named: contents.Named, seen: Seen) -> str | None:
    """Return the first file that is found not to hold what `seen` says, or None. `seen` may lack
    hashes, and be shorter than the list.

    The same inode and ctime mean the same file, as no program can set a ctime. Of the other files
    all are hashed if they are few. If they are many, as after a copy to another disk, a seeded 2%
    of the list are."""
    if isinstance(images, ArrayList):
        return None
    now = not_yet_seen(named)[: len(seen), :2]
    differs = (now != seen[:, :2]).any(axis=1)
    moved = np.flatnonzero(differs & (seen[:, HASH] != UNKNOWN))
    most = max(contents.SAMPLE, len(images) // 50)  # 2% of what an extraction reads
    if len(moved) > most:
        moved = moved[contents.chosen(len(moved), most)]
    for index in moved.tolist():
        if file_hash(images, index) != seen[index, HASH]:
            return images.paths[index]
    return None


def _write_seen(path: Path, seen: Seen) -> None:
    buffer = io.BytesIO()
    np.save(buffer, seen)
    atomic.write_bytes(path, buffer.getvalue())


def _read_seen(path: Path, count: int) -> Seen | None:
    """Read the table of `count` images; None where there is none, or only part of one."""
    try:
        with path.open("rb") as file:
            seen = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if not isinstance(seen, np.ndarray) or seen.dtype != np.int64:
        return None
    return seen if seen.shape == (count, COLUMNS) else None


# Entries


class About(TypedDict, total=False):
    """The .json of an entry."""

    description: Description
    shape: list[int]
    sha256: str
    file: list[int]  # `_stamp` of the rows that were last hashed


@dataclass(frozen=True)
class FeatureCache:
    """The cache's folder. An entry is asked for by its description, and gives rows of features."""

    folder: Path
    limit: int  # bytes

    @staticmethod
    def default() -> "FeatureCache":
        said = os.environ.get("BACKBENCH_CACHE_GB") or "50"
        try:
            limit = int(float(said) * 1e9)
        except (ValueError, OverflowError):  # no number, nan, infinite
            limit = -1
        if limit < 0:
            raise BadInput(
                f"BACKBENCH_CACHE_GB={printable.shown(said, 40)}: expected gigabytes, 0 or more,"
                " as 50"
            )
        return FeatureCache(cache_folder() / "features", limit)

    def path(self, description: Description) -> Path:
        """Return the path of an entry's rows."""
        text = json.dumps(description, sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.npy"

    def try_lock(
        self, descriptions: Sequence[Description]
    ) -> contextlib.ExitStack | None:
        """Lock all of these entries until the stack is closed; None where another run has one."""
        with self.suggest_other_disk():
            failures.make_folder(self.folder)
        with contextlib.ExitStack() as locks:
            for path in {self.path(d) for d in descriptions}:
                with self.suggest_other_disk():
                    file = locks.enter_context(path.with_suffix(".lock").open("w"))
                if not _try_lock(file):
                    return None
                # With the lock in hand no other run writes here: these are of killed writers.
                for left in self.folder.glob(f".{path.stem}.*.tmp"):
                    left.unlink(missing_ok=True)
            return locks.pop_all()

    @contextlib.contextmanager
    def suggest_other_disk(self) -> Iterator[None]:
        """Add to an error of the disk that the cache may be put on another disk."""
        try:
            yield
        except OSError as error:
            told = failures.explain(error)
            if told is None:
                raise
            line, status = told
            kind = BadInput if status == EXIT_BAD_INPUT else Failed
            raise kind(f"{line}; or set BACKBENCH_CACHE to another disk") from None

    def seen(self, description: Description) -> Seen | None:
        """Return the table of images that an entry was computed from; None if there is no entry, or
        no such table."""
        path = self.path(description)
        about = self._about(path)
        if about is None:
            return None
        return _read_seen(path.with_suffix(".files"), about["shape"][0])

    def _about(self, path: Path) -> About | None:
        """Read the .json beside the rows at `path`; None where there are no rows, or no whole
        .json."""
        file = path.with_suffix(".json")
        if not path.exists():
            return None
        try:
            about = jsons.read(file)
            if (
                isinstance(about["description"], dict)
                and isinstance(about["sha256"], str)
                and isinstance(about["shape"], list)
                and len(about["shape"]) == 2
            ):
                return about
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            pass
        log.warning(f"{file}: torn; its features are made anew")
        return None

    def open(self, description: Description) -> Tensor | None:
        """Map the rows from disk; None if absent, BadInput if damaged or those of another entry."""
        path = self.path(description)
        about = self._about(path)
        if about is None:
            return None
        there = about["description"]
        keys = sorted({*there, *description})
        differing = [key for key in keys if there.get(key) != description.get(key)]
        if differing:
            raise BadInput(
                f"{path}: features of another {', '.join(differing)} than asked for;"
                " remove the file"
            )
        # While rows are mapped, their file is locked: `make_room` spares it.
        file = path.open("rb")
        with _locks_here(path):
            fcntl.flock(file, fcntl.LOCK_SH)
        # The hash is checked before anything is read: what is damaged may be no array at all.
        rows = None
        if _verified(path, about):
            rows = np.load(path, mmap_mode="c")
        if rows is None or list(rows.shape) != about["shape"]:
            raise BadInput(f"{path}: the cached features are damaged; remove the file")
        rows.lock = file  # which is closed when the last tensor of these rows is gone
        # The .json has the time of the last use. The rows' own file must not change its ctime, which
        # vouches for what it holds.
        with contextlib.suppress(FileNotFoundError):
            os.utime(path.with_suffix(".json"))
        return torch.from_numpy(rows)

    def finish(self, description: Description, part: Path, seen: Seen) -> None:
        """Make the complete `part` file the entry of `description`, of the images `seen`."""
        path = self.path(description)
        about = {
            "description": dict(description),
            "shape": list(np.load(part, mmap_mode="r").shape),
            "sha256": _file_digest(part),
        }
        # The .json goes first and comes last: a kill in between leaves rows that are no entry.
        path.with_suffix(".json").unlink(missing_ok=True)
        _write_seen(path.with_suffix(".files"), seen)
        part.replace(path)
        atomic.write_json(path.with_suffix(".json"), {**about, "file": _stamp(path)})

    def make_room(self, size: int, keep: set[Path]) -> None:
        """Remove the least recently used entries, and what killed runs left, until `size` more
        bytes fit, or until nothing is left to remove: those of `keep`, and those that a run computes
        or has mapped, always stay."""
        if size > self.limit:
            raise BadInput(
                f"{self.folder}: the features need {size / 1e9:.1f} GB, the cache may have"
                f" {self.limit / 1e9:.1f}; set BACKBENCH_CACHE_GB"
            )
        # 1. When each entry or part was used last, and how large it is
        files: list[tuple[float, int, Path]] = []
        for path in self.folder.glob("*"):
            if path.suffix not in (".npy", ".part") or "." in path.stem:
                continue
            with contextlib.suppress(FileNotFoundError):  # another run makes room too
                about = path.stat()
                used_at = about.st_mtime
                json_file = path.with_suffix(".json")
                if path.suffix == ".npy" and json_file.exists():
                    used_at = max(used_at, json_file.stat().st_mtime)
                files.append((used_at, about.st_size, path))
        # 2. The oldest go, until there is room.
        used = sum(bytes_ for _, bytes_, _ in files)
        for _, bytes_, path in sorted(files):
            if used + size <= self.limit:
                return
            if path.with_suffix(".npy") not in keep and _remove_unused(path):
                used -= bytes_


def _remove_unused(path: Path) -> bool:
    """Remove an entry or an unfinished part of one; False where a run is using it."""
    with contextlib.ExitStack() as files:
        lock = files.enter_context(path.with_suffix(".lock").open("w"))
        if not _try_lock(lock):
            return False  # a run is at work on it
        with contextlib.suppress(FileNotFoundError):
            # NFS gives a lock that excludes others to a file that may be written only
            if not _try_lock(files.enter_context(path.open("r+b"))):
                return False  # a run has it mapped
        # The .json, or the marker, goes first: what is left when a removal is cut off must not look
        # like an entry, or like a part that may be continued.
        if path.suffix == ".npy":
            suffixes = (".json", ".files", ".npy")
        else:
            suffixes = (".rows.json", ".files.part", ".part")
        for suffix in suffixes:
            path.with_suffix(suffix).unlink(missing_ok=True)
        return True


def _try_lock(file: IO[str] | IO[bytes]) -> bool:
    """Try to lock the file for this run alone; return whether that worked."""
    with _locks_here(Path(file.name)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextlib.contextmanager
def _locks_here(path: Path) -> Iterator[None]:
    """Raise BadInput where the file system has no locks: runs would remove each other's rows."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise BadInput(
            f"{path.parent}: the cache is on a file system without locks;"
            " set BACKBENCH_CACHE to another disk"
        ) from None


def _stamp(path: Path) -> list[int]:
    """Return inode, size and ctime (ns): while they stay, the file holds what it held."""
    about = path.stat()
    return [about.st_ino, about.st_size, about.st_ctime_ns]


def _verified(path: Path, about: About) -> bool:
    """Return whether `path` holds the rows of `about`. A file is hashed once; a copy of it is
    another file, and is hashed again."""
    now = _stamp(path)
    if about.get("file") == now:
        return True
    if _file_digest(path) != about["sha256"]:
        return False
    with contextlib.suppress(OSError):  # what cannot be noted is hashed again
        atomic.write_json(path.with_suffix(".json"), {**about, "file": now})
    return True


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class PartFiles:
    """Entries that are being computed together, row by row, by the run that holds their locks.

    States, and what takes one to the next:

        nothing      room is made, a .part file of full size is begun per entry   -> begun
        begun        rows are written; `save` flushes them, then the marker says n -> saved at n
        saved at n   the same, and n grows
        all written  `finish` makes the parts entries, then removes the marker    -> finished

    A kill leaves one of these states. The next run continues at row n if it finds a marker and all
    the parts that it names, and `still` accepts the images before n. Otherwise it begins anew.
    """

    def __init__(
        self,
        cache: FeatureCache,
        descriptions: Sequence[Description],
        dims: Sequence[int],
        count: int,
        *,
        keep: Sequence[Description],
        seen: Seen,
        still: Callable[[Seen], bool],
    ) -> None:
        """Begin or continue parts of `count` rows each, for images `seen` without hashes yet.
        Making room for them spares the entries of `keep`."""
        self.cache, self.descriptions = cache, descriptions
        self.parts = [cache.path(d).with_suffix(".part") for d in descriptions]
        self.marker = self.parts[0].with_suffix(".rows.json")
        self.table = self.parts[0].with_suffix(".files.part")
        self.names = sorted(part.name for part in self.parts)
        # 1. Where to begin
        self.first = 0
        self.seen = seen
        saved = self._saved_rows()
        before = _read_seen(self.table, count)
        if saved and before is not None and still(before[:saved]):
            self.first = saved
            self.seen = before
        if not self.first:
            # The marker goes before the parts are made: one that is left over would vouch for rows
            # that are not written.
            self.marker.unlink(missing_ok=True)
            size = 4 * count * sum(dims)  # float32 has 4 bytes
            cache.make_room(size, {cache.path(d) for d in keep})
        # 2. The parts
        self.rows = []
        for part, dim in zip(self.parts, dims):
            mode: Literal["r+", "w+"] = "r+" if self.first else "w+"
            float32 = np.dtype(np.float32)
            rows = np.lib.format.open_memmap(part, mode, float32, (count, dim))
            self.rows.append(rows)
        self._allocate()

    def _allocate(self) -> None:
        """Reserve disk for the parts. Without that, writing to a mapped file on a full disk would end
        the process by SIGBUS, without a message."""
        try:
            for part in self.parts:
                with self.cache.suggest_other_disk(), failures.naming(part):
                    size = part.stat().st_size
                    with part.open("r+b") as file:
                        os.posix_fallocate(file.fileno(), 0, size)
        except (BadInput, Failed):
            self.rows = []
            if not self.first:
                for part in self.parts:
                    part.unlink(missing_ok=True)
            raise

    def _saved_rows(self) -> int:
        """Return n of `saved at n`; 0 in any other state."""
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            begun = jsons.read(self.marker)
            all_there = all(part.exists() for part in self.parts)
            if begun["parts"] == self.names and all_there:
                return int(begun["rows"])
        return 0

    def write(
        self, begin: int, end: int, features: Sequence[Tensor], hashes: Tensor
    ) -> None:
        """Write rows begin..end-1 of each entry, (end - begin, dim), and their images' hashes."""
        self.seen[begin:end, HASH] = hashes.cpu().numpy()
        for rows, feature in zip(self.rows, features):
            rows[begin:end] = feature.cpu().numpy()

    def save(self, end: int) -> None:
        """Note on disk that a new run may start at row `end`."""
        # The rows reach the disk before the marker that vouches for them.
        self._flush()
        _write_seen(self.table, self.seen)
        atomic.write_json(self.marker, {"rows": end, "parts": self.names})

    def finish(self) -> None:
        """Make the parts entries; a kill between two leaves the other to be begun anew."""
        self._flush()
        self.rows = []
        for description, part in zip(self.descriptions, self.parts):
            self.cache.finish(description, part, self.seen)
        self.marker.unlink(missing_ok=True)
        self.table.unlink(missing_ok=True)

    def _flush(self) -> None:
        for rows in self.rows:
            rows.flush()
