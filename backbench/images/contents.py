"""Names a list of images by its contents, at the cost of one stat per file and of reading SAMPLE
files.

The name changes with the number, order, paths and sizes of files. Where a share f of them has other
contents, it changes with probability 1 - (1 - f)^SAMPLE: always if it is half of them, in 96 of 100
cases if it is 5%."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backbench.errors import BadInput
from backbench.images.image_list import ArrayList, ImageList
from backbench.runs import atomic, seeding
from backbench.runs.folder import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SAMPLE = 64  # files
# In a run's identity, this key holds the `sample` of each split; in a row's provenance, the `whole`
# of the images that were scored
KEY = "image_contents"
READERS = 8  # threads
_LARGEST_INT64 = 2**63 - 1


@dataclass(frozen=True)
class Named:
    """A list's name, and its files' inodes and ctimes: one stat per file serves both."""

    digest: str
    inodes: Sequence[int] = field(default=(), repr=False)
    changed: Sequence[int] = field(default=(), repr=False)  # ctimes, ns


def named(images: ImageList) -> Named:
    """Name a list by paths, sizes and the contents of SAMPLE files; an array by all its pixels."""
    sha = hashlib.sha256("\n".join(images.paths).encode(errors="surrogateescape"))
    if isinstance(images, ArrayList):
        sha.update(images.pixels.tobytes())
        return Named(sha.hexdigest(), [0] * len(images), [0] * len(images))
    # Features are kept under this name. Of images other than JPEG, some are read as other pixels than
    # in the first versions, whose features must not be found
    if not all(path.lower().endswith((".jpg", ".jpeg")) for path in images.paths):
        sha.update(b"\npixels 2")
    stamps = list(images.stamps())
    sha.update("".join(f"\n{stamp.size}" for stamp in stamps).encode())
    sha.update(sample(images).encode())
    # An inode may be any number of 64 bits; the cache keeps signed ones
    inodes = [stamp.inode & _LARGEST_INT64 for stamp in stamps]
    return Named(sha.hexdigest(), inodes, [stamp.changed for stamp in stamps])


def sample(images: ImageList) -> str:
    """Return 16 hex digits of the contents of SAMPLE images, always the same ones."""
    files = images.files
    sha = hashlib.sha256()
    for i in chosen(len(files), SAMPLE):
        # An image that cannot be read is named by whoever needs it
        with contextlib.suppress(BadInput):
            sha.update(hashlib.sha256(files.read(i)).digest())
    return sha.hexdigest()[:16]


def whole(images: ImageList) -> str:
    """Return 16 hex digits of all images' contents, in order.

    Every file is read once. The result is cached by paths, sizes, inodes, ctimes (which no program
    can set) and places in containers."""
    if isinstance(images, ArrayList):
        return hashlib.sha256(images.pixels.tobytes()).hexdigest()[:16]
    files = images.files
    # 1. The same files as before?
    about = hashlib.sha256()
    for path, stamp in zip(files.paths, files.stamps()):
        place: object = ""
        if isinstance(stamp.place, tuple):
            # Without the device, which comes first: its number differs between machines
            place = stamp.place[1:]
        line = f"{path}\n{stamp.size} {stamp.inode} {stamp.changed}{place}\n"
        about.update(line.encode(errors="surrogateescape"))
    known = cache_folder() / "contents" / about.hexdigest()[:32]
    with contextlib.suppress(OSError):
        kept = known.read_text()
        if re.fullmatch("[0-9a-f]{16}", kept):
            return kept
    # 2. Each file's own digest, in the order of the list
    sha = hashlib.sha256()

    def digest_of(index: int) -> bytes:
        return hashlib.sha256(files.read(index)).digest()

    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        for one in pool.map(digest_of, range(len(files))):
            sha.update(one)
    digest = sha.hexdigest()[:16]
    with contextlib.suppress(OSError):  # what cannot be kept is read again
        atomic.write_text(known, digest)
    return digest


def of_splits(found: Iterable[tuple[str, ImageList]]) -> dict[str, str]:
    """Return, by split, the `sample` of its images."""
    return {name: sample(images) for name, images in found}


def chosen(count: int, most: int) -> list[int]:
    """Choose at most `most` of 0..count-1, the same ones every time, in order."""
    import torch

    order = torch.randperm(count, generator=seeding.generator(0, "contents", count))
    return sorted(order[:most].tolist())
