"""Finds the container that holds a split, and says why a file is none that is read.

Nothing here needs numpy until a container is found, so that the catalog stays cheap to import."""

import contextlib
import fnmatch
import functools
import glob
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from backbench.containers import naming
from backbench.containers.container import (
    SPLIT_WORDS,
    Container,
    split_of,
    splits_among,
)
from backbench.errors import BadInput
from backbench.images.file_names import passed_over
from backbench.images.folder_walk import is_folder, subfolders

if TYPE_CHECKING:
    from backbench.containers.spans import Mark

# Patterns whose word stands below a folder of another name
_ANY_FOLDER = "*/{}/*.parquet"
_DEEPER = ("data/{}-*.parquet", _ANY_FOLDER)
# Kind -> where a split's files may lie below the dataset's folder. `*.arrow` is not a pattern: the
# library `datasets` leaves results of its `map` beside the data, as cache-*.arrow
PATTERNS = {
    "tar": ("{}.tar", "{}/*.tar", "*_{}.tar", "{}-*.tar", "*-{}-*.tar"),
    "zip": ("{}.zip", "{}/*.zip", "*_{}.zip", "{}-*.zip"),
    "parquet": (
        "{}.parquet",
        "{}/*.parquet",
        "{}-*.parquet",
        "data/{}-*.parquet",
        _ANY_FOLDER,
    ),
    "arrow": ("{}.arrow", "{}/data-*.arrow", "*-{}.arrow", "*-{}-*-of-*.arrow"),
    "lmdb": ("{}.lmdb", "{}.lmdb/data.mdb", "{}_lmdb/data.mdb", "{}/data.mdb"),
}
# Kind -> endings of a file that holds a whole dataset
ENDINGS = {
    "tar": (".tar",),
    "zip": (".zip",),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "lmdb": (".lmdb", "data.mdb"),
}
_PACKED_TAR = (
    "a compressed tar can only be read from its beginning; unpack it, or gunzip it"
)
_HDF5 = (
    "HDF5 has no convention for images; write them as class folders or as a zip file"
)
# Ending -> why such a file is not read, and what to do
REFUSED = {
    ".tar.gz": _PACKED_TAR,
    ".tgz": _PACKED_TAR,
    ".beton": "FFCV holds other pixels than the images, resized and encoded again; use the images",
    ".tfrecord": "TFRecord is not read; use the tar files that it was made from, or class folders",
    ".h5": _HDF5,
    ".hdf5": _HDF5,
}


@functools.lru_cache(maxsize=1024)
def _parts(pattern: str, word: str) -> tuple[str, str, str]:
    """Divide a pattern with a word in it at its first slash."""
    return pattern.format(glob.escape(word)).partition("/")


class Listing:
    """Lists a dataset's folder once, however many patterns are tried: it may hold a million images."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.names: list[str] = []
        self.folders: list[str] = []
        self._listed: dict[str, list[str]] = {}
        if not base.is_dir():
            return
        with os.scandir(base) as entries:
            for entry in entries:
                self.names.append(entry.name)
                if is_folder(entry):
                    self.folders.append(entry.name)

    @functools.cached_property
    def _lower(self) -> list[str]:
        return [name.lower() for name in self.names]

    @property
    def _subfolders(self) -> list[str]:
        """The folders that are not passed over, sorted."""
        return sorted(name for name in self.folders if not passed_over(name))

    def split_folder(self, split: str) -> Path:
        """Return the folder of a split, however it is spelled; BASE/<split> where there is none."""
        exact = self.base / split
        if exact.is_dir():
            return exact
        among = splits_among(self._subfolders, self.base)
        return self.base / among.get(split, split)

    def files_of(self, split: str) -> Iterator[tuple[str, str, list[Path]]]:
        """Yield (kind, pattern, files) for each pattern that matches files of a split."""
        for word in SPLIT_WORDS.get(split, (split,)):
            named = [
                name
                for name, lower in zip(self.names, self._lower)
                if word.lower() in lower
            ]
            spellings = _spellings(word, named)
            for kind, patterns in PATTERNS.items():
                for pattern in patterns:
                    for spelled in [word] if pattern in _DEEPER else spellings:
                        matches = self._matches(pattern, spelled, named)
                        files = [file for file in sorted(matches) if _usable(file)]
                        if files:
                            yield kind, pattern, files

    def _matches(self, pattern: str, word: str, named: list[str]) -> list[Path]:
        """Return what Path.glob finds for a pattern with a word in it; only `named` have the word."""
        first, _, below = _parts(pattern, word)
        if not below:
            return [self.base / name for name in fnmatch.filter(named, first)]
        matches: list[Path] = []
        for folder in fnmatch.filter(self.folders, first):
            # The files lie in the folder itself, or in its folder called as the word, which few of a
            # thousand class folders have. The pattern's last part is that of their names
            place = f"{folder}/{word}" if pattern == _ANY_FOLDER else folder
            of_names = below.rpartition("/")[2]
            for name in fnmatch.filter(self._names_in(place), of_names):
                matches.append(self.base / place / name)
        return matches

    def _names_in(self, place: str) -> list[str]:
        """Return the names in a folder below the dataset's, none where there is no such folder or it
        may not be looked into. It is listed once: the images of a split may lie in it."""
        if place not in self._listed:
            folder = os.path.join(self.base, place)  # noqa: PTH118
            names = []
            if os.path.isdir(folder):  # noqa: PTH112
                with contextlib.suppress(PermissionError):
                    names = os.listdir(folder)  # noqa: PTH208
            self._listed[place] = names
        return self._listed[place]

    @functools.cached_property
    def whole(self) -> Container | None:
        """The container of the whole dataset: BASE.zip, BASE.tar, or files alone in BASE."""
        base = self.base
        divided = any(any(self.files_of(split)) for split in SPLIT_WORDS)
        if divided or self._subfolders:
            return None
        found: list[Container] = []
        for kind, endings in ENDINGS.items():
            named = [
                name
                for name, lower in zip(self.names, self._lower)
                if lower.endswith(endings) and not passed_over(name)
            ]
            files = [base / name for name in sorted(named) if _usable(base / name)]
            if files:
                found.append(Container(kind, tuple(files)))
        for kind, endings in ENDINGS.items():
            for ending in endings:
                file = base.with_name(base.name + ending)
                if _usable(file):
                    found.append(Container(kind, (file,)))
        if len(found) > 1:
            names = " and ".join(str(container.files[0]) for container in found)
            raise BadInput(
                f"{base}: the dataset is there twice, {names}; move one away"
            )
        return found[0] if found else None


def find(base: Path, split: str) -> Container | None:
    """Return the container of a split of the dataset in BASE (or in BASE.zip, BASE.tar).

    None means that there is none, or that there is a class folder. BadInput names a split that is
    there twice."""
    return _find(Listing(base), split)


def _find(listing: Listing, split: str) -> Container | None:
    base = listing.base
    # Two patterns may match the same files; these are one container
    found: list[tuple[str, str, list[Path]]] = []
    for kind, pattern, files in listing.files_of(split):
        if files not in [others for _, _, others in found]:
            found.append((kind, pattern, files))
    folder = listing.split_folder(split)
    if folder.is_dir() and subfolders(folder):
        # A class folder wins over the archives that it was unpacked from
        for _, pattern, files in found:
            unpacked = pattern == "{}/*.tar" and all(
                (folder / file.stem).is_dir() for file in files
            )
            if not unpacked and pattern != "*_{}.tar":
                raise BadInput(
                    f"{base}: '{split}' is there twice, {folder} and {files[0]}; move one"
                )
        return None
    if len(found) > 1:
        first = found[0][2][0]
        second = found[1][2][0]
        raise BadInput(
            f"{base}: '{split}' is there twice, {first} and {second}; move one away"
        )
    if found:
        kind, _, files = found[0]
        return Container(kind, tuple(files))
    container = listing.whole
    if container is None:
        return None
    from backbench.containers.spans import mark_of

    marks = tuple(mark_of(file) for file in container.files)
    inside = _splits_inside(container, marks)
    return replace(container, inside=inside[split]) if split in inside else None


def _spellings(word: str, names: Iterable[str]) -> list[str]:
    """List how names spell a word that is in them: Train in Train-000.tar."""
    pattern = re.compile(re.escape(word), re.IGNORECASE)
    return sorted({spelled for name in names for spelled in pattern.findall(name)})


def split_folders(base: Path, beside: Iterable[str] = ()) -> dict[str, Path]:
    """Return split -> its folder in BASE, however it is spelled; as `splits_among`."""
    among = splits_among(subfolders(base), base, beside)
    return {split: base / name for split, name in among.items()}


def split_folder(base: Path, split: str) -> Path:
    """Return the folder of a split, however it is spelled; BASE/<split> where there is none."""
    return Listing(base).split_folder(split)


def whole(base: Path) -> Container | None:
    """Return the container of a whole dataset: BASE.zip, BASE.tar, or files alone in BASE."""
    return Listing(base).whole


# A dataset's container is looked for some ten times in one run
@functools.lru_cache(maxsize=64)
def _splits_inside(container: Container, marks: "tuple[Mark, ...]") -> dict[str, str]:
    """Return split -> its folder inside a container; empty where the container is not divided.

    `marks` belong to the cache's key: they tell a file from a later one of the same name."""
    from backbench.containers.table_cache import tables_of

    tables, _ = tables_of(container)
    names = naming.Rows(container, tables, "", {}).names
    tops = {name.partition("/")[0] for name in names}
    if any(split_of(top) is None for top in tops):
        # Beside other folders (`unlabeled`, say), splits hold class folders
        deep = {name.partition("/")[0] for name in names if name.count("/") > 1}
        if all(split_of(top) is None for top in deep):
            return {}
    return splits_among(tops, container.files[0])


def splits_of(base: Path) -> list[str]:
    """List the splits that are in containers."""
    listing = Listing(base)
    return [split for split in SPLIT_WORDS if _find(listing, split)]


def described(base: Path) -> str:
    """Describe the containers of a dataset in words; empty where it has none."""
    listing = Listing(base)
    found: dict[str, Container] = {}
    for split in SPLIT_WORDS:
        container = _find(listing, split)
        if container is not None:
            found[split] = container
    if not found:
        undivided = listing.whole
        if undivided is not None:
            found[undivided.files[0].name] = undivided
    return "; ".join(
        f"{which}: {c.kind}, {len(c.files)} files" for which, c in found.items()
    )


def _usable(file: Path) -> bool:
    # A FIFO or a device counts here, and is refused when it is opened
    there = file.exists() and not file.is_dir()
    return there and not file.name.startswith((".", "cache-"))


def refusal(base: Path, split: str) -> str | None:
    """Say why the files that BASE has in place of a split are not read; None where it has none."""
    for folder in (base, base / split, base.parent):
        if not folder.is_dir():
            continue
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
        # Beside BASE lie other datasets, too: only BASE.tar.gz and the like are its own
        if folder == base.parent:
            names = [name for name in names if name.startswith(f"{base.name}.")]
        unread = [name for name in names if _why_not_read(name)]
        if unread:
            return refused(folder / min(unread))
    return None


def refused(file: Path) -> str | None:
    """Say why a file of this name is not read; None for any other name."""
    why = _why_not_read(file.name)
    return f"{file}: {why}" if why else None


def _why_not_read(name: str) -> str | None:
    for ending, why in REFUSED.items():
        if name.lower().endswith(ending) or f"{ending}-" in name:
            return why
    return None
