"""Whether the images of cached features are still those that were looked at: their contents decide.

No list is read twice. What names an entry is cheap: paths, sizes and the contents of a few files
(`images.contents`). While features are computed, each file is hashed as it is decoded; these hashes
lie beside the features (`Seen`). On a hit a file whose inode and time of change (ctime, which no
program can set) are as they were is the same file. The others are hashed again: all of them where
they are few, and where they are many, as on another disk, a seeded 2% of them.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from backbench.images import contents
from backbench.images.image_list import ArrayList, ImageList
from backbench.runs import atomic
from transfer.batches import Pictures

UNKNOWN = 0  # in the place of a file's hash
COLUMNS, HASH = 3, 2  # inode, ctime in ns, hash; one row per image, int64
Seen = NDArray[np.int64]


def file_hash(images: ImageList, index: int) -> int:
    """64 bits of a file's sha256, as a signed integer that is not UNKNOWN."""
    digest = hashlib.sha256(contents.read(images, index)).digest()
    return int.from_bytes(digest[:8], "little", signed=True) or 1


class HashedPictures(Pictures[None]):
    """Item (no key, index) -> (uint8 (3, H, W), the file's hash); UNKNOWN for rows of an array,
    whose pixels name the entry."""

    def __getitem__(self, item: tuple[None, int]) -> tuple[Tensor, int]:
        picture, index = super().__getitem__(item)
        # Decoded a moment ago, so it comes from memory and not from the disk
        array = isinstance(self.images, ArrayList)
        return picture, UNKNOWN if array else file_hash(self.images, index)


def begun(named: contents.Named) -> Seen:
    """The table of images that are about to be looked at; hashes are filled in as they come."""
    out = np.full((len(named.inodes), COLUMNS), UNKNOWN, dtype=np.int64)
    out[:, 0], out[:, 1] = named.inodes, named.changed
    return out


def changed(images: ImageList, named: contents.Named, seen: Seen) -> str | None:
    """The first file that is found to hold something else than `seen` says, or None.

    Only rows of `seen` that hold a hash are asked; it may be shorter than the list.
    """
    if isinstance(images, ArrayList):
        return None
    now = begun(named)[: len(seen), :2]
    moved = np.flatnonzero((now != seen[:, :2]).any(axis=1) & (seen[:, HASH] != UNKNOWN))
    most = max(contents.SAMPLE, len(images) // 50)  # 2% of what an extraction reads
    if len(moved) > most:
        moved = moved[contents.chosen(len(moved), most)]
    for index in moved.tolist():
        if file_hash(images, index) != seen[index, HASH]:
            return images.paths[index]
    return None


def write(path: Path, seen: Seen) -> None:
    buffer = io.BytesIO()
    np.save(buffer, seen)
    atomic.write_bytes(path, buffer.getvalue())


def read(path: Path, count: int) -> Seen | None:
    """A table of `count` images; None where there is none, or only part of one."""
    try:
        with path.open("rb") as file:
            seen = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    right = isinstance(seen, np.ndarray) and seen.shape == (count, COLUMNS)
    return seen if right and seen.dtype == np.int64 else None
