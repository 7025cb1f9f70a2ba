"""Checks that all files of a dataset exist, and that no two splits share a file or an image.

This costs one system call per file; contents are read only of files of equal size, and only where the
same files were not compared before."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shlex
import time
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from backbench.datasets.splits import Splits
from backbench.errors import BadInput
from backbench.images.image_list import ArrayList, ImageList
from backbench.runs import atomic
from backbench.runs.folder import cache_folder
from backbench.runs.run_progress import QUIET_SECONDS, Progress

AT_ONCE = 1000  # files between two looks at the clock
READERS = 8  # threads
BUSY = 0.5  # share of the processor in the time of reading; below it, the disk is waited for
NONE_SHARED = "no test image is in train or val\n"


@dataclass(frozen=True)
class Looked:
    """Holds what a look at all files has told."""

    # By split, in the order of its images: their bytes, then their files' inodes and ctimes
    sizes: Mapping[str, array[int]]
    inodes: Mapping[str, array[int]]
    changed: Mapping[str, array[int]]


class Entry(NamedTuple):
    """One image of the two lists that are compared."""

    images: ImageList
    place: int  # in the list


def look(dataset: str, splits: Splits) -> Looked:
    """Look at every file once. BadInput names a missing file, and one that is in two splits."""
    total = sum(len(images) for _, images in splits.items())
    progress = Progress(
        None, total, f"{dataset}: looking for files", unit="file", after=QUIET_SECONDS
    )
    # Inode, ctime and place -> the split that has the image
    home: dict[object, str] = {}
    sizes = {name: array("q") for name, _ in splits.items()}
    inodes = {name: array("Q") for name in sizes}
    changed = {name: array("q") for name in sizes}
    for name, images in splits.items():
        for index, (path, stamp) in enumerate(zip(images.paths, images.stamps())):
            key = (stamp.inode, stamp.changed, stamp.place)
            first = home.setdefault(key, name)
            if first != name:
                raise BadInput(
                    f"{dataset}: {path} is in {first} and in {name}; remove it from one of them"
                )
            sizes[name].append(stamp.size)
            inodes[name].append(stamp.inode)
            changed[name].append(stamp.changed)
            if index % AT_ONCE == AT_ONCE - 1:
                progress.advance(AT_ONCE)
        progress.advance(len(images) % AT_ONCE)
    return Looked(sizes, inodes, changed)


def refuse_shared(dataset: str, root: Path, splits: Splits, looked: Looked) -> None:
    """Refuse a test image of ROOT/<dataset> whose content is also in train or val.

    That there is none is kept in $BACKBENCH_CACHE/compared: the same files are compared once."""
    if any(isinstance(images, ArrayList) for _, images in splits.items()):
        return
    kept = cache_folder() / "compared" / _digest(splits, looked)[:32]
    with contextlib.suppress(OSError):
        if kept.read_text() == NONE_SHARED:
            return
    shared = same_files(splits, looked)
    if shared:
        tested, trained = next(iter(shared.items()))
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        check = ["backbench", "data", "check", dataset, "--data", str(root)]
        raise BadInput(
            f"{dataset}: the test image {tested} is also in training data as {trained}{more};"
            f" remove it from one (`{shlex.join(check)} --copies FILE` lists all)"
        )
    # What cannot be kept is compared again the next time
    with contextlib.suppress(OSError):
        atomic.write_text(kept, NONE_SHARED)


def same_files(splits: Splits, looked: Looked) -> dict[str, str]:
    """Return test image -> an image of train or val whose file has the same bytes."""
    found: dict[str, str] = {}
    for other, images in (("train", splits.train), ("val", splits.val)):
        pairs = shared_content(
            splits.test, looked.sizes["test"], images, looked.sizes[other]
        )
        for tested, labelled in pairs:
            found.setdefault(tested, labelled)
    return found


def _digest(splits: Splits, looked: Looked) -> str:
    """Name the test images and those of train and val together, whichever a seed held out.

    The name is another one as soon as an image comes, goes or is written to: that sets its ctime."""
    import numpy as np

    sha = hashlib.sha256()
    for names in (("test",), ("train", "val")):
        columns = []
        for values in (looked.sizes, looked.inodes, looked.changed):
            joined = np.concatenate(
                [np.frombuffer(values[name], "u8") for name in names]
            )
            columns.append(joined)
        # Images in one container share its inode and ctime
        paths = itertools.chain.from_iterable(
            getattr(splits, name).paths for name in names
        )
        checksums = [
            zlib.crc32(path.encode(errors="surrogateescape")) for path in paths
        ]
        columns.append(np.array(checksums, "u8"))
        order = np.lexsort(columns)
        for column in columns:
            sha.update(column[order].tobytes())
        sha.update(b"then")
    return sha.hexdigest()


def shared_content(
    a: ImageList, sizes_a: array[int], b: ImageList, sizes_b: array[int]
) -> list[tuple[str, str]]:
    """Return pairs (path in a, path in b) of files with the same bytes.

    There are three tests, each dearer than the one before, and made only of files that the one
    before could not tell apart."""
    # 1. Sizes are known, so a file needs no reading if its size is in one of the lists only
    alike: dict[int, list[Entry]] = {size: [] for size in set(sizes_a) & set(sizes_b)}
    for images, sizes in ((a, sizes_a), (b, sizes_b)):
        for index, size in enumerate(sizes):
            if size in alike:
                alike[size].append(Entry(images, index))
    total = sum(len(entries) for entries in alike.values())
    progress = Progress(
        None,
        total,
        f"{a.root}: comparing files of equal size",
        unit="file",
        after=QUIET_SECONDS,
    )
    out: list[tuple[int, int]] = []
    with ThreadPoolExecutor(READERS) as pool:
        readers = Readers(pool)
        for entries in _batches(alike.values()):
            # 2. The first and last 4 KiB tell nearly all pictures apart
            for equal_ends in _grouped(entries, _ends, readers, a, b):
                # 3. The whole content decides
                for equal in _grouped(equal_ends, _content, readers, a, b):
                    in_a = [entry.place for entry in equal if entry.images is a]
                    in_b = [entry.place for entry in equal if entry.images is b]
                    # One partner is enough to name
                    out += [(index, in_b[0]) for index in in_a]
            progress.advance(len(entries))
    return [(a.paths[i], b.paths[j]) for i, j in sorted(out)]


def _batches(groups: Iterable[Sequence[Entry]]) -> Iterator[list[Entry]]:
    """Join whole groups to lists of at least AT_ONCE images, which are read side by side."""
    batch: list[Entry] = []
    for group in groups:
        batch += group
        if len(batch) >= AT_ONCE:
            yield batch
            batch = []
    yield batch


def _ends(entry: Entry) -> bytes:
    return entry.images.ends(entry.place)


def _content(entry: Entry) -> bytes:
    return entry.images.read(entry.place)


class Readers:
    """Reads images one by one, and side by side from the first time that reading waits for the disk.

    Threads that find all files in memory wait for each other instead, which takes longer."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool
        self.waits = False

    def digests(
        self, entries: Sequence[Entry], part: Callable[[Entry], bytes]
    ) -> list[bytes]:
        """Return the digest of each image's `part`, in order."""

        def digests_of(some: Sequence[Entry]) -> list[bytes]:
            return [hashlib.sha256(part(entry)).digest() for entry in some]

        # A slice for each thread, as handing over single files would cost more than reading them
        each = -(-len(entries) // READERS) or 1
        slices = [entries[i : i + each] for i in range(0, len(entries), each)]
        found: list[bytes] = []
        while slices and not self.waits:
            begin = time.perf_counter()
            busy = time.process_time()
            found += digests_of(slices.pop(0))
            busy = time.process_time() - busy
            self.waits = busy < BUSY * (time.perf_counter() - begin)
        for digests in self.pool.map(digests_of, slices):
            found += digests
        return found


def _grouped(
    entries: Sequence[Entry],
    part: Callable[[Entry], bytes],
    readers: Readers,
    a: ImageList,
    b: ImageList,
) -> list[list[Entry]]:
    """Group images by their `part`; keep the groups with images of both `a` and `b`."""
    groups: dict[bytes, list[Entry]] = defaultdict(list)
    for entry, digest in zip(entries, readers.digests(entries, part), strict=True):
        groups[digest].append(entry)
    return [
        group
        for group in groups.values()
        if any(entry.images is a for entry in group)
        and any(entry.images is b for entry in group)
    ]
